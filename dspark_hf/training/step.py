"""One training step's forward: features and anchors in, losses out.

Owns: batching features, teacher forcing through backbone and heads, the target's probabilities at the labels.
Does not own: where blocks stand (`anchors`), the losses' formulas (`losses`), the optimiser (`trainer`).
Axes: B sequences, S tokens, A anchors, N used blocks, γ positions, V_d draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..model.modeling_dspark import DSparkDraftModel
from .anchors import Blocks, make_blocks, position_weights
from .features import Features
from .losses import DraftLosses, LossWeights, draft_losses
from .responses import Answer


@dataclass(frozen=True)
class Batch:
    """Right-padded answers: input_ids and loss_mask [B, S], context [B, S, m * d], last_hidden [B, S, d], log_norm [B, S]."""

    input_ids: torch.LongTensor
    loss_mask: torch.Tensor
    context: torch.Tensor
    last_hidden: torch.Tensor
    log_norm: torch.Tensor


@dataclass(frozen=True)
class StepOutput:
    """Losses, and what the blocks were: valid [N, γ]."""

    losses: DraftLosses
    valid: torch.Tensor


def collate(answers: Sequence[Answer], features: Sequence[Features], device: torch.device) -> Batch:
    """Pad answers and their features to one length."""
    pad = lambda rows: nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(device)  # noqa: E731
    return Batch(
        input_ids=pad(torch.tensor(a.input_ids + a.response_ids) for a in answers),
        loss_mask=pad(torch.tensor([0] * len(a.input_ids) + [1] * len(a.response_ids)) for a in answers),
        context=pad(f.context for f in features),
        last_hidden=pad(f.last_hidden for f in features),
        log_norm=pad(f.log_norm for f in features),
    )


class DraftTrainingStep(nn.Module):
    """Wraps the drafter so that one `forward` holds the whole step (what accelerate's wrappers need)."""

    def __init__(self, drafter: DSparkDraftModel, loss_weights: LossWeights | None = None) -> None:
        super().__init__()
        self.drafter = drafter
        self.loss_weights = loss_weights or LossWeights()
        to_draft = torch.full((drafter.config.vocab_size,), -100, dtype=torch.long)
        ids = drafter.draft_token_ids().cpu()
        to_draft[ids] = torch.arange(len(ids))
        self.register_buffer("to_draft", to_draft, persistent=False)

    def forward(
        self,
        batch: Batch,
        anchors: torch.LongTensor,  # [B, A]
        keep: torch.Tensor,  # [B, A]
        block_size: int | None = None,
    ) -> StepOutput:
        drafter = self.drafter
        blocks = make_blocks(drafter.config, batch.input_ids, batch.loss_mask, anchors, keep, block_size)
        hidden = self.block_hidden(batch, blocks)
        used = blocks.valid[..., 0]
        hidden, labels, valid = hidden[used], blocks.labels[used], blocks.valid[used]
        logits, confidence = self.heads(hidden, blocks.input_ids[used][:, 0], labels)
        losses = draft_losses(
            logits,
            self.target_probs(batch, blocks.label_positions, used),
            self.to_draft[labels],
            position_weights(valid, self.loss_weights.decay),
            confidence,
            self.loss_weights,
        )
        return StepOutput(losses, valid)

    def block_hidden(self, batch: Batch, blocks: Blocks) -> torch.Tensor:
        """The backbone over packed blocks. [B, A, L, d]"""
        drafter = self.drafter
        positions = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device).expand_as(batch.input_ids)
        contexts = drafter.context_key_values(batch.context, positions)
        noise = drafter.embed(blocks.input_ids).flatten(1, 2)
        hidden = drafter.run_layers(noise, blocks.position_ids, contexts, blocks.masks)
        return hidden.view(*blocks.input_ids.shape, -1)

    def heads(
        self,
        hidden: torch.Tensor,  # [N, L, d]
        anchor_ids: torch.LongTensor,  # [N]
        labels: torch.LongTensor,  # [N, γ], target ids
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Corrected logits [N, γ, V_d] and confidence logits [N, γ], previous tokens given."""
        drafter = self.drafter
        first = 0 if drafter.config.sample_from_anchor else 1
        logits = drafter.compute_logits(hidden[:, first:])
        embeddings = None
        if drafter.markov_head is not None:
            # The anchor comes before the first predicting slot, and before slot 0 where that proposes nothing.
            previous = torch.cat([anchor_ids[:, None].expand(-1, 1 + first), labels[:, :-1]], dim=1)
            embeddings = drafter.markov_head.markov_w1(previous)
            latents = drafter.markov_head.teacher_forced(embeddings, hidden)
            logits = logits + drafter.markov_head.project(latents[:, first:])
            embeddings = embeddings[:, first:]
        confidence = None
        if drafter.confidence_head is not None:
            confidence = drafter.confidence(hidden[:, first:], embeddings)
        return logits, confidence

    @torch.no_grad()
    def target_probs(self, batch: Batch, label_positions: torch.LongTensor, used: torch.Tensor) -> torch.Tensor:
        """The target's probabilities of the draft vocabulary before each label. [N, γ, V_d]"""
        rows = torch.arange(len(batch.input_ids), device=used.device)[:, None].expand_as(used)[used]  # [N]
        before = label_positions[used] - 1  # [N, γ]
        logits = self.drafter.compute_logits(batch.last_hidden[rows[:, None], before]).float()
        return (logits - batch.log_norm[rows[:, None], before][..., None]).exp()
