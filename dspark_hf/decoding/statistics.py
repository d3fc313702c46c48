"""What was decoded, as a record: of one request, or of all that an engine served. Axes: γ positions of a block."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ..scheduling.policy import RoundRecord, SequenceRecord

_KEPT_ROUNDS = 4096  # of an engine, which runs for ever
_DERIVED = (
    "accept_length",
    "other_seconds",
    "tokens_per_second",
    "tokens_per_second_per_user",
    "mean_decoding",
    "verified_per_request",
    "acceptance_by_position",
)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read next tells the truth."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass
class GenerationStats:
    """Statistics of one request (`drafter.last_generation`, `RequestOutput.stats`) or of all (`BatchEngine.stats`).

    A round drafts (possibly nothing) and verifies once; reading a prompt, which gives the first token, is no round of a request.
    sequence_rounds: each round counted once for each sequence that decoded in it; they committed `committed` of the new tokens.
    drafted, verified, accepted: tokens at each
    position of a block; copies from the text are counted apart (copied_rounds, copied and copied_accepted tokens).
    parked_rounds: those that the policy made plain steps. Times are in seconds; scheduling_seconds is the policy's own time, the
    part inside drafts included. finished: an engine's requests by their reason. history: `SequenceRecord`s of a request; an
    engine's last `RoundRecord`s.
    """

    block_length: int
    policy: str = ""
    rounds: int = 0
    sequence_rounds: int = 0
    parked_rounds: int = 0
    copied_rounds: int = 0
    copied: int = 0
    copied_accepted: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    committed: int = 0
    drafted: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    scheduling_seconds: float = 0.0
    total_seconds: float = 0.0
    finished: Counter[str] = field(default_factory=Counter)
    history: MutableSequence[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("drafted", "verified", "accepted"):
            setattr(self, name, getattr(self, name) or [0] * self.block_length)

    @classmethod
    def of_engine(cls, block_length: int, policy: str) -> GenerationStats:
        """Of all requests; only the last few thousand rounds are kept one by one."""
        return cls(block_length, policy, history=deque(maxlen=_KEPT_ROUNDS))

    @property
    def accept_length(self) -> float:
        """τ: tokens committed per round and sequence, the target's own one included (paper eq. 1)."""
        return self.committed / self.sequence_rounds if self.sequence_rounds else 1.0

    @property
    def other_seconds(self) -> float:
        """Time in neither drafter nor target."""
        return max(self.total_seconds - self.prefill_seconds - self.draft_seconds - self.verify_seconds, 0.0)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, reading the prompt included."""
        return self.new_tokens / self.total_seconds if self.total_seconds else 0.0

    @property
    def mean_decoding(self) -> float:
        """Sequences that decoded, in the mean over rounds."""
        return self.sequence_rounds / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second_per_user(self) -> float:
        """What one request sees while it decodes."""
        return self.tokens_per_second / self.mean_decoding if self.sequence_rounds else 0.0

    @property
    def verified_per_request(self) -> float:
        """Budget: drafted tokens verified for one sequence in one round, in the mean (paper Fig. 8)."""
        return (sum(self.verified) + self.copied) / self.sequence_rounds if self.sequence_rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the verified tokens at each position that were accepted."""
        return [a / v if v else 0.0 for a, v in zip(self.accepted, self.verified, strict=True)]

    def count(self, record: SequenceRecord, draft_seconds: float, verify_seconds: float) -> None:
        """Add one round of this request."""
        self.rounds += 1
        self.draft_seconds += draft_seconds
        self.verify_seconds += verify_seconds
        self.history.append(record)
        self._count(record)

    def count_round(self, record: RoundRecord, first_tokens: int) -> None:
        """Add one round of all requests, in which the prompts that were read to their end gave `first_tokens`."""
        self.rounds += 1
        self.prompt_tokens += record.prefill_rows
        self.new_tokens += record.committed + first_tokens
        self.draft_seconds += record.draft_seconds
        self.verify_seconds += record.verify_seconds
        self.total_seconds += record.seconds
        self.history.append(record)
        for sequence in record.sequences:
            self._count(sequence)

    def _count(self, record: SequenceRecord) -> None:
        self.sequence_rounds += 1
        self.parked_rounds += record.parked
        self.committed += record.committed
        if record.copied:
            self.copied_rounds += 1
            self.copied += record.verified
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
        """Everything, the derived figures too, for JSON; a request's history, and the last round of an engine."""
        record = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "history"}
        record |= {name: getattr(self, name) for name in _DERIVED} | {"finished": dict(self.finished)}
        if isinstance(self.history, deque):
            return record | {"last_round": _figures(self.history[-1]) if self.history else None}
        return record | {"history": [_figures(r) for r in self.history]}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block to `<name>_seconds`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            attribute = f"{name}_seconds"
            setattr(self, attribute, getattr(self, attribute) + time.perf_counter() - start)


def _figures(record: RoundRecord | SequenceRecord) -> dict[str, Any]:
    """A record for JSON, without tensors and without the records in it."""
    return {f.name: getattr(record, f.name) for f in fields(record) if f.name not in ("confidence_logits", "sequences")}
