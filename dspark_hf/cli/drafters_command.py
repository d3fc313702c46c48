"""`dspark-hf drafters`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from .app import app, out


@app.command(epilog="Example: dspark-hf drafters --json")
def drafters(
    json_output: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the known pairs: which drafter `--drafter auto` takes for which target."""
    from ..loading.finding import known_drafters

    if json_output:
        out.print_json(data=[asdict(known) for known in known_drafters()])
        return
    table = Table()
    for column in ("target, quantised copies too", "drafter", "licence"):
        table.add_column(column, no_wrap=True)
    for known in known_drafters():
        table.add_row(known.target, known.drafter, known.licence)
    out.print(table)
    for note in dict.fromkeys(known.note for known in known_drafters()):
        names = ", ".join(known.drafter for known in known_drafters() if known.note == note)
        out.print(f"{names}: {note}.", highlight=False, soft_wrap=True)
