"""One race: the same prompt decoded plainly and with DSpark, one after the other, shown as it happens.

Units: seconds from a side's start, tokens per second with the prefill included; positions in a block count from 1.

The decoding runs in a thread of its own. It only puts events on a list; text is made of them by whoever reads `run`.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from race_state import (
    ACCEPTED,
    BONUS,
    CORRECTION,
    DSPARK,
    OWN,
    PLAIN,
    Limits,
    RaceOptions,
    RaceState,
    ShownToken,
    Side,
    Verdict,
)
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from dspark_hf.evaluation.bench import MethodRun, compare_answers
from dspark_hf.evaluation.completion import DecodingOptions, check_length, timed_generate, using_policy
from dspark_hf.loading.chat_template import encode_messages
from dspark_hf.loading.pairs import Target
from dspark_hf.model.modeling_dspark import DSparkDraftModel
from dspark_hf.scheduling.policy import Policy, RoundRecord, SequenceRecord
from dspark_hf.scheduling.step_costs import StepRates
from dspark_hf.serving.text import TextStream

logger = logging.get_logger("dspark_hf.demo")
_LETTERS_A_TOKEN = 16  # a prompt with more letters than this for each allowed token isn't even tokenised


@dataclass(frozen=True)
class _Event:
    """What the decoding thread tells: `what` is started, tokens, finished, comparing, verdict or failed."""

    what: str
    side: str = ""
    token_ids: Sequence[int] = ()
    outcome: SequenceRecord | None = None
    value: Any = None


class Observed(Policy):
    """A policy as it is; `tell` gets the record of every round."""

    def __init__(self, policy: Policy, tell: Callable[[SequenceRecord], None]) -> None:
        self.policy, self.tell = policy, tell
        self.reads_survival, self.weighs_copies = policy.reads_survival, policy.weighs_copies
        self.plan, self.admit, self.schedule = policy.plan, policy.admit, policy.schedule

    @property
    def step_rates(self) -> StepRates | None:
        return self.policy.step_rates

    def fresh(self) -> Observed:
        return Observed(self.policy.fresh(), self.tell)

    def learn(self, record: RoundRecord) -> None:
        self.policy.learn(record)
        self.tell(record.sequences[0])


class _Feed(BaseStreamer):
    """Passes tokens on: one by one, or (`by_round`) a round's together once `end_of_round` tells how it went."""

    def __init__(self, emit: Callable[..., None], by_round: bool) -> None:
        self.emit, self.by_round = emit, by_round
        self._puts, self._held = 0, []

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 1:
            return  # the prompt
        if self.by_round and self._puts > 2:  # the first token is the prefill's and belongs to no round
            self._held += value.flatten().tolist()
        else:
            self.emit(token_ids=value.flatten().tolist())

    def end_of_round(self, outcome: SequenceRecord) -> None:
        held, self._held = self._held, []
        self.emit(token_ids=held, outcome=outcome)

    def end(self) -> None:
        """Nothing is left: rounds are emitted as they end."""


class _StopWhen(StoppingCriteria):
    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        return torch.full((input_ids.shape[0],), self.event.is_set(), device=input_ids.device)


def shown(texts: Sequence[str], outcome: SequenceRecord | None) -> list[ShownToken]:
    """A round's tokens with where each came from; without an outcome, the target's own."""
    if outcome is None:
        return [ShownToken(text, OWN) for text in texts]
    last = OWN if not outcome.verified else BONUS if outcome.accepted == outcome.verified else CORRECTION
    return [
        ShownToken(text, ACCEPTED, i + 1) if i < outcome.accepted else ShownToken(text, last)
        for i, text in enumerate(texts)
    ]


