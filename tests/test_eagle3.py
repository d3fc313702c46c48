"""The Eagle3 baseline and DFlash's training: drafting, unrolled training, files, what refuses them."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import make_eagle3, make_target, make_tokenizer, prompt_ids
from transformers import AutoModel

from dspark_hf import DSparkConfig, DSparkDraftModel, FixedLength, generate_batch
from dspark_hf.decoding.compat import cache_of
from dspark_hf.decoding.drafting import Drafting
from dspark_hf.decoding.profiling import ProfilePlan, measure_step_rates
from dspark_hf.loading.pairs import Target
from dspark_hf.publishing.convert import to_deepspec, to_speculators
from dspark_hf.training.corpus import Answer
from dspark_hf.training.features import compute_features
from dspark_hf.training.pipeline import run_training
from dspark_hf.training.recipe import TrainOptions
from dspark_hf.training.step import collate
from dspark_hf.training.unroll import UnrolledTrainingStep, unroll


@pytest.fixture
def target():
    return make_target()


def test_drafting_in_parts_is_drafting_at_once(target):
    drafter, text = make_eagle3(target), prompt_ids(9)
    features = torch.randn(1, 8, 64, dtype=torch.float64)
    whole = drafter.draft(text, features)
    first = drafter.draft(text[:, :6], features[:, :5])
    assert first.cache.get_seq_length() == 5  # drafted tokens leave nothing behind
    second = drafter.draft(text, features[:, 5:], first.cache)
    torch.testing.assert_close(second.logits, whole.logits)
    assert whole.token_ids.shape == (1, 4)
    assert whole.confidence_logits is None
    assert drafter.draft(text, features, max_tokens=0).token_ids.shape == (1, 0)


def test_a_text_from_its_start_needs_no_mask(target):
    drafter, text = make_eagle3(target), prompt_ids(6)
    features = torch.randn(1, 5, 64, dtype=torch.float64)
    masked = drafter.draft(text, features, attention_mask=torch.ones(1, 5 + 4))
    torch.testing.assert_close(drafter.draft(text, features).logits, masked.logits)


def test_padding_is_not_seen(target):
    drafter, text = make_eagle3(target), prompt_ids(6)
    features = torch.randn(1, 5, 64, dtype=torch.float64)
    alone = drafter.draft(text, features)
    padded = torch.cat([torch.randn(1, 3, 64, dtype=torch.float64), features], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * (5 + 4)])
    positions = torch.arange(-3, 9)[None].clamp(min=0)
    block = drafter.draft(
        torch.cat([torch.zeros(1, 3, dtype=torch.long), text], dim=1),
        padded,
        position_ids=positions,
        attention_mask=mask,
    )
    torch.testing.assert_close(block.logits, alone.logits)


def test_a_policy_ends_the_draft(target):
    drafter, text = make_eagle3(target), prompt_ids(6)
    features = torch.randn(1, 5, 64, dtype=torch.float64)
    block = drafter.draft(text, features, admission=FixedLength(2))
    assert block.token_ids.shape == (1, 2)
    assert block.cache.get_seq_length() == 5


def test_generation_of_every_kind(target):
    drafter, ids = make_eagle3(target), prompt_ids(7)
    plain = target.generate(ids, max_new_tokens=20, do_sample=False, repetition_penalty=1.2)
    fast = target.generate(ids, max_new_tokens=20, do_sample=False, repetition_penalty=1.2, assistant_model=drafter)
    assert torch.equal(plain, fast)
    assert sum(drafter.last_generation.drafted) > 0
    embeds = target.get_input_embeddings()(ids)
    plain = target.generate(inputs_embeds=embeds, max_new_tokens=12, do_sample=False)
    assert torch.equal(
        plain, target.generate(inputs_embeds=embeds, max_new_tokens=12, do_sample=False, assistant_model=drafter)
    )


@pytest.mark.parametrize("overrides", [{}, {"draft_vocab_size": 9, "context_window": 6, "context_sinks": 2}])
def test_many_at_once(overrides):
    """Each token drafted is a row of all; requests of all lengths, more than run at once."""
    target = make_target(vocab_size=12)
    drafter = make_eagle3(target, **overrides)
    prompts = [prompt_ids(n, 12, n)[0] for n in (1, 7, 30, 4, 12)]
    plain = [target.generate(p[None], max_new_tokens=25, do_sample=False)[0, len(p) :].tolist() for p in prompts]
    engine = {"max_sequences": 3, "prefill_chunk": 8, "policy": FixedLength(3)}
    outputs = generate_batch(target, drafter, prompts, max_new_tokens=25, do_sample=False, engine=engine)
    assert [o.token_ids for o in outputs] == plain
    assert sum(sum(o.stats.accepted) for o in outputs) > 0
    for prompt, output in zip(prompts, outputs):  # the same rounds as alone
        drafter.options.policy, drafter.generation_config.num_assistant_tokens = FixedLength(3), 3
        target.generate(prompt[None], max_new_tokens=25, do_sample=False, assistant_model=drafter)
        assert [r.accepted for r in output.stats.history] == [r.accepted for r in drafter.last_generation.history]


def test_positions_after_a_prompt_of_embeddings(target, monkeypatch):
    """Only the prompt's last token has a known one behind it; those before it are left out, and keep their places."""
    drafter, ids = make_eagle3(target), prompt_ids(7)
    drafter.options.policy = FixedLength(4)
    firsts, sample = [], Drafting._sample

    def watched(self, sampler, sequences, drafting):
        firsts.append(sequences[0].draft_context.positions()[0])
        return sample(self, sampler, sequences, drafting)

    monkeypatch.setattr(Drafting, "_sample", watched)
    embeds = target.get_input_embeddings()(ids)
    output = target.generate(
        inputs_embeds=embeds, max_new_tokens=12, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
    )
    assert set(firsts) == {6}
    cache = cache_of(output)
    assert cache.dspark_context.end == cache.get_seq_length() == 7 + 12 - 1


