"""`model.generate(assistant_model=drafter)`: everything that plain decoding takes, and one clear error for what it can't."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import FAMILIES, make_drafter, make_letter_tokenizer, make_target, make_tokenizer, prompt_ids
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextStreamer,
    pipeline,
)

from dspark_hf import DSparkDraftModel
from dspark_hf.decoding import hook
from dspark_hf.decoding.candidate_generator import DSparkCandidateGenerator
from dspark_hf.decoding.compat import CACHE_ARGUMENT, cache_of


def both(target, drafter, ids, **arguments):
    """The same call without and with the drafter."""
    arguments = {"max_new_tokens": 24, "do_sample": False} | arguments
    plain = target.generate(ids, **copy.copy(arguments))
    return plain, target.generate(ids, assistant_model=drafter, **arguments)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    # transformers' experts know no float64
    target = make_target(family, seed=4, dtype=torch.float32 if family == "qwen3_moe" else torch.float64)
    plain, fast = both(target, make_drafter(target), prompt_ids(9), max_new_tokens=30)
    assert torch.equal(plain, fast)


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 10, "eos_token_id": [5, 7]},
        {"bad_words_ids": [[4], [6, 8]]},
        {"suppress_tokens": [3, 9]},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [2 + int(ids.sum()) % 7, 3, 11]},
        {"forced_eos_token_id": 5},
    ],
    ids=lambda a: next(iter(a)),
)
@pytest.mark.parametrize("draft_vocab_size", [None, 10], ids=["full", "reduced"])
def test_processors_greedy(target, arguments, draft_vocab_size):
    drafter = make_drafter(target, draft_vocab_size=draft_vocab_size)
    plain, fast = both(target, drafter, prompt_ids(), **arguments)
    assert torch.equal(plain, fast)


def test_draft_where_no_draft_token_is_allowed(target):
    drafter = make_drafter(target, draft_vocab_size=6)  # can propose 2..7 only
    plain, fast = both(target, drafter, prompt_ids(), suppress_tokens=[i for i in range(24) if i not in (12, 20)])
    assert torch.equal(plain, fast)
    assert sum(drafter.last_generation.drafted) == 0


@pytest.mark.parametrize("arguments", [{"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}], ids=str)
def test_sampling_runs_and_repeats_with_a_seed(target, drafter, arguments):
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(both(target, drafter, prompt_ids(), do_sample=True, **arguments)[1])
    assert torch.equal(*outputs)
    assert outputs[0].shape[1] == 7 + 24


def test_streamer_gets_prompt_and_tokens_one_by_one(target, drafter):
    class Recorder:
        def __init__(self):
            self.parts, self.ended = [], False

        def put(self, value):
            self.parts.append(value.tolist())

        def end(self):
            self.ended = True

    plain, fast = Recorder(), Recorder()
    target.generate(prompt_ids(), max_new_tokens=9, do_sample=False, streamer=plain)
    target.generate(prompt_ids(), max_new_tokens=9, do_sample=False, streamer=fast, assistant_model=drafter)
    assert fast.parts == plain.parts
    assert fast.ended


def test_text_streamer_prints(target, drafter, capsys):
    target.generate(
        prompt_ids(),
        max_new_tokens=5,
        do_sample=False,
        streamer=TextStreamer(make_tokenizer()),
        assistant_model=drafter,
    )
    assert "w" in capsys.readouterr().out


def test_stop_strings_and_custom_criteria(target, drafter):
    plain = target.generate(prompt_ids(), max_new_tokens=20, do_sample=False)
    letter = chr(97 + int(plain[0, 12]))
    results = both(target, drafter, prompt_ids(), stop_strings=[letter], tokenizer=make_letter_tokenizer())
    assert torch.equal(*results)
    assert results[1].shape[1] <= 13

    def sixth(input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= 7 + 6])

    results = both(target, drafter, prompt_ids(), stopping_criteria=StoppingCriteriaList([sixth]))
    assert torch.equal(*results)
    assert results[1].shape[1] == 13


def test_several_eos_ids_inside_an_accepted_block():
    """A drafter that is the target's equal by chance: find texts where a stop token falls inside an accepted block."""
    target = make_target(vocab_size=6, seed=2)
    drafter = make_drafter(target)
    for position in range(8, 20):
        text = target.generate(prompt_ids(6, 6), max_new_tokens=20, do_sample=False)
        eos = [int(text[0, position]), 5]
        assert torch.equal(*both(target, drafter, prompt_ids(6, 6), eos_token_id=eos))


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5])
def test_budget_smaller_than_a_block(target, drafter, budget):
    plain, fast = both(target, drafter, prompt_ids(), max_new_tokens=budget)
    assert torch.equal(plain, fast)


