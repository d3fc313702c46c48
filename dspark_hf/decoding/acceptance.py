"""Acceptance of a drafted block (paper §2.1).

Owns: which drafted tokens stand, and the token that follows them. Does not own: models, caches, tokenizers, stopping.
Axes: B sequences, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import sampling


@dataclass(frozen=True)
class Verification:
    """num_accepted [B], 0..K; next_token [B], the correction of the first rejected token, or the bonus token."""

    num_accepted: torch.LongTensor
    next_token: torch.LongTensor


def verify_block(
    draft_tokens: torch.LongTensor,  # [B, K]
    draft_probs: torch.Tensor,  # [B, K, V], what each token was drawn from
    target_probs: torch.Tensor,  # [B, K + 1, V]
    *,
    generator: torch.Generator | None = None,
) -> Verification:
    """Accept left to right with probability min(1, target / draft); correct the first rejection from the normalised
    positive part of target - draft; draw the bonus token from the target where all stand."""
    num_drafted = draft_tokens.shape[1]
    if num_drafted == 0:
        accepted = draft_tokens.new_zeros(draft_tokens.shape[0])
        return Verification(accepted, sampling.draw_tokens(target_probs[:, 0], generator))
    chosen = draft_tokens[..., None]
    ratio = target_probs[:, :-1].gather(2, chosen) / draft_probs.gather(2, chosen)
    accepted = _leading_run(sampling.flip(ratio[..., 0].clamp(max=1.0), generator))
    rows = torch.arange(len(accepted), device=accepted.device)
    residual = target_probs[rows, accepted]
    rejected = accepted < num_drafted
    drafted = draft_probs[rows, accepted.clamp(max=num_drafted - 1)]
    corrected = (residual - drafted).clamp(min=0.0)
    # Where rounding leaves nothing of the difference the two distributions are the same.
    use = rejected & (corrected.sum(-1) > 0)
    residual = torch.where(use[:, None], corrected / corrected.sum(-1, keepdim=True).clamp(min=1e-300), residual)
    return Verification(accepted, sampling.draw_tokens(residual, generator))


def verify_greedy(
    draft_tokens: torch.LongTensor,  # [B, K]
    target_tokens: torch.LongTensor,  # [B, K + 1], the target's own choice at every position
) -> Verification:
    """The one-hot case of `verify_block`: a token stands where the target would have chosen it; needs no probabilities."""
    accepted = _leading_run(draft_tokens == target_tokens[:, :-1])
    return Verification(accepted, target_tokens.gather(1, accepted[:, None])[:, 0])


def _leading_run(stands: torch.Tensor) -> torch.LongTensor:
    return stands.long().cumprod(dim=1).sum(dim=1)
