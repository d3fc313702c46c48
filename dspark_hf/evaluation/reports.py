"""Measured figures as tables, in the terminal and as Markdown, and the folder of an evaluation: JSON, `table.md`, figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..loading.files import write_json, write_text
from ..model.configuration_dspark import DSparkConfig
from ..scheduling.step_costs import StepRates
from .calibrate import CalibrationReport
from .figures import MACRO, full_rounds
from .rounds import Sample


@dataclass(frozen=True)
class Sheet:
    """A table with a title and lines of text below it; an empty row is a rule."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    lines: Sequence[str] = ()

    def __rich__(self) -> Group:
        table = Table(title=self.title)
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left", no_wrap=i == 0)
        for row in self.rows:
            if row:
                table.add_row(*row)
            else:
                table.add_section()
        return Group(table, *map(Text, self.lines))

    def markdown(self) -> str:
        """For a model card."""
        rows = [self.columns, ["---"] * len(self.columns), *filter(None, self.rows)]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        return "\n\n".join([f"{self.title}:", table, *(f"* {line}" for line in self.lines)])


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _with_margin(figures: dict[str, Any]) -> str:
    """τ and half the width of its interval, where there is one."""
    ends, tau = figures["accept_length_interval"], f"{figures['accept_length']:.2f}"
    return tau if ends is None else f"{tau} ±{(ends[1] - ends[0]) / 2:.2f}"


# -- bench and profile -----------------------------------------------------------------------------------------------


def bench_sheets(summary: dict[str, Any]) -> list[Sheet]:
    """The bench's figures by domain, with the prompts whose output differed; the policies side by side if there are several."""
    domains = summary["domains"]
    everything = domains["all"]
    rows: list[list[str]] = []
    for name, figures in domains.items():
        dspark = figures["dspark"]
        if name == "all":
            rows.append([])
        rows.append([name, f"{figures['plain']['tokens_per_second']:.1f}"])
        for method in ("plain_tuned", "dspark", "prompt_lookup"):
            rows[-1] += [f"{figures[method]['tokens_per_second']:.1f}", f"{figures[method]['speedup']:.2f}"]
        rows[-1] += [f"{dspark['accept_length']:.2f}"]
        rows[-1] += [f"{dspark['time_share'][part]:.0%}" for part in ("draft", "verify", "other")]
        rows[-1] += [f"{dspark['ceiling']:.2f} ({dspark['share_of_ceiling']:.0%})"]
        rows[-1] += [_number(dspark["identical_share"], ".0%")]
    lines = [
        f"macro speed-up of DSpark over plain decoding: {everything['dspark']['macro_speedup']:.2f}×, of plain decoding "
        f"with the same forward of the target: {everything['plain_tuned']['macro_speedup']:.2f}×"
    ]
    for name, seconds in summary["step_seconds"].items():
        milliseconds = " ".join(f"{1e3 * s:.0f}" for s in seconds.values())
        lines.append(f"milliseconds of one target forward of 1 to {len(seconds)} tokens, {name}: {milliseconds}")
    lines += [
        f"prompt {i + 1} ({prompt['domain']}), {method}: first difference at token {found['first_difference']}, where the "
        f"target's two best scores are {found['margin_there']:.2g} apart"
        for i, prompt in enumerate(summary["prompts"])
        for method, found in prompt["different"].items()
    ]
    title = "tokens per second, and speed as a multiple of plain decoding (median of prompts)"
    columns = "domain,plain,tuned,×,DSpark,×,lookup,×,τ,draft,verify,other,ceiling,identical"
    sheet = Sheet(title, columns.split(","), rows, lines)
    methods = [m for m in everything if "policy" in everything[m] or m.startswith("plain")]
    if sum("policy" in everything[m] for m in methods) < 2:
        return [sheet]
    rows = []
    for method in methods:
        own = f"dspark ({everything[method]['policy']})" if method == "dspark" else method
        rows.append([own, *(_policy_cell(figures[method]) for figures in domains.values())])
    title = "policies: tok/s · τ · drafts verified a round · rounds parked · copied"
    return [Sheet(title, ["policy", *domains], rows), sheet]


