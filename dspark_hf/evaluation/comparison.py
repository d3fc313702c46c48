"""Several drafters, at one temperature or more, side by side on the same prompts.

Owns: running them, figures side by side with intervals. Does not own: rounds (`replay`, `acceptance`), resampling (`intervals`),
tables and pages (`comparison_report`).

One drafter under several windows is several drafters with the same weights (`with_windows`).

Where the policy decides from the block alone and the batch engine serves the target, the target's texts are decoded once and
every drafter is replayed against them (`replay`); otherwise every drafter decodes by itself.
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

from ..decoding.tuned_pair import tuned
from ..engine.runner import check_structure, check_target
from ..loading.pairs import Target
from ..model.modeling_dspark import DSparkDraftModel
from .acceptance import MACRO, acceptance_figures, by_source, collect, groups_of
from .completion import DecodingOptions
from .intervals import Bootstrap, interval
from .policy_names import reads_block_alone
from .prompt_sets import Conversation
from .replay import decode_texts, replay_all
from .samples import Sample

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


def is_replayed(target: PreTrainedModel, policy: str) -> bool:
    """Whether rounds can be had from the target's own texts; says so where not."""
    reason = f"the policy {policy} decides from measured times or earlier rounds"
    if reads_block_alone(policy):
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
    replayed = is_replayed(target.model, policy)
    results: dict[str, dict[str, list[Sample]]] = {}
    for option in options:
        temperature = f"{option.temperature:g}"
        files = {
            label: None if folder is None else run_folder(folder, label, option.temperature) / "rounds.jsonl"
            for label in drafters
        }
        if not replayed:
            results[temperature] = {
                label: collect(
                    target, model, conversations, option, policy, files[label], f"{label}, temperature {temperature}"
                )
                for label, model in drafters.items()
            }
            continue
        texts_file = None if folder is None else folder / f"texts-t{temperature}.jsonl"
        with torch.no_grad(), tuned(target.model, next(iter(drafters.values())), of_drafter=False):
            texts = decode_texts(target, conversations, option, texts_file, f"texts, temperature {temperature}")
        description = f"drafts, temperature {temperature}"
        results[temperature] = replay_all(target, drafters, conversations, texts, option, policy, files, description)
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
    bootstrap = Bootstrap(next(iter(good.values())))
    grouped = {label: groups_of(samples) for label, samples in good.items()}
    groups: dict[str, Any] = {}
    for name, members in next(iter(grouped.values())).items():
        figures, resampled = {}, {}
        for label, length in lengths.items():
            samples = grouped[label][name]
            resampled[label] = bootstrap.accept_lengths(samples)
            figures[label] = acceptance_figures(samples, length)
        groups[name] = {"conversations": len({s.index for s in members})} | _compared(figures, resampled)
    sources = {label: by_source(samples) for label, samples in good.items()}
    return {
        "sources": list(next(iter(sources.values()))),
        "groups": groups | {MACRO: {"conversations": len(bootstrap)} | _macro(groups, bootstrap, sources)},
        "left_out": len(failed),
        "failed": [
            {"drafter": label, "index": s.index, "turn": s.turn, "error": s.error}
            for label, samples in runs.items()
            for s in samples
            if s.error is not None
        ],
    }


def _macro(groups: dict[str, Any], bootstrap: Bootstrap, sources: dict[str, dict[str, list[Sample]]]) -> dict[str, Any]:
    """The unweighted mean of the sources' τ, as the paper's macro average."""
    figures, resampled = {}, {}
    for label, of_sources in sources.items():
        values = [groups[name]["drafters"][label]["accept_length"] for name in of_sources]
        figures[label] = {"accept_length": float(np.mean(values)) if values else 1.0}
        drawn = [bootstrap.accept_lengths(samples) for samples in of_sources.values()]
        known = [lengths for lengths in drawn if lengths is not None]
        resampled[label] = np.mean(known, axis=0) if known and len(known) == len(drawn) else None
    return _compared(figures, resampled)


def _compared(figures: dict[str, dict[str, Any]], resampled: dict[str, np.ndarray | None]) -> dict[str, Any]:
    """`figures` with intervals of τ, and the first drafter's τ over each other's, resample by resample."""
    first, *others = figures
    ratios = {}
    for label in others:
        ours, theirs = resampled[first], resampled[label]
        ratios[label] = {
            "ratio": figures[first]["accept_length"] / figures[label]["accept_length"],
            "interval": None if ours is None or theirs is None else interval(ours / theirs),
        }
    drafters = {
        label: values | {"accept_length_interval": interval(resampled[label])} for label, values in figures.items()
    }
    return {"drafters": drafters, "ratios": ratios}
