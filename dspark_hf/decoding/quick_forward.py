"""What makes a forward of a few tokens over a long context quick without changing what it computes.

Owns: keys and values that grow in place, attention that does not copy them for every head. Does not own: products
(`linear_layers`), when a forward runs (`loop`), which caches can be rewound (`rewinding`).
Axes: B sequences, H query heads, G key and value heads, M tokens of the forward, C cached ones and those, D head size.

transformers copies the whole cache for each forward (`torch.cat`), and once more for each group of heads where a mask is needed,
which several tokens at once do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_torchdynamo_compiling

_LEAST_ROOM = 64  # tokens that a buffer gets at least beyond what it holds
_MOST_TOKENS = 64  # of one forward; with more, copying no longer matters


class GrowingLayer(DynamicLayer):
    """`keys` and `values` are the first part of buffers with room behind, into which new ones are written."""

    keys: torch.Tensor
    values: torch.Tensor
    _rooms: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized or self.keys.numel() == 0 or self.keys.shape[:2] != key_states.shape[:2]:
            return super().update(key_states, value_states, *args, **kwargs)
        # In plain words and few calls: this runs for every layer of every forward.
        length, new = self.keys.shape[2], key_states.shape[2]
        if not self._has_room(length + new):
            room = length + new + max(_LEAST_ROOM, length // 2)
            self._rooms = _with_room(self.keys, room), _with_room(self.values, room)
        assert self._rooms is not None
        keys, values = self._rooms
        keys.narrow(2, length, new).copy_(key_states)
        values.narrow(2, length, new).copy_(value_states)
        self.keys, self.values = keys.narrow(2, 0, length + new), values.narrow(2, 0, length + new)
        return self.keys, self.values

    def _has_room(self, end: int) -> bool:
        """Whether `end` tokens fit, and the buffers are still those that keys and values are part of."""
        if self._rooms is None:
            return False
        keys, values = self._rooms
        is_ours = keys.data_ptr() == self.keys.data_ptr() and values.data_ptr() == self.values.data_ptr()
        return is_ours and keys.shape[2] >= end


def _with_room(states: torch.Tensor, room: int) -> torch.Tensor:
    # An ordinary tensor also under inference mode: the cache may be the user's.
    with torch.inference_mode(False), torch.no_grad():
        buffer = states.new_empty(*states.shape[:2], room, states.shape[-1])
    buffer[:, :, : states.shape[-2]] = states
    return buffer


def grow_in_place(cache: Cache) -> None:
    """Let the plain layers of a cache grow without copies, until `make_plain` is called."""
    if type(cache) is DynamicCache and not cache.offloading:
        for layer in cache.layers:
            if type(layer) is DynamicLayer:
                layer.__class__ = GrowingLayer


def make_plain(cache: Cache) -> None:
    """Make a cache plain again that outlives our loop: no room behind its keys and values, tensors for any later use."""
    for layer in cache.layers:
        if type(layer) is GrowingLayer:
            layer.__class__ = DynamicLayer
            if layer.__dict__.pop("_rooms", None) is not None:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        for name, value in layer.__dict__.items():
            if isinstance(value, dict):  # recurrent states
                layer.__dict__[name] = {key: _ordinary(state) for key, state in value.items()}
            else:
                layer.__dict__[name] = _ordinary(value)


def _ordinary(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value.is_inference() else value


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


def ordinary_buffers(model: nn.Module) -> None:
    """Make buffers that a forward under inference mode has set (rope frequencies of a longer text) tensors for any later use."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = _ordinary(buffer)
