"""Confidence intervals of τ and of ratios of τ, by bootstrap over conversations.

Owns: resampling, the interval of a share. Does not own: figures of the prompts as they are (`acceptance`).
Axes: R resamples, N conversations.

The unit is the conversation: its turns and rounds depend on each other. Conversations are drawn anew within their source,
because how many prompts of each source there are is a choice and not chance. One resample serves every drafter, so that a
ratio's interval does not hold what all of them share: how hard the drawn prompts are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from .samples import Sample

_RESAMPLES = 4000
_LEVEL = 0.95


class Bootstrap:
    """Resamples of the conversations of `samples`, the same for every figure asked of it."""

    def __init__(self, samples: Iterable[Sample], seed: int = 0) -> None:
        # By index, as a run that went on after a stop has them in another order.
        self._source = {s.index: (s.domain, s.source) for s in sorted(samples, key=lambda s: s.index)}
        self._column = {index: i for i, index in enumerate(self._source)}
        self._sizes = Counter(self._source.values())
        generator = np.random.default_rng(seed)
        self._weights = np.zeros((_RESAMPLES, len(self._source)))
        for source, size in self._sizes.items():
            members = [self._column[index] for index, of in self._source.items() if of == source]
            self._weights[:, members] = generator.multinomial(size, np.full(size, 1 / size), size=_RESAMPLES)

    def __len__(self) -> int:
        """How many conversations."""
        return len(self._source)

    def accept_lengths(self, samples: Sequence[Sample]) -> np.ndarray | None:
        """τ of these samples (all those of some sources) in each resample, [R]; `None` where a source has one conversation."""
        if not samples or any(self._sizes[self._source[s.index]] < 2 for s in samples):
            return None
        counts = np.zeros((2, len(self._column)))  # committed tokens and rounds of each conversation
        for s in samples:
            counts[:, self._column[s.index]] += max(s.tokens - 1, 0), len(s.rounds)
        committed, rounds = self._weights @ counts[0], self._weights @ counts[1]
        return np.where(rounds > 0, committed / np.maximum(rounds, 1), 1.0)


def interval(values: np.ndarray | None) -> list[float] | None:
    """The middle 95 % of the resampled values, (low, high)."""
    if values is None:
        return None
    tail = 50 * (1 - _LEVEL)
    return [float(v) for v in np.percentile(values, [tail, 100 - tail])]


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of `count` independent outcomes (Wilson 1927), (low, high)."""
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    return max(min(middle - half, share), 0.0), min(max(middle + half, share), 1.0)
