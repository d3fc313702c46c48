"""Linear layers on a few rows, on a CPU, in the form that is fastest here for the number of rows.

Axes: M rows of one product.

The math library's kernels for 2 to 8 rows are slower than they need be, so that verifying four tokens costs more than
sixteen. Chosen forms (`linear_choices`) are swapped in while our decoding runs, and taken out again. Some need copies of the
weights. A copy must never speak for weights that have changed since, so all bytes of a weight are hashed (`follow_weights`).
"""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import xxhash
from torch import nn

from .linear_forms import arranged, keeps_copy, product, swappable_layers

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 128)  # measured; in between the next one's choice, beyond the last's
_PLACES = [bisect_left(ROWS, rows) for rows in range(ROWS[-1] + 1)]  # in ROWS, of each number of rows


class _Copies(dict[str, torch.Tensor]):
    """One layer's weights in other forms, each made at first use: a form may be chosen for rows that never come."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight: torch.Tensor | None = weight
        self.made_of: int | None = None

    def __missing__(self, form: str) -> torch.Tensor:
        assert self.weight is not None
        if not self:  # hashed before it is copied, so that what is written in between is seen as a change later
            self.made_of = fingerprint(self.weight)
        self[form] = copy = arranged(form, self.weight)
        return copy

    def follow(self, weight: torch.Tensor | None) -> bool:
        """Drop copies of other weights than these; whether there were any."""
        changed = bool(self) and (weight is not self.weight or weight is None or fingerprint(weight) != self.made_of)
        self.weight = weight
        if changed:
            self.clear()
        return changed


_COPIES: weakref.WeakKeyDictionary[nn.Module, _Copies] = weakref.WeakKeyDictionary()


def fingerprint(weight: torch.Tensor) -> int | None:
    """A hash of all bytes of a weight, about as fast as they can be read; none of a weight that left the CPU.

    What is written through `.data` (a merged LoRA, an edited row) changes neither the version nor the address of a tensor.
    """
    if weight.device.type != "cpu":
        return None
    return xxhash.xxh3_64_intdigest(weight.detach().contiguous().view(torch.uint8).numpy())


def follow_weights(models: Iterable[nn.Module]) -> bool:
    """Drop copies of weights that have changed in any way since; whether there were any. Takes about as long as a forward."""
    layers = {module: None for model in models for module in model.modules() if module in _COPIES}
    changed = [_COPIES[layer].follow(getattr(layer, "weight", None)) for layer in layers]
    return any(changed)


def drop_copies(layers: Iterable[nn.Module], unless: Iterable[str] = ()) -> None:
    """Free the copies of these layers, but for those in the forms named."""
    for copies in filter(None, map(_COPIES.get, layers)):
        for form in set(copies) - set(unless):
            del copies[form]


class LinearLayers:
    """The chosen forms: for the "target" and the "drafter" one for each of `ROWS`; a part that is not named is left as it is."""

    def __init__(self, choices: Mapping[str, Sequence[str]] | None = None) -> None:
        self.choices = dict(choices or {})
        self.followed = -math.inf  # when copies of weights were last compared with them

    @property
    def digest(self) -> str:
        """Tells one set of choices from another."""
        return hashlib.sha256(json.dumps(self.choices, sort_keys=True).encode()).hexdigest()[:8]

    @contextmanager
    def swapped(self, target: Iterable[nn.Module] = (), drafter: Iterable[nn.Module] = ()) -> Iterator[None]:
        """Use the chosen forms in these models inside the block; afterwards, also after an error, all is as before.

        Call `follow_weights` first where weights may have changed.
        """
        forwards: dict[nn.Linear, Callable] = {}
        try:
            # Autocast casts inputs and weights inside of `F.linear`.
            if not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
                for part, models in (("target", target), ("drafter", drafter)):
                    if part in self.choices:
                        forwards |= {m: _forward(m, self.choices[part]) for m in swappable_layers(models)}
            for module, forward in forwards.items():
                module.forward = forward  # type: ignore[method-assign]
            yield
        finally:
            for module in forwards:
                vars(module).pop("forward", None)


def _forward(module: nn.Linear, choice: Sequence[str]) -> Callable[[torch.Tensor], torch.Tensor]:
    by_rows = [choice[place] for place in _PLACES]
    bias, copies = module.bias, _COPIES.get(module)
    if copies is None or copies.weight is not module.weight:
        copies = _COPIES[module] = _Copies(module.weight)

    def forward(input: torch.Tensor) -> torch.Tensor:
        form = by_rows[min(input.numel() // input.shape[-1], ROWS[-1])]
        return product(form, input, copies[form] if keeps_copy(form) else copies.weight, bias)

    return forward
