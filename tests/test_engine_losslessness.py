"""Decoded together, every text is the target's own: greedy token for token, sampled exactly in distribution."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest
import torch
from conftest import make_drafter, make_target, prompt_ids
from test_losslessness import enumerate_draws, rates

from dspark_hf import (
    BatchEngine,
    Expectation,
    FixedLength,
    LaggedScheduler,
    LookaheadScheduler,
    StepRates,
    ThroughputScheduler,
    generate_batch,
)
from dspark_hf.decoding import processors


def prompts(lengths, vocab_size=24, seed=0) -> list[torch.Tensor]:
    """Random prompts, [L] each."""
    return [prompt_ids(n, vocab_size, seed + i)[0] for i, n in enumerate(lengths)]


def plain(target, prompt, **settings) -> list[int]:
    """The new tokens of plain greedy decoding."""
    return target.generate(prompt[None], **{"do_sample": False} | settings)[0, len(prompt) :].tolist()


WINDOWED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}
PAIRS = [
    ("llama", "vanilla", {}),
    ("llama", "rnn", {"sample_from_anchor": False}),
    ("llama", "none", {"draft_vocab_size": 4}),
    ("qwen3", "gated", WINDOWED | {"sliding_window_non_causal": True}),
    ("qwen3", "vanilla", {"min_block_size": 2, "sample_from_anchor": False}),
    ("gemma3", "rnn", WINDOWED),
    ("gemma3", "gated", {"sample_from_anchor": False, "min_block_size": 3, "draft_vocab_size": 5}),
    ("gemma3", "vanilla", WINDOWED | {"sample_from_anchor": False, "draft_vocab_size": 5, "block_size": 5, "seed": 3}),
    ("qwen3_moe", "rnn", {"min_block_size": 2}),
]


@pytest.mark.parametrize(("family", "head", "changes"), PAIRS, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_greedy_is_token_identical(family, head, changes):
    """Requests of all lengths, more than run at once, read in pieces; blocks of 3 and whatever an uncalibrated drafter does."""
    # transformers' experts know no float64
    target = make_target(family, vocab_size=7, dtype=torch.float32 if family == "qwen3_moe" else torch.float64)
    texts = prompts([1, 2, 17, 3, 33, 5, 90], 7)
    wanted = [plain(target, p, max_new_tokens=16) for p in texts]
    drafter = make_drafter(target, head, **changes)
    for policy in (FixedLength(3), None):
        limits = {"max_sequences": 4, "prefill_chunk": 16, "policy": policy}
        outputs = generate_batch(target, drafter, texts, max_new_tokens=16, do_sample=False, engine=limits)
        assert [o.token_ids for o in outputs] == wanted
        assert {o.finish_reason for o in outputs} == {"length"}
        assert sum(sum(o.stats.accepted) for o in outputs) > 0


def test_greedy_with_a_block_wider_than_narrow_spans():
    """A block of 20 slots attends alone in the drafter and, once verified, in the target."""
    target = make_target(vocab_size=5)
    drafter = make_drafter(target, block_size=20, **WINDOWED)
    texts = prompts([4, 9, 30], 5)
    limits = {"policy": FixedLength(20)}
    outputs = generate_batch(target, drafter, texts, max_new_tokens=40, do_sample=False, engine=limits)
    assert [o.token_ids for o in outputs] == [plain(target, p, max_new_tokens=40) for p in texts]
    assert max(r.verified for o in outputs for r in o.stats.history) == 20


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_without_a_drafter(family):
    target = make_target(family)
    texts = prompts([1, 40, 3, 11, 70])
    outputs = generate_batch(
        target, None, texts, max_new_tokens=15, do_sample=False, engine={"max_sequences": 3, "prefill_chunk": 8}
    )
    assert [o.token_ids for o in outputs] == [plain(target, p, max_new_tokens=15) for p in texts]
    assert all(sum(o.stats.drafted) == 0 for o in outputs)


def test_a_padded_forward_changes_no_text():
    """A table on which few rows cost more than eight, or than twelve: forwards are padded."""
    target = make_target("gemma3", vocab_size=8)
    drafter = make_drafter(target)
    costs = dict.fromkeys(range(1, 8), 3.0) | {8: 1.0, 9: 3.0, 12: 1.5}
    rates = StepRates(list(costs), [1], [list(costs.values())], [[0.0] * len(costs)], [], 0.0)
    rates.live = False
    texts = prompts([5, 70, 20], 8)
    for policy in (ThroughputScheduler(rates), LookaheadScheduler(rates, Expectation([0.6] * 4, 0.4))):
        engine = BatchEngine(target, drafter, policy=policy)
        for prompt in texts:
            engine.add(prompt, max_new_tokens=15, do_sample=False)
        outputs = sorted(engine.run(), key=lambda o: o.id)
        assert [o.token_ids for o in outputs] == [plain(target, p, max_new_tokens=15) for p in texts]
        assert any(s.rows > s.decoding + s.verified for s in engine.stats.history)
        assert {s.rows for s in engine.stats.history if not s.reading} <= {8, 12}
        assert engine.cache_bytes == 0


def rounds(stats) -> list[tuple]:
    return [(r.planned, r.drafted, r.verified, r.accepted) for r in stats.history]


@pytest.mark.parametrize(("head", "changes"), [(h, c) for f, h, c in PAIRS if f != "qwen3_moe"], ids=str)
def test_rounds_are_those_of_one_text_alone(head, changes):
    """The same drafts (told by the confidences, which read each drafted token) and the same acceptance."""
    target = make_target("gemma3", vocab_size=7)
    # What is drafted may change with a block's length, which with `min_block_size` is the longest of all requests.
    drafter = make_drafter(target, head, **changes | {"min_block_size": None})
    drafter.options.policy, drafter.generation_config.num_assistant_tokens = FixedLength(3), 3
    texts = prompts([2, 17, 6, 33], 7)
    outputs = generate_batch(target, drafter, texts, max_new_tokens=25, do_sample=False, engine={"prefill_chunk": 512})
    for prompt, output in zip(texts, outputs):
        target.generate(prompt[None], max_new_tokens=25, do_sample=False, assistant_model=drafter)
        alone = drafter.last_generation
        assert rounds(output.stats) == rounds(alone)
        assert output.stats.prompt_tokens == alone.prompt_tokens
        assert output.stats.accept_length == alone.accept_length
        for here, there in zip(output.stats.history, alone.history):
            if there.drafted:
                confidences = here.confidence_logits[: here.drafted].double()
                torch.testing.assert_close(confidences, there.confidence_logits.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (17, 4), (8, 7), (9, 8)])
def test_the_first_token_is_the_prompts_however_it_is_read(length, chunk):
    """A prompt of one token, or one of which a piece leaves one token, has the rounds of a prompt read at once."""
    target = make_target(vocab_size=7)
    drafter = make_drafter(target)
    drafter.options.policy, drafter.generation_config.num_assistant_tokens = FixedLength(3), 3
    first, second = prompts([5, length], 7)
    engine = BatchEngine(target, drafter, prefill_chunk=chunk)
    engine.add(first, max_new_tokens=40, do_sample=False)
    while not engine.stats.new_tokens:
        engine.step()
    engine.add(second, max_new_tokens=20, do_sample=False)
    output = next(iter(engine.run()))
    target.generate(second[None], max_new_tokens=20, do_sample=False, assistant_model=drafter)
    assert output.stats.prompt_tokens == length
    assert rounds(output.stats) == rounds(drafter.last_generation)


@pytest.mark.parametrize("length", [1, 9, 12])
def test_a_seed_gives_the_same_text_whoever_the_neighbours_are(length):
    target = make_target(vocab_size=7)
    drafter = make_drafter(target)
    texts = prompts([length, 5, 30], 7)
    settings = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.9}
    found = []
    for neighbours in (0, 1, 2):
        engine = BatchEngine(target, drafter, policy=FixedLength(3), prefill_chunk=8)
        for prompt in texts[1 : 1 + neighbours]:
            engine.add(prompt, seed=1, **settings | {"max_new_tokens": 60})
        engine.step()
        own = engine.add(texts[0], seed=5, **settings)
        found.append(next(o.token_ids for o in engine.run() if o.id == own))
    assert found[0] == found[1] == found[2]


def mixed_requests(rnd: random.Random, count: int) -> list[tuple[torch.Tensor, dict]]:
    """Prompts of 5 to 1500 tokens, greedy and sampled, with all sorts of budgets and stop tokens."""
    lengths = [5, 1500, 700, *(rnd.randint(100, 500) for _ in range(6))]
    lengths += [rnd.randint(5, 80) for _ in range(count - len(lengths))]
    rnd.shuffle(lengths)
    ways = [{"do_sample": False}, {"do_sample": True}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}]
    requests = []
    for i, prompt in enumerate(prompts(lengths, 9, seed=50)):
        stops = rnd.choice([None, rnd.randint(2, 8), rnd.sample(range(2, 9), 2)])
        settings = rnd.choice([ways[0], *ways]) | {"max_new_tokens": rnd.randint(1, 30), "eos_token_id": stops}
        requests.append((prompt, settings | {"seed": i}))
    return requests


def test_64_mixed_requests_joining_at_random_times():
    rnd = random.Random(7)
    target = make_target(vocab_size=9, max_position_embeddings=2048)
    drafter = make_drafter(target)
    fixed = FixedLength(3)
    engine = BatchEngine(target, drafter, policy=fixed, max_sequences=9, prefill_chunk=48, max_tokens_in_cache=2600)
    requests, outputs, ids = mixed_requests(rnd, 64), {}, []
    while len(ids) < 64 or engine.num_unfinished:
        for prompt, settings in requests[len(ids) : len(ids) + rnd.choice([0, 0, 1, 1, 6])]:
            ids.append(engine.add(prompt, **settings))
        outputs |= {o.id: o for o in engine.step()}

    alone = BatchEngine(target, drafter, policy=FixedLength(3))
    for i, (prompt, settings) in zip(ids, requests):
        output, wanted = outputs[i], dict(settings)
        seed, stops = wanted.pop("seed"), settings["eos_token_id"] or []
        if settings["do_sample"]:
            alone.add(prompt, seed=seed, **wanted)
            assert output.token_ids == next(alone.run()).token_ids, f"request {i}"
        else:
            assert output.token_ids == plain(target, prompt, **wanted), f"request {i}"
        ends = [t in ([stops] if isinstance(stops, int) else stops) for t in output.token_ids]
        assert output.error is None and output.prompt_ids == prompt.tolist()
        assert not any(ends[:-1])
        assert output.finish_reason == ("stop" if ends[-1] else "length")
        assert ends[-1] or len(ends) == settings["max_new_tokens"]
        assert len(ends) <= settings["max_new_tokens"]

    assert Counter(o.finish_reason for o in outputs.values()) == engine.stats.finished
    assert set(engine.stats.finished) == {"stop", "length"}
    history = engine.stats.history
    assert any(s.reading and s.decoding and s.waiting for s in history)
    assert max(s.decoding + s.reading for s in history) <= 9
    assert all(s.prefill_rows <= 48 for s in history if s.decoding)
    assert max(s.cache_tokens for s in history) <= 2600
    assert sum(sum(o.stats.accepted) for o in outputs.values()) > 20
    assert engine.cache_tokens == engine.cache_bytes == 0
    assert engine._backend.store.num_slots == engine._queue.draft_store.num_slots == 0


# -- sampling, by enumeration ------------------------------------------------------------------------------------------


def choices(lengths: dict[int, list[int]], otherwise: list[int]):
    """`prefix_allowed_tokens_fn` that allows a few tokens at each length, so that there are not too many outcomes."""
    return lambda batch, ids: lengths.get(len(ids), otherwise)


def exact(target, ids, horizon, settings) -> dict[tuple[int, ...], float]:
    """The target's distribution of the next `horizon` tokens, from its forward alone."""
    config, _ = target._prepare_generation_config(None, do_sample=True, top_k=0, temperature=settings["temperature"])
    allowed = settings["prefix_allowed_tokens_fn"]
    processors = target._get_logits_processor(config, ids.shape[1], prefix_allowed_tokens_fn=allowed)
    distribution = {(): 1.0}
    for _ in range(horizon):
        longer = {}
        for tokens, weight in distribution.items():
            text = torch.cat([ids, torch.tensor([tokens], dtype=torch.long)], dim=1)
            with torch.no_grad():
                probs = processors(text, target(input_ids=text).logits[:, -1])[0].softmax(-1).tolist()
            longer |= {(*tokens, t): weight * p for t, p in enumerate(probs) if p > 0}
        distribution = longer
    return distribution


