"""Linear layers on a few rows, on a CPU: `(W @ x.T).T` instead of `x @ W.T`.

Owns: swapping the formulation while our decoding runs, and undoing it. Does not own: choosing by measurement.
The math library's kernel for 2 to 8 rows is two to five times slower the usual way round, so that verifying four tokens
costs more than sixteen; the products are the same, summed in another order (as for any other batch shape).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

MAX_ROWS = 8


def skinny_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` for an input of at most `MAX_ROWS` rows in all. [..., in] -> [..., out]"""
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if count in (1, 3):  # slower than one row more
        rows = F.pad(rows, (0, 0, 0, 1))
    # Contiguous again, or every elementwise operation after it pays for the transposed layout.
    out = torch.mm(weight, rows.t()).t()[:count].contiguous()
    if bias is not None:
        out = out + bias
    return out.view(*x.shape[:-1], -1)


def _swapped(module: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.numel() <= MAX_ROWS * x.shape[-1]:
            return skinny_linear(x, module.weight, module.bias)
        return F.linear(x, module.weight, module.bias)

    return forward


def _can_swap(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and "forward" not in vars(module)  # accelerate's and others' own replacement
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


@contextmanager
def skinny_linears(models: Iterable[nn.Module], enabled: bool = True) -> Iterator[None]:
    """Swap the plain float32 CPU linear layers of `models` inside the block; afterwards all is as before."""
    swapped = []
    if enabled and not torch.is_grad_enabled():
        for model in models:
            for module in model.modules():
                if _can_swap(module):
                    module.forward = _swapped(module)  # type: ignore[method-assign]
                    swapped.append(module)
    try:
        yield
    finally:
        for module in swapped:
            del module.forward
