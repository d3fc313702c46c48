"""Imports run downward only (design): a module imports from its own room and from those below it."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "dspark_hf"
# From the top to the bottom; rooms of one row do not import each other.
ROWS = [
    {"cli"},
    {"doctor"},
    {"serving", "publishing", "evaluation", "training", "conversion"},
    {"engine"},
    {"pairs", "texts"},
    {"decoding"},
    {"scheduling"},
    {"finding"},
    {"models", "files", "hub"},
]


def room_of(module: str) -> str:
    first = module.split(".")[0]
    return "models" if first.endswith("_dspark") else first


def test_imports_run_downward():
    level = {room: i for i, row in enumerate(ROWS) for room in row}
    wrong = []
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        if parts == ("__init__",):
            continue
        here = room_of(parts[0])
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.level == 0:
                continue
            base = parts[: len(parts) - node.level]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            for name in names:
                there = room_of(".".join((*base, name)))
                if there == here:
                    continue
                if here == "models" or level[here] >= level[there]:
                    wrong.append(f"{'/'.join(parts)} imports {there}")
    assert not wrong
