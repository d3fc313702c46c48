"""Admission policies: whether position k of a block is drafted and verified (design decision 3).

Owns: the policies. Does not own: confidences, calibration, step rates.
A policy never sees x_k or anything after it when it decides on x_k, so truncating the draft leaves the output's
distribution as it is (non-anticipating, paper §3.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FixedLength:
    """Draft `length` tokens every round."""

    length: int
    reads_survival = False

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"FixedLength: length must be at least 0, got {self.length}.")

    def admit(self, position: int, survival_so_far: list[float]) -> bool:
        """`position` k counts from 1; `survival_so_far` (a_1, ..., a_k) is not read."""
        return position <= self.length


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Stop before the first position whose confidence c_k (or survival a_k, where `cumulative`) is below `threshold`."""

    threshold: float
    cumulative: bool = False
    reads_survival = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"ConfidenceThreshold: threshold must be between 0 and 1, got {self.threshold}.")

    def admit(self, position: int, survival_so_far: list[float]) -> bool:
        """`position` k counts from 1; `survival_so_far` is (a_1, ..., a_k) with a_k the product of c_1..c_k."""
        survival = survival_so_far[-1]
        if self.cumulative or position == 1:
            return survival >= self.threshold
        before = survival_so_far[-2]
        return before > 0.0 and survival / before >= self.threshold
