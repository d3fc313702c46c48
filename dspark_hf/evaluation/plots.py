"""Figures as PNG, readable without colour vision."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..loading.files import write_bytes
from ..scheduling.calibration import reliability, survival
from ..scheduling.step_costs import StepRates
from .calibrate import CalibrationReport

# Okabe and Ito's colours, with a marker each.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vP*"


def _figure(columns: int = 1, width: float = 5.0, height: float = 4.0):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height), layout="constrained")
    return figure, np.atleast_1d(figure.subplots(1, columns))


def _style(i: int, label: str, **more: Any) -> dict[str, Any]:
    return {"color": _COLOURS[i % 7], "marker": _MARKERS[i % 7], "markersize": 4, "label": label} | more


def _common_legend(figure, axis) -> None:
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8)


def png(figure) -> bytes:
    """The figure's PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130, format="png")
    return buffer.getvalue()


def write_png(figure, path: Path) -> None:
    """The figure as a file, written as a whole."""
    write_bytes(png(figure), path)


def reliability_diagram(curves: dict[str, np.ndarray], accepted: np.ndarray):
    """Predicted against observed survival at positions 1, 3, 5 and 7, the histogram behind; curves [N, γ] by name."""
    length = next(iter(curves.values())).shape[1]
    positions = [k for k in (1, 3, 5, 7) if k <= length]
    figure, axes = _figure(len(positions), 3.4, 3.6)
    for axis, k in zip(axes, positions):
        last = list(curves.values())[-1][:, k - 1]
        counts, edges = np.histogram(last, bins=10, range=(0, 1))
        axis.bar(edges[:-1], counts / max(counts.sum(), 1), width=0.1, align="edge", color="#DDDDDD", label="rounds")
        axis.plot([0, 1], [0, 1], color="#888888", linewidth=1, linestyle=":")
        for i, (name, predicted) in enumerate(curves.items()):
            points = [(mean, mean + gap) for mean, gap, _ in reliability(predicted[:, k - 1], accepted >= k)]
            axis.plot(*zip(*points), **_style(i, name))
        axis.set(title=f"position {k}", xlabel="predicted survival", xlim=(0, 1), ylim=(0, 1))
    axes[0].set_ylabel("observed survival")
    axes[0].legend(loc="upper left", fontsize=8)
    return figure


def calibration_diagram(report: CalibrationReport):
    """A calibration's reliability before and after, on the rounds that were not fitted on."""
    logits, fitted = report.held_out.logits, report.calibration
    after = survival(logits, fitted.temperatures, fitted.shifts)
    return reliability_diagram({"before": survival(logits), "after": after}, report.held_out.accepted)


def step_rate_curve(rates: StepRates):
    """Milliseconds of one target forward against its tokens, a line for each depth, with the spread."""
    figure, (axis,) = _figure(1, 6.5, 4.2)
    for i, depth in enumerate(rates.depths):
        seconds, spread = np.array(rates.target_seconds[i]), np.array(rates.target_spread[i])
        axis.errorbar(rates.rows, 1e3 * seconds, yerr=5e2 * spread, **_style(i, f"{depth} tokens of context"))
    axis.set(xlabel="tokens in one forward", ylabel="milliseconds", title="one forward of the target")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    return figure


def acceptance_curves(panels: dict[str, dict[str, dict[str, Any]]]):
    """Conditional acceptance of each position with 95 % intervals (Wilson's, of independent rounds), a line for each entry of a
    panel: domains, or drafters (paper Fig. 2)."""
    from scipy.stats import binomtest

    length = max(len(f["acceptance_by_position"]) for entries in panels.values() for f in entries.values())
    figure, axes = _figure(len(panels), 3.4 if len(panels) > 1 else 5.5, 3.8)
    for axis, (title, entries) in zip(axes, panels.items()):
        for i, (label, figures) in enumerate(entries.items()):
            shift = 0.1 * (i - (len(entries) - 1) / 2)
            points = []
            for k, (share, count) in enumerate(zip(figures["acceptance_by_position"], figures["rounds_by_position"])):
                if share is not None:
                    ends = binomtest(round(share * count), count).proportion_ci(method="wilson")
                    points.append((k + 1 + shift, share, share - ends.low, ends.high - share))
            if points:
                positions, shares, *margins = np.array(points).T
                axis.errorbar(positions, shares, yerr=np.maximum(margins, 0.0), **_style(i, label, linewidth=1))
        axis.set(title=title, xlabel="position in the block", xticks=range(1, length + 1), ylim=(0, 1.02))
        axis.set_xlim(0.5, length + 0.5)
    axes[0].set_ylabel("accepted, given that all before were")
    _common_legend(figure, axes[-1])
    return figure


