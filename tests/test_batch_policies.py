"""Policies for many requests: how the rows of one verification are shared out, and what may be known when deciding."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
from conftest import make_drafter, make_target, prompt_ids
from dspark_hf.scheduling.admission import RoundOutcome, prefix_lengths
from dspark_hf.scheduling.batch import BatchLagged, BatchRequest, BatchThroughput, PerRequest, StepOutcome
from dspark_hf.scheduling.batch_lookahead import BatchLookahead
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_hf import (
    BatchEngine,
    ConfidenceThreshold,
    Expectation,
    FixedLength,
    GuardedLength,
    LaggedScheduler,
    LookaheadScheduler,
    StepRates,
    ThroughputScheduler,
    generate_batch,
)

EXPECTED = Expectation([0.7, 0.6, 0.5, 0.5, 0.4, 0.4, 0.4], 0.4)
SMOOTH = {b: 1.0 + 0.1 * (b - 1) for b in range(1, 9)}
STEEP = {b: 1.0 + 0.4 * (b - 1) for b in range(1, 9)}
JAGGED = {1: 0.062, 2: 0.096, 3: 0.119, 4: 0.096, 6: 0.086, 8: 0.091}
FLAT = dict.fromkeys([1, 64], 1.0)
BY_ROWS = {1: 1.0, 64: 64.0}
BENDING = {b: 1.0 + 0.06 * b + 0.004 * b * b for b in range(1, 33)}


def table(seconds: dict[int, float], draft: float = 0.0, step: float = 0.0) -> StepRates:
    """A table that live rounds don't change; drafting costs the same for any number of requests."""
    rows = list(seconds)
    rates = StepRates(rows, [1], [list(seconds.values())], [[0.0] * len(rows)], [draft] * 8, step)
    rates.live = False
    return rates


def asks(count: int, limit: int = 4, first: int = 0) -> list[BatchRequest]:
    return [BatchRequest(i, 10, limit) for i in range(first, first + count)]


@dataclass
class Step:
    """One step as the engine goes through it, with c_{r,k} = `confidences[r][k]` and `stands(r, k)` for acceptance."""

    policy: object
    requests: list[BatchRequest]
    confidences: list[list[float]]
    prefill_rows: int = 0
    stands: object = staticmethod(lambda r, k: True)

    def __post_init__(self) -> None:
        count = len(self.requests)
        self.limits = self.policy.begin_step(self.requests, self.prefill_rows)
        assert all(0 <= n <= r.limit for n, r in zip(self.limits, self.requests))
        self.drafted, survival = [0] * count, [[] for _ in range(count)]
        alive = list(range(count))
        for k in range(max(self.limits)):
            alive = [r for r in alive if self.limits[r] > k]
            for r in alive:
                survival[r].append((survival[r][-1] if k else 1.0) * self.confidences[r][k])
            alive = [r for r, goes_on in zip(alive, self.policy.admit(k + 1, alive, survival)) if goes_on]
            for r in alive:
                self.drafted[r] += 1
            if not alive:
                break
        self.verified = self.policy.select(survival, self.drafted)
        assert all(0 <= v <= d for v, d in zip(self.verified, self.drafted))
        accepted = [next((k for k in range(n) if not self.stands(r, k)), n) for r, n in enumerate(self.verified)]
        self.committed = [n + 1 for n in accepted]
        rows = (count + sum(self.verified) + self.prefill_rows, self.prefill_rows)
        lists = (self.limits, self.verified, accepted, self.committed, survival)
        self.policy.end_step(StepOutcome(self.requests, *lists, *rows, count, 0.0, 1.0, 1.0))


# -- one policy for each request ---------------------------------------------------------------------------------------


def test_each_request_has_a_policy_of_its_own():
    policy = PerRequest(GuardedLength(2, patience=3))
    parked = {0: 0, 1: 0}
    for _ in range(12):
        step = Step(policy, asks(2), [[0.5] * 4] * 2, stands=lambda r, k: r == 1)
        for r, n in enumerate(step.limits):
            parked[r] += n == 0
            assert n in (0, 2)
    assert parked[0] > 4 and parked[1] == 0
    policy.forget(0)
    assert Step(policy, asks(2), [[0.5] * 4] * 2).drafted == [2, 2]
    for r in (0, 1, 7):
        policy.forget(r)
    assert not policy._own


