"""`DSparkDraftModel`: context features, the parallel stage, and drafting with it (paper §3.1).

Embedding and LM head are the target's (`bind_target`) unless the checkpoint brings its own.
Axes: B sequences, S new context tokens, C context tokens so far, γ drafted tokens, d hidden size, m tapped layers,
V the drafter's vocabulary (a resized target has more tokens), V_d draft vocabulary (= V unless reduced), A training anchors.
This file travels with a checkpoint (`auto_map`), so it imports only its neighbours `*_dspark.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.utils import ModelOutput, logging

from .configuration_dspark import DSparkConfig
from .eagle3_dspark import Eagle3Layer, cached_slots
from .heads_dspark import ConfidenceHead, make_markov_head
from .layers_dspark import DSparkLayer, Gemma4Layer, RMSNorm, block_mask, sees_everything
from .pretrained_dspark import DSparkPreTrainedModel
from .sampler_dspark import (
    LARGE_VOCABULARY,
    TOP_CANDIDATES,
    Admission,
    BlockSlots,
    DraftBlock,
    DraftRow,
    Sampler,
    Slots,
    scores_dtype,
)

_LAYERS = {"qwen3": DSparkLayer, "gemma4": Gemma4Layer, "eagle3": Eagle3Layer}
logger = logging.get_logger(__name__)


@dataclass
class DSparkDraftOutput(ModelOutput):
    """What the parallel stage returns.

    last_hidden_state: [B, block_size, d], after the final norm.
    logits: [B, block_size, V_d], the base logits U.
    cache: K/V of the context alone, ready for the next round.
    """

    last_hidden_state: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    cache: Cache | None = None


class DSparkDraftModel(DSparkPreTrainedModel):
    """A DSpark drafter. Use it as `target.generate(..., assistant_model=drafter)` after `import dspark_hf`."""

    _auto_class = "AutoModel"  # saved with these files and an `auto_map`, so that it loads without this package
    _default_options: ClassVar[type | None] = None  # set where the whole package is imported

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.Identity() if config.is_autoregressive else norm  # Eagle3 norms them in its layer
        self.layers = nn.ModuleList(_LAYERS[config.layer_form](config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.markov_head = make_markov_head(
            config.markov_head_type,
            config.vocab_size,
            config.draft_vocab_size,
            config.markov_rank,
            config.hidden_size,
        )
        self.confidence_head = None
        if config.enable_confidence_head:
            extra = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(config.hidden_size + extra)
        self.embed_tokens: nn.Embedding | None = None
        self.lm_head: nn.Linear | None = None
        if config.has_own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.has_own_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        # int64 offsets, the field's form: target id = draft id + d2t[draft id]
        offsets = torch.zeros(config.draft_vocab_size, dtype=torch.long) if config.has_reduced_vocab else None
        self.register_buffer("d2t", offsets)
        self._target_embedding: list[nn.Module] = []  # in lists, so that they do not become our submodules
        self._target_head: list[nn.Module] = []
        self._bound_to: list[nn.Module] = []  # the target's own two; an adapter may replace either
        self.target_vocab_size = config.vocab_size  # of the bound target; what it has beyond V is never drafted
        # How it drafts (`decoding.options`), where the whole package is there; nothing of it is saved.
        self.options: Any = self._default_options() if self._default_options is not None else None
        self.last_generation: Any = None  # statistics of the last `generate()` call
        self.post_init()
        self.generation_config = GenerationConfig(
            num_assistant_tokens=config.num_draft_tokens, assistant_confidence_threshold=0.0
        )

    # -- the target's parts ------------------------------------------------------------------------------------------

    def get_input_embeddings(self) -> nn.Module | None:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding | None) -> None:
        self.embed_tokens = value

    def draft_token_ids(self) -> torch.LongTensor:
        """Target ids of the draft vocabulary. [V_d]"""
        ids = torch.arange(self.config.draft_vocab_size, device=self.device)
        return ids if self.d2t is None else ids + self.d2t

    def set_draft_vocabulary(self, token_ids: torch.LongTensor) -> None:
        """Choose which target ids can be proposed: [V_d], ascending (stored as offsets)."""
        if self.d2t is None:
            raise ValueError("This drafter proposes from the whole vocabulary; set config.draft_vocab_size first.")
        if token_ids.shape != self.d2t.shape or bool((token_ids.diff() <= 0).any()):
            raise ValueError(
                f"Give {len(self.d2t)} different target ids in ascending order, got {tuple(token_ids.shape)}."
            )
        self._bound_to, self._target_embedding, self._target_head = (
            [],
            [],
            [],
        )  # bound again at next use: the head's rows are others now
        self.d2t.copy_(token_ids.to(self.d2t.device) - torch.arange(len(token_ids), device=self.d2t.device))

    @torch.inference_mode(False)  # what is cut out here is kept
    @torch.no_grad()
    def bind_target(self, target: PreTrainedModel) -> None:
        """Use the target's embedding and LM head. Own copies that are equal are dropped, others kept with a warning.

        The target may have more tokens than the drafter (padding, added ones): these are never drafted. Call it again after the
        target was resized; `generate()` does.

        Raises:
            ValueError: the target has fewer tokens or another hidden size, or its embedding or LM head is offloaded.
        """
        parts, config = [target.get_input_embeddings(), target.get_output_embeddings()], target.config.get_text_config()
        embedding, head = parts
        if embedding is None or head is None:
            raise ValueError(f"{type(target).__name__} has no input or output embeddings to share with the drafter.")
        if embedding.weight.is_meta or head.weight.is_meta:
            raise ValueError(
                f"The embedding or LM head of this {type(target).__name__} is offloaded, and the drafter needs both on a device. "
                "Keep them there (decoder layers may be offloaded, by a device_map), or decode without assistant_model."
            )
        is_known = bool(self._bound_to) and all(ours is theirs for ours, theirs in zip(self._bound_to, parts))
        if is_known and self.target_vocab_size == config.vocab_size:
            return
        self._check_sizes(target)
        if self.embed_tokens is not None and _same_weight(self.embed_tokens, embedding):
            self.embed_tokens = None
        if self.config.has_reduced_vocab:
            head = self._reduced_head(head)
        if self.lm_head is not None and _same_weight(self.lm_head, head):
            self.lm_head = None
        if self.embed_tokens is not None or self.lm_head is not None:
            logger.warning_once("The drafter's own embedding or LM head differs from the target's and is kept.")
        self._bound_to = parts
        self._target_embedding = [embedding]
        self._target_head = [head]
        self.target_vocab_size = config.vocab_size

    def _check_sizes(self, target: PreTrainedModel) -> None:
        config = target.config.get_text_config()
        for name, ours in (("vocab_size", self.config.vocab_size), ("hidden_size", self.config.target_hidden_size)):
            theirs = getattr(config, name)
            if theirs == ours or (name == "vocab_size" and theirs > ours):
                continue
            trained_for, path = self.config.target_model_name_or_path, target.config._name_or_path
            needs = f", and may have {ours} or more" if name == "vocab_size" else ""
            raise ValueError(
                f"This drafter does not fit the target: the drafter was made for {name} {ours}"
                f"{f' ({trained_for})' if trained_for else ''}, the target{f' {path}' if path else ''} has {theirs}{needs}. "
                "Use a drafter trained for this target (`dspark-hf train`)."
            )

    def known_ids(self, token_ids: torch.LongTensor) -> torch.LongTensor:
        """Ids for the drafter's own tables: tokens that only the target has are read as the mask token. [...] -> [...]"""
        if self.target_vocab_size == self.config.vocab_size:
            return token_ids
        return token_ids.where(token_ids < self.config.vocab_size, self.config.mask_token_id)

    def _reduced_head(self, head: nn.Module) -> nn.Linear:
        """The rows of the target's LM head for the draft vocabulary."""
        ids = self.draft_token_ids().to(head.weight.device)
        bias = getattr(head, "bias", None)
        rows = nn.Linear(self.config.hidden_size, len(ids), bias=bias is not None, device="meta")
        rows.weight = nn.Parameter(head.weight[ids].to(self.device, self.dtype), requires_grad=False)
        if bias is not None:
            rows.bias = nn.Parameter(bias[ids].to(self.device, self.dtype), requires_grad=False)
        return rows

    @torch.no_grad()
    def follow_head(self) -> None:
        """Bring LM head rows that were cut out of the target up to date: a weight may be changed without leaving a trace."""
        for rows in self.bound_heads():
            anew = self._reduced_head(self._bound_to[1])
            for ours, theirs in ((rows.weight, anew.weight), (rows.bias, anew.bias)):
                if ours is not None and not torch.equal(ours, theirs):
                    ours.copy_(theirs)

    def bound_heads(self) -> list[nn.Module]:
        """The LM head rows cut out for a reduced draft vocabulary (no submodule of ours), if any."""
        return self._target_head if self.config.has_reduced_vocab else []

    def embed(self, input_ids: torch.LongTensor) -> torch.Tensor:
        """Token embeddings in the drafter's dtype and device. [...] -> [..., d]"""
        table = self.embed_tokens if self.embed_tokens is not None else next(iter(self._target_embedding), None)
        if table is None:
            raise ValueError(
                "The drafter has no embedding yet: call `drafter.bind_target(target)` or pass `noise_embeds`."
            )
        ids = self.known_ids(input_ids) if table is self.embed_tokens else input_ids
        ids, scale = ids.to(table.weight.device), self.config.embedding_scale
        if scale is None:
            return table(ids).to(self.device, self.dtype)
        return F.embedding(ids, table.weight).to(self.device, self.dtype) * scale

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Base logits U of hidden states. [..., d] -> [..., V_d]"""
        head = self.lm_head if self.lm_head is not None else next(iter(self._target_head), None)
        if head is None:
            raise ValueError("The drafter has no LM head yet: call `drafter.bind_target(target)`.")
        weight = head.weight
        logits = head(hidden_states.to(weight.device, weight.dtype if weight.is_floating_point() else None))
        if logits.shape[-1] > self.config.draft_vocab_size:
            logits = logits[..., : self.config.draft_vocab_size]
        logits = logits.to(self.device)
        if self.config.output_scale != 1.0:
            logits = logits * self.config.output_scale
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    # -- parallel stage ----------------------------------------------------------------------------------------------

    def extend_context(
        self,
        context_hidden_states: torch.Tensor,  # [B, S, m * d_target]
        position_ids: torch.LongTensor,  # [B, S]
        cache: Cache,
        next_ids: torch.LongTensor | None = None,  # [B, S], for Eagle3
    ) -> None:
        """Append the K/V of newly committed tokens to `cache`."""
        for i, key_values in enumerate(self.context_key_values(context_hidden_states, position_ids, next_ids)):
            cache.update(*key_values, i)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,  # [B, block_size]: anchor, then mask tokens
        noise_embeds: torch.Tensor | None = None,  # [B, block_size, d], instead of input_ids
        context_hidden_states: torch.Tensor | None = None,  # [B, S, m * d_target]
        position_ids: torch.LongTensor | None = None,  # [B, S + block_size], or [B, C + S + block_size]
        attention_mask: torch.Tensor | None = None,  # [B, C + S + block_size], 0 = padding
        cache: Cache | None = None,
        use_cache: bool | None = None,
    ) -> DSparkDraftOutput:
        """One block through the parallel stage; see [`DSparkDraftOutput`].

        `position_ids` default to what follows the cached context; without those of the C cached tokens these are the ones
        right before. The returned cache holds the context alone.
        """
        hidden_states, cache = self._parallel_stage(
            input_ids, noise_embeds, context_hidden_states, position_ids, attention_mask, cache
        )
        return DSparkDraftOutput(
            last_hidden_state=hidden_states,
            logits=self.compute_logits(hidden_states),
            cache=None if use_cache is False else cache,
        )

    def _parallel_stage(self, input_ids, noise_embeds, context_hidden_states, position_ids, attention_mask, cache):
        if self.config.is_autoregressive:
            raise ValueError("An Eagle3 drafter has no parallel stage: call `draft` instead.")
        if (input_ids is None) == (noise_embeds is None):
            raise ValueError("Give either `input_ids` or `noise_embeds`, not both and not neither.")
        hidden_states = self.embed(input_ids) if noise_embeds is None else noise_embeds
        batch, block = hidden_states.shape[:2]
        cache = DynamicCache() if cache is None else cache
        new = 0 if context_hidden_states is None else context_hidden_states.shape[1]
        if position_ids is None:
            start = cache.get_seq_length()
            position_ids = torch.arange(start, start + new + block, device=self.device).expand(batch, -1)
        if new:
            self.extend_context(context_hidden_states, position_ids[:, -block - new : -block], cache)
        if cache.get_seq_length() == 0:
            raise ValueError("The drafter needs at least one context token before the anchor.")
        masks = self._block_masks(position_ids, block, cache.get_seq_length(), attention_mask)
        length = cache.get_seq_length()
        try:  # the block's K/V lie behind the context's while it is read
            hidden_states = self.run_layers(hidden_states, position_ids[:, -block:], [cache] * len(self.layers), masks)
        finally:
            for layer in cache.layers:
                if surplus := layer.get_seq_length() - length:
                    layer.crop(-surplus)
        return hidden_states, cache

    def run_layers(
        self,
        hidden_states: torch.Tensor,  # [B, Q, d]
        position_ids: torch.LongTensor,  # [B, Q]
        contexts: Sequence[
            tuple[torch.Tensor, torch.Tensor] | Cache | Callable
        ],  # of each layer, two of [B, kv heads, C, head_dim]
        masks: Mapping[str, torch.Tensor | None],  # by layer type: [B, 1, Q, C + Q]
    ) -> torch.Tensor:
        """The backbone and its final norm. [B, Q, d]

        A context is two of [B, kv heads, C, head_dim], a cache that holds these and takes those of the block behind them, or a
        function of (queries, keys, values, scaling) that attends by itself, [B, heads, Q, head_dim] each, to
        [B, Q, heads, head_dim]; masks are not read then.
        """
        rope = self.rotary_emb(hidden_states, position_ids)
        for layer, context in zip(self.layers, contexts, strict=True):
            hidden_states = layer(hidden_states, rope, context, masks.get(layer.layer_type))
        return self.norm(hidden_states)

    def context_features(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        """Projected taps (eq. 2). [B, S, m * d_target] -> [B, S, d]"""
        return self.hidden_norm(self.fc(context_hidden_states.to(self.device, self.dtype)))

    def context_key_values(
        self,
        context_hidden_states: torch.Tensor,  # [B, S, m * d_target]
        position_ids: torch.LongTensor,  # [B, S]
        next_ids: torch.LongTensor | None = None,  # [B, S], the token behind each one; Eagle3 alone reads them
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Features (eq. 2) and, for each layer, their keys and values (eq. 3): two of [B, kv heads, S, head_dim]."""
        features = self.context_features(context_hidden_states)
        rope = self.rotary_emb(features, position_ids)
        if next_ids is not None:
            features = self.layers[0].inputs(features, self.embed(next_ids))
        return [layer.self_attn.key_values(features, rope) for layer in self.layers]

    def _block_masks(
        self,
        position_ids: torch.LongTensor,  # [B, block] or more before them
        block: int,
        num_context: int,
        attention_mask: torch.Tensor | None,  # [B, C + block]
    ) -> dict[str, torch.Tensor | None]:
        """Bool masks [B, 1, block, C + block] by layer type, `None` where everything is seen."""
        padding = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        masks: dict[str, torch.Tensor | None] = dict.fromkeys(self.config.layer_types, padding)
        for kind in masks:
            if not sees_everything(self.config, kind):
                untold = num_context + block - position_ids.shape[1]  # these lie right before the others
                earlier = torch.arange(-untold, 0, device=position_ids.device) + position_ids[:, :1]
                context, positions = torch.cat([earlier, position_ids[:, :-block]], dim=1), position_ids[:, -block:]
                seen = block_mask(self.config, kind, context, positions, positions[:, :1])[:, None]
                masks[kind] = seen if padding is None else seen & padding
        return masks

    # -- sequential stage --------------------------------------------------------------------------------------------

    def num_candidates(self, setting: int | Literal["auto"] | None) -> int | None:
        """Of how many tokens a position is drawn, `None` for all; "auto" leaves out some where the head reads a large matrix.

        Only a large one takes longer to read than to choose from.
        """
        if setting != "auto":
            return setting
        is_large = self.markov_head is not None and self.config.draft_vocab_size >= LARGE_VOCABULARY
        return TOP_CANDIDATES if is_large else None

    @torch.no_grad()
    def draft(
        self,
        anchor_ids: torch.LongTensor,  # [B], or [B, L]: the committed tokens, the last one being the anchor
        context_hidden_states: torch.Tensor | None = None,  # [B, S, m * d_target], of tokens not yet in `cache`
        cache: Cache | None = None,
        *,
        do_sample: bool = False,
        logits_processor: Callable | None = None,
        admission: Admission | None = None,
        generator: torch.Generator | None = None,
        position_ids: torch.LongTensor | None = None,  # as `forward` takes them
        attention_mask: torch.Tensor | None = None,  # [B, C + S + block_size]
        max_tokens: int | None = None,
        top_candidates: int | Literal["auto"] | None = "auto",
        deferred: bool = False,
    ) -> DraftBlock:
        """Draft one block: the parallel stage, then the sequential loop (eq. 4) until the policy or `max_tokens` ends it.
        (Eagle3: one forward a token instead.)

        `logits_processor` is applied step by step to (committed and drafted ids, scores), as in `generate()`; give the
        whole committed text as `anchor_ids` where a processor reads it. Greedy unless `do_sample`. top_candidates: see
        `num_candidates`; deferred: see `Sampler`.
        """
        prefix = anchor_ids if anchor_ids.dim() == 2 else anchor_ids[:, None]
        prefix = prefix.to(self.device)
        batch, count = len(prefix), self.num_candidates(top_candidates)
        limit = self.config.num_draft_tokens if max_tokens is None else min(max_tokens, self.config.num_draft_tokens)
        rows = [DraftRow(prefix[i : i + 1], limit, do_sample, logits_processor, generator) for i in range(batch)]
        sampler = Sampler(self, rows, admission, deferred)
        cache = DynamicCache() if cache is None else cache
        slots: Slots
        if self.config.is_autoregressive:
            if context_hidden_states is None or not context_hidden_states.shape[1]:
                raise ValueError("An Eagle3 drafter needs the features of at least one new token a round.")
            length = cache.get_seq_length() + context_hidden_states.shape[1]
            slots = cached_slots(self, prefix, context_hidden_states, cache, position_ids, attention_mask, limit, count)
            try:
                sampler.draw(slots)
            finally:
                if (surplus := cache.get_seq_length() - length) > 0:
                    cache.crop(-surplus)
        else:
            first = 0 if self.config.sample_from_anchor else 1
            width = self.block_width(limit)
            block = prefix.new_full((batch, width), self.config.mask_token_id)
            block[:, 0] = prefix[:, -1]
            if position_ids is not None:
                position_ids = position_ids[:, : position_ids.shape[1] - self.config.block_size + width]
            hidden, cache = self._parallel_stage(
                block, None, context_hidden_states, position_ids, attention_mask, cache
            )
            if limit:
                starts = [i * width + first for i in range(batch)]
                sampler.draw(BlockSlots(self, hidden.flatten(0, 1), starts, [limit] * batch, count))
        return self._block(rows, cache)

    def block_width(self, limit: int) -> int:
        """Slots of a block that may draft `limit` tokens."""
        if self.config.min_block_size is None:
            return self.config.block_size
        return max(self.config.min_block_size, limit + (0 if self.config.sample_from_anchor else 1))

    def _block(self, rows: list[DraftRow], cache: Cache) -> DraftBlock:
        for row in rows:
            if row.error is not None:
                raise row.error
        counts = [len(row) for row in rows]
        longest = rows[counts.index(max(counts))]
        device, dtype = rows[0].prefix.device, scores_dtype(self.fc.weight)
        width = longest.scores(1).shape[-1] if len(longest) else 0

        def stacked(parts: list[torch.Tensor | None], *shape: int, **kind: Any) -> torch.Tensor:
            """The parts side by side, zeros behind those that are shorter."""
            whole = torch.zeros(len(rows), max(counts), *shape, device=device, **kind)
            for i, part in enumerate(parts):
                if part is not None:
                    whole[i, : len(part)] = part
            return whole

        ids = longest.candidate_ids()
        return DraftBlock(
            token_ids=stacked([row.token_ids() for row in rows], dtype=torch.long),
            logits=stacked([row.scores() if len(row) else None for row in rows], width, dtype=dtype),
            candidate_ids=None
            if ids is None
            else stacked([row.candidate_ids() for row in rows], width, dtype=torch.long),
            confidence_logits=None
            if self.confidence_head is None
            else stacked([row.confidence_logits(len(row)) for row in rows], dtype=self.dtype),
            num_admitted=torch.tensor(counts),
            survival=[row.survival for row in rows],
            cache=cache,
        )

    def confidence(self, hidden: torch.Tensor, previous_embedding: torch.Tensor | None) -> torch.Tensor:
        """Confidence logits of positions, [..., d] and [..., r] -> [...]; needs a confidence head."""
        return self.confidence_head(hidden, previous_embedding if self.config.confidence_head_with_markov else None)


def _same_weight(ours: nn.Module, theirs: nn.Module) -> bool:
    weight = theirs.weight
    if not weight.is_floating_point():
        return False
    weight = weight[: len(ours.weight)]  # a resized target has more rows
    if ours.weight.shape != weight.shape:
        return False
    return torch.equal(ours.weight, weight.to(ours.weight.device, ours.weight.dtype)) or torch.equal(
        ours.weight.to(weight.device, weight.dtype), weight
    )


__all__ = ["DSparkDraftModel", "DSparkPreTrainedModel"]
