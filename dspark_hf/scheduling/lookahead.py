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

from .admission import Parking, RoundOutcome
from .step_rates import StepRates

_MEMORY = 0.98  # what a round still weighs in λ one round later
_PRIOR_TOKENS = 4.0  # λ starts at the rate of plain decoding, with the weight of this many tokens
_LEVEL_PACE = 0.1  # share of a round's deviation that the expectation for the next rounds takes over
_MOST_INFORMATION = 16.0  # bounds what past outcomes weigh, so that a text that changes is followed
_SPREAD = 1.8  # logits by which single rounds lie around the expectation, as the gate reckons


@dataclass(frozen=True)
class Expectation:
    """What calibration says of rounds not yet drafted; the default, one half with little weight, is for no calibration.

    acceptance: P(x_k stands | x_<k stood) for each position, one half beyond the last. persistence: share of a position's
    deviation (in logits) that carries on to the next. information: how many outcomes this is worth against the run's own.
    """

    acceptance: Sequence[float] = ()
    persistence: float = 0.3
    information: float = 4.0

    def of(self, position: int) -> float:
        """P(x_k stands | x_<k stood) in logits, k = `position` counted from 0."""
        return _logit(self.acceptance[position]) if position < len(self.acceptance) else 0.0


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
    _tokens: float = field(default=_PRIOR_TOKENS, init=False, repr=False)
    _seconds: float = field(default=0.0, init=False, repr=False)
    _overhead: float = field(default=0.0, init=False, repr=False)
    _shift: float = field(default=0.0, init=False, repr=False)  # of all confidences, in logits: what the run shows
    _information: float = field(default=0.0, init=False, repr=False)
    _level: float = field(default=0.0, init=False, repr=False)  # of the last rounds' confidences above expectation
    _probing: bool = field(default=False, init=False, repr=False)
    _verify: list[float] = field(default_factory=list, init=False, repr=False)
    _step: float = field(default=0.0, init=False, repr=False)
    _rate: float = field(default=0.0, init=False, repr=False)
    _limit: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._expected = self.expectation or Expectation(information=1.0)
        self._information = self._expected.information

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
        self._limit = best
        return best

    def _look_up(self, depth: int, limit: int) -> None:
        """This round's λ, and the seconds that verifying 1, 2, ... tokens and one more drafted token take."""
        rates = self.step_rates
        self._verify = [rates.cost(n, depth) for n in range(1, limit + 2)]
        self._step = rates.draft_cost(1, 1) - rates.draft_cost(1, 0)
        plain = 1.0 / (self._verify[0] + self._overhead)
        # Never below plain decoding's rate, which is always to be had.
        self._rate = max(self._tokens / self._seconds, plain) if self._seconds else plain

    def _block_values(self, limit: int) -> list[float]:
        """For blocks made for 1 to `limit` tokens: expected tokens beyond a plain step's, less λ times the additional seconds.

        Half of the rounds are taken to lie above the expectation, half below, each cut where it pays best.
        """
        values = [-self._rate * self.step_rates.draft_cost(n, 0) for n in range(1, limit + 1)]
        spread = _SPREAD if self.reads_survival else 0.0
        for deviation in (-spread, spread):
            best = 0.0
            for n, gain in enumerate(self._gains(0, 1.0, self._tail(0, limit, deviation))):
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
        if self.reads_survival:
            known = self._corrected(survival_so_far)
            deviation = _logit(known[-1]) - self._expected.of(position - 1) - self._shift - self._level
            tail = [known[-1], *self._tail(position, limit, deviation * self._expected.persistence)]
            before = math.prod(known[:-1])
        else:
            guess = self._tail(0, limit, 0.0)
            tail, before = guess[position - 1 :], math.prod(guess[: position - 1])
        return max(self._gains(position - 1, before, tail)) > 0

    def _gains(self, length: int, survival: float, tail: Sequence[float]) -> list[float]:
        """What going on by 1, 2, ... tokens from `length`, alive with probability `survival`, is worth."""
        gains, tokens, start = [], 0.0, self._verify[length]
        for n, acceptance in enumerate(tail, start=1):
            survival *= acceptance
            tokens += survival
            gains.append(tokens - self._rate * (self._verify[length + n] - start + n * self._step))
        return gains

    def _corrected(self, survival: Sequence[float]) -> list[float]:
        """Conditional confidences c_1..c_k with the shift that this run has shown."""
        before, known = 1.0, []
        for a in survival:
            known.append(_sigmoid(_logit(a / before if before > 0 else 0.0) + self._shift))
            before = a
        return known

    def _tail(self, position: int, limit: int, deviation: float) -> list[float]:
        """Expected conditional acceptance after `position`; the first lies `deviation` logits off the run's level."""
        tail = []
        for k in range(position, limit):
            tail.append(_sigmoid(self._expected.of(k) + self._shift + self._level + deviation))
            deviation *= self._expected.persistence
        return tail

    # -- after the round ---------------------------------------------------------------------------------------------

    def end_round(self, outcome: RoundOutcome) -> None:
        """Learn from committed tokens alone."""
        self.step_rates.observe(outcome)
        other = max(outcome.seconds - outcome.draft_seconds - outcome.verify_seconds, 0.0)
        plain = self.step_rates.cost(1, outcome.depth)
        if self.step_rates.live:
            self._overhead += 0.1 * (min(other, plain) - self._overhead)
        if self._seconds == 0.0:
            self._seconds = _PRIOR_TOKENS * (plain + self._overhead)
        cost = self.step_rates.round_cost(outcome.limit, outcome.drafted, outcome.rows, outcome.depth)
        # Old rounds fade: a token in a hard stretch is worth what tokens cost there.
        self._tokens = _MEMORY * self._tokens + outcome.committed
        self._seconds = _MEMORY * self._seconds + cost + self._overhead
        if outcome.limit:
            self._learn(outcome)

    def _learn(self, outcome: RoundOutcome) -> None:
        known = self._corrected(outcome.survival) if self.reads_survival else self._tail(0, outcome.drafted, 0.0)
        if self.reads_survival and known:
            deviations = [_logit(c) - self._shift - self._expected.of(k) for k, c in enumerate(known)]
            self._level += _LEVEL_PACE * (sum(deviations) / len(deviations) - self._level)
        for k, c in enumerate(known[: min(outcome.accepted + 1, outcome.drafted)]):
            self._information = min(self._information + c * (1 - c), _MOST_INFORMATION)
            self._shift += ((k < outcome.accepted) - c) / self._information


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -700 else 0.0


def _logit(p: float) -> float:
    p = min(max(p, 1e-4), 1 - 1e-4)
    return math.log(p / (1 - p))
