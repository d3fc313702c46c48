"""The decoding loop behind `generate(assistant_model=drafter)`: rounds of one sequence.

transformers' own assisted loop feeds cached tokens again in a second turn, looks at stopping criteria once a round and
keeps no statistics; this one ends with the cache, tokens and outputs that plain decoding has.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..model.modeling_dspark import DSparkDraftModel
from .attention import grouped_attention
from .backend import CacheBackend
from .compat import CACHE_ARGUMENT
from .default_policy import policy_of
from .draft_context import context_of, keep_context
from .drafting import Drafting
from .kv_cache import ordinary_buffers
from .sequence import TextSequence
from .speculative import Speculation
from .statistics import GenerationStats, synchronize
from .tuned_pair import tuned


def speculative_decoding(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: DSparkDraftModel,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.LongTensor:
    """Decode one sequence; arguments and result as in transformers' `_assisted_decoding`."""
    backend = CacheBackend(target, drafter, generation_config, input_ids, model_kwargs)
    policy, cap = policy_of(target, drafter, call=generation_config)  # measures this machine at first use
    if backend.sizes and policy.step_rates is not None:
        policy.step_rates = policy.step_rates.stepped(backend.sizes)
    stats = GenerationStats(drafter.config.num_draft_tokens, type(policy).__name__)
    sequence = TextSequence(
        input_ids,
        generation_config,
        logits_processor,
        stopping_criteria,
        streamer,
        stats,
        acceptance=drafter.options.acceptance,
    )
    speculation = Speculation(target, backend, Drafting(drafter), policy, cap)
    # Compiled code has forms of its own, and would be made anew for ours.
    is_eager = backend.compiled is None
    quick = grouped_attention() if is_eager else nullcontext()
    with tuned(target, drafter, of_target=is_eager), quick, stats.timed("total"):
        try:
            _run(speculation, backend, sequence, drafter)
        finally:
            if sequence.noise is not None:
                sequence.noise.rewind()
            ordinary_buffers(target)
            ordinary_buffers(drafter)
    drafter.last_generation = stats
    if not generation_config.return_dict_in_generate:
        return sequence.input_ids
    return GenerateDecoderOnlyOutput(
        sequences=sequence.input_ids,
        scores=sequence.scores,
        logits=sequence.logits,
        attentions=backend.attentions or None,
        hidden_states=backend.hidden_states or None,
        **{CACHE_ARGUMENT: backend.cache},
    )


def _run(speculation: Speculation, backend: CacheBackend, sequence: TextSequence, drafter: DSparkDraftModel) -> None:
    stats = sequence.stats
    with backend:
        context = sequence.draft_context = context_of(backend.cache, drafter, backend.num_known())
        with stats.timed("prefill"):
            reading = backend.prefill(sequence)
            synchronize(sequence.input_ids.device)
        context.add(reading.features)
        keep_context(backend.cache, context)
        logits = reading.logits
        del reading  # its features of the whole prompt, where the context may keep the last ones alone
        speculation.first_token(sequence, logits)
        while sequence.error is None and not sequence.finished:
            speculation.round([sequence])
        if sequence.error is not None:
            raise sequence.error
        with stats.timed("verify"):
            backend.finish(sequence)
    if sequence.streamer is not None:
        sequence.streamer.end()
