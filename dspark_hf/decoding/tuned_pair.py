"""The linear layers of a pair, target and drafter, in the forms that are fastest on this machine (see `linear/`)."""

from __future__ import annotations

import functools
import time
import weakref
from contextlib import AbstractContextManager
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..linear.linear_choices import RunOf, chosen_forms, passes_through
from ..linear.linear_forms import EXACT_FORMS, ROUNDED_FORM, can_pack, keeps_copy, swappable_layers
from ..linear.linear_layers import ROWS, LinearLayers, drop_copies, follow_weights
from ..model.modeling_dspark import DSparkDraftModel
from .trial_forwards import context_length, filled_cache, target_run

logger = logging.get_logger(__name__)
_DEPTH = 128  # tokens of context of the forwards that are timed
_MOST_MEMORY = 0.25  # share of the free memory that copies may take
# Of each drafter: its target, the settings for which forms were chosen, and these.
_CHOSEN: weakref.WeakKeyDictionary[DSparkDraftModel, tuple[weakref.ref, tuple, LinearLayers]] = (
    weakref.WeakKeyDictionary()
)


def _settings(drafter: DSparkDraftModel) -> tuple[bool, bool, str]:
    """Whether forms are chosen at all, whether weights may be copied, the lowest precision of the drafter's products."""
    options = drafter.options
    options.check()
    return options.skinny_linear, options.packed_weights, options.draft_precision


def linear_layers_of(target: PreTrainedModel, drafter: DSparkDraftModel) -> LinearLayers:
    """The pair's layers, with forms chosen once for this machine and kept; none where `skinny_linear` is off.

    Raises:
        ValueError: an unknown `draft_precision`.
    """
    drafter.bind_target(target)
    settings = _settings(drafter)
    known_target, known_settings, layers = _CHOSEN.get(drafter, (None, (), LinearLayers()))
    # The same ones also where they are swapped in already, so that none is left to swap.
    if known_target is None or known_target() is not target or known_settings != settings:
        layers = _chosen(target, drafter, *settings)
        _CHOSEN[drafter] = weakref.ref(target), settings, layers
    return layers


def _chosen(
    target: PreTrainedModel, drafter: DSparkDraftModel, is_on: bool, may_copy: bool, precision: str
) -> LinearLayers:
    parts: dict[str, list] = {"target": [target], "drafter": [drafter, *drafter.bound_heads()]}
    layers = {part: swappable_layers(models) for part, models in parts.items()}
    size = sum(m.weight.numel() * m.weight.element_size() for m in {*layers["target"], *layers["drafter"]})
    may_copy = may_copy and can_pack() and size <= _MOST_MEMORY * psutil.virtual_memory().available
    if not (is_on and may_copy):
        drop_copies([*layers["target"], *layers["drafter"]])
    if not is_on:
        return LinearLayers()
    choices = {}
    for part, models in parts.items():
        forms = [form for form in EXACT_FORMS if may_copy or not keeps_copy(form)]
        make_run = functools.partial(_forwards_of, target)
        if part == "drafter":
            make_run = functools.partial(passes_through, models)
            if may_copy and precision == ROUNDED_FORM and drafter.dtype == torch.float32:
                forms.append(ROUNDED_FORM)
        try:
            if layers[part]:
                choices[part] = chosen_forms(part, models, forms, make_run)
        # Whatever a target of its own kind raises; its layers are left as they are.
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            logger.warning_once(f"The linear layers of the {part} can't be measured ({type(error).__name__}: {error}).")
    return LinearLayers(choices)


def _forwards_of(target: PreTrainedModel) -> RunOf:
    cache = filled_cache(target, max(1, min(_DEPTH, context_length(target) - ROWS[-1])))
    return functools.partial(target_run, target, cache)


def see_changed_weights(target: PreTrainedModel, drafter: DSparkDraftModel, max_age: float = 0.0) -> bool:
    """Make what was copied from weights follow them, in whatever way they were changed; whether any was.

    It reads all weights that have copies, about as long as a forward; not at all within `max_age` seconds of the last time.
    """
    layers = linear_layers_of(target, drafter)
    if time.monotonic() - layers.followed < max_age:
        return False
    drafter.follow_head()
    changed = follow_weights([target, drafter, *drafter.bound_heads()])
    layers.followed = time.monotonic()
    return changed


def tuned(
    target: PreTrainedModel,
    drafter: DSparkDraftModel,
    *,
    of_target: bool = True,
    of_drafter: bool = True,
    max_age: float = 0.0,
) -> AbstractContextManager[Any]:
    """Context manager: the linear layers of the pair, or of one of them, in their fastest forms.

    Changes of weights are looked for first (`see_changed_weights`).
    """
    see_changed_weights(target, drafter, max_age)
    return linear_layers_of(target, drafter).swapped(
        [target] if of_target else [], [drafter, *drafter.bound_heads()] if of_drafter else []
    )
