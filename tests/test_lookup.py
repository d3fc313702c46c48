"""Drafts copied from the text: finding them, when they are taken, and that the output stays the target's own."""

from __future__ import annotations

import pytest
import torch
from conftest import make_drafter, make_target, prompt_ids

from dspark_hf import Expectation, FixedLength, LookaheadScheduler, StepRates
from dspark_hf.decoding.prompt_lookup import MOST_TOKENS, PromptLookup
from dspark_hf.scheduling.acceptance_estimate import CopyEstimate
from dspark_hf.scheduling.policy import Plan, SequenceState


def rates(*seconds: float, draft: float = 0.1) -> StepRates:
    rows = list(range(1, len(seconds) + 1))
    table = StepRates(rows, [1], [list(seconds)], [[0.0] * len(rows)], [draft] * len(rows), 0.0)
    table.live = False
    return table


def text_of(*tokens: int, banned=()) -> PromptLookup:
    lookup = PromptLookup(banned)
    lookup.extend(tokens, learn=False)
    return lookup


def test_the_longest_earlier_run_is_continued():
    lookup = text_of(1, 2, 3, 9, 8, 2, 3, 7, 1, 2, 3)
    copy = lookup.propose(4)
    assert (copy.tokens, copy.match) == ([9, 8, 2, 3], 3)  # not 7, which followed two equal tokens only
    assert text_of(5, 2, 3, 9, 6, 2, 3, 7, 1, 2, 3).propose(1).tokens == [7]  # of equal runs the latest
    assert text_of(1, 2, 3, 4).propose(3) is None
    assert text_of(1).propose(3) is None
    assert text_of().propose(3) is None
    assert lookup.propose(0) is None


def test_a_copy_that_reaches_the_end_goes_on_with_itself():
    assert text_of(4, 5, 6, 4, 5, 6, 4, 5).propose(7).tokens == [6, 4, 5, 6, 4, 5, 6]
    assert text_of(3, 3, 3).propose(4).tokens == [3, 3, 3, 3]


def test_placeholders_are_never_proposed():
    assert text_of(1, 2, 6, 50, 7, 1, 2, banned={50}).propose(5).tokens == [6]
    assert text_of(1, 2, 50, 7, 1, 2, banned={50}).propose(5) is None


def test_what_is_committed_teaches_the_belief():
    estimate = CopyEstimate()
    before = estimate.survival(2, 4)
    assert before == sorted(before, reverse=True)
    assert estimate.chance(1) == 0.0
    for _ in range(30):
        estimate.learn(2, False)
    assert estimate.chance(2) < 0.1
    assert estimate.chance(9) == CopyEstimate().chance(9)  # other lengths are their own
    lookup = text_of(1, 2, 3, 1, 2)
    chance = lookup.estimate.chance(2)
    lookup.extend([3])
    assert lookup.estimate.chance(2) > chance
    learned = text_of(1, 2, 3, 1, 2, 3, 1, 2, 4)
    assert learned.estimate.chance(2) == CopyEstimate().chance(2)  # a prompt teaches nothing


def test_a_copy_is_taken_where_it_promises_more():
    def plan(expectation, copy):
        scheduler = LookaheadScheduler(rates(1.0, 1.1, 1.2, 1.3), expectation).fresh()
        return scheduler.plan([SequenceState(0, depth=5, limit=2, copy=copy)])[0]

    unsure, confident = Expectation([0.1, 0.1]), Expectation([0.99, 0.99], 0.9, 1e4)
    assert plan(unsure, [0.9, 0.8, 0.7]) == Plan(3, copied=True)
    assert not plan(unsure, [0.01, 0.01, 0.0]).copied
    assert not plan(confident, [0.3]).copied


def repeating_prompt(times: int = 3) -> torch.LongTensor:
    return prompt_ids(9).repeat(1, times)


@pytest.mark.parametrize("vocabulary", [None, 10], ids=["full", "reduced"])
def test_copies_leave_greedy_output_as_it_is(vocabulary):
    copied = 0
    for seed in range(6):
        target = make_target(seed=seed)
        drafter = make_drafter(target, seed=50 + seed, draft_vocab_size=vocabulary)
        drafter.options.policy = LookaheadScheduler(rates(1.0, 1.05, 1.1, 1.15, 1.2), Expectation([0.1, 0.1]))
        ids = repeating_prompt()
        plain = target.generate(ids, max_new_tokens=40, do_sample=False)
        assert torch.equal(plain, target.generate(ids, max_new_tokens=40, do_sample=False, assistant_model=drafter))
        stats = drafter.last_generation
        copied += stats.copied
        assert stats.copied == sum(r.drafted for r in stats.history if r.copied)
        assert stats.copied_rounds == sum(r.copied for r in stats.history)
        assert all(r.drafted <= MOST_TOKENS for r in stats.history)
    assert copied > 0


def test_copies_can_be_switched_off_and_need_the_scheduler():
    target = make_target()
    drafter = make_drafter(target)
    scheduler = LookaheadScheduler(rates(1.0, 1.05, 1.1, 1.15, 1.2), Expectation([0.1, 0.1]))
    for admission, wanted in ((scheduler, True), (FixedLength(3), True), (scheduler, False)):
        drafter.options.policy, drafter.options.lookup_drafts = admission, wanted
        target.generate(repeating_prompt(), max_new_tokens=30, do_sample=False, assistant_model=drafter)
        copied = drafter.last_generation.copied
        assert (copied > 0) == (wanted and admission is scheduler)


def test_room_at_the_end_is_kept():
    target = make_target()
    drafter = make_drafter(target)
    drafter.options.policy = LookaheadScheduler(rates(1.0, 1.01, 1.02, 1.03, 1.04), Expectation([0.1, 0.1]))
    for budget in range(1, 8):
        output = target.generate(repeating_prompt(), max_new_tokens=budget, do_sample=False, assistant_model=drafter)
        assert output.shape[1] == 27 + budget