class RaceTrack:
    """A target, its drafters by name, and one race at a time on them."""

    def __init__(self, target: Target, drafters: dict[str, DSparkDraftModel], limits: Limits | None = None) -> None:
        self.target, self.drafters, self.limits = target, drafters, limits or Limits()
        self._one_at_a_time = threading.Lock()

    def warm_up(self) -> None:
        """Decode a little with each drafter; measures this machine's step rates where they are not known yet."""
        for name in self.drafters:
            for state in self.run(RaceOptions("Hello", name, max_new_tokens=16)):
                if state.error is not None:
                    raise ValueError(state.error)

    def encode(self, prompt: str, decoding: DecodingOptions) -> list[int]:
        """The prompt's tokens, the chat template around it.

        Raises:
            ValueError: an empty prompt, or one that is too long.
        """
        most = self.limits.prompt_tokens
        if not prompt.strip():
            raise ValueError("The prompt is empty. Write one, or choose an example.")
        if len(prompt) > most * _LETTERS_A_TOKEN:
            raise ValueError(f"The prompt has {len(prompt)} characters; this page takes at most {most} tokens.")
        ids = encode_messages(self.target.tokenizer, [{"role": "user", "content": prompt}])
        if len(ids) > most:
            raise ValueError(f"The prompt has {len(ids)} tokens; this page takes at most {most}. Shorten it.")
        check_length(self.target.model, len(ids), decoding.max_new_tokens)
        return ids

    def run(
        self,
        options: RaceOptions,
        stop: threading.Event | None = None,
        order: Sequence[str] | None = None,
        every: float = 0.2,
    ) -> Iterator[RaceState]:
        """Race, yielding the state about every `every` seconds and at the end; the same object each time.

        Whatever goes wrong is in the last state's `error`. Setting `stop` ends it within a round; closing the iterator too.
        """
        stop = stop or threading.Event()
        sides = list(order or random.sample((PLAIN, DSPARK), 2))
        state = RaceState(tuple(sides))
        events: deque[_Event] = deque()
        ended = threading.Event()
        thread = threading.Thread(target=self._decode, args=(options, sides, stop, events, ended), daemon=True)
        thread.start()
        teller = _Teller(state, self.target)
        try:
            while True:
                over = ended.wait(every)
                while events:
                    teller.take(events.popleft())
                teller.tick()
                if over and not events:
                    break
                yield state
            if not state.ended:
                state.phase = "stopped" if stop.is_set() else "done"
            yield state
        finally:
            stop.set()

    # -- the decoding thread -----------------------------------------------------------------------------------------

    def _decode(
        self, options: RaceOptions, sides, stop: threading.Event, events: deque, ended: threading.Event
    ) -> None:
        try:
            decoding = options.decoding(self.limits)
            if options.drafter not in self.drafters:
                raise ValueError(
                    f"There is no drafter {options.drafter!r} here. Choose one of {', '.join(self.drafters)}."
                )
            ids = self.encode(options.prompt, decoding)
            with self._one_at_a_time:
                answers = {}
                for name in sides:
                    if not stop.is_set():
                        answers[name] = self._decode_side(name, ids, options, decoding, stop, events)
                if len(answers) == len(sides):
                    events.append(_Event("comparing"))
                    stopped = stop.is_set()
                    verdict = self._verdict(ids, answers[PLAIN], answers[DSPARK], decoding.temperature > 0, stopped)
                    events.append(_Event("verdict", value=verdict))
        except (ValueError, OSError) as error:
            events.append(_Event("failed", value=str(error)))
        except Exception as error:  # the page has to stay alive whatever a model raises
            logger.error("The race failed.", exc_info=True)
            events.append(_Event("failed", value=f"Something went wrong ({type(error).__name__}: {error})."))
        finally:
            ended.set()

    def _decode_side(
        self, name: str, ids: list[int], options: RaceOptions, decoding: DecodingOptions, stop, events: deque
    ) -> list[int]:
        model, drafter = self.target.model, self.drafters[options.drafter]
        started = 0.0

        def emit(what: str = "tokens", **more: Any) -> None:
            events.append(_Event(what, name, **more))

        def generate(feed: _Feed, **method: Any) -> tuple[list[int], float]:
            nonlocal started
            started = time.perf_counter()
            emit("started", value=started)
            criteria = StoppingCriteriaList([_StopWhen(stop)])
            return timed_generate(model, ids, decoding, streamer=feed, stopping_criteria=criteria, **method)

        feed = _Feed(emit, by_round=name == DSPARK)
        stats = None
        if name == PLAIN:
            answer, seconds = generate(feed)
        else:
            drafter.last_generation = None
            with using_policy(options.policy_name, model, drafter):
                drafter.options.policy = Observed(drafter.options.policy, feed.end_of_round)
                answer, seconds = generate(feed, assistant_model=drafter)
            stats = drafter.last_generation
        emit("finished", value=(len(answer), seconds, stats))
        return answer

    def _verdict(self, prompt: list[int], plain: list[int], dspark: list[int], sampled: bool, stopped: bool) -> Verdict:
        both = min(len(plain), len(dspark))
        if stopped:
            plain, dspark = plain[:both], dspark[:both]
        if sampled:
            return Verdict(None, both, stopped)
        run = MethodRun(len(dspark), 0.0)
        compare_answers(self.target.model, prompt, plain, dspark, run)
        if run.identical:
            return Verdict(True, both, stopped)
        at = run.first_difference
        texts = [self.target.tokenizer.decode(answer[at : at + 1]) for answer in (plain, dspark)]
        return Verdict(False, both, stopped, at, run.margin_there, *texts)


class _Teller:
    """Turns events into the state."""

    def __init__(self, state: RaceState, target: Target) -> None:
        self.state = state
        self.texts = {name: TextStream(target.tokenizer) for name in (PLAIN, DSPARK)}
        self.started = 0.0

    def take(self, event: _Event) -> None:
        state = self.state
        if event.what == "failed":
            state.phase, state.error = "failed", event.value
            state.plain.running = state.dspark.running = False
        elif event.what == "verdict":
            state.verdict = event.value
        elif event.what == "comparing":
            state.phase = "comparing"
        else:
            self._take_of_side(event, state.side(event.side))

    def _take_of_side(self, event: _Event, side: Side) -> None:
        if event.what == "started":
            self.state.phase, self.started, side.running = "running", event.value, True
        elif event.what == "finished":
            side.tokens, side.seconds, side.stats = event.value
            side.running, side.finished = False, True
        elif event.token_ids:
            texts = [self.texts[side.name].push([token]) for token in event.token_ids]
            side.rounds.append(shown(texts, event.outcome))
            side.tokens += len(texts)

    def tick(self) -> None:
        """Move the clock of the side that runs."""
        for side in (self.state.plain, self.state.dspark):
            if side.running:
                side.seconds = time.perf_counter() - self.started
