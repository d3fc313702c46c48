"""README and docs: commands, links, files and names in them exist. Nothing is run."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
import typer

import dspark_hf
from dspark_hf.cli.app import app

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dspark_hf"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "demo" / "README.md", *sorted(ROOT.glob("model_cards/*/README.md"))]
COMMANDS = typer.main.get_command(app).commands
# Until the rooms of design.md are filled, the walk speaks of files that are not there yet.
is_merged = (PACKAGE / "decoding" / "options.py").exists()

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text_of(page: Path) -> str:
    return re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.S)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), flags=re.S | re.M)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.S | re.M)


def bash_lines(page: Path) -> list[list[str]]:
    """The words of each command, without comments."""
    text = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def spelled(command) -> dict[str, str]:
    """Every spelling of an option, and the name of its parameter."""
    return {s: p.name for p in command.params for s in (*p.opts, *p.secondary_opts) if s.startswith("-")} | {
        "--help": ""
    }


@each_page
def test_commands_parse(page):
    for words in bash_lines(page):
        if words[0] == "dspark-hf":
            assert words[1] in COMMANDS, words
            # Reads the words as the command would, missing and mistyped ones included, and stops there.
            COMMANDS[words[1]].make_context(words[1], words[2:])


@each_page
def test_commands_in_sentences_exist(page):
    for span in spans(page):
        if not span.startswith("dspark-hf "):
            continue
        words = shlex.split(span)
        assert words[1] in COMMANDS, span
        options = {word.split("=")[0] for word in words[2:] if word.startswith("-")}
        assert options <= spelled(COMMANDS[words[1]]).keys(), span


@each_page
def test_other_commands_exist(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = set(re.findall(r"^(\w+) = \[", project.split("optional-dependencies]")[1].split("\n[")[0], flags=re.M))
    for words in [*bash_lines(page), *([*shlex.split(s)] for s in spans(page) if s.startswith(("make ", "python ")))]:
        if words[0] == "make":
            assert set(words[1:]) <= targets, words
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file(), words
        elif words[:2] == ["pip", "install"]:
            wanted = {e for word in words for part in re.findall(r"\[([\w,]+)\]", word) for e in part.split(",")}
            assert wanted <= extras, words


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M), re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("http://", "https://")) or "{{" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_readme_is_one_screen_and_leads_everywhere():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 120
    assert {words[1] for words in bash_lines(ROOT / "README.md") if words[0] == "dspark-hf"} == set(COMMANDS)
    for page in PAGES[1:]:
        assert f"](docs/{page.name})" in readme


def row_of(page: Path, heading: str, first: str) -> list[str]:
    """Cells of the table row that begins with `first`, in the part of a page below `heading`, without bold type."""
    part = text_of(page).split(heading, 1)[1]
    found = re.search(rf"^\| {first} \|(.*)\|$", part, flags=re.M)
    assert found is not None, f"{page.name}: no row {first} below {heading}"
    return [cell.strip(" *") for cell in found[1].split("|")]


def test_figures_are_those_of_the_files():
    card = ROOT / "model_cards" / "smollm2-135m-instruct-dspark"
    bench = json.loads((card / "bench.json").read_text(encoding="utf-8"))
    performance = ROOT / "docs" / "performance.md"
    for domain in ("math", "code", "chat", "all"):
        plain, tuned, ours = (bench["domains"][domain][method] for method in ("plain", "plain_tuned", "dspark"))
        speeds = [f"{method['tokens_per_second']:.1f}" for method in (plain, tuned, ours)]
        cells = row_of(performance, "### The run of the README", domain)
        assert cells[:4] == [*speeds, f"{ours['speedup']:.2f}×"]
        assert [cells[5], cells[9]] == [f"{ours['accept_length']:.2f}", f"{ours['identical_share']:.0%}"]
        if domain != "all":
            same = [prompt["verdict"] for prompt in bench["prompts"] if prompt["domain"] == domain]
            told = row_of(ROOT / "README.md", "dspark-hf bench", domain)
            assert told == [speeds[0], speeds[2], cells[3], f"{same.count('identical')} of {len(same)}"]
    levels = json.loads((card / "concurrency.json").read_text(encoding="utf-8"))
    for level, methods in levels["levels"].items():
        cells = row_of(performance, "## Many requests at once", level)
        names = ("plain", "fixed:1", "fixed:3", "fixed:7", "dspark")
        steady = [f"{methods[name]['steady_tokens_per_second']:.0f}" for name in names]
        assert cells[:6] == [f"{methods['padded']['tokens_per_second']:.0f}", *steady]
        assert cells[6] == f"{levels['ratios'][level]['over_plain']:.2f}"


def test_every_open_end_is_the_founders():
    """Marks of what is not settled stand in comments, so that no reader sees them."""
    for page in PAGES:
        assert "TODO" not in text_of(page), page.name


@each_page
def test_python_is_python(page):
    for block in blocks(page, "python"):
        ast.parse(block)
        for name in re.findall(r"\bdspark_hf\.(\w+)", block):
            assert hasattr(dspark_hf, name), name


@each_page
def test_public_names_exist(page):
    for span in spans(page):
        for name in re.findall(r"^dspark_hf\.(\w+)", span):
            assert hasattr(dspark_hf, name), span


def defined(file: Path) -> set[str]:
    """Functions, classes and methods of a module."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


@pytest.mark.skipif(not is_merged, reason="written for the layout of design.md")
@each_page
def test_files_and_names_exist(page):
    for span in spans(page):
        found = re.fullmatch(r"(?:dspark_hf/)?((?:\w+/)*\w+\.py)(?:::([\w.]+))?", span)
        if found is None:
            continue
        path, name = found.groups()
        file = PACKAGE / path if (PACKAGE / path).is_file() else ROOT / path
        assert file.is_file(), span
        assert name is None or name in defined(file), span


@pytest.mark.skipif(not is_merged, reason="written for the layout of design.md")
def test_options_are_all_told_and_no_others():
    fields = {field.name for field in dataclasses.fields(dspark_hf.DraftingOptions)}
    page = ROOT / "docs" / "scheduling.md"
    table = text_of(page).split("## Options")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.M)) == fields
    for other in PAGES:
        assert set(re.findall(r"drafter\.options\.(\w+)", text_of(other))) <= fields
