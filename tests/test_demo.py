"""The speed race without a browser: states of a run, verdicts, stopping, refusals, and the page's HTML and events."""

from __future__ import annotations

import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import make_drafter, make_target, make_tokenizer

pytest.importorskip("gradio")
DEMO = Path(__file__).parents[1] / "demo"
sys.path.insert(0, str(DEMO))

import app  # noqa: E402
import figures  # noqa: E402
import render  # noqa: E402
from race import Observed, RaceTrack, _Feed, shown  # noqa: E402
from race_state import (  # noqa: E402
    ACCEPTED,
    BONUS,
    CORRECTION,
    DSPARK,
    OWN,
    PLAIN,
    Limits,
    RaceOptions,
    RaceState,
    ShownToken,
    Verdict,
)

from dspark_hf.loading.pairs import Target  # noqa: E402
from dspark_hf.scheduling.policy import FixedLength, Policy, RoundRecord, SequenceRecord, SequenceState  # noqa: E402


@pytest.fixture
def track():
    target = make_target(dtype=torch.float32)
    target.generation_config.eos_token_id = None
    drafters = {"one": make_drafter(target), "two": make_drafter(target, seed=5)}
    return RaceTrack(Target("tiny", target, make_tokenizer()), drafters, Limits(prompt_tokens=40, new_tokens=64))


def options(**chosen) -> RaceOptions:
    return RaceOptions(**{"prompt": "w5 w6", "drafter": "one", "max_new_tokens": 24} | chosen)


def last(track, **chosen) -> RaceState:
    return list(track.run(options(**chosen), every=0.01))[-1]


def answer(side) -> list[str]:
    return [token.text for tokens in side.rounds for token in tokens]


def outcome(drafted: int, accepted: int, committed: int) -> SequenceRecord:
    counts = (drafted, False, drafted, drafted, accepted, committed, drafted + 1)
    return SequenceRecord(0, 9, *counts, [0.9] * drafted, None)


@pytest.mark.parametrize("order", [(PLAIN, DSPARK), (DSPARK, PLAIN)])
def test_a_race(order, track):
    seen = []
    for state in track.run(options(), order=order, every=0.002):
        seen.append((state.phase, state.plain.tokens, state.dspark.tokens))
    assert state.order == order
    assert state.phase == "done"
    assert state.error is None
    assert state.verdict == Verdict(True, 24)
    assert state.plain.tokens == state.dspark.tokens == 24
    assert "".join(answer(state.plain)) == "".join(answer(state.dspark))
    assert state.speedup == pytest.approx(state.dspark.rate / state.plain.rate)
    assert [tokens for _, *tokens in seen] == sorted(tokens for _, *tokens in seen)
    stats = state.dspark.stats
    assert state.dspark.accept_length == pytest.approx(stats.accept_length)
    assert len(state.dspark.rounds) == stats.rounds + 1
    kinds = [[t.kind for t in tokens] for tokens in state.dspark.rounds]
    assert kinds[0] == [OWN]
    for record, round_kinds in zip(stats.history, kinds[1:]):
        assert round_kinds.count(ACCEPTED) == record.accepted


def test_the_order_is_drawn(track):
    assert {last(track, max_new_tokens=2).order for _ in range(16)} == {(PLAIN, DSPARK), (DSPARK, PLAIN)}


@pytest.mark.parametrize("policy", ["scheduled", "threshold", "fixed"])
def test_policies_decode_as_without_the_page(policy, track):
    drafter = track.drafters["one"]
    state = last(track, policy=policy, threshold=0.4, length=2)
    assert state.verdict.identical
    assert drafter.options.policy is None
    if policy == "fixed":
        assert {r.drafted for r in state.dspark.stats.history[:-2]} == {2}


