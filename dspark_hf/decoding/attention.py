"""Attention of a few tokens over a long context without copies of keys and values for every head.

transformers repeats them for each group of heads where a mask is needed, which several tokens at once do. Axes: B sequences,
H query heads, G key and value heads, M tokens of the forward, C cached ones and those, D head size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_torchdynamo_compiling

_MOST_TOKENS = 64  # of one forward; with more, copying no longer matters


class _GroupedAttention:
    """`sdpa` for several tokens with a mask, the heads of a group as more queries of their keys; anything else as before."""

    def __init__(self, stock: Callable) -> None:
        self.stock = stock
        self._repeated: list[tuple[torch.Tensor, torch.Tensor]] = []  # masks that layers share

    def __call__(self, module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
        groups, tokens = query.shape[1] // key.shape[1], query.shape[2]
        suits = (
            not is_torchdynamo_compiling()
            and 1 < tokens <= _MOST_TOKENS
            and groups > 1
            and key.shape[1] * groups == query.shape[1]
            and attention_mask is not None
            and attention_mask.shape[1:] == (1, tokens, key.shape[2])
            and not dropout
            and kwargs.get("softcap") is None
            and kwargs.get("position_bias") is None
            and not kwargs.get("output_attentions")
        )
        if not suits:
            return self.stock(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        output = F.scaled_dot_product_attention(
            query.reshape(query.shape[0], key.shape[1], groups * tokens, query.shape[-1]),
            key,
            value,
            attn_mask=self._repeat(attention_mask, groups),
            scale=scaling,
        )
        return output.reshape(*query.shape[:3], value.shape[-1]).transpose(1, 2).contiguous(), None

    def _repeat(self, mask: torch.Tensor, groups: int) -> torch.Tensor:
        """[B, 1, M, C] -> [B, 1, groups * M, C]"""
        for known, repeated in self._repeated:
            if known is mask and repeated.shape[2] == groups * mask.shape[2]:
                return repeated
        repeated = mask.repeat(1, 1, groups, 1)
        self._repeated = [*self._repeated[-1:], (mask, repeated)]  # of full and of sliding layers
        return repeated


class _Override:
    """Counts who uses the attention, so that the last one out puts the stock one back."""

    lock = threading.Lock()
    users = 0
    stock: Callable
    was_local = False  # whether someone had put it into this mapping, over the registered one


@contextmanager
def grouped_attention() -> Iterator[None]:
    """Inside the block, `sdpa` does not copy keys and values for each head of a group."""
    with _Override.lock:
        if not _Override.users:
            _Override.was_local = "sdpa" in ALL_ATTENTION_FUNCTIONS._local_mapping
            _Override.stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
            ALL_ATTENTION_FUNCTIONS["sdpa"] = _GroupedAttention(_Override.stock)
        _Override.users += 1
    try:
        yield
    finally:
        with _Override.lock:
            _Override.users -= 1
            if not _Override.users and _Override.was_local:
                ALL_ATTENTION_FUNCTIONS["sdpa"] = _Override.stock
            elif not _Override.users:
                del ALL_ATTENTION_FUNCTIONS["sdpa"]
