"""Every packaging's config into ours, what the weights settle, and what is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import GOLDEN, GOLDEN_PACKAGINGS, make_drafter, make_target, needs_golden, needs_packagings, prompt_ids
from safetensors.torch import load_file, save_file

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.model.layers_dspark import block_mask
from dspark_hf.model.packagings_dspark import to_dspark_dict

# What make_drafter's drafters are, in Qwen3's words.
BACKBONE = {
    "model_type": "qwen3",
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "dtype": "float64",
}
HEADS = {
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
TAPS = {"mask_token_id": 1, "target_layer_ids": [0, 2]}
DEEPSPEC = BACKBONE | HEADS | TAPS | {"architectures": ["Qwen3DSparkModel"], "block_size": 4, "num_target_layers": 4}
SPECULATORS = {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "speculators_config": {"algorithm": "dspark", "verifier": {"name_or_path": "a/target"}},
    "transformer_layer_config": BACKBONE,
    "aux_hidden_state_layer_ids": [1, 3],
    "mask_token_id": 1,
    "block_size": 4,
    "draft_vocab_size": 24,
    "dtype": "float64",
} | HEADS
ZLAB = BACKBONE | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 4,
    "num_target_layers": 4,
    "dflash_config": TAPS,
}
SPECFORGE = BACKBONE | {
    "architectures": ["DSparkDraftModel"],
    "block_size": 4,
    "dflash_config": TAPS | HEADS | {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0},
}
HIDDEN = torch.randn(1, 6, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def write(folder, config: dict, drafter: DSparkDraftModel, without: tuple[str, ...] = (), prefix: str = "", **more):
    """A checkpoint with this config and the drafter's weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {k: v.contiguous() for k, v in drafter.state_dict().items() if not k.startswith(without or "-")}
    tensors = {prefix + k if "_head." in k and "lm" not in k else k: v for k, v in tensors.items()} | more
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def same_draft(ours: DSparkDraftModel, theirs: DSparkDraftModel) -> None:
    first, second = (model.draft(torch.tensor([5]), HIDDEN) for model in (ours, theirs))
    assert torch.equal(first.token_ids, second.token_ids)
    torch.testing.assert_close(first.logits, second.logits, atol=1e-9, rtol=0)
    if second.confidence_logits is not None:
        torch.testing.assert_close(first.confidence_logits, second.confidence_logits, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("config", "fill_in", "heads"),
    [(DEEPSPEC, False, True), (SPECULATORS, False, True), (ZLAB, True, False), (SPECFORGE, False, True)],
    ids=["deepspec-bare", "speculators", "zlab", "specforge"],
)
def test_same_weights_same_draft(tmp_path, target, config, fill_in, heads):
    settings = {} if heads else {"enable_confidence_head": False}
    drafter = make_drafter(target, "vanilla" if heads else "none", sample_from_anchor=not fill_in, **settings)
    loaded = DSparkDraftModel.from_pretrained(write(tmp_path / "x", config, drafter))
    assert loaded.embed_tokens is None and not loaded.config.has_own_embeddings
    loaded.bind_target(target)
    same_draft(loaded, drafter)
    loaded.save_pretrained(tmp_path / "ours")  # and our own form of it says the same
    again = DSparkDraftModel.from_pretrained(tmp_path / "ours")
    again.bind_target(target)
    same_draft(again, drafter)
    with torch.no_grad():
        plain = target.generate(prompt_ids(), max_new_tokens=12, do_sample=False)
        assert torch.equal(
            plain, target.generate(prompt_ids(), max_new_tokens=12, do_sample=False, assistant_model=loaded)
        )


