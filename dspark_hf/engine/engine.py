"""`BatchEngine`: many requests, one ragged verification per step (paper §3.2.2, §5.2).

Owns: which requests run, the step (gate, draft all, schedule, verify once, commit), faults of single requests.
Does not own: forwards (`runner`), drafting (`drafting`), sharing out the verification (`scheduling.batch`), acceptance.
Axes: R requests that decode, B rows of one forward of the target.

Start reading at `BatchEngine._step`.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..decoding.commit import Text
from ..decoding.hook import check_pair
from ..decoding.stats import GenerationStats, synchronize
from ..decoding.tuned_pair import see_changed_weights, tuned
from ..model.modeling_dspark import DSparkDraftModel
from ..scheduling.batch import BatchPolicy, BatchRequest, StepOutcome
from ..scheduling.step_costs import StepRates
from .batch_policy_of import batch_policy_of, check_policy
from .drafting import BatchDrafter
from .queue import RequestQueue, is_out_of_memory, no_memory
from .runner import Runner, Span, SpanOutput, check_target
from .sequence import FinishReason, Prepared, Request, RequestOutput, check_room, prepare, prompt_tensor
from .stats import EngineStats, StepRecord
from .turn import Turn

logger = logging.get_logger(__name__)
_MAX_AGE = 5.0  # seconds within which a busy engine sees that weights were changed; an idle one looks at each request
_LAZY_FEATURES = 64  # features a request may gather while it is not drafting, before they are projected all the same


class BatchEngine:
    """Decodes many requests together. `add` them, then `step` or `run`; see `generate_batch` for a fixed list.

    step_rates: this machine's table, measured at first use by default. max_sequences: most requests at once.
    max_tokens_in_cache: most tokens that the requests let in may come to hold together (prompt and budget of each); the
    others wait. keep_finished: so many finished texts keep their cache, for a prompt that begins as they do (the next turn of
    a conversation). prefill_chunk: prompt tokens read in one step beside requests that decode. policy: how the verification is
    shared out; by default as the drafter is set, the lookahead for a calibrated one. Without a drafter it decodes plainly.

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
        policy: BatchPolicy | None = None,
    ) -> None:
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
        self._runner = Runner(target, drafter)
        check_target(target)
        self._drafter: BatchDrafter | None = None
        self._cap, self.policy = 0, None if drafter is None else policy
        if drafter is not None:
            check_pair(target, drafter)
            self._drafter = BatchDrafter(drafter)
            self._cap = drafter.config.num_draft_tokens
            if policy is None:
                self.policy, self._cap = batch_policy_of(target, drafter, step_rates, max_sequences)
            check_policy(self.policy, drafter)
        self._queue = RequestQueue(
            self._runner, self._drafter, max_sequences, max_tokens_in_cache, prefill_chunk, keep_finished
        )
        self.stats = EngineStats("plain" if self.policy is None else type(self.policy).__name__)
        self._ids = itertools.count()
        self._done: list[RequestOutput] = []
        self._cancelled: set[int] = set()
        self._stepping = False

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
            id=next(self._ids),
            prepared=prepared,
            text=Text(prepared.input_ids, prepared.config, prepared.criteria, streamer),
            generator=generator,
            draft_generator=draft_generator,
            stats=GenerationStats(length, self.stats.policy),
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
        return self._runner.store.num_tokens

    @property
    def cache_bytes(self) -> int:
        """Memory of the caches of target and drafter."""
        return self._runner.store.num_bytes + (0 if self._drafter is None else self._drafter.store.num_bytes)

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
        with torch.inference_mode(), layers, self._runner.armed():
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
        """Gate, draft all, schedule, verify once, commit."""
        if self.model is not None and len(self._queue):  # not timed: it would be taken for a slow round
            max_age = _MAX_AGE if self._queue.running else 0.0
            if see_changed_weights(self.target, self.model, max_age):
                self._queue.forget_down_to(0)  # they were read by the old weights
        started = time.perf_counter()
        self._let_in()
        chunks = self._queue.chunks()
        turns = [Turn(r, self._ask(r)) for r in self._queue.running if not r.is_reading]
        if not chunks and not turns:
            return
        prefill_rows = sum(chunks.values())
        backlog = self._draft(turns, prefill_rows)
        drafted = time.perf_counter()

        spans = {turn.request: turn.span() for turn in turns}
        padding = self._padding(spans, prefill_rows)
        spans |= {r: Span(r.place, r.unread[:n], keep=int(n == len(r.unread))) for r, n in chunks.items()}
        outputs = self._verify(spans, padding)
        synchronize(self.target.device)
        verified = time.perf_counter()

        draft_seconds, verify_seconds = drafted - started, verified - drafted
        for turn in turns:
            if turn.request in outputs:
                self._commit(turn, outputs[turn.request], draft_seconds, verify_seconds)
        first = sum(self._read(r, outputs[r], verified - started) for r in chunks if r in outputs)
        seconds = time.perf_counter() - started
        rows = sum(len(span.token_ids) for span in spans.values()) + padding
        done = [t for t in turns if t.committed]  # the others' requests failed, or made way
        if self.policy is not None and done:
            self.policy.end_step(
                StepOutcome(
                    requests=[t.asked for t in done],
                    limits=[t.draft.limit for t in done],
                    verified=[t.verified for t in done],
                    accepted=[t.accepted for t in done],
                    committed=[t.committed for t in done],
                    survival=[t.draft.survival for t in done],
                    rows=rows,
                    prefill_rows=prefill_rows,
                    backlog=backlog,
                    draft_seconds=draft_seconds,
                    verify_seconds=verify_seconds,
                    seconds=seconds,
                )
            )
        for request in [r for r in self._queue.running if r.text.finished]:
            self._finish(request, request.reason)
        self.stats.count(
            StepRecord(
                decoding=len(turns),
                reading=len(chunks),
                waiting=len(self._queue.waiting),
                rows=rows,
                prefill_rows=prefill_rows,
                drafted=sum(len(t.draft.token_ids) for t in turns),
                verified=sum(t.verified for t in turns),
                accepted=sum(t.accepted for t in turns),
                committed=sum(t.committed for t in turns) + first,
                cache_tokens=self.cache_tokens,
                cache_bytes=self.cache_bytes,
                draft_seconds=draft_seconds,
                verify_seconds=verify_seconds,
                seconds=seconds,
            )
        )

    def _let_in(self) -> None:
        for request_id in list(self._cancelled):
            self._cancelled.discard(request_id)
            if (request := self._queue.find(request_id)) is not None:
                self._finish(request, "cancelled")
        for request, error in self._queue.let_in():
            self._finish(request, "error", error)

    def _ask(self, request: Request) -> BatchRequest:
        """What the policy may know of a request: its depth, and the room it has for drafts."""
        length = request.text.length
        # The target's own token needs a place too, and a draft some context.
        room = min(request.capacity - length - 1, self._cap)
        has_context = request.draft_slot is not None or request.pending
        return BatchRequest(request.id, length - 1, max(room, 0) if has_context else 0)

    def _draft(self, turns: list[Turn], prefill_rows: int) -> int:
        """Fill in the turns' drafts and how much of them is verified; returns the context tokens taken in first."""
        if self.policy is None or self._drafter is None:
            return 0
        requests, limits, backlog = [t.request for t in turns], [], 0
        if turns:
            limits = self.policy.begin_step([t.asked for t in turns], prefill_rows)
        drafting = {r for r, n in zip(requests, limits) if n}
        try:
            backlog = self._drafter.extend(
                [r for r in self._queue.running if r in drafting or r.num_pending >= _LAZY_FEATURES]
            )
            if not turns:
                return backlog
            for turn, draft in zip(turns, self._drafter.draft(requests, limits, self.policy)):
                turn.draft = draft
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.warning_once("There is too little memory for drafting; this step and maybe others decode plainly.")
            return backlog
        drafted = [len(t.draft.token_ids) for t in turns]
        for turn, count in zip(turns, self.policy.select([t.draft.survival for t in turns], drafted)):
            turn.verified = count
        return backlog

    def _padding(self, spans: dict[Request, Span], prefill_rows: int) -> int:
        """Rows by which a forward over `spans` is the cheaper; none beside prompts, which fill it anyway."""
        rates = None if self.policy is None else self.policy.step_rates
        if rates is None or prefill_rows or not spans:
            return 0
        rows = sum(len(span.token_ids) for span in spans.values())
        depth = sum(span.slot.length for span in spans.values()) // len(spans)
        return rates.padded_rows(rows, depth) - rows

    def _verify(self, spans: dict[Request, Span], padding: int) -> dict[Request, SpanOutput]:
        """One forward over all spans. Where memory runs out, the request let in last makes way for the others."""
        while spans:
            try:
                for span in spans.values():
                    self._runner.store.reserve(span.slot, span.slot.length + len(span.token_ids))
                outputs = self._runner.forward(list(spans.values()), padding)
                return dict(zip(spans, outputs))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                last = max(spans, key=self._queue.running.index)
                del spans[last]
                if len(self._queue.running) > 1:
                    self._queue.evict(last)
                else:
                    self._finish(last, "error", no_memory(last, error))
        return {}

    def _commit(self, turn: Turn, output: SpanOutput, draft_seconds: float, verify_seconds: float) -> None:
        """A fault of a request's own ends that request alone."""
        try:
            turn.commit(self._drafter, output, draft_seconds, verify_seconds)
        except Exception as error:
            self._finish(turn.request, "error", error)

    def _read(self, request: Request, output: SpanOutput, seconds: float) -> int:
        """Take in a piece of a prompt; with its end comes the first new token. Returns how many tokens came."""
        request.stats.prefill_seconds += seconds
        request.stats.prompt_tokens += output.num_rows
        committed = 0
        try:
            if len(output.logits):
                committed, _ = request.append(request.text.input_ids, output.logits)
        except Exception as error:
            self._finish(request, "error", error)
            return 0
        request.keep(output, output.num_rows)
        return committed

    def _finish(self, request: Request, reason: FinishReason, error: Exception | None = None) -> None:
        """Free a request's places and put its record among those to hand out."""
        if reason in ("stop", "length"):
            self._queue.keep(request)
        else:
            self._queue.release(request)
        if self.policy is not None:
            self.policy.forget(request.id)
        self.stats.finished[reason] += 1
        self._done.append(request.output(reason, error))
        if request.text.streamer is not None:
            with contextlib.suppress(Exception):  # a consumer must not wait for ever, whatever happened
                request.text.streamer.end()
