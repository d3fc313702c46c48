"""One training step's forward: answers and anchors in, losses out (paper §3.3, §5.1).

Blocks are laid out at anchors in an answer, backbone and heads run over them with the right tokens before each, and the three
losses (eqs. 8 to 12) compare that with the target's distribution; normalised as the released code does.

Axes: B sequences, S tokens, A anchors, L slots of a block (`block_size` or fewer), γ of them predicting, N used blocks,
V_d draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ..model.configuration_dspark import DSparkConfig
from ..model.layers_dspark import block_mask, sees_everything
from ..model.modeling_dspark import DSparkDraftModel
from .corpus import Answer
from .features import Features

# -- where the blocks stand, and what each may see -------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch.

    input_ids: [B, A, L]. position_ids: [B, A * L]. masks: by layer type, [B, 1, A * L, S + A * L], bool.
    labels: [B, A, γ], the token each slot predicts. label_positions: [B, A, γ], clamped to the text.
    valid: [B, A, γ], bool: the label and all before it in the block belong to the answer.
    """

    input_ids: torch.LongTensor
    position_ids: torch.LongTensor
    masks: dict[str, torch.Tensor]
    labels: torch.LongTensor
    label_positions: torch.LongTensor
    valid: torch.Tensor


def draw_anchors(
    loss_mask: torch.Tensor,  # [B, S], 1 on answer tokens
    num_anchors: int,
    generator: torch.Generator | None = None,
) -> tuple[torch.LongTensor, torch.Tensor]:
    """Draw up to `num_anchors` positions whose token and next token are answer tokens. Ascending; 0 where there are fewer.

    Returns anchors [B, A] and whether each is used [B, A]; A is at most S - 1.
    """
    allowed = loss_mask[:, :-1].bool() & loss_mask[:, 1:].bool()
    noise = torch.rand(allowed.shape, generator=generator, device=loss_mask.device).masked_fill(~allowed, 2.0)
    values, picked = noise.topk(min(num_anchors, noise.shape[1]), dim=1, largest=False)
    keep = values < 1.5
    picked = picked.masked_fill(~keep, loss_mask.shape[1]).sort(dim=1).values
    keep = picked < loss_mask.shape[1]
    return picked.masked_fill(~keep, 0), keep


def make_blocks(
    config: DSparkConfig,
    input_ids: torch.LongTensor,  # [B, S]
    loss_mask: torch.Tensor,  # [B, S]
    anchors: torch.LongTensor,  # [B, A]
    keep: torch.Tensor,  # [B, A]
    block_size: int | None = None,
) -> Blocks:
    """Lay out one block at every anchor; `block_size` shorter than the config's makes shorter blocks."""
    slots = config.block_size if block_size is None else block_size
    length, device = input_ids.shape[1], input_ids.device
    positions = anchors[:, :, None] + torch.arange(slots, device=device)  # [B, A, L]
    block_ids = torch.full_like(positions, config.mask_token_id)
    block_ids[:, :, 0] = input_ids.gather(1, anchors)
    first = 1 if config.sample_from_anchor else 0  # slot k predicts the token at anchor + k + first
    predicted = positions + first if config.sample_from_anchor else positions[:, :, 1:]
    inside = predicted < length
    clamped = predicted.clamp(max=length - 1)
    flat = clamped.flatten(1)
    labels = input_ids.gather(1, flat).view_as(clamped)
    wanted = loss_mask.bool().gather(1, flat).view_as(clamped) & inside & keep[:, :, None]
    return Blocks(
        input_ids=block_ids,
        position_ids=positions.flatten(1),
        masks=_masks(config, anchors, keep, positions, length),
        labels=labels,
        label_positions=clamped,
        valid=wanted.long().cumprod(-1).bool(),
    )