def test_a_request_without_room_is_not_drafted_for():
    rates = table(SMOOTH)
    single = PerRequest(FixedLength(3)), PerRequest(GuardedLength(3))
    for policy in (*single, BatchThroughput(rates), BatchLagged(rates, lag=1), BatchLookahead(rates, EXPECTED)):
        requests = [BatchRequest(0, 10, 0), BatchRequest(1, 10, 2), BatchRequest(2, 10, 0)]
        for _ in range(3):
            step = Step(policy, requests, [[0.95] * 4] * 3)
            assert step.limits[0] == step.limits[2] == 0 and step.drafted[1] in (1, 2)
        assert Step(policy, requests[::2], [[]] * 2).limits == [0, 0]


# -- Algorithm 1 and its lagged form -----------------------------------------------------------------------------------

confidence_lists = st.lists(st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4), min_size=1, max_size=4)
increments = st.lists(st.floats(0.0, 1.0), min_size=24, max_size=24)
curves = increments.map(lambda added: {b: 1.0 + sum(added[:b]) for b in range(1, 25)})


@settings(max_examples=60, deadline=None)
@given(confidence_lists, curves, st.integers(0, 3))
def test_throughput_is_algorithm_1_for_all_requests(confidences, seconds, prefill_rows):
    survivals = [list(itertools.accumulate(c, lambda a, b: a * b)) for c in confidences]
    rates = table(seconds, draft=0.3, step=0.1)
    step = Step(BatchThroughput(rates), asks(len(confidences)), confidences, prefill_rows)
    assert step.drafted == [4] * len(confidences)
    draft = 0.3 + 4 * 0.1
    wanted = prefix_lengths(survivals, lambda b: draft + rates.cost(b + prefill_rows, 10))
    assert step.verified == wanted


def test_throughput_ranks_pairs_of_all_requests():
    """Four rows are cheap, the fifth is dear: the two places go to the tokens likeliest to stand, if the first pays."""
    rates = table({1: 1.0, 4: 1.0, 5: 9.0})
    for confidences, wanted in (
        ([[0.9, 0.9, 0.9], [0.5, 0.9, 0.9]], [2, 0]),
        ([[0.9, 0.4, 0.9], [0.5, 0.9, 0.9]], [1, 1]),
        ([[0.5, 0.9, 0.9], [0.9, 0.7, 0.1]], [0, 2]),
    ):
        assert Step(BatchThroughput(rates), asks(2, 3), confidences).verified == wanted
    late = table({1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0, 5: 2.0, 6: 2.0})
    assert Step(BatchThroughput(late), asks(2, 2), [[0.9, 0.9]] * 2).verified == [0, 0]


def test_prompts_that_are_read_beside_fill_the_forward():
    """With six rows of prompts the cheap part of the curve is over."""
    seconds = {1: 1.0, 7: 1.0, 8: 5.0, 20: 60.0}
    for policy in (BatchThroughput(table(seconds)), BatchLookahead(table(seconds), EXPECTED)):
        assert sum(Step(policy, asks(2), [[0.9] * 4] * 2).verified) == 5
        assert sum(Step(policy, asks(2), [[0.9] * 4] * 2, prefill_rows=6).verified) == 0


@pytest.mark.parametrize(("lag", "wanted"), [(1, [8, 8, 0, 8, 0, 0]), (2, [8, 8, 8, 0, 8, 0])])
def test_lagged_takes_its_budget_from_steps_before(lag, wanted):
    """Two requests whose confidences go up and down; where the budget is none, one token is drafted to look again."""
    policy = BatchLagged(table({b: 1.0 + 0.25 * b for b in range(1, 12)}), lag=lag)
    high, low = [[0.99] * 4] * 2, [[0.05] * 4] * 2
    steps = [Step(policy, asks(2), c) for c in (high, low, high, low, low, high)]
    assert [sum(step.verified) for step in steps] == wanted
    assert all(step.drafted == ([4, 4] if n else [1, 1]) for step, n in zip(steps, wanted))


def test_lagged_gives_its_budget_to_what_ranks_highest_now():
    """A budget of two, for other requests than those it was found with."""
    policy = BatchLagged(table({1: 1.0, 4: 1.0, 5: 9.0, 12: 80.0}), lag=1)
    Step(policy, asks(2), [[0.9, 0.6, 0.5, 0.4]] * 2)
    assert Step(policy, asks(2, 4, first=5), [[0.5] * 4, [0.9] * 4]).verified == [0, 2]
    assert Step(policy, asks(2, 4, first=7), [[0.5] * 4, [0.6, 0.1, 0.1, 0.1]]).verified == [1, 1]


