"""`LookaheadScheduler`: draft and verify exactly as much as pays, decided before each token exists. The default policy.

Owns: valuing tokens against time, the gate before drafting, parking, learning from finished rounds.
Does not own: confidences and their calibration, the step rates, the other policies (`admission`).
Axes: γ positions; a_k survival, c_k = a_k / a_{k-1} confidence, λ tokens per second. Units: seconds.

A round is worth its expected tokens minus λ times its seconds, with λ the rate of the run so far, in which old rounds fade
(the renewal-reward form of Θ): what maximises that in each round maximises the rate of the run, not the ratio of one
round. On a jagged curve the next token alone may not pay while three do, so each decision looks for the best longer
prefix; positions whose confidence is not known yet enter with their expectation, never with what was or will be drawn
(non-anticipating).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .acceptance_estimate import SPREAD, Belief, Expectation, RunRate
from .admission import Parking, RoundOutcome
from .step_costs import StepRates


@dataclass
class LookaheadScheduler:
    """Maximises the tokens per second of a run; `gate=False` always drafts. One instance serves one generation (`fresh`).

    step_rates: the machine's table. expectation: of this drafter. reads_survival: `False` for a drafter without a
    confidence head, whose positions are judged by their expectation alone.
    """

    step_rates: StepRates
    expectation: Expectation | None = None
    gate: bool = True
    reads_survival: bool = True
    parking: Parking = field(default_factory=Parking, init=False)
    _run: RunRate = field(default_factory=RunRate, init=False, repr=False)
    _probing: bool = field(default=False, init=False, repr=False)
    _verify: list[float] = field(default_factory=list, init=False, repr=False)
    _step: float = field(default=0.0, init=False, repr=False)
    _rate: float = field(default=0.0, init=False, repr=False)
    _limit: int | None = field(default=None, init=False, repr=False)
    _value: float = field(default=0.0, init=False, repr=False)  # of the block decided on, beyond a plain step

    def __post_init__(self) -> None:
        self._belief = Belief(self.expectation or Expectation(information=1.0), self.reads_survival)

    def fresh(self) -> LookaheadScheduler:
        return LookaheadScheduler(self.step_rates, self.expectation, self.gate, self.reads_survival)

    # -- before drafting ---------------------------------------------------------------------------------------------

    def begin_round(self, depth: int, limit: int) -> int:
        """The block length worth drafting now, 0 where a plain step is expected to give more tokens per second."""
        self._look_up(depth, limit)
        values = self._block_values(limit)
        value, best = max((value, -n) for n, value in enumerate(values, start=1))
        best = -best
        if value > 0 or not self.gate:
            self.parking.resume()
        elif not self.parking.refuse():
            best = 0
        self._probing = self.gate and value <= 0 and best > 0
        self._limit, self._value = best, max(value, 0.0) if best else 0.0
        return best

    def copy_length(self, survival: Sequence[float], depth: int) -> int:
        """How many tokens of a copy that costs nothing to draft to verify instead of this round's block; 0 for none.

        survival: (a_1, a_2, ...) of its tokens, known before any of them (from earlier rounds and the committed text).
        """
        plain, tokens, best, length = self.step_rates.cost(1, depth), 0.0, self._value, 0
        rate = self._run.per_second(plain)
        for n, a in enumerate(survival, start=1):
            tokens += a
            gain = tokens - rate * (self.step_rates.cost(n + 1, depth) - plain)
            if gain > best:
                best, length = gain, n
        return length

    def _look_up(self, depth: int, limit: int) -> None:
        """This round's λ, and the seconds that verifying 1, 2, ... tokens and one more drafted token take."""
        rates = self.step_rates
        self._verify = [rates.cost(n, depth) for n in range(1, limit + 2)]
        self._step = rates.draft_cost(1, 1) - rates.draft_cost(1, 0)
        self._rate = self._run.per_second(self._verify[0])

    def _block_values(self, limit: int) -> list[float]:
        """For blocks made for 1 to `limit` tokens: expected tokens beyond a plain step's, less λ times the additional seconds.

        Half of the rounds are taken to lie above the expectation, half below, each cut where it pays best.
        """
        values = [-self._rate * self.step_rates.draft_cost(n, 0) for n in range(1, limit + 1)]
        spread = SPREAD if self.reads_survival else 0.0
        for deviation in (-spread, spread):
            best = 0.0
            for n, gain in enumerate(self._gains(0, 1.0, self._belief.tail(0, limit, deviation))):
                best = max(best, gain)
                values[n] += 0.5 * best
        return values

    # -- while drafting ----------------------------------------------------------------------------------------------

    def admit(self, position: int, survival_so_far: list[float]) -> bool:
        """Whether some prefix that ends at `position` or later is worth more than stopping here."""
        if self._probing and position == 1:
            return True  # or it would learn nothing
        limit = max(position, self._limit or position)
        if limit >= len(self._verify):  # asked without `begin_round`
            self._look_up(1, limit)
        outlook = self._belief.outlook(survival_so_far, position, limit)
        return max(self._gains(position - 1, math.prod(outlook[: position - 1]), outlook[position - 1 :])) > 0

    def _gains(self, length: int, survival: float, tail: Sequence[float]) -> list[float]:
        """What going on by 1, 2, ... tokens from `length`, alive with probability `survival`, is worth."""
        gains, tokens, start = [], 0.0, self._verify[length]
        for n, acceptance in enumerate(tail, start=1):
            survival *= acceptance
            tokens += survival
            gains.append(tokens - self._rate * (self._verify[length + n] - start + n * self._step))
        return gains

    # -- after the round ---------------------------------------------------------------------------------------------

    def end_round(self, outcome: RoundOutcome) -> None:
        """Learn from committed tokens alone."""
        self.step_rates.observe(outcome)
        plain = self.step_rates.cost(1, outcome.depth)
        if self.step_rates.live:
            self._run.observe_overhead(outcome.seconds - outcome.draft_seconds - outcome.verify_seconds, plain)
        cost = self.step_rates.round_cost(outcome.limit, outcome.drafted, outcome.rows, outcome.depth)
        self._run.add(outcome.committed, cost, plain)
        if outcome.limit:
            self._belief.learn(outcome.survival, outcome.drafted, outcome.accepted)
