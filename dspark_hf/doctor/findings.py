"""What the doctor says: checks with a verdict, as a table and as JSON, and what the probe and the step rates mean in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from ..scheduling.step_costs import StepRates
from .probe import ProbeResult, Reading

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
PROBED = ("acceptance", "anchor layout", "tap offset", "rope base", "draft vocabulary")
SPEED = "speculation pays"
_STYLES = {OK: "green", WARNING: "yellow", FAILED: "red", SKIPPED: "dim"}
_NEXT_TO_NOTHING = 0.1  # accepted tokens of a block: a round then is a plain step that cost a draft
_LOW_COVERAGE, _NO_COVERAGE = 0.85, 0.6
_DEPTH = 256  # context tokens that speed is said for
_KINDS = {
    "layout": ("anchor layout", "sample_from_anchor"),
    "taps": ("tap offset", "target_layer_ids"),
    "rope": ("rope base", "rope_parameters"),
}


@dataclass(frozen=True)
class Check:
    """One thing looked at: `found` in a sentence, `advice` where something is to be done, `details` for programs."""

    name: str
    status: str
    found: str
    advice: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All checks of a pair, in the order in which they were made."""

    target: str
    drafter: str
    checks: list[Check]

    @property
    def is_healthy(self) -> bool:
        """Whether no check failed; warnings are allowed."""
        return not self._named(FAILED)

    def check(self, name: str) -> Check:
        """The check of that name."""
        return next(check for check in self.checks if check.name == name)

    def verdict(self) -> str:
        """The whole in one line."""
        if failed := self._named(FAILED):
            return f"Not healthy: {', '.join(failed)}."
        warned = self._named(WARNING)
        return f"Healthy, but look at {', '.join(warned)}." if warned else "Healthy."

    def to_dict(self) -> dict[str, Any]:
        """For JSON output, which has no infinity and no NaN: they are `None`."""
        checks = [_plain(asdict(check)) for check in self.checks]
        return {"target": self.target, "drafter": self.drafter, "healthy": self.is_healthy, "checks": checks}

    def table(self) -> Table:
        """Check, result, what was found and what to do."""
        table = Table(title=f"{self.drafter} for {self.target}", title_justify="left")
        for heading in ("check", "result", "found", "what to do"):
            table.add_column(heading, overflow="fold", no_wrap=heading in ("check", "result"))
        for check in self.checks:
            table.add_row(check.name, Text(check.status, _STYLES[check.status]), Text(check.found), Text(check.advice))
        return table

    def _named(self, status: str) -> list[str]:
        return [check.name for check in self.checks if check.status == status]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def skipped(names: Sequence[str], why: str) -> list[Check]:
    """Checks that can't be made, or were not asked for."""
    return [Check(name, SKIPPED, why) for name in names]


def probed(result: ProbeResult) -> list[Check]:
    """The checks of a probe; of several better readings the best one fails, as it may explain the others."""
    return [_acceptance(result), *(_reading(result, kind) for kind in _KINDS), _vocabulary(result)]


def _acceptance(result: ProbeResult) -> Check:
    configured = result.configured
    details = {
        "acceptance": configured.acceptance,
        "accepted_tokens": configured.accepted_tokens,
        "accepted_by_drafted": configured.prefix_lengths(),
        "probe_tokens": result.tokens,
    }
    found = (
        f"as configured a block has {configured.accepted_tokens:.2f} tokens accepted (greedy, {result.tokens} tokens of the "
        f"target's answers); a drafted token is accepted with probability {configured.acceptance:.3f}"
    )
    if configured.accepted_tokens >= _NEXT_TO_NOTHING:
        return Check("acceptance", OK, found, details=details)
    if result.best is not None:
        advice = f"Read it as {result.best.name}."
        return Check("acceptance", FAILED, f"Next to nothing: {found}.", advice, details)
    advice = (
        "The drafter is another target's, or its vocabulary or weights are damaged. Use the target it was trained for."
    )
    return Check(
        "acceptance", FAILED, f"Next to nothing, under every reading that was tried: {found}.", advice, details
    )


def _reading(result: ProbeResult, kind: str) -> Check:
    name, key = _KINDS[kind]
    others = [other for other in result.others if other.kind == kind]
    if not others:
        return Check(name, SKIPPED, "no other reading is possible")
    described = [
        {
            "reading": other.name,
            "acceptance": other.acceptance,
            "accepted_tokens": other.accepted_tokens,
            "gain": other.gain,
            "standard_error": other.error,
            "better": other.is_better,
        }
        for other in others
    ]
    now = result.configured.acceptance
    details = {"configured": now, "others": described}
    top: Reading = max(others, key=lambda other: (other is result.best, other.gain))
    if top is not result.best and not top.is_better:
        tried = ", ".join(f"{other.name} {other.acceptance:.3f}" for other in others)
        return Check(name, OK, f"{now:.3f} as configured; no better: {tried}", details=details)
    found = (
        f"{top.name} fits these weights better: a drafted token is accepted with probability {top.acceptance:.3f} instead of "
        f"{now:.3f} ({top.gain / top.error:.0f} standard errors)."
    )
    if top is not result.best:
        return Check(name, WARNING, found, "Something else is further off: put that right first.", details)
    return Check(
        name, FAILED, found, f"Change {key} in the drafter's config, or as from_pretrained({key}=...).", details
    )


def _vocabulary(result: ProbeResult) -> Check:
    name, details = "draft vocabulary", {"coverage": result.coverage}
    found = f"holds {result.coverage:.1%} of the tokens of the target's answers"
    if result.coverage >= _LOW_COVERAGE:
        return Check(name, OK, found, details=details)
    advice = "Tokens outside it are never drafted. Check d2t (offsets: target id = draft id + d2t[draft id])."
    return Check(name, FAILED if result.coverage < _NO_COVERAGE else WARNING, found, advice, details)


def speed_check(rates: StepRates, accepted_by_drafted: Sequence[float]) -> Check:
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
        return Check(SPEED, OK, found, details=details)
    return Check(SPEED, WARNING, found, "Decode plainly on this device, or use a better drafter.", details)
