"""Speed side by side in one run: one request at a time (`run_bench`), and many at once (`run_concurrency`).

Units: seconds, tokens per second; τ counts tokens committed per round, bonus token included (paper eq. 1).

One at a time, `plain` is `generate()` as it is; `plain_tuned` is the same with all that our loop does to the target's forward
(linear layers, attention, cache, inference mode), so that the gain of drafting is not mistaken for theirs; `dspark` is the
drafter as it is set, `prompt_lookup` transformers' own. At once, `plain` is the engine without a drafter, with the same linear
layers; `padded` is `generate()` on a left-padded batch as transformers has it.

The order of the methods rotates, and all of them decode the same prompts before the next come, so that a slow moment of the
machine touches all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from ..decoding.attention import grouped_attention
from ..decoding.compat import CACHE_ARGUMENT
from ..decoding.kv_cache import grow_in_place, ordinary_buffers
from ..decoding.profiling import ProfilePlan, measure_step_rates, step_rates_of
from ..decoding.statistics import GenerationStats, synchronize
from ..decoding.tuned_pair import tuned
from ..engine.engine import BatchEngine
from ..loading.chat_template import encode_messages
from ..loading.pairs import Target
from ..model.modeling_dspark import DSparkDraftModel
from ..scheduling.policy import RoundRecord
from .completion import OWN, check_length, make_policy, timed_generate, using_policy
from .prompt_sets import Conversation
from .questions import DecodingOptions

PLAIN, TUNED, PADDED, DSPARK, LOOKUP = "plain", "plain_tuned", "padded", "dspark", "prompt_lookup"
_LOOKUP_TOKENS = 10  # transformers' own example value
_FEWEST = 3  # prompts of a wave: one of each domain of ours
_STEADY = (
    "steady_tokens_per_second",
    "tokens_per_second_per_user",
    "accept_length",
    "verified_per_request",
    "milliseconds_per_step",
    "steps",
    "identical_share",
)


# -- one request at a time -------------------------------------------------------------------------------------------


@dataclass
class MethodRun:
    """One prompt decoded by one method; `stats` and what follows only for DSpark.

    identical is only known where decoding is greedy; first_difference is a position in the answer, margin_there how far apart
    the target's two best scores are at it.
    """

    tokens: int
    seconds: float
    stats: GenerationStats | None = None
    identical: bool | None = None
    first_difference: int | None = None
    margin_there: float | None = None

    @property
    def rate(self) -> float:
        """Tokens per second, the prefill included."""
        return self.tokens / self.seconds


@dataclass
class PromptResult:
    """One prompt under all methods, by their names."""

    domain: str
    runs: dict[str, MethodRun] = field(default_factory=dict)

    def ratio(self, method: str) -> float:
        """Speed of `method` as a multiple of plain decoding's."""
        return self.runs[method].rate / self.runs[PLAIN].rate

    def token_seconds(self, method: str) -> float:
        """Seconds a token, the prefill (measured by a DSpark method) left out."""
        run = self.runs[method]
        stats = run.stats or self.runs[DSPARK].stats
        assert stats is not None
        return (run.seconds - stats.prefill_seconds) / max(run.tokens - 1, 1)

    def ceiling(self, method: str) -> float:
        """Of a DSpark method τ · T_plain(1) / (T_verify + T_draft): the ratio if a round were drafting and verifying alone."""
        stats = self.runs[method].stats
        assert stats is not None, f"{method} is no DSpark method"
        spent = stats.draft_seconds + stats.verify_seconds
        return stats.accept_length * self.token_seconds(PLAIN) * stats.rounds / spent if spent else 1.0

    def share_of_ceiling(self, method: str) -> float:
        """How much of that was reached, prefill left out."""
        return self.token_seconds(PLAIN) / self.token_seconds(method) / self.ceiling(method)