def test_weights_settle_what_the_config_leaves_open(tmp_path, target):
    for kind in ("vanilla", "gated", "rnn"):  # labelled as z-lab's, but a DSpark drafter
        drafter = make_drafter(target, kind)
        loaded = DSparkDraftModel.from_pretrained(write(tmp_path / kind, ZLAB, drafter))
        assert (loaded.config.markov_head_type, loaded.config.markov_rank) == (kind, 6)
        loaded.bind_target(target)
        same_draft(loaded, drafter)
    biased = make_drafter(target, attention_bias=True)
    loaded = DSparkDraftModel.from_pretrained(write(tmp_path / "biased", DEEPSPEC, biased))
    loaded.bind_target(target)
    same_draft(loaded, biased)
    drafter = make_drafter(target)
    early = write(tmp_path / "early", SPECFORGE, drafter, prefix="logit_head.")
    loaded = DSparkDraftModel.from_pretrained(early)
    loaded.bind_target(target)
    same_draft(loaded, drafter)


def test_training_only_weights_are_ignored(tmp_path, target):
    drafter = make_drafter(target)
    extra = {"t2d": torch.ones(24, dtype=torch.bool), "d2t": torch.zeros(24, dtype=torch.long)}
    extra["verifier_norm.weight"] = torch.ones(32)
    loaded = DSparkDraftModel.from_pretrained(write(tmp_path / "full", SPECULATORS, drafter, **extra))
    loaded.bind_target(target)
    same_draft(loaded, drafter)
    wrong = write(tmp_path / "moved", SPECULATORS, drafter, d2t=torch.ones(24, dtype=torch.long))
    with pytest.raises(ValueError, match="d2t"):
        DSparkDraftModel.from_pretrained(wrong)


def test_reduced_vocabulary_with_a_head_of_its_own(tmp_path, target):
    drafter = make_drafter(target, "rnn", sample_from_anchor=False, draft_vocab_size=9)
    head = torch.randn(9, 32, dtype=torch.float64)
    config = SPECULATORS | {"draft_vocab_size": 9, "sample_from_anchor": False, "markov_head_type": "rnn"}
    own = DSparkDraftModel.from_pretrained(write(tmp_path / "own", config, drafter, **{"lm_head.weight": head}))
    own.bind_target(target)
    assert torch.equal(own.lm_head.weight, head)  # the stored one goes before the target's rows
    rows = target.get_output_embeddings().weight[drafter.draft_token_ids()].detach().clone()
    equal = DSparkDraftModel.from_pretrained(write(tmp_path / "equal", config, drafter, **{"lm_head.weight": rows}))
    equal.bind_target(target)
    assert equal.lm_head is None
    same_draft(equal, drafter)


@pytest.mark.parametrize("key", ["layers.0.self_attn.attention_sink_bias", "layers.0.self_attn.g_proj.weight"])
def test_weights_of_another_architecture_are_refused(tmp_path, target, key):
    folder = write(tmp_path / "x", DEEPSPEC, make_drafter(target), **{key: torch.ones(4)})
    with pytest.raises(ValueError, match=key.rsplit(".", 1)[0].rsplit(".", 1)[-1]):
        DSparkDraftModel.from_pretrained(folder)


