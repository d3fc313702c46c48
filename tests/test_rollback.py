"""Targets with a recurrent state: it is put back where a drafted token fell, or the target is refused by name."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from conftest import FAMILIES, make_drafter, make_target, prompt_ids
from test_losslessness import enumerate_draws, exact_distribution
from tiny_targets import CONVOLUTIONAL, RECURRENT, REFUSED, make_hybrid
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

import dspark_hf
from dspark_hf import FixedLength, LookaheadScheduler, StepRates
from dspark_hf.decoding.compat import CACHE_ARGUMENT, cache_of
from dspark_hf.decoding.hook import check_pair
from dspark_hf.decoding.profiling import ProfilePlan, measure_step_rates
from dspark_hf.decoding.rollback import Rollback


def states_of(cache) -> list[torch.Tensor]:
    """All that a cache holds of a text: keys, values, convolution inputs (the last ones) and recurrent states."""
    states = []
    for layer in cache.layers:
        attributes = vars(layer)
        states += [attributes[n] for n in ("keys", "values") if isinstance(attributes.get(n), torch.Tensor)]
        for i, size in attributes.get("conv_kernel_size", {}).items():
            states += [layer.conv_states[i][..., -size:]] if size else []
        states += [s for s in attributes.get("recurrent_states", {}).values() if s is not None]
    return states


@pytest.mark.parametrize("family", [*RECURRENT, *CONVOLUTIONAL])
def test_hybrids_are_token_identical(family):
    rounds = defaultdict(int)
    for seed in range(4):
        target = make_hybrid(family, vocab_size=4, seed=seed)
        drafter = make_drafter(target, seed=20 + seed, block_size=3)
        drafter.options.policy = FixedLength(3)
        ids = prompt_ids(3 + 3 * seed, 4, seed)  # shorter than the convolutions, too
        arguments = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
        plain = target.generate(ids, **arguments)
        fast = target.generate(ids, assistant_model=drafter, **arguments)
        assert torch.equal(plain.sequences, fast.sequences), f"seed {seed}"
        for wanted, got in zip(states_of(cache_of(plain)), states_of(cache_of(fast)), strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)
        for record in drafter.last_generation.history:
            assert record.rows == record.replayed + record.drafted + 1
            rounds["replayed"] += record.replayed > 0
            rounds["whole"] += record.drafted > 0 and record.accepted == record.drafted
            rounds["part"] += 0 < record.accepted < record.drafted
            rounds["none"] += record.drafted > 0 and record.accepted == 0
    assert rounds["whole"] and rounds["part"] and rounds["none"]
    assert (rounds["replayed"] > 0) == (family in RECURRENT)


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
def test_sampled_output_has_the_targets_distribution(family, monkeypatch):
    """Every outcome of two rounds, so that the second reads again what stood of the first."""
    vocab, horizon = 2, 4
    target = make_hybrid(
        family, vocab_size=vocab, seed=5, num_hidden_layers=4, initializer_range=0.2, pad_token_id=None
    )
    drafter = make_drafter(target, seed=6, block_size=2, mask_token_id=1, target_layer_ids=[0, 1], num_hidden_layers=1)
    drafter.options.policy, drafter.options.skinny_linear = FixedLength(2), False
    ids = torch.tensor([[0, 1, 1, 0]])
    arguments = {"do_sample": True, "top_k": 0}
    wanted = exact_distribution(target, ids, horizon, arguments)
    drafter.options.acceptance = "rejection"
    enumerator = enumerate_draws(monkeypatch)

    def run():
        return target.generate(ids, max_new_tokens=horizon, assistant_model=drafter, **arguments)[0, 4:]

    found, replayed = defaultdict(float), 0
    for tokens, weight in enumerator.outcomes(run):
        found[tuple(tokens.tolist())] += weight
        replayed += sum(record.replayed for record in drafter.last_generation.history)
    assert replayed > 0
    # These layers compute in float32 whatever the model's dtype is.
    for tokens, probability in wanted.items():
        assert found[tokens] == pytest.approx(probability, abs=1e-5)


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "lfm2"])
def test_second_turn_continues_from_the_cache(family):
    target = make_hybrid(family, seed=8)
    drafter = make_drafter(target)
    first = target.generate(
        prompt_ids(9), max_new_tokens=10, do_sample=False, return_dict_in_generate=True, assistant_model=drafter
    )
    turn = torch.cat([first.sequences, prompt_ids(4, seed=5)], dim=1)
    anew = target.generate(turn, max_new_tokens=12, do_sample=False)
    fast = target.generate(
        turn, max_new_tokens=12, do_sample=False, assistant_model=drafter, **{CACHE_ARGUMENT: cache_of(first)}
    )
    assert torch.equal(anew, fast)
    assert drafter.last_generation.prompt_tokens == 5
    assert cache_of(first).get_seq_length() == 9 + 10 + 4 + 12 - 1


def test_a_stop_inside_an_accepted_block_leaves_a_cache_to_go_on_with():
    target = make_hybrid("qwen3_5", vocab_size=6, seed=1)
    drafter = make_drafter(target, block_size=3)
    drafter.options.policy = FixedLength(3)
    text = target.generate(prompt_ids(5, 6), max_new_tokens=20, do_sample=False)
    for position in range(7, 16):
        cache = DynamicCache(config=target.config)
        arguments = {"do_sample": False, CACHE_ARGUMENT: cache, "assistant_model": drafter}
        part = target.generate(prompt_ids(5, 6), max_length=position, eos_token_id=int(text[0, 9]), **arguments)
        assert torch.equal(part, text[:, : part.shape[1]])
        assert cache.get_seq_length() == part.shape[1] - 1
        assert torch.equal(target.generate(part, max_length=25, **arguments), text)


class _Cancelled(Exception):
    pass


class _Cancelling:
    """A streamer that gives up after some tokens; `tokens` are the prompt's and those."""

    def __init__(self, count: int) -> None:
        self.count, self.tokens = count, []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()
        self.count -= 1
        if self.count < 0:
            raise _Cancelled

    def end(self) -> None:
        pass


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "lfm2"])
def test_an_exception_leaves_a_cache_to_go_on_with(family):
    target = make_target(family) if family in FAMILIES else make_hybrid(family, seed=1)
    drafter = make_drafter(target)
    drafter.options.policy = FixedLength(4)
    for count in range(1, 9):
        streamer, cache = _Cancelling(count), DynamicCache(config=target.config)
        arguments = {"do_sample": False, CACHE_ARGUMENT: cache, "assistant_model": drafter}
        with pytest.raises(_Cancelled):
            target.generate(prompt_ids(), max_new_tokens=20, streamer=streamer, **arguments)
        assert cache.get_seq_length() < len(streamer.tokens) == 7 + count
        assert cache.dspark_context.end >= cache.get_seq_length()  # the drafter has seen what it holds
        turn = torch.cat([torch.tensor([streamer.tokens]), prompt_ids(6, seed=9)], dim=1)
        wanted = target.generate(turn, max_new_tokens=8, do_sample=False)
        assert torch.equal(target.generate(turn, max_new_tokens=8, **arguments), wanted)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "lfm2"])
