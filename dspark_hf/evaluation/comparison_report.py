"""Drafters side by side: tables in the terminal, `table.md` for a model card, figures and a page. Does not own: the figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from ..loading.files import write_json, write_text
from . import html
from .acceptance import MACRO
from .report import make_table, with_margin


def _ratio(figures: dict[str, Any]) -> str:
    ratio, ends = figures["ratio"], figures["interval"]
    return f"{ratio:.2f}" if ends is None else f"{ratio:.2f} ({ends[0]:.2f}–{ends[1]:.2f})"


def _tau_columns(labels: Sequence[str]) -> tuple[str, ...]:
    first, *others = labels
    return ("group", "prompts", *labels, *(f"{first} / {other}" for other in others))


def _tau_rows(groups: dict[str, Any]) -> list[list[str]]:
    """One line a group: prompts, τ of every drafter, the first one's over each other's."""
    rows = []
    for name, group in groups.items():
        taus = [with_margin(d["accept_length"], d["accept_length_interval"]) for d in group["drafters"].values()]
        rows.append([name, str(group["conversations"]), *taus, *map(_ratio, group["ratios"].values())])
    return rows


def _position_rows(groups: dict[str, Any], length: int) -> list[list[str]]:
    """One line a drafter: the acceptance of each position given those before it, over all prompts."""
    rows = []
    for label, figures in groups["all"]["drafters"].items():
        cells = ["-" if a is None else f"{a:.2f}" for a in figures["acceptance_by_position"]]
        rows.append([label, *cells, *[""] * (length - len(cells))])
    return rows


def _verdicts(temperature: str, compared: dict[str, Any]) -> list[str]:
    """A sentence for each comparison: the ratio of the macro averages; or one that says that there is none."""
    macro, lines = compared["groups"][MACRO], []
    first, prompts = next(iter(macro["drafters"])), macro["conversations"]
    if not prompts:
        return [f"At temperature {temperature} no prompt was answered under every drafter: τ is not known."]
    for other, figures in macro["ratios"].items():
        ends = figures["interval"]
        sure = "too few prompts for an interval" if ends is None else f"95 % interval {ends[0]:.2f} to {ends[1]:.2f}"
        count = len(compared["sources"])
        lines.append(
            f"At temperature {temperature}, {first} commits {figures['ratio']:.2f} times as many tokens a round as {other} "
            f"({sure}; τ averaged over {count} source{'s' * (count != 1)}, {prompts} prompts)."
        )
    return lines


def comparison_table(summary: dict[str, Any]) -> Group:
    """For each temperature: τ by group with half the width of a 95 % interval and the ratios with theirs, then the acceptance of
    each position given the ones before."""
    length = max(summary["drafters"].values())
    positions = tuple(str(k + 1) for k in range(length))
    parts: list[Any] = []
    for temperature, compared in summary["temperatures"].items():
        groups = compared["groups"]
        title = f"temperature {temperature}: τ ± 95 %"
        taus = make_table(title, _tau_columns(list(summary["drafters"])))
        for row in _tau_rows(groups):
            taus.add_row(*row)
        title = f"temperature {temperature}: acceptance by position"
        accepted = make_table(title, ("drafter", *positions))
        for row in _position_rows(groups, length):
            accepted.add_row(*row)
        parts += [taus, accepted, *map(Text, _verdicts(temperature, compared))]
    return Group(*parts)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def markdown_table(summary: dict[str, Any]) -> str:
    """The layout of the paper's Table 1: a line for each drafter, a column for each source; then acceptance by position."""
    labels, length = list(summary["drafters"]), max(summary["drafters"].values())
    parts = []
    for temperature, compared in summary["temperatures"].items():
        columns = [*compared["sources"], MACRO]
        groups = compared["groups"]
        parts.append(
            f"Accepted length τ at temperature {temperature}, ± half the width of a 95 % interval "
            f"({groups['all']['conversations']} prompts; {MACRO}: mean of the columns before it):\n"
        )
        parts.append(_markdown_row(["drafter", *(name.rsplit("/", 1)[-1] for name in columns)]))
        parts.append("|---" * (len(columns) + 1) + "|")
        for label in labels:
            cells = (groups[name]["drafters"][label] for name in columns)
            taus = (with_margin(c["accept_length"], c["accept_length_interval"]) for c in cells)
            parts.append(_markdown_row([label, *taus]))
        parts += ["", *(f"* {line}" for line in _verdicts(temperature, compared))]
        parts.append(f"\nAcceptance by position at temperature {temperature}, given that all before were accepted:\n")
        parts.append(_markdown_row(["drafter", *(str(k + 1) for k in range(length))]))
        parts.append("|---" * (length + 1) + "|")
        parts += [_markdown_row(row) for row in _position_rows(groups, length)]
        parts.append("")
    return "\n".join(parts)


def write_comparison(summary: dict[str, Any], facts: dict[str, Any], folder: Path) -> None:
    """`comparison.json`, `table.md`, figures and `report.html`, which needs no other file, in `folder`."""
    from .plots import accept_length_bars, png, position_curves, write_png

    labels, length = list(summary["drafters"]), max(summary["drafters"].values())
    parts, bars = [], accept_length_bars(summary["temperatures"])
    write_png(bars, folder / "tau.png")
    parts.append(html.picture("τ by domain", png(bars), "Tokens committed a round by domain, with 95 % intervals."))
    for temperature, compared in summary["temperatures"].items():
        groups = compared["groups"]
        title = f"Temperature {temperature}: τ (95 % intervals; {MACRO}: mean of the sources)"
        parts.append(html.table(title, _tau_columns(labels), _tau_rows(groups)))
        parts += [html.paragraph(line) for line in _verdicts(temperature, compared)]
        columns = ("drafter", *(str(k + 1) for k in range(length)))
        title = f"Temperature {temperature}: acceptance by position, given the ones before"
        parts.append(html.table(title, columns, _position_rows(groups, length)))
        curves = position_curves(groups)
        write_png(curves, folder / f"acceptance-t{temperature}.png")
        description = "Conditional acceptance of each position, a line for each drafter, by domain."
        parts.append(html.picture(f"Temperature {temperature}: by domain", png(curves), description))
    write_json({"facts": facts} | summary, folder / "comparison.json")
    write_text(markdown_table(summary), folder / "table.md")
    write_text(html.page("dspark-hf eval", facts, parts), folder / "report.html")
