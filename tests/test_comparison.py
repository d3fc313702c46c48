"""Drafters side by side: intervals by hand and by simulation, the command with all that it writes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import make_drafter, make_target
from test_cli import pair, run  # noqa: F401
from test_evaluation import write_prompts

from dspark_hf.evaluation.comparison import compare, named_drafters
from dspark_hf.evaluation.figures import MACRO, Bootstrap, by_source, grouped, groups_of, interval
from dspark_hf.evaluation.rounds import Sample


def samples_of(rounds, domain="math", source="a", start=0):
    """One conversation for each entry: so many tokens committed in so many rounds."""
    return [
        Sample(start + i, 0, domain, source, tokens=committed + 1, rounds=[(3, 0)] * count)
        for i, (committed, count) in enumerate(rounds)
    ]


def test_resamples_are_of_conversations_within_their_source():
    """Two conversations: each resample has one of them twice, or both; two turns of one stay together."""
    first = samples_of([(10, 5), (30, 10)])
    first.insert(1, Sample(0, 1, "math", "a", tokens=6, rounds=[(3, 0)] * 5))  # a second turn of conversation 0
    values = Bootstrap(first).accept_lengths(first)
    assert set(np.round(values, 9)) == {1.5, 3.0, 2.25}
    shares = [np.mean(np.isclose(values, v)) for v in (1.5, 2.25, 3.0)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.04)
    other = samples_of([(4, 4), (9, 3)], source="b", start=7)
    both = Bootstrap([*first, *other])
    assert set(np.round(both.accept_lengths(other), 9)) == {1.0, 3.0, round(13 / 7, 9)}
    lone = samples_of([(4, 2)], source="c", start=20)
    assert Bootstrap([*first, *lone]).accept_lengths(lone) is None
    assert Bootstrap([*first, *lone]).accept_lengths([*first, *lone]) is None
    assert interval(None) is None


def test_intervals_do_not_depend_on_the_order_of_samples():
    """A run that went on after a stop has its conversations in another order, and the same figures."""
    rounds = np.random.default_rng(0).integers(5, 25, size=(30, 2))
    samples = samples_of(rounds[:20].tolist()) + samples_of(rounds[20:].tolist(), source="b", start=20)
    intervals = [interval(Bootstrap(s).accept_lengths(s)) for s in (samples, samples[::-1])]
    assert intervals[0] == pytest.approx(intervals[1])


def test_prompts_without_a_domain_are_a_source_of_their_own():
    """Their domain is called "all", and "all" is also the group of everything."""
    samples = samples_of([(10, 5), (30, 15)], "math", "math") + samples_of([(4, 4), (6, 6)], "all", "all", start=2)
    compared = compare({"0": {"a": samples}}, {"a": make_drafter(make_target())})["temperatures"]["0"]
    taus = {name: group["drafters"]["a"]["accept_length"] for name, group in compared["groups"].items()}
    assert taus == pytest.approx({"all/all": 1.0, "math": 2.0, "all": 50 / 30, MACRO: 1.5})
    assert compared["sources"] == ["all/all", "math"]
    alone = compare({"0": {"a": samples[2:]}}, {"a": make_drafter(make_target())})["temperatures"]["0"]
    assert list(alone["groups"]) == ["all", MACRO]


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Conversations with τ of their own around 2: about 95 % of the intervals hold the ratio of the expectations."""
    generator = np.random.default_rng(3)
    held, trials = 0, 100
    for trial in range(trials):
        rounds = generator.integers(5, 25, size=60)
        hardness = generator.gamma(8, 1 / 8, size=60)
        samples = samples_of([(n + generator.poisson(n * h), n) for n, h in zip(rounds, hardness)])
        low, high = interval(Bootstrap(samples, seed=trial).accept_lengths(samples))
        held += low <= 2.0 <= high
    assert 0.88 <= held / trials <= 0.99


