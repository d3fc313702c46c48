"""Eagle3's drafter: one autoregressive layer over (next token, target features), the baseline of the paper's Table 1.

Owns: the layer, drafting token by token with its own K/V. Does not own: drawing a token (`drafting_dspark`), projecting the
features and the final norm (`modeling_dspark`), training it (`training.unroll`).
Axes: B sequences, S new context tokens, C context tokens so far, d hidden size, V_d draft vocabulary.
Position i holds the features of token i with the embedding of token i + 1; its output predicts token i + 2. A drafted token
stands with the layer's last output in place of features that do not exist yet.
This file travels with a checkpoint (`auto_map`), so it imports only its neighbours `*_dspark.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from .configuration_dspark import DSparkConfig
from .layers_dspark import DSparkAttention, DSparkMLP, RMSNorm
from .sampler_dspark import Candidates, DraftBlock, SequentialLoop, scores_dtype

if TYPE_CHECKING:
    from .modeling_dspark import DSparkDraftModel


class Eagle3Layer(nn.Module):
    """Attention over [embedding ; hidden state], both normed; the residual is the hidden state."""

    def __init__(self, config: DSparkConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DSparkAttention(config, layer_idx, input_size=2 * config.hidden_size)
        self.mlp = DSparkMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def inputs(self, hidden_states: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """What the attention projects. Two of [B, Q, d] -> [B, Q, 2 d]"""
        return torch.cat([self.input_layernorm(embeddings), self.hidden_norm(hidden_states)], dim=-1)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, Q, d]
        embeddings: torch.Tensor,  # [B, Q, d]
        rope: tuple[torch.Tensor, torch.Tensor],
        attend: Callable,  # as `DSparkAttention` takes it for a context
    ) -> torch.Tensor:
        attended = self.self_attn(self.inputs(hidden_states, embeddings), rope, attend, None)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def draft_autoregressively(
    model: DSparkDraftModel,
    loop: SequentialLoop,
    context_hidden_states: torch.Tensor,  # [B, S, m * d_target]
    cache: Cache,
    position_ids: torch.LongTensor | None,  # [B, S + limit] or more
    attention_mask: torch.Tensor | None,  # [B, C + S + limit] or more, C the cached context, 0 = padding
    limit: int,
) -> DraftBlock:
    """Take in the committed tokens, then draft up to `limit` more; the cache is left with the committed ones alone.

    Raises:
        ValueError: features whose next token is not among the committed ids.
    """
    before, new = cache.get_seq_length(), context_hidden_states.shape[1]
    if new > loop.prefix.shape[1]:
        raise ValueError(
            f"An Eagle3 drafter needs the token behind each of its features: got {new} features and the last "
            f"{loop.prefix.shape[1]} committed tokens. Give the whole committed text as anchor_ids."
        )
    if position_ids is None:
        position_ids = torch.arange(before, before + new + limit, device=model.device).expand(len(loop.prefix), -1)
    padding = None if attention_mask is None else attention_mask.bool()[:, None, None]
    if new > 1:  # of all but the last one only the keys and values are read
        earlier = context_hidden_states[:, :-1], position_ids[:, : new - 1]
        model.extend_context(*earlier, cache, loop.prefix[:, -new:-1])
    hidden = model.context_features(context_hidden_states[:, -1:])
    drafted = 0
    try:
        seen = None if padding is None else padding[..., : before + new]
        hidden = _step(model, hidden, loop.previous[:, None], position_ids[:, new - 1 : new], cache, seen)
        logits = _scores(model, hidden)
        for k in range(limit):
            if not loop.step(hidden[:, 0], Candidates.of(model, logits[:, 0])) or k == limit - 1:
                break
            drafted += 1
            places = position_ids[:, new + k : new + k + 1]
            seen = None if padding is None else padding[..., : before + new + drafted]
            hidden = _step(model, hidden, loop.previous[:, None], places, cache, seen)
            logits = _scores(model, hidden)
    finally:
        if surplus := cache.get_seq_length() - before - new:
            cache.crop(-surplus)
    # Every position is drawn from the whole draft vocabulary.
    return loop.block(cache, Candidates.of(model, logits.expand(-1, limit, -1)))


def _scores(model: DSparkDraftModel, hidden: torch.Tensor) -> torch.Tensor:
    logits = model.compute_logits(model.norm(hidden))
    return logits.to(scores_dtype(logits))


def _step(
    model: DSparkDraftModel,
    hidden_states: torch.Tensor,  # [B, 1, d]
    input_ids: torch.LongTensor,  # [B, 1]
    position_ids: torch.LongTensor,  # [B, 1]
    cache: Cache,
    mask: torch.Tensor | None,  # [B, 1, 1, C + 1], bool; `None`: all is seen
) -> torch.Tensor:
    """The layer over one token that is appended to the cache. [B, 1, d]"""

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        keys, values = cache.update(keys, values, 0)
        output = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            scale=scaling,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        return output.transpose(1, 2)

    rope = model.rotary_emb(hidden_states, position_ids)
    return model.layers[0](hidden_states, model.embed(input_ids), rope, attend)


__all__ = ["Eagle3Layer", "draft_autoregressively"]
