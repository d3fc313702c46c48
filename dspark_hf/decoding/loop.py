"""The decoding loop behind `generate(assistant_model=drafter)`: draft, verify once, commit.

Owns: rounds, the target's cache, stopping token by token, the outputs. Does not own: drafting (`candidates`), the
acceptance rule (`verification`), taking features (`targets`).
Axes: L committed tokens, K drafted tokens, V vocabulary; the batch is one sequence.

transformers' own assisted loop feeds cached tokens again in a second turn, looks at stopping criteria once a round and
keeps no statistics; this one ends with the cache, tokens and outputs that plain decoding has.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput

from ..drafting_dspark import DraftBlock
from ..modeling_dspark import DSparkDraftModel
from .candidates import DSparkCandidateGenerator, context_of, keep_context, policy_of
from .commit import Choice, Text, choose
from .compat import CACHE_ARGUMENT, cache_of
from .linear_layers import tuned
from .stats import GenerationStats, RoundRecord, synchronize
from .targets import TargetTaps


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
    policy = policy_of(target, drafter)  # measures this machine at first use
    loop = _Loop(target, logits_processor, stopping_criteria, generation_config, drafter, streamer, policy)
    with tuned(target, drafter), loop.stats.timed("total"):
        return loop.run(input_ids, model_kwargs)


class _Loop:
    def __init__(
        self, target, logits_processor, stopping_criteria, generation_config, drafter, streamer, policy
    ) -> None:
        self.target, self.drafter, self.streamer, self.policy = target, drafter, streamer, policy
        self.processors, self.criteria, self.config = logits_processor, stopping_criteria, generation_config
        self.hidden_states: tuple = ()
        self.attentions: tuple = ()
        self.stats = GenerationStats(drafter.config.num_draft_tokens, type(policy.admission).__name__)

    def run(self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any]):
        config = self.config
        keep = config.return_dict_in_generate
        text = Text(input_ids, config, self.criteria, self.streamer)
        cache = model_kwargs[CACHE_ARGUMENT]
        cache.activate_past_recording()
        mask = model_kwargs.get("attention_mask")
        cached = cache.get_seq_length()
        real = None if mask is None else mask[0].bool()
        num_known = cached if real is None else int(real[:cached].sum())
        context = context_of(cache, self.drafter, num_known)
        candidates = DSparkCandidateGenerator(
            self.drafter, self.target, config, self.processors, context, policy=self.policy
        )
        with TargetTaps(self.target, self.drafter.config.target_layer_ids) as taps:
            with self.stats.timed("prefill"):
                outputs = self.target._prefill(input_ids, config, model_kwargs)
                features = taps.take(self.drafter.device)
                synchronize(input_ids.device)
            cache = cache_of(outputs)
            if not cache.is_croppable:
                raise ValueError(
                    f"{type(self.target).__name__} keeps a {type(cache).__name__} that can't be rewound, so drafts can't be "
                    "verified with it (a recurrent state, or a cache without a past). Decode it without assistant_model."
                )
            cache.crop(0)  # lets sliding layers drop what the prefill no longer needs
            self.stats.prompt_tokens = features.shape[1]
            candidates.observe(
                features if real is None else features[:, real[-features.shape[1] :].to(features.device)]
            )
            choice = self._choose(outputs.logits[:, -1:], text.input_ids, None, candidates)
            model_kwargs = self._commit(text, choice, outputs, model_kwargs, rows=None)
            while not text.finished:
                model_kwargs = self._round(text, candidates, taps, cache, model_kwargs)
        keep_context(cache, context)
        if self.streamer is not None:
            self.streamer.end()
        self.drafter.last_generation = self.stats
        if not keep:
            return text.input_ids
        return GenerateDecoderOnlyOutput(
            sequences=text.input_ids,
            scores=text.scores,
            logits=text.logits,
            attentions=self.attentions or None,
            hidden_states=self.hidden_states or None,
            **{CACHE_ARGUMENT: cache},
        )

    def _round(self, text: Text, candidates, taps: TargetTaps, cache, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        stats, before = self.stats, text.input_ids.shape[1]
        started, spent = time.perf_counter(), (stats.draft_seconds, stats.verify_seconds)
        with stats.timed("scheduling"):
            planned = candidates.plan(text.input_ids)
        with stats.timed("draft"):
            block = candidates.draft(text.input_ids)
        drafted = 0 if block is None else block.token_ids.shape[1]
        candidate_ids = text.input_ids
        if drafted:
            candidate_ids = torch.cat([candidate_ids, block.token_ids.to(candidate_ids.device)], dim=1)
        rows = candidates.rows(drafted, before)
        with stats.timed("verify"):
            outputs = self._forward(candidate_ids, drafted, rows, model_kwargs)
            synchronize(candidate_ids.device)
        features = taps.take(self.drafter.device)
        logits = outputs.logits[:, -rows:][:, : drafted + 1]
        choice = self._choose(logits, candidate_ids, block, candidates)
        model_kwargs = self._commit(text, choice, outputs, model_kwargs, rows)
        committed = text.input_ids.shape[1] - before
        cache.crop(-(rows - committed))
        candidates.observe(features[:, :committed])
        record = RoundRecord(
            planned,
            candidates.parked,
            drafted,
            drafted,
            min(int(choice.verification.num_accepted), committed),
            rows,
            [] if block is None else block.survival[0],
            None if block is None else block.confidence_logits,
            candidates.copy is not None,
        )
        stats.count_round(record)
        stats.scheduling_seconds += 0.0 if block is None else block.policy_seconds
        with stats.timed("scheduling"):
            seconds = (
                stats.draft_seconds - spent[0],
                stats.verify_seconds - spent[1],
                time.perf_counter() - started,
            )
            candidates.end_round(before, record, committed, seconds)
        return model_kwargs

    def _forward(
        self, candidate_ids: torch.LongTensor, drafted: int, rows: int, model_kwargs: dict[str, Any]
    ) -> ModelOutput:
        """The target over the anchor and the drafted tokens, and copies of the last one up to `rows` in all."""
        kwargs = copy.copy(model_kwargs)
        if padding := rows - drafted - 1:
            candidate_ids = torch.cat([candidate_ids, candidate_ids[:, -1:].expand(-1, padding)], dim=1)
        length = candidate_ids.shape[1]
        if kwargs.get("attention_mask") is not None:
            kwargs = _prepare_attention_mask(kwargs, kwargs["attention_mask"].shape[1] + rows - 1, False)
        kwargs = _prepare_token_type_ids(kwargs, length)
        if (positions := kwargs.get("position_ids")) is not None and rows > 1:
            kwargs = _prepare_position_ids(kwargs, positions.shape[-1] + rows - 1, False)
        inputs = self.target.prepare_inputs_for_generation(candidate_ids, next_sequence_length=rows, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = rows
        return self.target(**inputs, return_dict=True)

    def _choose(self, logits, candidate_ids, block: DraftBlock | None, candidates) -> Choice:
        probs = None
        if self.config.do_sample and block is not None and block.token_ids.shape[1]:
            probs = candidates.full_probs(block)
        return choose(self.processors, self.config.do_sample, candidate_ids, logits[0], probs)

    def _commit(self, text: Text, choice: Choice, outputs, model_kwargs, rows: int | None) -> dict[str, Any]:
        """`rows`: tokens of the target's forward, `None` for the prefill."""
        committed = text.commit(choice, lambda i: self._record(outputs, i, rows))
        self.stats.new_tokens += committed
        return self.target._update_model_kwargs_for_generation(
            outputs, model_kwargs, is_encoder_decoder=False, num_new_tokens=committed
        )

    def _record(self, outputs, i: int, rows: int | None) -> None:
        """Keep hidden states and attentions of one committed token where they were asked for."""
        if not self.config.return_dict_in_generate:
            return
        own = slice(None) if rows is None else slice(i, i + 1)
        if self.config.output_hidden_states:
            self.hidden_states += (tuple(layer[:, own] for layer in outputs.hidden_states),)
        if self.config.output_attentions:
            behind = 0 if rows is None else rows - 1 - i  # tokens that came after this one in the same forward
            self.attentions += (tuple(a[..., own, : a.shape[-1] - behind] for a in outputs.attentions),)
