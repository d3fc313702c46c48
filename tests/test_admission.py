"""Admission policies: non-anticipating, and as good as their promise (paper §3.2.2, Appendix A)."""

from __future__ import annotations

import itertools

import pytest
from dspark_hf.scheduling.admission import RoundOutcome, RoundPolicy, prefix_lengths
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_hf import (
    ConfidenceThreshold,
    Expectation,
    FixedLength,
    GuardedLength,
    LaggedScheduler,
    LookaheadScheduler,
    StepRates,
    ThroughputScheduler,
)

# Appendix A: SPS 1, 0.5, 0.45; the drafter draws A or B evenly, the target wants A with 0.7.
APPENDIX_RATES = StepRates.of_target([1.0, 1 / 0.5, 1 / 0.45])
DRAFTER, TARGET = {"A": 0.5, "B": 0.5}, {"A": 0.7, "B": 0.3}
SECOND_CONFIDENCE = {"A": 0.9, "B": 0.0}
# SmolLM2-135M in float32 on two cores with torch's own linear layers, measured.
JAGGED = StepRates.of_target({1: 0.062, 2: 0.096, 3: 0.119, 4: 0.096, 6: 0.086, 8: 0.091})


def outcome(survival, drafted=0, accepted=0, depth=10, limit=2, **changes):
    values = {
        "depth": depth,
        "limit": limit,
        "drafted": drafted,
        "accepted": accepted,
        "committed": accepted + 1,
        "rows": drafted + 1,
        "backlog": 2,
        "survival": survival,
        "draft_seconds": 0.0,
        "verify_seconds": 1.0,
        "seconds": 1.0,
    }
    return RoundOutcome(**values | changes)


def still(rates: StepRates) -> StepRates:
    """The table without live corrections."""
    rates.live = False
    return rates


def drafted_length(policy, tokens, confidence, limit) -> tuple[int, list[float]]:
    """How many of `tokens` the policy lets through, asked as `SequentialLoop` asks; c_k is a function of x_<k."""
    if isinstance(policy, RoundPolicy):
        limit = policy.begin_round(10, limit)
    survival: list[float] = []
    for k in range(limit):
        survival.append((survival[-1] if survival else 1.0) * confidence(tokens[:k]))
        if not policy.admit(k + 1, list(survival)):
            return k, survival
    return limit, survival


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


def appendix_confidence(prefix):
    return SECOND_CONFIDENCE[prefix[0]] if prefix else 0.8


def test_appendix_a_global_search_is_biased():
    def length_of(first):
        survival = [0.8, 0.8 * SECOND_CONFIDENCE[first]]
        return prefix_lengths([survival], lambda b: APPENDIX_RATES.measured(b, 1), early_stop=False)[0]

    assert committed_first(length_of) == pytest.approx(0.85)


def histories():
    """What rounds before may have looked like."""
    return [[], [[0.8, 0.72], [0.8, 0.0]], [[0.1], [0.9, 0.9]], [[0.9, 0.9], [0.9, 0.9]]]


@pytest.mark.parametrize("kind", [ThroughputScheduler, LaggedScheduler, LookaheadScheduler])
@pytest.mark.parametrize("history", histories(), ids=range(4))
def test_appendix_a_policies_are_unbiased(kind, history):
    def length_of(first):
        policy = kind(still(APPENDIX_RATES)).fresh()
        for survival in history:
            policy.begin_round(10, 2)
            policy.end_round(outcome(survival, drafted=len(survival) - 1))
        return drafted_length(policy, [first, "A"], appendix_confidence, 2)[0]

    assert committed_first(length_of) == pytest.approx(0.7)


def policies(rates):
    expectation = Expectation([0.6, 0.5, 0.5, 0.5], 0.4)
    return {
        "fixed": FixedLength(2),
        "threshold": ConfidenceThreshold(0.5),
        "cumulative": ConfidenceThreshold(0.3, cumulative=True),
        "throughput": ThroughputScheduler(rates),
        "lagged": LaggedScheduler(rates),
        "lookahead": LookaheadScheduler(rates, expectation),
        "lookahead-no-gate": LookaheadScheduler(rates, expectation, gate=False),
        "guarded": GuardedLength(3, patience=1),
        "lookahead-no-head": LookaheadScheduler(rates, expectation, reads_survival=False),
    }


