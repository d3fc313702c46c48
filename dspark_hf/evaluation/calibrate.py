"""`dspark-hf calibrate`: collect rounds, fit on one half of the prompts, report on the other, store with the drafter.

Axes: N rounds, γ positions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..loading.files import holds_drafter, move_files, refuse_other_models, write_json
from ..loading.pairs import Target
from ..model.configuration_dspark import CALIBRATION_FIELDS, DSparkConfig
from ..model.modeling_dspark import DSparkDraftModel
from ..scheduling.calibration import Calibration, fit_calibration, survival
from .figures import Rounds, full_rounds
from .prompt_sets import Conversation
from .questions import DecodingOptions
from .rounds import collect


@dataclass(frozen=True)
class CalibrationReport:
    """A fit, how it does on the other half, and that half's rounds.

    positions: of each a_k its `position` from 1, `rounds`, those that `reached` it (x_<k accepted), and ECE and AUC before and
    after; AUC is `None` for a single outcome.
    """

    calibration: Calibration
    positions: list[dict[str, Any]]
    fit_rounds: int
    held_out: Rounds
    temperature: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "calibration": asdict(self.calibration),
            "positions": self.positions,
            "fit_rounds": self.fit_rounds,
            "report_rounds": len(self.held_out),
            "temperature": self.temperature,
        }


def run_calibration(
    target: Target,
    drafter: DSparkDraftModel,
    conversations: Sequence[Conversation],
    options: DecodingOptions,
    file: Path | None = None,
) -> CalibrationReport:
    """Decode all prompts with full blocks; every second conversation is fitted on, the others judge the fit.

    Raises:
        ValueError: no confidence head, or a half without rounds.
    """
    if drafter.confidence_head is None:
        raise ValueError(
            "This drafter has no confidence head, so there is nothing to calibrate. Set "
            "`drafter.options.policy = dspark_hf.scheduled(target, drafter)`: it judges positions by how they fared so far."
        )
    samples = collect(target, drafter, conversations, options, "full", file, "calibrate")
    length = drafter.config.num_draft_tokens
    fitted_on = _every_second(conversations)
    fit = full_rounds((s for s in samples if s.index in fitted_on), length)
    held_out = full_rounds((s for s in samples if s.index not in fitted_on), length)
    if not len(fit) or not len(held_out):
        raise ValueError(
            f"{len(fit)} rounds to fit and {len(held_out)} to report on came of {len(conversations)} prompts with "
            f"{options.max_new_tokens} new tokens: give at least two prompts that can be answered, and more tokens."
        )
    return _report_on(fit, held_out, options.temperature)


def _every_second(conversations: Sequence[Conversation]) -> set[int]:
    """Indices of every second conversation of each source; a source that has one alone is taken in turn."""
    counts: dict[tuple[str, str], int] = {}
    chosen = set()
    for index, conversation in enumerate(conversations):
        key = conversation.domain, conversation.source
        # Sources begin with either half in turn, so that sets of single prompts are halved too.
        number = counts.setdefault(key, len(counts) % 2)
        counts[key] = number + 1
        if number % 2 == 0:
            chosen.add(index)
    return chosen


def _report_on(fit: Rounds, held_out: Rounds, temperature: float) -> CalibrationReport:
    calibration = fit_calibration(fit.logits, fit.accepted)
    alone = fit_calibration(fit.logits, fit.accepted, shift=False)
    before = survival(held_out.logits)
    after = survival(held_out.logits, calibration.temperatures, calibration.shifts)
    columns: dict[str, list[Any]] = {
        "ece_before": held_out.calibration_errors(before),
        "ece_temperatures_alone": held_out.calibration_errors(survival(held_out.logits, alone.temperatures)),
        "ece_after": held_out.calibration_errors(after),
        "auc_before": _areas(before, held_out),
        "auc_after": _areas(after, held_out),
    }
    positions = []
    for k in range(before.shape[1]):
        counts = {"position": k + 1, "rounds": len(held_out), "reached": int((held_out.accepted >= k).sum())}
        positions.append(counts | {name: values[k] for name, values in columns.items()})
    return CalibrationReport(calibration, positions, len(fit), held_out, temperature)


def _areas(predicted: np.ndarray, rounds: Rounds) -> list[float | None]:
    """AUC of the survival at each position."""
    from sklearn.metrics import roc_auc_score

    outcomes = [rounds.accepted > k for k in range(predicted.shape[1])]
    mixed = [bool(0 < outcome.sum() < len(outcome)) for outcome in outcomes]
    return [float(roc_auc_score(o, p)) if both else None for o, p, both in zip(outcomes, predicted.T, mixed)]


def check_destination(source: str, destination: Path | None) -> Path:
    """Where the calibrated drafter goes: `destination`, or the source's own folder.

    Raises:
        ValueError: the source is no folder of ours and no destination was given, or that holds another model.
    """
    if destination is None:
        if not holds_drafter(Path(source)):
            raise ValueError(
                f"{source} is no folder in this package's form, so the calibration can't be put there. Give --out FOLDER."
            )
        return Path(source)
    refuse_other_models(destination, "--out")
    return destination


def store_calibration(drafter: DSparkDraftModel, report: CalibrationReport, source: str, folder: Path) -> None:
    """Put the calibration into the drafter and write it to `folder`: only the config where that is the source itself.

    The cap of drafted tokens becomes γ: the scheduler decides from now on. In another folder the weights have the source's
    dtype, which `drafter` then has too.
    """
    config, fitted = drafter.config, report.calibration
    config.confidence_temperatures, config.confidence_shifts = fitted.temperatures, fitted.shifts
    config.expected_acceptance, config.acceptance_persistence = fitted.expected_acceptance, fitted.persistence
    drafter.generation_config.num_assistant_tokens = config.num_draft_tokens
    if folder.resolve() == Path(source).resolve():
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        write_json(stored | {name: getattr(config, name) for name in CALIBRATION_FIELDS}, folder / "config.json")
        write_json(json.loads(drafter.generation_config.to_json_string()), folder / "generation_config.json")
    else:
        dtype = DSparkConfig.from_pretrained(source).dtype or drafter.dtype
        temporary = folder.with_name(folder.name + ".tmp")
        drafter.to(dtype).save_pretrained(temporary)
        move_files(temporary, folder)
    write_json(report.to_dict(), folder / "calibration.json")
