"""Admission policies: whether position k of a block is drafted and verified (design decision 3).

Owns: the policies of the paper and what a policy may be told. Does not own: confidences, calibration, step rates, the
default policy (`lookahead`).
Axes: R requests, γ positions; a_k survival of position k, B tokens in one forward of the target.
A policy never sees x_k or anything after it when it decides on x_k, so truncating the draft leaves the output's
distribution as it is (non-anticipating, paper §3.2.2). What it learns between rounds is of tokens already committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ..model.sampler_dspark import Admission
from .step_costs import StepRates


@dataclass(frozen=True)
class RoundOutcome:
    """What one finished round was.

    depth: context tokens before the anchor. limit: tokens the block was made for, 0 where nothing was drafted. rows: tokens
    of the target's forward, more than drafted + 1 where it was padded. backlog: context tokens that the draft took in
    first. survival: (a_1, a_2, ...) as far as they became known, the refused position's too. Times are in seconds,
    `seconds` of the whole round.
    """

    depth: int
    limit: int
    drafted: int
    accepted: int
    committed: int
    rows: int
    backlog: int
    survival: Sequence[float]
    draft_seconds: float
    verify_seconds: float
    seconds: float


@runtime_checkable
class RoundPolicy(Admission, Protocol):
    """A policy that also decides before drafting, and is told how each round went."""

    step_rates: StepRates | None  # `None`: forwards are not padded

    def fresh(self) -> RoundPolicy:
        """The same policy without what it learned, for a new generation."""

    def begin_round(self, depth: int, limit: int) -> int:
        """Tokens this round's block is made for, at most `limit`; 0 makes the round a plain step."""

    def end_round(self, outcome: RoundOutcome) -> None:
        """Called after each round; its tokens are committed."""