def two_rates(*seconds, draft=0.0) -> StepRates:
    table = rates(*seconds, draft=draft)
    table.sequences, table.sequence_seconds = [2], [0.0]
    table.batch_block_seconds, table.batch_step_seconds = [[draft] * len(seconds)], [0.0]
    return table


# Such costs that each of them, but the first, sometimes cuts a draft and sometimes lets it through.
BATCH_POLICIES = {
    "fixed": lambda: FixedLength(2),
    "fixed-top": lambda: FixedLength(2),
    "throughput": lambda: ThroughputScheduler(two_rates(0.8, 1.0, 1.3, 1.5, 1.6517)),
    "lagged": lambda: LaggedScheduler(two_rates(1.0, 1.2, 1.9, 2.2, 2.3), lag=1),
    "lookahead": lambda: LookaheadScheduler(
        two_rates(0.8363, 1.0, 1.1637, 1.3274, 1.4911), Expectation([0.7, 0.6], 0.5)
    ),
}


@pytest.mark.parametrize("policy", BATCH_POLICIES)
def test_sampled_joint_distribution_is_exact(policy, monkeypatch):
    """Two requests of one engine, every outcome of drafting and acceptance of both.

    With "fixed" the whole vocabulary is drafted from ("fixed-top": its best two at each position), and one decodes while the
    other's prompt is still read.
    """
    fixed = policy in ("fixed", "fixed-top")
    target = make_target(seed=5, vocab_size=4, num_hidden_layers=2, initializer_range=0.2)
    small = {"block_size": 2, "target_layer_ids": [0], "num_hidden_layers": 1, "draft_vocab_size": None if fixed else 2}
    drafter = make_drafter(target, seed=6, **small)
    drafter.options.skinny_linear, drafter.options.acceptance = False, "rejection"
    drafter.options.top_candidates = 2 if policy == "fixed-top" else None
    monkeypatch.setattr(processors, "_WITH_MEMORY", ())  # the functions below have none
    asks = [
        (prompt_ids(4, 4, 9), 4, {"temperature": 3.0, "prefix_allowed_tokens_fn": choices({4: [1]}, [2, 3])}),
        (
            prompt_ids(6, 4, 2),
            3,
            {"temperature": 1.0, "prefix_allowed_tokens_fn": choices({6: [3], 7: [1, 2, 3]}, [2, 3])},
        ),
    ]
    wanted = [exact(target, *ask) for ask in asks]

    enumerator = enumerate_draws(monkeypatch)
    engine = BatchEngine(target, drafter, policy=FixedLength(0), prefill_chunk=2 if fixed else 64)
    rounds: Counter[tuple[int, int]] = Counter()

    def run():
        engine.policy = BATCH_POLICIES[policy]()
        ids = [engine.add(ids, max_new_tokens=n, do_sample=True, top_k=0, **settings) for ids, n, settings in asks]
        outputs = {output.id: output for output in engine.run()}
        rounds.update((r.planned, r.verified) for o in outputs.values() for r in o.stats.history)
        return tuple(tuple(outputs[i].token_ids) for i in ids)

    found: dict[tuple, float] = defaultdict(float)
    for texts, weight in enumerator.outcomes(run):
        found[texts] += weight
    assert rounds[2, 2] + rounds[1, 1] > 0
    assert fixed or sum(count for (planned, verified), count in rounds.items() if verified < planned) > 0
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    for first, p in wanted[0].items():
        for second, q in wanted[1].items():
            assert found.pop((first, second)) == pytest.approx(p * q, abs=1e-9)
    assert not found
