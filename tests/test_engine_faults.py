"""Faults in the batch engine: of one request, of memory, of the target, Ctrl-C, and requests that are cancelled."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import make_drafter, make_target, prompt_ids
from test_engine import PROMPTS, Recorder, check_empty, check_untouched, fixed, plain, serve
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from dspark_hf import BatchEngine, Expectation, FixedLength, LookaheadScheduler, StepRates, generate_batch
from dspark_hf.decoding.drafting import Drafting
from dspark_hf.decoding.ragged_target import RaggedTarget


@pytest.fixture
def target():
    return make_target(vocab_size=8)


@pytest.fixture
def drafter(target):
    return make_drafter(target)


class Failing:
    """A processor, criterion or streamer that raises `error` once the text has `length` tokens."""

    def __init__(self, kind: str, length: int, error: BaseException):
        self.kind, self.length, self.error, self.seen = kind, length, error, 0

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.length:
            raise self.error
        return scores if self.kind == "processor" else torch.zeros(1, dtype=torch.bool)

    def put(self, value):
        self.seen += value.numel()
        if self.seen >= self.length:
            raise self.error

    def end(self):
        pass

    @property
    def settings(self) -> dict:
        return {
            "processor": {"logits_processor": LogitsProcessorList([self])},
            "criterion": {"stopping_criteria": StoppingCriteriaList([self])},
            "streamer": {"streamer": self},
        }[self.kind]


@pytest.mark.parametrize("kind", ["processor", "criterion", "streamer"])
@pytest.mark.parametrize("after", [1, 4], ids=["first-token", "later"])
def test_a_fault_of_one_request_ends_that_one_alone(target, drafter, kind, after):
    engine = BatchEngine(target, drafter, policy=fixed())
    failing = Failing(kind, len(PROMPTS[1]) + after, RuntimeError("mine"))
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, max_new_tokens=12, do_sample=False, **(failing.settings if i == 1 else {}))
    outputs = sorted(engine.run(), key=lambda o: o.id)
    texts = [plain(target, p) for p in PROMPTS]
    for i, (output, text) in enumerate(zip(outputs, texts)):
        if i != 1:
            assert (output.token_ids, output.finish_reason, output.error) == (text, "length", None)
    assert outputs[1].finish_reason == "error" and outputs[1].error is failing.error
    # A processor sees the draft too, so it may fail some tokens early.
    assert (0 if kind == "processor" else after - 1) <= len(outputs[1].token_ids) <= after
    assert outputs[1].token_ids == texts[1][: len(outputs[1].token_ids)]
    assert "mine" in outputs[1].to_dict()["error"]
    check_empty(engine)
    check_untouched(target)


OUT_OF_MEMORY = [MemoryError("no"), torch.OutOfMemoryError("no"), RuntimeError("can't allocate memory: you tried")]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda e: type(e).__name__)
def test_memory_that_runs_out_while_letting_in(target, drafter, error, monkeypatch):
    """Who does not fit beside others waits for them; who does not fit alone fails alone."""
    engine = BatchEngine(target, drafter, policy=fixed())
    store, opened = engine._backend.store, engine._backend.store.open

    def open_slot(capacity):
        if store.num_slots >= 2 or capacity > 25:
            raise error
        return opened(capacity)

    monkeypatch.setattr(store, "open", open_slot)
    for prompt in PROMPTS:
        engine.add(prompt, max_new_tokens=12, do_sample=False)
    outputs = sorted(engine.run(), key=lambda o: o.id)
    for i, (prompt, output) in enumerate(zip(PROMPTS, outputs)):
        if len(prompt) == 30:
            assert i == 2 and output.finish_reason == "error" and isinstance(output.error, MemoryError)
        else:
            assert (output.token_ids, output.error) == (plain(target, prompt), None)
    assert max(step.decoding + step.reading for step in engine.stats.history) == 2
    check_empty(engine)


def failing_now_and_then(original, error, when):
    """`original`, but `error` in the calls, counted from 0, for which `when` says so."""
    calls = itertools.count()

    def call(self, *args, **kwargs):
        if when(next(calls)):
            raise error
        return original(self, *args, **kwargs)

    return call


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("every", [2, 5])
def test_memory_that_runs_out_in_a_forward(target, drafter, error, every, monkeypatch):
    """The request let in last makes way and reads its text anew; nothing of anybody's text is lost."""
    engine = BatchEngine(target, drafter, policy=fixed(), max_sequences=4, prefill_chunk=4)
    forward, calls = RaggedTarget.read, itertools.count(1)

    def fail(self, spans, padding):
        if len(spans) > 1 and next(calls) % every == 0:
            raise error
        return forward(self, spans, padding)

    monkeypatch.setattr(RaggedTarget, "read", fail)
    evicted = []
    evict = engine._queue.evict
    monkeypatch.setattr(engine._queue, "evict", lambda request: (evicted.append(request.id), evict(request)))
    ask = {"return_dict_in_generate": True, "output_scores": True}
    recorders = [Recorder() for _ in PROMPTS]
    for prompt, recorder in zip(PROMPTS, recorders):
        engine.add(prompt, streamer=recorder, max_new_tokens=12, do_sample=False, **ask)
    outputs = sorted(engine.run(), key=lambda o: o.id)
    monkeypatch.undo()
    assert len(evicted) > 2
    for prompt, output, recorder in zip(PROMPTS, outputs, recorders):
        assert output.token_ids == plain(target, prompt)
        assert recorder.parts == [[prompt.tolist()], *([t] for t in output.token_ids)] and recorder.ends == 1
        assert len(output.scores) == output.stats.new_tokens == 12
    assert engine.stats.new_tokens == 60
    check_empty(engine)


