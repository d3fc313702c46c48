"""The decoding loop behind `generate(assistant_model=drafter)`: draft, verify once, commit.

Owns: rounds, the target's cache, stopping token by token, the outputs. Does not own: drafting (`candidates`), the
acceptance rule (`verification`), taking features (`targets`).
Axes: L committed tokens, K drafted tokens, V vocabulary; the batch is one sequence.

transformers' own assisted loop feeds cached tokens again in a second turn, looks at stopping criteria once a round and
keeps no statistics; this one ends with the cache, tokens and outputs that plain decoding has.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput

from ..model.modeling_dspark import DSparkDraftModel
from ..model.sampler_dspark import DraftBlock
from .candidates import DSparkCandidateGenerator, policy_of
from .commit import Choice, Text, choose
from .compat import CACHE_ARGUMENT, cache_of
from .compiled import CompiledForward, compiled_forward, uncompiled
from .draft_context import context_of, keep_context
from .quick_forward import grouped_attention, ordinary_buffers
from .rollback import Rewinder, check_cache, check_room
from .stats import GenerationStats, RoundRecord, synchronize
from .targets import TargetTaps, check_image_mask, length_dependent_rope, most_read_alike
from .tuned_pair import tuned

# Arguments with a line for each token that grow rightly by one line at a time only.
_GROWN_BY_ONE = ("token_type_ids", "cross_attention_mask", "image_attention_mask")


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
    cache = model_kwargs[CACHE_ARGUMENT]
    check_cache(cache, target)
    check_room(cache, _most_read(input_ids, generation_config, model_kwargs))
    compiled = compiled_forward(target, drafter, generation_config, model_kwargs)
    policy = policy_of(target, drafter)  # measures this machine at first use
    loop = _Loop(target, logits_processor, stopping_criteria, generation_config, drafter, streamer, policy, compiled)
    # Compiled code has forms of its own, and would be made anew for ours.
    quick = grouped_attention() if compiled is None else nullcontext()
    with tuned(target, drafter, of_target=compiled is None), quick, loop.stats.timed("total"):
        try:
            return loop.run(input_ids, model_kwargs)
        finally:
            ordinary_buffers(target)
            ordinary_buffers(drafter)


def _most_read(input_ids: torch.LongTensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> int:
    """Tokens of the whole text at the most, cached and embedded ones included."""
    mask, new = model_kwargs.get("attention_mask"), config.max_length - input_ids.shape[1]
    if mask is not None and mask.ndim == 2:
        return mask.shape[1] + new
    # Where it was all ones, transformers 5.24 drops the mask and keeps its length.
    return vars(config).get("_mask_length", input_ids.shape[1]) + new


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


class _Loop:
    def __init__(
        self, target, logits_processor, stopping_criteria, generation_config, drafter, streamer, policy, compiled
    ) -> None:
        self.target, self.drafter, self.streamer, self.policy = target, drafter, streamer, policy
        self.compiled: CompiledForward | None = compiled
        self.processors, self.criteria, self.config = logits_processor, stopping_criteria, generation_config
        self.rope = length_dependent_rope(target)
        self.hidden_states: tuple = ()
        self.attentions: tuple = ()
        self.stats = GenerationStats(drafter.config.num_draft_tokens, type(policy.admission).__name__)

    def run(self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any]):
        config = self.config
        keep = config.return_dict_in_generate
        text = Text(input_ids, config, self.criteria, self.streamer)
        cache = model_kwargs[CACHE_ARGUMENT]
        check_image_mask(self.target, cache, model_kwargs)
        mask = model_kwargs.get("attention_mask")
        cached = int(cache.get_seq_length())  # a static cache counts in a tensor that goes on growing
        real = None if mask is None else mask[0].bool()
        num_known = cached if real is None else int(real[:cached].sum())
        context = context_of(cache, self.drafter, num_known)
        candidates = DSparkCandidateGenerator(
            self.drafter,
            self.target,
            config,
            self.processors,
            context,
            policy=self.policy if self.compiled is None else self.compiled.stepped(self.policy),
            sizes=() if self.compiled is None else self.compiled.sizes,
        )
        with TargetTaps(self.target, self.drafter.config.target_layer_ids) as taps:
            with self.stats.timed("prefill"):
                outputs = self.target._prefill(input_ids, uncompiled(config), model_kwargs)
                features = taps.take(self.drafter.device)
                synchronize(input_ids.device)
            cache = cache_of(outputs)
            rewinder = Rewinder(cache, self.target)
            outlives = keep or getattr(cache, "_is_user_defined", False)
            self.stats.prompt_tokens = features.shape[1]
            candidates.observe(
                features if real is None else features[:, real[-features.shape[1] :].to(features.device)]
            )
            del features  # of the whole prompt, where the context may keep the last ones alone
            keep_context(cache, context)
            try:
                choice = self._choose(outputs.logits[:, -1:], text.input_ids, None, candidates)
                model_kwargs = self._commit(text, choice, outputs, model_kwargs, rows=None)
                while not text.finished:
                    outputs, model_kwargs = self._round(text, candidates, taps, rewinder, outputs, model_kwargs)
                if rewinder.lag and outlives:
                    with self.stats.timed("verify"):
                        self._forward(text.input_ids[:, :-1], rewinder.lag, model_kwargs, taps)
            finally:
                if outlives:
                    rewinder.release()
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

    def _round(
        self, text: Text, candidates, taps: TargetTaps, rewinder: Rewinder, outputs, model_kwargs: dict[str, Any]
    ):
        """Returns the outputs of this round's forward and the arguments of the next one."""
        stats, before = self.stats, text.input_ids.shape[1]
        started, spent = time.perf_counter(), (stats.draft_seconds, stats.verify_seconds)
        with stats.timed("scheduling"):
            most = _least(
                rewinder.most_drafted(self.drafter.config.num_draft_tokens), most_read_alike(self.rope, before)
            )
            planned = candidates.plan(text.input_ids, most, text.new_tokens)
        with stats.timed("draft"):
            block = candidates.draft(text.input_ids)
        drafted = 0 if block is None else block.token_ids.shape[1]
        candidate_ids = text.input_ids
        if drafted:
            candidate_ids = torch.cat([candidate_ids, block.token_ids.to(candidate_ids.device)], dim=1)
        lag = rewinder.lag
        new_rows = candidates.rows(drafted, before) if rewinder.may_pad else drafted + 1
        with stats.timed("verify"):
            rewinder.hold(lag + new_rows, may_fall=drafted > 0)
            padding = candidate_ids[:, -1:].expand(-1, new_rows - drafted - 1)
            arguments = self._grown(outputs, model_kwargs, new_rows - 1)
            try:
                outputs = self._forward(torch.cat([candidate_ids, padding], dim=1), lag + new_rows, arguments, taps)
            except BaseException:
                rewinder.undo()
                raise
        features = taps.take(self.drafter.device)[:, lag:]
        logits = self._ordinary(outputs.logits[:, -new_rows:][:, : drafted + 1])
        try:
            # An accelerator is waited for here alone, where the choice is read, so its forward's time ends here too.
            with nullcontext() if candidate_ids.device.type == "cpu" else stats.timed("verify"):
                choice = self._choose(logits, candidate_ids, block, candidates)
            model_kwargs = self._commit(text, choice, outputs, model_kwargs, lag + new_rows, lag)
        finally:  # also where a streamer or a stopping criterion raises: the cache may be the user's
            committed = text.length - before
            rewinder.settle(lag + new_rows, committed)
            candidates.observe(features[:, :committed])
        record = RoundRecord(
            planned,
            candidates.parked,
            drafted,
            drafted,
            min(choice.accepted, committed),
            lag + new_rows,
            [] if block is None else block.survival[0],
            None if block is None or block.confidence_logits is None else block.confidence_logits.clone(),
            lag,
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
        return outputs, model_kwargs

    def _forward(self, ids: torch.LongTensor, rows: int, model_kwargs: dict[str, Any], taps: TargetTaps) -> ModelOutput:
        """The target over the last `rows` of `ids` [1, L]; `model_kwargs` are those of a text of L tokens."""
        inputs = self.target.prepare_inputs_for_generation(ids, next_sequence_length=rows, **model_kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = rows
        if self.compiled is not None:
            return self.compiled(taps, inputs)
        # A tenth faster than without gradients alone, where a forward is many small operations.
        with torch.inference_mode():
            return self.target(**inputs, return_dict=True)

    def _ordinary(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits that processors may write into, and that may be kept."""
        return logits.clone() if self.processors or self.config.return_dict_in_generate else logits

    def _grown(self, outputs, model_kwargs: dict[str, Any], count: int) -> dict[str, Any]:
        """A copy of the arguments that is as `count` steps of plain decoding would leave it."""
        kwargs = dict(model_kwargs)
        # transformers repeats as many of the last types as there are new tokens, and one line of a mask over images.
        one_by_one = any(kwargs.get(name) is not None for name in _GROWN_BY_ONE)
        for number in [1] * count if one_by_one else [count] * (count > 0):
            kwargs = self.target._update_model_kwargs_for_generation(
                outputs, kwargs, is_encoder_decoder=False, num_new_tokens=number
            )
        return kwargs

    def _choose(self, logits, candidate_ids, block: DraftBlock | None, candidates) -> Choice:
        probs = None
        if self.config.do_sample and block is not None and block.token_ids.shape[1]:
            probs = candidates.full_probs(block)
        return choose(self.processors, self.config.do_sample, candidate_ids, logits[0], probs)

    def _commit(
        self, text: Text, choice: Choice, outputs, model_kwargs, rows: int | None, lag: int = 0
    ) -> dict[str, Any]:
        """`rows`: tokens of the target's forward, `None` for the prefill; `lag` of them came before the anchor."""
        committed = text.commit(choice, lambda i: self._record(outputs, lag + i, rows))
        self.stats.new_tokens += committed
        # Nothing reads the last token of a finished text.
        return self._grown(outputs, model_kwargs, committed - text.finished)

    def _record(self, outputs, i: int, rows: int | None) -> None:
        """Keep hidden states and attentions of one committed token where they were asked for."""
        if not self.config.return_dict_in_generate:
            return
        own = slice(None) if rows is None else slice(i, i + 1)
        if self.config.output_hidden_states:
            self.hidden_states += (tuple(layer[:, own].clone() for layer in outputs.hidden_states),)
        if self.config.output_attentions:
            behind = 0 if rows is None else rows - 1 - i  # tokens that came after this one in the same forward
            self.attentions += (tuple(a[..., own, : a.shape[-1] - behind].clone() for a in outputs.attentions),)
