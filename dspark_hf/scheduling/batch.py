"""Policies for many requests at once: how the rows of one verification are shared out (paper §3.2.2, §5.2).

Owns: what a batch policy may be told, the paper's two forms for R requests, any single-request policy per request.
Does not own: the default (`batch_lookahead`), drafting, forwards.
Axes: R requests of a step, γ positions; a_{r,k} survival, B rows of the target's forward. Units: seconds.

Losslessness for each request: a decision on x_{r,k} reads its own survivals up to a_{r,k}, which know x_{r,<k} alone, and of
other requests anything of this step, since their draws are independent of x_{r,k}.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..model.sampler_dspark import Admission
from .admission import FixedLength, RoundOutcome, RoundPolicy, continued, prefix_lengths, ranked_pairs
from .step_costs import StepRates

_MOST_BACKLOG = 16  # context tokens a request: a draft that first took in more says nothing of the usual one


@dataclass(frozen=True)
class BatchRequest:
    """One request that decodes in a step: `depth` context tokens before its anchor, room for `limit` drafted ones."""

    id: int
    depth: int
    limit: int


@dataclass(frozen=True)
class StepOutcome:
    """What one finished step was.

    requests: as `begin_step` was given them; the lists go with them. limits: tokens each block was made for. verified,
    accepted, committed: tokens of each. survival: (a_1, a_2, ...) of each as far as it became known. rows: of the whole
    forward, prefill_rows of them of prompts still read. backlog: context tokens that the draft took in first. In seconds,
    `seconds` of the whole step.
    """

    requests: Sequence[BatchRequest]
    limits: Sequence[int]
    verified: Sequence[int]
    accepted: Sequence[int]
    committed: Sequence[int]
    survival: Sequence[Sequence[float]]
    rows: int
    prefill_rows: int
    backlog: int
    draft_seconds: float
    verify_seconds: float
    seconds: float

    @property
    def depth(self) -> int:
        """Mean context of the requests."""
        return mean_depth(self.requests)


class BatchPolicy(Protocol):
    """Shares out one verification. Every step: `begin_step`, `admit` for positions 1, 2, ..., `select`, `end_step`."""

    @property
    def step_rates(self) -> StepRates | None:
        """By which forwards are padded; `None`: they are not."""

    @property
    def reads_survival(self) -> bool:
        """Whether `admit` and `select` are given survivals."""

    def begin_step(self, requests: Sequence[BatchRequest], prefill_rows: int) -> list[int]:
        """Tokens that each request's block is made for, at most its limit; 0 makes it a plain step for that request."""

    def admit(self, position: int, open_requests: Sequence[int], survival: Sequence[Sequence[float]]) -> list[bool]:
        """For each of `open_requests` (places in `begin_step`'s list) whether x_{r,k} is drafted, k = `position` from 1.

        `survival`: (a_1, ..., a_k) of every request as far as known, empty lists unless `reads_survival`.
        """

    def select(self, survival: Sequence[Sequence[float]], drafted: Sequence[int]) -> list[int]:
        """How many of its `drafted` tokens are verified, for each request."""

    def end_step(self, outcome: StepOutcome) -> None:
        """Called after each step; its tokens are committed."""

    def forget(self, request_id: int) -> None:
        """That request is over."""


