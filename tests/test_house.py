"""The house stays small: files of a round, modules of an import, a quick command line, each module's name once."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from trace_round import PACKAGE, default_round, modules_after


def test_a_steady_round_runs_few_files():
    files = default_round()
    print(len(files), *files)
    assert {"decoding/speculative.py", "linear/linear_layers.py", "scheduling/lookahead.py"} <= set(files)
    assert len(files) <= 25  # not to grow; 16 is the aim


def test_import_loads_few_modules():
    loaded = modules_after("import dspark_hf", "dspark_hf")
    print(len(loaded), *loaded)
    assert "dspark_hf.decoding.hook" in loaded
    assert len(loaded) <= 30
    assert not [name for name in loaded if name.split(".")[1:2] in (["engine"], ["evaluation"], ["serving"], ["cli"])]


def test_every_public_name_is_found():
    import dspark_hf

    for name in dspark_hf.__all__:
        assert getattr(dspark_hf, name).__name__ == name
    assert set(dspark_hf.__all__) <= set(dir(dspark_hf))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = dspark_hf.Nothing


@pytest.mark.parametrize(
    "arguments",
    ["--help", "train --help", "bench --help", "generate --nonsense", "generate --prompt w5 --max-new-tokens 0"],
)
def test_the_command_line_answers_without_torch(arguments):
    """In a process of its own, by the console script's way in."""
    statement = f"""
sys.argv = ["dspark-hf", *{arguments.split()}]
import dspark_hf_cli
try:
    dspark_hf_cli.main()
except SystemExit as done:
    assert done.code == {0 if "--help" in arguments else 2}
"""
    start = time.perf_counter()
    assert not modules_after(statement, "torch", "transformers", "numpy", "datasets")
    print(f"{time.perf_counter() - start:.2f} s")


def test_the_console_script_registers_as_its_work_begins():
    statement = """
import dspark_hf_cli
from dspark_hf.cli.app import _start_work
before = "transformers" in sys.modules
_start_work()
from dspark_hf.decoding import hook
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
assert not before and hook.is_installed() and "dspark" in CONFIG_MAPPING
"""
    assert modules_after(statement, "torch")


def test_no_module_name_twice():
    names = Counter(file.stem for file in PACKAGE.rglob("*.py") if file.stem != "__init__")
    assert not {name for name, count in names.items() if count > 1}
