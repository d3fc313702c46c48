"""Calibrating and evaluating: from prompts to figures, resumable, nothing dropped silently."""

from __future__ import annotations

import json
import sys
import types

import numpy as np
import pytest
import torch
from conftest import make_drafter, make_target, make_tokenizer
from test_cli import names, pair, run  # noqa: F401

from dspark_hf import DSparkDraftModel
from dspark_hf.evaluation import prompt_sets, rounds
from dspark_hf.evaluation.calibrate import _every_second
from dspark_hf.evaluation.completion import check_policy, make_policy, using_policy
from dspark_hf.evaluation.figures import Rounds, acceptance_figures, full_rounds, threshold_sweep
from dspark_hf.evaluation.prompt_sets import PUBLIC_SETS, load_conversations
from dspark_hf.evaluation.questions import DecodingOptions
from dspark_hf.evaluation.rounds import Sample, collect
from dspark_hf.loading.pairs import Target
from dspark_hf.scheduling.policy import SequenceState


@pytest.fixture
def tiny():
    target = make_target(dtype=torch.float32)
    return Target("tiny", target, make_tokenizer()), make_drafter(target)


def write_prompts(folder, count=8):
    file = folder / "prompts.jsonl"
    lines = [
        {"domain": ["math", "chat"][i % 2], "source": f"s{i % 4}", "turns": [f"w5 w{6 + i}"] + ["w7"] * (i % 2)}
        for i in range(count)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_figures_by_hand():
    samples = [
        Sample(0, 0, "math", "a", tokens=7, seconds=2.0, rounds=[(3, 3), (3, 1)], logits=[[1.0] * 3, [0.0] * 3]),
        Sample(1, 0, "math", "a", tokens=3, seconds=1.0, rounds=[(0, 0), (1, 0)], logits=[[], [0.0]], parked=1),
        Sample(2, 0, "math", "a", error="ValueError: no"),
    ]
    figures = acceptance_figures(samples, 3)
    assert (figures["samples"], figures["failed"]) == (2, 1)
    assert figures["rounds_by_position"] == [3, 2, 1]
    assert figures["acceptance_by_position"] == [pytest.approx(2 / 3), 0.5, 1.0]
    assert figures["drafted_per_round"] == 7 / 4
    assert figures["wasted_per_round"] == 3 / 4
    assert figures["accept_length"] == (6 + 2) / 4
    assert figures["acceptance_rate"] == 4 / 7
    assert figures["parked_share"] == 1 / 4
    assert figures["tokens_per_second"] == pytest.approx(10 / 3)
    assert len(full_rounds(samples, 3)) == 2


def test_threshold_sweep_by_hand(tiny):
    _, drafter = tiny
    logits = np.log(np.array([[0.9, 0.5, 0.9, 0.9], [0.3, 0.9, 0.9, 0.9]]) / np.array([[0.1, 0.5, 0.1, 0.1]] * 2))
    logits[1] = np.log(np.array([0.3, 0.9, 0.9, 0.9]) / np.array([0.7, 0.1, 0.1, 0.1]))
    sweep = {p["threshold"]: p for p in threshold_sweep(Rounds(logits, np.array([2, 0])), drafter.config)}
    assert sweep[0.0]["verified_per_round"] == 4.0
    assert sweep[0.0]["acceptance_rate"] == 2 / 8
    # The first block is cut before its second token, the other before its first.
    assert sweep[0.6]["verified_per_round"] == 0.5
    assert sweep[0.6]["acceptance_rate"] == 1.0
    assert sweep[0.95]["accept_length"] == 1.0


def test_collect_goes_on_where_it_stopped(tiny, tmp_path, monkeypatch):
    target, drafter = tiny
    conversations = load_conversations(write_prompts(tmp_path))
    options = DecodingOptions(8, 1.0)
    whole = collect(target, drafter, conversations, options)
    assert [(s.index, s.turn) for s in whole[:3]] == [(0, 0), (1, 0), (1, 1)]
    file, calls = tmp_path / "rounds.jsonl", []
    real = rounds.timed_generate

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(rounds, "timed_generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collect(target, drafter, conversations, options, file=file)
    file.write_text(file.read_text() + '{"index": 3, "tu')  # the process was killed while it wrote
    resumed = collect(target, drafter, conversations, options, file=file)
    assert [s.rounds for s in resumed] == [s.rounds for s in whole]
    assert len(calls) == 6 + len(whole) - 4
    again = collect(target, drafter, conversations, options, file=file)
    assert [s.rounds for s in again] == [s.rounds for s in whole]
    with pytest.raises(ValueError, match="other settings"):
        collect(target, drafter, conversations, DecodingOptions(9, 1.0), file=file)
    with torch.no_grad():
        drafter.fc.weight.mul_(1.1)  # trained on in the meantime
    with pytest.raises(ValueError, match="other settings"):
        collect(target, drafter, conversations, options, file=file)


def test_a_failing_sample_is_counted(tiny, tmp_path, monkeypatch):
    target, drafter = tiny
    conversations = load_conversations(write_prompts(tmp_path))
    real = rounds.timed_generate

    def failing(model, ids, *args, **kwargs):
        if 8 in ids:
            raise RuntimeError("out of memory")
        return real(model, ids, *args, **kwargs)

    monkeypatch.setattr(rounds, "timed_generate", failing)
    file = tmp_path / "rounds.jsonl"
    samples = collect(target, drafter, conversations, DecodingOptions(8), file=file)
    figures = acceptance_figures(samples, 4)
    assert figures["failed"] == 1
    assert "out of memory" in next(s.error for s in samples if s.error)
    monkeypatch.setattr(rounds, "timed_generate", real)
    samples = collect(target, drafter, conversations, DecodingOptions(8), file=file)  # tried again
    assert acceptance_figures(samples, 4)["failed"] == 0


def test_both_halves_of_a_calibration_have_every_source():
    def conversation(domain, source):
        return prompt_sets.Conversation(domain, source, [{"role": "user", "content": "w5"}])

    alternating = [conversation("a", "a"), conversation("b", "b")] * 4
    half = _every_second(alternating)
    for domain in "ab":
        assert sum(alternating[i].domain == domain for i in half) == 2
    assert len(_every_second([conversation("a", str(i)) for i in range(6)])) == 3


@pytest.mark.parametrize("name", ["full", "fixed:3", "threshold:0.4", "throughput", "lagged", "lookahead"])
def test_policies_by_name(name, tiny):
    target, drafter = tiny
    before = drafter.generation_config.num_assistant_tokens
    policy = make_policy(name, target.model, drafter)
    assert policy.plan([SequenceState(0, depth=9, limit=4)])[0].tokens <= 4
    assert policy.admit(1, [0], [[0.99]])[0] in (True, False)
    with using_policy(name, target.model, drafter):
        assert drafter.options.policy is not None
        assert drafter.generation_config.num_assistant_tokens == (3 if name == "fixed:3" else 4)
    assert (drafter.options.policy, drafter.generation_config.num_assistant_tokens) == (None, before)


@pytest.mark.parametrize("name", ["fixed", "fixed:x", "threshold:2", "nonsense", "fixed:-1"])
def test_bad_policies(name):
    with pytest.raises(ValueError, match="olicy"):
        check_policy(name)


def test_public_sets_by_name(monkeypatch):
    records = {
        "openai/gsm8k": [{"question": "2+2?", "answer": "4"}] * 3,
        "HuggingFaceH4/mt_bench_prompts": [{"prompt": ["first", "second"], "category": "writing"}],
        "tatsu-lab/alpaca": [{"instruction": "Name", "input": "a colour", "output": "red"}],
    }
    fake = types.ModuleType("datasets")
    fake.load_dataset = lambda path, name=None, split=None, streaming=False: iter(records[path])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert len(load_conversations("gsm8k", limit=2)) == 2
    assert "boxed" in load_conversations("gsm8k")[0].messages[0]["content"]
    chat = load_conversations("mt-bench")[0]
    assert (chat.messages[0]["content"], chat.later_turns) == ("first", ("second",))
    assert load_conversations("alpaca")[0].messages[0]["content"] == "Name\n\na colour"
    assert set(PUBLIC_SETS) == {"gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "alpaca"}

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    fake.load_dataset = unreachable
    with pytest.raises(OSError, match="can't be had from the Hub"):
        load_conversations("gsm8k")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(OSError, match="pip install"):
        load_conversations("gsm8k")
    with pytest.raises(OSError, match="gsm8k, math500"):
        prompt_sets.load_conversations("gsm9k")


def test_calibrate_command(pair, monkeypatch, capsys, tmp_path):  # noqa: F811
    prompts = write_prompts(tmp_path)
    out_folder, report = tmp_path / "calibrated", tmp_path / "report"
    arguments = ["calibrate", "--prompts", prompts, "--max-new-tokens", 24, "--out", out_folder, "--report", report]
    code, out, err = run(monkeypatch, capsys, *arguments, "--json", *names(pair))
    assert code == 0, err
    figures = json.loads(out)
    assert figures["fit_rounds"] > 0
    assert len(figures["positions"]) == 4
    assert (report / "reliability.png").read_bytes()[:4] == b"\x89PNG"
    drafter = DSparkDraftModel.from_pretrained(out_folder)
    assert drafter.config.is_calibrated
    assert drafter.config.confidence_temperatures == figures["calibration"]["temperatures"]
    assert drafter.generation_config.num_assistant_tokens == 4
    original = DSparkDraftModel.from_pretrained(pair / "drafter")
    assert not original.config.is_calibrated
    assert torch.equal(original.fc.weight, drafter.fc.weight)
    # In its own folder only the configs change.
    weights = (out_folder / "model.safetensors").read_bytes()
    arguments = ["calibrate", "--prompts", prompts, "--max-new-tokens", 8, *names(pair, drafter=out_folder)]
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 0, err
    assert "ECE after" in out
    assert (out_folder / "model.safetensors").read_bytes() == weights
    assert not list(out_folder.glob("*.tmp"))


def test_eval_command(pair, monkeypatch, capsys, tmp_path):  # noqa: F811
    prompts, report = write_prompts(tmp_path), tmp_path / "report"
    arguments = ["eval", "--prompts", prompts, "--max-new-tokens", 12, "--threshold-sweep", "--report", report]
    code, out, err = run(monkeypatch, capsys, *arguments, *names(pair))
    assert code == 0, err
    assert "math/s0" in out
    assert "±" in out
    figures = json.loads((report / "eval.json").read_text())
    assert set(figures["groups"]) == {"math", "chat", "math/s0", "math/s2", "chat/s1", "chat/s3", "all"}
    assert figures["groups"]["chat"]["samples"] == 8  # two turns each
    assert len(figures["threshold_sweep"]["all"]) == 20
    assert "| math/s0 | 2 |" in (report / "table.md").read_text()
    for name in ("acceptance", "reliability", "thresholds"):
        assert (report / f"{name}.png").exists()
    arguments = ["eval", "--prompts", prompts, "--max-new-tokens", 12, "--policy", "lookahead", "--json"]
    code, out, err = run(monkeypatch, capsys, *arguments, *names(pair))
    assert code == 0, err
    groups = json.loads(out)["groups"]
    assert groups["all"]["tokens"] > 0
    for figures in groups.values():
        low, high = figures["accept_length_interval"]
        assert low <= figures["accept_length"] <= high


def test_profile_command(pair, monkeypatch, capsys, tmp_path):  # noqa: F811
    arguments = ["profile", "--max-rows", 3, "--depths", "16,32", "--sweeps", 1, "--plot", tmp_path / "curve.png"]
    code, out, err = run(monkeypatch, capsys, *arguments, *names(pair))
    assert code == 0, err
    assert "Kept in" in out
    assert (tmp_path / "curve.png").exists()
    code, out, _ = run(monkeypatch, capsys, *arguments, "--json", *names(pair))
    assert json.loads(out)["rows"] == [1, 2, 3]


def bad_inputs():
    return {
        "no such prompts": (["eval", "--prompts", "missing.jsonl"], "No such file"),
        "unknown policy": (["eval", "--policy", "best"], "no policy 'best'"),
        "sweep of cut blocks": (["eval", "--policy", "fixed:1", "--threshold-sweep"], "whole blocks"),
        "bench policy": (["bench", "--policies", "fixed:1,nonsense"], "no policy 'nonsense'"),
        "no rows": (["profile", "--max-rows", 0], "at least 1"),
        "depths": (["profile", "--depths", "a,b"], "--depths takes numbers"),
        "too wide": (["profile", "--max-rows", 9000], "context of 256"),
        "temperature": (["calibrate", "--temperature", -1], "at least 0"),
        "temperature twice": (["eval", "--temperature", "0,0"], "each once"),
        "no temperature": (["eval", "--temperature", ","], "one number or more"),
        "not a temperature": (["eval", "--temperature", "warm"], "takes numbers"),
        "no number": (["eval", "--temperature", "nan"], "finite"),
        "below zero": (["eval", "--temperature", "0,-1"], "at least 0"),
        "sweep of several": (["eval", "--temperature", "0,1", "--threshold-sweep"], "one drafter at one temperature"),
        "a window of nothing": (["eval", "--context-window", "0"], "numbers from 1, and none"),
        "a window twice": (["eval", "--context-window", "none,none"], "each once"),
        "not a window": (["eval", "--context-window", "wide"], "takes numbers"),
        "two of one name": (["eval", "--drafter", "a/x", "--drafter", "b/x"], "Two drafters"),
        "a name of other characters": (["eval", "--drafter", "[x]=a"], "name=path"),
    }


@pytest.mark.parametrize("case", bad_inputs())
def test_bad_input(case, pair, monkeypatch, capsys):  # noqa: F811
    arguments, message = bad_inputs()[case]
    given = ["--target", pair / "target"] if "--drafter" in arguments else names(pair)
    code, out, err = run(monkeypatch, capsys, *arguments, *given)
    assert code == 2
    assert message in err
    assert "Traceback" not in err + out


def test_calibrate_refusals(pair, monkeypatch, capsys, tmp_path):  # noqa: F811
    prompts = write_prompts(tmp_path)
    arguments = ["calibrate", "--prompts", prompts, "--out", pair / "target", *names(pair)]
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert "holds another model" in err
    make_drafter(make_target(), enable_confidence_head=False).save_pretrained(tmp_path / "headless")
    arguments = ["calibrate", "--prompts", prompts, *names(pair, drafter=tmp_path / "headless")]
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert "no confidence head" in err
