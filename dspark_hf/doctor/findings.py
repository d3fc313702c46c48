"""What the probe and the step rates mean, in words.

Owns: acceptance, layout, tap offset, rope base, draft vocabulary and speed as checks. Does not own: the probe (`probe`), the
step rates (`scheduling.step_rates`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..scheduling.step_costs import StepRates
from .probe import Comparison, ProbeResult
from .report import FAILED, OK, SKIPPED, WARNING, Check

PROBED = ("acceptance", "anchor layout", "tap offset", "rope base", "draft vocabulary")
_NEXT_TO_NOTHING = 0.1  # accepted tokens of a block: a round then is a plain step that cost a draft
_LOW_COVERAGE, _NO_COVERAGE = 0.85, 0.6
_DEPTH = 256  # context tokens that speed is told for
_KINDS = {
    "layout": ("anchor layout", "sample_from_anchor"),
    "taps": ("tap offset", "target_layer_ids"),
    "rope": ("rope base", "rope_parameters"),
}


def probed(result: ProbeResult) -> list[Check]:
    """The checks of a probe; of several better readings the best one fails, as it may explain the others."""
    best = result.best
    return [_acceptance(result, best), *(_reading(result, kind, best) for kind in _KINDS), _vocabulary(result)]


def _acceptance(result: ProbeResult, best: Comparison | None) -> Check:
    configured = result.configured
    details = {
        "acceptance": configured.acceptance,
        "accepted_tokens": configured.accepted_tokens,
        "accepted_by_drafted": configured.prefix_lengths(),
        "probe_tokens": result.tokens,
    }
    found = (
        f"as configured a block has {configured.accepted_tokens:.2f} tokens accepted (greedy, {result.tokens} tokens of the "
        f"target's answers); a drafted token stands with probability {configured.acceptance:.3f}"
    )
    if configured.accepted_tokens >= _NEXT_TO_NOTHING:
        return Check("acceptance", OK, found, details=details)
    if best is not None:
        return Check("acceptance", FAILED, f"Next to nothing: {found}.", f"Read it as {best.reading.name}.", details)
    return Check(
        "acceptance",
        FAILED,
        f"Next to nothing, under every reading that was tried: {found}.",
        "The drafter is another target's, or its vocabulary or weights are damaged. Use the target it was trained for.",
        details,
    )


def _reading(result: ProbeResult, kind: str, best: Comparison | None) -> Check:
    name, key = _KINDS[kind]
    others = [other for other in result.others if other.reading.kind == kind]
    if not others:
        return Check(name, SKIPPED, "no other reading is possible")
    details = {
        "configured": result.configured.acceptance,
        "others": [
            {
                "reading": other.reading.name,
                "acceptance": other.acceptance,
                "accepted_tokens": other.accepted_tokens,
                "gain": other.gain,
                "standard_error": other.error,
                "better": other.is_better,
            }
            for other in others
        ],
    }
    top = best if best in others else max(others, key=lambda other: other.gain)
    if top is not best and not top.is_better:
        tried = ", ".join(f"{other.reading.name} {other.acceptance:.3f}" for other in others)
        return Check(name, OK, f"{result.configured.acceptance:.3f} as configured; no better: {tried}", details=details)
    found = (
        f"{top.reading.name} fits these weights better: a drafted token stands with probability {top.acceptance:.3f} instead "
        f"of {result.configured.acceptance:.3f} ({top.gain / top.error:.0f} standard errors)."
    )
    if top is best:
        return Check(
            name, FAILED, found, f"Change {key} in the drafter's config, or as from_pretrained({key}=...).", details
        )
    return Check(name, WARNING, found, "Something else is further off: put that right first.", details)


def _vocabulary(result: ProbeResult) -> Check:
    details = {"coverage": result.coverage}
    found = f"holds {result.coverage:.1%} of the tokens of the target's answers"
    if result.coverage >= _LOW_COVERAGE:
        return Check("draft vocabulary", OK, found, details=details)
    advice = "Tokens outside it are never drafted. Check d2t (offsets: target id = draft id + d2t[draft id])."
    return Check("draft vocabulary", FAILED if result.coverage < _NO_COVERAGE else WARNING, found, advice, details)


def speed(rates: StepRates, accepted_by_drafted: Sequence[float]) -> Check:
    """Whether drafting a fixed number of tokens is expected to beat plain decoding with the same layers."""
    plain = 1.0 / rates.cost(1, _DEPTH)
    expected = {
        k: (1.0 + accepted) / rates.round_cost(k, k, k + 1, _DEPTH)
        for k, accepted in enumerate(accepted_by_drafted, start=1)
    }
    best = max(expected, key=expected.__getitem__)
    ratio = expected[best] / plain
    details = {
        "plain_tokens_per_second": plain,
        "draft_tokens": best,
        "tokens_per_second": expected[best],
        "ratio": ratio,
    }
    found = (
        f"{'yes' if ratio > 1 else 'no'}: {best} drafted a round give {expected[best]:.1f} tokens/s where plain decoding gives "
        f"{plain:.1f}, {ratio:.2f}×"
    )
    if ratio > 1:
        return Check("speculation pays", OK, found, details=details)
    return Check("speculation pays", WARNING, found, "Decode plainly on this device, or use a better drafter.", details)
