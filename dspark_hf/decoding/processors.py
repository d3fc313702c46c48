"""Which logits processors may be shown rows that are thrown away, and which are called once for each token that stands."""

from __future__ import annotations

from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

# They keep something between calls, or ask a function of the user's.
_WITH_MEMORY = (
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
    logits_process.PrefixConstrainedLogitsProcessor,
)


def is_stateless(processor: LogitsProcessor) -> bool:
    """Whether it is known to be a function of prefix and scores. transformers' own are, but for some; others may count their
    calls, unless they have an attribute `stateless` that is true."""
    if type(processor).__module__ == logits_process.__name__:
        return not isinstance(processor, _WITH_MEMORY)
    return bool(getattr(processor, "stateless", False))


def stateless_ones(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Those that drafts are shown to."""
    return LogitsProcessorList([p for p in processors if is_stateless(p)])
