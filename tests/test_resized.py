"""Targets with more tokens than the drafter: padding to a multiple, added tokens. They are never drafted; the text stays."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from conftest import make_drafter, make_eagle3, make_target, prompt_ids
from test_losslessness import enumerate_draws, exact_distribution
from transformers import LogitsProcessorList

from dspark_hf import BatchEngine, FixedLength, generate_batch
from dspark_hf.decoding.candidate_generator import DSparkCandidateGenerator
from dspark_hf.decoding.checks import likely_mistakes
from dspark_hf.doctor.probe import probe
from dspark_hf.publishing.convert import to_deepspec, to_speculators
from dspark_hf.training.corpus import Answer

KINDS = {
    "vanilla": (make_drafter, {}),
    "rnn-fill-in": (make_drafter, {"head": "rnn", "sample_from_anchor": False}),
    "reduced": (make_drafter, {"draft_vocab_size": 8}),
    "own-tables": (make_drafter, {"has_own_embeddings": True, "has_own_lm_head": True, "head": "gated"}),
    "eagle3": (make_eagle3, {}),
    "eagle3-own-tables": (make_eagle3, {"has_own_embeddings": True, "seed": 4}),
}


def resized(target, size: int | None = None, **arguments):
    """The target with new tokens as likely as any other."""
    before = target.config.vocab_size
    target.resize_token_embeddings(size, mean_resizing=False, **arguments)
    for table in (target.get_input_embeddings(), target.get_output_embeddings()):
        torch.nn.init.normal_(table.weight[before:], std=0.3, generator=torch.Generator().manual_seed(0))
    return target


@pytest.mark.parametrize(("tied", "bound_before"), [(True, True), (False, False)], ids=["tied-before", "untied-after"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_token_identical(kind, tied, bound_before):
    make, settings = KINDS[kind]
    emitted, accepted = set(), 0
    for seed in range(3):
        target = make_target(vocab_size=12, seed=seed, tie_word_embeddings=tied)
        drafter = make(target, bind=bound_before, **settings)
        drafter.options.policy = FixedLength(3)
        if bound_before:
            target.generate(prompt_ids(5, 12), max_new_tokens=4, do_sample=False, assistant_model=drafter)
        resized(target, 20)
        prompt = torch.cat([prompt_ids(5, 20, seed), torch.tensor([[19]])], dim=1)
        # Reads the prefix by its ids, the new ones among them.
        settled = {"do_sample": False, "repetition_penalty": 1.2}
        plain = target.generate(prompt, max_new_tokens=30, **settled)
        fast = target.generate(prompt, max_new_tokens=30, assistant_model=drafter, **settled)
        assert torch.equal(plain, fast), f"seed {seed}"
        (output,) = generate_batch(target, drafter, [prompt[0]], max_new_tokens=30, **settled)
        assert output.token_ids == plain[0, 6:].tolist()
        emitted |= set(plain[0, 6:].tolist())
        accepted += sum(record.accepted for record in drafter.last_generation.history)
    assert accepted and max(emitted) >= 12


def test_padding_to_a_multiple(target, drafter):
    wanted = target.generate(prompt_ids(), max_new_tokens=12, do_sample=False)
    target.generate(prompt_ids(), max_new_tokens=2, do_sample=False, assistant_model=drafter)
    target.resize_token_embeddings(pad_to_multiple_of=64)
    with torch.no_grad():
        target.lm_head.weight[24:] = 0.0
    plain = target.generate(prompt_ids(), max_new_tokens=12, do_sample=False)
    assert target.config.vocab_size == 64 and plain[0, :8].equal(wanted[0, :8])
    fast = target.generate(prompt_ids(), max_new_tokens=12, do_sample=False, assistant_model=drafter)
    assert torch.equal(plain, fast)


@pytest.mark.parametrize("arguments", [{"top_k": 0}, {"top_k": 3, "repetition_penalty": 1.3}], ids=["pure", "warped"])
@pytest.mark.parametrize("kind", ["vanilla", "reduced", "own-tables", "eagle3"])
def test_sampled_distribution_is_exact(kind, arguments, monkeypatch):
    """Every outcome of drafting and acceptance, with a new token among the prompt's and those that may come."""
    make, settings = KINDS[kind]
    if "draft_vocab_size" in settings:
        settings = settings | {"draft_vocab_size": 2}
    target = make_target(seed=5, vocab_size=4, num_hidden_layers=3, initializer_range=0.2)
    drafter = make(target, seed=6, block_size=2, target_layer_ids=[0, 1], num_hidden_layers=1, **settings)
    drafter.options.policy, drafter.options.lookup_drafts = FixedLength(2), False
    resized(target, 6)
    ids, horizon = torch.tensor([[2, 3, 5, 1, 4]]), 3
    arguments = {"do_sample": True} | arguments
    wanted = exact_distribution(target, ids, horizon, arguments)
    drafter.options.acceptance = "rejection"
    enumerator = enumerate_draws(monkeypatch)

    def run():
        return target.generate(ids, max_new_tokens=horizon, assistant_model=drafter, **arguments)[0, 5:]

    found = defaultdict(float)
    for tokens, weight in enumerator.outcomes(run):
        found[tuple(tokens.tolist())] += weight
    assert any(max(tokens) >= 4 for tokens, weight in found.items() if weight)
    for tokens, probability in wanted.items():
        assert found[tokens] == pytest.approx(probability, abs=1e-9)


