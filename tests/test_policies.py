"""Policies for one sequence and many: non-anticipating, and as good as their promise (paper §3.2.2, §5.2, Appendix A)."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_hf.scheduling.acceptance_estimate import CopyEstimate, Expectation
from dspark_hf.scheduling.lookahead import LookaheadScheduler
from dspark_hf.scheduling.policy import (
    ConfidenceThreshold,
    FixedLength,
    GuardedLength,
    LaggedScheduler,
    Policy,
    RoundRecord,
    SequenceRecord,
    SequenceState,
    ThroughputScheduler,
    prefix_lengths,
)
from dspark_hf.scheduling.step_costs import StepRates

# Appendix A: SPS 1, 0.5, 0.45; the drafter draws A or B evenly, the target wants A with 0.7.
APPENDIX = {1: 1.0, 2: 1 / 0.5, 3: 1 / 0.45}
DRAFTER, TARGET = {"A": 0.5, "B": 0.5}, {"A": 0.7, "B": 0.3}
SECOND_CONFIDENCE = {"A": 0.9, "B": 0.0}
# SmolLM2-135M in float32 on two cores with torch's own linear layers, measured.
JAGGED = {1: 0.062, 2: 0.096, 3: 0.119, 4: 0.096, 6: 0.086, 8: 0.091}
SMOOTH = {b: 1.0 + 0.1 * (b - 1) for b in range(1, 9)}
FLAT = dict.fromkeys([1, 64], 1.0)
BY_ROWS = {1: 1.0, 64: 64.0}
BENDING = {b: 1.0 + 0.06 * b + 0.004 * b * b for b in range(1, 33)}
EXPECTED = Expectation([0.7, 0.6, 0.5, 0.5, 0.4, 0.4, 0.4], 0.4)


def table(seconds: dict[int, float], draft: float = 0.0, step: float = 0.0) -> StepRates:
    """A table that live rounds don't change; drafting costs the same for any number of sequences."""
    rows = list(seconds)
    rates = StepRates(rows, [1], [list(seconds.values())], [[0.0] * len(rows)], [draft] * 8, step)
    rates.live = False
    return rates


def sequence_record(**changes) -> SequenceRecord:
    values = {"id": 0, "depth": 10, "planned": 0, "parked": False, "drafted": 0, "verified": 0, "accepted": 0}
    values |= {"committed": 1, "rows": 1, "survival": [], "confidence_logits": None}
    return SequenceRecord(**values | changes)


def round_record(sequences, **changes) -> RoundRecord:
    rows = sum(s.rows for s in sequences)
    values = {"rows": rows, "prefill_rows": 0, "backlog": 2, "draft_seconds": 0.0, "verify_seconds": 1.0}
    return RoundRecord(sequences, **values | {"seconds": 1.0} | changes)


def states(count: int, limit: int = 4, first: int = 0, **changes) -> list[SequenceState]:
    return [SequenceState(i, 10, limit, **changes) for i in range(first, first + count)]