def run_bench(
    target: Target,
    drafter: DSparkDraftModel,
    prompts: Sequence[Conversation],
    options: DecodingOptions,
    policies: Sequence[str] = (),
) -> list[PromptResult]:
    """Decode every prompt with each method in turn, after a warm-up; the order of the methods rotates."""
    model = target.model
    encoded = [(p.domain, encode_messages(target.tokenizer, p.messages)) for p in prompts]
    for _, ids in encoded:
        check_length(model, len(ids), options.max_new_tokens)
    names = [PLAIN, TUNED, DSPARK, LOOKUP, *(name for name in policies if name != OWN)]
    for name in names:
        _answer(name, model, drafter, encoded[0][1], DecodingOptions(max_new_tokens=8))
    results = []
    for i, (domain, ids) in enumerate(tqdm(encoded, desc="bench", unit="prompt")):
        result, texts = PromptResult(domain), {}
        for name in _rotated(names, i):
            drafter.last_generation = None
            texts[name], seconds = _answer(name, model, drafter, ids, options)
            result.runs[name] = MethodRun(len(texts[name]), seconds, drafter.last_generation)
        if options.temperature == 0:
            for name, measured in result.runs.items():
                if measured.stats is not None:
                    compare_answers(model, ids, texts[PLAIN], texts[name], measured)
        results.append(result)
    return results


def _rotated(names: list[str], turn: int) -> list[str]:
    first = turn % len(names)
    return names[first:] + names[:first]


def _answer(
    method: str, model: PreTrainedModel, drafter: DSparkDraftModel, ids: list[int], options: DecodingOptions
) -> tuple[list[int], float]:
    """New tokens and seconds of one prompt; a method of no other name is a policy."""
    if method == PLAIN:
        return timed_generate(model, ids, options)
    if method == LOOKUP:
        return timed_generate(model, ids, options, prompt_lookup_num_tokens=_LOOKUP_TOKENS)
    if method == TUNED:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        grow_in_place(cache)
        with torch.inference_mode(), tuned(model, drafter, of_drafter=False), grouped_attention():
            result = timed_generate(model, ids, options, **{CACHE_ARGUMENT: cache})
        ordinary_buffers(model)
        return result
    with using_policy(OWN if method == DSPARK else method, model, drafter):
        return timed_generate(model, ids, options, assistant_model=drafter)


def step_seconds(model: PreTrainedModel, drafter: DSparkDraftModel) -> dict[str, dict[int, float]]:
    """Seconds of one target forward by its tokens at 128 tokens of context, with stock and with tuned linear layers."""
    plan = ProfilePlan(tuple(range(1, 9)), (128,), sweeps=5, seconds=15.0)
    seconds, options = {}, drafter.options
    before = options.skinny_linear
    try:
        for name, options.skinny_linear in (("stock", False), ("tuned", True)):
            rates = measure_step_rates(model, drafter, plan, description=f"forwards, {name}")
            seconds[name] = dict(zip(rates.rows, rates.target_seconds[0]))
    finally:
        options.skinny_linear = before
    return seconds


@torch.inference_mode()
def compare_answers(
    model: PreTrainedModel, prompt: list[int], plain: list[int], dspark: list[int], run: MethodRun
) -> None:
    """Identical, or the first differing position and how far apart the target's two best scores are there."""
    run.identical = plain == dspark
    if run.identical:
        return
    same = next((i for i, (a, b) in enumerate(zip(plain, dspark)) if a != b), min(len(plain), len(dspark)))
    text = torch.tensor([prompt + plain[:same]], device=model.device)
    best = model(input_ids=text, logits_to_keep=1).logits[0, -1].float().topk(2).values
    run.first_difference, run.margin_there = same, float(best[0] - best[1])


def summarise(results: Sequence[PromptResult]) -> dict[str, Any]:
    """The figures by domain and over all, as `--json` writes them."""
    domains = list(dict.fromkeys(r.domain for r in results))
    summary = {name: _domain([r for r in results if r.domain == name]) for name in domains}
    everything = _domain(results)
    for method, figures in everything.items():
        if method != PLAIN:
            figures["macro_speedup"] = statistics.fmean(summary[d][method]["speedup"] for d in domains)
    return {"domains": summary | {"all": everything}, "prompts": [_verdicts(r) for r in results]}


