"""Tables of measured figures. Owns: their layout. Does not own: measuring (`speed`, `acceptance`)."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..scheduling.step_costs import StepRates
from .calibrate import CalibrationReport

_BENCH_COLUMNS = (
    "domain",
    "plain",
    "tuned",
    "×",
    "DSpark",
    "×",
    "lookup",
    "×",
    "τ",
    "draft",
    "verify",
    "other",
    "ceiling",
    "identical",
)


def make_table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=i == 0)
    return table


def bench_table(summary: dict[str, Any]) -> Group:
    """The bench's figures by domain, the policies side by side, and the prompts whose output differed."""
    table = make_table(
        "tokens per second, and speed as a multiple of plain decoding (median of prompts)",
        _BENCH_COLUMNS,
    )
    names = list(summary["domains"])
    for name, figures in summary["domains"].items():
        dspark, tuned, lookup = figures["dspark"], figures["plain_tuned"], figures["prompt_lookup"]
        share, identical = dspark["time_share"], dspark["identical_share"]
        table.add_row(
            name,
            f"{figures['plain']['tokens_per_second']:.1f}",
            f"{tuned['tokens_per_second']:.1f}",
            f"{tuned['speedup']:.2f}",
            f"{dspark['tokens_per_second']:.1f}",
            f"{dspark['speedup']:.2f}",
            f"{lookup['tokens_per_second']:.1f}",
            f"{lookup['speedup']:.2f}",
            f"{dspark['accept_length']:.2f}",
            f"{share['draft']:.0%}",
            f"{share['verify']:.0%}",
            f"{share['other']:.0%}",
            f"{dspark['ceiling']:.2f} ({dspark['share_of_ceiling']:.0%})",
            "-" if identical is None else f"{identical:.0%}",
            end_section=len(names) > 1 and name == names[-2],
        )
    everything = summary["domains"]["all"]
    parts: list[Any] = [table]
    if len([m for m in everything.values() if "policy" in m]) > 1:
        parts.append(_policy_table(summary["domains"]))
    parts.append(
        Text(
            f"macro speed-up of DSpark over plain decoding: {everything['dspark']['macro_speedup']:.2f}×, of plain decoding "
            f"with the same forward of the target: {everything['plain_tuned']['macro_speedup']:.2f}×"
        )
    )
    for name, seconds in summary["step_seconds"].items():
        milliseconds = " ".join(f"{1e3 * s:.0f}" for s in seconds.values())
        parts.append(Text(f"milliseconds of one target forward of 1 to {len(seconds)} tokens, {name}: {milliseconds}"))
    for i, prompt in enumerate(summary["prompts"]):
        for method, place in prompt["different"].items():
            parts.append(
                Text(
                    f"prompt {i + 1} ({prompt['domain']}), {method}: first difference at token {place['first_difference']}, "
                    f"where the target's two best scores are {place['margin_there']:.2g} apart"
                )
            )
    return Group(*parts)


def _policy_table(domains: dict[str, Any]) -> Table:
    """One line a policy; for each domain tokens per second, τ, and verified drafts a round."""
    table = make_table(
        "policies: tok/s · τ · drafts verified a round · rounds parked · copied",
        ("policy", *(name for name in domains)),
    )
    for method, first in domains["all"].items():
        if "policy" not in first and not method.startswith("plain"):
            continue
        cells = []
        for figures in (domains[name][method] for name in domains):
            cell = f"{figures['tokens_per_second']:.1f}"
            if "policy" in figures:
                cell += f" · {figures['accept_length']:.2f} · {figures['verified_per_round']:.2f}"
                cell += f" · {figures['parked_share']:.0%} · {figures['copied_share']:.0%}"
            cells.append(cell)
        table.add_row(f"dspark ({first['policy']})" if method == "dspark" else method, *cells)
    return table


def step_rate_table(rates: StepRates) -> Group:
    """Milliseconds of the target's forward by rows and depth, and what drafting costs."""
    columns = (f"{d} tokens of context" for d in rates.depths)
    table = make_table("milliseconds of one target forward (half the spread)", ("tokens", *columns))
    for i, rows in enumerate(rates.rows):
        cells = (f"{1e3 * m[i]:.1f} (±{5e2 * s[i]:.1f})" for m, s in zip(rates.target_seconds, rates.target_spread))
        table.add_row(str(rows), *cells)
    blocks = ", ".join(f"{1e3 * s:.1f}" for s in rates.block_seconds)
    text = f"drafter: parallel stage for 1 to {len(rates.block_seconds)} tokens {blocks} ms, "
    return Group(table, Text(text + f"one step of the sequential stage {1e3 * rates.draft_step_seconds:.2f} ms"))