@dataclass
class Round:
    """One round as the loop goes through it, with c_{r,k} = `confidences[r][k]`, or a function of k, and `accepts(r, k)`."""

    policy: Policy
    sequences: list[SequenceState]
    confidences: list
    prefill_rows: int = 0
    accepts: object = staticmethod(lambda r, k: True)
    changes: dict = field(default_factory=dict)  # of the record
    learns: bool = True

    def __post_init__(self) -> None:
        count = len(self.sequences)
        self.plans = self.policy.plan(self.sequences, self.prefill_rows)
        self.limits = [0 if p.copied else p.tokens for p in self.plans]
        assert all(0 <= n <= s.limit for n, s in zip(self.limits, self.sequences))
        assert all(p.tokens <= len(s.copy) for p, s in zip(self.plans, self.sequences) if p.copied)
        self.drafted, survival = [0] * count, [[] for _ in range(count)]
        alive = list(range(count))
        for k in range(max(self.limits, default=0)):
            alive = [r for r in alive if self.limits[r] > k]
            for r in alive if self.policy.reads_survival else ():
                c = self.confidences[r](k) if callable(self.confidences[r]) else self.confidences[r][k]
                survival[r].append((survival[r][-1] if k else 1.0) * c)
            alive = [r for r, goes_on in zip(alive, self.policy.admit(k + 1, alive, survival)) if goes_on]
            for r in alive:
                self.drafted[r] += 1
        copied = [p.tokens if p.copied else 0 for p in self.plans]
        self.verified = self.policy.schedule(survival, self.drafted)
        assert all(0 <= v <= d for v, d in zip(self.verified, self.drafted))
        records = []
        for r, s in enumerate(self.sequences):
            verified = copied[r] or self.verified[r]
            accepted = next((k for k in range(verified) if not self.accepts(r, k)), verified)
            records.append(
                sequence_record(
                    id=s.id,
                    planned=self.plans[r].tokens,
                    parked=self.plans[r].parked,
                    copied=self.plans[r].copied,
                    drafted=copied[r] or self.drafted[r],
                    verified=verified,
                    accepted=accepted,
                    committed=accepted + 1,
                    rows=verified + 1,
                    survival=survival[r],
                )
            )
        changes = {"rows": sum(s.rows for s in records) + self.prefill_rows, "prefill_rows": self.prefill_rows}
        self.record = round_record(records, **changes | {"backlog": count} | self.changes)
        if self.learns:
            self.policy.learn(self.record)


def no_drafts_stand(r, k):
    return False


# -- no decision reads what it decides on ------------------------------------------------------------------------------


def committed_first(length_of) -> float:
    """P(the first committed token is A), over drafted tokens, acceptance and correction."""
    total = 0.0
    positive = {t: max(TARGET[t] - DRAFTER[t], 0.0) for t in TARGET}
    for first, p in DRAFTER.items():
        if length_of(first) == 0:  # nothing verified: the target draws
            total += p * TARGET["A"]
            continue
        accepted = min(1.0, TARGET[first] / DRAFTER[first])
        total += p * accepted * (first == "A") + p * (1 - accepted) * positive["A"] / sum(positive.values())
    return total


def test_appendix_a_global_search_is_biased():
    def length_of(first):
        survival = [0.8, 0.8 * SECOND_CONFIDENCE[first]]
        return prefix_lengths([survival], APPENDIX.__getitem__, early_stop=False)[0]

    assert committed_first(length_of) == pytest.approx(0.85)


HISTORIES = [[], [[0.8, 0.72], [0.8, 0.0]], [[0.1], [0.9, 0.9]], [[0.9, 0.9], [0.9, 0.9]]]


@pytest.mark.parametrize("kind", [ThroughputScheduler, LaggedScheduler, LookaheadScheduler])
@pytest.mark.parametrize("history", HISTORIES, ids=range(4))
def test_appendix_a_policies_are_unbiased(kind, history):
    def length_of(first):
        policy = kind(table(APPENDIX))
        for survival in history:
            policy.plan(states(1, 2))
            drafted = len(survival) - 1
            record = sequence_record(planned=2, drafted=drafted, verified=drafted, rows=drafted + 1, survival=survival)
            policy.learn(round_record([record]))
        return Round(policy, states(1, 2), [[0.8, SECOND_CONFIDENCE[first]]]).verified[0]

    assert committed_first(length_of) == pytest.approx(0.7)


def policies(rates):
    expectation = Expectation([0.6, 0.5, 0.5, 0.5], 0.4)
    return {
        "fixed": FixedLength(2),
        "threshold": ConfidenceThreshold(0.5, patience=1),
        "cumulative": ConfidenceThreshold(0.3, cumulative=True),
        "throughput": ThroughputScheduler(rates),
        "lagged": LaggedScheduler(rates, lag=1),
        "lookahead": LookaheadScheduler(rates, expectation),
        "lookahead-no-gate": LookaheadScheduler(rates, expectation, gate=False),
        "guarded": GuardedLength(3, patience=1),
        "lookahead-no-head": LookaheadScheduler(rates, expectation, reads_survival=False),
    }


