"""Replayed rounds are those of real decoding: the very same, or by rejection the same joint distribution."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from conftest import make_drafter, make_target, make_tokenizer
from test_losslessness import enumerate_draws

from dspark_hf import ConfidenceThreshold, DraftingOptions, FixedLength
from dspark_hf.decoding import acceptance
from dspark_hf.evaluation import replay as replay_module
from dspark_hf.evaluation.prompt_sets import Conversation
from dspark_hf.evaluation.questions import DecodingOptions
from dspark_hf.evaluation.replay import decode_texts, read_text, replay, replay_all
from dspark_hf.evaluation.rounds import AnsweredTurn, collect
from dspark_hf.loading.pairs import Target


def make_pairs(**target_settings) -> tuple[Target, dict]:
    """A tiny target and drafters of several forms, other tapped layers among them."""
    target = make_target(**target_settings)
    drafters = {
        "vanilla": make_drafter(target),
        "rnn": make_drafter(target, "rnn", seed=2, block_size=6, target_layer_ids=[1]),
        "none": make_drafter(target, "none", seed=3, enable_confidence_head=False, target_layer_ids=[-1, 2, 0]),
        "fill-in": make_drafter(target, seed=4, sample_from_anchor=False),
        "reduced": make_drafter(target, seed=5, draft_vocab_size=12),
    }
    return Target("tiny", target, make_tokenizer()), drafters


def conversations(count=3):
    later = {1: ("w7", "w8 w9")}
    asked = [[{"role": "user", "content": f"w5 w{6 + i}"}] for i in range(count)]
    return [Conversation(["math", "chat"][i % 2], f"s{i % 3}", asked[i], later.get(i % 3, ())) for i in range(count)]


@pytest.mark.parametrize("policy", ["full", "fixed:2", "threshold:0.5"])
@pytest.mark.parametrize("end", [None, [3, 9, 15, 20]], ids=["cut", "end-of-sequence"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_are_those_of_real_decoding(policy, end, temperature):
    target, drafters = make_pairs(seed=1)
    if policy == "threshold:0.5":
        del drafters["none"]
    target.model.generation_config.eos_token_id = end
    options = DecodingOptions(15, temperature)
    texts = decode_texts(target, conversations(), options)
    found = replay_all(target, drafters, conversations(), texts, options, policy, dict.fromkeys(drafters))
    lengths = {len(turn.answer_ids) for turns in texts.values() for turn in turns}
    assert lengths == {15} if end is None else min(lengths) < 15
    for label, drafter in drafters.items():
        real = collect(target, drafter, conversations(), options, policy)
        for ours, theirs in zip(found[label], real, strict=True):
            for name in ("index", "turn", "domain", "source", "error", "tokens", "rounds"):
                assert getattr(ours, name) == getattr(theirs, name), (label, name)
            assert ours.error is None
            assert [len(x) for x in ours.logits] == [len(x) for x in theirs.logits]
            for x, y in zip(ours.logits, theirs.logits):
                assert x == pytest.approx(y, abs=2e-4)
    assert any(a > 0 for samples in found.values() for s in samples for _, a in s.rounds)


def texts_of(target, ids, horizon, end, processors):
    """Every text of up to `horizon` tokens and its probability, from the target's forward alone."""
    unfinished, finished = {(): 1.0}, {}
    while unfinished:
        tokens, weight = unfinished.popitem()
        if len(tokens) == horizon or (tokens and tokens[-1] == end):
            finished[tokens] = weight
            continue
        text = torch.cat([ids, torch.tensor([tokens], dtype=torch.long)], dim=1)
        with torch.no_grad():
            probs = processors(text, target(input_ids=text).logits[:, -1]).softmax(-1)[0]
        for token, p in enumerate(probs.tolist()):
            if p > 0:
                unfinished[(*tokens, token)] = weight * p
    return finished


