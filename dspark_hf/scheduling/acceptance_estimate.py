"""What a scheduler believes: how likely tokens are to stand, and what a second is worth.

Owns: expectations from calibration, what one text has shown beyond them, the rate λ of the run so far.
Does not own: deciding (`lookahead`, `batch`), confidences and their calibration, step rates.
Axes: γ positions; a_k survival, c_k = a_k / a_{k-1} confidence, λ tokens per second. Units: seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_MEMORY = 0.98  # what a round still weighs in λ one round later
_PRIOR_TOKENS = 4.0  # λ starts at the rate of plain decoding, with the weight of this many tokens
_LEVEL_PACE = 0.1  # share of a round's deviation that the expectation for the next rounds takes over
_MOST_INFORMATION = 16.0  # bounds what past outcomes weigh, so that a text that changes is followed
SPREAD = 1.8  # logits by which single rounds lie around the expectation, as a gate reckons


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
        return logit(self.acceptance[position]) if position < len(self.acceptance) else 0.0


@dataclass
class Belief:
    """What one text has shown, on top of the expectation. reads_survival: `False` for a drafter without confidences."""

    expected: Expectation
    reads_survival: bool = True
    _shift: float = field(default=0.0, init=False, repr=False)  # of all confidences, in logits: what outcomes show
    _information: float = field(default=0.0, init=False, repr=False)
    _level: float = field(default=0.0, init=False, repr=False)  # of the last rounds' confidences above expectation

    def __post_init__(self) -> None:
        self._information = self.expected.information

    def corrected(self, survival: Sequence[float]) -> list[float]:
        """Conditional confidences c_1..c_k with the shift that this text has shown."""
        before, known = 1.0, []
        for a in survival:
            known.append(sigmoid(logit(a / before if before > 0 else 0.0) + self._shift))
            before = a
        return known

    def tail(self, position: int, limit: int, deviation: float) -> list[float]:
        """Expected conditional acceptance after `position`; the first lies `deviation` logits off the text's level."""
        tail = []
        for k in range(position, limit):
            tail.append(sigmoid(self.expected.of(k) + self._shift + self._level + deviation))
            deviation *= self.expected.persistence
        return tail

    def outlook(self, survival: Sequence[float], position: int, limit: int) -> list[float]:
        """Conditional acceptance of positions 1..`limit` when deciding on `position`: known where read, else expected."""
        if not self.reads_survival:
            return self.tail(0, limit, 0.0)
        known = self.corrected(survival)
        deviation = logit(known[-1]) - self.expected.of(position - 1) - self._shift - self._level
        return known + self.tail(position, limit, deviation * self.expected.persistence)

    def learn(self, survival: Sequence[float], drafted: int, accepted: int) -> None:
        """One finished round, whose tokens are committed."""
        known = self.corrected(survival) if self.reads_survival else self.tail(0, drafted, 0.0)
        if self.reads_survival and known:
            deviations = [logit(c) - self._shift - self.expected.of(k) for k, c in enumerate(known)]
            self._level += _LEVEL_PACE * (sum(deviations) / len(deviations) - self._level)
        for k, c in enumerate(known[: min(accepted + 1, drafted)]):
            self._information = min(self._information + c * (1 - c), _MOST_INFORMATION)
            self._shift += ((k < accepted) - c) / self._information


@dataclass
class RunRate:
    """λ: tokens per second of the run, in which old rounds fade, as a multiple of what plain decoding gives.

    A token in a hard stretch is worth what tokens cost there; never less than plain decoding gives, always to be had.
    """

    overhead: float = field(default=0.0, init=False)  # seconds of a round in neither drafter nor target
    _tokens: float = field(default=_PRIOR_TOKENS, init=False, repr=False)
    _plain_tokens: float = field(default=_PRIOR_TOKENS, init=False, repr=False)

    def per_second(self, plain_seconds: float, sequences: int = 1) -> float:
        """λ where a plain step of all `sequences` takes `plain_seconds`."""
        return max(self._tokens / self._plain_tokens, 1.0) * sequences / (plain_seconds + self.overhead)

    def observe_overhead(self, seconds: float, plain_seconds: float) -> None:
        """What one round took beside drafter and target; one slow moment counts as a plain step at most."""
        self.overhead += 0.1 * (min(max(seconds, 0.0), plain_seconds) - self.overhead)

    def add(self, tokens: int, seconds: float, plain_seconds: float, sequences: int = 1) -> None:
        """One round of `sequences` that committed `tokens` in `seconds` of drafter and target."""
        plain_rate = sequences / (plain_seconds + self.overhead)
        self._tokens = _MEMORY * self._tokens + tokens
        self._plain_tokens = _MEMORY * self._plain_tokens + (seconds + self.overhead) * plain_rate


def sigmoid(x: float) -> float:
    """Between 0 and 1, without overflow."""
    return 1.0 / (1.0 + math.exp(-x)) if x > -700 else 0.0


def logit(p: float) -> float:
    """The inverse, with certainty taken as 1 in 10,000."""
    p = min(max(p, 1e-4), 1 - 1e-4)
    return math.log(p / (1 - p))