increments = st.lists(st.floats(0.0, 1.0), min_size=24, max_size=24)
rising = increments.map(lambda added: {b: 1.0 + sum(added[:b]) for b in range(1, 25)})
any_curve = st.lists(st.floats(0.5, 3.0), min_size=5, max_size=5).map(lambda s: dict(enumerate(s, start=1)))
confidences = st.lists(st.floats(0.0, 1.0), min_size=32, max_size=32)
blocks = st.lists(st.integers(0, 1), min_size=4, max_size=4)


@settings(max_examples=80, deadline=None)
@given(any_curve | rising, confidences, st.lists(blocks, min_size=0, max_size=4), blocks, blocks, st.integers(0, 2))
def test_no_decision_depends_on_its_own_token_or_later_ones(seconds, values, earlier, one, other, companions):
    """Two blocks of a sequence after the same rounds: as long as x_<k agree, so does whether x_k is verified."""

    def confidence(tokens):  # any function of x_<k
        index = 1
        for token in tokens:
            index = 2 * index + token
        return values[index]

    beside = [values[8 + 4 * i : 12 + 4 * i] for i in range(companions)]
    for name in policies(table(seconds)):
        lengths = []
        for block in (one, other):
            policy = policies(table(seconds))[name].fresh()
            for tokens in (*earlier, block):
                own = lambda k, tokens=tokens: confidence(tokens[:k])  # noqa: E731
                last = Round(policy, states(1 + companions), [own, *beside], accepts=lambda r, k: k < 1)
            lengths.append(last.verified[0])
        same = next((k for k in range(4) if one[k] != other[k]), 4)
        # x_1..x_same agree, so decisions on x_1..x_{same + 1} do too.
        assert min(lengths[0], same + 1) == min(lengths[1], same + 1), name


# -- fixed lengths and thresholds --------------------------------------------------------------------------------------


def test_a_fixed_length_is_planned_no_longer_than_it_is():
    assert Round(FixedLength(2), states(2), [[0.5] * 4] * 2).limits == [2, 2]
    assert [(p.tokens, p.parked) for p in FixedLength(0).plan(states(1))] == [(0, True)]
    assert [(p.tokens, p.parked) for p in FixedLength(3).plan(states(1, 0))] == [(0, False)]
    assert FixedLength(3).plan(states(1, 2))[0].tokens == 2


def test_a_threshold_stops_before_the_first_confidence_below_it():
    values = [[0.9, 0.7, 0.4, 0.9]]
    for threshold, cumulative, wanted in ((0.5, False, 2), (0.3, False, 4), (0.95, False, 0), (0.65, True, 1)):
        assert Round(ConfidenceThreshold(threshold, cumulative), states(1), values).verified == [wanted]
    assert Round(ConfidenceThreshold(0.0), states(1), [[0.5, 0.0, 0.5, 0.0]]).verified == [2]


def test_a_threshold_that_refuses_everything_backs_off():
    """Few rounds pay for a parallel stage, each sequence by itself, and it finds back."""
    policy = ConfidenceThreshold(0.99)
    made = [Round(policy, states(2), [[0.5] * 4, [1.0] * 4]) for _ in range(200)]
    assert all(r.verified == [0, 4] for r in made)
    planned = [r.limits[0] > 0 for r in made]
    assert planned[:3] == [True] * 3 and 0 < sum(planned[3:]) <= 7
    assert all(r.plans[0].parked == (r.limits[0] == 0) for r in made)
    later = [Round(policy, states(2), [[1.0] * 4] * 2).verified[0] for _ in range(80)]
    found = later.index(4)
    assert later[found:] == [4] * (80 - found)


def test_a_guarded_length_backs_off_from_each_sequence_alone():
    policy = GuardedLength(3)
    lengths = [Round(policy, states(2), [[]] * 2, accepts=lambda r, k: r == 1).limits for _ in range(200)]
    assert all(b == 3 for _, b in lengths)
    assert [a for a, _ in lengths[:16]] == [3] * 16
    assert 0 < sum(a > 0 for a, _ in lengths[16:]) <= 7
    while not Round(policy, states(1), [[]], accepts=lambda r, k: k < 1).limits[0]:
        pass
    assert [Round(policy, states(1), [[]], accepts=no_drafts_stand).limits for _ in range(3)] == [[3]] * 3
    for _ in range(16):
        Round(policy, states(1), [[]], accepts=no_drafts_stand)
    policy.forget(0)
    assert policy.plan(states(1))[0].tokens == 3