def test_an_observed_policy_is_the_same_policy():
    told = []
    plain = Observed(FixedLength(2), told.append)
    assert isinstance(plain, Policy)
    assert [p.tokens for p in plain.plan([SequenceState(0, depth=9, limit=4)])] == [2]
    assert [plain.fresh().admit(k, [0], [[]]) for k in (1, 2, 3)] == [[True], [True], [False]]
    plain.learn(RoundRecord([outcome(2, 1, 2)], 3, 0, 0, 0.1, 0.1, 0.2))
    assert told[0].accepted == 1


def test_where_tokens_come_from():
    def kinds(*numbers):
        return [(t.kind, t.position) for t in shown(["a"] * numbers[2], outcome(*numbers))]

    assert kinds(3, 1, 2) == [(ACCEPTED, 1), (CORRECTION, 0)]
    assert kinds(2, 2, 3) == [(ACCEPTED, 1), (ACCEPTED, 2), (BONUS, 0)]
    assert kinds(0, 0, 1) == [(OWN, 0)]
    assert kinds(3, 2, 2) == [(ACCEPTED, 1), (ACCEPTED, 2)]  # the text ended inside the draft


def test_sampling_gives_no_verdict_of_identity(track):
    state = last(track, temperature=0.8, top_p=0.9, seed=7)
    assert state.phase == "done"
    assert state.verdict.identical is None
    assert re.search("may differ.*same distribution", render.verdict(state.verdict))


def test_a_difference_is_found(track):
    ids = [5, 6, 7]
    verdict = track._verdict(ids, [8, 9, 10, 11], [8, 9, 12, 11], sampled=False, stopped=False)
    assert (verdict.identical, verdict.first_difference) == (False, 2)
    assert (verdict.plain_token, verdict.dspark_token) == ("w10", "w12")
    words = render.verdict(verdict)
    assert "First difference at token 3" in words
    assert f"{verdict.margin:.2g} apart" in words
    assert "a tie" in render.verdict(Verdict(False, 4, False, 2, 1e-6, "a", "b"))
    assert "a tie" not in render.verdict(Verdict(False, 4, False, 2, 0.5, "a", "b"))


@pytest.mark.parametrize("order", [(PLAIN, DSPARK), (DSPARK, PLAIN)])
def test_stop_ends_it_within_a_round(order, track, monkeypatch):
    stop = threading.Event()
    put = _Feed.put

    def put_and_stop(feed, value):
        put(feed, value)
        if feed._puts == 6:  # the prompt and five tokens
            stop.set()

    with monkeypatch.context() as patch:
        patch.setattr(_Feed, "put", put_and_stop)
        state = list(track.run(options(), stop, order, every=0.005))[-1]
    assert state.phase == "stopped"
    assert state.verdict is None
    assert 5 <= state.side(order[0]).tokens <= 6
    assert state.side(order[1]).tokens == 0
    assert "Stopped" in render.status(state)
    again = last(track)
    assert again.phase == "done"
    assert again.verdict.identical


def test_stopped_before_its_step_and_in_the_second_half(track):
    stop = threading.Event()
    stop.set()
    state = list(track.run(options(), stop))[-1]
    assert (state.phase, state.plain.tokens, state.dspark.tokens) == ("stopped", 0, 0)
    verdict = track._verdict([5], [8, 9, 10, 11], [8, 9], sampled=False, stopped=True)
    assert verdict == Verdict(True, 2, True)  # compares what there is
    assert "as far as both went" in render.verdict(verdict)


def test_leaving_the_iterator_stops_the_run(track):
    run = track.run(options(max_new_tokens=64), every=0.001)
    next(run)
    run.close()
    assert last(track).phase == "done"  # waits for the first to have ended


