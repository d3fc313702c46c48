"""A pair looked at from all sides, from files to speed.

Owns: the order of the checks, and which can still be made after one failed. Does not own: the checks.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..decoding.checks import likely_mistakes
from ..decoding.profiling import step_rates_of
from ..loading.pairs import Target, drafter_folder, load_drafter
from ..model.modeling_dspark import DSparkDraftModel
from ..training.corpus import Answer
from . import checks, findings
from .probe import BLOCK_FORMS, probe, probe_texts
from .report import FAILED, Check, Report

_SPEED = ("speculation pays",)


def examine(target: Target, drafter_name: str, speed: bool = True, texts: Sequence[Answer] | None = None) -> Report:
    """Check a drafter against its target; `texts` to probe on are the target's own answers to our prompts where absent.

    Raises:
        OSError: no drafter of that name.
    """
    made = [checks.versions(target)]
    source = drafter_folder(drafter_name)
    try:
        drafter = load_drafter(drafter_name, dtype=target.model.dtype).to(target.model.device)
    except ValueError as error:
        made.append(
            Check("packaging", FAILED, str(error), "It can't be loaded: use another drafter, or mend its files.")
        )
        return Report(target.name, drafter_name, made)
    made.append(checks.packaging(source, drafter))
    made += _pair(source, target, drafter)
    if any(check.status == FAILED for check in made):
        made += checks.skipped((*findings.PROBED, *_SPEED), "not looked at: the pair can't be used as it is")
    elif drafter.config.layer_form not in BLOCK_FORMS:
        made += checks.skipped((*findings.PROBED, *_SPEED), "only for block drafters")
    else:
        made += _drafting(target, drafter, speed, texts)
    return Report(target.name, drafter_name, made)


def _pair(source: str, target: Target, drafter: DSparkDraftModel) -> list[Check]:
    mistakes = likely_mistakes(target.model, drafter)
    before = checks.own_weights(drafter)
    made = checks.fit(target, drafter, mistakes)
    made.append(checks.tokenizer(source, target, drafter, mistakes))
    made.append(checks.likely("rope in the config", "nothing odd", [m for m in mistakes if m.subject == "rope"]))
    if all(check.status != FAILED for check in made):
        made.append(checks.shared_weights(before, checks.own_weights(drafter)))
        made += checks.memory(target, drafter)
    return made


def _drafting(target: Target, drafter: DSparkDraftModel, speed: bool, texts: Sequence[Answer] | None) -> list[Check]:
    try:
        result = probe(target.model, drafter, probe_texts(target) if texts is None else texts)
    except (ValueError, RuntimeError) as error:  # whatever a target of its own kind raises
        why = f"The probe could not be made: {error}"
        return [Check("acceptance", FAILED, why), *checks.skipped((*findings.PROBED[1:], *_SPEED), "no probe")]
    made = findings.probed(result)
    if not speed:
        return made + checks.skipped(_SPEED, "not asked for (--no-speed)")
    try:
        rates = step_rates_of(target.model, drafter)
    except (ValueError, RuntimeError) as error:
        return [*made, *checks.skipped(_SPEED, f"could not be measured: {error}")]
    return [*made, findings.speed(rates, result.configured.prefix_lengths())]
