"""The second backend: one forward of the target over rows of many sequences, each in a slot of the ragged store.

The rows of all sequences are one flattened row, [1, T], with a position each; attention keeps sequences apart, so
everything else in the target runs as if they were one text. Axes: T rows of one forward, m tapped layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from ..model.modeling_dspark import DSparkDraftModel
from .backend import Reading, Rows
from .compat import CACHE_ARGUMENT
from .ragged_cache import Layout, RaggedStore, Slot, causal_mask, is_out_of_memory
from .sequence import TextSequence
from .target import TargetTaps, has_recurrent_layers, length_dependent_rope

_ATTENTION = "dspark_ragged"
_PLAIN_LAYERS = {"full_attention", "sliding_attention"}
_CHECKED = "_dspark_ragged_checked"
_TOLERANCE = 0.05  # share of the logits' spread by which a ragged forward may differ in the check


class _RaggedLayer(CacheLayerMixin):
    """Writes a forward's keys and values into the slots; attention reads them there."""

    is_sliding = False

    def __init__(self, cache: _RaggedCache, layer: int) -> None:
        super().__init__()
        self.cache, self.layer = cache, layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        self.cache.layout.write(self.layer, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class _RaggedCache(Cache):
    """What the target takes for its cache; `layout` is set for each forward."""

    def __init__(self, num_layers: int) -> None:
        self.layout: Layout
        super().__init__(layers=[_RaggedLayer(self, i) for i in range(num_layers)])


def _ragged_attention(
    module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    ragged_layout: Layout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
):
    if ragged_layout is None or s_aux is not None:
        raise ValueError(
            f"{type(module).__name__} "
            + ("does not pass arguments on to its attention" if ragged_layout is None else "has attention sinks")
            + ", so the batch engine can't serve this target. Decode one request at a time with generate()."
        )
    mask_of = causal_mask(sliding_window)
    out = ragged_layout.attend(module.layer_idx, query, mask_of, sliding_window, scaling, softcap)
    return out, None


AttentionInterface.register(_ATTENTION, _ragged_attention)


class RaggedTarget:
    """The target over many sequences; its layers are tapped for `drafter`, if there is one."""

    def __init__(self, target: PreTrainedModel, drafter: DSparkDraftModel | None) -> None:
        check_structure(target)
        self.target, self.drafter = target, drafter
        self.device = target.device
        self.store = RaggedStore()
        self._cache = _RaggedCache(target.config.get_text_config().num_hidden_layers)
        self._keeps_logits = target._supports_logits_to_keep()
        self._taps: TargetTaps | None = None
        self._read: list[Slot] = []  # those of the last forward

    @contextmanager
    def armed(self) -> Iterator[None]:
        """The target attends raggedly and is tapped inside the block; afterwards, also after an error, all is as before."""
        before = self.target.config._attn_implementation
        self.target.set_attn_implementation(_ATTENTION)
        try:
            if self.drafter is None:
                yield
                return
            with TargetTaps(self.target, self.drafter.config.target_layer_ids) as self._taps:
                yield
        finally:
            self._taps = None
            self.target.set_attn_implementation(before)

    def room(self, sequence: TextSequence) -> int:
        return sequence.room

    def padded(self, rows: int, wanted: int) -> int:
        return wanted

    def read(self, rows: Sequence[Rows], padding: int) -> list[Reading]:
        slots = [place(row.sequence) for row in rows]
        for slot, row in zip(slots, rows):
            self.store.reserve(slot, slot.length + len(row.token_ids))
        ids, keeps = [row.token_ids for row in rows], [row.keep for row in rows]
        self._read = slots
        if not padding:
            return self._forward(slots, ids, keeps)
        idle = self.store.open(padding)
        try:
            return self._forward([*slots, idle], [*ids, ids[0][:1].expand(padding)], [*keeps, 0])[:-1]
        finally:
            self.store.close(idle)

    def keep(self, paths: Sequence[Sequence[int]]) -> int:
        for slot, path in zip(self._read, paths):
            self.store.keep(slot, path)
        return 0

    def _forward(
        self, slots: Sequence[Slot], token_ids: Sequence[torch.LongTensor], keeps: Sequence[int]
    ) -> list[Reading]:
        """The rows of all slots at once. The slots must have room; their `length` stays."""
        layout = Layout(slots, [len(ids) for ids in token_ids], self.device)
        ids = torch.cat([token_ids[i] for i in layout.order])[None]
        ends = [layout.starts[i] + len(own) for i, own in enumerate(token_ids)]
        kept = [row for end, count in zip(ends, keeps) for row in range(end - count, end)]
        keep = torch.tensor(kept or [0], device=self.device)  # no product has no rows at all
        arguments = {"logits_to_keep": keep} if self._keeps_logits else {}
        self._cache.layout = layout
        if self._taps is not None:
            self._taps.drop()  # a processor may have run the target
        try:
            outputs = self.target(
                input_ids=ids.to(self.device),
                position_ids=torch.tensor([layout.positions], device=self.device),
                use_cache=True,
                ragged_layout=layout,
                **arguments,
                **{CACHE_ARGUMENT: self._cache},
            )
            features = None
            if self._taps is not None and self.drafter is not None:
                features = self._taps.take(self.drafter.device)
        finally:
            del self._cache.layout
        logits = outputs.logits[0] if self._keeps_logits else outputs.logits[0, keep]
        readings, at = [], 0
        for start, end, count in zip(layout.starts, ends, keeps):
            # A copy, or these rows would keep everybody's features of this round.
            own = None if features is None else features[:, start:end].clone()
            readings.append(Reading(logits[at : at + count], own))
            at += count
        return readings


def place(sequence: TextSequence) -> Slot:
    """The slot of a sequence that runs."""
    assert sequence.slot is not None, "a running sequence has a slot"
    return sequence.slot


def check_structure(target: PreTrainedModel) -> None:
    """Refuse a target whose layers are not all plain attention.

    Raises:
        ValueError: an encoder-decoder model, an offloaded one, layers with another state than keys and values, positions that
            depend on the longest text.
    """
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"{type(target).__name__} is an encoder-decoder model; the batch engine serves decoder-only ones."
        )
    if target.device.type == "meta":
        raise ValueError(
            f"This {type(target).__name__} is offloaded, so the batch engine knows no device for its cache. Keep the embedding "
            "on one (decoder layers may be offloaded, by a device_map), or decode one request at a time with generate()."
        )
    text = target.config.get_text_config().to_dict()
    if rope := length_dependent_rope(target):
        raise ValueError(
            f"{type(target).__name__} has rotary embeddings of kind {rope[0]}, which depend on the longest text of a forward, so "
            "texts would not be independent in the batch engine. Decode one request at a time with generate()."
        )
    layer_types = set(text.get("layer_types") or ()) - _PLAIN_LAYERS
    if layer_types:
        raise ValueError(
            f"{type(target).__name__} has layers of kind {', '.join(sorted(layer_types))}, whose state the batch engine can't "
            "keep for many sequences. Decode one request at a time with generate()."
        )
    if has_recurrent_layers(target):
        raise ValueError(
            f"{type(target).__name__} has a recurrent state, which the batch engine can't keep for many sequences. Decode one "
            "request at a time with generate()."
        )