def _masks(config, anchors, keep, positions, length) -> dict[str, torch.Tensor]:
    batch, num_anchors, slots = positions.shape
    block_of = torch.arange(num_anchors, device=anchors.device).repeat_interleave(slots)  # [Q]
    row_anchor, row_keep = anchors[:, block_of], keep[:, block_of]  # [B, Q]
    context = torch.arange(length, device=anchors.device)
    sees_context = (context[None, None, :] < row_anchor[:, :, None]) & row_keep[:, :, None]
    sees_block = (block_of[:, None] == block_of[None, :])[None] & row_keep[:, :, None]
    full = torch.cat([sees_context, sees_block], dim=-1)
    masks = {}
    for kind in {"full_attention", *config.layer_types}:
        masks[kind] = full[:, None]
        if not sees_everything(config, kind):
            seen = block_mask(config, kind, context.expand(batch, -1), positions.flatten(1), row_anchor)
            masks[kind] = (full & seen)[:, None]
    return masks


def position_weights(valid: torch.Tensor, decay: float | None) -> torch.Tensor:
    """w_k = exp(-(k-1)/decay) on valid labels, 0 elsewhere (paper §3.3); 1 where `decay` is None. [B, A, γ] float32"""
    weights = valid.float()
    if decay is None:
        return weights
    steps = torch.arange(valid.shape[-1], device=valid.device, dtype=torch.float32)
    return weights * torch.exp(-steps / decay)


# -- losses ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossWeights:
    """Weights of cross-entropy, L1 and confidence loss (eq. 12), and the decay γ_decay of positions in tokens."""

    cross_entropy: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float | None = 4.0


@dataclass(frozen=True)
class DraftLosses:
    """Scalars cross_entropy, l1, confidence, total; acceptance [N, γ] = 1 - ½‖p_d - p_t‖_1, detached."""

    cross_entropy: torch.Tensor
    l1: torch.Tensor
    confidence: torch.Tensor
    total: torch.Tensor
    acceptance: torch.Tensor


def draft_losses(
    draft_logits: torch.Tensor,  # [N, γ, V_d], corrected by the sequential head
    target_probs: torch.Tensor,  # [N, γ, V_d], of the whole vocabulary's softmax; what is missing to 1 can't be drafted
    labels: torch.LongTensor,  # [N, γ], draft ids; -100 for a token that can't be drafted
    weights: torch.Tensor,  # [N, γ], 0 = not counted
    confidence_logits: torch.Tensor | None,  # [N, γ]
    loss_weights: LossWeights,
) -> DraftLosses:
    """Weighted means over positions of eqs. 9, 10 and 11, and their sum (eq. 12)."""
    total_weight = weights.sum().clamp(min=1e-6)
    log_probs = draft_logits.float().log_softmax(-1)
    l1 = l1_distance(log_probs, target_probs)
    acceptance = (1.0 - 0.5 * l1).detach()
    ce = F.nll_loss(log_probs.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100).view_as(l1)
    ce_weights = weights * (labels != -100)
    cross_entropy = (ce * ce_weights).sum() / ce_weights.sum().clamp(min=1e-6)
    l1_mean = (l1 * weights).sum() / total_weight
    confidence = l1_mean.new_zeros(())
    if confidence_logits is not None:
        bce = F.binary_cross_entropy_with_logits(confidence_logits.float(), acceptance, reduction="none")
        confidence = (bce * weights).sum() / total_weight
    total = (
        loss_weights.cross_entropy * cross_entropy + loss_weights.l1 * l1_mean + loss_weights.confidence * confidence
    )
    return DraftLosses(cross_entropy, l1_mean, confidence, total, acceptance)


def l1_distance(log_probs: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """‖p_draft − p_target‖_1; what the draft vocabulary lacks of the target's mass is missed. [N, γ]"""
    undraftable = (1.0 - target_probs.sum(-1)).clamp(min=0.0)
    return (log_probs.exp() - target_probs).abs().sum(-1) + undraftable


def expected_accept_length(acceptance: torch.Tensor, valid: torch.Tensor) -> float:
    """τ with the bonus token that per-position acceptance [N, γ] implies, over blocks with a first position."""
    survival = (acceptance * valid).cumprod(-1).sum(-1)
    used = valid[..., 0]
    return 1.0 + float(survival[used].mean()) if bool(used.any()) else 1.0


# -- the step --------------------------------------------------------------------------------------------------------


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
        to_draft = torch.full((drafter.target_vocab_size,), -100, dtype=torch.long)
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
            embeddings = drafter.markov_head.markov_w1(drafter.known_ids(previous))
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