def test_a_second_turn_continues_from_the_cache(target):
    drafter, ids = make_eagle3(target), prompt_ids(7)
    first = target.generate(
        ids, max_new_tokens=6, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
    )
    cache = first["cache"] if "cache" in first else first["past_key_values"]
    longer = torch.cat([first.sequences, prompt_ids(4, seed=8)], dim=1)
    plain = target.generate(longer, max_new_tokens=10, do_sample=False)
    name = "cache" if "cache" in first else "past_key_values"
    fast = target.generate(longer, max_new_tokens=10, do_sample=False, assistant_model=drafter, **{name: cache})
    assert torch.equal(plain, fast)


def test_unrolling_is_what_drafting_does(target):
    """On a text whose tokens are the drafter's own, training and drafting have the same logits."""
    drafter, text = make_eagle3(target), prompt_ids(6)
    features = torch.randn(1, 16, 64, dtype=torch.float64)
    block = drafter.draft(text, features[:, :5])
    tokens = torch.cat([text[0], block.token_ids[0]]).tolist()
    tokens += [2] * (16 - len(tokens))
    hidden = unroll(drafter, torch.tensor([tokens]), features, torch.tensor([[4, 9]]), 4)
    torch.testing.assert_close(drafter.compute_logits(drafter.norm(hidden[:, 0])), block.logits)


def test_a_sample_of_positions_has_the_losses_of_those_positions(target):
    drafter = make_eagle3(target, draft_vocab_size=16)
    ids = prompt_ids(5)[0].tolist()
    answer = Answer(
        "all", ids, target.generate(torch.tensor([ids]), max_new_tokens=14, do_sample=False)[0, 5:].tolist()
    )
    feature = compute_features(target, [answer], [0, 2])[0]
    batch = collate([answer], [feature], torch.device("cpu"))
    step = UnrolledTrainingStep(drafter)
    both = step(batch, torch.tensor([[6, 9]]), torch.tensor([[True, True]]))
    each = [step(batch, torch.tensor([[a]]), torch.tensor([[True]])) for a in (6, 9)]
    totals = [float(output.losses.total.detach()) for output in (both, *each)]
    assert totals[0] == pytest.approx((totals[1] + totals[2]) / 2)
    torch.testing.assert_close(both.losses.acceptance, torch.cat([e.losses.acceptance for e in each]))
    assert both.valid.shape == (2, 4)


