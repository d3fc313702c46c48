"""Eagle3's training-time test: the layer is unrolled over its own outputs, as it will be used (arXiv 2503.01840).

Axes: B sequences, S tokens, A anchors, N used anchors, γ unrolled steps, V_d draft vocabulary.

The published recipe unrolls from every position. K/V of the first step come from target features and embeddings alone, so
unrolling from a sample of positions gives those positions' exact losses; the anchors are the ones that blocks would have.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from ..model.modeling_dspark import DSparkDraftModel
from .step import (
    Batch,
    DraftLosses,
    DraftTrainingStep,
    LossWeights,
    StepOutput,
    l1_distance,
    make_blocks,
    position_weights,
)

# Soft cross-entropy alone, each step weighing 0.8 of the one before it.
EAGLE3_LOSS = LossWeights(cross_entropy=1.0, l1=0.0, confidence=0.0, decay=-1.0 / math.log(0.8))


def unroll(
    drafter: DSparkDraftModel,
    input_ids: torch.LongTensor,  # [B, S]
    context: torch.Tensor,  # [B, S, m * d_target]
    rows: torch.LongTensor,  # [B, A], positions of the target features that each unrolling starts from
    steps: int,
) -> torch.Tensor:
    """The layer's output at each step, before the final norm: [B, A, γ, d].

    Step k stands at position row + k, takes the token after it and the output of step k - 1, and sees the first step's
    positions up to its row and its own earlier steps.
    """
    layer, batch = drafter.layers[0], len(input_ids)
    following = F.pad(input_ids, (0, steps))[:, 1:]  # the token after each position; nothing is learned past the end
    features = drafter.context_features(context)
    places = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    inputs = layer.inputs(features, drafter.embed(following[:, : input_ids.shape[1]]))
    keys, values = layer.self_attn.key_values(inputs, drafter.rotary_emb(features, places))
    hidden = features.gather(1, rows[..., None].expand(-1, -1, features.shape[-1]))
    visible = (places[:, None, :] <= rows[:, :, None])[:, None]  # [B, 1, A, S]
    own: list[tuple[torch.Tensor, torch.Tensor]] = []
    outputs = []
    for k in range(steps):

        def attend(queries, new_keys, new_values, scaling, k=k):
            if k:  # the first step's own key is among the sequence's
                own.append((new_keys, new_values))
            return _attend(queries, keys, values, visible, own, scaling)

        rope = drafter.rotary_emb(hidden, rows + k)
        hidden = layer(hidden, drafter.embed(following.gather(1, rows + k)), rope, attend)
        outputs.append(hidden)
    return torch.stack(outputs, dim=2).view(batch, rows.shape[1], steps, -1)


def _attend(
    queries: torch.Tensor,  # [B, heads, A, D]
    keys: torch.Tensor,  # [B, kv heads, S, D]
    values: torch.Tensor,  # [B, kv heads, S, D]
    visible: torch.Tensor,  # [B, 1, A, S]
    own: list[tuple[torch.Tensor, torch.Tensor]],  # of each later step: two of [B, kv heads, A, D], row by row
    scaling: float,
) -> torch.Tensor:
    """Attention to the sequence and to the row's own earlier steps. [B, A, heads, D]"""
    groups, length = queries.shape[1] // keys.shape[1], keys.shape[2]
    spread = lambda x: x.repeat_interleave(groups, dim=1)  # noqa: E731
    scores = (queries @ spread(keys).transpose(-1, -2)) * scaling
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    behind = [((queries * spread(k)).sum(-1, keepdim=True)) * scaling for k, _ in own]
    shares = torch.cat([scores, *behind], dim=-1).float().softmax(-1).to(queries.dtype)
    output = shares[..., :length] @ spread(values)
    for j, (_, own_values) in enumerate(own):
        output = output + shares[..., length + j, None] * spread(own_values)
    return output.transpose(1, 2)


class UnrolledTrainingStep(DraftTrainingStep):
    """As [`DraftTrainingStep`], for an autoregressive drafter."""

    def forward(
        self,
        batch: Batch,
        anchors: torch.LongTensor,  # [B, A]
        keep: torch.Tensor,  # [B, A]
        block_size: int | None = None,
    ) -> StepOutput:
        drafter = self.drafter
        keep = keep & (anchors > 0)
        blocks = make_blocks(drafter.config, batch.input_ids, batch.loss_mask, anchors, keep, block_size)
        steps = blocks.labels.shape[-1]
        # The features before the anchor stand with the anchor's embedding, and predict the token after it.
        hidden = unroll(drafter, batch.input_ids, batch.context, (anchors - 1).clamp(min=0), steps)
        used = blocks.valid[..., 0]
        valid = blocks.valid[used]
        losses = self.losses(
            hidden[used], self.target_probs(batch, blocks.label_positions, used), valid, anchors.numel()
        )
        return StepOutput(losses, valid)

    def losses(
        self,
        hidden: torch.Tensor,  # [N, γ, d]
        target_probs: torch.Tensor,  # [N, γ, V_d]
        valid: torch.Tensor,  # [N, γ]
        num_rows: int,
    ) -> DraftLosses:
        """Cross-entropy to the target's distribution, summed over the valid positions.

        Divided by `num_rows`: all rows, the unused too, as the released code does.
        """
        log_probs = self.drafter.compute_logits(self.drafter.norm(hidden)).float().log_softmax(-1)
        weights = position_weights(valid, self.loss_weights.decay)
        total = -((target_probs * log_probs).sum(-1) * weights).sum() / num_rows
        l1 = l1_distance(log_probs.detach(), target_probs)
        mean = (l1 * weights).sum() / weights.sum().clamp(min=1e-6)
        return DraftLosses(total, mean, torch.zeros_like(total), total, 1.0 - 0.5 * l1)