@dataclass(frozen=True)
class FixedLength:
    """Draft `length` tokens every round."""

    length: int
    reads_survival = False

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"FixedLength: length must be at least 0, got {self.length}.")

    def admit(self, position: int, survival_so_far: list[float]) -> bool:
        """`position` k counts from 1; `survival_so_far` (a_1, ..., a_k) is not read."""
        return position <= self.length


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Stop before the first position whose confidence c_k (or survival a_k, where `cumulative`) is below `threshold`."""

    threshold: float
    cumulative: bool = False
    reads_survival = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"ConfidenceThreshold: threshold must be between 0 and 1, got {self.threshold}.")

    def admit(self, position: int, survival_so_far: list[float]) -> bool:
        """`position` k counts from 1; `survival_so_far` is (a_1, ..., a_k) with a_k the product of c_1..c_k."""
        survival = survival_so_far[-1]
        if self.cumulative or position == 1:
            return survival >= self.threshold
        before = survival_so_far[-2]
        return before > 0.0 and survival / before >= self.threshold


@dataclass
class Parking:
    """Plain steps while drafting does not pay, with probes at growing distances (in rounds)."""

    first_wait: int = 2
    longest_wait: int = 64
    _interval: int = field(default=0, init=False, repr=False)
    _wait: int = field(default=0, init=False, repr=False)

    def refuse(self) -> bool:
        """Drafting does not seem to pay: whether to draft in this round all the same, to look again."""
        if self._interval and not self._wait:
            self._interval = self._wait = min(2 * self._interval, self.longest_wait)
            return True
        self._interval = self._interval or self.first_wait
        self._wait = (self._wait or self._interval) - 1
        return False

    def resume(self) -> None:
        """Drafting pays again."""
        self._interval = self._wait = 0


@dataclass
class GuardedLength:
    """Draft `length` tokens every round, but park once `patience` rounds in a row had none accepted.

    What a drafter gets that was never calibrated: nothing has to be measured for it, and a useless one costs little.
    """

    length: int
    patience: int = 16
    reads_survival = False
    step_rates = None
    _misses: int = field(default=0, init=False, repr=False)
    _parking: Parking = field(default_factory=Parking, init=False, repr=False)

    def fresh(self) -> GuardedLength:
        return GuardedLength(self.length, self.patience)

    def begin_round(self, depth: int, limit: int) -> int:
        if self._misses < self.patience:
            self._parking.resume()
        elif not self._parking.refuse():
            return 0
        return min(limit, self.length)

    def admit(self, position: int, survival_so_far: list[float]) -> bool:
        return position <= self.length

    def end_round(self, outcome: RoundOutcome) -> None:
        if outcome.drafted:
            self._misses = 0 if outcome.accepted else self._misses + 1


def ranked_pairs(survival: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
    """(a_{r,k}, r) of all pairs by falling survival; of equal ones the earlier position first."""
    pairs = [(-a, k, r) for r, request in enumerate(survival) for k, a in enumerate(request)]
    return [(-a, r) for a, _, r in sorted(pairs)]


def prefix_lengths(
    survival: Sequence[Sequence[float]],  # R lists (a_1, a_2, ...), each falling
    seconds: Callable[[int], float],  # of a round that verifies B tokens in all
    early_stop: bool = True,
) -> list[int]:
    """How many tokens of each request to verify: Algorithm 1 (§3.2.2).

    All (request, position) pairs are ranked by survival and admitted while Θ = τ / seconds(B) grows. With `early_stop`
    the first that does not improve ends it (non-anticipating where it is asked position by position); without, the best Θ
    of the whole curve is taken, which only greedy decoding, or a look at earlier rounds, may do.
    """
    lengths = [0] * len(survival)
    best_lengths, tokens, size = list(lengths), float(len(survival)), len(survival)
    best = tokens / seconds(size)
    for a, request in ranked_pairs(survival):
        tokens, size = tokens + a, size + 1
        lengths[request] += 1
        if tokens / seconds(size) > best:
            best, best_lengths = tokens / seconds(size), list(lengths)
        elif early_stop:
            break
    return best_lengths


@dataclass
class ThroughputScheduler:
    """Algorithm 1 (§3.2.2) for one request: admit while tokens per second grow, stop at the first that does not improve.

    The drafter's own time is part of a round's seconds; that of the parallel stage is spent by the time it decides.
    """

    step_rates: StepRates
    reads_survival = True
    _depth: int = field(default=1, init=False, repr=False)
    _limit: int = field(default=1, init=False, repr=False)

    def fresh(self) -> ThroughputScheduler:
        return ThroughputScheduler(self.step_rates)

    def begin_round(self, depth: int, limit: int) -> int:
        self._depth, self._limit = depth, limit
        return limit

    def admit(self, position: int, survival_so_far: list[float]) -> bool:
        """Whether Θ with x_1..x_k is above Θ with x_1..x_{k-1}."""
        tokens = 1.0 + sum(survival_so_far)
        return tokens / self._seconds(position) > (tokens - survival_so_far[-1]) / self._seconds(position - 1)

    def end_round(self, outcome: RoundOutcome) -> None:
        self.step_rates.observe(outcome)

    def _seconds(self, length: int) -> float:
        return self.step_rates.round_cost(self._limit, length, length + 1, self._depth)


@dataclass
class LaggedScheduler:
    """The production form (§5.2): a cap from a global search over the survivals of `lag` rounds before, live ranking.

    For one request the best K by rank are the first K positions. Survivals that a cut block left unknown go on at the
    last known conditional rate.
    """

    step_rates: StepRates
    lag: int = 2
    reads_survival = True
    _history: deque[list[float]] = field(default_factory=deque, init=False, repr=False)
    _cap: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.lag < 1:
            raise ValueError(f"LaggedScheduler: lag must be at least 1 round, got {self.lag}.")
        self._history = deque(maxlen=self.lag)

    def fresh(self) -> LaggedScheduler:
        return LaggedScheduler(self.step_rates, self.lag)

    def begin_round(self, depth: int, limit: int) -> int:
        self._cap = limit
        if len(self._history) == self.lag:
            survival = continued(self._history[0], limit)
            self._cap = prefix_lengths(
                [survival], lambda b: self.step_rates.round_cost(limit, b - 1, b, depth), early_stop=False
            )[0]
        return max(self._cap, 1)  # a block of one keeps the survival in sight where nothing is admitted

    def admit(self, position: int, survival_so_far: list[float]) -> bool:
        return self._cap is None or position <= self._cap

    def end_round(self, outcome: RoundOutcome) -> None:
        self.step_rates.observe(outcome)
        if outcome.survival:
            self._history.append(list(outcome.survival))


def continued(survival: Sequence[float], length: int) -> list[float]:
    """`survival` cut or continued to `length` positions at its last conditional rate."""
    known = list(survival[:length])
    rate = 1.0 if not known else known[-1] / known[-2] if len(known) > 1 and known[-2] > 0 else known[-1]
    while len(known) < length:
        known.append(known[-1] * rate if known else 1.0)
    return known
