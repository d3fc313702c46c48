"""What the doctor says: checks, one verdict, as a table and as JSON.

Owns: the records and their layout. Does not own: the checks themselves (`checks`, `examine`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
_STYLES = {OK: "green", WARNING: "yellow", FAILED: "red", SKIPPED: "dim"}


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
        return all(check.status != FAILED for check in self.checks)

    def check(self, name: str) -> Check:
        """The check of that name."""
        return next(check for check in self.checks if check.name == name)

    def to_dict(self) -> dict[str, Any]:
        """For JSON output, which has no infinity and no NaN: they are `None`."""
        return {"target": self.target, "drafter": self.drafter, "healthy": self.is_healthy} | {
            "checks": [_plain(asdict(check)) for check in self.checks]
        }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def report_table(report: Report) -> Table:
    """Check, result, what was found and what to do."""
    table = Table(title=f"{report.drafter} for {report.target}", title_justify="left")
    for heading in ("check", "result", "found", "what to do"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("check", "result"))
    for check in report.checks:
        table.add_row(check.name, Text(check.status, _STYLES[check.status]), Text(check.found), Text(check.advice))
    return table


def verdict(report: Report) -> str:
    """The whole in one line."""
    failed = [check.name for check in report.checks if check.status == FAILED]
    warned = [check.name for check in report.checks if check.status == WARNING]
    if failed:
        return f"Not healthy: {', '.join(failed)}."
    return f"Healthy, but look at {', '.join(warned)}." if warned else "Healthy."