def test_outputs_as_plain_decoding_returns_them(target, drafter):
    wanted, got = both(
        target,
        drafter,
        prompt_ids(),
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        repetition_penalty=1.2,
    )
    assert torch.equal(wanted.sequences, got.sequences)
    for name in ("scores", "logits"):
        assert len(getattr(got, name)) == 24
        for a, b in zip(getattr(wanted, name), getattr(got, name)):
            torch.testing.assert_close(b, a)
    assert len(got.hidden_states) == len(wanted.hidden_states)
    for a, b in zip(wanted.hidden_states, got.hidden_states):
        for x, y in zip(a, b):
            torch.testing.assert_close(y, x)
    assert cache_of(got).get_seq_length() == cache_of(wanted).get_seq_length()


def test_attentions(drafter):
    target = make_target(attn_implementation="eager")
    wanted, got = both(
        target,
        make_drafter(target),
        prompt_ids(),
        return_dict_in_generate=True,
        output_attentions=True,
        max_new_tokens=9,
    )
    for a, b in zip(wanted.attentions, got.attentions):
        for x, y in zip(a, b):
            torch.testing.assert_close(y, x)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_left_padded_prompt(family):
    target = make_target(family)
    drafter, ids = make_drafter(target), prompt_ids(8)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones_like(ids)], dim=1)
    plain, fast = both(target, drafter, padded, attention_mask=mask)
    assert torch.equal(plain, fast)
    with_padding = drafter.last_generation
    both(target, drafter, ids)
    assert with_padding.accepted == drafter.last_generation.accepted  # the drafter never saw the padding


def test_inputs_embeds(target, drafter):
    embeds = target.get_input_embeddings()(prompt_ids())
    arguments = {"inputs_embeds": embeds, "max_new_tokens": 15, "do_sample": False}
    assert torch.equal(target.generate(**arguments), target.generate(**arguments, assistant_model=drafter))


def test_prompt_of_one_token(target, drafter):
    assert torch.equal(*both(target, drafter, prompt_ids(1)))


def test_pipeline(target, drafter):
    pipe = pipeline("text-generation", model=target, tokenizer=make_tokenizer(), assistant_model=drafter)
    plain = pipeline("text-generation", model=target, tokenizer=make_tokenizer())
    arguments = {"max_new_tokens": 8, "do_sample": False}
    assert pipe("w5 w6 w7", **arguments) == plain("w5 w6 w7", **arguments)
    assert drafter.last_generation.new_tokens == 8


