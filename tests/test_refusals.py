"""What `generate(assistant_model=drafter)` does not serve is refused with one clear error each."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_module
from conftest import make_drafter, make_target, prompt_ids
from transformers import GenerationMixin, T5Config, T5ForConditionalGeneration

import dspark_hf
from dspark_hf import BatchEngine, generate_batch
from dspark_hf.decoding import hook


def test_unknown_transformers_is_refused_by_name(monkeypatch, target, drafter):
    monkeypatch.setattr(GenerationMixin, "generate", GenerationMixin.generate)
    hook._install_refusal()
    with pytest.raises(ValueError, match=r"transformers >=5\.17"):
        target.generate(prompt_ids(), assistant_model=drafter)
    assert target.generate(prompt_ids(), max_new_tokens=2).shape[1] == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 30}, "vocab_size 30"),
        ({"hidden_size": 40}, "hidden_size 40"),
        ({"target_layer_ids": [0, 3], "num_target_layers": None}, "layer"),
        ({"target_layer_ids": [0, 9], "num_target_layers": None}, "can't be tapped"),
    ],
    ids=["vocabulary", "hidden", "last-layer", "missing-layer"],
)
def test_drafter_for_another_target(target, change, message):
    drafter = make_drafter(target, bind=False, **change)
    with pytest.raises(ValueError, match=message):
        target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)


def test_batches_and_beams_are_refused(target, drafter):
    with pytest.raises(ValueError, match="one sequence"):
        target.generate(prompt_ids().expand(2, -1), max_new_tokens=4, assistant_model=drafter)
    with pytest.raises(ValueError, match=r"[Bb]eam|Greedy"):
        target.generate(prompt_ids(), max_new_tokens=4, num_beams=2, assistant_model=drafter)
    with pytest.raises(ValueError, match="cache"):
        target.generate(prompt_ids(), max_new_tokens=4, use_cache=False, assistant_model=drafter)


def test_encoder_decoder_is_refused(drafter):
    config = T5Config(vocab_size=24, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="encoder-decoder"):
        T5ForConditionalGeneration(config).generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)


def test_settings_out_of_range(target, drafter):
    drafter.generation_config.num_assistant_tokens = -1
    with pytest.raises(ValueError, match="num_assistant_tokens"):
        target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)
    with pytest.raises(ValueError, match="threshold"):
        dspark_hf.ConfidenceThreshold(1.5)
    with pytest.raises(ValueError, match="length"):
        dspark_hf.FixedLength(-1)


def test_threshold_without_a_confidence_head(target):
    drafter = make_drafter(target, enable_confidence_head=False)
    drafter.generation_config.assistant_confidence_threshold = 0.5
    with pytest.raises(ValueError, match="confidence head"):
        target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)


def test_num_assistant_tokens_that_are_no_whole_number(target, drafter):
    for wrong in (1.5, "3", -1, True):
        with pytest.raises(ValueError, match="num_assistant_tokens must be a whole number") as refused:
            target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter, num_assistant_tokens=wrong)
        assert "\n" not in str(refused.value) and repr(wrong) in str(refused.value)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bound_before", [True, False], ids=["bound-before", "bound-after"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_wholly_offloaded_targets(where, bound_before, tied, tmp_path):
    target = make_target(dtype=torch.float32, tie_word_embeddings=tied)
    drafter = make_drafter(target, bind=bound_before)
    wanted = target.generate(prompt_ids(), max_new_tokens=4, do_sample=False)
    if where == "cpu":
        cpu_offload(target, execution_device="cpu")
    else:
        disk_offload(target, str(tmp_path), execution_device="cpu")
    plain = target.generate(prompt_ids(), max_new_tokens=4, do_sample=False)
    assert torch.equal(plain, wanted)
    for call in (
        lambda: target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter),
        lambda: drafter.bind_target(target),
        lambda: hook.check_pair(target, drafter),
        lambda: BatchEngine(target, drafter),
        lambda: BatchEngine(target),
    ):
        with pytest.raises(ValueError, match="offloaded") as refused:
            call()
        assert "\n" not in str(refused.value)
    if where == "cpu":
        remove_hook_from_module(target, recurse=True)
        fast = target.generate(prompt_ids(), max_new_tokens=4, do_sample=False, assistant_model=drafter)
        assert torch.equal(fast, wanted)


@pytest.mark.parametrize("draft_vocab_size", [None, 8], ids=["full", "reduced"])
def test_offloaded_decoder_layers_are_served(draft_vocab_size, tmp_path):
    target = make_target(dtype=torch.float32)
    drafter = make_drafter(target, bind=False, draft_vocab_size=draft_vocab_size)
    wanted = target.generate(prompt_ids(), max_new_tokens=12, do_sample=False)
    layers = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
    others = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    dispatch_model(target, others | layers, main_device="cpu", offload_dir=str(tmp_path))
    fast = target.generate(prompt_ids(), max_new_tokens=12, do_sample=False, assistant_model=drafter)
    assert torch.equal(fast, wanted)
    (output,) = generate_batch(target, drafter, [prompt_ids()[0]], max_new_tokens=12, do_sample=False)
    assert output.token_ids == wanted[0, 7:].tolist()


def test_a_compiled_drafter_is_unwrapped(target, drafter):
    compiled = torch.compile(drafter)
    wanted = target.generate(prompt_ids(), max_new_tokens=12, do_sample=False)
    fast = target.generate(prompt_ids(), max_new_tokens=12, do_sample=False, assistant_model=compiled)
    assert torch.equal(fast, wanted) and sum(compiled.last_generation.drafted)
    assert BatchEngine(target, compiled).model is drafter
    (output,) = generate_batch(target, compiled, [prompt_ids()[0]], max_new_tokens=12, do_sample=False)
    assert output.token_ids == wanted[0, 7:].tolist()


def test_another_model_as_the_engines_drafter(target):
    with pytest.raises(ValueError, match="must be a DSparkDraftModel, got a LlamaForCausalLM"):
        BatchEngine(target, make_target())
