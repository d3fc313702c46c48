"""Caches that grow in place, attention without copies, inference mode: the same numbers, and nothing left behind."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import make_drafter, make_target, prompt_ids
from test_rollback import states_of
from tiny_targets import make_hybrid
from transformers import DynamicCache, LogitsProcessor, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import dspark_hf
from dspark_hf import FixedLength
from dspark_hf.decoding.attention import grouped_attention
from dspark_hf.decoding.compat import CACHE_ARGUMENT, cache_of
from dspark_hf.decoding.kv_cache import GrowingLayer, grow_in_place, make_plain, ordinary_buffers


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
    make_plain(cache)
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
    assert "sdpa" not in ALL_ATTENTION_FUNCTIONS._local_mapping  # or what is registered later would not count


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1", "lfm2"])
def test_what_generate_returns_can_be_used_for_anything(family):
    """No tensor of inference mode comes out: each may be written into, and gradients may flow through it."""
    recurrent = family in ("falcon_h1", "lfm2")
    target = make_hybrid(family) if recurrent else make_target(family)
    drafter = make_drafter(target)
    drafter.options.policy = FixedLength(3)
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


def test_processors_may_keep_what_they_write_into():
    class Keeping(LogitsProcessor):
        def __init__(self):
            self.seen = {}

        def __call__(self, input_ids, scores):
            seen = self.seen.setdefault(input_ids.shape[1], torch.zeros_like(scores))
            seen[:, input_ids[0, -1]] += 1.0
            return scores - 0.0 * seen

    target = make_target()
    drafter = make_drafter(target)
    drafter.options.policy = FixedLength(3)
    arguments = {"max_new_tokens": 20, "do_sample": False}
    plain = target.generate(prompt_ids(), **arguments)
    fast = target.generate(prompt_ids(), assistant_model=drafter, logits_processor=[Keeping()], **arguments)
    assert torch.equal(plain, fast)
    engine = dspark_hf.BatchEngine(target, drafter)
    kept = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    engine.add(prompt_ids()[0], logits_processor=[Keeping()], **arguments, **kept)
    (output,) = engine.run()
    assert output.token_ids == plain[0, 7:].tolist()
    assert not any(row.is_inference() for row in (*output.scores, *output.logits))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("where", ["model.norm", "model.layers.2", "model.layers.0.self_attn"])
def test_an_interrupt_inside_the_target_leaves_the_cache_as_it_was(where, static):
    """A next turn goes on from the tokens that were committed."""
    target = make_target()
    drafter = make_drafter(target)
    drafter.options.policy = FixedLength(3)
    cache = StaticCache(target.config, max_cache_len=80) if static else DynamicCache(config=target.config)
    calls = []

    def interrupt(*args):
        calls.append(None)
        if len(calls) == 4:
            raise KeyboardInterrupt

    committed = []

    class Streamer:
        def put(self, value):
            committed.extend(value.flatten().tolist())

        def end(self):
            pass

    handle = target.get_submodule(where).register_forward_pre_hook(interrupt)
    arguments = {"do_sample": False, CACHE_ARGUMENT: cache}
    with pytest.raises(KeyboardInterrupt):
        target.generate(prompt_ids(), assistant_model=drafter, streamer=Streamer(), max_new_tokens=30, **arguments)
    handle.remove()
    text = torch.tensor([committed])
    assert int(cache.get_seq_length()) == text.shape[1] - 1
    going_on = target.generate(text, assistant_model=drafter, max_new_tokens=20, **arguments)
    assert torch.equal(going_on, target.generate(text, max_new_tokens=20, do_sample=False))


def test_processors_may_write_into_scores():
    class InPlace(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, 5] = float("-inf")
            return scores

    target = make_target()
    drafter = make_drafter(target)
    drafter.options.policy = FixedLength(3)
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


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rope_that_depends_on_the_length(kind):
    """No forward reads tokens on both sides of the length from which other frequencies hold."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [6.0, 5.0, 4.0, 3.0], "original_max_position_embeddings": 16}
    for seed in range(4):
        target = make_target(seed=seed, rope_parameters=rope, max_position_embeddings=64 if kind == "longrope" else 16)
        drafter = make_drafter(target, seed=9 + seed)
        drafter.options.policy = FixedLength(4)
        arguments = {"max_new_tokens": 40, "do_sample": False}
        fast = target.generate(prompt_ids(seed=seed), assistant_model=drafter, **arguments)
        assert torch.equal(fast, target.generate(prompt_ids(seed=seed), **arguments))
    assert any(record.drafted for record in drafter.last_generation.history)


def test_two_threads_on_one_target():
    target = make_target()
    arguments = {"max_new_tokens": 30, "do_sample": False}
    wanted = [target.generate(prompt_ids(seed=seed), **arguments) for seed in range(4)]
    drafters = [make_drafter(target, seed=seed) for seed in range(3)]
    for drafter in drafters:
        drafter.options.policy = FixedLength(3)

    def decode(seed):
        assistant = drafters[seed] if seed < 3 else None
        return [target.generate(prompt_ids(seed=seed), assistant_model=assistant, **arguments) for _ in range(4)]

    with ThreadPoolExecutor(4) as threads:
        for texts, text in zip(threads.map(decode, range(4)), wanted, strict=True):
            assert all(torch.equal(t, text) for t in texts)


def test_a_head_bound_under_inference_mode_can_be_trained_with():
    target = make_target(dtype=torch.float32)
    drafter = make_drafter(target, draft_vocab_size=16, bind=False)
    with torch.inference_mode():
        drafter.bind_target(target)
    assert not drafter.bound_heads()[0].weight.is_inference()
