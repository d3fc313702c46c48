"""Sampled text is plain decoding's own, seed for seed: tokens, and the generator's state afterwards."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import make_drafter, make_eagle3, make_target, prompt_ids
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import SynthIDTextWatermarkingConfig

from dspark_hf import BatchEngine, Expectation, FixedLength, LookaheadScheduler, StepRates
from dspark_hf.decoding.compat import CACHE_ARGUMENT, cache_of
from dspark_hf.decoding.noise import Noise, choose

VOCAB = 24


def drawn(target, ids, seed: int, **arguments):
    """The output with that seed, and the next number of torch's own generator."""
    torch.manual_seed(seed)
    output = target.generate(ids, do_sample=True, **arguments)
    return output, torch.rand(1).item()


def same(target, drafter, ids, seed: int, **arguments) -> torch.LongTensor:
    processors = arguments.pop("processors", lambda: None)
    plain = drawn(target, ids, seed, logits_processor=processors(), **arguments)
    fast = drawn(target, ids, seed, logits_processor=processors(), assistant_model=drafter, **arguments)
    assert plain[0].tolist() == fast[0].tolist()
    assert plain[1] == fast[1], "another state of the generator"
    return fast[0]


def some_settings(choice: random.Random) -> dict:
    found: dict = {"max_new_tokens": choice.randint(1, 24), "top_k": choice.choice([0, 0, 3, 10])}
    for name, values in {
        "temperature": [0.5, 0.8, 1.3],
        "top_p": [0.7, 0.95],
        "min_p": [0.05],
        "repetition_penalty": [1.2],
        "no_repeat_ngram_size": [3],
        "min_new_tokens": [5],
        "eos_token_id": [5, [5, 6]],
    }.items():
        if choice.random() < 0.35 and not (name == "min_new_tokens" and found["max_new_tokens"] < 5):
            found[name] = choice.choice(values)
    return found


def some_pair(choice: random.Random, seed: int):
    target = make_target(choice.choice(["llama", "qwen3"]), vocab_size=VOCAB, seed=seed)
    if choice.random() < 0.15:
        drafter = make_eagle3(target, seed=100 + seed)
    else:
        drafter = make_drafter(
            target,
            choice.choice(["none", "vanilla", "gated", "rnn"]),
            seed=100 + seed,
            draft_vocab_size=choice.choice([None, 12]),
            sample_from_anchor=choice.random() < 0.6,
        )
    table = StepRates([1, 2, 3, 4], [1], [[1.0, 1.05, 1.1, 1.15]], [[0.0] * 4], [0.05] * 4, 0.0)
    policy = choice.choice([None, FixedLength(3), LookaheadScheduler(table, Expectation([0.6, 0.5]))])
    if not (isinstance(policy, LookaheadScheduler) and drafter.confidence_head is None):
        drafter.options.policy = policy
    return target, drafter


@pytest.mark.parametrize("part", range(4))
def test_random_pairs_and_settings(part):
    """50 pairs, 5 texts each."""
    drafted = accepted = 0
    for number in range(50):
        choice = random.Random(1000 * part + number)
        target, drafter = some_pair(choice, number)
        for turn in range(5):
            ids = prompt_ids(choice.randint(2, 9), VOCAB, number + turn)
            same(target, drafter, ids, 7 * number + turn, **some_settings(choice))
            drafted += sum(drafter.last_generation.drafted)
            accepted += sum(drafter.last_generation.accepted)
    assert 0 < accepted < drafted


def test_a_second_turn_on_a_kept_cache():
    target = make_target(vocab_size=VOCAB)
    drafter = make_drafter(target)
    texts = []
    for assistant in ({}, {"assistant_model": drafter}):
        torch.manual_seed(4)
        settings = {"do_sample": True, "max_new_tokens": 9, "return_dict_in_generate": True} | assistant
        first = target.generate(prompt_ids(), **settings)
        ids = torch.cat([first.sequences, prompt_ids(4)], dim=1)
        second = target.generate(ids, **settings, **{CACHE_ARGUMENT: cache_of(first)})
        texts.append((second.sequences.tolist(), torch.rand(1).item()))
    assert texts[0] == texts[1]


def test_the_draft_guesses_with_the_target_s_noise():
    """A drafter that is the target's equal is always right, where independent draws of a flat distribution never would be."""
    noise = Noise(torch.Generator().manual_seed(3), torch.device("cpu"))
    scores = torch.zeros(1, 1000)
    rows = [noise.at(i, 1000) for i in range(5)]
    tokens = [int(choose(scores, row[None])) for row in rows]
    generator = torch.Generator().manual_seed(3)
    assert tokens == [int(torch.multinomial(scores.softmax(-1), 1, generator=generator)) for _ in range(5)]


