"""Scheduling inside `generate()`: which policy decides, padding, parking, and what is recorded."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import make_drafter, make_target, prompt_ids

from dspark_hf import (
    ConfidenceThreshold,
    DSparkDraftModel,
    FixedLength,
    LaggedScheduler,
    LookaheadScheduler,
    StepRates,
    ThroughputScheduler,
)


def table(*seconds, draft=0.0) -> StepRates:
    rates = StepRates(
        list(range(1, len(seconds) + 1)), [1], [list(seconds)], [[0.0] * len(seconds)], [draft] * len(seconds), 0.0
    )
    rates.live = False
    return rates


class TwoTokens:
    """Always two tokens, with step rates, so that forwards are padded."""

    reads_survival = False

    def __init__(self, step_rates):
        self.step_rates = step_rates

    def fresh(self):
        return self

    def begin_round(self, depth, limit):
        return min(limit, 2)

    def admit(self, position, survival_so_far):
        return True

    def end_round(self, outcome):
        pass


def calibrated(target, **overrides) -> DSparkDraftModel:
    settings = {
        "confidence_temperatures": [1.2, 1.1, 1.0, 1.0],
        "confidence_shifts": [-0.2, 0.0, 0.1, 0.0],
        "expected_acceptance": [0.6, 0.5, 0.5, 0.5],
        "acceptance_persistence": 0.4,
    }
    drafter = make_drafter(target, **settings | overrides)
    drafter.step_rates = table(1.0, 1.1, 1.2, 1.3, 1.4)
    return drafter


def generate(target, drafter=None, tokens=24, **arguments):
    return target.generate(prompt_ids(), max_new_tokens=tokens, do_sample=False, assistant_model=drafter, **arguments)


def test_which_policy_decides(target):
    drafter = make_drafter(target)
    for change, wanted in (
        (lambda: None, "GuardedLength"),
        (lambda: setattr(drafter, "config", calibrated(target).config), "LookaheadScheduler"),
        (lambda: setattr(drafter.generation_config, "assistant_confidence_threshold", 0.3), "ConfidenceThreshold"),
        (lambda: setattr(drafter, "admission", ThroughputScheduler(drafter.step_rates)), "ThroughputScheduler"),
    ):
        drafter.step_rates = table(1.0, 1.1, 1.2, 1.3, 1.4)
        change()
        generate(target, drafter)
        assert drafter.last_generation.policy == wanted
    drafter.admission, drafter.generation_config.num_assistant_tokens = None, 0
    drafter.generation_config.assistant_confidence_threshold = 0.0
    generate(target, drafter)
    assert sum(drafter.last_generation.drafted) == 0


def test_the_cap_holds_for_every_policy(target):
    drafter = calibrated(target)
    drafter.generation_config.num_assistant_tokens = 2
    free = table(1.0, 1.0, 1.0, 1.0, 1.0)
    for policy in (None, LookaheadScheduler(free), LaggedScheduler(free), ThroughputScheduler(free), FixedLength(9)):
        drafter.admission = policy
        generate(target, drafter)
        assert max(r.drafted for r in drafter.last_generation.history) <= 2  # copies too
        assert sum(drafter.last_generation.drafted) > 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_padded_verification_gives_the_same_outputs(family):
    """A table on which two and three rows cost more than five: every forward is padded."""
    target = make_target(family, attn_implementation="eager")
    drafter = calibrated(target)
    drafter.admission = TwoTokens(table(1.0, 2.0, 2.0, 1.9, 1.2))
    ask = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ask |= {"output_hidden_states": True, "output_attentions": True}
    plain, fast = generate(target, **ask), generate(target, drafter, **ask)
    assert sum(r.rows == 5 and r.drafted == 2 for r in drafter.last_generation.history) > 5
    assert torch.equal(plain.sequences, fast.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(getattr(plain, name), getattr(fast, name), strict=True):
            torch.testing.assert_close(a, b)
    for name in ("hidden_states", "attentions"):
        for step_a, step_b in zip(getattr(plain, name), getattr(fast, name), strict=True):
            for a, b in zip(step_a, step_b, strict=True):
                if a.shape == b.shape:  # a sliding layer's window may hold a few more keys
                    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cap", [3, 6])
def test_padding_stays_inside_the_length_limit(cap):
    """The last rounds have no room for padding beyond what the generation may hold."""
    target = make_target()
    drafter = calibrated(target)
    drafter.admission = LookaheadScheduler(table(1.0, 2.0, 2.0, 1.9, 0.9), gate=False)
    assert torch.equal(generate(target, tokens=cap), generate(target, drafter, tokens=cap))
    assert max(r.rows for r in drafter.last_generation.history) <= 5


def test_a_policy_that_asks_for_too_much_gets_what_there_is_room_for():
    target = make_target()
    drafter = calibrated(target)
    drafter.admission = TwoTokens(None)
    drafter.admission.begin_round = lambda depth, limit: 99
    assert torch.equal(generate(target, tokens=11), generate(target, drafter, tokens=11))
    assert drafter.last_generation.drafted[3] > 0


def test_padding_in_a_static_cache(target):
    """A static cache has no place beyond the generation's length."""
    drafter = calibrated(target)
    drafter.admission = TwoTokens(table(1.0, 2.0, 2.0, 1.9, 1.2))
    for tokens in range(3, 12):
        plain = generate(target, tokens=tokens)
        fast = generate(target, drafter, tokens=tokens, cache_implementation="static")
        assert torch.equal(plain, fast)