def accept_length_bars(temperatures: dict[str, Any]):
    """τ of every drafter by domain and as the sources' mean, with 95 % intervals; a panel for each temperature."""
    figure, axes = _figure(len(temperatures), 6.0, 3.8)
    for axis, (temperature, compared) in zip(axes, temperatures.items()):
        groups = {n: g["drafters"] for n, g in compared["groups"].items() if "/" not in n and n != "all"}
        labels = list(next(iter(groups.values())))
        width = 0.8 / len(labels)
        for i, label in enumerate(labels):
            values = np.array([drafters[label]["accept_length"] for drafters in groups.values()])
            ends = [drafters[label]["accept_length_interval"] or (np.nan, np.nan) for drafters in groups.values()]
            lows, highs = np.array(ends).T
            errors = np.maximum([values - lows, highs - values], 0.0)
            middles = np.arange(len(groups)) + (i - (len(labels) - 1) / 2) * width
            axis.bar(middles, values, width, color=_COLOURS[i % 7], label=label, yerr=errors, capsize=2)
        axis.set_xticks(range(len(groups)), list(groups))
        axis.set(title=f"temperature {temperature}", ylabel="τ, tokens committed a round")
    _common_legend(figure, axes[0])
    return figure


def sweep_curves(sweeps: dict[str, list[dict[str, float]]]):
    """Acceptance rate and accepted length against the confidence threshold (paper Fig. 5)."""
    figure, (left, right) = _figure(2, 4.6, 3.8)
    for i, (name, sweep) in enumerate(sweeps.items()):
        for axis, key in ((left, "acceptance_rate"), (right, "accept_length")):
            axis.plot([p["threshold"] for p in sweep], [p[key] for p in sweep], **_style(i, name))
    left.set(xlabel="confidence threshold", ylabel="accepted share of the verified drafts", ylim=(0, 1))
    right.set(xlabel="confidence threshold", ylabel="τ, tokens committed a round")
    right.set_ylim(bottom=1)
    left.legend(fontsize=8)
    return figure


def throughput_curves(summary: dict[str, Any]):
    """Throughput against tokens per second per user, a line for each method, a point for each load (paper Fig. 7)."""
    figure, (axis,) = _figure(1, 6.5, 4.4)
    loads = _method_lines(axis, summary, "tokens_per_second_per_user", "steady_tokens_per_second")
    for load, x, y in loads["dspark"]:
        axis.annotate(str(load), (x, y), textcoords="offset points", xytext=(6, 4), fontsize=8)
    axis.set(xlabel="tokens per second per user", ylabel="tokens per second, all users")
    axis.set(title="throughput (numbers: requests at once)")
    axis.set_xlim(left=0)
    return figure


def budget_curve(summary: dict[str, Any]):
    """Drafted tokens that are verified for one request in one step against the load (paper Fig. 8)."""
    figure, (axis,) = _figure(1, 5.5, 4.0)
    _method_lines(axis, summary, None, "verified_per_request", leave_out="plain")
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(summary["levels"]), list(map(str, summary["levels"])))
    axis.set(xlabel="requests at once", ylabel="drafts verified for a request in a step", title="mean budget")
    return figure


def _method_lines(axis, summary: dict[str, Any], x: str | None, y: str, leave_out: str = "") -> dict[str, Sequence]:
    """A line for each method, figure `y` against figure `x` (`None`: against the load); (load, x, y) of each method."""
    levels: dict[int, Any] = summary["levels"]
    lines: dict[str, Sequence] = {}
    for i, name in enumerate(next(iter(levels.values()))):
        known = [(load, of[name]) for load, of in levels.items() if of[name][y] is not None]
        lines[name] = [(load, load if x is None else f[x], f[y]) for load, f in known]
        if known and name != leave_out:
            _, across, up = zip(*lines[name])
            axis.plot(across, up, **_style(i, name, linewidth=2.4 if name == "dspark" else 1.2))
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    return lines
