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
from dataclasses import dataclass, field
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

from ..drafting_dspark import DraftBlock, scores_dtype
from ..modeling_dspark import DSparkDraftModel
from .candidates import DSparkCandidateGenerator, context_of, keep_context, policy_of
from .compat import CACHE_ARGUMENT, cache_of
from .linear_layers import tuned
from .sampling import process_rows
from .stats import GenerationStats, RoundRecord, synchronize
from .targets import TargetTaps
from .verification import Verification, verify_block, verify_greedy


@dataclass
class _Text:
    """The text so far and what is recorded of each of its new tokens."""

    input_ids: torch.LongTensor  # [1, L]
    scores: tuple[torch.Tensor, ...] | None
    logits: tuple[torch.Tensor, ...] | None
    hidden_states: tuple = field(default_factory=tuple)
    attentions: tuple = field(default_factory=tuple)
    finished: bool = False


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
        self.stats = GenerationStats(drafter.config.num_draft_tokens, type(policy.admission).__name__)

    def run(self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any]):
        config = self.config
        keep = config.return_dict_in_generate
        text = _Text(
            input_ids, () if keep and config.output_scores else None, () if keep and config.output_logits else None
        )
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
            attentions=text.attentions or None,
            hidden_states=text.hidden_states or None,
            **{CACHE_ARGUMENT: cache},
        )

    def _round(self, text: _Text, candidates, taps: TargetTaps, cache, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        stats, before = self.stats, text.input_ids.shape[1]
        started, spent = time.perf_counter(), (stats.draft_seconds, stats.verify_seconds)
        with stats.timed("scheduling"):
            planned = candidates.plan(before)
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
            min(int(choice.verification.num_accepted), committed),
            rows,
            [] if block is None else block.survival[0],
            None if block is None else block.confidence_logits,
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

    def _choose(self, logits, candidate_ids, block: DraftBlock | None, candidates) -> _Choice:
        """Process the target's scores and decide which drafted tokens stand, and what follows them."""
        do_sample = self.config.do_sample
        raw = logits[0].to(candidate_ids.device, scores_dtype(logits) if do_sample else torch.float32)  # [K + 1, V]
        scores = process_rows(self.processors, candidate_ids, raw)
        drafted = 0 if block is None else block.token_ids.shape[1]
        tokens = candidate_ids[:, candidate_ids.shape[1] - drafted :]
        if not do_sample:
            return _Choice(verify_greedy(tokens, scores.argmax(-1)[None]), tokens, raw, scores)
        draft_probs = scores.new_zeros(1, 0, scores.shape[-1])
        if block is not None and drafted:
            draft_probs = candidates.full_probs(block).to(scores.device)
        verification = verify_block(tokens, draft_probs.to(scores.dtype), scores.softmax(-1)[None])
        return _Choice(verification, tokens, raw, scores)

    def _commit(self, text: _Text, choice: _Choice, outputs, model_kwargs, rows: int | None) -> dict[str, Any]:
        """Append accepted tokens and the next one, one at a time as plain decoding would, until a criterion stops.

        `rows`: tokens of the target's forward, `None` for the prefill.
        """
        accepted = int(choice.verification.num_accepted)
        new = torch.cat([choice.tokens[0, :accepted], choice.verification.next_token])
        committed = 0
        while committed < len(new) and not text.finished:
            token = new[committed : committed + 1]
            text.input_ids = torch.cat([text.input_ids, token[None]], dim=1)
            if self.streamer is not None:
                self.streamer.put(token.cpu())
            self._record(text, outputs, choice, committed, rows)
            committed += 1
            text.finished = bool(self.criteria(text.input_ids, text.scores).all())
        self.stats.new_tokens += committed
        return self.target._update_model_kwargs_for_generation(
            outputs, model_kwargs, is_encoder_decoder=False, num_new_tokens=committed
        )

    def _record(self, text: _Text, outputs, choice: _Choice, i: int, rows: int | None) -> None:
        """Keep scores, logits, hidden states and attentions of one committed token where they were asked for."""
        if text.scores is not None:
            text.scores += (choice.scores[i : i + 1],)
        if text.logits is not None:
            text.logits += (choice.raw[i : i + 1],)
        if not self.config.return_dict_in_generate:
            return
        own = slice(None) if rows is None else slice(i, i + 1)
        if self.config.output_hidden_states:
            text.hidden_states += (tuple(layer[:, own] for layer in outputs.hidden_states),)
        if self.config.output_attentions:
            behind = 0 if rows is None else rows - 1 - i  # tokens that came after this one in the same forward
            text.attentions += (tuple(a[..., own, : a.shape[-1] - behind] for a in outputs.attentions),)


@dataclass(frozen=True)
class _Choice:
    """What the target made of a round: the verification, the drafted tokens [1, K], its logits and scores [K + 1, V]."""

    verification: Verification
    tokens: torch.LongTensor
    raw: torch.Tensor
    scores: torch.Tensor
