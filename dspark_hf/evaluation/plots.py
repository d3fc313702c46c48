"""Figures as PNG, readable without colour vision. Owns: drawing. Does not own: measuring."""

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
from .intervals import wilson_interval

# Okabe and Ito's colours, with a marker each.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vP*"


def _figure(columns: int = 1, width: float = 5.0, height: float = 4.0):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height), layout="constrained")
    return figure, np.atleast_1d(figure.subplots(1, columns))


def png(figure) -> bytes:
    """The figure's PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130, format="png")
    return buffer.getvalue()


def write_png(figure, path: Path) -> None:
    """The figure as a file, written as a whole."""
    write_bytes(png(figure), path)


def reliability_diagram(curves: dict[str, np.ndarray], accepted: np.ndarray, positions: Sequence[int] | None = None):
    """Predicted against observed survival at positions 1, 3, 5 and 7, the histogram behind; curves [N, γ] by name."""
    length = next(iter(curves.values())).shape[1]
    positions = positions or [k for k in (1, 3, 5, 7) if k <= length]
    figure, axes = _figure(len(positions), 3.4, 3.6)
    for axis, k in zip(axes, positions):
        stood = accepted >= k
        last = list(curves.values())[-1][:, k - 1]
        counts, edges = np.histogram(last, bins=10, range=(0, 1))
        axis.bar(edges[:-1], counts / max(counts.sum(), 1), width=0.1, align="edge", color="#DDDDDD", label="rounds")
        axis.plot([0, 1], [0, 1], color="#888888", linewidth=1, linestyle=":")
        for i, (name, predicted) in enumerate(curves.items()):
            points = [(mean, mean + gap) for mean, gap, _ in reliability(predicted[:, k - 1], stood)]
            axis.plot(*zip(*points), color=_COLOURS[i], marker=_MARKERS[i], label=name)
        axis.set(title=f"position {k}", xlabel="predicted survival", xlim=(0, 1), ylim=(0, 1))
    axes[0].set_ylabel("observed survival")
    axes[0].legend(loc="upper left", fontsize=8)
    return figure


def calibration_diagram(report: CalibrationReport):
    """A calibration's reliability before and after, on the rounds that were not fitted on."""
    rounds, fitted = report.held_out, report.calibration
    curves = {
        "before": survival(rounds.logits),
        "after": survival(rounds.logits, fitted.temperatures, fitted.shifts),
    }
    return reliability_diagram(curves, rounds.accepted)


def step_rate_curve(rates: StepRates):
    """Milliseconds of one target forward against its tokens, a line for each depth, with the spread."""
    figure, (axis,) = _figure(1, 6.5, 4.2)
    for i, depth in enumerate(rates.depths):
        seconds, spread = np.array(rates.target_seconds[i]), np.array(rates.target_spread[i])
        style = {"color": _COLOURS[i % 7], "marker": _MARKERS[i % 7], "markersize": 3}
        axis.errorbar(rates.rows, 1e3 * seconds, yerr=5e2 * spread, label=f"{depth} tokens of context", **style)
    axis.set(xlabel="tokens in one forward", ylabel="milliseconds", title="one forward of the target")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    return figure


def acceptance_curves(groups: dict[str, dict[str, Any]]):
    """Conditional acceptance of each position, a line for each domain (paper Fig. 2)."""
    figure, (axis,) = _figure(1, 5.5, 4.0)
    for i, (name, figures) in enumerate((n, g) for n, g in groups.items() if "/" not in n):
        points = [(k + 1, a) for k, a in enumerate(figures["acceptance_by_position"]) if a is not None]
        if points:
            axis.plot(*zip(*points), color=_COLOURS[i % 7], marker=_MARKERS[i % 7], label=name)
    axis.set(xlabel="position in the block", ylabel="accepted, given that all before were", ylim=(0, 1))
    axis.legend(fontsize=8)
    return figure


def position_curves(groups: dict[str, Any]):
    """Conditional acceptance of each position with 95 % intervals (Wilson's, of independent rounds), a line for each drafter, a
    panel for each domain and for all (paper Fig. 2)."""
    names = [n for n, g in groups.items() if "/" not in n and "rounds" in next(iter(g["drafters"].values()))]
    length = max(len(d["acceptance_by_position"]) for d in groups["all"]["drafters"].values())
    figure, axes = _figure(len(names), 3.4, 3.8)
    for axis, name in zip(axes, names):
        drafters = groups[name]["drafters"]
        for i, (label, figures) in enumerate(drafters.items()):
            known = [
                (k + 1 + 0.1 * (i - (len(drafters) - 1) / 2), a, *wilson_interval(a, n))
                for k, (a, n) in enumerate(zip(figures["acceptance_by_position"], figures["rounds_by_position"]))
                if a is not None
            ]
            if known:
                places, shares, lows, highs = np.array(known).T
                style = {"color": _COLOURS[i % 7], "marker": _MARKERS[i % 7], "markersize": 4, "linewidth": 1}
                axis.errorbar(places, shares, yerr=(shares - lows, highs - shares), label=label, **style)
        axis.set(title=name, xlabel="position in the block", xticks=range(1, length + 1), ylim=(0, 1.02))
        axis.set_xlim(0.5, length + 0.5)
    axes[0].set_ylabel("accepted, given that all before were")
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8)
    return figure


