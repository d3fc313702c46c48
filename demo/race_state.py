"""What a race is asked for and what it shows, as records.

Units: seconds from a side's start, tokens per second with the prefill included; positions in a block count from 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark_hf.decoding.statistics import GenerationStats
from dspark_hf.evaluation.completion import DecodingOptions

PLAIN, DSPARK = "plain", "dspark"
OWN, ACCEPTED, CORRECTION, BONUS = "own", "accepted", "correction", "bonus"
POLICIES = ("scheduled", "threshold", "fixed")
_LARGEST_SEED = 2**31 - 1


@dataclass(frozen=True)
class Limits:
    """What one visitor may ask for, in tokens; the target's context limits both further."""

    prompt_tokens: int = 1024
    new_tokens: int = 512
    temperature: float = 2.0


@dataclass(frozen=True)
class RaceOptions:
    """What a visitor chose. `threshold` is read by the policy "threshold", `length` by "fixed"."""

    prompt: str
    drafter: str
    max_new_tokens: int = 160
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    policy: str = "scheduled"
    threshold: float = 0.5
    length: int = 4

    @property
    def policy_name(self) -> str:
        """As `evaluation.policies` knows it."""
        if self.policy not in POLICIES:
            raise ValueError(f"There is no policy {self.policy!r}. Choose one of {', '.join(POLICIES)}.")
        if self.policy == "threshold":
            return f"threshold:{self.threshold:g}"
        return f"fixed:{self.length}" if self.policy == "fixed" else "lookahead"

    def decoding(self, limits: Limits) -> DecodingOptions:
        """Checked against `limits`."""
        if not 1 <= self.max_new_tokens <= limits.new_tokens:
            raise ValueError(f"The length must be 1 to {limits.new_tokens} new tokens, got {self.max_new_tokens}.")
        if self.temperature > limits.temperature:
            raise ValueError(f"The temperature must be 0 to {limits.temperature:g}, got {self.temperature:g}.")
        if not 0 <= self.seed <= _LARGEST_SEED:
            raise ValueError(f"The seed must be 0 to {_LARGEST_SEED}, got {self.seed}.")
        return DecodingOptions(self.max_new_tokens, self.temperature, self.top_p, self.seed)


@dataclass(frozen=True)
class ShownToken:
    """A token's own text and where it came from; `position` in the block for accepted drafts, else 0."""

    text: str
    kind: str
    position: int = 0


@dataclass
class Side:
    """One of the two decodings: its rounds of tokens so far. Plain decoding's rounds are of one token."""

    name: str
    rounds: list[list[ShownToken]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    running: bool = False
    finished: bool = False
    stats: GenerationStats | None = None

    @property
    def rate(self) -> float:
        """Tokens per second so far."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def accept_length(self) -> float:
        """τ so far: tokens committed per round, the prefill's first token left out."""
        return (self.tokens - 1) / (len(self.rounds) - 1) if len(self.rounds) > 1 else 1.0


@dataclass(frozen=True)
class Verdict:
    """What comparing the two answers gave.

    identical: `None` where tokens were drawn. compared: tokens of both that were looked at. stopped: whether it was stopped
    before both were done. At the first difference: the two tokens, and how far apart the target's two best scores are.
    """

    identical: bool | None
    compared: int
    stopped: bool = False
    first_difference: int | None = None
    margin: float | None = None
    plain_token: str = ""
    dspark_token: str = ""


@dataclass
class RaceState:
    """All that a page shows. phase: waiting, running, comparing, then done, stopped or failed (with `error`)."""

    order: tuple[str, ...]
    phase: str = "waiting"
    plain: Side = field(default_factory=lambda: Side(PLAIN))
    dspark: Side = field(default_factory=lambda: Side(DSPARK))
    verdict: Verdict | None = None
    error: str | None = None

    @property
    def speedup(self) -> float | None:
        """DSpark's rate as a multiple of plain decoding's, both so far; `None` until both have tokens."""
        return self.dspark.rate / self.plain.rate if self.plain.tokens and self.dspark.tokens else None

    @property
    def ended(self) -> bool:
        return self.phase in ("done", "stopped", "failed")

    def side(self, name: str) -> Side:
        return self.plain if name == PLAIN else self.dspark
