"""The layers of a drafter with K/V injection (paper §3.1, eq. 3), in Qwen3's and Gemma 4's form, and what they see.

Axes: B sequences, S new context tokens, C context tokens so far, Q block inputs, d hidden size.
This file travels with a checkpoint (`auto_map`), so it imports only its neighbours `*_dspark.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb, eager_attention_forward

from .configuration_dspark import DSparkConfig


class RMSNorm(nn.RMSNorm):
    """In the weight's dtype, also where autocast hands over a narrower one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.normalized_shape, self.weight, self.eps).to(x.dtype)


class DSparkAttention(nn.Module):
    """Attention of the block to context and block; context K/V come from the projected features (eq. 3)."""

    is_causal = False

    def __init__(self, config: DSparkConfig, layer_idx: int, input_size: int | None = None) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        width = config.hidden_size if input_size is None else input_size
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        query_size, key_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (normed, not yet rotated) and values. [B, S, d] -> two of [B, kv heads, S, head_dim]"""
        keys = self.k_norm(self._split(self.k_proj(hidden_states))).transpose(1, 2)
        return keys, self._split(self.v_proj(hidden_states)).transpose(1, 2)

    def key_values(
        self, hidden_states: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (normed, rotated) and values. [B, S, d] -> two of [B, kv heads, S, head_dim]"""
        keys, values = self._project(hidden_states)
        return apply_rotary_pos_emb(keys, keys, *rope)[1], values

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, Q, d]
        rope: tuple[torch.Tensor, torch.Tensor],
        context: tuple[torch.Tensor, torch.Tensor]  # two of [B, kv heads, C, head_dim]
        | Cache  # holds these and takes those of the block behind them
        | Callable,  # attends by itself
        attention_mask: torch.Tensor | None,  # [B, 1, Q, C + Q], bool or additive
    ) -> torch.Tensor:
        queries = self.q_norm(self._split(self.q_proj(hidden_states))).transpose(1, 2)
        keys, values = self._project(hidden_states)
        queries, keys = apply_rotary_pos_emb(queries, keys, *rope)
        if callable(context):
            output = context(queries, keys, values, self.scaling)
        else:
            if isinstance(context, Cache):
                keys, values = context.update(keys, values, self.layer_idx)
            else:
                keys, values = (torch.cat(parts, dim=2) for parts in zip(context, (keys, values), strict=True))
            implementation = self.config._attn_implementation
            attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
            dropout = self.config.attention_dropout if self.training else 0.0
            output, _ = attend(self, queries, keys, values, attention_mask, dropout=dropout, scaling=self.scaling)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))


class DSparkMLP(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DSparkLayer(nn.Module):
    attention = DSparkAttention

    def __init__(self, config: DSparkConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_type = config.layer_types[layer_idx]
        self.self_attn = self.attention(config, layer_idx)
        self.mlp = DSparkMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, rope, context, attention_mask):
        attended = self.self_attn(self.input_layernorm(hidden_states), rope, context, attention_mask)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Gemma4Attention(DSparkAttention):
    """No scaling (the norms of queries and keys take its place), values normed without a weight."""

    def __init__(self, config: DSparkConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.scaling = 1.0
        self.eps = config.rms_norm_eps
        if config.attention_k_eq_v:
            self.v_proj = None

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        projected = self._split(self.k_proj(hidden_states))
        values = projected if self.v_proj is None else self._split(self.v_proj(hidden_states))
        values = F.rms_norm(values, (self.head_dim,), eps=self.eps)
        return self.k_norm(projected).transpose(1, 2), values.transpose(1, 2)


class Gemma4Layer(DSparkLayer):
    """Norms before and after attention and MLP; the sum times a scalar that is not trained."""

    attention: type[DSparkAttention] = Gemma4Attention

    def __init__(self, config: DSparkConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, hidden_states, rope, context, attention_mask):
        attended = self.self_attn(self.input_layernorm(hidden_states), rope, context, attention_mask)
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return (hidden_states + self.post_feedforward_layernorm(fed)) * self.layer_scalar


def sees_everything(config: DSparkConfig, layer_type: str) -> bool:
    """Whether layers of this type see the whole context and the whole block, and so need no mask of their own."""
    return layer_type == "full_attention" and not config.full_attention_causal


def block_mask(
    config: DSparkConfig,
    layer_type: str,
    context_positions: torch.LongTensor,  # [B, C]
    block_positions: torch.LongTensor,  # [B, Q]
    anchor_positions: torch.LongTensor,  # [B, Q] or [B, 1]: of each query's block
) -> torch.Tensor:
    """What a layer sees: [B, Q, C + Q], bool. Blocks are told apart by the caller, and context from what lies after it.

    A sliding window counted from the anchor (speculators): context within the window before the anchor, no window inside the
    block. Counted from the query (z-lab): every key within the window of its query. Sliding layers are causal inside the
    block unless `sliding_window_non_causal`, full ones only with `full_attention_causal`.
    """
    queries, contexts = block_positions[:, :, None], context_positions[:, None, :]  # [B, Q, 1], [B, 1, C]
    ahead = block_positions[:, None, :] - queries
    is_causal = not config.sliding_window_non_causal
    if layer_type == "full_attention":
        sees_context = torch.ones_like(queries - contexts, dtype=torch.bool)
        is_causal = config.full_attention_causal
    elif config.sliding_window_origin == "anchor":
        sees_context = (contexts >= anchor_positions[:, :, None] - config.sliding_window).expand(
            -1, queries.shape[1], -1
        )
    else:
        sees_context = queries - contexts < config.sliding_window
    sees_block = ahead <= 0 if is_causal else torch.ones_like(ahead, dtype=torch.bool)
    if layer_type == "sliding_attention" and config.sliding_window_origin == "query":
        sees_block = sees_block & (ahead.abs() < config.sliding_window)
    return torch.cat([sees_context, sees_block], dim=-1)
