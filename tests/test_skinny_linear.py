"""The CPU formulation of linear layers on few rows: the same numbers, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dspark_hf.decoding.skinny_linear import MAX_ROWS, skinny_linears


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 5), (2, 3), (1, MAX_ROWS), (3, 40), (7,)])
def test_same_numbers(bias, shape):
    layer = nn.Linear(24, 10, bias=bias)
    x = torch.randn(*shape, 24)
    with torch.no_grad():
        wanted = layer(x)
        with skinny_linears([layer]):
            got = layer(x)
    torch.testing.assert_close(got, wanted)
    assert got.is_contiguous()


def test_undone_afterwards_and_after_an_error():
    layer = nn.Linear(4, 4)
    with torch.no_grad(), pytest.raises(RuntimeError), skinny_linears([layer]):
        assert "forward" in vars(layer)
        raise RuntimeError
    assert "forward" not in vars(layer)


def test_left_alone():
    class Own(nn.Linear):
        pass

    hooked, half, other = nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16), Own(4, 4)
    hooked.register_forward_hook(lambda *a: None)
    layers = [hooked, half, other]
    with torch.no_grad(), skinny_linears(layers):
        assert all("forward" not in vars(layer) for layer in layers)
    plain = nn.Linear(4, 4)
    with skinny_linears([plain]):  # gradients are on: training is left alone
        assert "forward" not in vars(plain)
    with torch.no_grad(), skinny_linears([plain], enabled=False):
        assert "forward" not in vars(plain)
