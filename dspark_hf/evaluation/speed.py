"""Speed side by side: plain decoding, DSpark under one or more policies, and transformers' prompt lookup, in one run.

Owns: running the methods in turn, ratios, the ceiling, the verdict of identity. Does not own: prompts, policies, printing.
Units: seconds, tokens per second; τ counts tokens committed per round, bonus token included (paper eq. 1).

`plain` is `generate()` as it is; `plain_tuned` is the same with all that our loop does to the target's forward (linear layers,
attention, cache, inference mode), so that the gain of drafting is not mistaken for theirs. `dspark` is the drafter as it is set.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from ..decoding.compat import CACHE_ARGUMENT
from ..decoding.profiling import ProfilePlan, measure_step_rates
from ..decoding.quick_forward import grouped_attention, grow_in_place, ordinary_buffers
from ..decoding.stats import GenerationStats
from ..decoding.tuned_pair import tuned
from ..loading.chat_template import encode_messages
from ..loading.pairs import Target
from ..model.modeling_dspark import DSparkDraftModel
from .completion import DecodingOptions, check_length, timed_generate
from .policy_names import OWN, using_policy
from .prompt_sets import Conversation

_LOOKUP_TOKENS = 10  # transformers' own example value


@dataclass
class MethodRun:
    """One prompt decoded by one method; `stats` and what follows only for DSpark.

    identical is only told where decoding is greedy; first_difference is a position in the answer, margin_there how far apart
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
        return self.runs[method].rate / self.runs["plain"].rate

    def stats(self, method: str) -> GenerationStats:
        """What a DSpark method did."""
        stats = self.runs[method].stats
        assert stats is not None, f"{method} is no DSpark method"
        return stats

    @property
    def one_token_seconds(self) -> float:
        """Plain decoding's seconds a token, prefill left out."""
        plain, stats = self.runs["plain"], self.stats("dspark")
        return (plain.seconds - stats.prefill_seconds) / max(plain.tokens - 1, 1)

    def ceiling(self, method: str) -> float:
        """τ · T_plain(1) / (T_verify + T_draft): the ratio if a round were nothing but drafting and verifying."""
        stats = self.stats(method)
        spent = stats.draft_seconds + stats.verify_seconds
        return stats.accept_length * self.one_token_seconds * stats.rounds / spent if spent else 1.0

    def share_of_ceiling(self, method: str) -> float:
        """How much of that was reached, prefill left out."""
        run = self.runs[method]
        per_token = (run.seconds - self.stats(method).prefill_seconds) / max(run.tokens - 1, 1)
        return self.one_token_seconds / per_token / self.ceiling(method)


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
    methods = _methods(model, drafter, policies)
    for run in methods.values():
        run(encoded[0][1], DecodingOptions(max_new_tokens=8))
    results, names = [], list(methods)
    for i, (domain, ids) in enumerate(tqdm(encoded, desc="bench", unit="prompt")):
        result, texts = PromptResult(domain), {}
        for name in names[i % len(names) :] + names[: i % len(names)]:
            drafter.last_generation = None
            texts[name], seconds = methods[name](ids, options)
            result.runs[name] = MethodRun(len(texts[name]), seconds, drafter.last_generation)
        if options.temperature == 0:
            for name, measured in result.runs.items():
                if measured.stats is not None:
                    compare(model, ids, texts["plain"], texts[name], measured)
        results.append(result)
    return results


def _methods(
    model: PreTrainedModel, drafter: DSparkDraftModel, policies: Sequence[str]
) -> dict[str, Callable[[list[int], DecodingOptions], tuple[list[int], float]]]:
    def dspark(policy: str):
        def run(ids: list[int], options: DecodingOptions):
            with using_policy(policy, model, drafter):
                return timed_generate(model, ids, options, assistant_model=drafter)

        return run

    def plain(**arguments: Any):
        return lambda ids, options: timed_generate(model, ids, options, **arguments)

    def plain_tuned(ids: list[int], options: DecodingOptions):
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        grow_in_place(cache)
        with torch.inference_mode(), tuned(model, drafter, of_drafter=False), grouped_attention():
            result = timed_generate(model, ids, options, **{CACHE_ARGUMENT: cache})
        ordinary_buffers(model)
        return result

    methods = {
        "plain": plain(),
        "plain_tuned": plain_tuned,
        "dspark": dspark(OWN),
        "prompt_lookup": plain(prompt_lookup_num_tokens=_LOOKUP_TOKENS),
    }
    return methods | {name: dspark(name) for name in policies if name != OWN}