@pytest.mark.parametrize("name", list(policies(table(SMOOTH))))
def test_a_sequence_without_room_is_not_drafted_for(name):
    policy = policies(table(SMOOTH))[name]
    sequences = [SequenceState(0, 10, 0), SequenceState(1, 10, 2), SequenceState(2, 10, 0)]
    for _ in range(3):
        last = Round(policy, sequences, [[0.95] * 4] * 3)
        assert last.limits[0] == last.limits[2] == 0 and last.drafted[1] in (1, 2)
        assert not last.plans[0].parked
    assert Round(policy, sequences[::2], [[]] * 2).limits == [0, 0]
    assert policy.plan([], 5) == []
    for id in (0, 1, 2, 7):
        policy.forget(id)


def test_a_policy_is_fresh_for_each_generation():
    for name, policy in policies(table(SMOOTH)).items():
        for _ in range(5):
            Round(policy, states(1, 2), [[0.1, 0.1]], accepts=no_drafts_stand)
        again, wanted = policy.fresh(), policies(table(SMOOTH))[name]
        assert again is not policy and type(again) is type(policy) and again.step_rates is policy.step_rates
        for _ in range(3):
            first, second = (Round(p, states(1, 2), [[0.6, 0.6]]) for p in (again, wanted))
            assert (first.plans, first.verified) == (second.plans, second.verified)
    own = Policy()
    assert own.fresh() is own


def test_bad_arguments():
    with pytest.raises(ValueError, match="lag must be at least 1"):
        LaggedScheduler(table(JAGGED), lag=0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        ConfidenceThreshold(1.5)
    with pytest.raises(ValueError, match="at least 0"):
        FixedLength(-1)
    with pytest.raises(TypeError):
        LookaheadScheduler()


# -- Algorithm 1 and its lagged form -----------------------------------------------------------------------------------

confidence_lists = st.lists(st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4), min_size=1, max_size=4)


def survivals(conditional):
    return [list(itertools.accumulate(row, lambda a, b: a * b)) for row in conditional]


@settings(max_examples=80, deadline=None)
@given(confidence_lists, st.floats(0.1, 5.0), st.floats(0.01, 2.0))
def test_algorithm_1_is_optimal_on_smooth_curves(conditional, base, slope):
    """Against every choice of lengths, n <= 4 sequences of γ <= 4."""
    survival = survivals(conditional)

    def seconds(size):
        return base + slope * size

    def theta(lengths):
        tokens = sum(1 + sum(row[:n]) for row, n in zip(survival, lengths))
        return tokens / seconds(len(survival) + sum(lengths))

    best = max(theta(lengths) for lengths in itertools.product(*(range(len(row) + 1) for row in survival)))
    assert theta(prefix_lengths(survival, seconds)) == pytest.approx(best)


def test_algorithm_1_stops_early_on_a_jagged_curve():
    rates = table(JAGGED)
    survival = [[0.5, 0.45, 0.4, 0.36, 0.33, 0.3, 0.27]]
    assert prefix_lengths(survival, lambda b: rates.measured(b, 1), early_stop=True) == [0]
    assert prefix_lengths(survival, lambda b: rates.measured(b, 1), early_stop=False) == [7]


@settings(max_examples=60, deadline=None)
@given(confidence_lists, rising, st.integers(0, 3))
def test_throughput_is_algorithm_1(conditional, seconds, prefill_rows):
    rates = table(seconds, draft=0.3, step=0.1)
    last = Round(ThroughputScheduler(rates), states(len(conditional)), conditional, prefill_rows)
    assert last.drafted == [4] * len(conditional)
    draft = 0.3 + 4 * 0.1
    assert last.verified == prefix_lengths(survivals(conditional), lambda b: draft + rates.cost(b + prefill_rows, 10))


