"""Writers: ours → another form → ours gives the same draft, and what a form can't express is refused."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import GOLDEN, GOLDEN_PACKAGINGS, make_drafter, make_target, needs_packagings
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDraftModel
from dspark_hf.publishing.convert import convert

HIDDEN = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def pair(tmp_path):
    target = make_target(dtype=torch.float32)
    target.save_pretrained(tmp_path / "target")
    return target, tmp_path / "target"


def same_draft(ours: DSparkDraftModel, theirs: DSparkDraftModel, hidden: torch.Tensor = HIDDEN) -> None:
    first, second = (model.draft(torch.tensor([5]), hidden) for model in (ours, theirs))
    assert torch.equal(first.token_ids, second.token_ids)
    torch.testing.assert_close(first.logits, second.logits, atol=1e-6, rtol=0)
    if second.confidence_logits is not None:
        torch.testing.assert_close(first.confidence_logits, second.confidence_logits, atol=1e-6, rtol=0)


def round_trip(tmp_path, drafter, form, target, folder) -> DSparkDraftModel:
    """Ours, the form, ours again."""
    drafter.save_pretrained(tmp_path / "ours")
    done = convert(str(tmp_path / "ours"), tmp_path / "there", form, str(folder))
    assert not done.lost
    convert(str(tmp_path / "there"), tmp_path / "back", "dspark", str(folder))
    assert not list(tmp_path.glob("*.tmp"))
    back = DSparkDraftModel.from_pretrained(tmp_path / "back").eval()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "dspark"
    back.bind_target(target)
    there = DSparkDraftModel.from_pretrained(tmp_path / "there").eval()
    there.bind_target(target)
    same_draft(there, drafter)
    return back


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
SETTINGS = {
    "plain": {},
    "fill-in": {"sample_from_anchor": False},
    "reduced": {"draft_vocab_size": 9},
    "no-confidence": {"enable_confidence_head": False},
}
CASES = [(head, settings) for head in ("none", "vanilla", "gated", "rnn") for settings in SETTINGS.values()]


@pytest.mark.parametrize(
    ("head", "settings"),
    [*CASES, ("vanilla", SLIDING), ("vanilla", SLIDING | {"sliding_window_non_causal": True})],
    ids=str,
)
def test_through_speculators(tmp_path, pair, head, settings):
    target, folder = pair
    drafter = make_drafter(target, head, **settings)
    same_draft(round_trip(tmp_path, drafter, "speculators", target, folder), drafter)
    tensors = load_file(tmp_path / "there" / "model.safetensors")
    reduced = "draft_vocab_size" in settings
    assert "embed_tokens.weight" not in tensors
    assert ("lm_head.weight" in tensors) == ("t2d" in tensors) == ("d2t" in tensors) == reduced
    config = json.loads((tmp_path / "there" / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [1, 3]
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(folder),
        "architectures": ["LlamaForCausalLM"],
    }


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("settings", [{}, {"embedding_scale": 2.0, "output_scale": 0.5}], ids=["plain", "scaled"])
def test_through_deepspec(tmp_path, pair, head, settings):
    target, folder = pair
    drafter = make_drafter(target, head, **settings)
    same_draft(round_trip(tmp_path, drafter, "deepspec", target, folder), drafter)
    tensors = load_file(tmp_path / "there" / "model.safetensors")
    assert tensors["embed_tokens.weight"].shape == tensors["lm_head.weight"].shape == (24, 32)


@pytest.mark.parametrize("k_eq_v", [True, False])
def test_gemma4_through_deepspec(tmp_path, k_eq_v):
    target = make_target("gemma3", dtype=torch.float32)
    target.save_pretrained(tmp_path / "target")
    rope = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6}
    drafter = make_drafter(
        target,
        layer_form="gemma4",
        attention_k_eq_v=k_eq_v,
        rope_parameters=rope,
        embedding_scale=32**0.5,
        final_logit_softcapping=4.0,
        hidden_act="gelu_pytorch_tanh",
    )
    for layer in drafter.layers:
        layer.layer_scalar.fill_(0.8)
    back = round_trip(tmp_path, drafter, "deepspec", target, tmp_path / "target")
    same_draft(back, drafter)
    assert back.embed_tokens is None  # equal to the target's, dropped


def test_a_target_whose_embedding_scales(tmp_path):
    target = make_target("gemma3", dtype=torch.float32)
    target.save_pretrained(tmp_path / "target")
    drafter = make_drafter(target)
    drafter.save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="scaled embedding"):
        convert(str(tmp_path / "ours"), tmp_path / "there", "speculators", str(tmp_path / "target"))
    convert(str(tmp_path / "ours"), tmp_path / "there", "deepspec", str(tmp_path / "target"))
    there = DSparkDraftModel.from_pretrained(tmp_path / "there")
    same_draft(there, drafter)


@pytest.mark.parametrize(
    ("form", "settings", "message"),
    [
        ("deepspec", {"sample_from_anchor": False}, "fill-in"),
        ("deepspec", {"draft_vocab_size": 9}, "reduced"),
        ("deepspec", SLIDING, "sliding"),
        ("deepspec", {"full_attention_causal": True}, "causal"),
        ("deepspec", {"final_logit_softcapping": 5.0}, "soft cap"),
        ("speculators", SLIDING | {"sliding_window_origin": "query"}, "counted from each query"),
        ("speculators", {"final_logit_softcapping": 5.0}, "soft cap"),
        ("speculators", {"layer_form": "gemma4"}, "Gemma 4"),
        ("speculators", {"output_scale": 2.0}, "scale on the logits"),
        ("speculators", {"embedding_scale": 2.0}, "scaled embedding"),
        ("speculators", {"full_attention_causal": True}, "causal"),
    ],
)
def test_refused_where_the_draft_would_differ(tmp_path, pair, form, settings, message):
    target, folder = pair
    make_drafter(target, **settings).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=message):
        convert(str(tmp_path / "ours"), tmp_path / "there", form, str(folder))
    assert not (tmp_path / "there").exists()
    assert not list(tmp_path.glob("*.tmp"))


def test_what_is_lost_is_said(tmp_path, pair):
    target, folder = pair
    drafter = make_drafter(target, min_block_size=2, confidence_temperatures=[1.0] * 4, confidence_shifts=[0.1] * 4)
    drafter.config.context_window = 512
    drafter.generation_config.num_assistant_tokens = 3
    drafter.save_pretrained(tmp_path / "ours")
    for form in ("deepspec", "speculators"):
        lost = " ".join(convert(str(tmp_path / "ours"), tmp_path / form, form, str(folder)).lost)
        assert "window of 512" in lost
        assert "calibration" in lost and "min_block_size 2" in lost and "3 drafted tokens" in lost


def test_what_is_needed_of_the_target(tmp_path, pair):
    target, folder = pair
    make_drafter(target, draft_vocab_size=9).save_pretrained(tmp_path / "reduced")
    make_drafter(target).save_pretrained(tmp_path / "ours")
    for source, form in (("ours", "deepspec"), ("ours", "speculators"), ("reduced", "speculators")):
        with pytest.raises(OSError, match="--target"):
            convert(str(tmp_path / source), tmp_path / "there", form)
    convert(str(tmp_path / "ours"), tmp_path / "deepspec", "deepspec", str(folder))
    convert(str(tmp_path / "deepspec"), tmp_path / "again", "deepspec")  # it has its own by now
    with pytest.raises(ValueError, match="--to must be"):
        convert(str(tmp_path / "ours"), tmp_path / "there", "gguf")
    with pytest.raises(OSError, match="not an empty folder"):
        convert(str(tmp_path / "ours"), folder, "dspark")
    (tmp_path / "empty").mkdir()
    convert(str(tmp_path / "ours"), tmp_path / "empty", "dspark")
    assert (tmp_path / "empty" / "model.safetensors").is_file()


@needs_packagings
@pytest.mark.parametrize(
    ("source", "form"),
    [
        (GOLDEN / "deepspec_qwen3_rnn", "speculators"),
        (GOLDEN / "deepspec_qwen3_vanilla", "dspark"),
        (GOLDEN / "deepspec_gemma4", "deepspec"),
        (GOLDEN_PACKAGINGS / "speculators_dspark_full", "deepspec"),
        (GOLDEN_PACKAGINGS / "speculators_dspark_reduced", "speculators"),
        (GOLDEN_PACKAGINGS / "speculators_dflash_converted_sliding", "speculators"),
        (GOLDEN_PACKAGINGS / "zlab_dflash", "speculators"),
        (GOLDEN_PACKAGINGS / "zlab_dflash_nested", "dspark"),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_from_one_packaging_to_another(tmp_path, source, form):
    folder = GOLDEN / ("target_gemma4" if "gemma4" in source.name else "target_qwen3")
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = DSparkDraftModel.from_pretrained(source).eval()
    before.bind_target(target)
    convert(str(source), tmp_path / "there", form, str(folder))
    after = DSparkDraftModel.from_pretrained(tmp_path / "there").eval()
    after.bind_target(target)
    hidden = torch.randn(1, 12, 192, generator=torch.Generator().manual_seed(4))
    same_draft(after, before, hidden)


def test_command(tmp_path, pair, run):
    target, folder = pair
    make_drafter(target, min_block_size=2).save_pretrained(tmp_path / "ours")
    convert_to = ["convert", tmp_path / "ours", tmp_path / "there", "--to", "speculators", "--target", folder]
    code, out, err = run(*convert_to)
    assert (code, "4 tokens a round" in out, "min_block_size" in err) == (0, True, True)
    code, _, err = run(*convert_to)
    assert (code, err.count("\n")) == (2, 1)
    code, out, _ = run(*convert_to[:2], tmp_path / "json", *convert_to[3:], "--json")
    assert json.loads(out)["form"] == "speculators"
    code, _, err = run("convert", tmp_path / "nowhere", tmp_path / "x", *convert_to[3:])
    assert (code, err.count("\n")) == (2, 1)
