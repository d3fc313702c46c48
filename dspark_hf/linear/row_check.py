"""Whether a linear layer gives a row the same result whatever other rows it is multiplied with: verifying drafts rests on it.

LLM.int8() does not: a column is left unquantised for all rows of a forward where one of them has an outlier in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn

_ROWS = 8
# Root mean squares of a difference over those of a result. Half precision rounds to 0.003 at the most; eight bits, in a row
# with one large number, to 0.01 and more.
_TOLERANCE = 5e-3
_PASSED: weakref.WeakKeyDictionary[nn.Module, set[Hashable]] = weakref.WeakKeyDictionary()


@torch.no_grad()
def check_rows(target: nn.Module, dtype: torch.dtype) -> None:
    """Refuse a target with such a layer. Tried once for a model on one layer of each kind that is not torch's own.

    dtype: of the inputs.

    Raises:
        ValueError: the layer, and how far a row's result is off.
    """
    passed = _PASSED.setdefault(target, set())
    for kind, layer in _unknown_kinds(target):
        if kind in passed:
            continue
        off = _difference(layer, dtype)
        if off > _TOLERANCE:
            is_int8 = type(layer).__name__ == "Linear8bitLt"
            advice = "load it with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)" if is_int8 else ""
            raise ValueError(
                f"{type(target).__name__} can't verify drafts: its {type(layer).__name__} layers give a row other results for "
                f"several rows at once (off by {100 * off:.2g} %), so the text could be another one. Decode it without "
                f"assistant_model{', or ' + advice if advice else ''}."
            )
        passed.add(kind)


def _unknown_kinds(model: nn.Module) -> Iterator[tuple[Hashable, nn.Module]]:
    """Linear layers that are not torch's own with weights in floating point; those that wrap others are passed over."""
    for module in model.modules():
        if not isinstance(getattr(module, "in_features", None), int) or next(module.children(), None) is not None:
            continue
        weight: Any = getattr(module, "weight", None)
        if type(module) is nn.Linear and type(weight) is nn.Parameter and weight.dtype.is_floating_point:
            continue
        yield (type(module), type(weight), module.in_features, getattr(module, "out_features", None)), module


def _difference(layer: nn.Module, dtype: torch.dtype) -> float:
    """Of a row with one large number, alone and beside rows that are all outliers to it; 0 where the layer can't be tried."""
    tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    device = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
    rows = torch.randn(_ROWS, layer.in_features, generator=torch.Generator().manual_seed(0))
    rows[0, 0] = 10.0
    rows[0] *= 0.01
    rows[1:] *= 1000.0
    rows = rows.to(device, dtype)[None]
    try:
        alone, beside = layer(rows[:, :1])[0, 0].double(), layer(rows)[0, 0].double()
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return 0.0  # it takes other inputs than rows
    return float((alone - beside).square().mean().sqrt() / alone.square().mean().sqrt().clamp(min=1e-30))