def test_a_cache_handed_back_no_longer_keeps_what_lies_outside_of_its_windows(family):
    target = make_target(family) if family in FAMILIES else make_hybrid(family, seed=1)
    caches = []
    for extra in ({}, {"assistant_model": make_drafter(target)}):
        cache = DynamicCache(config=target.config)
        text = target.generate(prompt_ids(9), max_new_tokens=10, do_sample=False, **{CACHE_ARGUMENT: cache}, **extra)
        target.generate(text, max_new_tokens=30, do_sample=False, **{CACHE_ARGUMENT: cache})
        caches.append([t.shape for layer in cache.layers for t in _tensors(layer)])
    assert caches[0] == caches[1]


def _tensors(layer) -> list[torch.Tensor]:
    held = vars(layer)
    return [t for t in (held.get("keys"), *held.get("conv_states", {}).values()) if isinstance(t, torch.Tensor)]


def test_outputs_as_plain_decoding_returns_them():
    target = make_hybrid("qwen3_5", attn_implementation="eager")
    arguments = {
        "max_new_tokens": 20,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_hidden_states": True,
        "output_attentions": True,
    }
    wanted = target.generate(prompt_ids(), **arguments)
    got = target.generate(prompt_ids(), assistant_model=make_drafter(target), **arguments)
    assert torch.equal(wanted.sequences, got.sequences)
    for name in ("hidden_states", "attentions"):
        assert len(getattr(got, name)) == len(getattr(wanted, name)) == 20
        for ours, theirs in zip(getattr(got, name), getattr(wanted, name)):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    for a, b in zip(got.scores, wanted.scores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4, check_dtype=False)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_left_padded_prompt(family):
    target = make_hybrid(family)
    ids = prompt_ids(8)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], dim=1)
    arguments = {"max_new_tokens": 20, "do_sample": False, "attention_mask": (padded > 0).long()}
    plain = target.generate(padded, **arguments)
    assert torch.equal(plain, target.generate(padded, assistant_model=make_drafter(target), **arguments))


