"""One forward of the target over rows of many sequences.

Owns: flattening the rows, the target's attention while the engine runs, its cache, its tapped features, the check that a
target can be served. Does not own: which rows (`engine`), tokens, the drafter (`drafting`).
Axes: T rows of one forward, m tapped layers, V vocabulary.

The rows of all sequences are one flattened row, [1, T], with a position each; attention keeps sequences apart, so
everything else in the target runs as if they were one text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from ..decoding.compat import CACHE_ARGUMENT
from ..decoding.targets import TargetTaps, length_dependent_rope
from ..model.modeling_dspark import DSparkDraftModel
from .cache import Layout, RaggedStore, Slot, causal_mask, is_out_of_memory

_ATTENTION = "dspark_ragged"
_PLAIN_LAYERS = {"full_attention", "sliding_attention"}
_CHECKED = "_dspark_ragged_checked"
_TOLERANCE = 0.05  # share of the logits' spread by which a ragged forward may differ in the check


@dataclass(frozen=True)
class Span:
    """New tokens of one sequence: `token_ids` [Q], to stand behind what `slot` holds; logits of the last `keep` of them."""

    slot: Slot
    token_ids: torch.LongTensor
    keep: int


@dataclass(frozen=True)
class SpanOutput:
    """What the target says of a span of `num_rows` tokens: logits [keep, V], features [1, Q, m * d_target] if tapped."""

    num_rows: int
    logits: torch.Tensor
    features: torch.Tensor | None


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


class Runner:
    """The target's side of the engine; its layers are tapped for `drafter`, if there is one."""

    def __init__(self, target: PreTrainedModel, drafter: DSparkDraftModel | None) -> None:
        check_structure(target)
        self.target, self.drafter = target, drafter
        self.device = target.device
        self.store = RaggedStore()
        self._cache = _RaggedCache(target.config.get_text_config().num_hidden_layers)
        self._keeps_logits = target._supports_logits_to_keep()
        self._taps: TargetTaps | None = None

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

    def forward(self, spans: Sequence[Span], padding: int = 0) -> list[SpanOutput]:
        """Run the rows of all spans at once, and `padding` idle ones. The slots must have room; their `length` stays."""
        if padding > 0:
            scratch = self.store.open(padding)
            try:
                idle = spans[0].token_ids[:1].expand(padding)
                return self.forward([*spans, Span(scratch, idle, 0)])[:-1]
            finally:
                self.store.close(scratch)
        layout = Layout([s.slot for s in spans], [len(s.token_ids) for s in spans], self.device)
        ids = torch.cat([spans[i].token_ids for i in layout.order])[None]
        kept = [layout.starts[i] + len(s.token_ids) - s.keep + k for i, s in enumerate(spans) for k in range(s.keep)]
        keep = torch.tensor(kept or [0], device=self.device)  # no product has no rows at all
        arguments = {"logits_to_keep": keep} if self._keeps_logits else {}
        self._cache.layout = layout
        try:
            outputs = self.target(
                input_ids=ids.to(self.device),
                position_ids=torch.tensor([layout.positions], device=self.device),
                use_cache=True,
                ragged_layout=layout,
                **arguments,
                **{CACHE_ARGUMENT: self._cache},
            )
            features = None if self._taps is None else self._taps.take(self.drafter.device)  # type: ignore[union-attr]
        finally:
            if self._taps is not None:
                self._taps.drop()
            del self._cache.layout
        logits = outputs.logits[0] if self._keeps_logits else outputs.logits[0, keep]
        results, at = [], 0
        for i, span in enumerate(spans):
            start = layout.starts[i]
            own = None if features is None else features[:, start : start + len(span.token_ids)]
            results.append(SpanOutput(len(span.token_ids), logits[at : at + span.keep], own))
            at += span.keep
        return results


def check_structure(target: PreTrainedModel) -> None:
    """Refuse a target whose layers are not all plain attention.

    Raises:
        ValueError: an encoder-decoder model, layers with another state than keys and values, positions that depend on the
            longest text.
    """
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"{type(target).__name__} is an encoder-decoder model; the batch engine serves decoder-only ones."
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
    if target._is_stateful:
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
    runner = Runner(target, None)
    ids = torch.arange(2, 10, device=target.device) % target.config.get_text_config().vocab_size
    texts = [ids[:5], ids[3:6]]
    slots = [runner.store.open(8) for _ in texts]
    plain = [target(input_ids=t[None], use_cache=False).logits[0, -1].float() for t in texts]
    try:
        with runner.armed():
            runner.forward([Span(slots[0], texts[0][:2], 1)])
            slots[0].length = 2
            spans = [Span(slots[0], texts[0][2:], 1), Span(slots[1], texts[1], 1)]
            ragged = [output.logits[0].float() for output in runner.forward(spans)]
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