def test_ratios_are_paired_and_failures_left_out_for_all():
    """Drafter b takes twice the rounds of a on every prompt, however hard it is: the ratio is 2 without any doubt."""
    rounds = [(12, 3), (40, 30), (18, 2), (9, 9)]
    chat = samples_of(rounds, "chat", "chat") + samples_of(rounds[:3], "math", "x", start=4)
    chat += samples_of([(20, 4), (20, 10)], "math", "y", start=7)
    slower = [Sample(s.index, 0, s.domain, s.source, tokens=s.tokens, rounds=s.rounds * 2) for s in chat]
    target = make_target()
    drafters = {"a": make_drafter(target), "b": make_drafter(target, block_size=3)}
    summary = compare({"1": {"a": chat, "b": slower}}, drafters)
    compared = summary["temperatures"]["1"]
    assert list(compared["groups"]) == ["chat", "math", "math/x", "math/y", "all", MACRO]
    assert compared["sources"] == ["chat", "math/x", "math/y"]
    for name, group in compared["groups"].items():
        assert group["ratios"]["b"]["ratio"] == pytest.approx(2.0)
        assert group["ratios"]["b"]["interval"] == pytest.approx([2.0, 2.0])
        low, high = group["drafters"]["a"]["accept_length_interval"]
        assert low < group["drafters"]["a"]["accept_length"] < high, name
    taus = [79 / 44, 70 / 35, 40 / 14]
    assert compared["groups"][MACRO]["drafters"]["a"]["accept_length"] == pytest.approx(sum(taus) / 3)
    slower[1].error = "ValueError: no"
    compared = compare({"1": {"a": chat, "b": slower}}, drafters)["temperatures"]["1"]
    assert compared["left_out"] == 1
    assert compared["failed"] == [{"drafter": "b", "index": 1, "turn": 0, "error": "ValueError: no"}]
    assert compared["groups"]["chat"]["conversations"] == 3
    assert compared["groups"]["chat"]["drafters"]["a"]["accept_length"] == pytest.approx(39 / 14)
    everything_failed = [Sample(s.index, 0, s.domain, s.source, error="no") for s in chat]
    compared = compare({"1": {"a": chat, "b": everything_failed}}, drafters)["temperatures"]["1"]
    assert compared["left_out"] == len(chat)
    assert compared["groups"]["all"]["drafters"]["a"]["rounds"] == 0


def test_groups():
    samples = samples_of([(1, 1)] * 2, "math", "math") + samples_of([(1, 1)], "chat", "b", 2)
    assert list(by_source(samples)) == ["chat/b", "math"]
    assert list(groups_of(samples)) == ["chat", "chat/b", "math", "all"]
    samples += samples_of([(1, 1)], "math", "gsm8k", 3)
    sizes = {name: len(group) for name, group in groups_of(samples).items()}
    assert sizes == {"chat": 1, "chat/b": 1, "math": 3, "math/gsm8k": 1, "math/math": 2, "all": 4}
    figures = grouped(samples, 3)
    assert figures["math/math"]["accept_length_interval"] == [1.0, 1.0]
    assert figures["all"]["accept_length_interval"] is None


def test_names_of_drafters(monkeypatch, tmp_path):
    assert named_drafters(["a/b", "x/c/"]) == {"b": "a/b", "c": "x/c/"}
    assert named_drafters(["DSpark (RNN)=a", "DFlash=b=c"]) == {"DSpark (RNN)": "a", "DFlash": "b=c"}
    assert named_drafters(["runs/lr=3/drafter"]) == {"drafter": "runs/lr=3/drafter"}
    monkeypatch.chdir(tmp_path)
    assert named_drafters(["."]) == {tmp_path.name: "."}
    (tmp_path / "my@drafter").mkdir()
    assert named_drafters(["./my@drafter/"]) == {"my-drafter": "./my@drafter/"}
    for given, message in (
        (["a/x", "b/x"], "Two drafters"),
        (["A b=x", "a-b=y"], "Two drafters"),
        (["[b]=x"], "name=path"),
    ):
        with pytest.raises(ValueError, match=message):
            named_drafters(given)
    with pytest.raises(ValueError, match="name=path"):
        named_drafters(["a="])


@pytest.fixture(scope="module")
def second(pair, tmp_path_factory):  # noqa: F811
    """Another drafter for the same target: longer blocks, no confidence head."""
    folder = tmp_path_factory.mktemp("second") / "flash"
    target = make_target(dtype=torch.float32)
    make_drafter(target, "none", seed=9, block_size=6, enable_confidence_head=False).save_pretrained(folder)
    return folder


