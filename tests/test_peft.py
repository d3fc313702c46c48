"""LoRA targets: a PeftModel, or a model with adapters of transformers' own."""

from __future__ import annotations

import pytest
import torch
from conftest import make_drafter, make_target, prompt_ids
from torch import nn

from dspark_hf import generate_batch
from dspark_hf.loading.pairs import find_drafter

peft = pytest.importorskip("peft")


def adapter(**settings):
    return peft.LoraConfig(
        r=4, task_type="CAUSAL_LM", **{"target_modules": ["q_proj", "v_proj", "down_proj"]} | settings
    )


def randomise(model, name: str, seed: int = 5) -> None:
    """An adapter that says something: a fresh one is zero."""
    torch.manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name and f".{name}." in parameter_name:
            nn.init.normal_(parameter, std=0.3)
    model.eval()


def decode(model, drafter=None):
    extra = {} if drafter is None else {"assistant_model": drafter}
    return model.generate(input_ids=prompt_ids(), max_new_tokens=24, do_sample=False, **extra)


# float32: linear layers in other forms, on the CPU, where they are plain ones.
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_peft_model_and_switching_adapters(dtype):
    target = make_target(dtype=dtype)
    drafter, base = make_drafter(target), decode(target)
    model = peft.get_peft_model(target, adapter())
    randomise(model, "default")
    first = decode(model)
    assert not torch.equal(first, base)
    assert torch.equal(first, decode(model, drafter))
    model.add_adapter("second", adapter(target_modules=["k_proj", "up_proj"]))
    randomise(model, "second", seed=6)
    model.set_adapter("second")
    second = decode(model)
    assert not torch.equal(second, first)
    assert torch.equal(second, decode(model, drafter))
    with model.disable_adapter():
        assert torch.equal(base, decode(model, drafter))
    model.set_adapter("default")
    assert torch.equal(first, decode(model, drafter))
    merged = model.merge_and_unload()
    assert torch.equal(decode(merged), decode(merged, drafter))
    for module in merged.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks


def test_the_drafter_reads_the_adapted_layers():
    target = make_target()
    drafter = make_drafter(target)
    features = []
    project = drafter.context_key_values
    drafter.context_key_values = lambda new, *args: (features.append(new), project(new, *args))[1]
    decode(target, drafter)
    model = peft.get_peft_model(target, adapter())
    randomise(model, "default")
    decode(model, drafter)
    prompts = [part for part in features if part.shape[1] == 7]
    assert not torch.allclose(prompts[0], prompts[1])


@pytest.mark.parametrize("modules", [["q_proj", "embed_tokens"], ["q_proj"]], ids=["embedding-too", "head-alone"])
def test_an_adapted_lm_head_and_embedding_are_bound(modules):
    target = make_target()
    drafter = make_drafter(target)  # bound before the adapter came
    model = peft.get_peft_model(target, adapter(target_modules=modules, modules_to_save=["lm_head"]))
    randomise(model, "default")
    nn.init.normal_(model.get_output_embeddings().modules_to_save["default"].weight, std=0.3)
    plain = decode(model)
    assert torch.equal(plain, decode(model, drafter))
    hidden = torch.randn(1, 32, dtype=torch.float64)
    torch.testing.assert_close(drafter.compute_logits(hidden), model.get_output_embeddings()(hidden))
    torch.testing.assert_close(drafter.embed(prompt_ids()), model.get_input_embeddings()(prompt_ids()))
    assert torch.equal(plain, decode(model, make_drafter(target, draft_vocab_size=10)))


def test_adapters_of_transformers_own():
    target = make_target()
    base = decode(target)
    try:
        target.add_adapter(adapter(), adapter_name="own")
    except ValueError as error:  # this transformers wants a newer peft
        pytest.skip(str(error))
    randomise(target, "own")
    drafter, plain = make_drafter(target), decode(target)
    assert not torch.equal(plain, base)
    assert torch.equal(plain, decode(target, drafter))
    target.disable_adapters()
    assert torch.equal(base, decode(target, drafter))


def test_the_batch_engine_serves_a_peft_model():
    model = peft.get_peft_model(make_target(), adapter())
    randomise(model, "default")
    drafter = make_drafter(model.base_model.model)
    (output,) = generate_batch(model, drafter, [prompt_ids()[0].tolist()], max_new_tokens=24, do_sample=False)
    assert output.token_ids == decode(model)[0, 7:].tolist()


def test_the_known_drafter_of_a_peft_model_is_its_base_models():
    target = make_target(hidden_size=576, num_hidden_layers=30, vocab_size=49152, intermediate_size=8)
    target.config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert find_drafter(peft.get_peft_model(target, adapter())) == find_drafter(target)