def accept_length_bars(temperatures: dict[str, Any]):
    """τ of every drafter by domain and as the sources' mean, with 95 % intervals; a panel for each temperature."""
    figure, axes = _figure(len(temperatures), 6.0, 3.8)
    for axis, (temperature, compared) in zip(axes, temperatures.items()):
        groups = {n: g["drafters"] for n, g in compared["groups"].items() if "/" not in n and n != "all"}
        labels = list(next(iter(groups.values())))
        width = 0.8 / len(labels)
        for i, label in enumerate(labels):
            values = [drafters[label]["accept_length"] for drafters in groups.values()]
            ends = [drafters[label]["accept_length_interval"] for drafters in groups.values()]
            errors = [
                (np.nan, np.nan) if end is None else (max(value - end[0], 0.0), max(end[1] - value, 0.0))
                for value, end in zip(values, ends)
            ]
            places = np.arange(len(groups)) + (i - (len(labels) - 1) / 2) * width
            axis.bar(places, values, width, color=_COLOURS[i % 7], label=label, yerr=np.transpose(errors), capsize=2)
        axis.set_xticks(range(len(groups)), list(groups))
        axis.set(title=f"temperature {temperature}", ylabel="τ, tokens committed a round")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8)
    return figure


def sweep_curves(sweeps: dict[str, list[dict[str, float]]]):
    """Acceptance rate and accepted length against the confidence threshold (paper Fig. 5)."""
    figure, (left, right) = _figure(2, 4.6, 3.8)
    for i, (name, sweep) in enumerate(sweeps.items()):
        style = {"color": _COLOURS[i % 7], "marker": _MARKERS[i % 7], "markersize": 3, "label": name}
        thresholds = [point["threshold"] for point in sweep]
        left.plot(thresholds, [point["acceptance_rate"] for point in sweep], **style)
        right.plot(thresholds, [point["accept_length"] for point in sweep], **style)
    left.set(xlabel="confidence threshold", ylabel="accepted share of the verified drafts", ylim=(0, 1))
    right.set(xlabel="confidence threshold", ylabel="τ, tokens committed a round")
    right.set_ylim(bottom=1)
    left.legend(fontsize=8)
    return figure


def throughput_curves(summary: dict[str, Any]):
    """Throughput against tokens per second per user, a line for each method, a point for each load (paper Fig. 7)."""
    figure, (axis,) = _figure(1, 6.5, 4.4)
    levels = summary["levels"]
    for i, name in enumerate(next(iter(levels.values()))):
        points = [
            (methods[name]["tokens_per_second_per_user"], methods[name]["steady_tokens_per_second"], level)
            for level, methods in levels.items()
            if methods[name]["steady_tokens_per_second"] is not None
        ]
        if not points:
            continue
        width = 2.4 if name == "dspark" else 1.2
        axis.plot(*list(zip(*points))[:2], color=_COLOURS[i % 7], marker=_MARKERS[i % 7], linewidth=width, label=name)
        if name == "dspark":
            for x, y, load in points:
                axis.annotate(str(load), (x, y), textcoords="offset points", xytext=(6, 4), fontsize=8)
    axis.set(xlabel="tokens per second per user", ylabel="tokens per second, all users")
    axis.set(title="throughput (numbers: requests at once)")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    return figure


def budget_curve(summary: dict[str, Any]):
    """Drafted tokens that are verified for one request in one step against the load (paper Fig. 8)."""
    figure, (axis,) = _figure(1, 5.5, 4.0)
    levels = summary["levels"]
    for i, name in enumerate(next(iter(levels.values()))):
        points = [
            (level, methods[name]["verified_per_request"])
            for level, methods in levels.items()
            if methods[name]["verified_per_request"] is not None and name != "plain"
        ]
        if points:
            width = 2.4 if name == "dspark" else 1.2
            axis.plot(*zip(*points), color=_COLOURS[i % 7], marker=_MARKERS[i % 7], linewidth=width, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(levels), [str(level) for level in levels])
    axis.set(xlabel="requests at once", ylabel="drafts verified for a request in a step", title="mean budget")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    return figure