def test_quantised_weights_are_refused(tmp_path, target):
    folder = write(tmp_path / "x", DEEPSPEC, make_drafter(target), **{"fc.weight_scale": torch.ones(4)})
    with pytest.raises(ValueError, match="quantised"):
        DSparkDraftModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "deepseek_v4", "dspark_block_size": 5, "dspark_noise_token_id": 1}, "DeepSeek-V4"),
        (ZLAB | {"architectures": ["DFlash2DraftModel"]}, "DFlash 2"),
        (ZLAB | {"dflash_config": TAPS | {"selector_rank": 8}}, "DFlash 2"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "Qwen3Eagle3Model"),
        ({"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3"}, "target_layer_ids"),
        (SPECULATORS | {"speculators_model_type": "eagle3"}, "Eagle3"),
        (SPECULATORS | {"speculators_model_type": "mtp"}, "'mtp'"),
        (ZLAB | {"architectures": ["Lfm2DSparkDraftModel"], "model_type": "lfm2"}, "LFM2"),
        (ZLAB | {"architectures": ["SomeDSparkModel"]}, "LFM2"),
        (DEEPSPEC | {"rope_is_neox_style": False}, "interleaved"),
        (DEEPSPEC | {"architectures": ["Qwen35DSparkModel"], "model_type": "qwen3_5"}, "Ornith"),
        (DEEPSPEC | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "NVFP4"),
        (DEEPSPEC | {"attention_value_scale": 0.5}, "attention_value_scale"),
        ({"model_type": "muse_glimmer_assistant", "block_size": 16, "target_layer_ids": [1]}, "muse_glimmer_assistant"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "no DSpark drafter"),
        ({"model_type": "foo", "target_layer_ids": [1], "mask_token_id": 3}, "not read"),
        (ZLAB | {"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id"),
        ({**SPECULATORS, "aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
    ],
)
def test_refused_by_name_before_the_weights_are_looked_at(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        DSparkDraftModel.from_pretrained(tmp_path)


def ours(config: dict, **changes) -> DSparkConfig:
    return DSparkConfig.from_dict(config | changes)


def test_speculators_fields():
    config = ours(SPECULATORS)
    assert config.target_layer_ids == [0, 2]
    assert config.sample_from_anchor
    assert config.embedding_scale == 1.0
    assert config.target_model_name_or_path == "a/target"
    plain = {k: v for k, v in SPECULATORS.items() if k not in HEADS}
    dflash = ours(plain, speculators_model_type="dflash")
    assert not dflash.sample_from_anchor
    assert dflash.markov_head_type == "none" and not dflash.enable_confidence_head
    assert ours(SPECULATORS, sample_from_anchor=False).num_draft_tokens == 3
    sliding = BACKBONE | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "use_sliding_window": True}
    config = ours(SPECULATORS, transformer_layer_config=sliding)
    assert (config.sliding_window, config.sliding_window_origin, config.sliding_window_non_causal) == (
        6,
        "anchor",
        False,
    )
    assert ours(SPECULATORS, transformer_layer_config=sliding, sliding_window_non_causal=True).sliding_window_non_causal
    off = ours(SPECULATORS, transformer_layer_config=sliding | {"use_sliding_window": False})
    assert off.layer_types == ["full_attention"] * 2
    nested = {"sliding_attention": {"rope_type": "default", "rope_theta": 5e5}, "full_attention": {"rope_theta": 1.0}}
    assert (
        ours(SPECULATORS, transformer_layer_config=BACKBONE | {"rope_parameters": nested}).rope_parameters["rope_theta"]
        == 5e5
    )
    # The embeddings themselves, and the last layer before the norm, are ids that the form knows.
    assert ours(SPECULATORS, aux_hidden_state_layer_ids=[0, 4]).target_layer_ids == [-1, 3]


def test_zlab_fields():
    config = ours(ZLAB)
    assert (config.num_draft_tokens, config.sliding_window_origin) == (3, "query")
    assert not config.enable_confidence_head and config.embedding_scale == config.output_scale == 1.0
    inside = {k: v for k, v in ZLAB.items() if k != "block_size"} | {"dflash_config": TAPS | {"block_size": 8}}
    assert ours(inside).block_size == 8
    assert ours({k: v for k, v in ZLAB.items() if k != "block_size"}).block_size == 16
    options = {"output_multiplier": 0.5, "final_logit_softcapping": 30.0, "input_embedding_scale": 5.5}
    for scaled in (ours(ZLAB, dflash_config=TAPS | options), ours(ZLAB | options)):
        assert (scaled.output_scale, scaled.final_logit_softcapping, scaled.embedding_scale) == (0.5, 30.0, 5.5)
    assert ours(ZLAB, final_logit_softcapping=0).final_logit_softcapping is None
    assert not ours(ZLAB).full_attention_causal
    assert ours(ZLAB, is_causal=True).full_attention_causal
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
    assert not ours(ZLAB, **sliding).sliding_window_non_causal
    assert ours(ZLAB, **sliding, is_causal=False).sliding_window_non_causal
    assert ours(ZLAB, **sliding | {"use_sliding_window": False}).sliding_window == 32768  # causal, without a window
    without = {"mask_token_id": 1}
    assert ours(ZLAB, num_target_layers=36, num_hidden_layers=5, dflash_config=without).target_layer_ids == [
        1,
        9,
        17,
        25,
        33,
    ]
    assert ours(ZLAB, num_target_layers=36, num_hidden_layers=1, dflash_config=without).target_layer_ids == [18]


def test_minicpm5_and_inherited_noise():
    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    config = ours(DEEPSPEC, rope_parameters=rope, draft_vocab_size=24, projector_type="dspark", auto_map={"x": "y.Z"})
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e6}
    assert not config.has_reduced_vocab
    assert config.sample_from_anchor
    flat = {k: v for k, v in DEEPSPEC.items() if k != "rope_parameters"}
    assert ours(flat, rope_theta=2e5).rope_parameters["rope_theta"] == 2e5
    assert ours(flat).rope_parameters["rope_theta"] == 1e4  # Qwen3Config's, not ours
    yarn = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8192}
    scaled = ours(flat, rope_theta=1e6, rope_scaling=yarn).rope_parameters
    assert (scaled["rope_type"], scaled["factor"], scaled["rope_theta"]) == ("yarn", 32.0, 1e6)


