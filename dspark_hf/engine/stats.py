"""What the batch engine did, as records.

Owns: counting steps, tokens and seconds of all requests together. Does not own: a request's own record (`GenerationStats`).
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_KEPT_STEPS = 4096


@dataclass(frozen=True)
class StepRecord:
    """One step. decoding: requests that verified; reading: those whose prompt was read on; waiting: those not yet let in.

    drafted, verified, accepted, committed: tokens of all requests. rows: of the target's forward, prefill_rows of them of
    prompts. cache_tokens: held by all requests afterwards, in cache_bytes of memory (target and drafter).
    """

    decoding: int
    reading: int
    waiting: int
    rows: int
    prefill_rows: int
    drafted: int
    verified: int
    accepted: int
    committed: int
    cache_tokens: int
    cache_bytes: int
    draft_seconds: float
    verify_seconds: float
    seconds: float


@dataclass
class EngineStats:
    """All steps together; `history` keeps the last few thousand. Times are in seconds.

    request_steps counts a step once for each request that decoded in it. finished: requests by their reason.
    """

    policy: str = ""
    steps: int = 0
    request_steps: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    seconds: float = 0.0
    finished: Counter[str] = field(default_factory=Counter)
    history: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))

    def count(self, record: StepRecord) -> None:
        """Add one step."""
        self.steps += 1
        self.request_steps += record.decoding
        self.prompt_tokens += record.prefill_rows
        self.new_tokens += record.committed
        for name in ("drafted", "verified", "accepted", "draft_seconds", "verify_seconds", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(record, name))
        self.history.append(record)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all requests per second of stepping."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_decoding(self) -> float:
        """Requests that decoded, in the mean over steps."""
        return self.request_steps / self.steps if self.steps else 0.0

    @property
    def tokens_per_second_per_user(self) -> float:
        """What one request sees while it decodes."""
        return self.tokens_per_second / self.mean_decoding if self.request_steps else 0.0

    @property
    def verified_per_request(self) -> float:
        """Budget: drafted tokens verified for one request in one step, in the mean (paper Fig. 8)."""
        return self.verified / self.request_steps if self.request_steps else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The sums and the derived figures, for JSON."""
        record = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("history", "finished")}
        record["finished"] = dict(self.finished)
        derived = ("tokens_per_second", "tokens_per_second_per_user", "mean_decoding", "verified_per_request")
        return record | {name: getattr(self, name) for name in derived} | {"last_step": self._last()}

    def _last(self) -> dict[str, Any] | None:
        return asdict(self.history[-1]) if self.history else None
