"""Every example runs as it stands, on the default pair."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from conftest import SHARED
from test_real_pair import available

pytestmark = [pytest.mark.real, pytest.mark.skipif(not available(), reason="the default pair is not here")]
EXAMPLES = Path(__file__).parents[1] / "examples"


def run(monkeypatch, capsys, name: str, *arguments) -> str:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_every_example_is_short_and_run_here():
    scripts = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert all(len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 60 for name in scripts)
    tests = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{path.name}"' in tests for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("generate_in_three_lines.py", "tokens a round"),
        ("many_requests.py", "tokens per second for all of them"),
        ("chat_with_a_kept_cache.py", "tokens read"),
        ("read_the_statistics.py", "accepted by position"),
    ],
)
def test_script(name, says, monkeypatch, capsys):
    assert says in run(monkeypatch, capsys, name)


def test_four_bit_target(monkeypatch, capsys):
    pytest.importorskip("bitsandbytes")
    assert "tokens a round" in run(monkeypatch, capsys, "four_bit_target.py")


def test_training(monkeypatch, capsys, tmp_path):
    from dspark_hf.loading.pairs import DEFAULT_TARGET

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"Say the number {i}."}) for i in range(8)))
    out = run(monkeypatch, capsys, "train_your_own.py", DEFAULT_TARGET, prompts, tmp_path / "drafter", 2)
    assert "tokens a round" in out
    assert (tmp_path / "drafter" / "model.safetensors").is_file()


def test_default_pair_prompts(monkeypatch, capsys, tmp_path):
    source = SHARED / "prompts" / "train.jsonl"
    if not source.is_file():
        pytest.skip("the training prompts are not here")
    run(monkeypatch, capsys, "default_pair_prompts.py", source, tmp_path / "prompts.jsonl")
    assert (tmp_path / "prompts.jsonl").stat().st_size > 1000


def test_notebook():
    """Its cells, one after the other, as Jupyter would run them."""
    cells = json.loads((EXAMPLES / "speed_race.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["plain"].token_ids == names["fast"].token_ids
