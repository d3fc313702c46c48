"""Which logits processors may be shown rows that are thrown away, and which are called once for each token that stands."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from ..model.sampler_dspark import apply_processors, are_value_only

# They keep something between calls, or ask a function of the user's.
_WITH_MEMORY = (
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
    logits_process.PrefixConstrainedLogitsProcessor,
)


def is_pure(processor: LogitsProcessor) -> bool:
    """Whether it is known to be a function of prefix and scores: transformers' own are, but for some; others may count calls."""
    return type(processor).__module__ == logits_process.__name__ and not isinstance(processor, _WITH_MEMORY)


def pure_ones(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Those that drafts are shown to."""
    return LogitsProcessorList([p for p in processors if is_pure(p)])


def process_rows(
    processors: LogitsProcessorList,
    input_ids: torch.LongTensor,  # [1, L + K], committed tokens, then drafted ones
    scores: torch.Tensor,  # [K + 1, V], row i follows the first L + i tokens
) -> torch.Tensor:
    """Processed scores of every row, each with the tokens before it as its prefix; for pure ones. [K + 1, V]"""
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
