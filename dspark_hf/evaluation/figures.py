"""Figures of kept rounds: acceptance by group with bootstrap intervals, reliability, what thresholds would have cut.

Axes: N rounds, γ positions, R resamples. τ counts tokens committed per round, bonus token included (paper eq. 1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..model.configuration_dspark import DSparkConfig
from ..scheduling.calibration import expected_calibration_error, survival
from .rounds import Sample

EVERYTHING, MACRO = "all", "macro"  # names of groups, beside domains and sources
THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(20))
_RESAMPLES = 4000
_LEVEL = 0.95


# -- rounds and groups -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounds:
    """Rounds with full blocks: raw confidence logits [N, γ], how many tokens of each block were accepted [N]."""

    logits: np.ndarray
    accepted: np.ndarray

    def __len__(self) -> int:
        return len(self.accepted)

    def survival(self, config: DSparkConfig) -> np.ndarray:
        """a_1..a_γ of each round as the drafter is calibrated. [N, γ]"""
        return survival(self.logits, config.confidence_temperatures, config.confidence_shifts)

    def calibration_errors(self, predicted: np.ndarray) -> list[float]:
        """ECE of the predicted survival [N, γ] at each position."""
        return [expected_calibration_error(predicted[:, k], self.accepted > k) for k in range(predicted.shape[1])]


def full_rounds(samples: Iterable[Sample], length: int) -> Rounds:
    """The rounds that drafted all `length` tokens and have confidences."""
    pairs = [
        (logits, accepted)
        for sample in samples
        for (drafted, accepted), logits in zip(sample.rounds, sample.logits)
        if drafted == length and len(logits) == length
    ]
    return Rounds(np.array([p[0] for p in pairs]).reshape(-1, length), np.array([p[1] for p in pairs], dtype=int))


def acceptance_figures(samples: Sequence[Sample], length: int) -> dict[str, Any]:
    """Figures of a group of samples; `acceptance_by_position` is conditional: of x_k, given that x_<k were accepted."""
    good = [s for s in samples if s.error is None]
    rounds = [r for s in good for r in s.rounds]
    drafted, accepted = sum(d for d, _ in rounds), sum(a for _, a in rounds)
    count, seconds, tokens = max(len(rounds), 1), sum(s.seconds for s in good), sum(s.tokens for s in good)
    reached = [sum(d > k and a >= k for d, a in rounds) for k in range(length)]
    passed = [sum(a > k for _, a in rounds) for k in range(length)]
    return {
        "samples": len(good),
        "failed": len(samples) - len(good),
        "rounds": len(rounds),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "accept_length": sum(max(s.tokens - 1, 0) for s in good) / count if rounds else 1.0,
        "acceptance_by_position": [a / r if r else None for a, r in zip(passed, reached)],
        "rounds_by_position": reached,
        "drafted_per_round": drafted / count,
        "verified_per_round": drafted / count,  # nothing above the cut is drafted, so all of it is verified
        "accepted_per_round": accepted / count,
        "wasted_per_round": (drafted - accepted) / count,
        "acceptance_rate": accepted / drafted if drafted else None,
        "parked_share": sum(s.parked for s in good) / count,
    }


def by_source(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """The samples of each source, named `domain/source`, or `domain` alone where the domain is its only source.

    A domain that is called as a group of several domains keeps its source in the name.
    """
    sources: dict[str, set[str]] = {}
    for s in samples:
        sources.setdefault(s.domain, set()).add(s.source)
    groups: dict[str, list[Sample]] = {}
    for s in samples:
        is_group = s.domain in (EVERYTHING, MACRO) and len(sources) > 1
        name = s.domain if sources[s.domain] == {s.domain} and not is_group else f"{s.domain}/{s.source}"
        groups.setdefault(name, []).append(s)
    return dict(sorted(groups.items()))


def groups_of(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """The samples of each domain, of each source in it, and all."""
    groups = by_source(samples)
    for domain in {s.domain for s in samples} - {EVERYTHING, MACRO}:
        groups[domain] = [s for s in samples if s.domain == domain]
    return dict(sorted(groups.items())) | {EVERYTHING: list(samples)}


def grouped(samples: Sequence[Sample], length: int) -> dict[str, dict[str, Any]]:
    """Figures of each group, with a confidence interval of τ (`None` where there are too few prompts)."""
    good = [s for s in samples if s.error is None]
    bootstrap, answered = Bootstrap(good), groups_of(good)
    return {
        name: acceptance_figures(group, length)
        | {"accept_length_interval": interval(bootstrap.accept_lengths(answered.get(name, [])))}
        for name, group in groups_of(samples).items()
    }


def failures(samples: Iterable[Sample], **more: Any) -> list[dict[str, Any]]:
    """The turns that failed, and why."""
    return [more | {"index": s.index, "turn": s.turn, "error": s.error} for s in samples if s.error is not None]


def threshold_sweep(rounds: Rounds, config: DSparkConfig) -> list[dict[str, float]]:
    """What each confidence threshold would have cut from these full blocks (paper Fig. 5): acceptance rate, τ, verified."""
    a = rounds.survival(config)
    confidence = a / np.concatenate([np.ones((len(a), 1)), np.maximum(a[:, :-1], 1e-12)], axis=1)
    sweep = []
    for threshold in THRESHOLDS:
        admitted = (confidence >= threshold).cumprod(axis=1).sum(axis=1)
        accepted = np.minimum(rounds.accepted, admitted)
        verified = float(admitted.sum())
        sweep.append(
            {
                "threshold": threshold,
                "acceptance_rate": float(accepted.sum()) / verified if verified else 1.0,
                "accept_length": 1.0 + float(accepted.mean()),
                "verified_per_round": float(admitted.mean()),
            }
        )
    return sweep


def summarise_evaluation(samples: Sequence[Sample], config: DSparkConfig, sweep: bool) -> dict[str, Any]:
    """Figures by group, ECE of the survival by position (full blocks only), the sweep by domain, and what failed."""
    length = config.num_draft_tokens
    rounds = full_rounds(samples, length)
    sweeps = {}
    if sweep:
        if not len(rounds):
            raise ValueError("--threshold-sweep needs rounds with confidences; this drafter gave none.")
        for domain in dict.fromkeys(s.domain for s in samples):
            of_domain = full_rounds((s for s in samples if s.domain == domain), length)
            if len(of_domain):
                sweeps[domain] = threshold_sweep(of_domain, config)
        sweeps[EVERYTHING] = threshold_sweep(rounds, config)
    return {
        "groups": grouped(samples, length),
        "expected_calibration_error": rounds.calibration_errors(rounds.survival(config)) if len(rounds) else None,
        "threshold_sweep": sweeps,
        "failed": failures(samples),
    }


# -- intervals -------------------------------------------------------------------------------------------------------


class Bootstrap:
    """Resamples of the conversations of `samples`, the same for every figure requested of it.

    The unit is the conversation: its turns and rounds depend on each other. Conversations are drawn anew within their
    source, because how many prompts of each source there are is a choice and not chance. One resample serves every drafter,
    so that a ratio's interval does not hold what all of them share: how hard the drawn prompts are.
    """

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
