"""How likely text is to go on as it did before: what a scheduler believes of drafts copied from the text itself.

Owns: the chance that a copied token stands, by how long a run of equal tokens lies behind it; learning it from committed
tokens. Does not own: finding such runs (`decoding.lookup`), deciding (`lookahead`).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

# Shortest match of each group, and the share of next tokens that followed the earlier text in answers of the default target.
_SHORTEST = (2, 3, 4, 6, 9, 17, 32)
_PRIOR = (0.50, 0.59, 0.67, 0.74, 0.82, 0.91, 0.97)
_PRIOR_WEIGHT = 8.0  # outcomes that the prior is worth
_MEMORY = 0.97  # what an outcome still weighs after the next one of its group


@dataclass
class CopyBelief:
    """Chances by match length in tokens, for one text."""

    _stood: list[float] = field(default_factory=lambda: [p * _PRIOR_WEIGHT for p in _PRIOR], init=False, repr=False)
    _seen: list[float] = field(default_factory=lambda: [_PRIOR_WEIGHT] * len(_PRIOR), init=False, repr=False)

    def chance(self, match: int) -> float:
        """That the next token is the one that followed the `match` equal tokens before."""
        if match < _SHORTEST[0]:
            return 0.0
        group = bisect_right(_SHORTEST, match) - 1
        return self._stood[group] / self._seen[group]

    def survival(self, match: int, length: int) -> list[float]:
        """(a_1, ..., a_length) of copied tokens: each one that stands makes the match one longer."""
        survival, alive = [], 1.0
        for k in range(length):
            alive *= self.chance(match + k)
            survival.append(alive)
        return survival

    def learn(self, match: int, stood: bool) -> None:
        """One committed token, and whether it was what the `match` tokens before it promised."""
        group = bisect_right(_SHORTEST, match) - 1
        self._stood[group] = _MEMORY * self._stood[group] + stood
        self._seen[group] = _MEMORY * self._seen[group] + 1.0
