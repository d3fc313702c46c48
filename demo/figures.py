"""The charts below the race, as pictures inside the page.

Axes: rounds across, positions k = 1..γ of a block upwards.
"""

from __future__ import annotations

import base64

import numpy as np
from render import escape

from dspark_hf.decoding.statistics import GenerationStats
from dspark_hf.evaluation.plots import png, step_rate_curve
from dspark_hf.scheduling.step_costs import StepRates


def rounds_chart(stats: GenerationStats):
    """Drafted, admitted and accepted tokens of every round; below, the survival a_k that the policy read."""
    from matplotlib.figure import Figure

    history, length = stats.history, stats.block_length
    rounds = np.arange(1, len(history) + 1)
    figure = Figure(figsize=(8.0, 5.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    planned, admitted, accepted = ([getattr(r, name) for r in history] for name in ("planned", "drafted", "accepted"))
    upper.bar(rounds, planned, 1.0, color="none", edgecolor="#888888", linewidth=0.8, label="drafted: block made for")
    upper.bar(
        rounds,
        admitted,
        0.8,
        color="#56B4E9",
        hatch="///",
        edgecolor="white",
        linewidth=0,
        label="admitted and verified",
    )
    upper.bar(rounds, accepted, 0.5, color="#D55E00", label="accepted")
    upper.set(ylabel="tokens", ylim=(0, length + 0.3))
    upper.yaxis.get_major_locator().set_params(integer=True)
    upper.legend(fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1.0))
    survival = np.full((length, max(len(history), 1)), np.nan)
    for i, record in enumerate(history):
        known = list(record.survival)[:length]
        survival[: len(known), i] = known
    image = lower.imshow(
        survival, origin="lower", aspect="auto", cmap="cividis", vmin=0, vmax=1,
        extent=(0.5, survival.shape[1] + 0.5, 0.5, length + 0.5),
    )  # fmt: skip
    lower.set(xlabel="round", ylabel="position k")
    figure.colorbar(image, ax=lower, label="survival $a_k$")
    return figure


def _figure(data: bytes, title: str, description: str) -> str:
    source = base64.b64encode(data).decode()
    return (
        f"<figure><figcaption><b>{escape(title)}</b></figcaption>"
        f'<img alt="{escape(description)}" src="data:image/png;base64,{source}"></figure>'
    )


def rounds_picture(stats: GenerationStats) -> str:
    """The chart of the rounds, with what it shows in words."""
    drafted, accepted = sum(stats.drafted), sum(stats.accepted)
    planned = sum(r.planned for r in stats.history)
    words = (
        f"{stats.rounds} rounds: blocks made for {planned} tokens in all, {drafted} admitted and verified, {accepted} accepted, "
        f"{stats.parked_rounds} plain steps by the policy's choice; τ {stats.accept_length:.2f}. Below, the estimated survival "
        "of each position: dark is unlikely, light is likely, white was not looked at."
    )
    return (
        _figure(png(rounds_chart(stats)), "What each round drafted, admitted and accepted", words)
        + f"<p>{escape(words)}</p>"
    )


def rates_picture(rates: StepRates) -> str:
    """This machine's step-rate curve."""
    first = rates.target_seconds[0]
    words = (
        f"Milliseconds of one forward of the target by its number of tokens: {1e3 * first[0]:.1f} for one token, "
        f"{1e3 * first[-1]:.1f} for {rates.rows[-1]}, after {rates.depths[0]} tokens of context."
    )
    return (
        _figure(png(step_rate_curve(rates)), "What verifying costs on this machine", words) + f"<p>{escape(words)}</p>"
    )


def charts(*pictures: str) -> str:
    """Pictures side by side where there is room."""
    return '<div class="charts">' + "".join(f"<div>{p}</div>" for p in pictures if p) + "</div>"
