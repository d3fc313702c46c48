"""Eagle3's drafter: one autoregressive layer over (next token, target features), the baseline of the paper's Table 1.

Axes: B sequences, S new context tokens, C context tokens so far, d hidden size, V_d draft vocabulary.
Position i holds the features of token i with the embedding of token i + 1; its output predicts token i + 2. A drafted token
stands with the layer's last output in place of features that do not exist yet.
This file travels with a checkpoint (`auto_map`), so it imports only its neighbours `*_dspark.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from .configuration_dspark import DSparkConfig
from .layers_dspark import DSparkAttention, DSparkMLP, RMSNorm
from .sampler_dspark import Candidates, _narrowed

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


class Eagle3Slots:
    """Positions of an Eagle3 draft: each is one forward of the layer over the token before it.

    hidden: [n, 1, d], the projected features of each sequence's last token. read: that forward, of (hidden [n, 1, d], token ids
    [n, 1], k, places of the n sequences) to [n, 1, d].
    """

    def __init__(
        self, model: DSparkDraftModel, hidden: torch.Tensor, read: Callable, top_candidates: int | None
    ) -> None:
        self.model, self.hidden, self.read, self.top_candidates = model, hidden, read, top_candidates
        self.sequences: Sequence[int] = range(len(hidden))

    def at(self, k: int, sequences: Sequence[int], previous: torch.LongTensor) -> tuple[torch.Tensor, Candidates]:
        hidden = _narrowed(self.hidden, self.sequences, sequences)
        self.hidden, self.sequences = self.read(hidden, previous[:, None], k, sequences), sequences
        logits = self.model.compute_logits(self.model.norm(self.hidden[:, 0]))
        return self.hidden[:, 0], Candidates.of(self.model, logits, self.top_candidates)

    def skipped(self, sequences: Sequence[int]) -> None:
        """Every position proposes a token."""


def cached_slots(
    model: DSparkDraftModel,
    prefix: torch.LongTensor,  # [B, L]
    context_hidden_states: torch.Tensor,  # [B, S, m * d_target]
    cache: Cache,
    position_ids: torch.LongTensor | None,  # [B, S + limit] or more
    attention_mask: torch.Tensor | None,  # [B, C + S + limit] or more, C the cached context, 0 = padding
    limit: int,
    top_candidates: int | None,
) -> Eagle3Slots:
    """Take in the committed tokens; what is drafted goes behind them into the cache, and is the caller's to crop.

    Raises:
        ValueError: features whose next token is not among the committed ids.
    """
    before, (batch, new) = cache.get_seq_length(), context_hidden_states.shape[:2]
    if new > prefix.shape[1]:
        raise ValueError(
            f"An Eagle3 drafter needs the token behind each of its features: got {new} features and the last "
            f"{prefix.shape[1]} committed tokens. Give the whole committed text as anchor_ids."
        )
    if position_ids is None:
        position_ids = torch.arange(before, before + new + limit, device=model.device).expand(batch, -1)
    padding = None if attention_mask is None else attention_mask.bool()[:, None, None]
    if new > 1:  # of all but the last one only the keys and values are read
        earlier = context_hidden_states[:, :-1], position_ids[:, : new - 1]
        model.extend_context(*earlier, cache, prefix[:, -new:-1])
    states, ids = model.context_features(context_hidden_states[:, -1:]), prefix[:, -1:].clone()

    def read(hidden: torch.Tensor, tokens: torch.LongTensor, k: int, sequences: Sequence[int]) -> torch.Tensor:
        # The cache has a row for each sequence, those that have ended too.
        states[list(sequences)], ids[list(sequences)] = hidden, tokens
        seen = None if padding is None else padding[..., : before + new + k]

        def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
            keys, values = cache.update(keys, values, 0)
            grouped = queries.shape[1] != keys.shape[1]
            output = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=seen, scale=scaling, enable_gqa=grouped
            )
            return output.transpose(1, 2)

        rope = model.rotary_emb(states, position_ids[:, new - 1 + k : new + k])
        return model.layers[0](states, model.embed(ids), rope, attend)[list(sequences)]

    return Eagle3Slots(model, states.clone(), read, top_candidates)


__all__ = ["Eagle3Layer", "Eagle3Slots"]
