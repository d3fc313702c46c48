"""Throughput of many requests at once, side by side: plain batched decoding, static lengths, the scheduler, `generate()`.

Owns: running the methods in turn at each number of requests, ratios. Does not own: the engine, policies, printing, drawing.
Units: seconds, tokens per second; τ counts tokens committed for one request in one step (paper eq. 1).

`plain` is the engine without a drafter, with the same linear layers; `padded` is `generate()` on a left-padded batch as
transformers has it. A wave is a handful of prompts that every method decodes before the next wave comes, so that a slow
moment of the machine touches all alike.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..decoding.stats import synchronize
from ..decoding.tuned_pair import tuned
from ..engine.batch_policy_of import for_many
from ..engine.engine import BatchEngine
from ..engine.profiling import batch_rates_of
from ..engine.stats import StepRecord
from ..loading.chat_template import encode_messages
from ..loading.pairs import Target
from ..model.modeling_dspark import DSparkDraftModel
from .completion import DecodingOptions, check_length, sampling_settings
from .policy_names import OWN, make_policy
from .prompt_sets import Conversation

PADDED, PLAIN, DSPARK = "padded", "plain", "dspark"
_FEWEST = 3  # prompts of a wave: one of each domain of ours


@dataclass(frozen=True)
class Wave:
    """One method's turn at one wave. texts: new tokens of each prompt. steps: those of the steady state, in which every place was
    taken; none for `padded`."""

    texts: list[list[int]]
    seconds: float
    steps: list[StepRecord]

    @property
    def rate(self) -> float:
        """Tokens per second, reading the prompts and the emptying end included."""
        return sum(map(len, self.texts)) / self.seconds

    @property
    def steady_rate(self) -> float | None:
        """Tokens per second of the steady state; `None` where there was none."""
        seconds = sum(s.seconds for s in self.steps)
        return sum(s.committed for s in self.steps) / seconds if seconds else None


_STEADY = (
    "steady_tokens_per_second",
    "tokens_per_second_per_user",
    "accept_length",
    "verified_per_request",
    "milliseconds_per_step",
    "steps",
    "identical_share",
)


def _figures(waves: Sequence[Wave], plain: Sequence[Wave] | None, level: int) -> dict[str, Any]:
    """As `--json` writes them: rates are medians over waves, times medians over steps; `None` for a method without steps.

    plain: the same waves decoded plainly, where decoding is greedy.
    """
    result: dict[str, Any] = {"tokens_per_second": statistics.median(w.rate for w in waves)}
    steady = [w.steady_rate for w in waves if w.steady_rate is not None]
    if not steady:
        return result | dict.fromkeys(_STEADY)
    steps = [s for w in waves for s in w.steps]
    turns = sum(s.decoding for s in steps)
    rate = statistics.median(steady)
    parts = {
        "draft": statistics.median(s.draft_seconds for s in steps),
        "verify": statistics.median(s.verify_seconds for s in steps),
        "step": statistics.median(s.seconds for s in steps),
    }
    same = None
    if plain is not None:
        pairs = [pair for w, p in zip(waves, plain) for pair in zip(w.texts, p.texts)]
        same = sum(a == b for a, b in pairs) / len(pairs)
    values = (
        rate,
        rate / level,
        sum(s.committed for s in steps) / turns,
        sum(s.verified for s in steps) / turns,
        {name: 1e3 * seconds for name, seconds in parts.items()},
        len(steps),
        same,
    )
    return result | dict(zip(_STEADY, values, strict=True))


def run_concurrency(
    target: Target,
    drafter: DSparkDraftModel,
    prompts: Sequence[Conversation],
    options: DecodingOptions,
    levels: Sequence[int],
    policies: Sequence[str],
    sweeps: int = 3,
) -> dict[str, Any]:
    """The figures of every method at each number of requests in `levels`, and their ratios.

    A wave has twice as many prompts as places (at least one of each domain), so that others follow those that end.
    """
    model = target.model
    encoded = _mixed(prompts, target)
    for ids in encoded:
        check_length(model, len(ids), options.max_new_tokens)
    batch_rates_of(model, drafter, max(levels))
    names = [PADDED, PLAIN, DSPARK, *(name for name in policies if name != OWN)]
    plan = [(level, sweep) for sweep in range(sweeps) for level in levels]
    waves: dict[int, dict[str, list[Wave]]] = {level: defaultdict(list) for level in levels}
    taken = dict.fromkeys(levels, 0)
    with tqdm(total=len(plan) * len(names), desc="bench", unit="wave", disable=None) as bar:
        for turn, (level, sweep) in enumerate(plan):
            size = max(2 * level, _FEWEST)
            prompt_ids = [encoded[(taken[level] + i) % len(encoded)] for i in range(size)]
            taken[level] += size
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                bar.set_postfix_str(f"{level} at once, {name}")
                waves[level][name].append(_run(name, model, drafter, prompt_ids, options, level, sweep))
                bar.update()
    greedy = options.temperature == 0
    figures = {
        level: {name: _figures(of[name], of[PLAIN] if greedy else None, level) for name in names}
        for level, of in waves.items()
    }
    return {"levels": figures, "ratios": {level: _ratios(waves[level]) for level in levels}}


def _mixed(prompts: Sequence[Conversation], target: Target) -> list[list[int]]:
    """Token ids of the prompts, their domains taking turns."""
    by_domain: dict[str, list[list[int]]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(encode_messages(target.tokenizer, prompt.messages))
    longest = max(map(len, by_domain.values()))
    return [ids[i] for i in range(longest) for ids in by_domain.values() if i < len(ids)]


def _run(
    name: str,
    model: PreTrainedModel,
    drafter: DSparkDraftModel,
    prompt_ids: Sequence[list[int]],
    options: DecodingOptions,
    level: int,
    sweep: int,
) -> Wave:
    """Decode one wave with one method."""
    if name == PADDED:
        start = time.perf_counter()
        batches = [prompt_ids[at : at + level] for at in range(0, len(prompt_ids), level)]
        texts = [text for batch in batches for text in _padded(model, batch, options)]
        return Wave(texts, time.perf_counter() - start, [])
    if name == PLAIN:
        with torch.no_grad(), tuned(model, drafter, of_drafter=False):
            return _decode(BatchEngine(model, max_sequences=level), prompt_ids, options, level, sweep)
    policy = None if name == DSPARK else for_many(make_policy(name, model, drafter))
    engine = BatchEngine(model, drafter, max_sequences=level, policy=policy)
    return _decode(engine, prompt_ids, options, level, sweep)


def _decode(
    engine: BatchEngine, prompt_ids: Sequence[list[int]], options: DecodingOptions, level: int, sweep: int
) -> Wave:
    settings = {"max_new_tokens": options.max_new_tokens} | sampling_settings(options)
    start = time.perf_counter()
    for i, ids in enumerate(prompt_ids):
        engine.add(ids, seed=options.seed + 1000 * sweep + i, **settings)
    outputs = {output.id: output for output in engine.run()}
    seconds = time.perf_counter() - start
    for output in outputs.values():
        if output.error is not None:
            raise output.error
    steps = [s for s in engine.stats.history if s.decoding == level and not s.reading]
    return Wave([outputs[i].token_ids for i in sorted(outputs)], seconds, steps)


def _padded(model: PreTrainedModel, wave: Sequence[list[int]], options: DecodingOptions) -> list[list[int]]:
    """`generate()` on a left-padded batch; new tokens up to the end of each text."""
    longest = max(map(len, wave))
    stops = model.generation_config.eos_token_id
    ends = {stops} if isinstance(stops, int) else set(stops or ())
    pad = model.generation_config.pad_token_id
    pad = next(iter(ends), 0) if pad is None else pad
    ids = torch.full((len(wave), longest), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(wave):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    torch.manual_seed(options.seed)
    output = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=options.max_new_tokens,
        pad_token_id=pad,
        **sampling_settings(options),
    )
    synchronize(model.device)
    texts = []
    for row in output[:, longest:].tolist():
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        texts.append(row[:stop])
    return texts


def _ratios(waves: dict[str, list[Wave]]) -> dict[str, Any]:
    """The scheduler against plain batched decoding, the best static choice (plain included) and the padded batch.

    Medians over waves of the ratio within a wave: in the steady state, but against the padded batch, which has none, of
    all tokens and seconds.
    """

    def steady(name: str) -> float | None:
        pairs = [(ours.steady_rate, other.steady_rate) for ours, other in zip(waves[DSPARK], waves[name])]
        ratios = [a / b for a, b in pairs if a is not None and b is not None]
        return statistics.median(ratios) if ratios else None

    over = {name: r for name in waves if name == PLAIN or name.startswith("fixed:") if (r := steady(name)) is not None}
    if PLAIN not in over:
        return {}
    best = min(over, key=lambda name: over[name])
    padded = [(d.rate / p.rate, e.rate / p.rate) for d, e, p in zip(waves[DSPARK], waves[PLAIN], waves[PADDED])]
    return {
        "over_plain": over[PLAIN],
        "best_static": best,
        "over_best_static": over[best],
        "over_padded": statistics.median(ours for ours, _ in padded),
        "plain_over_padded": statistics.median(plain for _, plain in padded),
    }
