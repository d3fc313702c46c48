"""What decides how far each sequence is drafted and verified: the protocol, its records, and the paper's policies.

Axes: n sequences of a round, γ positions; a_{r,k} survival of position k of sequence r, c_k = a_k / a_{k-1} its confidence,
B rows of the target's forward. Units: seconds.

Policies are non-anticipating (paper §3.2.2), so that cutting a draft leaves the output's distribution as it is: a decision
on x_{r,k} reads a_{r,1}, ..., a_{r,k}, which know x_{r,<k} alone, and never x_{r,k} or what comes after it. Of other
sequences it may read anything of this round, since their draws are independent of x_{r,k}. What is learned between rounds
is of tokens already committed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch

from .step_costs import StepRates


@dataclass(frozen=True)
class SequenceState:
    """What a policy may know of a sequence before its draft.

    depth: context tokens before its anchor. limit: the most tokens a block may be made for now, 0 where there is no room.
    copy: survival (a_1, a_2, ...) of tokens that could be copied from the text, which cost nothing to draft.
    """

    id: int
    depth: int
    limit: int
    copy: Sequence[float] = ()


@dataclass(frozen=True)
class Plan:
    """tokens: what a sequence's block is made for, 0 for a plain step; with `copied`, how many tokens of its copy are
    verified in place of a block. parked: the plain step is the policy's choice, not for want of room."""

    tokens: int
    copied: bool = False
    parked: bool = False


@dataclass(frozen=True)
class SequenceRecord:
    """One sequence in one finished round.

    depth: context tokens before the anchor. planned, parked, copied: as in its `Plan`. drafted: tokens drawn (or copied).
    verified, accepted: how many of them the target read, and let stand. committed: new tokens of the text, the target's own
    one included. rows: of the target's forward, `replayed` of them committed tokens that a recurrent state read again.
    survival: calibrated (a_1, a_2, ...) as far as they became known, the refused position's too. confidence_logits: [K],
    not calibrated; `None` without a head.
    """

    id: int
    depth: int
    planned: int
    parked: bool
    drafted: int
    verified: int
    accepted: int
    committed: int
    rows: int
    survival: Sequence[float]
    confidence_logits: torch.Tensor | None
    replayed: int = 0
    copied: bool = False


@dataclass(frozen=True)
class RoundRecord:
    """One finished round of n sequences.

    sequences: those that decoded. rows: of the whole forward, padding included, `prefill_rows` of them of prompts still
    read. backlog: context tokens that the drafter took in first. reading, waiting: sequences whose prompt is being read, and
    that were not admitted yet. cache_tokens, cache_bytes: held afterwards. Times in seconds, `seconds` of the whole round.
    """

    sequences: Sequence[SequenceRecord]
    rows: int
    prefill_rows: int
    backlog: int
    draft_seconds: float
    verify_seconds: float
    seconds: float
    reading: int = 0
    waiting: int = 0
    cache_tokens: int = 0
    cache_bytes: int = 0

    @property
    def depth(self) -> int:
        """Mean context of the sequences."""
        return mean_depth(self.sequences)

    @property
    def decoding(self) -> int:
        """Sequences that decoded."""
        return len(self.sequences)

    @property
    def drafted(self) -> int:
        return sum(s.drafted for s in self.sequences)

    @property
    def verified(self) -> int:
        return sum(s.verified for s in self.sequences)

    @property
    def accepted(self) -> int:
        return sum(s.accepted for s in self.sequences)

    @property
    def committed(self) -> int:
        return sum(s.committed for s in self.sequences)

    @property
    def blocks(self) -> list[SequenceRecord]:
        """The sequences for which the drafter made a block."""
        return [s for s in self.sequences if s.planned and not s.copied]


