"""Throughput of many requests at once, side by side: plain batched decoding, static lengths, the scheduler, `generate()`.

Owns: running the methods in turn at each number of requests, ratios. Does not own: the engine, policies, printing, drawing.
Units: seconds, tokens per second; τ counts tokens committed for one request in one step (paper eq. 1).

`plain` is the engine without a drafter, with the same linear layers; `padded` is `generate()` on a left-padded batch as
transformers has it. A wave is a handful of prompts that every method decodes before the next wave comes, so that a slow
moment of the machine touches all alike.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..decoding.linear_layers import tuned
from ..decoding.stats import synchronize
from ..engine.engine import BatchEngine
from ..engine.policies import for_many
from ..engine.profiling import batch_rates_of
from ..engine.sequence import RequestOutput
from ..engine.stats import StepRecord
from ..modeling_dspark import DSparkDraftModel
from ..pairs import Target
from ..texts import encode_messages
from .completion import DecodingOptions, check_length, sampling_settings
from .policies import OWN, make_policy
from .prompt_sets import Conversation

PADDED, PLAIN, DSPARK = "padded", "plain", "dspark"
_FEWEST = 3  # prompts of a wave: one of each domain of ours


@dataclass
class MethodTotals:
    """What one method did at one number of requests, all waves together.

    steps: those in which every place was taken, the steady state. identical: requests whose text was plain decoding's, of
    compared ones; only told where decoding is greedy.
    """

    tokens: int = 0
    seconds: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)
    identical: int = 0
    compared: int = 0

    def figures(self, level: int) -> dict[str, Any]:
        """As `--json` writes them; those of the steady state are `None` for a method without steps."""
        result: dict[str, Any] = {"tokens_per_second": self.tokens / self.seconds}
        seconds = sum(s.seconds for s in self.steps)
        if not seconds:
            return result | dict.fromkeys(_STEADY)
        turns = sum(s.decoding for s in self.steps)
        rate = sum(s.committed for s in self.steps) / seconds
        parts = {
            "draft": sum(s.draft_seconds for s in self.steps),
            "verify": sum(s.verify_seconds for s in self.steps),
            "step": seconds,
        }
        steady = (
            rate,
            rate / level,
            sum(s.committed for s in self.steps) / turns,
            sum(s.verified for s in self.steps) / turns,
            {name: 1e3 * spent / len(self.steps) for name, spent in parts.items()},
            len(self.steps),
            self.identical / self.compared if self.compared else None,
        )
        return result | dict(zip(_STEADY, steady, strict=True))


_STEADY = (
    "steady_tokens_per_second",
    "tokens_per_second_per_user",
    "accept_length",
    "verified_per_request",
    "milliseconds_per_step",
    "steps",
    "identical_share",
)


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
    totals: dict[int, dict[str, MethodTotals]] = {level: defaultdict(MethodTotals) for level in levels}
    taken = dict.fromkeys(levels, 0)
    with tqdm(total=len(plan) * len(names), desc="bench", unit="wave", disable=None) as bar:
        for turn, (level, sweep) in enumerate(plan):
            size = max(2 * level, _FEWEST)
            wave = [encoded[(taken[level] + i) % len(encoded)] for i in range(size)]
            taken[level] += size
            shift = turn % len(names)
            texts: dict[str, list[list[int]]] = {}
            for name in names[shift:] + names[:shift]:
                bar.set_postfix_str(f"{level} at once, {name}")
                texts[name] = _run(name, model, drafter, wave, options, level, totals[level][name], sweep)
                bar.update()
            if options.temperature == 0:
                for name in names[1:]:
                    totals[level][name].compared += size
                    totals[level][name].identical += sum(a == b for a, b in zip(texts[PLAIN], texts[name]))
    figures = {level: {name: totals[level][name].figures(level) for name in names} for level in levels}
    return {"levels": figures, "ratios": {level: _ratios(figures[level]) for level in levels}}


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
    wave: Sequence[list[int]],
    options: DecodingOptions,
    level: int,
    totals: MethodTotals,
    sweep: int,
) -> list[list[int]]:
    """Decode one wave with one method and add it up; returns the new tokens of each prompt."""
    if name == PADDED:
        start = time.perf_counter()
        texts = [t for at in range(0, len(wave), level) for t in _padded(model, wave[at : at + level], options)]
        totals.seconds += time.perf_counter() - start
        totals.tokens += sum(map(len, texts))
        return texts
    return _with_layers(
        name, model, drafter, lambda engine: _decode(engine, wave, options, level, totals, sweep), level
    )


def _with_layers(
    name: str, model: PreTrainedModel, drafter: DSparkDraftModel, run: Callable[[BatchEngine], Any], level: int
) -> Any:
    if name == PLAIN:
        with torch.no_grad(), tuned(model, drafter, [model]):
            return run(BatchEngine(model, max_sequences=level))
    policy = None if name == DSPARK else for_many(make_policy(name, model, drafter))
    return run(BatchEngine(model, drafter, max_sequences=level, policy=policy))


def _decode(
    engine: BatchEngine,
    wave: Sequence[list[int]],
    options: DecodingOptions,
    level: int,
    totals: MethodTotals,
    sweep: int,
) -> list[list[int]]:
    settings = {"max_new_tokens": options.max_new_tokens} | sampling_settings(options)
    start = time.perf_counter()
    for i, ids in enumerate(wave):
        engine.add(ids, seed=options.seed + 1000 * sweep + i, **settings)
    outputs: dict[int, RequestOutput] = {output.id: output for output in engine.run()}
    totals.seconds += time.perf_counter() - start
    for output in outputs.values():
        if output.error is not None:
            raise output.error
    texts = [outputs[i].token_ids for i in sorted(outputs)]
    totals.tokens += sum(map(len, texts))
    totals.steps += [s for s in engine.stats.history if s.decoding == level and not s.reading]
    return texts


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


def _ratios(figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The scheduler against plain batched decoding, the best static choice (plain included) and the padded batch.

    In the steady state, but against the padded batch, which has none, by all tokens and seconds.
    """
    steady = {n: f["steady_tokens_per_second"] for n, f in figures.items() if f["steady_tokens_per_second"] is not None}
    static = {n: rate for n, rate in steady.items() if n == PLAIN or n.startswith("fixed:")}
    if DSPARK not in steady or PLAIN not in steady:
        return {}
    best = max(static, key=lambda name: static[name])
    return {
        "over_plain": steady[DSPARK] / steady[PLAIN],
        "best_static": best,
        "over_best_static": steady[DSPARK] / static[best],
        "over_padded": figures[DSPARK]["tokens_per_second"] / figures[PADDED]["tokens_per_second"],
        "plain_over_padded": figures[PLAIN]["tokens_per_second"] / figures[PADDED]["tokens_per_second"],
    }
