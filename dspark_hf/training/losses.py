"""The three training losses (paper §3.3, eqs. 8 to 12), normalised as the released code does.

Owns: losses and the acceptance that they estimate. Does not own: the model, where blocks stand.
Axes: N blocks, γ positions, V_d draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F


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
    l1 = _l1(log_probs, target_probs)
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


def soft_cross_entropy_losses(
    draft_logits: torch.Tensor,  # [N, γ, V_d]
    target_probs: torch.Tensor,  # [N, γ, V_d]
    weights: torch.Tensor,  # [N, γ], 0 = not counted
    num_rows: int,
) -> DraftLosses:
    """Eagle3's loss: cross-entropy to the target's distribution, summed with weights over positions, by `num_rows`."""
    log_probs = draft_logits.float().log_softmax(-1)
    total = -((target_probs * log_probs).sum(-1) * weights).sum() / num_rows
    l1 = _l1(log_probs.detach(), target_probs)
    nothing = total.new_zeros(())
    mean = (l1 * weights).sum() / weights.sum().clamp(min=1e-6)
    return DraftLosses(total, mean, nothing, total, 1.0 - 0.5 * l1)


def _l1(log_probs: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """‖p_draft − p_target‖_1; what the draft vocabulary lacks of the target's mass is missed. [N, γ]"""
    undraftable = (1.0 - target_probs.sum(-1)).clamp(min=0.0)
    return (log_probs.exp() - target_probs).abs().sum(-1) + undraftable


def expected_accept_length(acceptance: torch.Tensor, valid: torch.Tensor) -> float:
    """τ with the bonus token that per-position acceptance [N, γ] implies, over blocks with a first position."""
    survival = (acceptance * valid).cumprod(-1).sum(-1)
    used = valid[..., 0]
    return 1.0 + float(survival[used].mean()) if bool(used.any()) else 1.0