@needs_golden
def test_gemma4_fields():
    config = DSparkConfig.from_pretrained(GOLDEN / "deepspec_gemma4")
    assert (config.layer_form, config.attention_k_eq_v) == ("gemma4", True)
    assert (config.head_dim, config.num_key_value_heads, config.hidden_act) == (32, 1, "gelu_pytorch_tanh")
    assert (config.embedding_scale, config.final_logit_softcapping) == (8.0, 8.0)
    stored = json.loads((GOLDEN / "deepspec_gemma4" / "config.json").read_text())
    newer = {k: v for k, v in stored.items() if k not in ("global_head_dim", "num_global_key_value_heads")}
    newer["per_layer_config"] = {"0": {"head_dim": 32, "num_key_value_heads": 1}}
    assert to_dspark_dict(newer)["head_dim"] == 32
    with pytest.raises(ValueError, match="sliding"):
        to_dspark_dict(stored | {"layer_types": ["sliding_attention", "full_attention"]})


@needs_golden
@pytest.mark.parametrize("name", ["deepspec_gemma4", "deepspec_gemma4_separate_v"])
def test_gemma4_shares_the_targets_embedding(tmp_path, name):
    """The target's own embedding module scales by itself; the drafter must not do it twice. And our form round-trips."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(GOLDEN / "target_gemma4", dtype=torch.float32)
    drafter = DSparkDraftModel.from_pretrained(GOLDEN / name)
    hidden = torch.randn(1, 5, 192, generator=torch.Generator().manual_seed(1))
    before = drafter.draft(torch.tensor([7]), hidden)
    drafter.bind_target(target)
    assert drafter.embed_tokens is None and drafter.lm_head is None
    drafter.save_pretrained(tmp_path)
    again = DSparkDraftModel.from_pretrained(tmp_path)
    again.bind_target(target)
    for model in (drafter, again):
        after = model.draft(torch.tensor([7]), hidden)
        assert torch.equal(after.token_ids, before.token_ids)
        torch.testing.assert_close(after.logits, before.logits, atol=1e-5, rtol=0)


@needs_packagings
def test_dtype_is_the_checkpoints_own_where_nothing_is_said(tmp_path, target):
    drafter = make_drafter(target).to(torch.bfloat16)
    folder = write(tmp_path / "x", SPECULATORS | {"dtype": "bfloat16"}, drafter)
    assert DSparkDraftModel.from_pretrained(folder).dtype == torch.bfloat16
    assert DSparkDraftModel.from_pretrained(folder, dtype=torch.float32).dtype == torch.float32
    tensors = load_file(GOLDEN_PACKAGINGS / "speculators_dspark_reduced" / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert (
        DSparkDraftModel.from_pretrained(
            GOLDEN_PACKAGINGS / "speculators_dspark_reduced", dtype=torch.float16
        ).d2t.dtype
        == torch.int64
    )


def test_scales_and_cap(target):
    plain = make_drafter(target)
    scaled = make_drafter(target, embedding_scale=1.0, output_scale=0.5, final_logit_softcapping=3.0)
    same = torch.tensor([[4, 1, 1, 1]])
    torch.testing.assert_close(scaled.embed(same), plain.embed(same))
    hidden = plain(input_ids=same, context_hidden_states=HIDDEN)
    logits = scaled(input_ids=same, context_hidden_states=HIDDEN).logits
    torch.testing.assert_close(logits, torch.tanh(hidden.logits * 0.5 / 3.0) * 3.0)
    double = make_drafter(target, embedding_scale=2.0)
    torch.testing.assert_close(double.embed(same), 2 * plain.embed(same))
    for name in ("embedding_scale", "output_scale", "final_logit_softcapping"):
        with pytest.raises(ValueError, match=name):
            DSparkConfig(**{name: 0.0})
    with pytest.raises(ValueError, match="attention_k_eq_v"):
        DSparkConfig(attention_k_eq_v=True)
    with pytest.raises(ValueError, match="layer_form"):
        DSparkConfig(layer_form="gemma5")


def test_embedding_scale_goes_around_a_module_that_scales():
    target = make_target("gemma3")
    table = target.get_input_embeddings()
    ids = torch.tensor([[3, 4]])
    assert not torch.allclose(table(ids), table.weight[ids])
    torch.testing.assert_close(make_drafter(target).embed(ids), table(ids))
    torch.testing.assert_close(make_drafter(target, embedding_scale=1.0).embed(ids), table.weight[ids])


def test_what_each_kind_of_layer_sees():
    context, block, anchor = torch.arange(9)[None], torch.arange(9, 13)[None], torch.tensor([[9]])

    def seen(kind="sliding_attention", **fields) -> list[str]:
        config = DSparkConfig(num_hidden_layers=1, layer_types=[kind], sliding_window=3, **fields)
        mask = block_mask(config, kind, context, block, anchor)[0].long()
        return ["".join(map(str, row[6:9].tolist())) + "|" + "".join(map(str, row[9:].tolist())) for row in mask]

    assert seen() == ["111|1000", "111|1100", "111|1110", "111|1111"]
    assert seen(sliding_window_non_causal=True) == ["111|1111"] * 4
    query = {"sliding_window_origin": "query"}
    assert seen(**query) == ["011|1000", "001|1100", "000|1110", "000|0111"]
    assert seen(**query, sliding_window_non_causal=True) == ["011|1110", "001|1111", "000|1111", "000|0111"]
    assert seen("full_attention", full_attention_causal=True) == seen()
    assert seen("full_attention") == ["111|1111"] * 4


def test_causal_full_layers(target):
    drafter = make_drafter(target, full_attention_causal=True)
    ids = prompt_ids(4)
    later = ids.clone()
    later[:, 3] = (later[:, 3] + 1) % 24
    first, second = (drafter(input_ids=x, context_hidden_states=HIDDEN).logits for x in (ids, later))
    torch.testing.assert_close(first[:, :3], second[:, :3])
    assert not torch.allclose(first[:, 3], second[:, 3])


@pytest.mark.parametrize(
    "offsets", [2 - torch.arange(9), torch.full((9,), 20), torch.full((9,), -1)], ids=["twice", "high", "low"]
)
def test_draft_vocabulary_that_is_none(tmp_path, target, offsets):
    """Twice the same token would not be drawn with the probability that is reported."""
    drafter = make_drafter(target, draft_vocab_size=9)
    folder = tmp_path / "x"
    drafter.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"d2t": offsets}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="d2t"):
        DSparkDraftModel.from_pretrained(folder)


def test_a_config_that_does_not_fit_the_weights(tmp_path, target):
    make_drafter(target).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"markov_rank": 5}))
    with pytest.raises(ValueError, match=r"confidence_head.proj.weight is \[1, 38\]"):
        DSparkDraftModel.from_pretrained(tmp_path)
