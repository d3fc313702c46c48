"""From scores to tokens: processors on many rows at once, and every random decision of decoding.

Owns: applying a processor list to the rows of one forward, drawing tokens, accepting by chance.
Does not own: which tokens are compared (`verification`), where scores come from.
Axes: K drafted tokens, V vocabulary. All randomness goes through `draw_tokens` and `flip`, so that a test can enumerate it.
"""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList

from ..model.sampler_dspark import apply_processors, are_value_only, draw_tokens

__all__ = ["draw_tokens", "flip", "process_rows"]


def flip(probs: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """True with the given probability, independently for each entry. [...] -> [...], bool"""
    return torch.rand(probs.shape, dtype=probs.dtype, device=probs.device, generator=generator) < probs


def process_rows(
    processors: LogitsProcessorList,
    input_ids: torch.LongTensor,  # [1, L + K], committed tokens, then drafted ones
    scores: torch.Tensor,  # [K + 1, V], row i follows the first L + i tokens
) -> torch.Tensor:
    """Processed scores of every row, each with the tokens before it as its prefix. [K + 1, V]"""
    if not processors:
        return scores
    if are_value_only(processors):
        return apply_processors(processors, input_ids, scores)
    start = input_ids.shape[1] - scores.shape[0] + 1
    rows = [
        apply_processors(processors, input_ids[:, : start + i], scores[i : i + 1].clone())
        for i in range(scores.shape[0])
    ]
    return torch.cat(rows)