def test_other_dtype():
    target = make_target(dtype=torch.float32)
    drafter = make_drafter(target, bind=False).to(torch.bfloat16)
    assert torch.equal(*both(target, drafter, prompt_ids()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_other_device():
    target = make_target(dtype=torch.float32).to("cuda")
    drafter = make_drafter(target, bind=False).to("cpu")
    assert torch.equal(*both(target, drafter, prompt_ids().to("cuda")))


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_target(bits, tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    make_target(dtype=torch.float32, hidden_size=64, head_dim=16, intermediate_size=128).save_pretrained(tmp_path)
    quantised = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, llm_int8_threshold=0.0)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantised, dtype=torch.float32)
    drafter = make_drafter(target, bind=False).to(torch.float32)
    plain, fast = both(target, drafter, prompt_ids(), max_new_tokens=12)
    assert torch.equal(plain, fast)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_second_turn_continues_from_the_cache(family):
    target = make_target(family, seed=8)
    drafter = make_drafter(target)
    first = both(target, drafter, prompt_ids(9), return_dict_in_generate=True, max_new_tokens=10)
    turn = torch.cat([first[0].sequences, prompt_ids(4, seed=5)], dim=1)
    turns = [
        target.generate(
            turn,
            max_new_tokens=12,
            do_sample=False,
            return_dict_in_generate=True,
            **{CACHE_ARGUMENT: cache_of(output)},
            **({"assistant_model": drafter} if output is first[1] else {}),
        )
        for output in first
    ]
    continued = drafter.last_generation
    assert torch.equal(turns[0].sequences, turns[1].sequences)
    assert cache_of(turns[0]).get_seq_length() == cache_of(turns[1]).get_seq_length() == 9 + 10 + 4 + 12 - 1
    anew = target.generate(turn, max_new_tokens=12, do_sample=False, assistant_model=drafter)
    assert torch.equal(anew, turns[1].sequences)
    assert continued.accepted == drafter.last_generation.accepted
    assert continued.accept_length == drafter.last_generation.accept_length
    assert continued.prompt_tokens == 5  # the last token of the first turn and the four new ones


def test_a_cache_that_the_drafter_has_not_seen(target, drafter):
    first = target.generate(prompt_ids(9), max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    turn = torch.cat([first.sequences, prompt_ids(3)], dim=1)
    output = target.generate(
        turn, max_new_tokens=9, do_sample=False, assistant_model=drafter, **{CACHE_ARGUMENT: cache_of(first)}
    )
    assert torch.equal(output, target.generate(turn, max_new_tokens=9, do_sample=False))


def test_statistics(target, drafter):
    drafter.generation_config.num_assistant_tokens = 2
    target.generate(prompt_ids(), max_new_tokens=21, do_sample=False, assistant_model=drafter)
    stats = drafter.last_generation
    assert stats.new_tokens == 21
    assert stats.prompt_tokens == 7
    assert stats.rounds + sum(stats.accepted) == 20
    assert stats.drafted[2:] == [0, 0]
    assert stats.accept_length == 20 / stats.rounds
    spent = stats.prefill_seconds + stats.draft_seconds + stats.verify_seconds + stats.other_seconds
    assert spent == pytest.approx(stats.total_seconds)
    assert set(stats.to_dict()) >= {"accept_length", "tokens_per_second", "accepted", "other_seconds"}


def test_nothing_is_left_behind(target, drafter):
    target.generate(prompt_ids(), max_new_tokens=4, do_sample=False, assistant_model=drafter)

    def fail(input_ids, scores, **kwargs):
        raise RuntimeError("criterion")

    with pytest.raises(RuntimeError, match="criterion"):
        target.generate(
            prompt_ids(), max_new_tokens=4, assistant_model=drafter, stopping_criteria=StoppingCriteriaList([fail])
        )
    for module in target.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)


def test_hook_is_installed_once_and_lets_others_through(target):
    before = GenerationMixin._assisted_decoding
    hook.install()
    assert GenerationMixin._assisted_decoding is before
    other = make_target(seed=9)  # a plain model as assistant: transformers' own loop
    plain, assisted = both(target, other, prompt_ids())
    assert torch.equal(plain, assisted)


def test_no_drafts_at_all_is_plain_decoding(target, drafter):
    drafter.generation_config.num_assistant_tokens = 0
    plain, fast = both(target, drafter, prompt_ids())
    assert torch.equal(plain, fast)
    assert drafter.last_generation.accept_length == 1.0


def test_candidate_generator_interface(target, drafter):
    config = GenerationConfig(max_length=40, do_sample=False)
    generator = DSparkCandidateGenerator(drafter, target, config, LogitsProcessorList())
    ids = prompt_ids()
    assert generator.get_candidates(ids)[1] is None  # nothing seen yet
    generator.observe(torch.zeros(1, 6, 64, dtype=torch.float64))
    candidates, scores = generator.get_candidates(ids)
    assert candidates.shape == (1, 11)
    assert scores.shape == (1, 4, 24)
    assert isinstance(drafter, DSparkDraftModel)