def test_a_request_without_memory_even_alone_fails_alone(target, drafter, monkeypatch):
    engine = BatchEngine(target, drafter, policy=fixed())
    forward = RaggedTarget.read

    def no_room_for_many_rows(self, spans, padding):
        if sum(len(span.token_ids) for span in spans) > 20:
            raise torch.OutOfMemoryError("no")
        return forward(self, spans, padding)

    monkeypatch.setattr(RaggedTarget, "read", no_room_for_many_rows)
    for prompt in PROMPTS:
        engine.add(prompt, max_new_tokens=12, do_sample=False)
    outputs = sorted(engine.run(), key=lambda o: o.id)
    assert isinstance(outputs[2].error, MemoryError) and "no other request" in str(outputs[2].error)
    for i in (0, 1, 3, 4):
        assert outputs[i].token_ids == plain(target, PROMPTS[i])
    check_empty(engine)


@pytest.mark.parametrize("name", ["draft", "take_in", "_parallel_stage", "_project"])
def test_memory_that_runs_out_while_drafting(target, drafter, name, monkeypatch):
    """Such a step decodes plainly."""
    original = getattr(Drafting, name)
    failing = failing_now_and_then(original, MemoryError("no"), lambda n: n % 3 == 1)
    monkeypatch.setattr(Drafting, name, failing)
    outputs = serve(target, drafter)
    assert [o.token_ids for o in outputs] == [plain(target, p) for p in PROMPTS]
    assert any(r.drafted for o in outputs for r in o.stats.history)
    assert any(r.planned == 0 for o in outputs for r in o.stats.history[:3])


def test_what_was_not_verified_is_no_rejection(target, drafter, monkeypatch):
    """A request that makes way, or fails, tells the policy nothing about its drafts."""
    records = []
    monkeypatch.setattr(FixedLength, "learn", lambda self, record: records.append(record))
    engine = BatchEngine(target, drafter, policy=fixed())
    forward = failing_now_and_then(RaggedTarget.read, MemoryError("no"), lambda n: n % 4 == 3)
    monkeypatch.setattr(RaggedTarget, "read", forward)
    for prompt in PROMPTS:
        engine.add(prompt, max_new_tokens=12, do_sample=False)
    list(engine.run())
    assert records and all(s.committed >= 1 for record in records for s in record.sequences)