def mean_depth(requests: Sequence[BatchRequest]) -> int:
    """Mean context tokens of the requests, 1 where there are none."""
    return max(sum(r.depth for r in requests) // max(len(requests), 1), 1)


@dataclass
class PerRequest:
    """A single-request policy, with an instance of its own for each request."""

    policy: Admission
    step_rates: None = field(default=None, init=False)
    _own: dict[int, Any] = field(default_factory=dict, init=False, repr=False)
    _requests: Sequence[BatchRequest] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        self._by_rounds = isinstance(self.policy, RoundPolicy)
        # A fixed length's block is made no longer than it needs to be.
        self._longest = self.policy.length if isinstance(self.policy, FixedLength) else None

    @property
    def reads_survival(self) -> bool:
        return self.policy.reads_survival

    def begin_step(self, requests: Sequence[BatchRequest], prefill_rows: int) -> list[int]:
        self._requests = requests
        limits = []
        for request in requests:
            own: Any = self._own.get(request.id)
            if own is None:
                own = self.policy.fresh() if isinstance(self.policy, RoundPolicy) else self.policy
                self._own[request.id] = own
            limit = request.limit if self._longest is None else min(request.limit, self._longest)
            if limit > 0 and self._by_rounds:
                limit = min(own.begin_round(request.depth, limit), limit)
            limits.append(limit)
        return limits

    def admit(self, position: int, open_requests: Sequence[int], survival: Sequence[Sequence[float]]) -> list[bool]:
        return [self._own[self._requests[r].id].admit(position, list(survival[r])) for r in open_requests]

    def select(self, survival: Sequence[Sequence[float]], drafted: Sequence[int]) -> list[int]:
        return list(drafted)

    def end_step(self, outcome: StepOutcome) -> None:
        if not self._by_rounds:
            return
        for r, request in enumerate(outcome.requests):
            if (own := self._own.get(request.id)) is not None:
                own.end_round(
                    RoundOutcome(
                        request.depth,
                        outcome.limits[r],
                        outcome.verified[r],
                        outcome.accepted[r],
                        outcome.committed[r],
                        outcome.verified[r] + 1,
                        outcome.backlog,
                        outcome.survival[r],
                        outcome.draft_seconds,
                        outcome.verify_seconds,
                        outcome.seconds,
                    )
                )

    def forget(self, request_id: int) -> None:
        self._own.pop(request_id, None)


@dataclass
class BatchThroughput:
    """Algorithm 1 (§3.2.2): whole blocks are drafted, then pairs are admitted by survival while tokens per second grow."""

    step_rates: StepRates
    reads_survival: bool = field(default=True, init=False)
    _seconds: Callable[[int], float] = field(default=float, init=False, repr=False)

    def begin_step(self, requests: Sequence[BatchRequest], prefill_rows: int) -> list[int]:
        limits = [r.limit for r in requests]
        self._seconds = round_seconds(self.step_rates, requests, limits, prefill_rows)
        return limits

    def admit(self, position: int, open_requests: Sequence[int], survival: Sequence[Sequence[float]]) -> list[bool]:
        return [True] * len(open_requests)

    def select(self, survival: Sequence[Sequence[float]], drafted: Sequence[int]) -> list[int]:
        return prefix_lengths([s[:n] for s, n in zip(survival, drafted)], self._seconds)

    def end_step(self, outcome: StepOutcome) -> None:
        correct_rates(self.step_rates, outcome)

    def forget(self, request_id: int) -> None:
        """It keeps nothing of a request."""


@dataclass
class BatchLagged:
    """The production form (§5.2): the number of admitted tokens from a global search over the survivals of `lag` steps
    before, given to the pairs that rank highest now."""

    step_rates: StepRates
    lag: int = 2
    reads_survival: bool = field(default=True, init=False)
    _history: deque[list[list[float]]] = field(default_factory=deque, init=False, repr=False)
    _cap: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.lag < 1:
            raise ValueError(f"BatchLagged: lag must be at least 1 step, got {self.lag}.")
        self._history = deque(maxlen=self.lag)

    def begin_step(self, requests: Sequence[BatchRequest], prefill_rows: int) -> list[int]:
        limits = [r.limit for r in requests]
        self._cap = None
        if len(self._history) == self.lag:
            most = max(limits, default=0)
            earlier = [continued(s, most) for s in self._history[0]]
            seconds = round_seconds(self.step_rates, requests, limits, prefill_rows)
            # That step may have had more or fewer requests.
            share = len(requests) / len(earlier)
            found = prefix_lengths(earlier, lambda b: seconds(round(b * share)), early_stop=False)
            self._cap = round(sum(found) * share)
            # A block of one keeps the survival in sight where nothing is admitted.
            limits = [min(n, max(self._cap, 1)) for n in limits]
        return limits

    def admit(self, position: int, open_requests: Sequence[int], survival: Sequence[Sequence[float]]) -> list[bool]:
        return [True] * len(open_requests)

    def select(self, survival: Sequence[Sequence[float]], drafted: Sequence[int]) -> list[int]:
        if self._cap is None:
            return list(drafted)
        lengths = [0] * len(drafted)
        for _, r in ranked_pairs([s[:n] for s, n in zip(survival, drafted)])[: self._cap]:
            lengths[r] += 1
        return lengths

    def end_step(self, outcome: StepOutcome) -> None:
        correct_rates(self.step_rates, outcome)
        if known := [list(s) for s in outcome.survival if s]:
            self._history.append(known)

    def forget(self, request_id: int) -> None:
        """It keeps nothing of a request."""


def round_seconds(
    rates: StepRates, requests: Sequence[BatchRequest], limits: Sequence[int], prefill_rows: int
) -> Callable[[int], float]:
    """Seconds of a step by the tokens B = Σ(1 + ℓ_r) that it verifies, drafts for `limits` included."""
    count, depth = len(requests), mean_depth(requests)
    draft = draft_seconds(rates, limits)
    return lambda verified: draft + rates.cost(verified + prefill_rows, depth, count)


def draft_seconds(rates: StepRates, limits: Sequence[int]) -> float:
    """Seconds of drafting blocks made for `limits` tokens, all of them drawn; 0 where every limit is."""
    drafting = [n for n in limits if n]
    if not drafting:
        return 0.0
    return rates.draft_cost(sum(drafting) / len(drafting), max(drafting), len(drafting))


def correct_rates(rates: StepRates, outcome: StepOutcome) -> None:
    """Let one live step correct the table slowly."""
    count = len(outcome.requests)
    if not count:
        return
    rates.correct_target(outcome.rows, outcome.verify_seconds, outcome.depth, count)
    drafted = [(n, len(s) or n) for n, s in zip(outcome.limits, outcome.survival) if n]
    if drafted and outcome.backlog <= _MOST_BACKLOG * count:
        steps = max(min(n, known) for n, known in drafted)
        mean = sum(n for n, _ in drafted) / len(drafted)
        rates.correct_draft(outcome.draft_seconds, rates.draft_cost(mean, steps, len(drafted)))
