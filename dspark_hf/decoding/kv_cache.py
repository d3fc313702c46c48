"""A cache whose keys and values grow in place: transformers copies the whole of it (`torch.cat`) in every forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

_LEAST_ROOM = 64  # tokens that a buffer gets at least beyond what it holds


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


def ordinary_buffers(model: nn.Module) -> None:
    """Make buffers that a forward under inference mode has set (rope frequencies of a longer text) tensors for any later use."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = _ordinary(buffer)
