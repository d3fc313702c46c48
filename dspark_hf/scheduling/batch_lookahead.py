"""`BatchLookahead`: one verification shared out among all requests as pays best, decided before each token exists.

Owns: the gate before drafting and the admission for R requests at once; the default of the batch engine.
Does not own: beliefs and λ (`belief`), the other policies (`batch`), the form for one request (`lookahead`).
Axes: R requests, γ positions; a_{r,k} survival, B rows of the target's forward, λ tokens per second. Units: seconds.

A step is worth its expected tokens minus λ times its seconds. All (request, position) pairs are ranked by their survival,
known or expected, and the number of them that is worth most is taken, however the cost curve bends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from .acceptance_estimate import SPREAD, Belief, Expectation, RunRate
from .admission import Parking, ranked_pairs
from .batch import BatchRequest, StepOutcome, correct_rates, draft_seconds, mean_depth
from .step_costs import StepRates


@dataclass
class _Member:
    """What is kept of one request."""

    belief: Belief
    parking: Parking = field(default_factory=Parking)
    probes: int = 0


@dataclass
class BatchLookahead:
    """Maximises the engine's tokens per second.

    step_rates: the machine's table, for several sequences too. expectation: of this drafter. reads_survival: `False` for a
    drafter without a confidence head.
    """

    step_rates: StepRates
    expectation: Expectation | None = None
    reads_survival: bool = True
    _parking: Parking = field(default_factory=Parking, init=False, repr=False)  # of all requests together
    _run: RunRate = field(default_factory=RunRate, init=False, repr=False)
    _members: dict[int, _Member] = field(default_factory=dict, init=False, repr=False)
    # Of the step at hand, by place of the request:
    _in_step: list[_Member] = field(default_factory=list, init=False, repr=False)
    _limits: list[int] = field(default_factory=list, init=False, repr=False)
    _drafted: list[int] = field(default_factory=list, init=False, repr=False)  # tokens admitted so far
    _probing: set[int] = field(default_factory=set, init=False, repr=False)
    _added: list[float] = field(default_factory=list, init=False, repr=False)
    _rate: float = field(default=0.0, init=False, repr=False)
    _position: float = field(
        default=0.0, init=False, repr=False
    )  # seconds of drafting one more position of one request

    # -- before drafting ---------------------------------------------------------------------------------------------

    def begin_step(self, requests: Sequence[BatchRequest], prefill_rows: int) -> list[int]:
        """The block length worth drafting for each request, 0 where that request is better decoded plainly."""
        expected = self.expectation or Expectation(information=1.0)
        for request in requests:
            if request.id not in self._members:
                self._members[request.id] = _Member(Belief(expected, self.reads_survival))
        self._in_step = [self._members[r.id] for r in requests]
        self._limits, self._drafted, self._probing = [0] * len(requests), [0] * len(requests), set()
        possible = [r for r, request in enumerate(requests) if request.limit > 0]
        self._look_up(requests, prefill_rows)
        if not possible:
            return self._limits
        limits, worth = self._plan(requests, possible)
        if worth > 0:
            self._parking.resume()
            self._limits = limits
        elif self._parking.refuse():
            # One request alone looks whether drafting pays again: all of them would cost too much.
            chosen = min(possible, key=lambda r: self._in_step[r].probes)
            self._probe(chosen)
        return list(self._limits)

    def _probe(self, r: int) -> None:
        self._in_step[r].probes += 1
        self._probing.add(r)
        self._limits[r] = max(self._limits[r], 1)

    def _look_up(self, requests: Sequence[BatchRequest], prefill_rows: int) -> None:
        """This step's λ, and the seconds that 0, 1, 2, ... rows beyond one for each request add to the forward."""
        rates, count, depth = self.step_rates, len(requests), mean_depth(requests)
        most = sum(r.limit for r in requests)
        base = rates.cost(count + prefill_rows, depth, count)
        self._added = [rates.cost(count + prefill_rows + n, depth, count) - base for n in range(most + 1)]
        self._rate = self._run.per_second(rates.cost(count, depth, count), count)
        longest, drafting = max((r.limit for r in requests), default=0), sum(r.limit > 0 for r in requests)
        self._position = 0.0
        if longest > 1:
            more = rates.draft_cost(longest, longest, drafting) - rates.draft_cost(1, 1, drafting)
            self._position = max(more, 0.0) / (drafting * (longest - 1))

    def _plan(self, requests: Sequence[BatchRequest], possible: Sequence[int]) -> tuple[list[int], float]:
        """Block lengths, and what they are worth beyond a plain step.

        Each request is taken to lie above or below its expectation with even chances, so a pair counts one half.
        """
        pairs: list[tuple[float, int, int]] = []  # survival less the price of drafting it, position, request
        for r in possible:
            belief, limit = self._in_step[r].belief, requests[r].limit
            for deviation in (SPREAD, -SPREAD) if self.reads_survival else (0.0, 0.0):
                survival = list(accumulate(belief.tail(0, limit, deviation), lambda a, b: a * b))
                # The block is made as long as the better case wants it: there the price of a position is paid.
                price = 2.0 * self._rate * self._position if deviation >= 0 else 0.0
                pairs += [(a - price, k, r) for k, a in enumerate(survival, start=1)]
        pairs.sort(key=lambda p: (-p[0], p[1]))
        best, taken, gain = 0.0, 0, 0.0
        for n, (a, _, _) in enumerate(pairs, start=1):
            gain += 0.5 * a
            value = gain - self._rate * self._rows_cost(0.5 * n)
            if value > best:
                best, taken = value, n
        limits, surplus = [0] * len(requests), [0.0] * len(requests)
        row_price = self._rate * self._rows_cost(0.5 * taken) / max(0.5 * taken, 0.5)
        for a, k, r in pairs[:taken]:
            limits[r] = max(limits[r], k)
            surplus[r] += 0.5 * (a - row_price)
        return self._without_losers(limits, surplus)

    def _without_losers(self, limits: list[int], surplus: list[float]) -> tuple[list[int], float]:
        """Leave out requests whose tokens are not worth their share of the parallel stage; they look again now and then."""
        drafting = [r for r, n in enumerate(limits) if n]
        if not drafting:
            return limits, 0.0
        one_more = self._rate * (self._first(len(drafting)) - self._first(len(drafting) - 1))
        losers = [r for r in drafting if surplus[r] <= one_more] if len(drafting) > 1 else []
        kept = [r for r in drafting if r not in losers]
        worth = sum(surplus[r] for r in kept) - self._rate * self._first(len(kept))
        if not kept or worth <= 0:
            return limits, worth
        for r in kept:
            self._in_step[r].parking.resume()
        for r in losers:
            probes = self._in_step[r].parking.refuse()
            limits[r] = 1 if probes else 0
            if probes:
                self._probing.add(r)
        return limits, worth

    def _first(self, drafting: int) -> float:
        """Seconds of the parallel stage and one position for `drafting` requests."""
        return draft_seconds(self.step_rates, [1] * drafting)

    def _rows_cost(self, rows: float) -> float:
        low = min(int(rows), len(self._added) - 1)
        high = min(low + 1, len(self._added) - 1)
        return self._added[low] + (rows - low) * (self._added[high] - self._added[low])

    # -- while drafting ----------------------------------------------------------------------------------------------

    def admit(self, position: int, open_requests: Sequence[int], survival: Sequence[Sequence[float]]) -> list[bool]:
        """For each open request whether its token at `position` is among the pairs worth most together."""
        ahead: list[list[float]] = []  # of each open request: survival from `position` on
        for r in open_requests:
            outlook = self._in_step[r].belief.outlook(survival[r], position, self._limits[r])
            ahead.append(list(accumulate(outlook, lambda a, b: a * b))[position - 1 :])
        start = sum(self._drafted)
        best, gain, chosen = 0.0, 0.0, set()
        seen: list[int] = []
        for n, (a, place) in enumerate(ranked_pairs(ahead), start=1):
            gain += a - self._rate * self._position
            seen.append(place)
            value = gain - self._rate * (self._rows_cost(start + n) - self._rows_cost(start))
            if value > best:
                best, chosen = value, set(seen)
        decisions = [i in chosen or (position == 1 and r in self._probing) for i, r in enumerate(open_requests)]
        for r, goes_on in zip(open_requests, decisions):
            self._drafted[r] += goes_on
        return decisions

    def select(self, survival: Sequence[Sequence[float]], drafted: Sequence[int]) -> list[int]:
        return list(drafted)

    # -- after the step ----------------------------------------------------------------------------------------------

    def end_step(self, outcome: StepOutcome) -> None:
        """Learn from committed tokens alone."""
        correct_rates(self.step_rates, outcome)
        count = len(outcome.requests)
        if not count:
            return
        rates, depth = self.step_rates, outcome.depth
        plain = rates.cost(count, depth, count)
        if rates.live:
            self._run.observe_overhead(outcome.seconds - outcome.draft_seconds - outcome.verify_seconds, plain)
        seconds = draft_seconds(rates, outcome.limits) + rates.cost(outcome.rows - outcome.prefill_rows, depth, count)
        self._run.add(sum(outcome.committed), seconds, plain, count)
        for r, request in enumerate(outcome.requests):
            if outcome.limits[r] and request.id in self._members:
                belief = self._members[request.id].belief
                belief.learn(outcome.survival[r], outcome.verified[r], outcome.accepted[r])

    def forget(self, request_id: int) -> None:
        self._members.pop(request_id, None)