REFUSALS = {
    "empty": ({"prompt": " \n"}, "prompt is empty"),
    "too many tokens": ({"prompt": "w5 " * 60}, "at most 40"),
    "far too many letters": ({"prompt": "w" * 100_000}, "100000 characters"),
    "too long an answer": ({"max_new_tokens": 65}, "1 to 64"),
    "no answer": ({"max_new_tokens": 0}, "1 to 64"),
    "temperature": ({"temperature": 9.0}, "temperature"),
    "negative temperature": ({"temperature": -1.0}, "temperature"),
    "top-p": ({"temperature": 1.0, "top_p": 0.0}, "top_p"),
    "seed": ({"seed": -1}, "seed"),
    "policy": ({"policy": "guess"}, "no policy 'guess'"),
    "threshold": ({"policy": "threshold", "threshold": 3.0}, "between 0 and 1"),
    "drafter": ({"drafter": "nobody"}, "no drafter 'nobody'"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name, track):
    chosen, words = REFUSALS[name]
    state = last(track, **chosen)
    assert state.phase == "failed"
    assert words in state.error
    assert 'role="alert"' in render.status(state)
    assert last(track, max_new_tokens=2).phase == "done"


def test_the_targets_context_is_a_limit(track):
    wide = RaceTrack(track.target, track.drafters, Limits(prompt_tokens=250, new_tokens=500))
    assert "context of 256" in last(wide, max_new_tokens=300).error


def test_a_fault_in_the_model_is_a_message(track, monkeypatch):
    def broken(*arguments, **more):
        raise RuntimeError("<out of memory>")

    with monkeypatch.context() as patch:
        patch.setattr(track.target.model, "generate", broken)
        state = last(track)
    assert state.phase == "failed"
    assert "out of memory" in state.error
    assert "<out" not in render.status(state)
    assert last(track).phase == "done"


def test_two_at_once_take_turns(track):
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda name: last(track, drafter=name), ["one", "two"]))
    assert [state.phase for state in ended] == ["done", "done"]
    assert all(state.verdict.identical for state in ended)


# -- HTML ------------------------------------------------------------------------------------------------------------


def test_tokens_are_escaped():
    nasty = "<script>alert('x')</script>${value}{{value}}`\""
    state = RaceState((PLAIN, DSPARK))
    for side in (state.plain, state.dspark):
        side.rounds = [[ShownToken(nasty, OWN)], [ShownToken(nasty, ACCEPTED, 1), ShownToken(nasty, BONUS)]]
        side.tokens = 3
    pages = render.pane(state, PLAIN) + render.pane(state, DSPARK) + render.message(nasty)
    pages += render.verdict(Verdict(False, 4, False, 2, 0.5, nasty, nasty))
    assert "<script" not in pages
    assert not re.search(r"[${}`]", pages)


def test_looks_are_distinct_in_colour_and_shape():
    looks = [render.token_class(ShownToken("a", ACCEPTED, k)) for k in range(1, 9)]
    looks += [render.token_class(ShownToken("a", kind)) for kind in (CORRECTION, BONUS)]
    assert len(set(looks)) == len(looks)
    legend, css = render.legend(), (DEMO / "page.css").read_text()
    for look in looks:
        last_class = look.split()[-1]
        assert f".t.{last_class} {{" in css
        if last_class != "px":
            assert f'class="{look}"' in legend
    tints = re.findall(r"\.t\.p\d \{ background: color-mix\(in srgb, (#\w+) ", css)
    assert len(set(tints)) == len(tints) == render.POSITIONS
    shapes = re.findall(r"\.t\.p\d \{[^;]+;([^}]+)\}", css)
    assert len(set(shapes)) == render.POSITIONS


def test_a_round_is_marked():
    state = RaceState((PLAIN, DSPARK))
    state.dspark.rounds = [[ShownToken("a", OWN)], [ShownToken("b", ACCEPTED, 1), ShownToken("\n", CORRECTION)]]
    page = render.text(state.dspark)
    assert 'title="round 1: 2 committed, 1 drafts accepted"' in page
    assert 'class="t fix nl"' in page


def test_gauges_share_a_scale(track):
    state = last(track)
    ends = re.findall(r'aria-valuemax="(\d+)"', render.pane(state, PLAIN) + render.pane(state, DSPARK))
    assert len(set(ends)) == 1
    assert "τ" in render.pane(state, DSPARK)
    assert "×" in render.status(state)