def test_eval_of_several(pair, second, monkeypatch, capsys, tmp_path):  # noqa: F811
    prompts, report = write_prompts(tmp_path), tmp_path / "report"
    arguments = ["eval", "--prompts", prompts, "--max-new-tokens", 10, "--temperature", "1,0", "--report", report]
    arguments += ["--target", pair / "target", "--drafter", f"ours={pair / 'drafter'}", "--drafter", second]
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 0, err
    assert "ours / flash" in out
    assert "At temperature 0, ours commits" in out
    summary = json.loads((report / "comparison.json").read_text())
    assert summary["drafters"] == {"ours": 4, "flash": 6}
    for temperature in ("1", "0"):
        compared = summary["temperatures"][temperature]
        assert compared["left_out"] == 0
        assert {"math", "chat", "math/s0", "math/s2", "chat/s1", "chat/s3", "all", MACRO} == set(compared["groups"])
        figures = compared["groups"]["all"]["drafters"]
        assert figures["ours"]["tokens"] == figures["flash"]["tokens"] == 120  # the same texts: 12 turns
        assert len(figures["flash"]["acceptance_by_position"]) == 6
        for label in ("ours", "flash"):
            run_of = json.loads((report / f"{label}-t{temperature}" / "eval.json").read_text())
            assert run_of["groups"]["all"]["accept_length"] == figures[label]["accept_length"]
    table = (report / "table.md").read_text()
    assert table.count("| group | prompts | ours | flash | ours / flash |") == 2
    assert table.count("| math/s0 | 2 |") == table.count("| macro | 8 |") == 2
    assert table.count("\n| ours | ") == table.count("\n| flash | ") == 2
    assert "* At temperature 0, ours commits" in table
    for name in ("tau", "acceptance-t1", "acceptance-t0"):
        assert (report / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    # Nothing is decoded or drafted again.
    monkeypatch.setattr("dspark_hf.evaluation.replay.replay", None)
    code, out, err = run(monkeypatch, capsys, *arguments, "--json")
    assert code == 0, err
    assert json.loads(out)["temperatures"] == summary["temperatures"]
    code, _, err = run(monkeypatch, capsys, *arguments, "--seed", 1)
    assert code == 2
    assert "other settings" in err


def test_eval_of_several_windows(pair, monkeypatch, capsys, tmp_path):  # noqa: F811
    """One drafter, an entry a window; the widest one sees all of these texts, as none does."""
    report = tmp_path / "report"
    arguments = ["eval", "--prompts", write_prompts(tmp_path), "--max-new-tokens", 20, "--report", report]
    arguments += ["--target", pair / "target", "--drafter", f"ours={pair / 'drafter'}", "--context-window"]
    code, out, err = run(monkeypatch, capsys, *arguments, "none,2,200")
    assert code == 0, err
    assert "ours (none) / ours (2)" in out
    summary = json.loads((report / "comparison.json").read_text())
    figures = summary["temperatures"]["0"]["groups"]["all"]["drafters"]
    assert list(figures) == ["ours (none)", "ours (2)", "ours (200)"]
    assert figures["ours (none)"] == figures["ours (200)"] != figures["ours (2)"]
    assert summary["facts"]["drafters"]["ours (2)"] == str(pair / "drafter")
    assert (report / "ours-2-t0" / "eval.json").is_file()
    # A single one is an ordinary run.
    code, out, err = run(monkeypatch, capsys, *arguments[:5], *arguments[7:], 2, "--json")
    assert code == 0, err
    assert json.loads(out)["groups"]["all"]["accept_length"] == figures["ours (2)"]["accept_length"]


def test_a_policy_that_reads_times_is_decoded(pair, second, monkeypatch, capsys, tmp_path):  # noqa: F811
    monkeypatch.setattr("dspark_hf.evaluation.comparison.decode_texts", None)
    arguments = ["eval", "--prompts", write_prompts(tmp_path, 2), "--max-new-tokens", 6, "--policy", "own", "--json"]
    arguments += ["--target", pair / "target", "--drafter", pair / "drafter", "--drafter", second]
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 0, err
    groups = json.loads(out)["temperatures"]["0"]["groups"]
    assert groups["all"]["drafters"]["flash"]["tokens_per_second"] > 0


def test_a_policy_that_reads_confidences_needs_them(pair, second, monkeypatch, capsys):  # noqa: F811
    """`second` has no confidence head: said before a prompt is answered."""
    arguments = ["eval", "--target", pair / "target", "--drafter", pair / "drafter", "--drafter", second]
    for policy in ("threshold:0.5", "throughput", "lagged"):
        code, out, err = run(monkeypatch, capsys, *arguments, "--policy", policy)
        assert code == 2
        assert "drafter flash has no confidence head" in err
        assert "failed" not in err + out


def test_no_verdict_where_every_prompt_failed(pair, second, monkeypatch, capsys, tmp_path):  # noqa: F811
    prompts = tmp_path / "long.jsonl"
    prompts.write_text(json.dumps({"prompt": "w5 " * 300}))
    arguments = ["eval", "--prompts", prompts, "--target", pair / "target", "--max-new-tokens", 8]
    code, out, err = run(monkeypatch, capsys, *arguments, "--drafter", pair / "drafter", "--drafter", second)
    assert code == 2
    assert "1 prompts failed" in err
    assert "--report" not in err  # none was given
    assert "commits" not in out
    assert "no prompt was answered" in out
