"""Several drafters, at one temperature or more, side by side on the same prompts; one under several windows is several drafters.

Where the policy decides from the block alone and the batch engine serves the target, the target's texts are decoded once and
every drafter is replayed against them (`replay`); otherwise every drafter decodes by itself (`rounds`).
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..decoding.ragged_target import check_structure, check_target
from ..decoding.tuned_pair import tuned
from ..loading.pairs import Target
from ..model.modeling_dspark import DSparkDraftModel
from .completion import block_policy
from .figures import MACRO, Bootstrap, acceptance_figures, by_source, failures, groups_of, interval
from .prompt_sets import Conversation
from .questions import DecodingOptions
from .replay import decode_texts, replay_all
from .rounds import Sample, collect

logger = logging.get_logger(__name__)
_LABEL = re.compile(r"[\w.+()-][\w .+()-]*")


def named_drafters(given: Sequence[str]) -> dict[str, str]:
    """Drafters by label, from `name=path` or a path alone, whose last part is its label.

    Raises:
        ValueError: a label with other characters than letters, digits, blanks and . + - _ ( ), or one that is given twice.
    """
    named: dict[str, str] = {}
    for text in given:
        label, found, path = text.partition("=")
        if not found or "/" in label:
            # The absolute path has a name where `text` is "."; a folder may be called as it likes.
            label, path = re.sub(r"[^\w .+()-]+", "-", Path(os.path.abspath(text)).name).strip(" -"), text
        if not _LABEL.fullmatch(label) or not path:
            raise ValueError(
                f"--drafter {text!r}: write a Hub id or a folder, or name=path with a name of letters, digits, blanks "
                "and . + - _ ( )."
            )
        if _folder_name(label) in map(_folder_name, named):
            raise ValueError(
                f"Two drafters are called {label!r}: give them names, --drafter one=path --drafter two=path."
            )
        named[label] = path
    return named


def with_windows(
    drafters: Mapping[str, DSparkDraftModel], named: Mapping[str, str], windows: Sequence[int | None]
) -> tuple[dict[str, DSparkDraftModel], dict[str, str]]:
    """Every drafter under every window (`context_window` of its config), and its path, by the label with the window behind it."""
    models, paths = {}, {}
    for label, model in drafters.items():
        for window in windows:
            name = f"{label} ({'none' if window is None else window})"
            models[name] = copy.copy(model)  # shares the weights
            models[name].config = copy.deepcopy(model.config)
            models[name].config.context_window = window
            paths[name] = named[label]
    return models, paths


def run_folder(folder: Path, label: str, temperature: float) -> Path:
    """Where the rounds and the report of one drafter at one temperature are kept."""
    return folder / f"{_folder_name(label)}-t{temperature:g}"


def _folder_name(label: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", label).strip("-").lower()


def _is_replayed(target: PreTrainedModel, policy: str) -> bool:
    """Whether rounds can be had from the target's own texts; says so where not."""
    reason = f"the policy {policy} decides from measured times or earlier rounds"
    if block_policy(policy) is not None:
        try:
            check_structure(target)
            check_target(target)
            return True
        except ValueError as error:
            reason = str(error)
    logger.warning(f"Every drafter decodes every prompt by itself, which takes longer: {reason}")
    return False


def run_comparison(
    target: Target,
    drafters: Mapping[str, DSparkDraftModel],
    conversations: Sequence[Conversation],
    options: Sequence[DecodingOptions],
    policy: str,
    folder: Path | None = None,
) -> dict[str, dict[str, list[Sample]]]:
    """Samples by temperature (as text) and label; with `folder` resumable, each drafter and temperature in a file of its own.

    Raises:
        ValueError: a file there was written with other settings.
    """
    replayed = _is_replayed(target.model, policy)
    results: dict[str, dict[str, list[Sample]]] = {}
    for option in options:
        temperature = f"{option.temperature:g}"
        files = {
            label: None if folder is None else run_folder(folder, label, option.temperature) / "rounds.jsonl"
            for label in drafters
        }
        where = f"temperature {temperature}"
        if replayed:
            texts_file = None if folder is None else folder / f"texts-t{temperature}.jsonl"
            with torch.no_grad(), tuned(target.model, next(iter(drafters.values())), of_drafter=False):
                texts = decode_texts(target, conversations, option, texts_file, f"texts, {where}")
            results[temperature] = replay_all(
                target, drafters, conversations, texts, option, policy, files, f"drafts, {where}"
            )
        else:
            results[temperature] = {
                label: collect(target, model, conversations, option, policy, files[label], f"{label}, {where}")
                for label, model in drafters.items()
            }
    return results


def compare(
    results: Mapping[str, Mapping[str, Sequence[Sample]]], drafters: Mapping[str, DSparkDraftModel]
) -> dict[str, Any]:
    """Figures side by side: for each temperature and group, those of every drafter, and the ratio of the first one's τ to each
    other's, with intervals. Conversations that failed under any drafter are left out for all."""
    lengths = {label: model.config.num_draft_tokens for label, model in drafters.items()}
    return {
        "drafters": lengths,
        "temperatures": {temperature: _side_by_side(runs, lengths) for temperature, runs in results.items()},
    }


def _side_by_side(runs: Mapping[str, Sequence[Sample]], lengths: Mapping[str, int]) -> dict[str, Any]:
    failed = {s.index for samples in runs.values() for s in samples if s.error is not None}
    good = {label: [s for s in samples if s.index not in failed] for label, samples in runs.items()}
    first = next(iter(good.values()))
    bootstrap, sources = Bootstrap(first), list(by_source(first))
    figures: dict[str, dict[str, dict[str, Any]]] = {}  # by label and group
    drawn: dict[str, dict[str, np.ndarray | None]] = {}
    for label, samples in good.items():
        groups = groups_of(samples)
        figures[label] = {name: acceptance_figures(group, lengths[label]) for name, group in groups.items()}
        drawn[label] = {name: bootstrap.accept_lengths(group) for name, group in groups.items()}
        # The unweighted mean of the sources' τ, as the paper's macro average.
        taus = [figures[label][name]["accept_length"] for name in sources]
        figures[label][MACRO] = {"accept_length": float(np.mean(taus)) if taus else 1.0}
        known = [values for name in sources if (values := drawn[label][name]) is not None]
        drawn[label][MACRO] = np.mean(known, axis=0) if known and len(known) == len(sources) else None
    counts = {name: len({s.index for s in group}) for name, group in groups_of(first).items()}
    return {
        "sources": sources,
        "groups": {
            name: {"conversations": count}
            | _compared({k: f[name] for k, f in figures.items()}, {k: d[name] for k, d in drawn.items()})
            for name, count in (counts | {MACRO: len(bootstrap)}).items()
        },
        "left_out": len(failed),
        "failed": [entry for label, samples in runs.items() for entry in failures(samples, drafter=label)],
    }


def _compared(figures: dict[str, dict[str, Any]], drawn: dict[str, np.ndarray | None]) -> dict[str, Any]:
    """One group: figures by label with intervals of τ, and the first drafter's τ over each other's, resample by resample."""
    first, *others = figures
    ratios = {}
    for label in others:
        ours, theirs = drawn[first], drawn[label]
        ratios[label] = {
            "ratio": figures[first]["accept_length"] / figures[label]["accept_length"],
            "interval": None if ours is None or theirs is None else interval(ours / theirs),
        }
    drafters = {label: values | {"accept_length_interval": interval(drawn[label])} for label, values in figures.items()}
    return {"drafters": drafters, "ratios": ratios}