def _domain(results: Sequence[PromptResult]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for method in results[0].runs:
        runs = [r.runs[method] for r in results]
        figures[method] = {"tokens_per_second": sum(r.tokens for r in runs) / sum(r.seconds for r in runs)}
        if method != PLAIN:
            figures[method]["speedup"] = statistics.median(r.ratio(method) for r in results)
            figures[method]["worst_speedup"] = min(r.ratio(method) for r in results)
        if stats := [r.stats for r in runs if r.stats is not None]:
            same = [r.identical for r in runs]
            figures[method] |= _sums(stats) | {
                "identical_share": None if same[0] is None else sum(map(bool, same)) / len(same),
                "ceiling": statistics.median(r.ceiling(method) for r in results),
                "share_of_ceiling": statistics.median(r.share_of_ceiling(method) for r in results),
            }
    return figures


def _sums(stats: Sequence[GenerationStats]) -> dict[str, Any]:
    """Figures of all rounds of some generations."""

    def total(name: str) -> Any:
        return sum(getattr(s, name) for s in stats)

    rounds, copied = max(total("rounds"), 1), total("copied")
    seconds = {
        part: total(f"{part}_seconds") for part in ("draft", "verify", "other", "prefill", "scheduling", "total")
    }
    whole, decoding = seconds["total"] or 1.0, seconds.pop("total") - seconds["prefill"]
    verified = [sum(of_position) for of_position in zip(*(s.verified for s in stats))]
    accepted = [sum(of_position) for of_position in zip(*(s.accepted for s in stats))]
    return {
        "policy": stats[0].policy,
        "rounds": total("rounds"),
        "accept_length": (total("new_tokens") - len(stats)) / rounds if total("rounds") else 1.0,
        "verified_per_round": (sum(verified) + copied) / rounds,
        "copied_share": total("copied_rounds") / rounds,
        "copied_acceptance": total("copied_accepted") / copied if copied else None,
        "parked_share": total("parked_rounds") / rounds,
        "acceptance_by_position": [a / v if v else None for a, v in zip(accepted, verified)],
        "time_share": {part: spent / whole for part, spent in seconds.items() if part != "scheduling"},
        "milliseconds_per_round": {
            part: 1e3 * spent / rounds for part, spent in (seconds | {"total": decoding}).items() if part != "prefill"
        },
    }


def _verdicts(result: PromptResult) -> dict[str, Any]:
    """One prompt's record: the drafter's own policy in full, the speed of every method."""
    dspark = result.runs[DSPARK]
    differences = {
        name: {"first_difference": run.first_difference, "margin_there": run.margin_there}
        for name, run in result.runs.items()
    }
    return {
        "domain": result.domain,
        "tokens": {name: run.tokens for name, run in result.runs.items()},
        "seconds": {name: run.seconds for name, run in result.runs.items()},
        "speedup": result.ratio(DSPARK),
        "accept_length": None if dspark.stats is None else dspark.stats.accept_length,
        "verdict": {True: "identical", False: "different", None: "sampled"}[dspark.identical],
        **differences[DSPARK],
        "different": {name: found for name, found in differences.items() if result.runs[name].identical is False},
    }


# -- many requests at once -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wave:
    """One method's turn at one wave. texts: new tokens of each prompt. steps: those of the steady state, in which every slot was
    taken; none for `padded`."""

    texts: list[list[int]]
    seconds: float
    steps: list[RoundRecord]

    @property
    def rate(self) -> float:
        """Tokens per second, reading the prompts and the emptying end included."""
        return sum(map(len, self.texts)) / self.seconds

    @property
    def steady_rate(self) -> float | None:
        """Tokens per second of the steady state; `None` where there was none."""
        seconds = sum(s.seconds for s in self.steps)
        return sum(s.committed for s in self.steps) / seconds if seconds else None


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

    A wave has twice as many prompts as slots (at least one of each domain), so that others follow those that end.
    """
    model = target.model
    encoded = _mixed(prompts, target)
    for ids in encoded:
        check_length(model, len(ids), options.max_new_tokens)
    step_rates_of(model, drafter, max(levels))
    names = [PADDED, PLAIN, DSPARK, *(name for name in policies if name != OWN)]
    plan = [(level, sweep) for sweep in range(sweeps) for level in levels]
    waves: dict[int, dict[str, list[Wave]]] = {level: {name: [] for name in names} for level in levels}
    with tqdm(total=len(plan) * len(names), desc="bench", unit="wave", disable=None) as bar:
        for turn, (level, sweep) in enumerate(plan):
            size = max(2 * level, _FEWEST)
            prompt_ids = [encoded[(sweep * size + i) % len(encoded)] for i in range(size)]
            for name in _rotated(names, turn):
                bar.set_postfix_str(f"{level} at once, {name}")
                waves[level][name].append(_wave(name, model, drafter, prompt_ids, options, level, sweep))
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


def _wave(
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
    policy = None if name == DSPARK else make_policy(name, model, drafter)
    engine = BatchEngine(model, drafter, max_sequences=level, policy=policy)
    return _decode(engine, prompt_ids, options, level, sweep)


def _decode(
    engine: BatchEngine, prompt_ids: Sequence[list[int]], options: DecodingOptions, level: int, sweep: int
) -> Wave:
    start = time.perf_counter()
    for i, ids in enumerate(prompt_ids):
        engine.add(ids, seed=options.seed + 1000 * sweep + i, **options.arguments)
    outputs = sorted(engine.run(), key=lambda output: output.id)
    seconds = time.perf_counter() - start
    for output in outputs:
        if output.error is not None:
            raise output.error
    steps = [s for s in engine.stats.history if s.decoding == level and not s.reading]
    return Wave([output.token_ids for output in outputs], seconds, steps)


def _padded(model: PreTrainedModel, wave: Sequence[list[int]], options: DecodingOptions) -> list[list[int]]:
    """`generate()` on a left-padded batch; new tokens up to the end of each text."""
    stops, pad = model.generation_config.eos_token_id, model.generation_config.pad_token_id
    ends = {stops} if isinstance(stops, int) else set(stops or ())
    pad = next(iter(ends), 0) if pad is None else pad
    prompts = [torch.tensor(ids, device=model.device) for ids in wave]
    ids = pad_sequence(prompts, batch_first=True, padding_value=pad, padding_side="left")
    mask = pad_sequence(list(map(torch.ones_like, prompts)), batch_first=True, padding_side="left")
    torch.manual_seed(options.seed)
    output = model.generate(ids, attention_mask=mask, pad_token_id=pad, **options.arguments)
    synchronize(model.device)
    texts = []
    for row in output[:, ids.shape[1] :].tolist():
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        texts.append(row[:stop])
    return texts


def _figures(waves: Sequence[Wave], plain: Sequence[Wave] | None, level: int) -> dict[str, Any]:
    """As `--json` writes them: rates are medians over waves, times medians over steps; `None` for a method without steps.

    plain: the same waves decoded plainly, where decoding is greedy.
    """
    figures: dict[str, Any] = {"tokens_per_second": statistics.median(w.rate for w in waves)}
    steps = [s for w in waves for s in w.steps]
    if not steps:
        return figures | dict.fromkeys(_STEADY)
    steady = statistics.median(rate for w in waves if (rate := w.steady_rate) is not None)
    slots = sum(s.decoding for s in steps)
    same = None
    if plain is not None:
        pairs = [pair for w, p in zip(waves, plain) for pair in zip(w.texts, p.texts)]
        same = sum(a == b for a, b in pairs) / len(pairs)
    times = {"draft": "draft_seconds", "verify": "verify_seconds", "step": "seconds"}
    values = (
        steady,
        steady / level,
        sum(s.committed for s in steps) / slots,
        sum(s.verified for s in steps) / slots,
        {part: 1e3 * statistics.median(getattr(s, name) for s in steps) for part, name in times.items()},
        len(steps),
        same,
    )
    return figures | dict(zip(_STEADY, values, strict=True))


def _ratios(waves: dict[str, list[Wave]]) -> dict[str, Any]:
    """The scheduler against plain batched decoding, the best static choice (plain included) and the padded batch.

    Medians over waves of the ratio within a wave: in the steady state, but against the padded batch, which has none, of
    all tokens and seconds.
    """
    over = {}
    for name in waves:
        if name == PLAIN or name.startswith("fixed:"):
            pairs = [(ours.steady_rate, other.steady_rate) for ours, other in zip(waves[DSPARK], waves[name])]
            if ratios := [a / b for a, b in pairs if a is not None and b is not None]:
                over[name] = statistics.median(ratios)
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
