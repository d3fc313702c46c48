"""Linear layers on a few rows, on a CPU, in the formulation that is fastest here for each shape and number of rows.

Owns: swapping the chosen forms in while our decoding runs, undoing that, the copies of weights made for them.
Does not own: the formulations (`linear_forms`), choosing among them (`linear_choices`), what a forward costs (`profiling`).
Axes: M rows of one product.

The math library's kernels for 2 to 8 rows are two to five times slower than they need be, so that verifying four tokens
costs more than sixteen. The products are the same, summed in another order, as for any other batch shape. Layers that stand
side by side and read the same input (queries, keys and values; gate and up) may be multiplied together.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDraftModel
from .linear_choices import APART, ROWS, Unit, kind_of, stored_choices, units_of
from .linear_forms import ROUNDED_FORMS, arranged, can_pack, keeps_copy, product

_PLACES = [bisect_left(ROWS, rows) for rows in range(ROWS[-1] + 1)]  # in ROWS, of each number of rows
_MOST_MEMORY = 0.25  # share of the free memory that copies may take


class _Lazily(dict[str, Any]):
    """Copies of weights by form, made at first use: a form may be chosen for rows that never come."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, form: str) -> Any:
        self[form] = copy = self._make(form) if keeps_copy(form) else None
        return copy


class _SideBySide:
    """One product for several layers: the first one's call makes it, the others take their shares if their input is the same."""

    def __init__(self, unit: Unit) -> None:
        self.sizes = [module.out_features for module in unit]
        self.bias = None if unit[0].bias is None else torch.cat([module.bias for module in unit])
        self.x: torch.Tensor | None = None
        self.shares: dict[int, torch.Tensor] = {}
        self.missed = False  # inputs were not the same: never again

    def first(self, form: str, x: torch.Tensor, copy: Any) -> torch.Tensor:
        self.missed = bool(self.shares)
        out = product(form, x, None, self.bias, copy).split(self.sizes, dim=-1)  # type: ignore[arg-type]
        self.x, self.shares = x, dict(enumerate(out))
        return self.shares.pop(0).contiguous()

    def share(self, number: int, x: torch.Tensor) -> torch.Tensor | None:
        if x is not self.x or number not in self.shares:
            return None
        share = self.shares.pop(number).contiguous()
        if not self.shares:
            self.x = None
        return share


