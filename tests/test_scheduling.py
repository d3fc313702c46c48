"""Scheduling inside `generate()` and the engine: which policy decides, what it is shown, padding, back-off, records."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import make_drafter, make_target, prompt_ids
from test_policies import table

from dspark_hf import (
    BatchEngine,
    ConfidenceThreshold,
    DSparkDraftModel,
    FixedLength,
    GuardedLength,
    LaggedScheduler,
    LookaheadScheduler,
    ThroughputScheduler,
    generate_batch,
)
from dspark_hf.scheduling.policy import Plan, Policy


def costs(*seconds, draft=0.0):
    return table(dict(enumerate(seconds, start=1)), draft)


class Planned(Policy):
    """Asks for `tokens` whatever there is room for, from round `first` on; forwards are padded by `step_rates`."""

    def __init__(self, tokens, step_rates=None, first=0):
        self.tokens, self.step_rates, self.first, self.rounds = tokens, step_rates, first, 0

    def plan(self, sequences, prefill_rows=0):
        self.rounds += 1
        return [Plan(self.tokens if s.limit and self.rounds > self.first else 0) for s in sequences]


def calibrated(target, **overrides) -> DSparkDraftModel:
    settings = {
        "confidence_temperatures": [1.2, 1.1, 1.0, 1.0],
        "confidence_shifts": [-0.2, 0.0, 0.1, 0.0],
        "expected_acceptance": [0.6, 0.5, 0.5, 0.5],
        "acceptance_persistence": 0.4,
    }
    drafter = make_drafter(target, **settings | overrides)
    drafter.options.step_rates = costs(1.0, 1.1, 1.2, 1.3, 1.4)
    return drafter


def generate(target, drafter=None, tokens=24, **arguments):
    return target.generate(prompt_ids(), max_new_tokens=tokens, do_sample=False, assistant_model=drafter, **arguments)


def test_which_policy_decides(target):
    drafter, rates = make_drafter(target), costs(1.0, 1.1, 1.2, 1.3, 1.4)
    drafter.options.step_rates = rates
    for change, wanted in (
        (lambda: None, GuardedLength),
        (lambda: setattr(drafter, "config", calibrated(target).config), LookaheadScheduler),
        (lambda: setattr(drafter.generation_config, "assistant_confidence_threshold", 0.3), ConfidenceThreshold),
        (lambda: setattr(drafter.options, "policy", FixedLength(2)), FixedLength),
        (lambda: setattr(drafter.options, "policy", LaggedScheduler(rates, lag=3)), LaggedScheduler),
        (lambda: setattr(drafter.options, "policy", ThroughputScheduler(rates)), ThroughputScheduler),
    ):
        change()
        generate(target, drafter)
        assert drafter.last_generation.policy == wanted.__name__
        engine = BatchEngine(target, drafter, rates)
        assert type(engine.policy) is wanted and engine.stats.policy == wanted.__name__
        assert engine.policy.step_rates in (None, rates)
    drafter.options.policy, drafter.generation_config.num_assistant_tokens = None, 0
    drafter.generation_config.assistant_confidence_threshold = 0.0
    generate(target, drafter)
    assert sum(drafter.last_generation.drafted) == 0


def test_the_cap_holds_for_every_policy(target):
    drafter = calibrated(target)
    drafter.generation_config.num_assistant_tokens = 2
    free = costs(1.0, 1.0, 1.0, 1.0, 1.0)
    for policy in (None, LookaheadScheduler(free), LaggedScheduler(free), ThroughputScheduler(free), FixedLength(9)):
        drafter.options.policy = policy
        generate(target, drafter)
        assert max(r.drafted for r in drafter.last_generation.history) <= 2  # copies too
        assert sum(drafter.last_generation.drafted) > 0
        engine = BatchEngine(target, drafter)
        engine.add(prompt_ids(5)[0], max_new_tokens=9, do_sample=False)
        assert max(r.drafted for o in engine.run() for r in o.stats.history) <= 2


@pytest.mark.parametrize("policy", [FixedLength(0), ConfidenceThreshold(1.0)], ids=["no-length", "sure-ones-alone"])
def test_what_drafts_nothing_does_not_pay_for_the_parallel_stage(target, policy):
    drafter = make_drafter(target)
    drafter.options.policy = policy
    assert torch.equal(generate(target, tokens=60), generate(target, drafter, tokens=60))
    stats = drafter.last_generation
    assert sum(stats.drafted) == 0
    assert sum(r.planned > 0 for r in stats.history) <= (8 if policy.reads_survival else 0)
    assert stats.parked_rounds >= stats.rounds - 9  # in the last one there is no room


class Watching(ConfidenceThreshold):
    """Checks at each decision that nothing of the token decided on, or after it, is there to be read."""

    decisions: list[int] = []

    def plan(self, sequences, prefill_rows=0):
        self.plans = super().plan(sequences, prefill_rows)
        return self.plans

    def admit(self, position, open_sequences, survival):
        assert len(survival) == len(self.plans)
        assert all(len(survival[r]) == position for r in open_sequences)
        assert all(len(s) <= position for s in survival)
        assert all(self.plans[r].tokens >= position for r in open_sequences)
        self.decisions.extend(open_sequences)
        return super().admit(position, open_sequences, survival)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_policy_is_told_what_is_known_and_no_more(deferred):
    target = make_target(vocab_size=8)
    drafter = make_drafter(target)
    drafter.options.policy, drafter.options.deferred_admission = Watching(0.3, cumulative=True), deferred
    prompts = [prompt_ids(n, 8, n) for n in (5, 12, 20)]
    for run in (
        lambda: [target.generate(p, assistant_model=drafter, max_new_tokens=15, do_sample=True) for p in prompts],
        lambda: generate_batch(target, drafter, [p[0] for p in prompts], max_new_tokens=15, do_sample=True),
    ):
        Watching.decisions.clear()
        run()
        assert len(Watching.decisions) > 20


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_padded_verification_gives_the_same_outputs(family):
    """A table on which two and three rows cost more than five: every forward is padded."""
    target = make_target(family, attn_implementation="eager")
    drafter = calibrated(target)
    drafter.options.policy = Planned(2, costs(1.0, 2.0, 2.0, 1.9, 1.2))
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
    drafter.options.policy = LookaheadScheduler(costs(1.0, 2.0, 2.0, 1.9, 0.9), gate=False)
    assert torch.equal(generate(target, tokens=cap), generate(target, drafter, tokens=cap))
    assert max(r.rows for r in drafter.last_generation.history) <= 5


def test_a_policy_that_asks_for_too_much_gets_what_there_is_room_for():
    target = make_target()
    drafter = calibrated(target)
    drafter.options.policy = Planned(99)
    assert torch.equal(generate(target, tokens=11), generate(target, drafter, tokens=11))
    assert drafter.last_generation.drafted[3] > 0


def test_padding_in_a_static_cache(target):
    """A static cache has no place beyond the generation's length."""
    drafter = calibrated(target)
    drafter.options.policy = Planned(2, costs(1.0, 2.0, 2.0, 1.9, 1.2))
    for tokens in range(3, 12):
        plain = generate(target, tokens=tokens)
        fast = generate(target, drafter, tokens=tokens, cache_implementation="static")
        assert torch.equal(plain, fast)


def test_a_useless_drafter_is_parked(target):
    drafter = calibrated(target)
    drafter.options.step_rates = costs(1.0, 1.3, 1.6, 1.9, 2.2, draft=0.4)
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
    drafter, drafts = make_drafter(target), []
    for policy in (FixedLength(4), Planned(4, first=9)):
        drafter.options.policy = policy
        generate(target, drafter, tokens=30)
        drafts.append({r.depth: r.confidence_logits for r in drafter.last_generation.history if r.drafted == 4})
    both = drafts[0].keys() & drafts[1].keys()
    assert len(both) > 5
    for depth in both:
        torch.testing.assert_close(drafts[0][depth], drafts[1][depth])


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
    drafter.options.policy = ConfidenceThreshold(0.0)
    generate(target, drafter)
    record = next(r for r in drafter.last_generation.history if r.drafted == 4)
    scaled = record.confidence_logits.double() / torch.tensor([1.2, 1.1, 1.0, 1.0]).double()
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
