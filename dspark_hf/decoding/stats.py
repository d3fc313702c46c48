"""What one generation did, as a record.

Owns: counting rounds, tokens and seconds. Does not own: deciding anything. Axes: γ positions of a block.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read next tells the truth."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class RoundRecord:
    """One round: block length planned (0: a plain step), tokens drafted, verified, accepted, and the rows of the forward.

    parked: the plain step was the policy's choice, not for want of room. replayed: of the rows, committed tokens that a
    recurrent state had to read again. copied: the draft was copied from the text.

    survival: (a_1, a_2, ...) that the policy read, calibrated. confidence_logits: [K], not calibrated; `None` without a head.
    """

    planned: int
    parked: bool
    drafted: int
    verified: int
    accepted: int
    rows: int
    survival: Sequence[float]
    confidence_logits: torch.Tensor | None
    replayed: int = 0
    copied: bool = False


@dataclass
class GenerationStats:
    """Statistics of one `generate()` call with a drafter (`drafter.last_generation`).

    A round drafts (possibly nothing) and verifies once; the prefill, which gives the first token, is no round.
    `drafted`, `verified` and `accepted` count tokens at each position of a block, times are in seconds. `parked_rounds` are
    those that the policy made plain steps, `scheduling_seconds` the policy's own time, the part inside drafts included. Rounds
    whose draft was copied from the text are counted apart (`copied_rounds`, `copied` and `copied_accepted` tokens).
    """

    block_length: int
    policy: str = ""
    rounds: int = 0
    parked_rounds: int = 0
    copied_rounds: int = 0
    copied: int = 0
    copied_accepted: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    scheduling_seconds: float = 0.0
    total_seconds: float = 0.0
    history: list[RoundRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("drafted", "verified", "accepted"):
            setattr(self, name, getattr(self, name) or [0] * self.block_length)

    @property
    def accept_length(self) -> float:
        """τ: tokens committed per round, the target's own one included (paper eq. 1)."""
        return (self.new_tokens - 1) / self.rounds if self.rounds else 1.0

    @property
    def other_seconds(self) -> float:
        """Time in neither drafter nor target."""
        return max(self.total_seconds - self.prefill_seconds - self.draft_seconds - self.verify_seconds, 0.0)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, the prefill included."""
        return self.new_tokens / self.total_seconds if self.total_seconds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the verified tokens at each position that were accepted."""
        return [a / v if v else 0.0 for a, v in zip(self.accepted, self.verified, strict=True)]

    def count_round(self, record: RoundRecord) -> None:
        """Record one verified round."""
        self.rounds += 1
        self.parked_rounds += record.parked
        self.history.append(record)
        if record.copied:
            self.copied_rounds += 1
            self.copied += record.drafted
            self.copied_accepted += record.accepted
            return
        for counts, number in (
            (self.drafted, record.drafted),
            (self.verified, record.verified),
            (self.accepted, record.accepted),
        ):
            for k in range(number):
                counts[k] += 1

    def to_dict(self) -> dict[str, Any]:
        """Everything, the derived figures too, for JSON."""
        record = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "history"}
        derived = ("accept_length", "other_seconds", "tokens_per_second", "acceptance_by_position")
        record |= {name: getattr(self, name) for name in derived}
        names = ("planned", "parked", "drafted", "verified", "accepted", "rows", "replayed", "survival", "copied")
        return record | {"history": [{name: getattr(r, name) for name in names} for r in self.history]}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block to `<name>_seconds`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            attribute = f"{name}_seconds"
            setattr(self, attribute, getattr(self, attribute) + time.perf_counter() - start)