def test_throughput_ranks_pairs_of_all_sequences():
    """Four rows are cheap, the fifth is dear: the two places go to the tokens likeliest to stand, if the first pays."""
    rates = table({1: 1.0, 4: 1.0, 5: 9.0})
    for conditional, wanted in (
        ([[0.9, 0.9, 0.9], [0.5, 0.9, 0.9]], [2, 0]),
        ([[0.9, 0.4, 0.9], [0.5, 0.9, 0.9]], [1, 1]),
        ([[0.5, 0.9, 0.9], [0.9, 0.7, 0.1]], [0, 2]),
    ):
        assert Round(ThroughputScheduler(rates), states(2, 3), conditional).verified == wanted
    late = table({1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0, 5: 2.0, 6: 2.0})
    assert Round(ThroughputScheduler(late), states(2, 2), [[0.9, 0.9]] * 2).verified == [0, 0]


def test_prompts_that_are_read_beside_fill_the_forward():
    """With six rows of prompts the cheap part of the curve is over."""
    rates = table({1: 1.0, 7: 1.0, 8: 5.0, 20: 60.0})
    for policy in (ThroughputScheduler(rates), LookaheadScheduler(rates, EXPECTED)):
        assert sum(Round(policy, states(2), [[0.9] * 4] * 2).verified) == 5
        assert sum(Round(policy, states(2), [[0.9] * 4] * 2, prefill_rows=6).verified) == 0