rates_lists = st.lists(st.floats(0.5, 3.0), min_size=5, max_size=5)
confidences = st.lists(st.floats(0.0, 1.0), min_size=32, max_size=32)
blocks = st.lists(st.integers(0, 1), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None)
@given(rates_lists, confidences, st.lists(blocks, min_size=0, max_size=4), blocks, blocks)
def test_no_decision_depends_on_its_own_token_or_later_ones(seconds, table, earlier, one, other):
    """Two blocks after the same rounds: as long as x_<k agree, so does the decision on x_k."""

    def confidence(prefix):  # any function of x_<k
        index = 1
        for token in prefix:
            index = 2 * index + token
        return table[index]

    for name in policies(still(StepRates.of_target(seconds))):
        lengths = []
        for block in (one, other):
            policy = policies(still(StepRates.of_target(seconds)))[name]
            policy = policy.fresh() if isinstance(policy, RoundPolicy) else policy
            for tokens in earlier:
                length, survival = drafted_length(policy, tokens, confidence, 4)
                if isinstance(policy, RoundPolicy):
                    policy.end_round(outcome(survival, length, length // 2, limit=len(survival)))
            lengths.append(drafted_length(policy, block, confidence, 4)[0])
        same = next((k for k in range(4) if one[k] != other[k]), 4)
        # x_1..x_same agree, so decisions on x_1..x_{same + 1} do too.
        assert min(lengths[0], same + 1) == min(lengths[1], same + 1), name


survival_rows = st.lists(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None)
@given(survival_rows, st.floats(0.1, 5.0), st.floats(0.01, 2.0))
def test_algorithm_1_is_optimal_on_smooth_curves(conditional, base, slope):
    """Against every choice of lengths, R <= 4 requests of γ <= 4."""
    survival = [list(itertools.accumulate(row, lambda a, b: a * b)) for row in conditional]

    def seconds(size):
        return base + slope * size

    def theta(lengths):
        tokens = sum(1 + sum(row[:n]) for row, n in zip(survival, lengths))
        return tokens / seconds(len(survival) + sum(lengths))

    best = max(theta(lengths) for lengths in itertools.product(*(range(len(row) + 1) for row in survival)))
    assert theta(prefix_lengths(survival, seconds)) == pytest.approx(best)


def test_algorithm_1_stops_early_on_a_jagged_curve():
    def seconds(size):
        return JAGGED.measured(size, 1)

    survival = [[0.5, 0.45, 0.4, 0.36, 0.33, 0.3, 0.27]]
    assert prefix_lengths(survival, seconds, early_stop=True) == [0]
    assert prefix_lengths(survival, seconds, early_stop=False) == [7]


def test_one_request_is_scheduled_as_the_batch_form_does():
    smooth = StepRates.of_target([1.0, 1.2, 1.4, 1.6, 1.8])
    for conditional in itertools.product([0.1, 0.4, 0.9], repeat=4):
        survival = list(itertools.accumulate(conditional, lambda a, b: a * b))
        for rates in (smooth, JAGGED):
            policy = ThroughputScheduler(still(rates))
            length, _ = drafted_length(policy, [0] * 4, lambda prefix, c=conditional: c[len(prefix)], 4)
            assert [length] == prefix_lengths([survival], lambda b, r=rates: r.cost(b, 10))


def simulated_rate(policy, conditional, rates, rounds=200, limit=7) -> float:
    """Expected tokens per second where every round has the same confidences, and they are right."""
    tokens = seconds = 0.0
    for _ in range(rounds):
        length, survival = drafted_length(policy, [0] * limit, lambda prefix: conditional[len(prefix)], limit)
        expected = 1.0 + sum(survival[:length])
        rows = rates.padded_rows(length + 1, 10)
        cost = rates.measured(rows, 10)
        tokens, seconds = tokens + expected, seconds + cost
        if isinstance(policy, RoundPolicy):
            accepted = round(expected - 1)
            values = {"committed": expected, "rows": rows, "verify_seconds": cost, "seconds": cost}
            policy.end_round(outcome(survival, length, accepted, limit=limit, **values))
    return tokens / seconds


CONFIDENCES = {"low": [0.2] * 7, "rising": [0.35] + [0.9] * 6, "even": [0.5] * 7, "high": [0.8] * 7, "sure": [0.95] * 7}


@pytest.mark.parametrize("conditional", CONFIDENCES.values(), ids=CONFIDENCES)
def test_lookahead_is_not_trapped_by_a_jagged_curve(conditional):
    """On the measured table it reaches the best fixed length, plain decoding included."""
    rates = still(JAGGED)
    fixed = max(simulated_rate(FixedLength(n), conditional, rates) for n in range(8))
    lookahead = LookaheadScheduler(rates, Expectation(conditional)).fresh()
    assert simulated_rate(lookahead, conditional, rates) >= 0.97 * fixed


def test_algorithm_1_is_trapped_where_lookahead_is_not():
    """A first token that does not pay hides better ones behind it, even where a forward may be padded."""
    rates, conditional = still(JAGGED), CONFIDENCES["rising"]
    lookahead = LookaheadScheduler(rates, Expectation(conditional)).fresh()
    trapped = simulated_rate(ThroughputScheduler(rates), conditional, rates)
    assert trapped == pytest.approx(1 / 0.062)
    assert simulated_rate(lookahead, conditional, rates) > 1.5 * trapped


def test_the_gate_parks_a_useless_drafter_and_looks_again():
    rates = still(StepRates([1, 2, 3], [1], [[1.0, 1.1, 1.2]], [[0.0] * 3], [0.3, 0.3], 0.0))
    policy = LookaheadScheduler(rates).fresh()
    drafted = []
    for i in range(300):
        limit = policy.begin_round(10 + i, 2)
        survival = [0.5] if limit else []
        length = int(bool(limit) and policy.admit(1, survival))
        policy.end_round(outcome(survival, length, 0, limit=limit))
        drafted.append(bool(limit))
    late = drafted[60:]
    assert 0 < sum(late) <= 8  # probes at growing distances, never silent for good
    assert drafted.count(False) > 200
    # It finds back when drafts become good.
    for i in range(200):
        limit = policy.begin_round(400 + i, 2)
        survival, length = [], 0
        while length < limit:
            survival.append(0.95 ** (length + 1))
            if not policy.admit(length + 1, survival):
                break
            length += 1
        policy.end_round(outcome(survival, length, length, limit=limit))
    assert policy.begin_round(900, 2) == 2


@pytest.mark.parametrize("reads_survival", [True, False], ids=["with a head", "without one"])
def test_a_probe_learns_from_what_it_drafts(reads_survival):
    """Rejections that park it do not silence it: a probe verifies a token even where that does not seem to pay."""
    rates = still(StepRates([1, 2, 3], [1], [[1.0, 1.1, 1.2]], [[0.0] * 3], [0.3, 0.3], 0.0))
    policy = LookaheadScheduler(rates, reads_survival=reads_survival).fresh()
    good, verified = [], []
    for i in range(400):
        limit = policy.begin_round(10 + i, 2)
        survival, length = [], 0
        while length < limit:
            survival.append(0.5 ** (length + 1))
            if not policy.admit(length + 1, survival if reads_survival else []):
                break
            length += 1
        accepted = 0 if i < 100 else length
        known = survival if reads_survival else []
        policy.end_round(outcome(known, length, accepted, limit=limit))
        (verified if i < 100 else good).append(length)
    assert sum(verified[20:]) > 0
    assert sum(good[-20:]) == 40


def test_a_guarded_length_parks_a_useless_drafter():
    policy, drafted = GuardedLength(3).fresh(), []
    for i in range(200):
        limit = policy.begin_round(10 + i, 4)
        drafted.append(limit)
        policy.end_round(outcome([], limit, 0, limit=limit))
    assert drafted[:16] == [3] * 16
    assert 0 < sum(map(bool, drafted[16:])) <= 7
    while not policy.begin_round(300, 4):
        policy.end_round(outcome([], 0, 0, limit=0))
    policy.end_round(outcome([], 3, 1, limit=3))
    assert [policy.begin_round(301 + i, 4) for i in range(3)] == [3, 3, 3]


def test_a_policy_is_fresh_for_each_generation():
    for policy in policies(still(StepRates.of_target([1.0, 1.5, 2.0]))).values():
        if isinstance(policy, RoundPolicy):
            policy.begin_round(5, 2)
            policy.end_round(outcome([0.5, 0.2], drafted=1))
            assert policy.fresh() is not policy
            assert policy.fresh().step_rates is policy.step_rates


def test_lagged_uses_what_it_saw_two_rounds_before():
    policy = LaggedScheduler(still(StepRates.of_target([1.0, 1.2, 1.4, 1.6, 1.8]))).fresh()
    assert policy.begin_round(5, 4) == 4
    policy.end_round(outcome([0.1, 0.01]))
    assert policy.begin_round(5, 4) == 4  # still nothing from two rounds back
    policy.end_round(outcome([0.95, 0.9, 0.85]))
    assert policy.begin_round(5, 4) == 1  # the bad round; a block of one keeps the survival in sight
    assert not policy.admit(1, [0.99])
    policy.end_round(outcome([0.99]))
    assert policy.begin_round(5, 4) == 4  # the good one


def test_bad_arguments():
    with pytest.raises(ValueError, match="lag must be at least 1"):
        LaggedScheduler(JAGGED, lag=0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        ConfidenceThreshold(1.5)
    with pytest.raises(ValueError, match="at least 0"):
        FixedLength(-1)
