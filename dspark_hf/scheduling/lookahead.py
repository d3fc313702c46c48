"""`LookaheadScheduler`: draft and verify exactly as much as pays, decided before each token exists. The default policy.

Axes: n sequences of a round, γ positions; a_{r,k} survival, B rows of the target's forward, λ tokens per second.
Units: seconds; what something is worth is counted in tokens.

A round is worth its expected tokens minus λ times its seconds, with λ the rate of the run so far, in which old rounds fade
(the renewal-reward form of Θ): what maximises that in each round maximises the rate of the run, not the ratio of one round.
All (sequence, position) pairs are ranked by their survival, and the prefix of that ranking that is worth most is taken: on a
jagged curve the next token alone may not pay while three do. Positions whose confidence is not known yet enter with their
expectation, never with what was or will be drawn (non-anticipating).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from .acceptance_estimate import SPREAD, AcceptanceEstimate, Expectation, RunRate
from .policy import BackOff, Plan, Policy, RoundRecord, SequenceState, mean_depth, planned, ranked_pairs
from .step_costs import StepRates


@dataclass
class _Member:
    """What is kept of one sequence."""

    estimate: AcceptanceEstimate
    back_off: BackOff = field(default_factory=BackOff)
    probes: int = 0


@dataclass
class _Block:
    """tokens: what a block is best made for. worth: its tokens less rows and steps; of the parallel stage only what it takes
    beyond one for one token is paid. rows: that it is expected to verify."""

    tokens: int = 0
    worth: float = 0.0
    rows: float = 0.0


class _Prices:
    """One round's costs, in tokens at the rate λ of the run."""

    def __init__(
        self, rates: StepRates, run: RunRate, sequences: Sequence[SequenceState], prefill_rows: int, drafting: int
    ) -> None:
        count, depth = len(sequences), mean_depth(sequences)
        self._rates, self._place = rates, (depth, count)
        self._base = count + prefill_rows
        self.rate = run.per_second(rates.cost(count, depth, count), count)
        self._forwards: list[float] = []  # with 0, 1, 2, ... rows beyond one for each sequence
        self.drafting = drafting
        # One more drafted position, of any number of sequences.
        self.step = self.rate * (rates.draft_cost(1, 1, drafting) - rates.draft_cost(1, 0, drafting))

    def forwards(self, most: int) -> Sequence[float]:
        """Of the target's forward with 0, 1, ..., `most` (or more) rows beyond one for each sequence."""
        while len(self._forwards) <= most:
            seconds = self._rates.cost(self._base + len(self._forwards), *self._place)
            self._forwards.append(self.rate * seconds)
        return self._forwards

    def stage(self, sequences: int) -> float:
        """Of the parallel stage for `sequences` blocks of one token."""
        return self.rate * self._rates.draft_cost(1, 0, sequences) if sequences else 0.0

    def longer_blocks(self, limits: Sequence[int]) -> float:
        """Of the parallel stage for blocks of these lengths, beyond that for blocks of one token."""
        return self.rate * self._rates.blocks_cost(limits, 0) - self.stage(len(limits))


