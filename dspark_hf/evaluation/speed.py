"""Speed side by side: plain decoding, DSpark and transformers' prompt lookup on the same prompts in one run.

Owns: running the three in turn, ratios, the ceiling, the verdict of identity. Does not own: prompts' decoding, printing.
Units: seconds, tokens per second; τ counts tokens committed per round, bonus token included (paper eq. 1).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..decoding.stats import GenerationStats
from ..modeling_dspark import DSparkDraftModel
from ..pairs import Target
from ..texts import encode_messages, messages_of, read_jsonl
from .completion import DecodingOptions, check_length, timed_generate

METHODS = ("plain", "dspark", "prompt_lookup")
_LOOKUP_TOKENS = 10  # transformers' own example value


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt: token ids and the domain it is counted in."""

    domain: str
    input_ids: list[int]


@dataclass
class PromptResult:
    """One prompt under all methods: new tokens and seconds by method, and what DSpark did."""

    domain: str
    tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    stats: GenerationStats = field(default_factory=lambda: GenerationStats(0))
    one_token_seconds: float = 0.0  # of plain decoding, prefill left out
    identical: bool | None = None  # only compared where decoding is greedy
    first_difference: int | None = None
    margin_there: float | None = None

    def rate(self, method: str) -> float:
        """Tokens per second."""
        return self.tokens[method] / self.seconds[method]

    def ratio(self, method: str) -> float:
        """Speed of `method` as a multiple of plain decoding's."""
        return self.rate(method) / self.rate("plain")

    @property
    def ceiling(self) -> float:
        """τ · T_plain(1) / (T_verify + T_draft): the ratio if a round were nothing but drafting and verifying."""
        stats = self.stats
        spent = stats.draft_seconds + stats.verify_seconds
        return stats.accept_length * self.one_token_seconds * stats.rounds / spent if spent else 1.0


def bench_prompts(target: Target, file: Path | None = None, limit: int | None = None) -> list[BenchPrompt]:
    """Our own prompt set (eight of each domain), or the prompts of a JSONL file; the first `limit` of each domain."""
    path = file
    if path is None:
        path = Path(str(resources.files("dspark_hf.evaluation") / "prompts" / "bench.jsonl"))
    counts: dict[str, int] = {}
    prompts = []
    for number, record in read_jsonl(path):
        domain = str(record.get("domain", "all"))
        counts[domain] = counts.get(domain, 0) + 1
        if limit is None or counts[domain] <= limit:
            messages = messages_of(record, f"{path}, line {number}")
            prompts.append(BenchPrompt(domain, encode_messages(target.tokenizer, messages)))
    if not prompts:
        raise ValueError(f"{path}: no prompts in it.")
    return prompts


def run_bench(
    target: Target, drafter: DSparkDraftModel, prompts: Sequence[BenchPrompt], options: DecodingOptions
) -> list[PromptResult]:
    """Decode every prompt with each method in turn, after a warm-up; the order of the methods rotates."""
    model = target.model
    for prompt in prompts:
        check_length(model, len(prompt.input_ids), options.max_new_tokens)
    arguments: dict[str, dict[str, Any]] = {
        "plain": {},
        "dspark": {"assistant_model": drafter},
        "prompt_lookup": {"prompt_lookup_num_tokens": _LOOKUP_TOKENS},
    }
    for method in METHODS:
        timed_generate(model, prompts[0].input_ids, DecodingOptions(max_new_tokens=8), **arguments[method])
    results = []
    for i, prompt in enumerate(tqdm(prompts, desc="bench", unit="prompt")):
        result, texts = PromptResult(prompt.domain), {}
        for method in METHODS[i % 3 :] + METHODS[: i % 3]:
            texts[method], result.seconds[method] = timed_generate(
                model, prompt.input_ids, options, **arguments[method]
            )
            result.tokens[method] = len(texts[method])
            if method == "dspark":
                result.stats = drafter.last_generation
        prefill = result.stats.prefill_seconds
        result.one_token_seconds = (result.seconds["plain"] - prefill) / max(result.tokens["plain"] - 1, 1)
        if options.temperature == 0:
            _compare(model, prompt.input_ids, texts["plain"], texts["dspark"], result)
        results.append(result)
    return results