def _policy_cell(figures: dict[str, Any]) -> str:
    cell = f"{figures['tokens_per_second']:.1f}"
    if "policy" in figures:
        cell += f" · {figures['accept_length']:.2f} · {figures['verified_per_round']:.2f}"
        cell += f" · {figures['parked_share']:.0%} · {figures['copied_share']:.0%}"
    return cell


def concurrency_sheet(summary: dict[str, Any]) -> Sheet:
    """Many requests at once: throughput of every method at each number of requests, and the scheduler's ratios."""
    rows: list[list[str]] = []
    for level, methods in summary["levels"].items():
        for name, f in methods.items():
            ms = f["milliseconds_per_step"] or {}
            row = [str(level), name, f"{f['tokens_per_second']:.1f}"]
            row += [_number(f[key], ".1f") for key in ("steady_tokens_per_second", "tokens_per_second_per_user")]
            row += [_number(f[key]) for key in ("accept_length", "verified_per_request")]
            row += [_number(ms.get(part), ".1f") for part in ("draft", "verify", "step")]
            rows.append([*row, _number(f["identical_share"], ".0%")])
        rows.append([])
    lines = [
        f"{level} at once: DSpark {r['over_plain']:.2f}× plain batched decoding, {r['over_best_static']:.2f}× the best static "
        f"choice ({r['best_static']}), {r['over_padded']:.2f}× generate() on a padded batch"
        for level, r in summary["ratios"].items()
        if r
    ]
    title = "many requests at once (steady: every slot taken; verified: a request and step; times in ms)"
    columns = "at once,method,tok/s,steady tok/s,per user,τ,verified,draft,verify,step,identical"
    return Sheet(title, columns.split(","), rows, lines)


def step_rate_sheet(rates: StepRates) -> Sheet:
    """Milliseconds of the target's forward by rows and depth, and what drafting costs."""
    rows = []
    for i, tokens in enumerate(rates.rows):
        cells = (f"{1e3 * m[i]:.1f} (±{5e2 * s[i]:.1f})" for m, s in zip(rates.target_seconds, rates.target_spread))
        rows.append([str(tokens), *cells])
    blocks = ", ".join(f"{1e3 * s:.1f}" for s in rates.block_seconds)
    line = (
        f"drafter: parallel stage for 1 to {len(rates.block_seconds)} tokens {blocks} ms, "
        f"one step of the sequential stage {1e3 * rates.draft_step_seconds:.2f} ms"
    )
    columns = ["tokens", *(f"{d} tokens of context" for d in rates.depths)]
    return Sheet("milliseconds of one target forward (half the spread)", columns, rows, [line])


# -- calibration and acceptance --------------------------------------------------------------------------------------


def calibration_sheet(report: CalibrationReport) -> Sheet:
    """ECE and AUC of the survival at each position, on the rounds that were not fitted on."""
    fitted, rows = report.calibration, []
    for p, temperature, shift in zip(report.positions, fitted.temperatures, fitted.shifts):
        row = [str(p[key]) for key in ("position", "rounds", "reached")]
        row += [f"{p[key]:.1%}" for key in ("ece_before", "ece_temperatures_alone", "ece_after")]
        row += [_number(p[key], ".3f") for key in ("auc_before", "auc_after")]
        rows.append([*row, f"{temperature:.2f}", f"{shift:+.2f}"])
    title = f"survival at temperature {report.temperature:g}: fitted on {report.fit_rounds} rounds, judged on others"
    columns = "position,rounds,reached,ECE before,temperature alone,ECE after,AUC before,AUC after,T,shift"
    return Sheet(title, columns.split(","), rows)


def evaluation_sheets(summary: dict[str, Any]) -> list[Sheet]:
    """Figures of each domain and source, the numbered columns being the acceptance of a position given those before it; then what
    thresholds would have cut."""
    rows = []
    for name, g in summary["groups"].items():
        row = [name, str(g["samples"]), str(g["failed"]), _number(g["tokens_per_second"] or None, ".1f")]
        row += [_with_margin(g), _number(g["acceptance_rate"], ".0%")]
        row += [f"{g[key]:.2f}" for key in ("drafted_per_round", "accepted_per_round", "wasted_per_round")]
        rows.append([*row, f"{g['parked_share']:.0%}", *map(_number, g["acceptance_by_position"])])
    positions = [str(k + 1) for k in range(len(summary["groups"]["all"]["acceptance_by_position"]))]
    columns = "group,turns,failed,tok/s,τ,rate,drafted,accepted,wasted,parked"
    sheets = [
        Sheet("a round, and acceptance by position given the ones before", [*columns.split(","), *positions], rows)
    ]
    if sweep := summary["threshold_sweep"]:
        thresholds = [f"{point['threshold']:.1f}" for point in sweep["all"][::2]]
        rows = [
            [name, *(f"{p['acceptance_rate']:.0%} · {p['accept_length']:.2f}" for p in points[::2])]
            for name, points in sweep.items()
        ]
        title = "accepted share of the verified drafts · τ, by confidence threshold"
        sheets.append(Sheet(title, ["group", *thresholds], rows))
    return sheets