def test_nothing_is_unrolled_before_the_first_token(target):
    """An answer without a prompt: the features at an anchor know the token that would be predicted."""
    drafter = make_eagle3(target)
    answer = Answer("all", [], list(range(2, 14)))
    batch = collate([answer], compute_features(target, [answer], [0, 2]), torch.device("cpu"))
    step = UnrolledTrainingStep(drafter)
    both = step(batch, torch.tensor([[0, 5]]), torch.tensor([[True, True]]))
    alone = step(batch, torch.tensor([[5]]), torch.tensor([[True]]))
    torch.testing.assert_close(both.losses.acceptance, alone.losses.acceptance)


def test_saving_and_loading(target, tmp_path):
    drafter = make_eagle3(target)
    drafter.save_pretrained(tmp_path)
    for loaded in (DSparkDraftModel.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert loaded.config.is_autoregressive
        loaded = loaded.to(target.dtype)
        loaded.bind_target(target)
        features = torch.randn(1, 5, 64, dtype=torch.float64)
        wanted = drafter.draft(prompt_ids(6), features)
        torch.testing.assert_close(loaded.draft(prompt_ids(6), features).logits, wanted.logits, atol=1e-5, rtol=1e-5)


def test_step_rates_can_be_measured(target):
    drafter = make_eagle3(target)
    rates = measure_step_rates(target, drafter, ProfilePlan((1, 2), (8,), 1))
    assert len(rates.block_seconds) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hidden_layers": 2}, "one full-attention layer"),
        ({"markov_head_type": "vanilla", "markov_rank": 4}, "no Markov head"),
        ({"enable_confidence_head": True}, "no confidence head"),
        ({"min_block_size": 2}, "min_block_size"),
        ({"sample_from_anchor": False}, "sample_from_anchor"),
    ],
)
def test_what_its_config_refuses(settings, message):
    form = {"layer_form": "eagle3", "num_hidden_layers": 1, "markov_head_type": "none", "enable_confidence_head": False}
    with pytest.raises(ValueError, match=message):
        DSparkConfig(**form | settings)


def test_what_refuses_it(target):
    drafter = make_eagle3(target)
    with pytest.raises(ValueError, match="Eagle3"):
        to_deepspec(drafter, target)
    with pytest.raises(ValueError, match="Eagle3"):
        to_speculators(drafter, target, "owner/target")
    with pytest.raises(ValueError, match="call `draft`"):
        drafter(input_ids=torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="at least one new token"):
        drafter.draft(prompt_ids(6))
    with pytest.raises(ValueError, match="5 features and the last 1 committed"):
        drafter.draft(prompt_ids(6)[:, -1], torch.randn(1, 5, 64, dtype=torch.float64))


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_training_the_baselines(method, tmp_path):
    model = make_target(dtype=torch.float32)
    model.generation_config.eos_token_id = 3
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"w{6 + i} w{7 + i}"}) for i in range(8)))
    options = TrainOptions(
        prompts=(prompts,),
        output=tmp_path / "drafter",
        work_dir=tmp_path / "work",
        max_new_tokens=20,
        num_answers=16,
        slots=4,
        method=method,
        draft_vocab_size=16,
        target_layers=(0, 2),
        steps=12,
        batch_size=4,
        num_anchors=6,
        learning_rate=5e-3,
        block_size=4,
    )
    report = run_training(Target("tiny", model, make_tokenizer()), options, say=lambda line: None)
    assert len(report.held_out.acceptance) == 4  # γ is --block-size in every method
    log = [json.loads(line) for line in (tmp_path / "work" / "training_log.jsonl").read_text().splitlines()]
    losses = [line["total"] for line in log if "total" in line]
    assert losses[-1] < losses[0]
    drafter = DSparkDraftModel.from_pretrained(tmp_path / "drafter", dtype=torch.float32)
    assert drafter.config.num_draft_tokens == 4
    assert drafter.confidence_head is None
    assert drafter.config.sample_from_anchor == (method == "eagle3")
    ids = prompt_ids()
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(plain, model.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=drafter))