def test_what_is_read_again_stays_bounded_and_is_never_padded():
    target = make_hybrid("qwen3_5", seed=3)
    drafter = make_drafter(target, block_size=4)
    # Ten rows are said to be the cheapest: other targets would have every forward padded to ten.
    rates = StepRates(list(range(1, 11)), [1], [[9.0] * 9 + [1.0]], [[0.0] * 10], [0.0] * 4, 0.0)
    for admission in (FixedLength(4), LookaheadScheduler(rates)):
        drafter.options.policy = admission
        target.generate(prompt_ids(), max_new_tokens=60, do_sample=False, assistant_model=drafter)
        history = drafter.last_generation.history
        assert all(record.rows == record.replayed + record.drafted + 1 <= 16 for record in history)
    assert max(record.replayed for record in history) > 4


def test_step_rates_of_a_hybrid_are_measured():
    target = make_hybrid("falcon_h1", dtype=torch.float32)
    rates = measure_step_rates(target, make_drafter(target), ProfilePlan((1, 3), (40,), sweeps=1))
    assert rates.rows == [1, 3]


def test_settling_puts_every_layer_back():
    target = make_hybrid("falcon_h1")
    cache = DynamicCache(config=target.config)
    read = lambda ids: target(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: cache})  # noqa: E731
    with torch.no_grad():
        read(prompt_ids(5))
        rollback = Rollback(cache, target)
        before = [state.clone() for state in states_of(cache)]
        for _ in range(2):
            rollback.snapshot(4)
            read(prompt_ids(4))
            rollback.roll_back(4, committed=0)
            for state, wanted in zip(states_of(cache), before, strict=True):
                assert torch.equal(state, wanted)
    assert rollback.lag == 0


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("jamba", "other logits than one at a time"),
        ("nemotron_h", "bounds its time step"),
        ("zamba2", "bounds its time step"),
        ("mamba2", "none of its layers is one of attention"),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM keeps a state that can't be rolled back"),
        ("minimax", "outside of transformers' caches"),
    ],
)
def test_targets_that_can_not_be_rolled_back_are_refused_at_load(family, reason):
    assert family in REFUSED
    target = make_hybrid(family, dtype=torch.float32)
    drafter = make_drafter(target, bind=False)
    with pytest.raises(ValueError, match=reason):
        check_pair(target, drafter)
    with pytest.raises(ValueError, match="can't be rolled back"):
        target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)


def test_a_lack_of_memory_is_no_refusal(monkeypatch):
    target = make_hybrid("qwen3_5", dtype=torch.float32)

    def forward(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    drafter = make_drafter(target)
    monkeypatch.setattr(target.model, "forward", forward)
    with pytest.raises(torch.OutOfMemoryError):
        check_pair(target, drafter)


def test_narrow_float32_products_are_told_from_another_state():
    """As TF32 rounds them; a target that does not read on from its state is still refused."""
    target, other = make_hybrid("qwen3_5", dtype=torch.float32), make_hybrid("jamba", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)

    def roughen(module, args, output):
        return output * (1 + 3e-3 * torch.randn(output.shape, generator=generator))

    target.lm_head.register_forward_hook(roughen)
    drafter = make_drafter(target)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        with pytest.raises(ValueError, match="other logits than one at a time"):
            check_pair(target, drafter)
        torch.set_float32_matmul_precision("high")
        check_pair(target, drafter)
        with pytest.raises(ValueError, match="other logits than one at a time"):
            check_pair(other, make_drafter(other))
    finally:
        torch.set_float32_matmul_precision(before)


def test_several_returned_sequences_are_refused_for_hybrids_too():
    target = make_hybrid("qwen3_5")
    with pytest.raises(ValueError, match=r"one sequence|num_return_sequences has to be 1"):
        target.generate(
            prompt_ids(), max_new_tokens=4, do_sample=True, num_return_sequences=2, assistant_model=make_drafter(target)
        )


def test_transformers_still_refuses_other_assistants_for_them():
    target = make_hybrid("qwen3_5")
    if not hasattr(target, "_is_stateful"):
        pytest.skip("transformers takes them since 5.25")
    with pytest.raises(ValueError, match="stateful"):
        target.generate(prompt_ids(), max_new_tokens=4, assistant_model=make_target())


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "lfm2"])
def test_the_batch_engine_refuses_them_by_name(family):
    target = make_hybrid(family, dtype=torch.float32)
    with pytest.raises(ValueError, match=rf"{type(target).__name__} .*batch engine can't keep"):
        dspark_hf.BatchEngine(target)


