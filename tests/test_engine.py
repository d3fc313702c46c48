"""The batch engine: settings of requests, what is refused, faults of one request or of the machine, records."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import make_drafter, make_letter_tokenizer, make_target, prompt_ids
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    Phi3Config,
    Phi3ForCausalLM,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)

from dspark_hf import (
    BatchEngine,
    ConfidenceThreshold,
    Expectation,
    FixedLength,
    GenerationStats,
    LookaheadScheduler,
    StepRates,
    ThroughputScheduler,
    generate_batch,
)
from dspark_hf.scheduling.policy import RoundRecord

PROMPTS = [prompt_ids(n, 8, n)[0] for n in (5, 12, 30, 8, 3)]


@pytest.fixture
def target():
    return make_target(vocab_size=8)


@pytest.fixture
def drafter(target):
    return make_drafter(target)


def fixed() -> FixedLength:
    return FixedLength(3)


def complete(settings: dict) -> dict:
    """Greedy, twelve tokens, where nothing else is said."""
    return settings if "generation_config" in settings else {"max_new_tokens": 12, "do_sample": False} | settings


def serve(target, drafter, prompts=PROMPTS, engine=None, **settings) -> list:
    return generate_batch(target, drafter, prompts, engine={"policy": fixed()} | (engine or {}), **complete(settings))


def plain(target, prompt, **settings) -> list[int]:
    return target.generate(prompt[None], **complete(settings))[0, len(prompt) :].tolist()


class Recorder:
    """A streamer that keeps what it gets; `act` is called with the number of new tokens so far."""

    def __init__(self, act=lambda count: None):
        self.parts, self.ends, self.act = [], 0, act

    def put(self, value):
        self.parts.append(value.tolist())
        self.act(len(self.parts) - 1)

    def end(self):
        self.ends += 1


def check_untouched(target) -> None:
    """The target is as nobody had used it."""
    assert target.config._attn_implementation == "sdpa"
    for module in target.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert "forward" not in vars(module)
    assert target.generate(PROMPTS[0][None], max_new_tokens=3, do_sample=False).shape == (1, 8)


def check_empty(engine) -> None:
    """Nothing is held for anybody."""
    assert engine.num_unfinished == engine.cache_tokens == engine.cache_bytes == 0
    assert engine._backend.store.num_slots == engine._queue.draft_store.num_slots == 0
    assert not engine._cancelled and not engine._queue.running and not engine._queue.waiting


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5},
        {"min_new_tokens": 6, "eos_token_id": [2, 3, 5]},
        {"suppress_tokens": [3, 4]},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [2 + int(ids.sum()) % 4, 6]},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [7]},
        {"no_repeat_ngram_size": 2},
        {"eos_token_id": 4},
        {"eos_token_id": [4, 6]},
        {"max_new_tokens": 1},
        {"max_new_tokens": None, "max_length": 31},
        {"stop_strings": ["d", "ge"], "tokenizer": make_letter_tokenizer(8)},
        {"stopping_criteria": StoppingCriteriaList([lambda ids, scores, **kwargs: torch.tensor([ids.sum() % 7 == 0])])},
        {"generation_config": GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=4)},
    ],
    ids=lambda s: "-".join(s),
)
@pytest.mark.parametrize("draft_vocab_size", [None, 4], ids=["full", "reduced"])
def test_settings_mean_what_they_mean_in_generate(target, settings, draft_vocab_size):
    drafter = make_drafter(target, draft_vocab_size=draft_vocab_size)
    outputs = serve(target, drafter, **settings)
    assert [o.token_ids for o in outputs] == [plain(target, p, **settings) for p in PROMPTS]


def test_why_a_text_ended(target, drafter):
    """A stop token as the last one allowed is a stop; a criterion is one too."""
    texts = [plain(target, p) for p in PROMPTS]
    stop = texts[0][6]
    first = texts[0].index(stop) + 1
    reasons = {}
    for budget in (first - 1, first, first + 1):
        output = serve(target, drafter, PROMPTS[:1], max_new_tokens=budget, eos_token_id=[stop, 0])[0]
        assert output.token_ids == texts[0][: min(budget, first)]
        reasons[budget - first] = output.finish_reason
    assert reasons == {-1: "length", 0: "stop", 1: "stop"}
    criterion = StoppingCriteriaList([lambda ids, scores, **kwargs: torch.tensor([ids.shape[1] >= 5 + 4])])
    output = serve(target, drafter, PROMPTS[:1], stopping_criteria=criterion)[0]
    assert (output.token_ids, output.finish_reason) == (texts[0][:4], "stop")


def test_each_request_has_its_own_settings(target, drafter):
    configs = [GenerationConfig(max_new_tokens=3 * i + 1, do_sample=False, eos_token_id=i + 2) for i in range(5)]
    outputs = generate_batch(target, drafter, PROMPTS, configs)
    assert [o.token_ids for o in outputs] == [plain(target, p, generation_config=c) for p, c in zip(PROMPTS, configs)]
    for values in ({"seeds": [1]}, {"generation_config": [None] * 4}):
        with pytest.raises(ValueError, match="5 prompts"):
            generate_batch(target, drafter, PROMPTS, **values)
    assert generate_batch(target, drafter, []) == []


def test_scores_are_kept_where_they_are_asked_for(target, drafter):
    ask = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.3}
    outputs = serve(target, drafter, **ask)
    for prompt, output in zip(PROMPTS, outputs):
        wanted = target.generate(prompt[None], max_new_tokens=12, do_sample=False, **ask)
        for name in ("scores", "logits"):
            assert len(getattr(output, name)) == len(output.token_ids) == 12
            for here, there in zip(getattr(output, name), getattr(wanted, name)):
                torch.testing.assert_close(here, there)
    assert serve(target, drafter)[0].scores is None


def test_streamers_get_prompt_and_tokens_one_by_one(target, drafter):
    engine = BatchEngine(target, drafter, policy=fixed(), max_sequences=2)
    recorders = [Recorder() for _ in PROMPTS]
    for prompt, recorder in zip(PROMPTS, recorders):
        engine.add(prompt, streamer=recorder, max_new_tokens=12, do_sample=False)
        assert recorder.parts == [[prompt.tolist()]]
    list(engine.run())
    for prompt, recorder in zip(PROMPTS, recorders):
        wanted = Recorder()
        target.generate(prompt[None], max_new_tokens=12, do_sample=False, streamer=wanted)
        assert recorder.parts == wanted.parts
        assert recorder.ends == 1


def test_seeds_make_sampled_texts_repeatable(target, drafter):
    settings = {"do_sample": True, "temperature": 1.5, "seeds": [7, 7, 8, 9, 10]}
    state = torch.get_rng_state()
    twins = [PROMPTS[0], *PROMPTS[:4]]
    first, again = (serve(target, drafter, twins, **settings) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert [o.token_ids for o in first] == [o.token_ids for o in again]
    assert first[0].token_ids == first[1].token_ids
    other = serve(target, drafter, twins, **settings | {"seeds": [1, 2, 3, 4, 5]})
    assert all(a.token_ids != b.token_ids for a, b in zip(first, other))


def test_requests_added_from_within_a_streamer(target, drafter):
    engine = BatchEngine(target, drafter, policy=fixed())

    def act(count):
        if count == 3:
            engine.add(PROMPTS[1], max_new_tokens=12, do_sample=False)

    engine.add(PROMPTS[0], streamer=Recorder(act), max_new_tokens=12, do_sample=False)
    outputs = list(engine.run())
    assert [o.token_ids for o in outputs] == [plain(target, p) for p in PROMPTS[:2]]
    check_untouched(target)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "at least one"),
        ([[2, 3], [4, 5]], {}, "list of token ids"),
        (torch.zeros(2, 3, dtype=torch.long), {}, r"\[2, 3\]"),
        ([0.5, 1.0], {}, "list of token ids"),
        ("text", {}, "list of token ids"),
        ([2] * 256, {}, "context of 256"),
        ([2] * 250, {}, "context of 256"),
        ([2] * 60, {}, "max_tokens_in_cache"),
        ([2, 8], {}, "8"),
        ([2, -1], {}, "-1"),
        ([2, 3], {"num_beams": 2}, "num_beams 2"),
        ([2, 3], {"num_return_sequences": 2, "do_sample": True}, "num_return_sequences 2"),
        ([2, 3], {"position_ids": torch.tensor([[4, 8]])}, "position_ids"),
        ([2, 3], {"no_such_setting": 1}, "no_such_setting"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_requests_refused_at_add(target, drafter, prompt, settings, message):
    most = 64 if message == "max_tokens_in_cache" else None
    engine = BatchEngine(target, drafter, policy=fixed(), max_tokens_in_cache=most)
    with pytest.raises(ValueError, match=message):
        engine.add(prompt, **{"max_new_tokens": 9, "do_sample": False} | settings)
    check_empty(engine)


SMALL = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def longrope() -> Phi3ForCausalLM:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_theta": 1e4}
    lengths = {"max_position_embeddings": 256, "original_max_position_embeddings": 24}
    rope["original_max_position_embeddings"] = 24
    return Phi3ForCausalLM(Phi3Config(**SMALL, **lengths, rope_parameters=rope)).double().eval()


def latent() -> DeepseekV3ForCausalLM:
    dims = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    config = DeepseekV3Config(**SMALL, **dims, **experts, head_dim=4, moe_intermediate_size=16, first_k_dense_replace=2)
    return DeepseekV3ForCausalLM(config).eval()


@pytest.mark.parametrize("build", [longrope, latent])
def test_a_target_of_another_kind_is_refused_or_served_right(build):
    """Positions whose meaning depends on the longest text of a forward; a cache of latents instead of keys."""
    torch.manual_seed(0)
    target = build()
    prompts = [prompt_ids(n, seed=n)[0] for n in (5, 40)]
    wanted = [target.generate(p[None], max_new_tokens=8, do_sample=False)[0, len(p) :].tolist() for p in prompts]
    try:
        outputs = generate_batch(target, None, prompts, max_new_tokens=8, do_sample=False)
    except ValueError:
        return
    assert [o.token_ids for o in outputs] == wanted


@pytest.mark.parametrize("limit", ["max_sequences", "prefill_chunk", "max_tokens_in_cache"])
def test_limits_below_one_are_refused(target, limit):
    with pytest.raises(ValueError, match=limit):
        BatchEngine(target, **{limit: 0})


def test_pairs_that_do_not_fit_are_refused(target, drafter):
    config = T5Config(vocab_size=24, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="encoder-decoder"):
        BatchEngine(T5ForConditionalGeneration(config))
    with pytest.raises(ValueError, match="vocab_size 30"):
        BatchEngine(target, make_drafter(target, bind=False, vocab_size=30), policy=fixed())
    other = make_target("gemma3")
    other.config.layer_types = ["linear_attention", "full_attention"] * 2
    with pytest.raises(ValueError, match="linear_attention"):
        BatchEngine(other)


def test_a_policy_that_reads_confidences_needs_a_head(target):
    headless = make_drafter(target, enable_confidence_head=False)
    with pytest.raises(ValueError, match="confidence head"):
        serve(target, headless, engine={"policy": ConfidenceThreshold(0.5)})
    check_untouched(target)


# -- records -----------------------------------------------------------------------------------------------------------


def test_the_engines_sums_are_those_of_its_requests(target, drafter):
    drafter.options.lookup_drafts = False  # copies are counted apart
    rates = StepRates.of_target([1.0, 1.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.9])
    rates.live = False
    policies = [fixed(), ThroughputScheduler(rates), LookaheadScheduler(rates, Expectation([0.6] * 4, information=0.1))]
    for policy in policies:
        engine = BatchEngine(target, drafter, policy=policy, max_sequences=3, prefill_chunk=9)
        for prompt in PROMPTS:
            engine.add(prompt, max_new_tokens=20, do_sample=False)
        outputs, stats = list(engine.run()), engine.stats
        for name in ("drafted", "verified", "accepted"):
            own = [getattr(o.stats, name) for o in outputs]
            assert getattr(stats, name) == [sum(counts) for counts in zip(*own)]
            assert sum(getattr(stats, name)) == sum(getattr(step, name) for step in stats.history) > 0
        assert sum(stats.accepted) <= sum(stats.verified) <= sum(stats.drafted)
        assert stats.new_tokens == sum(len(o.token_ids) for o in outputs) == 100
        assert stats.prompt_tokens == sum(o.stats.prompt_tokens for o in outputs) == sum(len(p) for p in PROMPTS)
        assert stats.sequence_rounds == sum(o.stats.rounds for o in outputs)
        assert stats.rounds == len(stats.history) and stats.finished == {"length": 5}
        for output in outputs:
            assert output.stats.new_tokens == 20 == 1 + output.stats.rounds + sum(output.stats.accepted)
        for step in stats.history:
            assert step.rows >= step.prefill_rows + step.decoding + step.verified
            assert step.decoding + step.reading <= 3


def test_records_can_be_written_as_json(target, drafter):
    engine = BatchEngine(target, drafter, policy=fixed())
    assert json.loads(json.dumps(engine.stats.to_dict()))["rounds"] == 0
    settings = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 9, "do_sample": True}
    for prompt in PROMPTS:
        engine.add(prompt.tolist(), **settings)
    outputs = [json.loads(json.dumps(o.to_dict())) for o in engine.run()]
    assert [len(o["token_ids"]) for o in outputs] == [9] * 5
    assert {o["prompt_tokens"] for o in outputs} == {len(p) for p in PROMPTS}
    assert all(o["error"] is None and o["stats"]["new_tokens"] == 9 for o in outputs)
    record = json.loads(json.dumps(engine.stats.to_dict()))
    assert record["policy"] == "FixedLength" and record["finished"] == {"length": 5}
    assert record["last_round"]["cache_tokens"] == record["last_round"]["cache_bytes"] == 0
    assert set(record) >= {"tokens_per_second", "tokens_per_second_per_user", "mean_decoding", "verified_per_request"}


def test_the_history_of_steps_is_bounded():
    stats, record = GenerationStats.of_engine(4, ""), RoundRecord([], *[1] * 3, *[0.5] * 3)
    for _ in range(10_000):
        stats.count_round(record, first_tokens=1)
    assert stats.rounds == stats.new_tokens == 10_000
    assert len(stats.history) < 5000