def calibration_table(report: CalibrationReport) -> Table:
    """ECE and AUC of the survival at each position, on the rounds that were not fitted on."""
    title = f"survival at temperature {report.temperature:g}: fitted on {report.fit_rounds} rounds, judged on others"
    columns = "position,rounds,reached,ECE before,temperature alone,ECE after,AUC before,AUC after,T,shift"
    table = make_table(title, tuple(columns.split(",")))
    fitted = report.calibration
    for p, temperature, shift in zip(report.positions, fitted.temperatures, fitted.shifts):
        auc = ("-" if a is None else f"{a:.3f}" for a in (p.auc_before, p.auc_after))
        errors = (f"{e:.1%}" for e in (p.ece_before, p.ece_temperatures_alone, p.ece_after))
        counts = str(p.position), str(p.rounds), str(p.reached)
        table.add_row(*counts, *errors, *auc, f"{temperature:.2f}", f"{shift:+.2f}")
    return table


def with_margin(value: float, ends: list[float] | None) -> str:
    """A figure and half the width of its interval, where there is one."""
    return f"{value:.2f}" if ends is None else f"{value:.2f} ±{(ends[1] - ends[0]) / 2:.2f}"


EVALUATION_COLUMNS = ("turns", "failed", "tok/s", "τ", "rate", "drafted", "accepted", "wasted", "parked")


def evaluation_rows(groups: dict[str, Any]) -> list[list[str]]:
    """One line a group: its name, `EVALUATION_COLUMNS`, then conditional acceptance by position."""
    rows = []
    for name, g in groups.items():
        rate = "-" if g["acceptance_rate"] is None else f"{g['acceptance_rate']:.0%}"
        row = [
            name,
            str(g["samples"]),
            str(g["failed"]),
            f"{g['tokens_per_second']:.1f}" if g["tokens_per_second"] else "-",  # replayed rounds have no time
            with_margin(g["accept_length"], g["accept_length_interval"]),
            rate,
        ]
        row += [f"{g[key]:.2f}" for key in ("drafted_per_round", "accepted_per_round", "wasted_per_round")]
        row.append(f"{g['parked_share']:.0%}")
        rows.append(row + ["-" if a is None else f"{a:.2f}" for a in g["acceptance_by_position"]])
    return rows


def evaluation_table(summary: dict[str, Any]) -> Group:
    """Figures of each domain and source; the numbered columns are the acceptance of a position given those before it."""
    groups = summary["groups"]
    positions = tuple(str(k + 1) for k in range(len(groups["all"]["acceptance_by_position"])))
    table = make_table("a round, and acceptance by position", ("group", *EVALUATION_COLUMNS, *positions))
    for row in evaluation_rows(groups):
        table.add_row(*row)
    parts: list[Any] = [table]
    if sweep := summary["threshold_sweep"]:
        thresholds = [f"{point['threshold']:.1f}" for point in sweep["all"][::2]]
        curve = make_table("accepted share of the verified drafts · τ, by confidence threshold", ("group", *thresholds))
        for name, points in sweep.items():
            cells = (f"{p['acceptance_rate']:.0%} · {p['accept_length']:.2f}" for p in points[::2])
            curve.add_row(name, *cells)
        parts.append(curve)
    return Group(*parts)


def concurrency_table(summary: dict[str, Any]) -> Group:
    """Many requests at once: throughput of every method at each number of requests, and the scheduler's ratios."""
    columns = (
        "at once",
        "method",
        "tok/s",
        "steady tok/s",
        "per user",
        "τ",
        "verified",
        "draft",
        "verify",
        "step",
        "identical",
    )
    table = make_table(
        "many requests at once (steady: every place taken; verified: a request and step; times in ms)", columns
    )
    for level, methods in summary["levels"].items():
        for i, (name, f) in enumerate(methods.items()):
            cells = ["-"] * 8
            if f["steady_tokens_per_second"] is not None:
                ms, same = f["milliseconds_per_step"], f["identical_share"]
                cells = [
                    f"{f['steady_tokens_per_second']:.1f}",
                    f"{f['tokens_per_second_per_user']:.1f}",
                    f"{f['accept_length']:.2f}",
                    f"{f['verified_per_request']:.2f}",
                    *(f"{ms[part]:.1f}" for part in ("draft", "verify", "step")),
                    "-" if same is None else f"{same:.0%}",
                ]
            last = i == len(methods) - 1
            table.add_row(str(level), name, f"{f['tokens_per_second']:.1f}", *cells, end_section=last)
    lines = [
        f"{level} at once: DSpark {r['over_plain']:.2f}× plain batched decoding, {r['over_best_static']:.2f}× the best static "
        f"choice ({r['best_static']}), {r['over_padded']:.2f}× generate() on a padded batch"
        for level, r in summary["ratios"].items()
        if r
    ]
    return Group(table, *map(Text, lines))
