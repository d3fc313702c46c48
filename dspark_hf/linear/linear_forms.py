"""The formulations of a linear layer on a CPU, which layers can take them, and what each keeps of the weights.

Owns: the products and the copies that they need, layers side by side. Does not own: which one is used where
(`linear_layers`).
Axes: M rows of one product.

"bfloat16" rounds weights and inputs: it is for a drafter alone, whose distribution is reported as it was drawn from, so that
its precision changes how many drafts stand and never the output. (8-bit products saved half a millisecond a draft more, and
cost 4 to 8 % of τ.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

EXACT_FORMS = ("stock", "transposed", "packed")
ROUNDED_FORM = "bfloat16"
_SIDE_BY_SIDE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_WORTHWHILE = 1 << 14  # weights; smaller layers cost what calling them does

Unit = tuple[nn.Linear, ...]  # one layer, or several side by side


def can_pack() -> bool:
    """Whether this build of torch has oneDNN's packed products."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
    )


def keeps_copy(form: str) -> bool:
    """Whether the form needs a copy of the weights."""
    return form in ("packed", ROUNDED_FORM)


def arranged(form: str, weight: torch.Tensor) -> torch.Tensor:
    """The copy of the weights [out, in] that a form multiplies with.

    Raises:
        RuntimeError: this processor has no such product.
    """
    weight = weight.detach()
    return torch.ops.mkldnn._reorder_linear_weight(weight.to(torch.bfloat16) if form == ROUNDED_FORM else weight, None)


def product(
    form: str, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, copy: Any
) -> torch.Tensor:
    """`F.linear` in one of these forms; `copy` is what `arranged` gave, or else `weight` is read. [..., in] -> [..., out]"""
    if form == "packed":
        return torch.ops.mkldnn._linear_pointwise(x, copy, bias, "none", [], "")
    if form == ROUNDED_FORM:
        out = torch.ops.mkldnn._linear_pointwise(x.to(torch.bfloat16), copy, None, "none", [], "").to(x.dtype)
        return out if bias is None else out + bias
    assert weight is not None
    return F.linear(x, weight, bias) if form == "stock" else _transposed(x, weight, bias)


def _transposed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `(W @ x.T).T`."""
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if count in (1, 3):  # slower than one row more
        rows = F.pad(rows, (0, 0, 0, 1))
    # Contiguous again, or every elementwise operation after it pays for the transposed layout.
    out = torch.mm(weight, rows.t()).t()[:count].contiguous()
    if bias is not None:
        out = out + bias
    return out.view(*x.shape[:-1], weight.shape[0])


def can_swap(module: nn.Module | None) -> bool:
    """Whether this is a plain linear layer on a CPU, without hooks, quantisation or a replaced forward."""
    return (
        isinstance(module, nn.Linear)
        and type(module) is nn.Linear
        and type(module.weight) is nn.Parameter  # quantisers put tensors of their own there
        and module.weight.device.type == "cpu"
        and module.weight.dtype in (torch.float32, torch.bfloat16)
        and module.weight.numel() >= _WORTHWHILE
        and "forward" not in vars(module)  # accelerate's and others' own replacement
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


def units_of(model: nn.Module) -> list[Unit]:
    """The layers of a model that can be swapped, each once and in the model's order; those side by side are one unit."""
    units: list[Unit] = []
    seen: set[nn.Module] = set()
    for parent in [model] if isinstance(model, nn.Linear) else model.modules():
        for unit in _units_within(parent):
            if not seen & set(unit):
                units.append(unit)
                seen |= set(unit)
    return units


def _units_within(parent: nn.Module) -> Iterator[Unit]:
    """Of the children, or of a layer that stands alone."""
    if isinstance(parent, nn.Linear):
        if can_swap(parent):
            yield (parent,)
        return
    joined: set[str] = set()
    for names in _SIDE_BY_SIDE:
        layers = [parent._modules.get(name) for name in names]
        if all(map(can_swap, layers)) and len({(m.in_features, m.bias is None) for m in layers}) == 1:  # type: ignore[union-attr]
            yield tuple(layers)  # type: ignore[arg-type]
            joined |= set(names)
    for name, child in parent._modules.items():
        if name not in joined and can_swap(child):
            yield (child,)  # type: ignore[misc]