def test_lagged_needs_a_lag():
    with pytest.raises(ValueError, match="lag"):
        BatchLagged(table(SMOOTH), lag=0)


@settings(max_examples=100, deadline=None)
@given(confidence_lists, st.data(), curves, st.booleans())
def test_whether_a_token_is_verified_is_told_by_what_came_before_it(confidences, data, seconds, lagged):
    """Other confidences after position k of a request leave the decision on its first k tokens as it was."""
    r = data.draw(st.integers(0, len(confidences) - 1))
    k = data.draw(st.integers(1, 4))
    changed = [list(c) for c in confidences]
    changed[r][k:] = data.draw(st.lists(st.floats(0.01, 1.0), min_size=4 - k, max_size=4 - k))
    found = []
    for values in (confidences, changed):
        policy = BatchLagged(table(seconds), lag=1) if lagged else BatchThroughput(table(seconds))
        if lagged:
            Step(policy, asks(2), [[0.8, 0.7, 0.6, 0.5], [0.4] * 4])
        step = Step(policy, asks(len(values)), values)
        found.append(min(step.verified[r], k))
    assert found[0] == found[1]


# -- the lookahead -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", [(0.0, 0.0), (0.1, 0.02)], ids=["free-drafts", "dear-drafts"])
@pytest.mark.parametrize("seconds", [SMOOTH, STEEP, JAGGED, FLAT], ids=["smooth", "steep", "jagged", "flat"])
def test_lookahead_decides_for_one_request_as_its_single_form(seconds, costs):
    """Mostly the same lengths in every round, and as many tokens in a second of the table."""
    costs = [c * seconds[1] for c in costs]
    single = LookaheadScheduler(table(seconds, *costs), EXPECTED)
    batch = BatchLookahead(table(seconds, *costs), EXPECTED)
    rates, rnd, same = table(seconds, *costs), random.Random(1), 0
    tokens, time = [0, 0], [0.0, 0.0]
    for _ in range(300):
        confidences = [min(max(rnd.gauss(0.6, 0.25), 0.02), 0.98) for _ in range(7)]
        stands = [rnd.random() < c for c in confidences]
        step = Step(batch, asks(1, 7), [confidences], stands=lambda r, k, stands=stands: stands[k])
        limit = single.begin_round(10, 7)
        length, survival = 0, []
        for c in confidences[:limit]:
            survival.append((survival[-1] if survival else 1.0) * c)
            if not single.admit(length + 1, list(survival)):
                break
            length += 1
        accepted = next((k for k in range(length) if not stands[k]), length)
        counts = (limit, length, accepted, accepted + 1)
        single.end_round(RoundOutcome(10, *counts, length + 1, 1, survival, 0.0, 1.0, 1.0))
        same += step.drafted[0] == length
        rounds = (limit, length, accepted + 1), (step.limits[0], step.drafted[0], step.committed[0])
        for i, (n, drafted, committed) in enumerate(rounds):
            tokens[i] += committed
            time[i] += rates.round_cost(n, drafted, drafted + 1, 10)
    assert same >= 0.75 * 300
    assert tokens[1] / time[1] > 0.97 * tokens[0] / time[0]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_lookahead_drafts_everything_where_rows_are_free(count):
    policy = BatchLookahead(table(FLAT), EXPECTED)
    for _ in range(4):
        step = Step(policy, asks(count), [[0.6] * 4] * count)
        assert step.verified == step.limits == [4] * count


@pytest.mark.parametrize("reads_survival", [True, False])
def test_lookahead_parks_where_rows_cost_as_much_as_tokens(reads_survival):
    """One request at a time looks again, at growing distances, and they take turns."""
    policy = BatchLookahead(table(BY_ROWS, draft=0.2), EXPECTED, reads_survival)
    probes = []
    for n in range(120):
        step = Step(policy, asks(3), [[0.6] * 4] * 3, stands=lambda r, k: False)
        assert sum(step.verified) == sum(step.limits) <= 1
        if sum(step.limits):
            probes.append((n, step.limits.index(1)))
    distances = [b - a for (a, _), (b, _) in itertools.pairwise(probes)]
    assert len(probes) >= 4
    assert distances == sorted(distances) and distances[-1] > 3 * distances[0]
    assert {r for _, r in probes[:3]} == {0, 1, 2}


def test_lookahead_gives_more_to_requests_that_do_better():
    policy = BatchLookahead(table(BENDING), EXPECTED)
    step = Step(policy, asks(3), [[0.95] * 4, [0.6] * 4, [0.1] * 4])
    assert step.verified[0] > step.verified[1] > step.verified[2] == 0