def comparison_sheets(summary: dict[str, Any]) -> list[Sheet]:
    """For each temperature: τ by group with half the width of a 95 % interval and the ratios with theirs, then the acceptance of
    each position given the ones before."""
    labels = list(summary["drafters"])
    positions = [str(k + 1) for k in range(max(summary["drafters"].values()))]
    sheets = []
    for temperature, compared in summary["temperatures"].items():
        rows = []
        for name, group in compared["groups"].items():
            taus = map(_with_margin, group["drafters"].values())
            rows.append([name, str(group["conversations"]), *taus, *map(_ratio, group["ratios"].values())])
        columns = ["group", "prompts", *labels, *(f"{labels[0]} / {other}" for other in labels[1:])]
        title = f"accepted length τ at temperature {temperature} (± 95 %; {MACRO}: mean of the sources)"
        sheets.append(Sheet(title, columns, rows, _verdicts(temperature, compared)))
        rows = []
        for label, figures in compared["groups"]["all"]["drafters"].items():
            cells = [*map(_number, figures["acceptance_by_position"])]
            rows.append([label, *cells, *[""] * (len(positions) - len(cells))])
        title = f"acceptance by position at temperature {temperature}, given that all before were accepted"
        sheets.append(Sheet(title, ["drafter", *positions], rows))
    return sheets


def _ratio(figures: dict[str, Any]) -> str:
    ratio, ends = figures["ratio"], figures["interval"]
    return f"{ratio:.2f}" if ends is None else f"{ratio:.2f} ({ends[0]:.2f}–{ends[1]:.2f})"


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


# -- folders ---------------------------------------------------------------------------------------------------------


def write_report(
    summary: dict[str, Any], samples: Sequence[Sample], config: DSparkConfig, facts: dict[str, Any], folder: Path
) -> None:
    """`eval.json`, `table.md` and figures of one drafter at one temperature, in `folder`."""
    from .plots import acceptance_curves, reliability_diagram, sweep_curves, write_png

    domains = {name: figures for name, figures in summary["groups"].items() if "/" not in name}
    write_png(acceptance_curves({"": domains}), folder / "acceptance.png")
    rounds = full_rounds(samples, config.num_draft_tokens)
    if len(rounds):
        name = "survival" if config.is_calibrated else "survival (not calibrated)"
        write_png(reliability_diagram({name: rounds.survival(config)}, rounds.accepted), folder / "reliability.png")
    if sweep := summary["threshold_sweep"]:
        write_png(sweep_curves(sweep), folder / "thresholds.png")
    _write({"facts": facts} | summary, evaluation_sheets(summary), folder / "eval.json")


def write_comparison(summary: dict[str, Any], facts: dict[str, Any], folder: Path) -> None:
    """`comparison.json`, `table.md` and figures of several drafters, in `folder`."""
    from .plots import accept_length_bars, acceptance_curves, write_png

    write_png(accept_length_bars(summary["temperatures"]), folder / "tau.png")
    for temperature, compared in summary["temperatures"].items():
        panels = {n: g["drafters"] for n, g in compared["groups"].items() if "/" not in n and n != MACRO}
        write_png(acceptance_curves(panels), folder / f"acceptance-t{temperature}.png")
    _write({"facts": facts} | summary, comparison_sheets(summary), folder / "comparison.json")


def _write(figures: dict[str, Any], sheets: Sequence[Sheet], file: Path) -> None:
    write_json(figures, file)
    write_text("\n\n".join(sheet.markdown() for sheet in sheets) + "\n", file.with_name("table.md"))
