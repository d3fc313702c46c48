"""How likely tokens are to be accepted, and what a second is worth: what a scheduler learns from finished rounds.

Axes: γ positions; a_k survival, c_k = a_k / a_{k-1} confidence, λ tokens per second. Units: seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .policy import SequenceRecord

_MEMORY = 0.98  # what a round still weighs in λ one round later
_PRIOR_TOKENS = 4.0  # λ starts at the rate of plain decoding, with the weight of this many tokens
_LEVEL_PACE = 0.1  # share of a round's deviation that the expectation for the next rounds takes over
_MOST_INFORMATION = 16.0  # bounds what past outcomes weigh, so that a text that changes is followed
SPREAD = 1.8  # logits by which single rounds lie around the expectation, as a gate reckons
# Copies: shortest match of each group, and the share of next tokens that followed the earlier text in answers of the
# default target.
_SHORTEST = (2, 3, 4, 6, 9, 17, 32)
_COPY_PRIOR = (0.50, 0.59, 0.67, 0.74, 0.82, 0.91, 0.97)
_COPY_PRIOR_WEIGHT = 8.0  # outcomes that the prior is worth
_COPY_MEMORY = 0.97  # what an outcome still weighs after the next one of its group


@dataclass(frozen=True)
class Expectation:
    """What calibration says of rounds not yet drafted; the default, one half with little weight, is for no calibration.

    acceptance: P(x_k is accepted | x_<k were) for each position, one half beyond the last. persistence: share of a position's
    deviation (in logits) that carries on to the next. information: how many outcomes this is worth against the run's own.
    """

    acceptance: Sequence[float] = ()
    persistence: float = 0.3
    information: float = 4.0


@dataclass
class AcceptanceEstimate:
    """How likely drafted tokens are: what one text has shown, on top of the expectation.

    reads_survival: `False` for a drafter without confidences.
    """

    expected: Expectation
    reads_survival: bool = True
    _shift: float = field(default=0.0, init=False, repr=False)  # of all confidences, in logits: what outcomes show
    _information: float = field(default=0.0, init=False, repr=False)
    _level: float = field(default=0.0, init=False, repr=False)  # of the last rounds' confidences above expectation

    def __post_init__(self) -> None:
        self._information = self.expected.information
        self._logits = [logit(p) for p in self.expected.acceptance]

    def _expected(self, position: int) -> float:
        """P(x_k is accepted | x_<k were) in logits before this text, k = `position` counted from 0; one half beyond the last."""
        return self._logits[position] if position < len(self._logits) else 0.0

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
            tail.append(sigmoid(self._expected(k) + self._shift + self._level + deviation))
            deviation *= self.expected.persistence
        return tail

    def outlook(self, survival: Sequence[float], position: int, limit: int) -> list[float]:
        """Conditional acceptance of positions 1..`limit` when deciding on `position`: known where read, else expected."""
        if not self.reads_survival:
            return self.tail(0, limit, 0.0)
        known = self.corrected(survival)
        deviation = logit(known[-1]) - self._expected(position - 1) - self._shift - self._level
        return known + self.tail(position, limit, deviation * self.expected.persistence)

    def learn(self, record: SequenceRecord) -> None:
        """One finished round with a block, whose tokens are committed."""
        verified, accepted = record.verified, record.accepted
        known = self.corrected(record.survival) if self.reads_survival else self.tail(0, verified, 0.0)
        if self.reads_survival and known:
            deviations = [logit(c) - self._shift - self._expected(k) for k, c in enumerate(known)]
            self._level += _LEVEL_PACE * (sum(deviations) / len(deviations) - self._level)
        for k, c in enumerate(known[: min(accepted + 1, verified)]):
            self._information = min(self._information + c * (1 - c), _MOST_INFORMATION)
            self._shift += ((k < accepted) - c) / self._information


class CopyEstimate:
    """How likely text is to go on as it did before, by how many equal tokens lie behind it (the match); for one text."""

    def __init__(self) -> None:
        self._accepted = [p * _COPY_PRIOR_WEIGHT for p in _COPY_PRIOR]
        self._seen = [_COPY_PRIOR_WEIGHT] * len(_COPY_PRIOR)

    def chance(self, match: int) -> float:
        """That the next token is the one that followed the `match` equal tokens before."""
        if match < _SHORTEST[0]:
            return 0.0
        group = bisect_right(_SHORTEST, match) - 1
        return self._accepted[group] / self._seen[group]

    def survival(self, match: int, length: int) -> list[float]:
        """(a_1, ..., a_length) of copied tokens: each accepted one makes the match one longer."""
        return list(accumulate((self.chance(match + k) for k in range(length)), mul))

    def learn(self, match: int, accepted: bool) -> None:
        """One committed token, and whether it was what the `match` tokens before it promised."""
        group = bisect_right(_SHORTEST, match) - 1
        self._accepted[group] = _COPY_MEMORY * self._accepted[group] + accepted
        self._seen[group] = _COPY_MEMORY * self._seen[group] + 1.0


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