def test_an_error_of_the_target_ends_everything(target, drafter, monkeypatch):
    engine = BatchEngine(target, drafter, policy=fixed())
    broken = failing_now_and_then(RaggedTarget.read, RuntimeError("broken"), lambda n: n == 3)
    monkeypatch.setattr(RaggedTarget, "read", broken)
    for prompt in PROMPTS:
        engine.add(prompt, max_new_tokens=12, do_sample=False)
    with pytest.raises(RuntimeError, match="broken"):
        list(engine.run())
    outputs = list(engine.run())
    assert {o.finish_reason for o in outputs} == {"error"} and len(outputs) == 5
    for prompt, output in zip(PROMPTS, sorted(outputs, key=lambda o: o.id)):
        assert output.token_ids and output.token_ids == plain(target, prompt)[: len(output.token_ids)]
    check_empty(engine)
    check_untouched(target)
    engine.add(PROMPTS[0], max_new_tokens=12, do_sample=False)
    assert next(engine.run()).token_ids == plain(target, PROMPTS[0])


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["processor", "criterion", "streamer", "forward", "draft"])
def test_ctrl_c_returns_what_is_finished(target, drafter, kind, monkeypatch):
    """The budgets differ, so that some are through; one waits for a place."""
    budgets = [20, 3, 20, 4, 20]
    settings = [{"max_new_tokens": n, "do_sample": False} for n in budgets]
    engine = BatchEngine(target, drafter, policy=fixed(), max_sequences=4)
    if kind in ("forward", "draft"):
        owner, name, calls = (RaggedTarget, "read", 11) if kind == "forward" else (Drafting, "draft", 9)
        failing = failing_now_and_then(getattr(owner, name), KeyboardInterrupt(), lambda n: n == calls)
        monkeypatch.setattr(owner, name, failing)
    else:
        settings[0] |= Failing(kind, len(PROMPTS[0]) + 9, KeyboardInterrupt()).settings
    ids = [engine.add(p, **s) for p, s in zip(PROMPTS, settings)]
    outputs = {}
    with pytest.raises(KeyboardInterrupt):
        for output in engine.run():
            outputs[output.id] = output
    outputs |= {o.id: o for o in engine.run()}
    monkeypatch.undo()
    for i, prompt, budget in zip(ids, PROMPTS, budgets):
        text = plain(target, prompt, max_new_tokens=budget)
        assert outputs[i].token_ids == text[: len(outputs[i].token_ids)]
        assert outputs[i].finish_reason == ("length" if budget < 5 else "interrupted")
        assert budget > 5 or outputs[i].token_ids == text
    check_empty(engine)
    check_untouched(target)


def test_ctrl_c_in_generate_batch(target, drafter, monkeypatch):
    """Every prompt has its output in the list, in order."""
    configs = [GenerationConfig(max_new_tokens=n, do_sample=False) for n in (20, 3, 20, 4, 20)]
    failing = failing_now_and_then(RaggedTarget.read, KeyboardInterrupt(), lambda n: n == 12)
    monkeypatch.setattr(RaggedTarget, "read", failing)
    outputs = generate_batch(target, drafter, PROMPTS, configs, engine={"policy": fixed()})
    assert [o.prompt_ids for o in outputs] == [p.tolist() for p in PROMPTS]
    assert [o.finish_reason for o in outputs] == ["interrupted", "length", "interrupted", "length", "interrupted"]
    check_untouched(target)


@pytest.mark.parametrize("where", ["on_finished", "end"])
def test_ctrl_c_while_outputs_are_handed_out(target, drafter, where):
    """All requests end in one step; nobody's output is lost where the first one is being handed out."""

    calls = itertools.count()

    def interrupt(*args):
        if next(calls) == 0:
            raise KeyboardInterrupt

    streamer = Recorder()
    if where == "end":
        streamer.end = interrupt
    ask = {"on_finished": interrupt} if where == "on_finished" else {"streamer": streamer}
    outputs = serve(target, drafter, [PROMPTS[0]] * 3, **ask)
    text = plain(target, PROMPTS[0])
    assert [o.token_ids for o in outputs] == [text] * 3
    check_untouched(target)


