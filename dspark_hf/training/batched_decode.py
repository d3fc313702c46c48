"""Batched sampling from a causal LM with slots that are refilled, for making training text.

Owns: a cache of fixed slots, the decode loop over them, temperature / top-k / top-p draws per slot.
Does not own: prompts, files, which text is worth keeping (`responses`), speculative decoding.
Axes: B slots, S positions held by a slot, V vocabulary.

`generate()` concatenates the cache every step and repeats K/V for grouped heads; on a CPU both cost more than the
matrix products. Here K/V are written in place and each K/V head attends to its group of query heads at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from ..decoding.compat import CACHE_ARGUMENT, cache_of

_ATTENTION = "dspark_slots"


@dataclass(frozen=True)
class TextRequest:
    """One text to continue: `input_ids`, how many tokens at most, and how to draw them (temperature 0 = greedy)."""

    key: int
    input_ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0


@dataclass(frozen=True)
class TextResult:
    """The continuation of one request; it holds the end-of-sequence token where one was drawn."""

    key: int
    input_ids: list[int]
    response_ids: list[int]


@dataclass
class _Slot:
    request: TextRequest
    response_ids: list[int] = field(default_factory=list)


class _SlotLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, slots: SlotCache) -> None:
        super().__init__()
        self.slots = slots

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        heads, dim = key_states.shape[1], key_states.shape[3]
        shape = (self.slots.num_slots, heads, self.slots.max_length, dim)
        self.keys = key_states.new_zeros(shape)
        self.values = value_states.new_zeros(shape)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        rows, positions, length = self.slots.rows, self.slots.positions, self.slots.visible_length
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        return self.keys[:, :, :length], self.values[:, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.visible_length, 0

    def get_seq_length(self) -> int:
        return self.slots.visible_length

    def get_max_length(self) -> int:
        return self.slots.max_length


class SlotCache(Cache):
    """K/V of `num_slots` sequences of different lengths, each written at its own position (`positions` [B])."""

    def __init__(self, num_layers: int, num_slots: int, max_length: int, device: torch.device) -> None:
        self.num_slots, self.max_length = num_slots, max_length
        self.rows = torch.arange(num_slots, device=device)
        self.positions = torch.zeros(num_slots, dtype=torch.long, device=device)
        self.visible_length = 0
        super().__init__(layers=[_SlotLayer(self) for _ in range(num_layers)])

    def admit(self, rows: torch.Tensor, prefilled: DynamicCache, lengths: list[int]) -> None:
        """Copy the K/V of left-padded prompts into `rows`, without their padding."""
        for layer, source in zip(self.layers, prefilled.layers, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(source.keys, source.values)
            for i, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
                layer.keys[row, :, :length] = source.keys[i, :, -length:]
                layer.values[row, :, :length] = source.values[i, :, -length:]


def _slot_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    batch, heads, _, dim = query.shape
    grouped = query.view(batch, key.shape[1], heads // key.shape[1], dim)
    out = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, 1, heads, dim), None


AttentionInterface.register(_ATTENTION, _slot_attention)


def draw_tokens(
    logits: torch.Tensor,  # [B, V]
    temperatures: torch.Tensor,  # [B], 0 = argmax
    *,
    top_k: int,
    top_p: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """One token per row: temperature, then the `top_k` best, then the smallest set of mass `top_p` among them. [B]"""
    values, indices = logits.float().topk(min(top_k, logits.shape[-1]), dim=-1)
    probs = (values / temperatures.clamp(min=1e-4)[:, None]).softmax(-1)
    probs = probs.masked_fill(probs.cumsum(-1) - probs > top_p, 0.0)
    drawn = torch.multinomial(probs, 1, generator=generator)[:, 0]
    drawn = torch.where(temperatures == 0, torch.zeros_like(drawn), drawn)
    return indices.gather(1, drawn[:, None])[:, 0]


@torch.inference_mode()
def decode_batched(
    target: PreTrainedModel,
    requests: Iterable[TextRequest],
    *,
    eos_token_ids: set[int],
    pad_token_id: int,
    num_slots: int = 128,
    max_length: int = 512,
    top_k: int = 50,
    top_p: float = 0.95,
    seed: int = 0,
) -> Iterator[TextResult]:
    """Yield the continuation of every request, in the order in which they end.

    Only for targets whose layers are all full attention over the whole text (`supports_slots`). A text ends at an
    end-of-sequence token, at its own `max_new_tokens` or when it fills its slot of `max_length` tokens.
    """
    device = target.device
    generator = torch.Generator(device).manual_seed(seed)
    cache = SlotCache(target.config.get_text_config().num_hidden_layers, num_slots, max_length, device)
    waiting = iter(requests)
    slots: list[_Slot | None] = [None] * num_slots
    temperatures = torch.zeros(num_slots, device=device)
    tokens = torch.full((num_slots,), pad_token_id, device=device)
    columns = torch.arange(max_length, device=device)
    original = target.config._attn_implementation
    exhausted = False

    def finish(row: int) -> TextResult:
        slot, slots[row] = slots[row], None
        assert slot is not None
        cache.positions[row] = 0
        return TextResult(slot.request.key, slot.request.input_ids, slot.response_ids)

    def ended(slot: _Slot) -> bool:
        used, last = len(slot.response_ids), slot.response_ids[-1]
        full = len(slot.request.input_ids) + used >= max_length
        return full or used >= slot.request.max_new_tokens or last in eos_token_ids

    try:
        while True:
            free = [row for row, slot in enumerate(slots) if slot is None]
            # Refill in groups: a prefill for one row costs nearly as much as one for eight.
            if not exhausted and (len(free) >= max(1, num_slots // 8)):
                group: list[TextRequest] = []
                for request in waiting:
                    group.append(request)
                    if len(group) == len(free):
                        break
                exhausted = len(group) < len(free)
                group.sort(key=lambda r: len(r.input_ids))
                while group:
                    part, group = group[:16], group[16:]
                    rows = torch.tensor(free[: len(part)], device=device)
                    free = free[len(part) :]
                    target.set_attn_implementation(original)
                    logits, prefilled = _prefill(target, part, pad_token_id)
                    cache.admit(rows, prefilled, [len(r.input_ids) for r in part])
                    temperatures[rows] = torch.tensor([r.temperature for r in part], device=device)
                    cache.positions[rows] = torch.tensor([len(r.input_ids) for r in part], device=device)
                    tokens[rows] = draw_tokens(
                        logits, temperatures[rows], top_k=top_k, top_p=top_p, generator=generator
                    )
                    for row, request, token in zip(rows.tolist(), part, tokens[rows].tolist(), strict=True):
                        slots[row] = _Slot(request, [token])
                        if ended(slots[row]):
                            yield finish(row)
            if all(slot is None for slot in slots):
                if exhausted:
                    return
                continue
            target.set_attn_implementation(_ATTENTION)
            cache.visible_length = int(cache.positions.max()) + 1
            mask = columns[None, : cache.visible_length] <= cache.positions[:, None]
            output = target(
                input_ids=tokens[:, None],
                position_ids=cache.positions[:, None],
                attention_mask=mask[:, None, None, :],
                use_cache=True,
                **{CACHE_ARGUMENT: cache},
            )
            tokens = draw_tokens(output.logits[:, -1], temperatures, top_k=top_k, top_p=top_p, generator=generator)
            for row, token in enumerate(tokens.tolist()):
                slot = slots[row]
                if slot is None:
                    continue
                slot.response_ids.append(token)
                cache.positions[row] += 1
                if ended(slot):
                    yield finish(row)
    finally:
        target.set_attn_implementation(original)


def _prefill(target: PreTrainedModel, part: list[TextRequest], pad_token_id: int) -> tuple[torch.Tensor, DynamicCache]:
    longest = max(len(r.input_ids) for r in part)
    ids = torch.full((len(part), longest), pad_token_id)
    mask = torch.zeros(len(part), longest, dtype=torch.long)
    for i, request in enumerate(part):
        ids[i, -len(request.input_ids) :] = torch.tensor(request.input_ids)
        mask[i, -len(request.input_ids) :] = 1
    output = target(
        input_ids=ids.to(target.device),
        attention_mask=mask.to(target.device),
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0).to(target.device),
        use_cache=True,
        logits_to_keep=1,
        **{CACHE_ARGUMENT: DynamicCache(config=target.config)},
    )
    return output.logits[:, -1], cache_of(output)


def supports_slots(target: PreTrainedModel) -> bool:
    """Whether every layer of `target` is plain full attention, as `decode_batched` needs."""
    if target._is_stateful:  # some hybrids name no layer types, or have both kinds in every layer
        return False
    config = target.config.get_text_config()
    layer_types = config.to_dict().get("layer_types") or ["full_attention"]
    return set(layer_types) == {"full_attention"} and not target.config.is_encoder_decoder