def mean_depth(sequences: Sequence[SequenceState | SequenceRecord]) -> int:
    """Mean context tokens, at least 1."""
    return max(sum(s.depth for s in sequences) // max(len(sequences), 1), 1)


class Policy:
    """The base of all policies. Each round: `plan`, `admit` for positions 1, 2, ..., `schedule`, `learn`.

    step_rates: the table by which forwards are padded; `None`: they are not. reads_survival: whether `admit` and `schedule`
    are given survivals, for which the drafter needs a confidence head. weighs_copies: whether `plan` looks at `copy`.
    """

    step_rates: StepRates | None = None
    reads_survival: bool = False
    weighs_copies: bool = False

    def fresh(self) -> Any:
        """The same policy without what it learned, for a new generation; itself unless it is a dataclass."""
        return replace(self) if is_dataclass(self) else self

    def plan(self, sequences: Sequence[SequenceState], prefill_rows: int = 0) -> list[Plan]:
        """How far each sequence may draft, before any token exists; `prefill_rows` of prompts are in the same forward."""
        return [planned(s, s.limit) for s in sequences]

    def admit(self, position: int, open_sequences: Sequence[int], survival: Sequence[Sequence[float]]) -> list[bool]:
        """For each of `open_sequences` (places in the list that `plan` was given) whether x_{r,k} is drafted, k = `position`
        from 1. `survival`: (a_1, ..., a_k) of every sequence as far as known, empty unless `reads_survival`."""
        return [True] * len(open_sequences)

    def schedule(self, survival: Sequence[Sequence[float]], drafted: Sequence[int]) -> list[int]:
        """How many of its `drafted` tokens are verified, for each sequence."""
        return list(drafted)

    def learn(self, record: RoundRecord) -> None:
        """Called after each round; its tokens are committed."""

    def forget(self, id: int) -> None:
        """That sequence is over."""


def planned(sequence: SequenceState, tokens: int) -> Plan:
    """A block for `tokens`, or for as many as there is room for."""
    tokens = max(min(tokens, sequence.limit), 0)
    return Plan(tokens, parked=sequence.limit > 0 and not tokens)


@dataclass
class BackOff:
    """Plain steps while drafting does not pay, with probes at growing distances (in rounds)."""

    first_wait: int = 2
    longest_wait: int = 64
    _interval: int = field(default=0, init=False, repr=False)
    _wait: int = field(default=0, init=False, repr=False)

    def refuse(self) -> bool:
        """Drafting does not seem to pay: whether to draft in this round all the same, to look again."""
        if self._interval and not self._wait:
            self._interval = self._wait = min(2 * self._interval, self.longest_wait)
            return True
        self._interval = self._interval or self.first_wait
        self._wait = (self._wait or self._interval) - 1
        return False

    def resume(self) -> None:
        """Drafting pays again."""
        self._interval = self._wait = 0


class _Patience:
    """Backs off from each sequence of which `rounds` in a row were of no use."""

    def __init__(self, rounds: float) -> None:
        self.rounds = rounds
        self._misses: dict[int, int] = {}
        self._back_off: dict[int, BackOff] = {}

    def limit(self, sequence: SequenceState) -> int:
        """How far this round may draft: as far as there is room, or not at all."""
        if sequence.limit > 0 and self._misses.get(sequence.id, 0) >= self.rounds:
            return sequence.limit if self._back_off.setdefault(sequence.id, BackOff()).refuse() else 0
        return sequence.limit

    def learn(self, id: int, useful: bool) -> None:
        self._misses[id] = 0 if useful else self._misses.get(id, 0) + 1
        if useful:
            self._back_off.pop(id, None)

    def forget(self, id: int) -> None:
        self._misses.pop(id, None)
        self._back_off.pop(id, None)


@dataclass(frozen=True)
class FixedLength(Policy):
    """Draft `length` tokens every round."""

    length: int

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"FixedLength: length must be at least 0, got {self.length}.")

    def plan(self, sequences: Sequence[SequenceState], prefill_rows: int = 0) -> list[Plan]:
        return [planned(s, self.length) for s in sequences]

    def admit(self, position: int, open_sequences: Sequence[int], survival: Sequence[Sequence[float]]) -> list[bool]:
        return [position <= self.length] * len(open_sequences)


@dataclass
class GuardedLength(Policy):
    """Draft `length` tokens every round, but back off from a sequence once `patience` rounds in a row had none accepted.

    What a drafter gets that was never calibrated: nothing has to be measured for it, and a useless one costs little.
    """

    length: int
    patience: int = 16

    def __post_init__(self) -> None:
        self._patience = _Patience(self.patience)

    def plan(self, sequences: Sequence[SequenceState], prefill_rows: int = 0) -> list[Plan]:
        return [planned(s, min(self.length, self._patience.limit(s))) for s in sequences]

    def learn(self, record: RoundRecord) -> None:
        for s in record.blocks:
            if s.verified:
                self._patience.learn(s.id, useful=s.accepted > 0)

    def forget(self, id: int) -> None:
        self._patience.forget(id)


@dataclass
class ConfidenceThreshold(Policy):
    """Stop before the first position whose confidence c_k (or survival a_k, where `cumulative`) is below `threshold`.

    Backs off from a sequence once the first position was refused in `patience` rounds in a row (`None`: never): a threshold
    that refuses everything would only pay for the drafter's parallel stage.
    """

    threshold: float
    cumulative: bool = False
    patience: int | None = 3
    reads_survival = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"ConfidenceThreshold: threshold must be between 0 and 1, got {self.threshold}.")
        self._patience = _Patience(math.inf if self.patience is None else self.patience)

    def plan(self, sequences: Sequence[SequenceState], prefill_rows: int = 0) -> list[Plan]:
        return [planned(s, self._patience.limit(s)) for s in sequences]

    def admit(self, position: int, open_sequences: Sequence[int], survival: Sequence[Sequence[float]]) -> list[bool]:
        return [self._passes(survival[r][:position]) for r in open_sequences]

    def _passes(self, survival: Sequence[float]) -> bool:
        if self.cumulative or len(survival) == 1:
            return survival[-1] >= self.threshold
        return survival[-2] > 0.0 and survival[-1] / survival[-2] >= self.threshold

    def learn(self, record: RoundRecord) -> None:
        for s in record.blocks:
            self._patience.learn(s.id, useful=s.drafted > 0)

    def forget(self, id: int) -> None:
        self._patience.forget(id)