class LinearLayers:
    """The chosen form of each kind for each of `ROWS`, and the copies of weights made so far.

    choices: by kind, one of `FORMS` for each of `ROWS` (or "apart" for layers side by side); a kind that is not in it is left
    as it is. precision: that the products of a drafter may have.
    """

    def __init__(self, choices: dict[str, list[str]] | None = None, precision: str = "float32") -> None:
        self.choices, self.precision = choices or {}, precision
        self._copies: weakref.WeakKeyDictionary[nn.Linear, dict[tuple[str, int], tuple]] = weakref.WeakKeyDictionary()

    def __reduce__(self):
        """Copies and pickles carry the choices; copied weights are made anew."""
        return LinearLayers, (self.choices, self.precision)

    @property
    def keeps_copies(self) -> bool:
        """Whether any choice needs a copy of the weights."""
        return any(keeps_copy(form) for choice in self.choices.values() for form in choice if form != APART)

    @property
    def digest(self) -> str:
        """Tells one set of choices from another."""
        return hashlib.sha256(json.dumps(self.choices, sort_keys=True).encode()).hexdigest()[:8]

    @contextmanager
    def swapped(self, models: Iterable[nn.Module], lowered: Iterable[nn.Module] = ()) -> Iterator[None]:
        """Use the chosen forms inside the block, in `lowered` models those of the drafter's precision; afterwards, also after an
        error, all is as before."""
        forwards: dict[nn.Module, Callable] = {}
        try:
            if not torch.is_grad_enabled():
                pairs = [(model, "float32") for model in models] + [(model, self.precision) for model in lowered]
                for model, precision in pairs:
                    forwards |= self._forwards(model, precision)
            for module, forward in forwards.items():
                module.forward = forward
            yield
        finally:
            for module in forwards:
                vars(module).pop("forward", None)

    def _forwards(self, model: nn.Module, precision: str) -> dict[nn.Module, Callable]:
        forwards: dict[nn.Module, Callable] = {}
        together: list[tuple[Unit, list[str]]] = []
        for unit in units_of(model):
            choice = self.choices.get(kind_of(unit, precision))
            if choice is None:
                continue
            if len(unit) == 1:
                forwards[unit[0]] = self._forward(unit[0], choice)
            elif set(choice) != {APART}:
                together.append((unit, choice))
        for unit, choice in together:
            if all(module in forwards for module in unit):
                self._join(unit, choice, forwards)
        return forwards

    def _forward(self, module: nn.Linear, choice: Sequence[str]) -> Callable[[torch.Tensor], torch.Tensor]:
        weight, bias = module.weight, module.bias
        by_rows = [choice[place] for place in _PLACES]
        copies = _Lazily(lambda form: self.copy((module,), form))

        def forward(x: torch.Tensor) -> torch.Tensor:
            form = by_rows[min(x.numel() // x.shape[-1], ROWS[-1])]
            return product(form, x, weight, bias, copies[form])

        return forward

    def _join(self, unit: Unit, choice: Sequence[str], forwards: dict[nn.Module, Callable]) -> None:
        """Put one product for all in front of the layers' own ones."""
        shared = _SideBySide(unit)
        by_rows = [choice[place] for place in _PLACES]
        copies = _Lazily(lambda form: self.copy(unit, form))
        first, *others = unit
        alone = forwards[first]

        def forward(x: torch.Tensor) -> torch.Tensor:
            form = by_rows[min(x.numel() // x.shape[-1], ROWS[-1])]
            return alone(x) if form == APART or shared.missed else shared.first(form, x, copies[form])

        def taking(number: int, own: Callable) -> Callable[[torch.Tensor], torch.Tensor]:
            def take(x: torch.Tensor) -> torch.Tensor:
                share = shared.share(number, x)
                return own(x) if share is None else share

            return take

        forwards[first] = forward
        forwards.update({m: taking(number, forwards[m]) for number, m in enumerate(others, start=1)})

    def copy(self, unit: Unit, form: str) -> Any:
        """The copy of a unit's weights for a form, made anew where they changed.

        A sample of the weights is compared too, because what is written through `.data` (a merged LoRA) leaves no trace.
        """
        weights = [module.weight.detach() for module in unit]
        state = [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        sample = torch.cat([w.flatten()[:: max(1, w.numel() // 256)] for w in weights])
        kept = self._copies.setdefault(unit[0], {})
        known = kept.get((form, len(unit)))
        if known is None or known[0] != state or not torch.equal(known[1], sample):
            weight = weights[0] if len(unit) == 1 else torch.cat(weights)
            kept[form, len(unit)] = known = state, sample, arranged(form, weight)
        return known[2]


def linear_layers_of(target: PreTrainedModel, drafter: DSparkDraftModel) -> LinearLayers:
    """The pair's layers, with choices measured once for this machine and kept; empty where `drafter.skinny_linear` is off.

    Raises:
        ValueError: `drafter.draft_precision` is none of those known.
    """
    precision = drafter.draft_precision
    if precision not in ROUNDED_FORMS:
        raise ValueError(
            f"drafter.draft_precision must be one of {', '.join(map(repr, ROUNDED_FORMS))}, got {precision!r}."
        )
    if not drafter.skinny_linear:
        return LinearLayers()
    drafter.bind_target(target)
    groups: dict[str, list[Unit]] = {}
    for unit in units_of(target):
        groups.setdefault(kind_of(unit), []).append(unit)
    for unit in itertools.chain.from_iterable(map(units_of, (drafter, *drafter.bound_heads()))):
        groups.setdefault(kind_of(unit, precision), []).append(unit)
    known = drafter.linear_layers
    suits = known is not None and known.precision == precision and groups.keys() <= known.choices.keys()
    if suits and (drafter.packed_weights or not known.keeps_copies):
        return known  # also where they are swapped in already, so that none is left to swap
    if not groups:
        return LinearLayers()
    layers = {module for units in groups.values() for unit in units for module in unit}
    size = sum(module.weight.numel() * module.weight.element_size() for module in layers)
    may_copy = drafter.packed_weights and can_pack() and size <= _MOST_MEMORY * psutil.virtual_memory().available
    drafter.linear_layers = LinearLayers(stored_choices(groups, may_copy), precision)
    return drafter.linear_layers


def tuned(target: PreTrainedModel, drafter: DSparkDraftModel, *, of_target: bool = True, of_drafter: bool = True):
    """Context manager: the linear layers of the pair, or of one of them, in their fastest forms."""
    layers = linear_layers_of(target, drafter)
    if not layers.choices:
        return nullcontext()
    return layers.swapped([target] if of_target else [], [drafter, *drafter.bound_heads()] if of_drafter else [])
