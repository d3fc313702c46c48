"""An evaluation as JSON, figures and a page. Owns: putting them together. Does not own: measuring (`acceptance`), drawing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..loading.files import write_json, write_text
from ..model.modeling_dspark import DSparkDraftModel
from ..scheduling.calibration import expected_calibration_error, survival
from . import html
from .acceptance import Sample, full_rounds, grouped, threshold_sweep
from .report import EVALUATION_COLUMNS, evaluation_rows


def summarise_evaluation(samples: Sequence[Sample], drafter: DSparkDraftModel, sweep: bool) -> dict[str, Any]:
    """Figures by group, ECE of the survival by position (full blocks only), the sweep by domain, and what failed."""
    length, config = drafter.config.num_draft_tokens, drafter.config
    rounds = full_rounds(samples, length)
    error = None
    if len(rounds):
        predicted = survival(rounds.logits, config.confidence_temperatures, config.confidence_shifts)
        error = [expected_calibration_error(predicted[:, k], rounds.accepted > k) for k in range(length)]
    sweeps = {}
    if sweep:
        if not len(rounds):
            raise ValueError("--threshold-sweep needs rounds with confidences; this drafter gave none.")
        for domain in dict.fromkeys(s.domain for s in samples):
            of_domain = full_rounds((s for s in samples if s.domain == domain), length)
            if len(of_domain):
                sweeps[domain] = threshold_sweep(of_domain, drafter)
        sweeps["all"] = threshold_sweep(rounds, drafter)
    return {
        "groups": grouped(samples, length),
        "expected_calibration_error": error,
        "threshold_sweep": sweeps,
        "failed": [{"index": s.index, "turn": s.turn, "error": s.error} for s in samples if s.error is not None],
    }


def write_report(
    summary: dict[str, Any], samples: Sequence[Sample], drafter: DSparkDraftModel, facts: dict[str, Any], folder: Path
) -> None:
    """`eval.json`, PNG figures and `report.html`, which needs no other file, in `folder`."""
    from .plots import acceptance_curves, png, reliability_diagram, sweep_curves, write_png

    config = drafter.config
    length = config.num_draft_tokens
    groups = summary["groups"]
    columns = ("group", *EVALUATION_COLUMNS, *(str(k + 1) for k in range(length)))
    parts = [html.table("A round, and acceptance by position given the ones before", columns, evaluation_rows(groups))]
    figures = [
        (
            "acceptance",
            acceptance_curves(groups),
            "Acceptance by position",
            "Conditional acceptance of each position, by domain.",
        )
    ]
    rounds = full_rounds(samples, length)
    if len(rounds):
        curves = {"survival": survival(rounds.logits, config.confidence_temperatures, config.confidence_shifts)}
        title = "Reliability of the survival" + ("" if config.is_calibrated else " (not calibrated)")
        figures.append(
            ("reliability", reliability_diagram(curves, rounds.accepted), title, "Predicted against observed survival.")
        )
    if sweep := summary["threshold_sweep"]:
        figures.append(
            ("thresholds", sweep_curves(sweep), "Confidence threshold", "Acceptance rate and τ against the threshold.")
        )
    for name, figure, title, description in figures:
        write_png(figure, folder / f"{name}.png")
        parts.append(html.picture(title, png(figure), description))
    write_json({"facts": facts} | summary, folder / "eval.json")
    write_text(html.page("dspark-hf eval", facts, parts), folder / "report.html")