@pytest.mark.parametrize(
    ("policy", "arguments", "reduced", "top"),
    [
        (FixedLength(2), {}, False, None),
        (FixedLength(3), {"temperature": 1.4, "top_p": 0.95}, True, None),
        (ConfidenceThreshold(0.5), {"repetition_penalty": 1.3}, False, None),
        (FixedLength(2), {}, False, 2),
    ],
    ids=["fixed", "warped-reduced", "threshold-penalty", "top-candidates"],
)
def test_sampled_rounds_have_the_distribution_of_real_decoding(policy, arguments, reduced, top, monkeypatch):
    """Vocabulary 3, horizon 4: every outcome of text, acceptance and confidences, through generate() and by replay."""
    vocab, horizon, end = 3, 4, 2
    model = make_target(seed=5, vocab_size=vocab, num_hidden_layers=3, initializer_range=0.2)
    model.generation_config.eos_token_id = end
    for name in set(arguments) - {"temperature", "top_p"}:
        setattr(model.generation_config, name, arguments[name])
    form = {"block_size": 3, "target_layer_ids": [0, 1], "num_hidden_layers": 1}
    drafter = make_drafter(model, seed=6, draft_vocab_size=2 if reduced else None, bind=False, **form)
    if reduced:
        drafter.set_draft_vocabulary(torch.tensor([0, end]))
    drafter.options = DraftingOptions(acceptance="rejection", policy=policy, skinny_linear=False, top_candidates=top)
    ids = torch.tensor([[0, 1, 1, 0]])
    options = DecodingOptions(horizon, arguments.get("temperature", 1.0), arguments.get("top_p", 1.0))
    enumerator = enumerate_draws(monkeypatch)

    def decode():
        settings = {"attention_mask": torch.ones_like(ids), **options.arguments}
        tokens = model.generate(ids, assistant_model=drafter, **settings)[0, 4:]
        rounds = drafter.last_generation.history
        logits = tuple(tuple(round(x, 4) for x in r.confidence_logits.tolist()) if r.drafted else () for r in rounds)
        return tuple(tokens.tolist()), tuple((r.drafted, r.accepted) for r in rounds), logits

    real, replayed = defaultdict(float), defaultdict(float)
    for outcome, weight in enumerator.outcomes(decode):
        real[outcome] += weight
    target = Target("tiny", model, make_tokenizer(vocab))
    read = read_text(target, AnsweredTurn(0, 0, ids[0].tolist(), [0]), [drafter], options)
    for tokens, probability in texts_of(model, ids, horizon, end, read.prepared.processors).items():
        text = read_text(target, AnsweredTurn(0, 0, ids[0].tolist(), list(tokens)), [drafter], options)
        enumerator.script = []
        for (rounds, logits), weight in enumerator.outcomes(lambda text=text: replay(target, drafter, text, 0)):
            replayed[tokens, tuple(rounds), tuple(map(tuple, logits))] += probability * weight
    assert sum(real.values()) == pytest.approx(1.0, abs=1e-9)
    assert len({rounds for _, rounds, _ in real}) > 4
    assert real.keys() == replayed.keys()
    for outcome, probability in real.items():
        assert replayed[outcome] == pytest.approx(probability, abs=1e-9), outcome


