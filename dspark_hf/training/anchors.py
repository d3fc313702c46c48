"""Where the training blocks stand, and what each of them may see (paper §5.1).

Owns: drawing anchors, block inputs and positions, labels, the dense attention mask, position weights.
Does not own: features, the model, the losses.
Axes: B sequences, S tokens, A anchors, L slots of a block (`block_size` or fewer), γ of them predicting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..model.configuration_dspark import DSparkConfig
from ..model.layers_dspark import block_mask, sees_everything


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch.

    anchors: [B, A]; 0 where unused. keep: [B, A], bool.
    input_ids: [B, A, L]. position_ids: [B, A * L]. masks: by layer type, [B, 1, A * L, S + A * L], bool.
    labels: [B, A, γ], the token each slot predicts. label_positions: [B, A, γ], clamped to the text.
    valid: [B, A, γ], bool: the label and all before it in the block belong to the answer.
    """

    anchors: torch.LongTensor
    keep: torch.Tensor
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
        anchors=anchors,
        keep=keep,
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
