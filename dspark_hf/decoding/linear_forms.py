"""The formulations of a linear layer on a CPU, and what each keeps of the weights.

Owns: the products and the copies that they need. Does not own: which one is used where (`linear_layers`).
Axes: M rows of one product.

"bfloat16" rounds weights and inputs: it is for a drafter alone, whose distribution is reported as it was drawn from, so that
its precision changes how many drafts stand and never the output. (8-bit products were no faster, and cost 4 % of τ.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

EXACT_FORMS = ("stock", "transposed", "packed")
ROUNDED_FORMS: dict[str, tuple[str, ...]] = {"float32": (), "bfloat16": ("bfloat16",)}  # by the precision allowed
FORMS = (*EXACT_FORMS, *ROUNDED_FORMS["bfloat16"])


def can_pack() -> bool:
    """Whether this build of torch has oneDNN's packed products."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
    )


def keeps_copy(form: str) -> bool:
    """Whether the form needs a copy of the weights."""
    return form not in ("stock", "transposed")


def arranged(form: str, weight: torch.Tensor) -> Any:
    """The copy of the weights [out, in] that a form multiplies with.

    Raises:
        RuntimeError: this processor or build of torch has no such product.
    """
    weight = weight.detach()
    return torch.ops.mkldnn._reorder_linear_weight(weight.to(torch.bfloat16) if form == "bfloat16" else weight, None)


def product(form: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, copy: Any) -> torch.Tensor:
    """`F.linear` in one of `FORMS`; `copy` is what `arranged` gave. [..., in] -> [..., out]"""
    if form == "stock":
        return F.linear(x, weight, bias)
    if form == "transposed":
        return _transposed(x, weight, bias)
    if form == "packed":
        return torch.ops.mkldnn._linear_pointwise(x, copy, bias, "none", [], "")
    out = torch.ops.mkldnn._linear_pointwise(x.to(torch.bfloat16), copy, None, "none", [], "").to(x.dtype)
    return out if bias is None else out + bias


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
