"""Sequential temperature scaling: it finds what was put in, keeps the order, and says where it can't know."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_hf.scheduling.calibration import (
    expected_calibration_error,
    fit_calibration,
    reliability,
    survival,
)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def synthetic(rounds: int, temperatures, shifts, seed: int = 0, spread: float = 1.3):
    """Raw logits whose truth is σ(logit / T + s), and how many tokens of each block stood."""
    rng = np.random.default_rng(seed)
    common = rng.normal(0.2, 0.6 * spread, (rounds, 1))
    logits = common + rng.normal(0, 0.8 * spread, (rounds, len(temperatures)))
    stands = rng.random(logits.shape) < sigmoid(logits / np.array(temperatures) + np.array(shifts))
    return logits, stands.cumprod(axis=1).sum(axis=1)


def errors(a, accepted):
    return [expected_calibration_error(a[:, k], accepted > k) for k in range(a.shape[1])]


def test_it_finds_temperatures_and_shifts():
    temperatures, shifts = [1.8, 1.4, 0.8, 1.0], [-0.6, -0.3, 0.2, 0.0]
    logits, accepted = synthetic(20_000, temperatures, shifts)
    fitted = fit_calibration(logits, accepted)
    assert fitted.temperatures == pytest.approx(temperatures, rel=0.3)
    assert fitted.shifts == pytest.approx(shifts, abs=0.15)
    assert not fitted.too_few
    fresh, outcome = synthetic(20_000, temperatures, shifts, seed=1)
    before, after = (
        errors(survival(fresh), outcome),
        errors(survival(fresh, fitted.temperatures, fitted.shifts), outcome),
    )
    assert all(a < b for a, b in zip(after, before))
    assert max(after) < 0.02
    assert fitted.expected_acceptance[0] == pytest.approx((outcome > 0).mean(), abs=0.02)
    assert 0.0 < fitted.persistence < 1.0


def test_temperatures_alone_are_the_papers_form():
    logits, accepted = synthetic(20_000, [1.8, 1.4], [0.0, 0.0])
    fitted = fit_calibration(logits, accepted, shift=False)
    assert fitted.shifts == [0.0, 0.0]
    assert fitted.temperatures == pytest.approx([1.8, 1.4], rel=0.3)


def test_the_order_within_a_position_is_kept():
    logits, accepted = synthetic(3000, [2.0, 0.6, 1.1], [0.5, -0.5, 0.0])
    fitted = fit_calibration(logits, accepted)
    for k in range(3):
        scaled = logits[:, k] / fitted.temperatures[k] + fitted.shifts[k]
        assert np.array_equal(np.argsort(scaled, kind="stable"), np.argsort(logits[:, k], kind="stable"))


def test_too_few_rounds_are_said_and_left_alone():
    logits, accepted = synthetic(200, [1.0, 1.0, 1.0], [-2.0, -2.0, -2.0])
    fitted = fit_calibration(logits, accepted)
    assert 3 in fitted.too_few
    assert fitted.temperatures[2] == 1.0
    assert fitted.shifts[2] == 0.0
    assert all(0 < p < 1 for p in fitted.expected_acceptance)


@pytest.mark.parametrize("accepted", [0, 2], ids=["nothing stood", "everything stood"])
def test_one_outcome_only(accepted):
    logits = np.zeros((300, 2))
    fitted = fit_calibration(logits, np.full(300, accepted))
    a = survival(logits, fitted.temperatures, fitted.shifts)
    assert np.isfinite(a).all()
    assert abs(a[0, 0] - (accepted > 0)) < 0.02


def test_expected_calibration_error_by_hand():
    predicted = np.array([0.05, 0.05, 0.95, 0.95])
    assert expected_calibration_error(predicted, np.array([False, False, True, True])) == pytest.approx(0.05)
    assert expected_calibration_error(predicted, np.array([True, False, True, False])) == pytest.approx(0.45)
    assert reliability(np.array([1.0]), np.array([True])) == [(1.0, 0.0, 1.0)]


def test_bad_shapes():
    with pytest.raises(ValueError, match="N >= 1"):
        fit_calibration(np.zeros((0, 3)), np.zeros(0))
    with pytest.raises(ValueError, match="N >= 1"):
        fit_calibration(np.zeros((4, 3)), np.zeros(3))