# -- the page's events -----------------------------------------------------------------------------------------------


def visitor(name: str = "somebody"):
    return SimpleNamespace(session_hash=name)


CONTROLS = {"prompt": "w5 w6", "drafter": "one", "length": 12, "temperature": 0, "top_p": 1, "seed": 0}
CONTROLS |= {"policy": "scheduled", "threshold": 0.5, "draft_length": 4}


def test_the_pages_run(track):
    pytest.importorskip("matplotlib")
    page = app.Page(track)
    page.prepare(visitor())
    status, plain, dspark, verdict, charts, start, stop = list(page.run(visitor(), *CONTROLS.values()))[-1]
    assert "Done" in status
    assert "w" in plain
    assert 'class="round"' in dspark
    assert "Identical" in verdict
    assert charts.count("data:image/png;base64,") == 2
    assert charts.count('alt="') == 2
    assert start.interactive
    assert not stop.interactive


def test_the_pages_stop_and_leave(track):
    page = app.Page(track)
    page.prepare(visitor())
    page.stop(visitor())
    page.stop(visitor("a stranger"))
    assert "Stopped" in list(page.run(visitor(), *CONTROLS.values()))[-1][0]
    page.prepare(visitor())
    page.leave(visitor())
    page.leave(visitor())
    assert not page._stops


@pytest.mark.parametrize(
    ("chosen", "words"),
    [({"seed": None}, "seed is empty"), ({"prompt": None}, "prompt is empty"), ({"prompt": "w5 " * 99}, "at most 40")],
)
def test_the_pages_errors(chosen, words, track):
    page = app.Page(track)
    page.prepare(visitor())
    last_update = list(page.run(visitor(), *(CONTROLS | chosen).values()))[-1]
    assert words in last_update[0]
    assert last_update[-2].interactive


def test_the_page_is_built(track):
    blocks = app.build(track)
    config = blocks.get_config_file()
    labels = {c["props"].get("label") for c in config["components"]}
    assert {"Prompt", "Top-p", "Seed", "Drafter", "Confidence threshold", "Drafts a round"} <= labels
    assert not blocks.analytics_enabled
    racing = [f for f in blocks.fns.values() if f.concurrency_id == "race"]
    assert {f.concurrency_limit for f in racing} == {1}
    assert len(racing) == 2


@pytest.mark.parametrize(
    "flags", [["--port", "99999"], ["--port", "0"], ["--max-new-tokens", "0"], ["--max-prompt-tokens", "-3"]]
)
def test_impossible_flags(flags, capsys):
    with pytest.raises(SystemExit):
        app.parse(flags)
    assert f"{flags[0]} must be at least 1" in capsys.readouterr().err


def test_flags(tmp_path):
    chosen = app.parse([])
    assert (chosen.share, chosen.drafter, chosen.port) == (False, None, None)
    chosen = app.parse(["--drafter", "a", "--drafter", "b", "--share", "--port", "7999"])
    assert (chosen.share, chosen.drafter, chosen.port) == (True, ["a", "b"], 7999)


def test_a_track_from_folders(track, tmp_path):
    track.target.model.save_pretrained(tmp_path / "target")
    track.target.tokenizer.save_pretrained(tmp_path / "target")
    track.drafters["one"].save_pretrained(tmp_path / "drafter")
    loaded = app.load_track(app.parse(["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]))
    assert list(loaded.drafters) == [str(tmp_path / "drafter")]
    state = list(loaded.run(RaceOptions("w5", str(tmp_path / "drafter"), 8)))[-1]
    assert state.verdict.identical


def test_the_rounds_chart(track):
    pytest.importorskip("matplotlib")
    stats = last(track).dspark.stats
    figure = figures.rounds_chart(stats)
    assert [axis.get_xlabel() for axis in figure.axes][1] == "round"
    assert f"{stats.rounds} rounds" in figures.rounds_picture(stats)