# -- cancelling --------------------------------------------------------------------------------------------------------


def test_cancelling_frees_the_cache(target, drafter):
    """One that waits, one whose prompt is half read, one that decodes; the others are not disturbed."""
    engine = BatchEngine(target, drafter, policy=fixed(), max_sequences=3, prefill_chunk=3)
    settings = {"max_new_tokens": 12, "do_sample": False}
    recorder = Recorder()
    decoding = engine.add(PROMPTS[0], streamer=recorder, **settings)
    while not engine.stats.new_tokens:
        engine.step()
    stays, reading, waiting = (engine.add(PROMPTS[i], **settings) for i in (1, 2, 3))
    outputs = engine.step() + engine.step()
    assert engine.cancel(waiting) and not engine.cancel(waiting)
    assert 0 < engine._queue.find(reading).slot.length < 30
    before = engine.cache_tokens
    assert engine.cancel(reading)
    assert engine.cache_tokens < before
    assert engine.cancel(decoding)
    assert engine._backend.store.num_slots == 1
    for unknown in (99, decoding, reading):
        assert not engine.cancel(unknown)
    outputs = {o.id: o for o in [*outputs, *engine.run()]}
    assert outputs[stays].finish_reason == "length"
    assert {outputs[i].finish_reason for i in (decoding, reading, waiting)} == {"cancelled"}
    assert outputs[stays].token_ids == plain(target, PROMPTS[1])
    assert outputs[waiting].token_ids == outputs[reading].token_ids == []
    text = outputs[decoding].token_ids
    assert 0 < len(text) < 12 and text == plain(target, PROMPTS[0])[: len(text)]
    assert recorder.ends == 1
    check_empty(engine)


def test_cancelling_from_within_a_streamer(target, drafter):
    """It may end itself and others in the middle of a step; they are over at the start of the next."""
    engine = BatchEngine(target, drafter, policy=fixed())

    def act(count):
        if count == 4:
            assert engine.cancel(0) and engine.cancel(1)

    ids = [engine.add(PROMPTS[0], streamer=Recorder(act), max_new_tokens=12, do_sample=False)]
    ids += [engine.add(p, max_new_tokens=12, do_sample=False) for p in PROMPTS[1:]]
    outputs = {o.id: o for o in engine.run()}
    for i, prompt in zip(ids, PROMPTS):
        text = outputs[i].token_ids
        assert outputs[i].finish_reason == ("cancelled" if i < 2 else "length")
        assert text == plain(target, prompt)[: len(text)]
        assert (4 <= len(text) <= 8) if i == 0 else len(text) == 12 or i == 1
    check_empty(engine)


def test_a_thousand_short_requests_leave_nothing_behind():
    target = make_target(vocab_size=8, num_hidden_layers=3)
    drafter = make_drafter(target, num_hidden_layers=1, target_layer_ids=[0, 1])
    rates = StepRates.of_target([1.0] * 9)
    rates.live = False
    policies = [fixed(), LookaheadScheduler(rates, Expectation([0.9] * 4))]
    engine, count = BatchEngine(target, drafter, policy=policies[0], max_sequences=8), 0
    prompts = [prompt_ids(2 + i % 5, 8, i)[0] for i in range(20)]
    for i in range(1000):
        if i == 800:
            engine.policy = policies[1]
        engine.add(prompts[i % 20], max_new_tokens=3, do_sample=False)
        if i % 8 == 7:
            if i % 3 == 0:
                engine.step()
                engine.cancel(i)
                engine.cancel(i - 7)
            count += len(list(engine.run()))
    assert count == 1000 == sum(engine.stats.finished.values())
    assert sum(engine.stats.drafted) > 500
    assert not policies[1]._members
    check_empty(engine)