@torch.inference_mode()
def check_target(target: PreTrainedModel) -> None:
    """Compare a ragged forward of two tiny texts with ordinary ones, once for a model, so that none is served wrongly.

    Raises:
        ValueError: the logits differ by more than rounding, or the target refuses the call.
    """
    if getattr(target, _CHECKED, False):
        return
    backend = RaggedTarget(target, None)
    ids = torch.arange(2, 10, device=target.device) % target.config.get_text_config().vocab_size
    texts = [ids[:5], ids[3:6]]
    slots = [backend.store.open(8) for _ in texts]
    plain = [target(input_ids=t[None], use_cache=False).logits[0, -1].float() for t in texts]
    try:
        with backend.armed():
            backend._forward(slots[:1], [texts[0][:2]], [1])
            slots[0].length = 2
            readings = backend._forward(slots, [texts[0][2:], texts[1]], [1, 1])
            ragged = [reading.logits[0].float() for reading in readings]
    except (TypeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"The batch engine can't serve {type(target).__name__}: {' '.join(str(error).split())[:200]}. Decode one request at "
            "a time with generate()."
        ) from error
    for here, there in zip(plain, ragged):
        if not torch.allclose(here, there, atol=_TOLERANCE * float(here.std()) + 1e-6, rtol=0.0):
            raise ValueError(
                f"{type(target).__name__} gives other logits when several texts share a forward (its attention is of a kind "
                "the batch engine does not know). Decode one request at a time with generate()."
            )
    setattr(target, _CHECKED, True)