class _KeepsAll(DynamicLayer):
    def crop(self, tokens_to_remove: int) -> None:
        pass


class _KeepsTheLast(DynamicLayer):
    def crop(self, tokens_to_remove: int) -> None:
        super().crop(min(tokens_to_remove + 1, 0))


class _WindowKeepsAll(DynamicSlidingWindowLayer):
    def __init__(self) -> None:
        super().__init__(sliding_window=200)

    def crop(self, tokens_to_remove: int) -> None:
        pass


class _OfItsOwn(CacheLayerMixin):
    """Keys and values in lists, one entry a token."""

    is_sliding, is_croppable = False, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.parts, self.is_initialized = ([], []), True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for part, states in zip(self.parts, (key_states, value_states)):
            part += states.split(1, dim=2)
        return tuple(torch.cat(part, dim=2) for part in self.parts)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return len(self.parts[0]) if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        for part in self.parts if tokens_to_remove else ():
            del part[tokens_to_remove:]


class _OfItsOwnKeepsAll(_OfItsOwn):
    def crop(self, tokens_to_remove: int) -> None:
        pass


class _Fine(DynamicLayer):
    pass


def _cache_of(*kinds: type) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [kinds[i % len(kinds)]() for i in range(4)]
    cache.layer_class_to_replicate = None
    return cache


@pytest.mark.parametrize("kind", [_KeepsAll, _KeepsTheLast, _WindowKeepsAll, _OfItsOwnKeepsAll])
def test_a_layer_whose_crop_does_not_crop_is_refused(kind, target, drafter):
    drafter.options.policy, texts = FixedLength(3), []
    wanted = target.generate(prompt_ids(), max_new_tokens=20, do_sample=False)
    for kinds in ([kind], [DynamicLayer, kind]):  # in every layer, or only in some

        class Streamer:
            def put(self, value):
                texts[-1] += value.flatten().tolist()

            def end(self):
                pass

        texts.append([])
        with pytest.raises(ValueError, match=f"{kind.__name__}.*can't be rolled back") as refused:
            target.generate(
                prompt_ids(),
                max_new_tokens=20,
                do_sample=False,
                assistant_model=drafter,
                streamer=Streamer(),
                **{CACHE_ARGUMENT: _cache_of(*kinds)},
            )
        assert "\n" not in str(refused.value)
        assert texts[-1] == wanted[0, : len(texts[-1])].tolist()  # nothing wrong was given out before


@pytest.mark.parametrize("kind", [_Fine, _OfItsOwn])
def test_a_users_own_layer_is_served(kind, target, drafter):
    drafter.options.policy = FixedLength(3)
    wanted = target.generate(prompt_ids(), max_new_tokens=20, do_sample=False)
    arguments = {"do_sample": False, "assistant_model": drafter, CACHE_ARGUMENT: _cache_of(kind)}
    assert torch.equal(target.generate(prompt_ids(), max_new_tokens=20, **arguments), wanted)
    assert any(r.accepted < r.drafted for r in drafter.last_generation.history)


def test_stock_layers_are_asked_no_length_when_they_are_cropped(target, drafter, monkeypatch):
    cache = DynamicCache(config=target.config)
    target(prompt_ids(), use_cache=True, **{CACHE_ARGUMENT: cache})
    rollback = Rollback(cache, target)
    rollback.snapshot(3)
    target(prompt_ids(3), use_cache=True, **{CACHE_ARGUMENT: cache})
    monkeypatch.setattr(DynamicLayer, "get_seq_length", lambda self: pytest.fail("asked"))
    rollback.roll_back(3, committed=1)