@torch.inference_mode()
def _compare(
    model: PreTrainedModel, prompt: list[int], plain: list[int], dspark: list[int], result: PromptResult
) -> None:
    """Identical, or the first differing position and how far apart the target's two best scores are there."""
    result.identical = plain == dspark
    if result.identical:
        return
    same = next((i for i, (a, b) in enumerate(zip(plain, dspark)) if a != b), min(len(plain), len(dspark)))
    text = torch.tensor([prompt + plain[:same]], device=model.device)
    best = model(input_ids=text, logits_to_keep=1).logits[0, -1].float().topk(2).values
    result.first_difference, result.margin_there = same, float(best[0] - best[1])


def summarise(results: Sequence[PromptResult]) -> dict[str, Any]:
    """The figures by domain and over all, as `--json` writes them."""
    domains = list(dict.fromkeys(r.domain for r in results))
    summary = {name: _domain([r for r in results if r.domain == name]) for name in domains}
    everything = _domain(results)
    everything["dspark"]["macro_speedup"] = statistics.fmean(summary[d]["dspark"]["speedup"] for d in domains)
    return {"domains": summary | {"all": everything}, "prompts": [_verdict(r) for r in results]}


def _domain(results: Sequence[PromptResult]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for method in METHODS:
        tokens, seconds = sum(r.tokens[method] for r in results), sum(r.seconds[method] for r in results)
        figures[method] = {"tokens_per_second": tokens / seconds}
        if method != "plain":
            figures[method]["speedup"] = statistics.median(r.ratio(method) for r in results)
    stats = [r.stats for r in results]
    total = sum(s.total_seconds for s in stats) or 1.0
    rounds = sum(s.rounds for s in stats)
    accept_length = sum(s.new_tokens - 1 for s in stats) / rounds if rounds else 1.0
    ceiling = statistics.median(r.ceiling for r in results)
    decode = [(r.seconds["dspark"] - r.stats.prefill_seconds) / max(r.tokens["dspark"] - 1, 1) for r in results]
    reached = statistics.median(r.one_token_seconds / d / r.ceiling for r, d in zip(results, decode))
    length = len(stats[0].verified)
    verified = [sum(s.verified[k] for s in stats) for k in range(length)]
    accepted = [sum(s.accepted[k] for s in stats) for k in range(length)]
    compared = [r.identical for r in results]
    figures["dspark"] |= {
        "accept_length": accept_length,
        "identical_share": None if results[0].identical is None else sum(map(bool, compared)) / len(results),
        "ceiling": ceiling,
        "share_of_ceiling": reached,
        "acceptance_by_position": [a / v if v else None for a, v in zip(accepted, verified)],
        "time_share": {
            "draft": sum(s.draft_seconds for s in stats) / total,
            "verify": sum(s.verify_seconds for s in stats) / total,
            "prefill": sum(s.prefill_seconds for s in stats) / total,
            "other": sum(s.other_seconds for s in stats) / total,
        },
        "milliseconds_per_round": {
            "draft": 1e3 * sum(s.draft_seconds for s in stats) / max(rounds, 1),
            "verify": 1e3 * sum(s.verify_seconds for s in stats) / max(rounds, 1),
            "total": 1e3 * sum(s.total_seconds - s.prefill_seconds for s in stats) / max(rounds, 1),
        },
        "rounds": rounds,
    }
    return figures


def _verdict(result: PromptResult) -> dict[str, Any]:
    return {
        "domain": result.domain,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "speedup": result.ratio("dspark"),
        "accept_length": result.stats.accept_length,
        "verdict": {True: "identical", False: "different", None: "sampled"}[result.identical],
        "first_difference": result.first_difference,
        "margin_there": result.margin_there,
    }
