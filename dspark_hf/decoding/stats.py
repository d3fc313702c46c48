"""What one generation did, as a record.

Owns: counting rounds, tokens and seconds. Does not own: deciding anything. Axes: γ positions of a block.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class GenerationStats:
    """Statistics of one `generate()` call with a drafter (`drafter.last_generation`).

    A round drafts (possibly nothing) and verifies once; the prefill, which gives the first token, is no round.
    `drafted`, `verified` and `accepted` count tokens at each position of a block, times are in seconds.
    """

    block_length: int
    rounds: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0

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

    def count_round(self, drafted: int, accepted: int) -> None:
        """Record one verified round."""
        self.rounds += 1
        for counts, number in ((self.drafted, drafted), (self.verified, drafted), (self.accepted, accepted)):
            for k in range(number):
                counts[k] += 1

    def to_dict(self) -> dict[str, Any]:
        """Everything, the derived figures too, for JSON."""
        derived = ("accept_length", "other_seconds", "tokens_per_second", "acceptance_by_position")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block to `<name>_seconds`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            attribute = f"{name}_seconds"
            setattr(self, attribute, getattr(self, attribute) + time.perf_counter() - start)
