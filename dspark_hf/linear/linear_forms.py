"""The forms of a linear layer on a CPU, which layers can take them, and the copy of the weights that each needs.

Axes: M rows of one product.

"stock" is torch's own product, "transposed" `(W @ x.T).T`, "packed" oneDNN's with the weights in its own order: the same sums,
added up in another order. "bfloat16" rounds weights and inputs: it is for a drafter alone, whose distribution is reported as it
was drawn from, so that its precision changes how many drafts are accepted and never the text.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

EXACT_FORMS = ("stock", "transposed", "packed")
ROUNDED_FORM = "bfloat16"
_WORTHWHILE = 1 << 14  # weights; smaller layers cost what calling them does


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


def product(form: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` in one of these forms, with what `arranged` gave where it keeps a copy. [..., in] -> [..., out]"""
    if form == "stock":
        return F.linear(x, weight, bias)
    if form == "packed":
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    if form == ROUNDED_FORM:
        out = torch.ops.mkldnn._linear_pointwise(x.to(torch.bfloat16), weight, None, "none", [], "").to(x.dtype)
    else:
        rows = x.reshape(-1, x.shape[-1])
        count = rows.shape[0]
        if count in (1, 3):  # slower than one row more
            rows = F.pad(rows, (0, 0, 0, 1))
        # Contiguous again, or every elementwise operation after it pays for the transposed layout.
        out = torch.mm(weight, rows.t()).t()[:count].contiguous().view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


def swappable_layers(models: Iterable[nn.Module]) -> list[nn.Linear]:
    """The layers that can take another form, each once and in the models' order."""
    return list({module: None for model in models for module in model.modules() if _can_swap(module)})  # type: ignore[misc]


def _can_swap(module: nn.Module) -> bool:
    """Whether this is a plain linear layer on a CPU, without hooks, quantisation or a replaced forward."""
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter  # quantisers put tensors of their own there
        and module.weight.device.type == "cpu"
        and module.weight.dtype in (torch.float32, torch.bfloat16)
        and module.weight.numel() >= _WORTHWHILE
        and "forward" not in vars(module)  # accelerate's and others' own replacement
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )
