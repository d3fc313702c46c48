"""Vision-language targets: text is drafted after a prompt with an image."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import pytest
import torch
from conftest import make_drafter, prompt_ids
from test_losslessness import enumerate_draws
from tiny_targets import VISION, make_vision_target

import dspark_hf
from dspark_hf import FixedLength
from dspark_hf.decoding import processors
from dspark_hf.decoding.compat import CACHE_ARGUMENT, cache_of
from dspark_hf.decoding.target import decoder_layers


@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("tail", [0, 1, 3], ids=["image-last", "one-token-behind", "text-behind"])
def test_text_after_an_image_is_token_identical(family, tail):
    target = make_vision_target(family)
    drafter = make_drafter(target.model)
    drafter.options.policy = FixedLength(4)
    for seed in range(2):
        inputs = target.prompt(tail, seed)
        arguments = {"max_new_tokens": 24, "do_sample": False}
        plain = target.model.generate(**inputs, **arguments)
        assert torch.equal(plain, target.model.generate(**inputs, assistant_model=drafter, **arguments))
        assert drafter.last_generation.prompt_tokens == inputs["input_ids"].shape[1]
        assert sum(drafter.last_generation.drafted) > 0


@pytest.mark.parametrize("family", VISION)
def test_the_image_matters(family):
    """Or the test above would not tell whether it is read."""
    target = make_vision_target(family)
    first, second = (target.model(**target.prompt(image_seed=seed), use_cache=False).logits[0, -1] for seed in (0, 1))
    assert (first - second).abs().max() > 1e-3 * first.std()


@pytest.mark.parametrize("family", VISION)
def test_the_tapped_layers_are_the_texts(family):
    model = make_vision_target(family).model
    layers = decoder_layers(model)
    assert not any("vision" in name and child is layers for name, child in model.named_modules())
    assert len(layers) == 4


def test_outputs_as_plain_decoding_returns_them():
    target = make_vision_target("qwen2_5_vl", attn_implementation="eager")
    arguments = {
        "max_new_tokens": 14,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": True,
    }
    inputs = target.prompt()
    wanted = target.model.generate(**inputs, **arguments)
    got = target.model.generate(**inputs, assistant_model=make_drafter(target.model), **arguments)
    for name in ("hidden_states", "attentions"):
        for ours, theirs in zip(getattr(got, name), getattr(wanted, name), strict=True):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b)
    torch.testing.assert_close(torch.cat(got.logits), torch.cat(wanted.logits))


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_5"])
def test_second_turn_continues_from_the_cache(family):
    target = make_vision_target(family)
    drafter, inputs = make_drafter(target.model), target.prompt()
    arguments = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": 9}
    sequences = []
    for extra in ({}, {"assistant_model": drafter}):
        first = target.model.generate(**inputs, **arguments, **extra)
        turn = torch.cat([first.sequences, prompt_ids(3, 20, 9)], dim=1)
        kept = {CACHE_ARGUMENT: cache_of(first), "attention_mask": torch.ones_like(turn)}
        sequences.append(target.model.generate(turn, **kept, **arguments, **extra).sequences)
    assert torch.equal(*sequences)
    assert drafter.last_generation.prompt_tokens == 4


def test_an_image_without_its_mask_is_refused():
    """Without `cross_attention_mask` transformers lets the i-th of several tokens see the first i of the image alone."""
    target = make_vision_target("mllama")
    drafter, inputs = make_drafter(target.model), target.prompt()
    drafter.options.policy = FixedLength(4)
    arguments = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": 12, "assistant_model": drafter}
    first = target.model.generate(**inputs, **arguments)
    mask = inputs.pop("cross_attention_mask")
    with pytest.raises(ValueError, match="cross_attention_mask"):
        target.model.generate(**inputs, **arguments)
    turn = torch.cat([first.sequences, prompt_ids(3, 20, 9)], dim=1)
    kept = {CACHE_ARGUMENT: cache_of(first), "attention_mask": torch.ones_like(turn)}
    length = kept[CACHE_ARGUMENT].get_seq_length()
    with pytest.raises(ValueError, match="cross_attention_mask"):
        target.model.generate(turn, **kept, **arguments)
    assert kept[CACHE_ARGUMENT].get_seq_length() == length
    whole = torch.cat([mask, mask[:, -1:].expand(-1, turn.shape[1] - mask.shape[1], -1, -1)], dim=1)
    fast = target.model.generate(turn, **kept, cross_attention_mask=whole, **arguments).sequences
    plain = target.model.generate(**inputs, cross_attention_mask=mask, **arguments | {"assistant_model": None})
    turned = {CACHE_ARGUMENT: cache_of(plain), "attention_mask": torch.ones_like(turn), "cross_attention_mask": whole}
    assert torch.equal(target.model.generate(turn, **turned, **arguments | {"assistant_model": None}).sequences, fast)
    text = prompt_ids(6, 20)  # none is needed where there is no image
    wanted = target.model.generate(text, do_sample=False, max_new_tokens=8)
    assert torch.equal(target.model.generate(text, **arguments | {"max_new_tokens": 8}).sequences, wanted)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_sampled_output_has_the_targets_distribution(family, monkeypatch):
    horizon, tokens = 3, [3, 7, 9]
    target = make_vision_target(family, initializer_range=0.2)
    drafter = make_drafter(target.model, block_size=2)
    drafter.options.policy, drafter.options.skinny_linear = FixedLength(2), False
    inputs = target.prompt()
    arguments = {"do_sample": True, "top_k": 0, "prefix_allowed_tokens_fn": lambda batch, ids: tokens}
    wanted = {}
    for text in product(tokens, repeat=horizon):
        grown, weight = dict(inputs), 1.0
        for token in text:
            with torch.no_grad():
                scores = target.model(**grown, use_cache=False).logits[0, -1, tokens]
            weight *= float(scores.softmax(-1)[tokens.index(token)])
            grown["input_ids"] = torch.cat([grown["input_ids"], torch.tensor([[token]])], dim=1)
            for name, fill in (("attention_mask", 1), ("mm_token_type_ids", 0)):
                if name in grown:
                    grown[name] = torch.nn.functional.pad(grown[name], (0, 1), value=fill)
        wanted[text] = weight
    drafter.options.acceptance = "rejection"
    monkeypatch.setattr(processors, "_WITH_MEMORY", ())  # the function above has none
    enumerator = enumerate_draws(monkeypatch)

    def run():
        return target.model.generate(**inputs, max_new_tokens=horizon, assistant_model=drafter, **arguments)

    found = defaultdict(float)
    for sequence, weight in enumerator.outcomes(run):
        found[tuple(sequence[0, -horizon:].tolist())] += weight
    for text, probability in wanted.items():
        assert found[text] == pytest.approx(probability, abs=1e-9)


def test_the_batch_engine_serves_their_text_and_refuses_images_by_name():
    target = make_vision_target("qwen2_5_vl")
    inputs = target.prompt()
    engine = dspark_hf.BatchEngine(target.model)
    with pytest.raises(ValueError, match="pixel_values"):
        engine.add(inputs.pop("input_ids"), max_new_tokens=4, **inputs)
    prompts = [prompt_ids(n, 20) for n in (4, 6)]
    outputs = dspark_hf.generate_batch(
        target.model,
        make_drafter(target.model),
        [p[0].tolist() for p in prompts],
        max_new_tokens=12,
        do_sample=False,
    )
    for ids, output in zip(prompts, outputs, strict=True):
        plain = target.model.generate(ids, max_new_tokens=12, do_sample=False)
        assert output.token_ids == plain[0, ids.shape[1] :].tolist()
