"""Drawing each position from the drafter's most likely tokens, with the head's bias for those alone."""

import pytest
import torch
from conftest import make_drafter, make_eagle3, make_target, prompt_ids
from test_losslessness import check_distribution
from transformers import DynamicCache

from dspark_hf import BatchEngine, ConfidenceThreshold, FixedLength
from dspark_hf.model.sampler_dspark import in_target_vocabulary


def features_of(drafter, count=5):
    width = len(drafter.config.target_layer_ids) * drafter.config.target_hidden_size
    return torch.randn(1, count, width, dtype=drafter.dtype, generator=torch.Generator().manual_seed(4))


def draft(drafter, ids=None, **arguments):
    return drafter.draft(prompt_ids(5) if ids is None else ids, features_of(drafter), DynamicCache(), **arguments)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("overrides", [{}, {"sample_from_anchor": False}, {"draft_vocab_size": 9}])
def test_logits_are_those_of_the_whole_vocabulary(target, head, overrides):
    drafter = make_drafter(target, head, **overrides)
    whole = draft(drafter)
    size = drafter.config.draft_vocab_size
    for count in (size, size + 5):
        same = draft(drafter, top_candidates=count)
        assert torch.equal(same.logits, whole.logits)
        assert (same.candidate_ids is None) == (size == 24)
    block = draft(drafter, top_candidates=4)
    assert block.logits.shape == block.candidate_ids.shape == (1, whole.logits.shape[1], 4)
    assert set(block.candidate_ids.flatten().tolist()) <= set(drafter.draft_token_ids().tolist())

    def scores(block):
        return in_target_vocabulary(block.logits, block.candidate_ids, 24, float("-inf"))

    # The first position has the same prefix in both.
    everywhere, spread = scores(whole)[0, 0], scores(block)[0, 0]
    known = torch.isfinite(spread)
    assert int(known.sum()) == 4
    torch.testing.assert_close(spread[known], everywhere[known])
    for k, token in enumerate(block.token_ids[0].tolist()):
        assert scores(block)[0, k].argmax() == token


@pytest.mark.parametrize("make", [make_eagle3, lambda target: make_drafter(target, "none")], ids=["eagle3", "no-head"])
def test_without_a_head_nothing_is_left_out(target, make):
    drafter = make(target)
    whole = draft(drafter)
    block = draft(drafter, top_candidates=2)
    assert torch.equal(block.logits, whole.logits)
    assert block.candidate_ids is None


@pytest.mark.parametrize(
    ("size", "head", "count"), [(32767, "vanilla", None), (32768, "rnn", 1024), (32768, "none", None)]
)
def test_a_large_vocabulary_is_narrowed_by_itself(size, head, count):
    target = make_target(vocab_size=40000, dtype=torch.float32)
    drafter = make_drafter(target, head, draft_vocab_size=size)
    assert drafter.num_candidates("auto") == count
    assert draft(drafter).logits.shape[-1] == (count or size)


@pytest.mark.parametrize("count", [0, -3, 2.0, True])
def test_a_count_below_one_is_refused(target, drafter, count):
    drafter.options.top_candidates = count
    with pytest.raises(ValueError, match="top_candidates must be a whole number from 1"):
        target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)


@pytest.mark.parametrize(
    "arguments", [{}, {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}], ids=["plain", "prefix"]
)
@pytest.mark.parametrize("count", [1, 3])
def test_greedy_is_token_identical(count, arguments):
    for seed, head in enumerate(("vanilla", "gated", "rnn")):
        target = make_target(seed=seed, vocab_size=12)
        drafter = make_drafter(target, head, seed=50 + seed, draft_vocab_size=8 if seed == 2 else None)
        drafter.options.top_candidates, ids = count, prompt_ids(5 + seed, 12, seed)
        settings = {"max_new_tokens": 24, "do_sample": False} | arguments
        plain = target.generate(ids, **settings)
        assert torch.equal(plain, target.generate(ids, assistant_model=drafter, **settings))
        assert sum(drafter.last_generation.drafted) > 0
        engine = BatchEngine(target, drafter)
        engine.add(ids[0].tolist(), **settings)
        assert next(iter(engine.run())).token_ids == plain[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("policy", "arguments"),
    [
        (FixedLength(3), {}),
        (FixedLength(2), {"temperature": 0.7, "top_p": 0.9}),
        (FixedLength(2), {"repetition_penalty": 1.3}),
        (FixedLength(2), {"no_repeat_ngram_size": 2}),
        (ConfidenceThreshold(0.5), {"top_k": 2}),
    ],
    ids=["pure", "warped", "penalty", "ngram", "threshold"],
)
def test_sampled_distribution_is_exact(policy, arguments, monkeypatch):
    """The two best of four tokens, every outcome."""
    check_distribution(policy, arguments, make_drafter, False, monkeypatch, top_candidates=2)


def test_sampled_distribution_is_exact_within_a_reduced_vocabulary(monkeypatch):
    check_distribution(FixedLength(2), {}, make_drafter, True, monkeypatch, top_candidates=1)


@pytest.mark.parametrize("narrowed", [{"top_candidates": 2}, {"draft_vocab_size": 9}])
@pytest.mark.parametrize("after", [{"renormalize_logits": True}, {"eta_cutoff": 0.01}])
def test_a_draft_ends_where_every_candidate_is_forbidden(narrowed, after):
    """Before a processor that fails on a row of nothing but -inf, or makes it NaN."""
    target = make_target()
    drafter = make_drafter(target, draft_vocab_size=narrowed.get("draft_vocab_size"))
    drafter.options.top_candidates = narrowed.get("top_candidates")
    drafter.options.policy = FixedLength(3)
    torch.manual_seed(0)
    output = target.generate(
        prompt_ids(),
        max_new_tokens=12,
        do_sample=True,
        suppress_tokens=list(range(2, 20)),
        assistant_model=drafter,
        **after,
    )
    assert output.shape[1] == 19
    assert not set(output[0, 7:].tolist()) & set(range(2, 20))
