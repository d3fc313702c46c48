"""`LookaheadScheduler`: draft and verify exactly as much as pays, decided before each token exists. The default policy.

Owns: valuing tokens against time, the gate before drafting, parking, learning from finished rounds.
Does not own: confidences and their calibration, the step rates, the other policies (`admission`).
Axes: γ positions; a_k survival, c_k = a_k / a_{k-1} confidence, λ tokens per second. Units: seconds.

A round is worth its expected tokens minus λ times its seconds, with λ the rate of the run so far (the renewal-reward form
of Θ): what maximises that in each round maximises the rate of the whole run, not the ratio of one round. On a jagged
curve the next token alone may not pay while three do, so each decision looks for the best longer prefix; positions whose
confidence is not known yet enter with their expectation, never with what was or will be drawn (non-anticipating).
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
    _depth: int = field(default=1, init=False, repr=False)
    _limit: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._expected = self.expectation or Expectation(information=1.0)
        self._information = self._expected.information

    def fresh(self) -> LookaheadScheduler:
        return LookaheadScheduler(self.step_rates, self.expectation, self.gate, self.reads_survival)

    # -- before drafting ---------------------------------------------------------------------------------------------

    def begin_round(self, depth: int, limit: int) -> int:
        """The block length worth drafting now, 0 where a plain step is expected to give more tokens per second."""
        self._depth = depth
        value, best = max((self._block_value(n), -n) for n in range(1, limit + 1))
        best = -best
        if value > 0 or not self.gate:
            self.parking.resume()
        elif not self.parking.refuse():
            best = 0
        self._probing = self.gate and value <= 0 and best > 0
        self._limit = best
        return best

    def _block_value(self, limit: int) -> float:
        """Expected tokens of a block for `limit` tokens beyond a plain step's, less λ times its additional seconds.

        Half of the rounds are taken to lie above the expectation, half below, each cut where it pays best.
        """
        gain, spread = 0.0, _SPREAD if self.reads_survival else 0.0
        for deviation in (-spread, spread):
            tail = self._tail(0, limit, deviation)
            gain += 0.5 * max(self._best_gain(0, 1.0, tail, limit), 0.0)
        return gain - self._rate() * self.step_rates.draft_cost(limit, 0)

    # -- while drafting ----------------------------------------------------------------------------------------------

    def admit(self, position: int, survival_so_far: list[float]) -> bool:
        """Whether some prefix that ends at `position` or later is worth more than stopping here."""
        if self._probing and position == 1:
            return True  # or it would learn nothing
        limit = max(position, self._limit or position)
        if self.reads_survival:
            known = self._corrected(survival_so_far)
            deviation = _logit(known[-1]) - self._expected.of(position - 1) - self._shift - self._level
            tail = [known[-1], *self._tail(position, limit, deviation * self._expected.persistence)]
            before = math.prod(known[:-1])
        else:
            guess = self._tail(0, limit, 0.0)
            tail, before = guess[position - 1 :], math.prod(guess[: position - 1])
        return self._best_gain(position - 1, before, tail, limit) > 0

    def _best_gain(self, length: int, survival: float, tail: Sequence[float], limit: int) -> float:
        """The most that going on from `length` drafted tokens, alive with probability `survival`, is worth."""
        rates, best, tokens = self.step_rates, -math.inf, 0.0
        rate, start = self._rate(), rates.cost(length + 1, self._depth)
        for n, acceptance in enumerate(tail, start=1):
            survival *= acceptance
            tokens += survival
            extra = (
                rates.cost(length + n + 1, self._depth)
                - start
                + rates.draft_cost(limit, n)
                - rates.draft_cost(limit, 0)
            )
            best = max(best, tokens - rate * extra)
        return best

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

    def _rate(self) -> float:
        """λ: tokens per second of the run so far, never below plain decoding's (which is always to be had)."""
        plain = 1.0 / (self.step_rates.cost(1, self._depth) + self._overhead)
        return max(self._tokens / self._seconds, plain) if self._seconds else plain


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -700 else 0.0


def _logit(p: float) -> float:
    p = min(max(p, 1e-4), 1 - 1e-4)
    return math.log(p / (1 - p))
