"""Gemma 4's layer with K/V injection: what differs from the Qwen3 form.

Owns: values that may be the keys, a norm on the values, four norms and a scalar around attention and MLP.
Does not own: projections, masks and the attention itself (`backbone_dspark`), the scaled embedding and the soft-capped
logits (two numbers of the config). Axes: B sequences, S new context tokens, Q block inputs, d hidden size.
This file travels with a checkpoint (`auto_map`), so it imports only its neighbours `*_dspark.py`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .configuration_dspark import DSparkConfig
from .layers_dspark import DSparkAttention, DSparkMLP, RMSNorm


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


class Gemma4Layer(nn.Module):
    """Norms before and after attention and MLP; the sum times a scalar that is not trained."""

    def __init__(self, config: DSparkConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_type = config.layer_types[layer_idx]
        self.self_attn = Gemma4Attention(config, layer_idx)
        self.mlp = DSparkMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, hidden_states, rope, context, attention_mask):
        attended = self.self_attn(self.input_layernorm(hidden_states), rope, context, attention_mask)
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return (hidden_states + self.post_feedforward_layernorm(fed)) * self.layer_scalar
