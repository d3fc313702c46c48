"""Config, files, the parallel stage and the draft loop, used by hand."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from conftest import GOLDEN, make_drafter, make_target, needs_golden, prompt_ids
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from dspark_hf import ConfidenceThreshold, DSparkConfig, DSparkDraftModel, FixedLength

FEATURES = 2 * 32


def features(length: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, length, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"markov_head_type": "gru"}, "markov_head_type must be one of"),
        ({"block_size": 1, "sample_from_anchor": False}, "leaves no token"),
        ({"mask_token_id": 10**7}, "outside the vocabulary"),
        ({"draft_vocab_size": 0}, "draft_vocab_size"),
        ({"num_target_layers": 4, "target_layer_ids": [1, 3]}, "can't be tapped"),
        ({"layer_types": ["sliding_attention"] * 5}, "sliding_window"),
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, "multiple"),
        ({"min_block_size": 9}, "min_block_size"),
    ],
)
def test_config_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        DSparkConfig(**settings)


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("vocab", [None, 10], ids=["full", "reduced"])
def test_save_and_load(tmp_path, target, head, vocab):
    drafter = make_drafter(target, head, draft_vocab_size=vocab)
    drafter.generation_config.num_assistant_tokens = 3
    drafter.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    assert not any("embed" in k or "lm_head" in k for k in load_file(tmp_path / "model.safetensors"))
    again = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert isinstance(again, DSparkDraftModel)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), DSparkConfig)
    assert again.generation_config.num_assistant_tokens == 3
    again.bind_target(target)
    blocks = [model.draft(torch.tensor([5]), features(4)) for model in (drafter, again)]
    assert torch.equal(blocks[0].token_ids, blocks[1].token_ids)
    torch.testing.assert_close(blocks[0].logits, blocks[1].logits)


@needs_golden
def test_deepspec_copies_of_embedding_and_head(tmp_path):
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(GOLDEN / "target_qwen3", dtype=torch.float32)
    drafter = DSparkDraftModel.from_pretrained(GOLDEN / "deepspec_qwen3_vanilla")
    assert drafter.embed_tokens is not None
    drafter.bind_target(target)
    assert drafter.embed_tokens is None  # equal to the target's: dropped
    assert drafter.lm_head is None
    shutil.copytree(GOLDEN / "deepspec_qwen3_vanilla", tmp_path / "without")
    weights = load_file(tmp_path / "without" / "model.safetensors")
    kept = {k: v for k, v in weights.items() if k not in ("embed_tokens.weight", "lm_head.weight")}
    save_file(kept, tmp_path / "without" / "model.safetensors", metadata={"format": "pt"})
    bare = DSparkDraftModel.from_pretrained(tmp_path / "without")  # MiniCPM5's form
    bare.bind_target(target)
    ids, hidden = torch.tensor([7]), torch.randn(1, 4, 192)
    assert torch.equal(bare.draft(ids, hidden).logits, drafter.draft(ids, hidden).logits)


@needs_golden
def test_own_embedding_that_differs_is_kept():
    target = make_target("qwen3", vocab_size=320, dtype=torch.float32, hidden_size=64, num_hidden_layers=6)
    drafter = DSparkDraftModel.from_pretrained(GOLDEN / "deepspec_qwen3_vanilla")
    drafter.bind_target(target)
    assert drafter.embed_tokens is not None


def test_weights_that_are_missing_are_named(tmp_path, target):
    drafter = make_drafter(target)
    drafter.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("fc.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"fc\.weight"):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_damaged_and_pickled_weights_are_refused(tmp_path, target):
    make_drafter(target).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(OSError, match="damaged"):
        DSparkDraftModel.from_pretrained(tmp_path)
    file.unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        DSparkDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "no DSpark drafter"),
        ({"speculators_model_type": "dspark"}, "speculators"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, "z-lab"),
        ({"model_type": "deepseek_v4", "dspark_block_size": 5}, "DeepSeek-V4"),
    ],
)
def test_other_packagings_are_refused_by_name(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_forward_needs_inputs(drafter):
    with pytest.raises(ValueError, match="either"):
        drafter(context_hidden_states=features(3))
    with pytest.raises(ValueError, match="context"):
        drafter(input_ids=prompt_ids(4))
    with pytest.raises(ValueError, match="bind_target"):
        make_drafter(make_target(), bind=False)(input_ids=prompt_ids(4), context_hidden_states=features(3))


def test_cache_holds_context_alone_and_rounds_add_up(drafter):
    block = prompt_ids(4)
    whole = drafter(input_ids=block, context_hidden_states=features(9))
    first = drafter(input_ids=prompt_ids(4, seed=8), context_hidden_states=features(9)[:, :5])
    assert first.cache.get_seq_length() == 5
    second = drafter(input_ids=block, context_hidden_states=features(9)[:, 5:], cache=first.cache)
    assert second.cache.get_seq_length() == 9
    torch.testing.assert_close(second.logits, whole.logits)


def test_noise_embeds_and_batch_with_padding(drafter):
    ids, context = prompt_ids(4), features(6)
    single = drafter(input_ids=ids, context_hidden_states=context)
    embeds = drafter(noise_embeds=drafter.embed(ids), context_hidden_states=context)
    torch.testing.assert_close(embeds.logits, single.logits)
    padded = torch.cat([features(2, seed=5), context], dim=1)
    mask = torch.tensor([[0, 0] + [1] * 10])
    positions = torch.tensor([[0, 0, *range(10)]])
    left = drafter(input_ids=ids, context_hidden_states=padded, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(left.logits, single.logits)


def test_draft_of_two_rows_is_two_drafts(drafter):
    context = torch.cat([features(5), features(5, seed=1)])
    both = drafter.draft(torch.tensor([4, 9]), context)
    for row, anchor in enumerate((4, 9)):
        alone = drafter.draft(torch.tensor([anchor]), context[row : row + 1])
        assert torch.equal(both.token_ids[row], alone.token_ids[0])
        torch.testing.assert_close(both.confidence_logits[row], alone.confidence_logits[0])


@pytest.mark.parametrize("head", ["none", "vanilla", "rnn"])
def test_fill_in_layout(target, head):
    drafter = make_drafter(target, head, sample_from_anchor=False)
    block = drafter.draft(torch.tensor([4]), features(5))
    assert block.token_ids.shape == (1, 3)  # γ = block_size - 1
    hidden = drafter(input_ids=torch.tensor([[4, 1, 1, 1]]), context_hidden_states=features(5))
    if head == "none":
        torch.testing.assert_close(block.logits, hidden.logits[:, 1:])


def test_sliding_layers_see_their_window(target):
    narrow = make_drafter(target, layer_types=["sliding_attention"] * 2, sliding_window=3)
    wide = make_drafter(
        target, layer_types=["sliding_attention"] * 2, sliding_window=50, sliding_window_non_causal=True
    )
    full = make_drafter(target)
    ids, context = prompt_ids(4), features(10)
    changed = context.clone()
    changed[:, :7] += 1.0  # outside the window of 3
    run = lambda model, hidden: model(input_ids=ids, context_hidden_states=hidden).logits  # noqa: E731
    torch.testing.assert_close(run(narrow, context), run(narrow, changed))
    assert not torch.allclose(run(full, context), run(full, changed))
    torch.testing.assert_close(run(wide, context), run(full, context))
    later = ids.clone()
    later[:, 3] = (later[:, 3] + 1) % 24
    causal = narrow(input_ids=later, context_hidden_states=context).logits
    torch.testing.assert_close(causal[:, :3], run(narrow, context)[:, :3])


def test_shorter_blocks_only_where_trained_for(target):
    fixed, flexible = make_drafter(target), make_drafter(target, min_block_size=2)
    assert torch.equal(
        fixed.draft(torch.tensor([4]), features(5), max_tokens=2).token_ids,
        fixed.draft(torch.tensor([4]), features(5)).token_ids[:, :2],
    )
    short = flexible.draft(torch.tensor([4]), features(5), max_tokens=2)
    block = flexible(input_ids=torch.tensor([[4, 1]]), context_hidden_states=features(5))
    first = block.logits[:, 0] + flexible.markov_head.project(flexible.markov_head.markov_w1(torch.tensor([4])))
    torch.testing.assert_close(short.logits[:, 0], first)


def test_reduced_vocabulary_proposes_only_its_tokens(target):
    drafter = make_drafter(target, draft_vocab_size=5)
    drafter.set_draft_vocabulary(torch.tensor([3, 7, 8, 15, 22]))
    drafter.bind_target(target)
    block = drafter.draft(torch.tensor([4]), features(6))
    assert set(block.token_ids[0].tolist()) <= {3, 7, 8, 15, 22}
    assert block.logits.shape == (1, 4, 5)
    with pytest.raises(ValueError, match="ascending"):
        drafter.set_draft_vocabulary(torch.tensor([3, 7, 8, 22, 15]))


def test_admission_stops_the_loop(drafter):
    full = drafter.draft(torch.tensor([4]), features(6))
    confidences = torch.sigmoid(full.confidence_logits[0]).tolist()
    for threshold in (0.0, 0.3, 0.5, 0.7, 0.99):
        expected = next((i for i, c in enumerate(confidences) if c < threshold), 4)
        block = drafter.draft(torch.tensor([4]), features(6), admission=ConfidenceThreshold(threshold))
        assert int(block.num_admitted) == block.token_ids.shape[1] == expected
    assert drafter.draft(torch.tensor([4]), features(6), admission=FixedLength(2)).token_ids.shape == (1, 2)
    assert drafter.draft(torch.tensor([4]), features(6), admission=FixedLength(0)).token_ids.shape == (1, 0)


def test_policies_ask_before_the_token_exists(drafter):
    class Recorder:
        reads_survival = True

        def __init__(self):
            self.calls = []

        def admit(self, position, open_sequences, survival):
            self.calls.append((position, len(survival[0])))
            return [True] * len(open_sequences)

    recorder = Recorder()
    drafter.draft(torch.tensor([4]), features(6), admission=recorder)
    assert recorder.calls == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_confidence_policy_needs_a_confidence_head(target):
    drafter = make_drafter(target, enable_confidence_head=False)
    with pytest.raises(ValueError, match="confidence head"):
        drafter.draft(torch.tensor([4]), features(6), admission=ConfidenceThreshold(0.5))
