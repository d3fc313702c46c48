"""`BatchEngine`: many requests, one round of all of them per step (paper §3.2.2, §5.2); `generate_batch` for a fixed list.

Axes: R requests that decode. Start reading at `BatchEngine._step`; a round is `decoding.speculative`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..decoding.backend import Rows
from ..decoding.default_policy import checked, policy_of
from ..decoding.drafting import Drafting
from ..decoding.hook import check_pair, drafter_of
from ..decoding.ragged_target import RaggedTarget, check_target
from ..decoding.speculative import Speculation
from ..decoding.statistics import GenerationStats
from ..decoding.tuned_pair import see_changed_weights, tuned
from ..model.modeling_dspark import DSparkDraftModel
from ..scheduling.policy import Policy
from ..scheduling.step_costs import StepRates
from .queue import RequestQueue, no_memory
from .request import FinishReason, Prepared, Request, RequestOutput, check_room, prepare, prompt_tensor

logger = logging.get_logger(__name__)
_MAX_AGE = 5.0  # seconds within which a busy engine sees that weights were changed; an idle one looks at each request


class BatchEngine:
    """Decodes many requests together. `add` them, then `step` or `run`; see `generate_batch` for a fixed list.

    step_rates: this machine's table, measured at first use by default. max_sequences: most requests at once.
    max_tokens_in_cache: most tokens that the running requests may come to hold together (prompt and budget of each); the
    others wait. keep_finished: so many finished texts keep their cache, for a prompt that begins as they do (the next turn of
    a conversation). prefill_chunk: prompt tokens read in one step beside requests that decode. policy: how far each request
    drafts; by default as in `drafter.options`. Without a drafter it decodes plainly.

    Raises:
        ValueError: a target that the engine can't serve, a drafter that does not fit it, limits below 1.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: DSparkDraftModel | None = None,
        step_rates: StepRates | None = None,
        *,
        max_sequences: int = 16,
        max_tokens_in_cache: int | None = None,
        prefill_chunk: int | None = None,
        keep_finished: int = 0,
        policy: Policy | None = None,
    ) -> None:
        given, drafter = drafter, drafter_of(drafter)
        if given is not None and drafter is None:
            raise ValueError(f"BatchEngine: drafter must be a DSparkDraftModel, got a {type(given).__name__}.")
        self.target, self.model = target, drafter
        if prefill_chunk is None:
            prefill_chunk = 64 if target.device.type == "cpu" else 512
        limits = {
            "max_sequences": max_sequences,
            "prefill_chunk": prefill_chunk,
            "max_tokens_in_cache": max_tokens_in_cache,
        }
        for name, value in limits.items():
            if value is not None and value < 1:
                raise ValueError(f"BatchEngine: {name} must be at least 1, got {value}.")
        self._backend = RaggedTarget(target, drafter)
        check_target(target)
        drafting, cap = None, 0
        if drafter is not None:
            check_pair(target, drafter)
            if policy is None:
                policy, cap = policy_of(target, drafter, max_sequences, step_rates)
            else:
                policy, cap = checked(policy, drafter), drafter.config.num_draft_tokens
            drafting = Drafting(drafter)
        self._speculation = Speculation(
            target, self._backend, drafting, None if drafter is None else policy, cap, self._make_room
        )
        self._queue = RequestQueue(
            self._backend.store, drafter, max_sequences, max_tokens_in_cache, prefill_chunk, keep_finished
        )
        length = 0 if drafter is None else drafter.config.num_draft_tokens
        self.stats = GenerationStats.of_engine(length, "plain" if self.policy is None else type(self.policy).__name__)
        self._ids = itertools.count()
        self._done: list[RequestOutput] = []
        self._cancelled: set[int] = set()
        self._stepping = False

    @property
    def policy(self) -> Policy | None:
        """How far each request drafts; `None` without a drafter."""
        return self._speculation.policy

    @policy.setter
    def policy(self, policy: Policy | None) -> None:
        self._speculation.policy = policy

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(
        self,
        input_ids: Sequence[int] | torch.Tensor,  # [L] or [1, L]
        generation_config: GenerationConfig | None = None,
        streamer: BaseStreamer | None = None,
        seed: int | None = None,
        *,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        **settings: Any,
    ) -> int:
        """Queue a request and return its id; everything means what it means in `generate()`, `settings` too.

        seed: of this request's own generator; drawn from torch's global one by default.

        Raises:
            ValueError: no prompt, one that is too long for the target or the cache, settings that are not served.
        """
        ids = prompt_tensor(input_ids, self.target)
        prepared = prepare(self.target, ids, generation_config, logits_processor, stopping_criteria, settings)
        check_room(prepared, self.target, self._queue.max_tokens)
        request = self._request(prepared, streamer, seed)
        if streamer is not None:
            streamer.put(ids.cpu())
        self._queue.waiting.append(request)
        return request.id

    def _request(self, prepared: Prepared, streamer: BaseStreamer | None, seed: int | None) -> Request:
        seed = int(torch.randint(2**62, (1,))) if seed is None else seed
        generator = torch.Generator(self.target.device).manual_seed(seed)
        draft_generator, length = generator, 0
        if self.model is not None:
            length = self.model.config.num_draft_tokens
            if self.model.device != self.target.device:
                draft_generator = torch.Generator(self.model.device).manual_seed(seed + 1)
        return Request(
            prepared,
            streamer,
            GenerationStats(length, self.stats.policy),
            id=next(self._ids),
            generator=generator,
            draft_generator=draft_generator,
            acceptance="same_text" if self.model is None else self.model.options.acceptance,
        )

    def cancel(self, request_id: int) -> bool:
        """End a request and free its cache; its output has what was committed. `False` where it is over or unknown.

        Called from within a step (by a streamer), it takes effect at the start of the next one.
        """
        request = self._queue.find(request_id)
        if request is None:
            return False
        if self._stepping:
            self._cancelled.add(request_id)
        else:
            self._finish(request, "cancelled")
        return True

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run, and outputs not yet handed out."""
        return len(self._queue) + len(self._done)

    @property
    def cache_tokens(self) -> int:
        """Tokens held in the target's cache."""
        return self._backend.store.num_tokens

    @property
    def cache_bytes(self) -> int:
        """Memory of the caches of target and drafter."""
        return self._backend.store.num_bytes + self._queue.draft_store.num_bytes

    # -- running -----------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """One forward of the target for everybody; returns the requests that are over."""
        with self._armed():
            self._guarded_step()
        return self._take_done()

    def run(self) -> Iterator[RequestOutput]:
        """Step until nothing is left, yielding requests as they finish; others may be added meanwhile.

        After Ctrl-C the requests not finished are over too ("interrupted"); the next call yields them.
        """
        while self.num_unfinished:
            with self._armed():
                while len(self._queue) and not self._done:
                    self._guarded_step()
            while self._done:
                yield self._done.pop(0)

    @contextmanager
    def _armed(self) -> Iterator[None]:
        layers = contextlib.nullcontext() if self.model is None else tuned(self.target, self.model, max_age=_MAX_AGE)
        with torch.inference_mode(), layers, self._backend.armed():
            yield

    def interrupt(self) -> list[RequestOutput]:
        """End everything at once and return what there is."""
        self._abandon("interrupted", None)
        return self._take_done()

    def _take_done(self) -> list[RequestOutput]:
        done, self._done = self._done, []
        return done

    def _guarded_step(self) -> None:
        self._stepping = True
        try:
            self._step()
        except BaseException as error:
            # Half a step is of no use: everybody's text is as it was last committed.
            fault = error if isinstance(error, Exception) else None
            self._abandon("interrupted" if fault is None else "error", fault)
            raise
        finally:
            self._stepping = False

    def _abandon(self, reason: FinishReason, error: Exception | None) -> None:
        for request in [*self._queue.running, *self._queue.waiting]:
            self._finish(request, reason, error)

    def _step(self) -> None:
        """Admit, then one round: running requests decode while pieces of prompts are read beside them."""
        if self.model is not None and len(self._queue):  # not timed: it would be taken for a slow round
            max_age = _MAX_AGE if self._queue.running else 0.0
            if see_changed_weights(self.target, self.model, max_age):
                self._queue.forget_down_to(0)  # they were read by the old weights
        self._admit()
        chunks = self._queue.chunks()
        decoding = [r for r in self._queue.running if not r.is_reading]
        if not chunks and not decoding:
            return
        started, before = time.perf_counter(), {r: len(r.new_tokens) for r in chunks}
        record = self._speculation.round(decoding, chunks)
        for request, rows in chunks.items():
            request.stats.prefill_seconds += time.perf_counter() - started
            if request.slot is not None:  # it did not make room for others
                request.stats.prompt_tokens += len(rows.token_ids)
        first_tokens = sum(len(r.new_tokens) - n for r, n in before.items())
        for request in list(self._queue.running):
            if request.error is not None:
                self._finish(request, "error", request.error)
            elif request.finished:
                self._finish(request, request.reason)
        record = dataclasses.replace(
            record, waiting=len(self._queue.waiting), cache_tokens=self.cache_tokens, cache_bytes=self.cache_bytes
        )
        self.stats.count_round(record, first_tokens)

    def _admit(self) -> None:
        for request_id in list(self._cancelled):
            self._cancelled.discard(request_id)
            if (request := self._queue.find(request_id)) is not None:
                self._finish(request, "cancelled")
        for request, error in self._queue.admit():
            self._finish(request, "error", error)

    def _make_room(self, rows: list[Rows], error: Exception) -> list[Rows]:
        """Where memory runs out, the request admitted last makes room for the others, and waits."""
        last = [r for r in self._queue.running if any(row.sequence is r for row in rows)][-1]
        if len(self._queue.running) > 1:
            self._queue.evict(last)
        else:
            last.error = no_memory(last, error)
        return [row for row in rows if row.sequence is not last]

    def _finish(self, request: Request, reason: FinishReason, error: Exception | None = None) -> None:
        """Free a request's slots and put its record among those to hand out."""
        if reason in ("stop", "length"):
            self._queue.keep(request)
        else:
            self._queue.release(request)
        if self.policy is not None:
            self.policy.forget(request.id)
        self.stats.finished[reason] += 1
        self._done.append(request.output(reason, error))
        if request.streamer is not None:
            with contextlib.suppress(Exception):  # a consumer must not wait for ever, whatever happened
                request.streamer.end()