@pytest.mark.parametrize("speculates", [True, False])
def test_requests_that_come_and_go(speculates):
    """The engine's text with `seed=s` is that of `torch.manual_seed(s)` and plain `generate()`, alone or among others."""
    choice = random.Random(5)
    for number in range(4):
        target, drafter = some_pair(choice, number)
        engine = BatchEngine(target, drafter if speculates else None, max_sequences=3)
        asked, finished = {}, {}
        for i in range(8):
            ids, settings = prompt_ids(choice.randint(2, 9), VOCAB, i), some_settings(choice)
            asked[engine.add(ids, seed=i, do_sample=True, **settings)] = (ids, i, settings)
            for _ in range(choice.randint(0, 4)):
                finished |= {done.id: done for done in engine.step()}
        finished |= {done.id: done for done in engine.run()}
        for id, (ids, seed, settings) in asked.items():
            plain, _ = drawn(target, ids, seed, **settings)
            assert finished[id].token_ids == plain[0, ids.shape[1] :].tolist()


class Counting(LogitsProcessor):
    """Forbids a token that depends on how often it was called."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        scores = scores.clone()
        scores[:, len(self.lengths) % scores.shape[1]] = float("-inf")
        return scores


@pytest.mark.parametrize("acceptance", ["same_text", "rejection"])
@pytest.mark.parametrize("do_sample", [True, False])
def test_a_processor_that_counts_its_calls(do_sample, acceptance):
    target = make_target(vocab_size=VOCAB)
    drafter = make_drafter(target)
    drafter.options.policy, drafter.options.acceptance = FixedLength(3), acceptance
    texts, lengths = [], []
    for assistant in ({}, {"assistant_model": drafter}):
        counting = Counting()
        torch.manual_seed(1)
        texts.append(
            target.generate(
                prompt_ids(),
                do_sample=do_sample,
                max_new_tokens=24,
                logits_processor=LogitsProcessorList([counting]),
                **assistant,
            ).tolist()
        )
        lengths.append(counting.lengths)
    assert sum(drafter.last_generation.drafted) > 0
    assert texts[0] == texts[1]
    assert lengths[0] == lengths[1] == list(range(7, 31))
    engine = BatchEngine(target, drafter)
    counters = [Counting(), Counting()]
    for counting in counters:
        engine.add(
            prompt_ids(),
            seed=1,
            do_sample=do_sample,
            max_new_tokens=24,
            logits_processor=LogitsProcessorList([counting]),
        )
    for done in engine.run():
        assert done.token_ids == texts[0][0][7:]
    assert [c.lengths for c in counters] == [lengths[0]] * 2


def test_a_processor_is_not_called_behind_the_end():
    target = make_target(vocab_size=VOCAB)
    drafter = make_drafter(target)
    drafter.options.policy = FixedLength(3)
    for seed in range(12):
        lengths = []
        for assistant in ({}, {"assistant_model": drafter}):
            counting = Counting()
            processors = LogitsProcessorList([counting])
            drawn(
                target,
                prompt_ids(),
                seed,
                max_new_tokens=20,
                eos_token_id=[4, 5, 6],
                logits_processor=processors,
                **assistant,
            )
            lengths.append(counting.lengths)
        assert lengths[0] == lengths[1]


@pytest.mark.parametrize("do_sample", [True, False])
def test_guidance_and_watermarks_that_keep_a_state(do_sample):
    target = make_target(vocab_size=VOCAB)
    drafter = make_drafter(target)
    watermark = SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3, context_history_size=8)
    for number, settings in enumerate(
        ({"guidance_scale": 1.6}, {"watermarking_config": watermark}, {"guidance_scale": 0.7, "temperature": 0.8})
    ):
        if not do_sample and "temperature" in settings:
            continue
        texts = []
        for assistant in ({}, {"assistant_model": drafter}):
            torch.manual_seed(number)
            texts.append(
                target.generate(prompt_ids(), max_new_tokens=24, do_sample=do_sample, **settings, **assistant).tolist()
            )
        assert texts[0] == texts[1], settings
        assert sum(drafter.last_generation.drafted) > 0


@pytest.mark.parametrize("do_sample", [True, False])
def test_a_grammar_that_raises_on_an_illegal_prefix(do_sample):
    """It walks on from the prefix that it saw last, as xgrammar's and outlines' do."""

    class Grammar:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def __call__(self, batch_id, input_ids):
            text = input_ids.tolist()
            if self.seen and text[:-1] != self.seen:
                raise AssertionError("failed to advance")
            self.seen = text
            return [2 + (text[-1] + i) % 20 for i in range(3)]

    target = make_target(vocab_size=VOCAB)
    drafter = make_drafter(target)
    drafter.options.policy = FixedLength(3)
    texts = []
    for assistant in ({}, {"assistant_model": drafter}):
        torch.manual_seed(2)
        texts.append(
            target.generate(
                prompt_ids(),
                do_sample=do_sample,
                max_new_tokens=24,
                prefix_allowed_tokens_fn=Grammar(),
                **assistant,
            ).tolist()
        )
    assert texts[0] == texts[1]


def test_copies_from_the_text_are_accepted_by_the_same_rule():
    table = StepRates([1, 2, 3, 4], [1], [[1.0, 1.02, 1.04, 1.06]], [[0.0] * 4], [0.3] * 4, 0.0)
    table.live = False
    target = make_target(vocab_size=VOCAB, seed=5)
    drafter = make_drafter(target)
    drafter.options.policy = LookaheadScheduler(table, Expectation([0.2, 0.2, 0.2, 0.2]))
    copied = 0
    for seed in range(10):
        same(target, drafter, torch.tensor([[3, 7, 2, 3, 7, 2, 3, 7, 2, 3]]), seed, max_new_tokens=20, temperature=0.5)
        copied += drafter.last_generation.copied
    assert copied > 0


def test_an_interrupted_text_leaves_the_generator_where_it_ended():
    class Stop(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 16:
                raise ValueError("stop here")
            return scores

    target = make_target(vocab_size=VOCAB)
    drafter = make_drafter(target)
    states = []
    for assistant in ({}, {"assistant_model": drafter}):
        torch.manual_seed(3)
        with pytest.raises(ValueError, match="stop here"):
            target.generate(
                prompt_ids(),
                do_sample=True,
                max_new_tokens=24,
                logits_processor=LogitsProcessorList([Stop()]),
                **assistant,
            )
        states.append(torch.rand(1).item())
    assert states[0] == states[1]


def test_scores_of_nan_are_told():
    target = make_target(vocab_size=VOCAB)
    drafter = make_drafter(target)
    with torch.no_grad():
        target.lm_head.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="NaN"):
        target.generate(prompt_ids(), do_sample=True, max_new_tokens=4, assistant_model=drafter)


def test_an_unknown_rule_is_refused():
    target = make_target(vocab_size=VOCAB)
    drafter = make_drafter(target)
    drafter.options.acceptance = "greedy"
    with pytest.raises(ValueError, match='"same_text" or "rejection"'):
        target.generate(prompt_ids(), max_new_tokens=2, assistant_model=drafter)


def test_a_stateless_processor_of_one_s_own_shapes_drafts():
    class Upwards(LogitsProcessor):
        """The next token is one of the three above the last."""

        stateless = True

        def __call__(self, input_ids, scores):
            allowed = (input_ids[:, -1:] + torch.arange(1, 4)) % scores.shape[1]
            return torch.full_like(scores, float("-inf")).scatter(1, allowed, scores.gather(1, allowed))

    target = make_target(vocab_size=VOCAB)
    drafter = make_drafter(target)
    drafter.options.policy = FixedLength(3)
    accepted = 0
    for seed in range(5):
        same(
            target, drafter, prompt_ids(), seed, max_new_tokens=20, processors=lambda: LogitsProcessorList([Upwards()])
        )
        accepted += sum(drafter.last_generation.accepted)
    assert accepted > 20


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("acceptance", ["same_text", "rejection"])
def test_a_grammar_of_xgrammar_s(do_sample, acceptance):
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor as GrammarProcessor

    letters = [chr(97 + i) for i in range(VOCAB)]
    info = xgrammar.TokenizerInfo(letters, vocab_size=VOCAB, stop_token_ids=[VOCAB - 1])
    grammar = xgrammar.GrammarCompiler(info).compile_grammar('root ::= ("ab" | "cde" | "fgh" [a-h] | "k" [i-t]+ "u")*')
    target = make_target(vocab_size=VOCAB, dtype=torch.float32)
    drafter = make_drafter(target)
    drafter.options.policy, drafter.options.acceptance = FixedLength(3), acceptance
    for seed in range(5):
        same_grammar = {
            "processors": lambda: LogitsProcessorList([GrammarProcessor(grammar)]),
            "max_new_tokens": 30,
            "eos_token_id": VOCAB - 1,
        }
        if do_sample:
            same(target, drafter, prompt_ids(), seed, **same_grammar)
            continue
        processors = same_grammar.pop("processors")
        plain = target.generate(prompt_ids(), do_sample=False, logits_processor=processors(), **same_grammar)
        fast = target.generate(
            prompt_ids(), do_sample=False, logits_processor=processors(), assistant_model=drafter, **same_grammar
        )
        assert plain.tolist() == fast.tolist()
    engine = BatchEngine(target, drafter)
    for seed in range(3):
        processors = LogitsProcessorList([GrammarProcessor(grammar)])
        engine.add(
            prompt_ids(),
            seed=seed,
            do_sample=do_sample,
            max_new_tokens=30,
            eos_token_id=VOCAB - 1,
            logits_processor=processors,
        )
    for seed, done in enumerate(sorted(engine.run(), key=lambda output: output.id)):
        torch.manual_seed(seed)
        processors = LogitsProcessorList([GrammarProcessor(grammar)])
        plain = target.generate(
            prompt_ids(), do_sample=do_sample, max_new_tokens=30, eos_token_id=VOCAB - 1, logits_processor=processors
        )
        assert done.error is None
        assert done.token_ids == plain[0, 7:].tolist()
