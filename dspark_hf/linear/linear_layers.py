"""Linear layers on a few rows, on a CPU, in the formulation that is fastest here for the number of rows.

Owns: swapping the chosen forms in while our decoding runs, undoing that, the copies of weights made for them.
Does not own: the formulations (`linear_forms`), choosing among them (`linear_choices`), what a forward costs (`profiling`).
Axes: M rows of one product.

The math library's kernels for 2 to 8 rows are two to five times slower than they need be, so that verifying four tokens
costs more than sixteen. The products are the same, summed in another order, as for any other batch shape. Layers that stand
side by side and read the same input (queries, keys and values; gate and up) are multiplied together where weights are packed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..decoding.trial_forwards import context_length, filled_cache, target_run
from ..model.modeling_dspark import DSparkDraftModel
from .linear_choices import ROWS, RunOf, chosen_forms, passes_through
from .linear_forms import EXACT_FORMS, ROUNDED_FORM, Unit, arranged, can_pack, keeps_copy, product, units_of

logger = logging.get_logger(__name__)
PRECISIONS = ("float32", ROUNDED_FORM)
_PLACES = [bisect_left(ROWS, rows) for rows in range(ROWS[-1] + 1)]  # in ROWS, of each number of rows
_DEPTH = 128  # tokens of context of the forwards that are timed
_MOST_MEMORY = 0.25  # share of the free memory that copies may take


class Copies:
    """Copies of weights, made anew where the weights changed."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[nn.Linear, dict[tuple[str, int], tuple]] = weakref.WeakKeyDictionary()

    def get(self, unit: Unit, form: str) -> torch.Tensor:
        """A unit's weights for a form.

        A sample of the weights is compared too, because what is written through `.data` (a merged LoRA) leaves no trace.
        """
        weights = [module.weight.detach() for module in unit]
        state = [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        sample = torch.cat([w.flatten()[:: w.numel() // 256 | 1] for w in weights])
        of_unit = self._known.setdefault(unit[0], {})
        known = of_unit.get((form, len(unit)))
        if known is None or known[0] != state or not torch.equal(known[1], sample):
            weight = weights[0] if len(unit) == 1 else torch.cat(weights)
            of_unit[form, len(unit)] = known = state, sample, arranged(form, weight)
        return known[2]


class _Lazily(dict[str, Any]):
    """Copies of a unit's weights by form, looked up at first use: a form may be chosen for rows that never come."""

    def __init__(self, copies: Copies, unit: Unit) -> None:
        super().__init__()
        self._copies, self._unit = copies, unit

    def __missing__(self, form: str) -> torch.Tensor | None:
        self[form] = copy = self._copies.get(self._unit, form) if keeps_copy(form) else None
        return copy


class _SideBySide:
    """One product for several layers: the first one's call makes it, the others take their shares if their input is the same.

    The same tensor, that is; nothing may be written into it between the calls.
    """

    def __init__(self, unit: Unit, copies: Copies) -> None:
        self.sizes = [module.out_features for module in unit]
        self.bias = None if unit[0].bias is None else torch.cat([module.bias for module in unit])
        self.copies = _Lazily(copies, unit)
        # The input and what was not taken yet; replaced as a whole, because another thread may run the same layers.
        self.left: tuple[torch.Tensor | None, dict[int, torch.Tensor]] = None, {}
        self.missed = False  # inputs were not the same: never again

    def first(self, form: str, x: torch.Tensor) -> torch.Tensor:
        self.missed = bool(self.left[1])
        shares = dict(enumerate(product(form, x, None, self.bias, self.copies[form]).split(self.sizes, dim=-1)))
        share = shares.pop(0).contiguous()
        self.left = x, shares
        return share

    def share(self, number: int, x: torch.Tensor) -> torch.Tensor | None:
        known, shares = self.left
        if x is not known or number not in shares:
            return None
        share = shares.pop(number).contiguous()
        if not shares:
            self.left = None, {}
        return share


class LinearLayers:
    """The chosen forms, and the copies of weights made so far.

    choices: for the "target" and the "drafter" a form for each of `ROWS`; one that is not in it is left as it is.
    """

    def __init__(self, choices: Mapping[str, Sequence[str]] | None = None, copies: Copies | None = None) -> None:
        self.choices = dict(choices or {})
        self._copies = copies or Copies()

    def __reduce__(self):
        """Copies and pickles carry the choices; copied weights are made anew."""
        return LinearLayers, (self.choices,)

    @property
    def digest(self) -> str:
        """Tells one set of choices from another."""
        return hashlib.sha256(json.dumps(self.choices, sort_keys=True).encode()).hexdigest()[:8]

    @contextmanager
    def swapped(self, target: Iterable[nn.Module] = (), drafter: Iterable[nn.Module] = ()) -> Iterator[None]:
        """Use the chosen forms in these models inside the block; afterwards, also after an error, all is as before."""
        forwards: dict[nn.Module, Callable] = {}
        try:
            # Autocast casts inputs and weights inside of `F.linear`.
            if not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
                for part, models in (("target", target), ("drafter", drafter)):
                    for unit in (unit for model in models if part in self.choices for unit in units_of(model)):
                        forwards |= self._forwards(unit, self.choices[part])
            for module, forward in forwards.items():
                module.forward = forward
            yield
        finally:
            for module in forwards:
                vars(module).pop("forward", None)

    def _forwards(self, unit: Unit, choice: Sequence[str]) -> dict[nn.Module, Callable]:
        by_rows = [choice[place] for place in _PLACES]
        alone = [self._alone(module, by_rows) for module in unit]
        if len(unit) == 1 or not any(map(keeps_copy, choice)):
            return dict(zip(unit, alone))
        shared = _SideBySide(unit, self._copies)

        def first(input: torch.Tensor) -> torch.Tensor:
            form = _at(by_rows, input)
            return alone[0](input) if shared.missed or not keeps_copy(form) else shared.first(form, input)

        def taking(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
            def take(input: torch.Tensor) -> torch.Tensor:
                share = shared.share(number, input)
                return alone[number](input) if share is None else share

            return take

        return {unit[0]: first} | {unit[number]: taking(number) for number in range(1, len(unit))}

    def _alone(self, module: nn.Linear, by_rows: Sequence[str]) -> Callable[[torch.Tensor], torch.Tensor]:
        weight, bias, copies = module.weight, module.bias, _Lazily(self._copies, (module,))

        def forward(input: torch.Tensor) -> torch.Tensor:
            form = _at(by_rows, input)
            return product(form, input, weight, bias, copies[form])

        return forward


def _at(by_rows: Sequence[str], x: torch.Tensor) -> str:
    return by_rows[min(x.numel() // x.shape[-1], ROWS[-1])]


def linear_layers_of(target: PreTrainedModel, drafter: DSparkDraftModel) -> LinearLayers:
    """The pair's layers, with choices measured once for this machine and kept; empty where `drafter.skinny_linear` is off.

    Raises:
        ValueError: `drafter.draft_precision` is none of those known.
    """
    precision = drafter.options.draft_precision
    if precision not in PRECISIONS:
        raise ValueError(
            f"drafter.draft_precision must be {' or '.join(map(repr, PRECISIONS))}, got {precision!r}. It is the lowest "
            "precision that the drafter's products may have."
        )
    if not drafter.options.skinny_linear:
        return LinearLayers()
    drafter.bind_target(target)
    settings = (precision, drafter.options.packed_weights, id(target))
    if getattr(drafter, "_ll", None) is not None and drafter._llf == settings:
        return drafter._ll  # also where they are swapped in already, so that none is left to swap
    parts = {"target": [target], "drafter": [drafter, *drafter.bound_heads()]}
    units = {part: [unit for model in models for unit in units_of(model)] for part, models in parts.items()}
    layers = {module for part in units.values() for unit in part for module in unit}
    size = sum(module.weight.numel() * module.weight.element_size() for module in layers)
    may_copy = (
        drafter.options.packed_weights and can_pack() and size <= _MOST_MEMORY * psutil.virtual_memory().available
    )
    copies, choices = Copies(), {}

    def candidate(form: str, part: str) -> AbstractContextManager:
        return LinearLayers({part: [form] * len(ROWS)}, copies).swapped(**{part: parts[part]})

    for part, of_part in units.items():
        if not of_part:
            continue
        forms = [form for form in EXACT_FORMS if may_copy or not keeps_copy(form)]
        run_of = functools.partial(_forwards_of, target)
        if part == "drafter":
            run_of = functools.partial(passes_through, of_part)
            if may_copy and precision == ROUNDED_FORM and drafter.dtype == torch.float32:
                forms.append(ROUNDED_FORM)
        try:
            choices[part] = chosen_forms(part, of_part, forms, functools.partial(candidate, part=part), run_of)
        # Whatever a target of its own kind raises; its layers are left as they are.
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            logger.warning_once(f"The linear layers of the {part} can't be measured ({type(error).__name__}: {error}).")
    drafter._ll, drafter._llf = LinearLayers(choices, copies), settings
    return drafter._ll


def _forwards_of(target: PreTrainedModel) -> RunOf:
    cache = filled_cache(target, max(1, min(_DEPTH, context_length(target) - ROWS[-1])))
    return functools.partial(target_run, target, cache)


def tuned(target: PreTrainedModel, drafter: DSparkDraftModel, *, of_target: bool = True, of_drafter: bool = True):
    """Context manager: the linear layers of the pair, or of one of them, in their fastest forms."""
    layers = linear_layers_of(target, drafter)
    if not layers.choices:
        return nullcontext()
    return layers.swapped([target] if of_target else [], [drafter, *drafter.bound_heads()] if of_drafter else [])