def generate_batch(
    target: PreTrainedModel,
    drafter: DSparkDraftModel | None,
    prompts: Sequence[Sequence[int] | torch.Tensor],
    generation_config: GenerationConfig | Sequence[GenerationConfig | None] | None = None,
    *,
    seeds: Sequence[int] | None = None,
    on_finished: Callable[[RequestOutput], None] | None = None,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> list[RequestOutput]:
    """Decode all prompts together, each as `generate()` would; outputs in the order of the prompts.

    prompts: token ids, [L] or [1, L] each, not padded. generation_config: for all, or one for each. seeds: one for each.
    on_finished: called with each output when it is there. engine: arguments of `BatchEngine` (`max_sequences`, ...).
    settings: as in `generate()` (`max_new_tokens`, `do_sample`, `temperature`, ...).

    A request that fails has its exception in `error`. After Ctrl-C the list is returned all the same: requests not finished have
    `finish_reason` "interrupted" and the tokens they had.

    Raises:
        ValueError: a prompt or setting that the engine refuses; nothing was decoded then.
    """
    for name, values in (("generation_config", generation_config), ("seeds", seeds)):
        if isinstance(values, Sequence) and len(values) != len(prompts):
            raise ValueError(f"generate_batch: {len(prompts)} prompts, but {len(values)} entries in {name}.")
    batch = BatchEngine(target, drafter, **engine or {})
    ids = []
    for i, prompt in enumerate(prompts):
        config = generation_config[i] if isinstance(generation_config, Sequence) else generation_config
        ids.append(batch.add(prompt, config, seed=None if seeds is None else seeds[i], **settings))
    outputs: dict[int, RequestOutput] = {}
    try:
        for output in batch.run():
            outputs[output.id] = output
            if on_finished is not None:
                on_finished(output)
    except KeyboardInterrupt:
        logger.warning("Interrupted: requests that were not finished are returned as far as they came.")
        outputs |= {output.id: output for output in batch.interrupt()}
    return [outputs[i] for i in ids]