def test_lookahead_learns_of_each_request_alone():
    """Texts alike in confidence, but one whose drafts never stand: it gets less, the others are not disturbed."""
    policy = BatchLookahead(table(BENDING), EXPECTED)
    totals = [0, 0]
    for _ in range(20):
        step = Step(policy, asks(2), [[0.7] * 4] * 2, stands=lambda r, k: r == 0)
        totals = [t + v for t, v in zip(totals, step.verified)]
    assert totals[0] > 2 * totals[1]
    fresh = Step(policy, asks(3), [[0.7] * 4] * 3)
    assert fresh.verified[0] >= fresh.verified[2] > fresh.verified[1]
    for r in range(4):
        policy.forget(r)
    assert not policy._members
    assert policy.begin_step([], 5) == []


def test_the_budget_falls_as_requests_join():
    """The same texts on a curve that bends upwards."""
    budgets = []
    for count in (1, 2, 4, 8, 16):
        policy = BatchLookahead(table({b: 1.0 + 0.01 * b + 0.002 * b * b for b in range(1, 90)}), EXPECTED)
        steps = [Step(policy, asks(count), [[0.8, 0.7, 0.6, 0.5]] * count) for _ in range(10)]
        budgets.append(sum(sum(s.verified) for s in steps) / (10 * count))
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > 3 and budgets[-1] < 1


def test_lookahead_counts_the_rows_of_requests_whose_block_is_full():
    """Four rows are free and a fifth is dear: a short block of another request takes one of them."""
    policy = BatchLookahead(table({1: 1.0, 4: 1.0, 5: 9.0, 12: 80.0}), Expectation([0.9] * 4, 0.4))
    requests = [BatchRequest(0, 10, 4), BatchRequest(1, 10, 1)]
    step = Step(policy, requests, [[0.95] * 4, [0.98]])
    assert step.limits[0] > 1
    assert step.verified == [1, 1]


# -- in the engine -----------------------------------------------------------------------------------------------------


class Watching(PerRequest):
    """Checks at each decision that nothing of the token decided on, or after it, is there to be read."""

    decisions = 0

    def begin_step(self, requests, prefill_rows):
        self.limits = super().begin_step(requests, prefill_rows)
        return self.limits

    def admit(self, position, open_requests, survival):
        assert len(survival) == len(self.limits)
        assert all(len(survival[r]) == position for r in open_requests)
        assert all(len(s) <= position for s in survival)
        assert all(self.limits[r] >= position for r in open_requests)
        self.decisions += len(open_requests)
        return super().admit(position, open_requests, survival)


def test_a_policy_is_told_what_is_known_and_no_more():
    target = make_target(vocab_size=8)
    policy = Watching(ConfidenceThreshold(0.3, cumulative=True))
    prompts = [prompt_ids(n, 8, n)[0] for n in (5, 12, 20)]
    generate_batch(target, make_drafter(target), prompts, max_new_tokens=15, do_sample=False, engine={"policy": policy})
    assert policy.decisions > 20


def test_the_policy_is_that_of_the_drafter():
    target = make_target(vocab_size=8)
    drafter = make_drafter(target)
    rates = table(SMOOTH)
    for admission, wanted in (
        (None, PerRequest),
        (FixedLength(2), PerRequest),
        (ThroughputScheduler(rates), BatchThroughput),
        (LaggedScheduler(rates, lag=3), BatchLagged),
        (LookaheadScheduler(rates, EXPECTED), BatchLookahead),
    ):
        drafter.admission = admission
        engine = BatchEngine(target, drafter)
        assert type(engine.policy) is wanted and engine.stats.policy == wanted.__name__
        assert wanted is PerRequest or engine.policy.step_rates is rates
    calibration = {"confidence_temperatures": [1.0] * 4, "confidence_shifts": [0.0] * 4}
    drafter = make_drafter(target, **calibration, expected_acceptance=[0.6] * 4)
    engine = BatchEngine(target, drafter, rates)
    assert isinstance(engine.policy, BatchLookahead) and engine.policy.step_rates is rates
    drafter.generation_config.num_assistant_tokens = 1
    drafter.admission = LookaheadScheduler(table(FLAT), EXPECTED)
    engine = BatchEngine(target, drafter)
    engine.add(prompt_ids(5, 8)[0], max_new_tokens=9, do_sample=False)
    assert max(r.drafted for o in engine.run() for r in o.stats.history) == 1