@dataclass
class LookaheadScheduler(Policy):
    """Maximises the tokens per second of a run, for one sequence or many; `gate=False` always drafts.

    step_rates: the machine's table, for several sequences too where they are decoded at once. expectation: of this drafter.
    reads_survival: `False` for a drafter without a confidence head, whose positions are judged by their expectation alone.
    """

    step_rates: StepRates = field()
    expectation: Expectation | None = None
    gate: bool = True
    reads_survival: bool = True
    weighs_copies = True
    _back_off: BackOff = field(default_factory=BackOff, init=False, repr=False)  # of all sequences together
    _run: RunRate = field(default_factory=RunRate, init=False, repr=False)
    _members: dict[int, _Member] = field(default_factory=dict, init=False, repr=False)
    # Of the round at hand, by place of the sequence:
    _in_round: list[_Member] = field(default_factory=list, init=False, repr=False)
    _limits: list[int] = field(default_factory=list, init=False, repr=False)
    _probing: set[int] = field(default_factory=set, init=False, repr=False)
    _taken: int = field(default=0, init=False, repr=False)  # rows of copies and of tokens admitted so far
    _prices: _Prices = field(init=False, repr=False, compare=False)

    # -- before drafting ---------------------------------------------------------------------------------------------

    def plan(self, sequences: Sequence[SequenceState], prefill_rows: int = 0) -> list[Plan]:
        """For each sequence its best block, its copy, or a plain step, by what is expected to give more tokens per second."""
        for s in sequences:
            if s.id not in self._members:
                expected = self.expectation or Expectation(information=1.0)
                self._members[s.id] = _Member(AcceptanceEstimate(expected, self.reads_survival))
        self._in_round = [self._members[s.id] for s in sequences]
        self._probing, self._taken = set(), 0
        drafting = [r for r, s in enumerate(sequences) if s.limit > 0]
        self._prices = _Prices(self.step_rates, self._run, sequences, prefill_rows, len(drafting))
        blocks = self._blocks(sequences, drafting)
        copies = self._copies(sequences, blocks)
        if copies:
            self._taken = sum(copies.values())
            drafting = [r for r in drafting if r not in copies]
            blocks = self._blocks(sequences, drafting)
        self._limits = self._gated(drafting, blocks)
        return [
            Plan(copies[r], copied=True) if r in copies else planned(s, self._limits[r])
            for r, s in enumerate(sequences)
        ]

    def _blocks(self, sequences: Sequence[SequenceState], drafting: Sequence[int]) -> list[_Block]:
        """The best block of each sequence that may be drafted, all of them together.

        Each is taken to lie above or below its expectation with even chances: in two cases, half of the sequences above in
        the one and below in the other, each cut where it pays best. Blocks are made as long as the better case wants them,
        and shorter while that saves more of the parallel stage than it loses.
        """
        best, worth = [_Block() for _ in sequences], -math.inf
        most = max((sequences[r].limit for r in drafting), default=0)
        sides = (SPREAD, -SPREAD) if self.reads_survival else (0.0,)
        ahead = [[self._expected(r, sequences[r].limit, side) for r in drafting] for side in sides]
        cases = [[ahead[(c + i) % len(sides)][i] for i in range(len(drafting))] for c in range(len(sides))]
        while most:
            blocks = [_Block() for _ in sequences]
            for case in cases:
                self._add(blocks, drafting, [survival[:most] for survival in case], 1 / len(cases))
            if sum(b.worth for b in blocks) <= worth:
                break  # even for nothing; shorter ones are worth less yet
            made = [b for b in blocks if b.tokens]
            longer = self._prices.longer_blocks([b.tokens for b in made])
            for block in made:
                block.worth -= longer / len(made)
            if sum(b.worth for b in made) > worth:
                best, worth = blocks, sum(b.worth for b in made)
            most = max((b.tokens for b in made), default=1) - 1
        return best

    def _expected(self, r: int, limit: int, deviation: float) -> list[float]:
        """Survival of a block's positions before anything of it is known."""
        return list(accumulate(self._in_round[r].estimate.tail(0, limit, deviation), mul))

    def _add(self, blocks: list[_Block], drafting: Sequence[int], ahead: list[list[float]], weight: float) -> None:
        """What one case of probability `weight` with the survivals `ahead` wants and is worth."""
        worth, lengths = self._best(ahead)
        gains = [sum(survival[:n]) for survival, n in zip(ahead, lengths)]
        shared = (sum(gains) - worth) / max(sum(lengths), 1)  # rows and steps, by the token
        for r, gain, n in zip(drafting, gains, lengths):
            blocks[r].tokens = max(blocks[r].tokens, n)
            blocks[r].worth += weight * (gain - n * shared)
            blocks[r].rows += weight * n

    def _best(self, ahead: Sequence[Sequence[float]]) -> tuple[float, list[int]]:
        """The prefix of all pairs by rank that is worth most: its worth, and how many tokens of each sequence it takes.

        ahead: survival of each sequence's next tokens.
        """
        ranked, lengths = ranked_pairs(ahead), [0] * len(ahead)
        forwards, step = self._prices.forwards(self._taken + len(ranked)), self._prices.step
        best, taken, gain, longest = 0.0, 0, 0.0, 0
        for n, (a, r) in enumerate(ranked, start=1):
            gain += a
            lengths[r] += 1
            if lengths[r] > longest:
                longest, gain = lengths[r], gain - step
            worth = gain - (forwards[self._taken + n] - forwards[self._taken])
            if worth > best:
                best, taken = worth, n
        places = [r for _, r in ranked[:taken]]
        return best, [places.count(r) for r in range(len(ahead))]

    def _copies(self, sequences: Sequence[SequenceState], blocks: Sequence[_Block]) -> dict[int, int]:
        """Of which sequences a copy is verified in place of a block, and how many of its tokens."""
        prices = self._prices
        count = sum(b.tokens > 0 for b in blocks)
        pays = sum(b.worth for b in blocks) > prices.stage(count)
        rows, copies = sum(b.rows for b in blocks) if pays else 0.0, {}
        for r in sorted(range(len(sequences)), key=lambda r: -sum(sequences[r].copy)):
            block, best, length = blocks[r] if pays else _Block(), 0.0, 0
            if block.tokens:
                best = max(block.worth - prices.stage(count) + prices.stage(count - 1), 0.0)
            others, gain = round(rows - block.rows), 0.0
            forwards = prices.forwards(others + len(sequences[r].copy))
            for n, a in enumerate(sequences[r].copy, start=1):
                gain += a
                if gain - (forwards[others + n] - forwards[others]) > best:
                    best, length = gain - (forwards[others + n] - forwards[others]), n
            if length:
                copies[r] = length
                rows += length - block.rows
                count -= block.tokens > 0
        return copies

    def _gated(self, drafting: Sequence[int], blocks: Sequence[_Block]) -> list[int]:
        """What blocks are made for: 0 for sequences that do not pay their share of the parallel stage, and for all where
        together they do not pay it. These look again now and then, with a probe."""
        prices, limits = self._prices, [b.tokens for b in blocks]
        if not self.gate:
            return [max(n, 1) if r in drafting else 0 for r, n in enumerate(limits)]
        made = [r for r in drafting if limits[r]]
        share = prices.stage(len(made)) - prices.stage(len(made) - 1)
        kept = [r for r in made if len(made) == 1 or blocks[r].worth > share]
        if kept and sum(blocks[r].worth for r in kept) > prices.stage(len(kept)):
            self._back_off.resume()
            for r in made:
                if r in kept:
                    self._in_round[r].back_off.resume()
                else:
                    limits[r] = self._probe(r, 1) if self._in_round[r].back_off.refuse() else 0
            return limits
        probe = None
        if drafting and self._back_off.refuse():
            # One sequence alone looks whether drafting pays again: all of them would cost too much.
            probe = min(drafting, key=lambda r: self._in_round[r].probes)
        return [self._probe(r, max(n, 1)) if r == probe else 0 for r, n in enumerate(limits)]

    def _probe(self, r: int, tokens: int) -> int:
        self._in_round[r].probes += 1
        self._probing.add(r)
        return tokens

    # -- while drafting ----------------------------------------------------------------------------------------------

    def admit(self, position: int, open_sequences: Sequence[int], survival: Sequence[Sequence[float]]) -> list[bool]:
        """For each open sequence whether its token at `position` is among the pairs worth most together."""
        ahead = []  # of each: survival from `position` on
        for r in open_sequences:
            outlook = self._in_round[r].estimate.outlook(survival[r][:position], position, self._limits[r])
            ahead.append(list(accumulate(outlook, mul))[position - 1 :])
        _, lengths = self._best(ahead)
        # A probe that verifies nothing would learn nothing.
        admitted = [n > 0 or (position == 1 and r in self._probing) for r, n in zip(open_sequences, lengths)]
        self._taken += sum(admitted)
        return admitted

    # -- after the round ---------------------------------------------------------------------------------------------

    def learn(self, record: RoundRecord) -> None:
        """Learn from committed tokens alone; copies tell what the forward cost and gave, nothing of the drafter."""
        rates, count = self.step_rates, len(record.sequences)
        rates.observe(record)
        if not count:
            return
        plain = rates.cost(count, record.depth, count)
        if rates.live:
            self._run.observe_overhead(record.seconds - record.draft_seconds - record.verify_seconds, plain)
        self._run.add(sum(s.committed for s in record.sequences), rates.record_cost(record), plain, count)
        for s in record.blocks:
            if s.id in self._members:
                self._members[s.id].estimate.learn(s)

    def forget(self, id: int) -> None:
        self._members.pop(id, None)