def test_a_run_that_was_interrupted_goes_on(tmp_path, monkeypatch):
    target, drafters = make_pairs(seed=1)
    options, talks = DecodingOptions(9, 1.0), conversations(5)
    texts = decode_texts(target, talks, options)
    whole = replay_all(target, drafters, talks, texts, options, "full", dict.fromkeys(drafters))
    texts_file, files = tmp_path / "texts.jsonl", {name: tmp_path / f"{name}.jsonl" for name in drafters}

    real_step = replay_module.BatchEngine.step

    def interrupted(engine):
        if sum(engine.stats.finished.values()) >= 2:
            raise KeyboardInterrupt
        return real_step(engine)

    monkeypatch.setattr(replay_module.BatchEngine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decode_texts(target, talks, options, texts_file)
    monkeypatch.setattr(replay_module.BatchEngine, "step", real_step)
    kept = len(texts_file.read_text().splitlines()) - 1
    assert 0 < kept < sum(len(turns) for turns in texts.values())
    assert decode_texts(target, talks, options, texts_file) == texts
    calls, real_replay = [], replay_module.replay

    def counted(*args):
        calls.append(args)
        if len(calls) == 13:
            raise KeyboardInterrupt
        return real_replay(*args)

    monkeypatch.setattr(replay_module, "replay", counted)
    with pytest.raises(KeyboardInterrupt):
        replay_all(target, drafters, talks, texts, options, "full", files)
    resumed = replay_all(target, drafters, talks, texts, options, "full", files)
    for name, samples in whole.items():
        assert [s.rounds for s in resumed[name]] == [s.rounds for s in samples]
    before = len(calls)
    replay_all(target, drafters, talks, texts, options, "full", files)
    assert len(calls) == before
    texts[0][0].answer_ids[-1] += 1
    with pytest.raises(ValueError, match="rounds on other texts"):
        replay_all(target, drafters, talks, texts, options, "full", files)


def test_what_fails_is_kept_with_its_error(monkeypatch):
    target, drafters = make_pairs(seed=1)
    talks = conversations(3)
    talks[1] = Conversation("chat", "s1", [{"role": "user", "content": "w5 " * 250}], ("w6",))
    options = DecodingOptions(8)
    texts = decode_texts(target, talks, options)
    real_replay = replay_module.replay

    def failing(target, drafter, *args):
        if drafter is drafters["rnn"]:
            raise RuntimeError("out of memory")
        return real_replay(target, drafter, *args)

    monkeypatch.setattr(replay_module, "replay", failing)
    found = replay_all(target, drafters, talks, texts, options, "full", dict.fromkeys(drafters))
    assert [s.index for s in found["vanilla"] if s.error] == [1]
    assert "context of 256" in next(s.error for s in found["vanilla"] if s.error)
    assert [(s.index, s.turn) for s in found["rnn"] if s.error] == [(0, 0), (1, 0), (2, 0)]
    assert [s.rounds for s in found["rnn"]] == [[], [], []]

    def unreadable(target, turn, *args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(replay_module, "read_text", unreadable)
    found = replay_all(target, drafters, talks, texts, options, "full", dict.fromkeys(drafters))
    assert all(s.error for samples in found.values() for s in samples)
    assert not any(turn.error for turn in texts[0])


def test_draws_of_replay_are_not_those_of_the_text(monkeypatch):
    """Rejection is drawn given the text, so it must not come from the random numbers that drew the text."""
    target, drafters = make_pairs(seed=1)
    for drafter in drafters.values():
        drafter.options.acceptance = "rejection"
    options, talks = DecodingOptions(9, 1.0), conversations(3)
    seeds: dict[str, set[int]] = {"text": set(), "replay": set()}
    real_add, real_flip = replay_module.BatchEngine.add, acceptance.flip

    def add(engine, *args, seed, **settings):
        seeds["text"].add(seed)
        return real_add(engine, *args, seed=seed, **settings)

    def flip(probs, generator):
        seeds["replay"].add(generator.initial_seed())
        return real_flip(probs, generator)

    monkeypatch.setattr(replay_module.BatchEngine, "add", add)
    texts = decode_texts(target, talks, options)
    monkeypatch.setattr(acceptance, "flip", flip)
    replay_all(target, drafters, talks, texts, options, "full", dict.fromkeys(drafters))
    assert len(seeds["text"]) == len(seeds["replay"]) == 5
    # On a CPU only the low 32 bits of a seed count.
    assert not {seed % 2**32 for seed in seeds["text"]} & {seed % 2**32 for seed in seeds["replay"]}