def step_seconds(model: PreTrainedModel, drafter: DSparkDraftModel) -> dict[str, dict[int, float]]:
    """Seconds of one target forward by its tokens at 128 tokens of context, with stock and with tuned linear layers."""
    plan = ProfilePlan(tuple(range(1, 9)), (128,), sweeps=5, seconds=15.0)
    seconds, before = {}, drafter.skinny_linear
    try:
        for name, drafter.skinny_linear in (("stock", False), ("tuned", True)):
            rates = measure_step_rates(model, drafter, plan, f"forwards, {name}")
            seconds[name] = dict(zip(rates.rows, rates.target_seconds[0]))
    finally:
        drafter.skinny_linear = before
    return seconds


@torch.inference_mode()
def compare(model: PreTrainedModel, prompt: list[int], plain: list[int], dspark: list[int], run: MethodRun) -> None:
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
        if method != "plain":
            figures["macro_speedup"] = statistics.fmean(summary[d][method]["speedup"] for d in domains)
    return {"domains": summary | {"all": everything}, "prompts": [_verdicts(r) for r in results]}


def _domain(results: Sequence[PromptResult]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for method, first in results[0].runs.items():
        runs = [r.runs[method] for r in results]
        figures[method] = {"tokens_per_second": sum(r.tokens for r in runs) / sum(r.seconds for r in runs)}
        if method != "plain":
            figures[method]["speedup"] = statistics.median(r.ratio(method) for r in results)
            figures[method]["worst_speedup"] = min(r.ratio(method) for r in results)
        if first.stats is not None:
            figures[method] |= _dspark_figures(method, results)
    return figures


def _dspark_figures(method: str, results: Sequence[PromptResult]) -> dict[str, Any]:
    runs = [r.runs[method] for r in results]
    stats = [r.stats(method) for r in results]
    total = sum(s.total_seconds for s in stats) or 1.0
    decoding = sum(s.total_seconds - s.prefill_seconds for s in stats) or 1.0
    rounds = sum(s.rounds for s in stats)
    verified = [sum(s.verified[k] for s in stats) for k in range(len(stats[0].verified))]
    accepted = [sum(s.accepted[k] for s in stats) for k in range(len(verified))]
    copied_accepted = sum(s.copied_accepted for s in stats)
    parts = {
        "draft": sum(s.draft_seconds for s in stats),
        "verify": sum(s.verify_seconds for s in stats),
        "other": sum(s.other_seconds for s in stats),
    }
    compared = [r.identical for r in runs]
    return {
        "policy": stats[0].policy,
        "accept_length": sum(s.new_tokens - 1 for s in stats) / rounds if rounds else 1.0,
        "verified_per_round": (sum(verified) + sum(s.copied for s in stats)) / max(rounds, 1),
        "copied_share": sum(s.copied_rounds for s in stats) / max(rounds, 1),
        "copied_acceptance": copied_accepted / copied if (copied := sum(s.copied for s in stats)) else None,
        "parked_share": sum(s.parked_rounds for s in stats) / max(rounds, 1),
        "identical_share": None if compared[0] is None else sum(map(bool, compared)) / len(compared),
        "ceiling": statistics.median(r.ceiling(method) for r in results),
        "share_of_ceiling": statistics.median(r.share_of_ceiling(method) for r in results),
        "acceptance_by_position": [a / v if v else None for a, v in zip(accepted, verified)],
        "time_share": {
            name: seconds / total
            for name, seconds in (parts | {"prefill": sum(s.prefill_seconds for s in stats)}).items()
        },
        "round_share": {name: seconds / decoding for name, seconds in parts.items()}
        | {"scheduling": sum(s.scheduling_seconds for s in stats) / decoding},
        "milliseconds_per_round": {
            name: 1e3 * seconds / max(rounds, 1) for name, seconds in (parts | {"total": decoding}).items()
        },
        "rounds": rounds,
    }


def _verdicts(result: PromptResult) -> dict[str, Any]:
    """One prompt's record: the drafter's own policy in full, the speed of every method."""
    dspark = result.runs["dspark"]
    different = {name: run for name, run in result.runs.items() if run.identical is False}
    return {
        "domain": result.domain,
        "tokens": {name: run.tokens for name, run in result.runs.items()},
        "seconds": {name: run.seconds for name, run in result.runs.items()},
        "speedup": result.ratio("dspark"),
        "accept_length": result.stats("dspark").accept_length,
        "verdict": {True: "identical", False: "different", None: "sampled"}[dspark.identical],
        "first_difference": dspark.first_difference,
        "margin_there": dspark.margin_there,
        "different": {
            name: {"first_difference": r.first_difference, "margin_there": r.margin_there}
            for name, r in different.items()
        },
    }