def ranked_pairs(survival: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
    """(a_{r,k}, r) of all pairs by falling survival; of equal ones the earlier position first."""
    if len(survival) == 1:
        return [(a, 0) for a in survival[0]]  # falling as it is
    pairs = [(-a, k, r) for r, sequence in enumerate(survival) for k, a in enumerate(sequence)]
    return [(-a, r) for a, _, r in sorted(pairs)]


def prefix_lengths(
    survival: Sequence[Sequence[float]],  # n lists (a_1, a_2, ...), each falling
    seconds: Callable[[int], float],  # of a round that verifies B tokens in all
    early_stop: bool = True,
) -> list[int]:
    """How many tokens of each sequence to verify: Algorithm 1 (§3.2.2).

    All (sequence, position) pairs are ranked by survival and admitted while Θ = τ / seconds(B) grows. With `early_stop`
    the first that does not improve ends it (non-anticipating where it is asked position by position); without, the best Θ
    of the whole curve is taken, which only greedy decoding, or a look at earlier rounds, may do.
    """
    lengths = [0] * len(survival)
    best_lengths, tokens, size = list(lengths), float(len(survival)), len(survival)
    best = tokens / seconds(size)
    for a, r in ranked_pairs(survival):
        tokens, size = tokens + a, size + 1
        lengths[r] += 1
        if tokens / seconds(size) > best:
            best, best_lengths = tokens / seconds(size), list(lengths)
        elif early_stop:
            break
    return best_lengths


@dataclass
class ThroughputScheduler(Policy):
    """Algorithm 1 (§3.2.2): whole blocks are drafted, then pairs are admitted by survival while tokens per second grow, up to
    the first that does not improve."""

    step_rates: StepRates = field()  # without it the base's `None` would be a default
    reads_survival = True
    _seconds: Callable[[int], float] = field(default=float, init=False, repr=False, compare=False)

    def plan(self, sequences: Sequence[SequenceState], prefill_rows: int = 0) -> list[Plan]:
        plans = super().plan(sequences, prefill_rows)
        self._seconds = _round_seconds(self.step_rates, sequences, [p.tokens for p in plans], prefill_rows)
        return plans

    def schedule(self, survival: Sequence[Sequence[float]], drafted: Sequence[int]) -> list[int]:
        return prefix_lengths([s[:n] for s, n in zip(survival, drafted)], self._seconds)

    def learn(self, record: RoundRecord) -> None:
        self.step_rates.observe(record)


@dataclass
class LaggedScheduler(Policy):
    """The production form (§5.2): the number of admitted tokens from a global search over the survivals of `lag` rounds
    before, given to the pairs that rank highest now.

    Survivals that a cut block left unknown go on at the last known conditional rate.
    """

    step_rates: StepRates = field()
    lag: int = 2
    reads_survival = True
    _history: deque[list[list[float]]] = field(default_factory=deque, init=False, repr=False, compare=False)
    _cap: int | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.lag < 1:
            raise ValueError(f"LaggedScheduler: lag must be at least 1 round, got {self.lag}.")
        self._history = deque(maxlen=self.lag)

    def plan(self, sequences: Sequence[SequenceState], prefill_rows: int = 0) -> list[Plan]:
        limits = [s.limit for s in sequences]
        self._cap = None
        if len(self._history) == self.lag:
            earlier = [continued(s, max(limits, default=0)) for s in self._history[0]]
            seconds = _round_seconds(self.step_rates, sequences, limits, prefill_rows)
            share = len(sequences) / len(earlier)  # that round may have had more or fewer sequences
            found = prefix_lengths(earlier, lambda b: seconds(round(b * share)), early_stop=False)
            self._cap = round(sum(found) * share)
            # A block of one keeps the survival in sight where nothing is admitted.
            limits = [min(n, max(self._cap, 1)) for n in limits]
        return [planned(s, n) for s, n in zip(sequences, limits)]

    def schedule(self, survival: Sequence[Sequence[float]], drafted: Sequence[int]) -> list[int]:
        lengths = [0] * len(drafted)
        for _, r in ranked_pairs([s[:n] for s, n in zip(survival, drafted)])[: self._cap]:
            lengths[r] += 1
        return lengths

    def learn(self, record: RoundRecord) -> None:
        self.step_rates.observe(record)
        if known := [list(s.survival) for s in record.blocks if s.survival]:
            self._history.append(known)


def continued(survival: Sequence[float], length: int) -> list[float]:
    """`survival` cut or continued to `length` positions at its last conditional rate."""
    known = list(survival[:length])
    rate = 1.0 if not known else known[-1] / known[-2] if len(known) > 1 and known[-2] > 0 else known[-1]
    while len(known) < length:
        known.append(known[-1] * rate if known else 1.0)
    return known


def _round_seconds(
    rates: StepRates, sequences: Sequence[SequenceState], limits: Sequence[int], prefill_rows: int
) -> Callable[[int], float]:
    """Seconds of a round by the tokens B = Σ(1 + ℓ_r) that it verifies, whole blocks for `limits` included."""
    count, depth = len(sequences), mean_depth(sequences)
    draft = rates.blocks_cost(limits, max(limits, default=0))
    return lambda verified: draft + rates.cost(verified + prefill_rows, depth, count)
