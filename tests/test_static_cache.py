"""Static caches: what `generate()` with a drafter puts out and leaves in them. Compiled targets: `test_compiled.py`."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
from conftest import make_drafter, make_target, prompt_ids
from test_losslessness import enumerate_draws, exact_distribution
from test_scheduling import Planned, costs
from tiny_targets import make_hybrid
from transformers import DynamicCache, LogitsProcessor, StaticCache
from transformers.cache_utils import DynamicLayer, StaticSlidingWindowLayer

from dspark_hf import FixedLength
from dspark_hf.decoding.compat import CACHE_ARGUMENT, cache_of
from dspark_hf.decoding.rollback import Rollback

FAMILIES = ("llama", "gemma3")  # the second has static sliding layers, of six tokens here


def static_cache(target, size: int = 80) -> dict[str, StaticCache]:
    return {CACHE_ARGUMENT: StaticCache(config=target.config, max_cache_len=size)}


def visible(layer) -> torch.Tensor:
    """The keys of the tokens that a static layer holds."""
    length = int(layer.get_seq_length())
    assert int(layer.cumulative_length) == length or length > layer.max_cache_len
    return layer.keys[:, :, : min(length, layer.max_cache_len)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_token_identical_and_so_is_what_the_cache_holds(family):
    rounds = defaultdict(int)
    for seed in range(5):
        target = make_target(family, vocab_size=8, seed=seed)
        drafter = make_drafter(target, seed=20 + seed, block_size=4)
        drafter.options.policy = FixedLength(4)
        ids = prompt_ids(2 + 2 * seed, 8, seed)  # shorter and longer than the window
        arguments = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
        plain = target.generate(ids, cache_implementation="static", **arguments)
        fast = target.generate(ids, cache_implementation="static", assistant_model=drafter, **arguments)
        assert torch.equal(plain.sequences, fast.sequences), f"seed {seed}"
        for wanted, got in zip(cache_of(plain).layers, cache_of(fast).layers, strict=True):
            torch.testing.assert_close(visible(got), visible(wanted))
        for record in drafter.last_generation.history:
            rounds["whole"] += record.drafted > 0 and record.accepted == record.drafted
            rounds["part"] += 0 < record.accepted < record.drafted
            rounds["none"] += record.drafted > 0 and record.accepted == 0
    assert rounds["whole"] and rounds["part"] and rounds["none"]


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_stays_in_the_cache_and_in_the_windows(family):
    target = make_target(family)
    drafter = make_drafter(target)
    for seconds in ((1.0, 2.0, 2.0, 1.9, 1.2), (1.0, 2.0, 2.0, 1.9, 1.9, 1.9, 1.9, 1.0)):
        drafter.options.policy = Planned(2, costs(*seconds))
        for tokens in (2, 3, 4, 5, 9, 13):
            plain = target.generate(prompt_ids(), max_new_tokens=tokens, do_sample=False)
            fast = target.generate(
                prompt_ids(),
                max_new_tokens=tokens,
                do_sample=False,
                assistant_model=drafter,
                **static_cache(target, 6 + tokens),
            )
            assert torch.equal(plain, fast)
        if family == "llama":
            assert max(record.rows for record in drafter.last_generation.history) == len(seconds)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_output_has_the_targets_distribution(family, monkeypatch):
    vocab, horizon = 2, 4
    window = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3" else {}
    target = make_target(family, vocab_size=vocab, seed=5, num_hidden_layers=2, pad_token_id=None, **window)
    drafter = make_drafter(target, seed=6, block_size=2, target_layer_ids=[0], num_hidden_layers=1)
    drafter.options.policy, drafter.options.skinny_linear = FixedLength(2), False
    ids = torch.tensor([[0, 1, 1, 0]])
    arguments = {"do_sample": True, "top_k": 0}
    wanted = exact_distribution(target, ids, horizon, arguments)
    drafter.options.acceptance = "rejection"
    enumerator = enumerate_draws(monkeypatch)
    arguments |= {"max_new_tokens": horizon, "cache_implementation": "static", "assistant_model": drafter}
    found = defaultdict(float)
    for tokens, weight in enumerator.outcomes(lambda: target.generate(ids, **arguments)[0, 4:]):
        found[tuple(tokens.tolist())] += weight
    for tokens, probability in wanted.items():
        assert found[tokens] == pytest.approx(probability, abs=1e-9)


@pytest.mark.parametrize("second", ["plain", "drafter"])
@pytest.mark.parametrize("first", ["plain", "drafter"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_cache_goes_on_in_a_next_turn(family, first, second):
    target = make_target(family)
    drafter = make_drafter(target)
    drafter.options.policy = FixedLength(4)
    with_drafter = {"plain": {}, "drafter": {"assistant_model": drafter}}
    cache = static_cache(target)
    text = target.generate(prompt_ids(3), max_new_tokens=10, do_sample=False, **cache, **with_drafter[first])
    assert int(cache[CACHE_ARGUMENT].get_seq_length()) == 12
    turn = torch.cat([text, prompt_ids(4, seed=5)], dim=1)
    wanted = target.generate(turn, max_new_tokens=20, do_sample=False)
    got = target.generate(turn, max_new_tokens=20, do_sample=False, **cache, **with_drafter[second])
    assert torch.equal(got, wanted)
    if second == "drafter":
        assert drafter.last_generation.prompt_tokens == 5


class _Failing(LogitsProcessor):
    """Raises in its `count`-th call."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, input_ids, scores):
        self.count -= 1
        if not self.count:
            raise InterruptedError
        return scores


