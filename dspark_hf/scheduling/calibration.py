"""Calibrated confidences: sequential temperature scaling (paper §3.2.1), and what to expect of later positions.

Axes: N rounds with full blocks, γ positions. A confidence is c_k = σ(logit_k / T_k + s_k), survival a_k its product up to k.

Temperatures alone can't move a mean: a drafter that is too sure everywhere would stay so. Each position therefore gets a
shift s_k as well, which makes the mean survival right for the temperature tried; the search stays one-dimensional and the
order of confidences within a position is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TEMPERATURES = np.geomspace(0.4, 4.0, 60)
BINS = 10
MIN_REACHED = 50  # rounds in which everything before a position was accepted


@dataclass(frozen=True)
class Calibration:
    """What calibration adds to a drafter's config; each list has γ entries.

    temperatures, shifts: T_k and s_k. expected_acceptance: P(x_k is accepted | x_<k were). persistence: how much of a position's
    deviation from that (in logits) the next one shares. too_few: positions (from 1) left as they were for want of rounds.
    """

    temperatures: list[float]
    shifts: list[float]
    expected_acceptance: list[float]
    persistence: float
    too_few: list[int]


def survival(
    logits: np.ndarray,  # [N, γ]
    temperatures: list[float] | None = None,
    shifts: list[float] | None = None,
) -> np.ndarray:
    """Cumulative products a_1..a_γ of the scaled confidences. [N, γ]"""
    scaled = logits / np.asarray(1.0 if temperatures is None else temperatures)
    return _sigmoid(scaled + np.asarray(0.0 if shifts is None else shifts)).cumprod(axis=1)


def expected_calibration_error(predicted: np.ndarray, happened: np.ndarray, bins: int = BINS) -> float:
    """Mean gap between prediction and frequency over equally wide bins, weighted by their rounds. [N], [N] -> 0..1"""
    return sum(abs(gap) * share for _, gap, share in reliability(predicted, happened, bins))


def reliability(predicted: np.ndarray, happened: np.ndarray, bins: int = BINS) -> list[tuple[float, float, float]]:
    """For each bin that holds rounds: mean prediction, frequency minus prediction, share of the rounds."""
    index = np.minimum((predicted * bins).astype(int), bins - 1)
    filled = []
    for i in np.unique(index):
        inside = index == i
        mean = float(predicted[inside].mean())
        filled.append((mean, float(happened[inside].mean()) - mean, float(inside.mean())))
    return filled


def fit_calibration(
    logits: np.ndarray,  # [N, γ], raw confidence logits of full blocks
    accepted: np.ndarray,  # [N], how many tokens of each block were accepted
    shift: bool = True,
    min_reached: int = MIN_REACHED,
) -> Calibration:
    """Position by position from the left, the earlier ones fixed: the temperature with the least error of a_k (§3.2.1).

    Raises:
        ValueError: no rounds, or shapes that do not belong together.
    """
    if logits.ndim != 2 or len(logits) == 0 or accepted.shape != logits.shape[:1]:
        raise ValueError(
            f"Calibration needs logits [N, γ] and accepted [N] with N >= 1, got {logits.shape}, {accepted.shape}."
        )
    before = np.ones(len(logits))
    temperatures, shifts, expected, too_few = [], [], [], []
    for k in range(logits.shape[1]):
        reached, happened = accepted >= k, accepted > k
        temperature, offset = 1.0, 0.0
        if reached.sum() < min_reached:
            too_few.append(k + 1)
        else:
            candidates = [
                (t, _matching_shift(logits[:, k] / t, before, happened) if shift else 0.0) for t in TEMPERATURES
            ]
            errors = [
                expected_calibration_error(before * _sigmoid(logits[:, k] / t + s), happened) for t, s in candidates
            ]
            temperature, offset = candidates[int(np.argmin(errors))]
        before = before * _sigmoid(logits[:, k] / temperature + offset)
        temperatures.append(float(temperature))
        shifts.append(float(offset))
        # Few rounds are filled up with the model's own mean confidence.
        prior = float(_sigmoid(logits[reached if reached.any() else ..., k] / temperature + offset).mean())
        expected.append(float((happened.sum() + 10.0 * prior) / (reached.sum() + 10.0)))
    persistence = _persistence(logits / np.asarray(temperatures) + np.asarray(shifts), accepted, expected)
    return Calibration(temperatures, shifts, expected, persistence, too_few)


def _matching_shift(scaled: np.ndarray, before: np.ndarray, happened: np.ndarray) -> float:
    """The shift with which the mean of before * σ(scaled + shift) is the observed frequency; bisection."""
    wanted = min(max(happened.mean(), 0.5 / len(happened)), before.mean() * (1 - 1e-6))
    low, high = -12.0, 12.0
    for _ in range(40):
        middle = (low + high) / 2
        if (before * _sigmoid(scaled + middle)).mean() < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _persistence(scaled: np.ndarray, accepted: np.ndarray, expected: list[float]) -> float:
    """One logistic slope over all neighbours: how the deviation at k moves the odds at k + 1. In 0..1"""
    centre = _logit(np.asarray(expected))
    deviations, offsets, outcomes = [], [], []
    for k in range(scaled.shape[1] - 1):
        reached = accepted > k
        deviations.append(scaled[reached, k] - centre[k])
        offsets.append(np.full(int(reached.sum()), centre[k + 1]))
        outcomes.append(accepted[reached] > k + 1)
    if not deviations:
        return 0.0
    x, offset, y = (np.concatenate(parts) for parts in (deviations, offsets, outcomes))
    slope = 0.0
    for _ in range(20):  # Newton, with a weak prior at 0
        p = _sigmoid(offset + slope * x)
        slope += float(((y - p) * x).sum() - slope) / float((p * (1 - p) * x * x).sum() + 1.0)
    return min(max(slope, 0.0), 1.0)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def _logit(p: np.ndarray) -> np.ndarray:
    p = np.clip(p, 1e-4, 1 - 1e-4)
    return np.log(p / (1 - p))
