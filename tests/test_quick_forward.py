"""Caches that grow in place, attention without copies, inference mode: the same numbers, and nothing left behind."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import make_drafter, make_target, prompt_ids
from test_rewinding import states_of
from tiny_targets import make_hybrid
from transformers import DynamicCache, LogitsProcessor
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dspark_hf import FixedLength
from dspark_hf.decoding.compat import CACHE_ARGUMENT, cache_of
from dspark_hf.decoding.quick_forward import (
    GrowingLayer,
    grouped_attention,
    grow_in_place,
    ordinary_buffers,
    settled,
)


def growing(target, ids) -> DynamicCache:
    cache = DynamicCache(config=target.config)
    target(ids, **{CACHE_ARGUMENT: cache})
    grow_in_place(cache)
    return cache


def test_a_growing_cache_holds_what_a_plain_one_does():
    target = make_target()
    with torch.inference_mode():
        plain, fast = DynamicCache(config=target.config), growing(target, prompt_ids(5))
        target(prompt_ids(5), **{CACHE_ARGUMENT: plain})
        for seed in range(60):
            rows, cropped = 1 + seed % 5, seed % 3
            ids = prompt_ids(rows, seed=seed)
            logits = [target(ids, **{CACHE_ARGUMENT: cache}).logits for cache in (plain, fast)]
            torch.testing.assert_close(logits[1], logits[0])
            for cache in (plain, fast):
                cache.crop(-min(cropped, rows))
        assert all(type(layer) is GrowingLayer for layer in fast.layers)
    for wanted, got in zip(states_of(plain), states_of(fast), strict=True):
        assert torch.equal(got, wanted)


def test_buffers_are_kept_while_there_is_room():
    target = make_target()
    with torch.inference_mode():
        cache = growing(target, prompt_ids(5))
        places = set()
        for seed in range(100):
            target(prompt_ids(1, seed=seed), **{CACHE_ARGUMENT: cache})
            places.add(cache.layers[0].keys.data_ptr())
    assert len(places) <= 3


def test_keys_that_were_replaced_are_kept():
    """What stands in `keys` counts, whoever put it there."""
    target = make_target()
    cache = growing(target, prompt_ids(5))
    with torch.inference_mode():
        target(prompt_ids(2), **{CACHE_ARGUMENT: cache})
        cache.layers[0].keys, cache.layers[0].values = cache.layers[0].keys * 2.0, cache.layers[0].values * 3.0
        keys = cache.layers[0].keys.clone()
        target(prompt_ids(2, seed=9), **{CACHE_ARGUMENT: cache})
    assert torch.equal(cache.layers[0].keys[:, :, : keys.shape[2]], keys)


def test_settled_layers_are_plain_and_without_room():
    target = make_target()
    with torch.inference_mode():
        cache = growing(target, prompt_ids(5))
        target(prompt_ids(2), **{CACHE_ARGUMENT: cache})
    before = [state.clone() for state in states_of(cache)]
    settled(cache)
    assert all(type(layer) is DynamicLayer and "_rooms" not in vars(layer) for layer in cache.layers)
    for state, wanted in zip(states_of(cache), before, strict=True):
        assert torch.equal(state, wanted)
        assert not state.is_inference() and state.untyped_storage().nbytes() == state.numel() * state.element_size()


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gemma3"])
@pytest.mark.parametrize("padded", [False, True])
def test_grouped_attention_is_the_same(family, padded, monkeypatch):
    target = make_target(family, dtype=torch.float32)
    target.set_attn_implementation("sdpa")
    past, new = prompt_ids(9), prompt_ids(4, seed=8)
    mask = torch.ones(1, 13, dtype=torch.long)
    mask[:, : 2 * padded] = 0
    heads = []
    real = torch.nn.functional.scaled_dot_product_attention

    def recorded(query, key, *args, **kwargs):
        heads.append((query.shape[1], key.shape[1]))
        return real(query, key, *args, **kwargs)

    def logits():
        cache = DynamicCache(config=target.config)
        target(past, attention_mask=mask[:, :9], **{CACHE_ARGUMENT: cache})
        heads.clear()
        return target(new, attention_mask=mask, **{CACHE_ARGUMENT: cache}).logits

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    with torch.no_grad():
        wanted = logits()
        with grouped_attention():
            torch.testing.assert_close(logits(), wanted)
    assert set(heads) == {(2, 2)}  # the two key heads, not copied for four query heads


def test_the_override_is_undone_by_the_last_one_out():
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with pytest.raises(RuntimeError), grouped_attention():
        with grouped_attention():
            pass
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not stock
        raise RuntimeError
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is stock


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1", "lfm2"])
def test_what_generate_returns_can_be_used_for_anything(family):
    """No tensor of inference mode comes out: each may be written into, and gradients may flow through it."""
    recurrent = family in ("falcon_h1", "lfm2")
    target = make_hybrid(family) if recurrent else make_target(family)
    drafter = make_drafter(target)
    drafter.admission = FixedLength(3)
    arguments = {
        "max_new_tokens": 20,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_hidden_states": True,
    }
    arguments |= {"output_scores": True, "output_logits": True}
    output = target.generate(prompt_ids(), assistant_model=drafter, **arguments)
    plain = target.generate(prompt_ids(), **arguments)
    assert torch.equal(output.sequences, plain.sequences)
    hidden = [layer for step in output.hidden_states for layer in step]
    tensors = [output.sequences, *output.scores, *output.logits, *hidden, *states_of(cache_of(output))]
    assert not any(t.is_inference() for t in tensors)
    assert not any(b.is_inference() for b in target.buffers())
    cache = cache_of(output)
    assert all("dspark" not in type(layer).__module__ for layer in cache.layers)
    again = copy.deepcopy(cache)
    mask = torch.ones(1, output.sequences.shape[1], dtype=torch.long)
    target.generate(output.sequences, attention_mask=mask, max_new_tokens=3, **{CACHE_ARGUMENT: again})
    if not recurrent:
        logits = target(output.sequences[:, -1:], **{CACHE_ARGUMENT: cache}).logits
        logits.sum().backward()
        assert target.lm_head.weight.grad is not None


def test_processors_may_write_into_scores():
    class InPlace(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, 5] = float("-inf")
            return scores

    target = make_target()
    drafter = make_drafter(target)
    drafter.admission = FixedLength(3)
    for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 1}):
        arguments = {"max_new_tokens": 20, "logits_processor": [InPlace()], **sampling}
        plain = target.generate(prompt_ids(), **arguments)
        assert torch.equal(plain, target.generate(prompt_ids(), assistant_model=drafter, **arguments))
        assert 5 not in plain[0, 7:]


def test_buffers_set_under_inference_mode_become_ordinary():
    target = make_target()
    rotary = target.model.rotary_emb
    with torch.inference_mode():
        rotary.register_buffer("inv_freq", rotary.inv_freq * 1.0, persistent=False)
    ordinary_buffers(target)
    assert not rotary.inv_freq.is_inference()
    assert "inv_freq" in rotary._non_persistent_buffers_set