@pytest.mark.parametrize(("lag", "wanted"), [(1, [8, 8, 0, 8, 0, 0]), (2, [8, 8, 8, 0, 8, 0])])
@pytest.mark.parametrize("count", [1, 2])
def test_lagged_takes_its_budget_from_rounds_before(lag, wanted, count):
    """Confidences that go up and down; where the budget is none, one token is drafted to look again."""
    policy = LaggedScheduler(table({b: 1.0 + 0.5 / count * b for b in range(1, 12)}), lag=lag)
    high, low = [[0.99] * 4] * count, [[0.05] * 4] * count
    rounds = [Round(policy, states(count), c) for c in (high, low, high, low, low, high)]
    assert [sum(r.verified) for r in rounds] == [n // (3 - count) for n in wanted]
    assert all(r.drafted == ([4] if n else [1]) * count for r, n in zip(rounds, wanted))


def test_lagged_gives_its_budget_to_what_ranks_highest_now():
    """A budget of two, for other sequences than those it was found with."""
    policy = LaggedScheduler(table({1: 1.0, 4: 1.0, 5: 9.0, 12: 80.0}), lag=1)
    Round(policy, states(2), [[0.9, 0.6, 0.5, 0.4]] * 2)
    assert Round(policy, states(2, 4, first=5), [[0.5] * 4, [0.9] * 4]).verified == [0, 2]
    assert Round(policy, states(2, 4, first=7), [[0.5] * 4, [0.6, 0.1, 0.1, 0.1]]).verified == [1, 1]


# -- the lookahead -----------------------------------------------------------------------------------------------------


def simulated_rate(policy, conditional, rates, rounds=200, limit=7) -> float:
    """Expected tokens per second where every round has the same confidences, and they are right."""
    tokens = seconds = 0.0
    survival = survivals([conditional])[0]
    for _ in range(rounds):
        last = Round(policy, states(1, limit), [conditional], learns=False)
        length = last.verified[0]
        expected, rows = 1.0 + sum(survival[:length]), rates.padded_rows(length + 1, 10)
        cost = rates.measured(rows, 10)
        tokens, seconds = tokens + expected, seconds + cost
        planned, accepted = last.limits[0], round(expected - 1)
        known = survival[: min(length + 1, planned)]
        counts = {"planned": planned, "drafted": length, "verified": length, "accepted": accepted}
        record = sequence_record(**counts, committed=expected, rows=rows, survival=known)
        policy.learn(round_record([record], verify_seconds=cost, seconds=cost))
    return tokens / seconds


CONFIDENCES = {"low": [0.2] * 7, "rising": [0.35] + [0.9] * 6, "even": [0.5] * 7, "high": [0.8] * 7, "sure": [0.95] * 7}


@pytest.mark.parametrize("conditional", CONFIDENCES.values(), ids=CONFIDENCES)
def test_lookahead_is_not_trapped_by_a_jagged_curve(conditional):
    """On the measured table it reaches the best fixed length, plain decoding included."""
    rates = table(JAGGED)
    fixed = max(simulated_rate(FixedLength(n), conditional, rates) for n in range(8))
    lookahead = LookaheadScheduler(rates, Expectation(conditional))
    assert simulated_rate(lookahead, conditional, rates) >= 0.97 * fixed


def test_algorithm_1_is_trapped_where_lookahead_is_not():
    """A first token that does not pay hides better ones behind it, even where a forward may be padded."""
    rates, conditional = table(JAGGED), CONFIDENCES["rising"]
    trapped = simulated_rate(ThroughputScheduler(rates), conditional, rates)
    assert trapped == pytest.approx(1 / 0.062)
    assert simulated_rate(LookaheadScheduler(rates, Expectation(conditional)), conditional, rates) > 1.5 * trapped


def test_the_gate_parks_a_useless_drafter_and_looks_again():
    policy = LookaheadScheduler(table({1: 1.0, 2: 1.1, 3: 1.2}, draft=0.3))
    rounds = [Round(policy, states(1, 2), [[0.5, 0.5]], accepts=no_drafts_stand) for _ in range(300)]
    drafted = [r.limits[0] > 0 for r in rounds]
    assert 0 < sum(drafted[60:]) <= 8  # probes at growing distances, never silent for good
    assert drafted.count(False) > 200 and all(r.plans[0].parked == (not r.limits[0]) for r in rounds)
    for _ in range(200):
        Round(policy, states(1, 2), [[0.95, 0.95]])
    assert policy.plan(states(1, 2))[0].tokens == 2  # it finds back when drafts become good


@pytest.mark.parametrize("reads_survival", [True, False], ids=["with a head", "without one"])
def test_a_probe_learns_from_what_it_drafts(reads_survival):
    """Rejections that park it do not silence it: a probe verifies a token even where that does not seem to pay."""
    policy = LookaheadScheduler(table({1: 1.0, 2: 1.1, 3: 1.2}, draft=0.3), reads_survival=reads_survival)
    bad = [Round(policy, states(1, 2), [[0.5, 0.5]], accepts=no_drafts_stand).verified[0] for _ in range(100)]
    good = [Round(policy, states(1, 2), [[0.5, 0.5]]).verified[0] for _ in range(300)]
    assert sum(bad[20:]) > 0
    assert sum(good[-20:]) == 40


@pytest.mark.parametrize("reads_survival", [True, False])
def test_lookahead_parks_where_rows_cost_as_much_as_tokens(reads_survival):
    """One sequence at a time looks again, at growing distances, and they take turns."""
    policy = LookaheadScheduler(table(BY_ROWS, draft=0.2), EXPECTED, reads_survival=reads_survival)
    probes = []
    for n in range(120):
        last = Round(policy, states(3), [[0.6] * 4] * 3, accepts=no_drafts_stand)
        assert sum(last.verified) == sum(last.limits) <= 1
        if sum(last.limits):
            probes.append((n, last.limits.index(1)))
    distances = [b - a for (a, _), (b, _) in itertools.pairwise(probes)]
    assert len(probes) >= 4
    assert distances == sorted(distances) and distances[-1] > 3 * distances[0]
    assert {r for _, r in probes[:3]} == {0, 1, 2}


def test_without_its_gate_it_always_drafts():
    policy = LookaheadScheduler(table(BY_ROWS, draft=9.0), EXPECTED, gate=False)
    for _ in range(5):
        assert all(n > 0 for n in Round(policy, states(2), [[0.1] * 4] * 2, accepts=no_drafts_stand).limits)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_lookahead_drafts_everything_where_rows_are_free(count):
    policy = LookaheadScheduler(table(FLAT), EXPECTED)
    for _ in range(4):
        last = Round(policy, states(count), [[0.6] * 4] * count)
        assert last.verified == last.limits == [4] * count


def test_a_longer_block_is_made_only_where_it_pays():
    """The parallel stage for more positions costs more, and is paid before any of them is drawn."""
    for count in (1, 4):
        rates = StepRates([1, 64], [1], [[1.0, 1.0]], [[0.0, 0.0]], [0.1, 0.1, 0.1, 0.9 * count], 0.0)
        rates.live = False
        assert LookaheadScheduler(rates, EXPECTED).plan(states(count)) == [FixedLength(3).plan(states(1))[0]] * count


def test_lookahead_gives_more_to_sequences_that_do_better():
    policy = LookaheadScheduler(table(BENDING), EXPECTED)
    last = Round(policy, states(3), [[0.95] * 4, [0.6] * 4, [0.1] * 4])
    assert last.verified[0] > last.verified[1] > last.verified[2] == 0


def test_lookahead_learns_of_each_sequence_alone():
    """Texts alike in confidence, but one whose drafts never stand: it gets less, the others are not disturbed."""
    policy = LookaheadScheduler(table(BENDING), EXPECTED)
    totals = [0, 0]
    for _ in range(20):
        last = Round(policy, states(2), [[0.7] * 4] * 2, accepts=lambda r, k: r == 0)
        totals = [t + v for t, v in zip(totals, last.verified)]
    assert totals[0] > 2 * totals[1]
    new = Round(policy, states(3), [[0.7] * 4] * 3)
    assert new.verified[0] >= new.verified[2] > new.verified[1]
    for id in range(4):
        policy.forget(id)
    assert not policy._members


def test_a_sequence_that_does_not_pay_its_share_of_the_parallel_stage_is_left_out():
    rates = table(FLAT)
    rates = StepRates([1, 64], [1], [[1.0, 1.0]], [[0.0] * 2], [0.1] * 4, 0.0, {}, [2], [0.0], [[0.6] * 4], [0.0])
    rates.live = False
    policy = LookaheadScheduler(rates, EXPECTED)
    rounds = [Round(policy, states(2), [[0.9] * 4, [0.5] * 4], accepts=lambda r, k: r == 0) for _ in range(80)]
    assert all(r.limits[0] == 4 for r in rounds[5:])
    assert 0 < sum(r.limits[1] > 0 for r in rounds[20:]) <= 8


def test_the_budget_falls_as_sequences_join():
    """The same texts on a curve that bends upwards."""
    budgets = []
    for count in (1, 2, 4, 8, 16):
        policy = LookaheadScheduler(table({b: 1.0 + 0.01 * b + 0.002 * b * b for b in range(1, 90)}), EXPECTED)
        rounds = [Round(policy, states(count), [[0.8, 0.7, 0.6, 0.5]] * count) for _ in range(10)]
        budgets.append(sum(sum(r.verified) for r in rounds) / (10 * count))
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > 3 and budgets[-1] < 1


def test_lookahead_counts_the_rows_of_sequences_whose_block_is_full():
    """Four rows are free and a fifth is dear: a short block of another sequence takes one of them."""
    policy = LookaheadScheduler(table({1: 1.0, 4: 1.0, 5: 9.0, 12: 80.0}), Expectation([0.9] * 4, 0.4))
    last = Round(policy, [SequenceState(0, 10, 4), SequenceState(1, 10, 1)], [[0.95] * 4, [0.98]])
    assert last.limits[0] > 1
    assert last.verified == [1, 1]


@pytest.mark.parametrize("count", [1, 4])
def test_lookahead_reaches_the_best_fixed_length(count):
    """Random texts, right confidences: no length for all is clearly better, on a curve that bends and a jagged one."""

    def rate(policy, seconds):
        rates, rnd, tokens, time = table(seconds, 0.02, 0.005), random.Random(1), 0, 0.0
        for _ in range(250):
            values = [[min(max(rnd.gauss(0.65, 0.25), 0.02), 0.98) for _ in range(7)] for _ in range(count)]
            stands = [[rnd.random() < c for c in row] for row in values]
            last = Round(policy, states(count, 7), values, accepts=lambda r, k, stands=stands: stands[r][k])
            tokens += sum(s.committed for s in last.record.sequences)
            time += rates.record_cost(last.record)
        return tokens / time

    for seconds in (BENDING, JAGGED | {32: 0.36}):
        rates = table(seconds, 0.02, 0.005)
        best = max(rate(FixedLength(n), seconds) for n in range(8))
        assert rate(LookaheadScheduler(rates, EXPECTED), seconds) > 0.97 * best


# -- copies from the text ----------------------------------------------------------------------------------------------

SURE, POOR = survivals([[0.97] * 12])[0], [0.2, 0.02]


@pytest.mark.parametrize("count", [1, 3])
def test_a_sure_copy_takes_the_place_of_the_block(count):
    policy = LookaheadScheduler(table(BENDING if count == 1 else FLAT, draft=0.1), EXPECTED)
    last = Round(policy, states(count, copy=SURE), [[0.6] * 4] * count)
    assert all(p.copied and p.tokens > 4 for p in last.plans)
    last = Round(policy, states(count, copy=POOR), [[0.6] * 4] * count)
    assert not any(p.copied for p in last.plans) and all(last.limits)
    assert FixedLength(2).plan(states(1, copy=SURE))[0].copied is False


def test_each_sequence_copies_or_drafts_by_what_it_has():
    policy = LookaheadScheduler(table(FLAT, draft=0.1, step=0.01), EXPECTED)
    sequences = [SequenceState(0, 10, 4, SURE), SequenceState(1, 10, 4), SequenceState(2, 10, 4, POOR)]
    last = Round(policy, sequences, [[0.7] * 4] * 3)
    assert [p.copied for p in last.plans] == [True, False, False]
    assert last.plans[0].tokens == 12 and last.verified[1] > 0 and last.verified[2] > 0


def test_a_copy_needs_no_room_in_the_drafter_and_no_drafter_that_pays():
    policy = LookaheadScheduler(table(SMOOTH, draft=5.0), EXPECTED)
    assert Round(policy, states(1, 0, copy=SURE), [[]]).plans[0].copied
    assert Round(policy, states(2, copy=SURE), [[]] * 2).plans[0].copied
    assert policy.plan(states(1))[0].tokens == 0


def test_rows_of_copies_are_counted_in_everybodys_rows():
    """Eight rows are free, more are dear: copies share them out, and leave none to the other's block."""
    rates = table({1: 1.0, 8: 1.0, 9: 20.0, 64: 400.0})
    alone = Round(LookaheadScheduler(rates, EXPECTED), states(1, copy=SURE), [[]])
    assert alone.plans[0].tokens == 7
    both = Round(LookaheadScheduler(rates, EXPECTED), states(2, copy=SURE), [[0.7] * 4] * 2)
    assert sum(p.tokens if p.copied else v for p, v in zip(both.plans, both.verified)) == 6
    policy = LookaheadScheduler(rates, EXPECTED)
    one = Round(policy, [SequenceState(0, 10, 4, SURE), SequenceState(1, 10, 4)], [[], [0.7] * 4])
    assert one.plans[0].copied and one.plans[0].tokens + one.verified[1] == 6


def test_copies_teach_nothing_of_the_drafter_but_raise_what_a_second_is_worth():
    policy, plain = (LookaheadScheduler(table(BENDING, draft=0.2), Expectation([0.55] * 4, 0.4)) for _ in range(2))
    Round(policy, states(1), [[0.6] * 4])
    before = vars(policy._members[0].estimate).copy()
    for _ in range(60):
        assert Round(policy, states(1, copy=SURE), [[0.6] * 4]).plans[0].copied
    assert vars(policy._members[0].estimate) == before
    assert Round(plain, states(1), [[0.7] * 4]).verified[0] > Round(policy, states(1), [[0.7] * 4]).verified[0]


def test_how_likely_copies_are_is_learned_by_how_long_the_match_is():
    estimate = CopyEstimate()
    assert estimate.chance(1) == 0.0
    chances = [estimate.chance(n) for n in (2, 3, 5, 8, 16, 31, 99)]
    assert chances == sorted(chances) and chances[0] == 0.5
    assert estimate.survival(2, 3) == pytest.approx([0.5, 0.5 * 0.59, 0.5 * 0.59 * 0.67])
    for _ in range(200):
        estimate.learn(2, False)
        estimate.learn(8, True)
    assert estimate.chance(2) < 0.02 and estimate.chance(7) > 0.98
    assert estimate.chance(3) == pytest.approx(0.59)
