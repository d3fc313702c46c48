"""`dspark-hf convert`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .app import app, err, out


@app.command(epilog="Example: dspark-hf convert my-drafter my-drafter-vllm --to speculators --target Qwen/Qwen3-0.6B")
def convert(
    source: Annotated[str, typer.Argument(help="Drafter in any form that is read: a Hub id or a folder.")],
    destination: Annotated[Path, typer.Argument(help="New folder.")],
    to: Annotated[str, typer.Option(help="dspark (our own), deepspec or speculators.")],
    target: Annotated[
        str | None,
        typer.Option(help="Its target: gives embedding and LM head where a form holds them, and drops equal copies."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write a drafter in another form, for vLLM, SGLang or DeepSpec; refuses where it would draft otherwise."""
    from ..publishing.convert import convert as write

    done = write(source, destination, to, target)
    if json_output:
        out.print_json(data=asdict(done))
    else:
        out.print(
            f"{done.folder}: {done.form} form, {done.num_draft_tokens} tokens a round", highlight=False, soft_wrap=True
        )
        for what in done.lost:
            err.print(f"Not in this form: {what}.", highlight=False, soft_wrap=True)