def test_own_tables_that_equal_the_first_rows_are_dropped(target):
    drafter = make_drafter(target, bind=False, has_own_embeddings=True, has_own_lm_head=True)
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        drafter.lm_head.weight.copy_(target.get_output_embeddings().weight)
    drafter.bind_target(resized(target, 32))
    assert drafter.embed_tokens is None and drafter.lm_head is None


def test_an_engine_whose_target_is_resized(target, drafter):
    engine = BatchEngine(target, drafter, policy=FixedLength(3))
    for _ in range(2):
        plain = target.generate(prompt_ids(), max_new_tokens=20, do_sample=False)
        engine.add(prompt_ids(), max_new_tokens=20, do_sample=False)
        (output,) = engine.run()
        assert output.token_ids == plain[0, 7:].tolist()
        resized(target, 32)


def test_candidates_have_scores_of_the_targets_vocabulary(target, drafter):
    resized(target, 32)
    drafter.options.policy = FixedLength(3)
    config = target.generation_config
    config.max_length = 64
    candidates = DSparkCandidateGenerator(drafter, target, config, LogitsProcessorList())
    candidates.observe(torch.randn(1, 7, 64, dtype=drafter.dtype))
    ids, scores = candidates.get_candidates(torch.cat([prompt_ids(), torch.tensor([[31]])], dim=1))
    assert ids.shape == (1, 11) and scores.shape == (1, 3, 32)
    assert int(ids[:, 8:].max()) < 24 and bool(torch.isneginf(scores[..., 24:]).all())


@pytest.mark.parametrize("draft_vocab_size", [None, 8], ids=["full", "reduced"])
def test_probed_on_texts_with_new_tokens(target, draft_vocab_size):
    drafter = make_drafter(target, draft_vocab_size=draft_vocab_size)
    drafter.bind_target(resized(target, 32))
    result = probe(target, drafter, [Answer("d", prompt_ids(vocab_size=32)[0].tolist(), [31, 3, 25, 2, 30, 24])])
    assert result.coverage == pytest.approx(2 / 6)


def test_exported_with_the_drafters_own_tokens(target):
    drafter, reduced = make_drafter(target, bind=False), make_drafter(target, bind=False, draft_vocab_size=8)
    resized(target, 32)
    for model in (drafter, reduced):
        model.bind_target(target)
    written = to_deepspec(drafter, target)
    assert written.config["vocab_size"] == 24
    assert {len(written.tensors[f"{name}.weight"]) for name in ("embed_tokens", "lm_head")} == {24}
    written = to_speculators(reduced, target, "me/tiny")
    assert torch.equal(written.tensors["lm_head.weight"], target.lm_head.weight[reduced.draft_token_ids()])


@pytest.mark.parametrize("bound_before", [True, False], ids=["bound-before", "bound-after"])
def test_fewer_tokens_than_the_drafter_are_refused(target, bound_before):
    drafter = make_drafter(target, bind=bound_before)
    target.resize_token_embeddings(16)
    for call in (
        lambda: target.generate(prompt_ids(vocab_size=16), max_new_tokens=4, assistant_model=drafter),
        lambda: BatchEngine(target, drafter),
        lambda: drafter.bind_target(target),
    ):
        with pytest.raises(ValueError, match=r"vocab_size 24, .* has 16, .* 24 or more") as refusal:
            call()
        assert "\n" not in str(refusal.value)


def test_another_tokenizer_is_warned_of(target, drafter):
    assert not likely_mistakes(resized(target, 64), drafter)
    (mistake,) = likely_mistakes(resized(target, 24 + 2000), drafter)
    assert mistake.subject == "tokens" and "24" in mistake.found and "2024" in mistake.found


def test_an_assistants_tokenizer_is_refused(target, drafter):
    resized(target, 32)
    with pytest.raises(ValueError, match="assistant_tokenizer"):
        target.generate(
            prompt_ids(), max_new_tokens=4, assistant_model=drafter, tokenizer=object(), assistant_tokenizer=object()
        )