def test_a_useless_drafter_is_parked(target):
    drafter = calibrated(target)
    drafter.step_rates = table(1.0, 1.3, 1.6, 1.9, 2.2, draft=0.4)
    drafter.config.expected_acceptance = [0.02] * 4
    assert torch.equal(generate(target, tokens=60), generate(target, drafter, tokens=60))
    stats = drafter.last_generation
    assert stats.parked_rounds > 40
    assert stats.rounds > stats.parked_rounds  # and probed
    assert any(r.planned and not r.parked for r in stats.history)
    torch.manual_seed(0)
    sampled = target.generate(prompt_ids(), max_new_tokens=60, do_sample=True, assistant_model=drafter)
    assert sampled.shape[1] == 67


def test_a_context_kept_while_parked_is_not_lost(target):
    """After many plain steps the drafter still drafts what it would have drafted all along."""
    drafter = make_drafter(target)

    class Late:
        reads_survival = False
        step_rates = table(1.0, 1.0, 1.0, 1.0, 1.0)

        def fresh(self):
            self.rounds = 0
            return self

        def begin_round(self, depth, limit):
            self.rounds += 1
            return limit if self.rounds > 9 else 0

        def admit(self, position, survival_so_far):
            return True

        def end_round(self, outcome):
            pass

    drafts = {}
    original = DSparkDraftModel.draft
    for name, policy in (("always", FixedLength(4)), ("late", Late())):
        drafts[name] = {}

        def draft(self, prefix, *args, name=name, **kwargs):
            block = original(self, prefix, *args, **kwargs)
            drafts[name][prefix.shape[1]] = block.token_ids.tolist()
            return block

        DSparkDraftModel.draft = draft
        drafter.admission = policy
        try:
            generate(target, drafter, tokens=30)
        finally:
            DSparkDraftModel.draft = original
    both = [n for n in drafts["late"] if n in drafts["always"] and len(drafts["late"][n]) == len(drafts["always"][n])]
    assert len(both) > 5
    assert all(drafts["late"][n] == drafts["always"][n] for n in both)


def test_rounds_are_recorded(target):
    drafter = calibrated(target)
    generate(target, drafter)
    stats = drafter.last_generation
    assert len(stats.history) == stats.rounds
    assert sum(r.drafted for r in stats.history) == sum(stats.drafted) + stats.copied
    assert sum(r.accepted for r in stats.history) == sum(stats.accepted) + stats.copied_accepted
    for record in stats.history:
        assert record.copied or len(record.survival) in (record.drafted, record.drafted + 1)
        assert all(a >= b for a, b in zip(record.survival, record.survival[1:]))
    json.dumps(stats.to_dict())
    assert 0 < stats.scheduling_seconds < stats.total_seconds


def test_survival_is_calibrated(target):
    """c_k = σ(logit_k / T_k + s_k), and the raw logits stay what the head gives."""
    drafter = calibrated(target)
    drafter.admission = ConfidenceThreshold(0.0)
    generate(target, drafter)
    record = next(r for r in drafter.last_generation.history if r.drafted == 4)
    scaled = record.confidence_logits[0].double() / torch.tensor([1.2, 1.1, 1.0, 1.0]).double()
    wanted = torch.sigmoid(scaled + torch.tensor([-0.2, 0.0, 0.1, 0.0]).double()).cumprod(0)
    torch.testing.assert_close(torch.tensor(record.survival).double(), wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "change",
    [
        {"confidence_temperatures": [1.0]},
        {"confidence_temperatures": [1.0, 0.0, 1.0, 1.0]},
        {"confidence_shifts": [0.0] * 5},
        {"expected_acceptance": [0.5, 0.5, 0.5, 1.5]},
        {"acceptance_persistence": -0.1},
    ],
)
def test_bad_calibration_in_a_config(target, change):
    with pytest.raises(ValueError, match="DSparkConfig"):
        calibrated(target, **change)


def test_calibration_travels_with_the_drafter(target, tmp_path):
    calibrated(target).save_pretrained(tmp_path)
    again = DSparkDraftModel.from_pretrained(tmp_path)
    assert again.config.confidence_temperatures == [1.2, 1.1, 1.0, 1.0]
    assert again.config.acceptance_persistence == 0.4
