"""A compiled target behind `generate()`: the same tokens and features, few numbers of rows, few compilations."""

from __future__ import annotations

import pytest
import torch
from conftest import make_drafter, make_target, prompt_ids
from tiny_targets import make_hybrid
from transformers import CompileConfig, StaticCache

from dspark_hf import ConfidenceThreshold, FixedLength
from dspark_hf.decoding.compat import CACHE_ARGUMENT
from dspark_hf.decoding.compiled import CompiledForward, compiled_forward
from dspark_hf.decoding.draft_context import DraftContext
from dspark_hf.decoding.target import TargetTaps

SHAPE = {"num_hidden_layers": 2}
GEMMA = SHAPE | {"layer_types": ["sliding_attention", "full_attention"]}
_compilations = []


def _counting(graph, inputs, **options):
    _compilations.append(graph)
    return graph.forward


@pytest.fixture(autouse=True)
def compilations():
    """One entry for each graph that was compiled in the test."""
    torch._dynamo.reset()
    _compilations.clear()
    yield _compilations
    torch._dynamo.reset()


def forced(**options) -> dict:
    """Arguments of `generate()` with which transformers compiles on a CPU too."""
    config = CompileConfig(backend=_counting, **options)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


def pair(family: str = "llama", length: int = 3, **drafter):
    target = make_target(family, **(GEMMA if family == "gemma3" else SHAPE))
    drafter = make_drafter(target, **{"target_layer_ids": [0]} | drafter)
    drafter.options.policy, drafter.options.skinny_linear = FixedLength(length), False
    return target, drafter


def generate(target, drafter=None, tokens=30, **arguments):
    return target.generate(prompt_ids(), max_new_tokens=tokens, do_sample=False, assistant_model=drafter, **arguments)


@pytest.fixture
def features(monkeypatch):
    """The features of each committed run of tokens."""
    seen = []
    add = DraftContext.add
    monkeypatch.setattr(DraftContext, "add", lambda self, new: (seen.append(new.clone()), add(self, new))[1])
    return seen


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tokens_and_features_are_those_of_uncompiled_forwards(family, features, compilations):
    target, drafter = pair(family)
    plain = generate(target)
    # Plain decoding compiles a forward without the drafter's hooks first.
    assert torch.equal(generate(target, tokens=2, **forced()), plain[:, :9])
    before = len(compilations)
    assert before
    assert torch.equal(generate(target, drafter), plain)
    wanted = torch.cat(features, dim=1)
    counts = []
    for _ in range(2):
        features.clear()
        assert torch.equal(generate(target, drafter, **forced()), plain)
        torch.testing.assert_close(torch.cat(features, dim=1), wanted)
        counts.append(len(compilations) - before)
    assert 0 < counts[0] == counts[1] <= 4  # nothing anew in later calls
    assert {record.rows for record in drafter.last_generation.history} <= {1, 2, 4}
    assert torch.equal(generate(target, **forced()), plain)


def test_another_drafter_of_the_same_target_gets_its_own_layers(features):
    target, drafter = pair()
    other = make_drafter(target, target_layer_ids=[-1, 0])
    other.admission = FixedLength(3)
    plain = generate(target)
    for one in (drafter, other, drafter):
        features.clear()
        assert torch.equal(generate(target, one), plain)
        wanted = torch.cat(features, dim=1)
        features.clear()
        assert torch.equal(generate(target, one, **forced(dynamic=True)), plain)
        torch.testing.assert_close(torch.cat(features, dim=1), wanted)


def test_static_shapes_stay_below_dynamos_limit(compilations):
    """One compilation for each number of rows, whatever lengths are drafted."""
    target, drafter = pair()
    drafter.options.policy = ConfidenceThreshold(0.4, cumulative=True)
    plain = generate(target, tokens=60)
    assert torch.equal(generate(target, drafter, tokens=60, **forced(dynamic=False)), plain)
    history = drafter.last_generation.history
    rows = {record.rows for record in history}
    assert rows <= {1, 2, 4, 8} and len(rows) < len({record.drafted for record in history})
    assert len(compilations) == len(rows)


def test_outputs_as_plain_decoding_returns_them_and_a_prompt_in_chunks():
    target, drafter = pair()
    arguments = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True, "tokens": 12}
    wanted = generate(target, **arguments)
    got = generate(target, drafter, **arguments, **forced(dynamic=True))
    assert torch.equal(got.sequences, wanted.sequences)
    for a, b in zip(got.scores, wanted.scores, strict=True):
        torch.testing.assert_close(a, b)
    for ours, theirs in zip(got.hidden_states, wanted.hidden_states, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
    chunked = forced(dynamic=True) | {"prefill_chunk_size": 3}
    assert torch.equal(generate(target, drafter, tokens=12, **chunked), wanted.sequences)


def test_when_it_is_compiled():
    target, drafter = pair()
    cache = {CACHE_ARGUMENT: StaticCache(config=target.config, max_cache_len=40)}

    def compiled(arguments, target=target, cache=cache):
        config = target._prepare_generation_config(None, **arguments)[0]
        return compiled_forward(target, drafter, config, cache)

    force = forced()["compile_config"]
    assert isinstance(compiled({"compile_config": force}), CompiledForward)
    assert compiled({}) is None  # a CPU
    assert compiled({"compile_config": CompileConfig()}) is None
    assert compiled({"compile_config": force, "disable_compile": True}) is None
    target.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    assert compiled({"compile_config": force}) is None
    lfm2 = make_hybrid("lfm2")
    cache = {CACHE_ARGUMENT: StaticCache(config=lfm2.config, max_cache_len=40)}
    assert compiled({"compile_config": force}, lfm2, cache) is None


def test_a_block_longer_than_all_sizes_is_a_size_of_its_own(target):
    assert CompiledForward(target, 8, {}).sizes == (1, 2, 4, 8, 17)
    assert CompiledForward(target, 33, {}).sizes == (1, 2, 4, 8, 17, 33)


def test_a_forward_that_the_hooks_did_not_see_is_an_error(target):
    with TargetTaps(target, [0, 2]) as taps:
        target(prompt_ids())
        taps.check()
        taps.drop()
        with pytest.raises(RuntimeError, match=r"layers \[0, 2\].*disable_compile"):
            taps.check()