@pytest.mark.parametrize("length", [0, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_exception_leaves_a_cache_to_go_on_with(family, length):
    target = make_target(family)
    drafter = make_drafter(target)
    drafter.options.policy = FixedLength(length)
    wanted = target.generate(prompt_ids(), max_new_tokens=30, do_sample=False)
    for count in (2, 3, 5, 8):
        arguments = {"do_sample": False, "assistant_model": drafter} | static_cache(target)
        with pytest.raises(InterruptedError):
            target.generate(prompt_ids(), max_new_tokens=30, logits_processor=[_Failing(count)], **arguments)
        held = int(arguments[CACHE_ARGUMENT].get_seq_length())
        got = target.generate(wanted[:, : held + 1], max_length=37, **arguments)
        assert torch.equal(got, wanted)


def test_a_window_is_put_back_across_its_edge():
    """Whatever it held, however much was read, however much of that stands."""
    target = make_target(
        "gemma3", sliding_window=5, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    generator = torch.Generator().manual_seed(0)
    for before in range(1, 12):
        for rows in range(1, 6):
            for stand in range(rows + 1):
                cache = StaticCache(config=target.config, max_cache_len=40)
                layer = cache.layers[0]
                assert isinstance(layer, StaticSlidingWindowLayer)
                keys = torch.randn(1, 2, before + rows + 1, 8, generator=generator)
                cache.update(keys[:, :, :before], keys[:, :, :before], 0)
                cache.update(keys[:, :, :before], keys[:, :, :before], 1)
                rollback = Rollback(cache, target)
                rollback.snapshot(rows)
                read = keys[:, :, before : before + rows]
                cache.update(read, read, 0), cache.update(read, read, 1)
                rollback.roll_back(rows, committed=stand)
                length = before + stand
                assert layer.get_seq_length() == int(cache.layers[1].cumulative_length) == length
                assert torch.equal(visible(layer), keys[:, :, max(length - 5, 0) : length])
                seen, _ = copy.deepcopy(layer).update(keys[:, :, -1:], keys[:, :, -1:])
                assert torch.equal(seen[:, :, min(length, 4)], keys[:, :, -1])


@pytest.fixture
def no_forward(monkeypatch):
    """A target that must not read anything."""

    def forbid(target):
        def forward(*args, **kwargs):
            raise AssertionError("the prompt was read first")

        monkeypatch.setattr(target, "_prefill", forward)

    return forbid


def test_a_cache_that_is_too_short_is_refused_before_the_prefill(target, drafter, no_forward):
    enough = static_cache(target, 36)
    fast = target.generate(prompt_ids(), max_new_tokens=30, do_sample=False, assistant_model=drafter, **enough)
    assert fast.shape[1] == 37
    no_forward(target)
    arguments = {"do_sample": False, "assistant_model": drafter}
    with pytest.raises(ValueError, match=r"places for 35 tokens, and this call may need 36.*1 new tokens less"):
        target.generate(prompt_ids(), max_new_tokens=30, **arguments, **static_cache(target, 35))
    turn = torch.cat([fast, prompt_ids(2, seed=5)], dim=1)
    with pytest.raises(ValueError, match="may need 39"):
        target.generate(turn, max_new_tokens=1, **arguments, **enough)
    embeds = target.get_input_embeddings()(prompt_ids())
    with pytest.raises(ValueError, match="may need 36"):
        target.generate(inputs_embeds=embeds, max_new_tokens=30, **arguments, **static_cache(target, 35))


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
def test_static_caches_of_hybrids_are_refused_before_the_prefill(family, no_forward):
    target = make_hybrid(family)
    drafter = make_drafter(target)
    no_forward(target)
    with pytest.raises(
        ValueError, match=f"this StaticCache of {type(target).__name__}: it can't be rolled back.*Leave out"
    ):
        target.generate(prompt_ids(), max_new_tokens=4, cache_implementation="static", assistant_model=drafter)


def test_convolutions_without_a_recurrent_state_take_a_static_cache():
    target = make_hybrid("lfm2")
    drafter = make_drafter(target)
    drafter.options.policy = FixedLength(4)
    arguments = {"max_new_tokens": 30, "do_sample": False, "cache_implementation": "static"}
    wanted = target.generate(prompt_ids(), **arguments)
    assert torch.equal(target.generate(prompt_ids(), assistant_model=drafter, **arguments), wanted)


class _Opaque(DynamicLayer):
    """As a quantised layer: what it holds can't be cropped."""

    is_croppable = False


def test_layers_that_can_not_be_cropped_are_refused_before_the_prefill(target, drafter, no_forward):
    no_forward(target)
    cache = DynamicCache()
    cache.layers = [_Opaque() for _ in range(4)]
    with pytest.raises(ValueError, match="this DynamicCache of LlamaForCausalLM: it can't be rolled back"):
        target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter, **{CACHE_ARGUMENT: cache})
