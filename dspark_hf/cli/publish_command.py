"""`dspark-hf card` and `push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import app, err, out

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A drafter's folder.")]


@app.command(epilog="Example: dspark-hf card my-drafter --licence apache-2.0 --dataset openai/gsm8k --language en")
def card(
    folder: FolderArgument,
    licence: Annotated[
        str | None, typer.Option("--licence", "--license", help="The Hub's identifier, e.g. apache-2.0.")
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Hub id of a data set the prompts came from; may be given again.")
    ] = None,
    language: Annotated[
        list[str] | None, typer.Option(help="Code of a language it was trained on, e.g. en; may be given again.")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Hub id of the target. (default: what it was trained for)")
    ] = None,
    repo: Annotated[str | None, typer.Option(help="owner/name that the usage names. (default: OWNER/DIR)")] = None,
    stdout: Annotated[bool, typer.Option("--stdout", help="Print the card and write nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write over a README.md; licence, data sets and languages in it stay.")
    ] = False,
) -> None:
    """Write a drafter's model card (README.md) from the files of training, calibration and bench in its folder."""
    from ..publishing.card import CardOptions, make_card, missing_files, write_card

    options = CardOptions(licence, tuple(dataset or ()), tuple(language or ()), base_model, repo)
    if stdout:
        typer.echo(str(make_card(folder, options)).rstrip())
        return
    file = write_card(folder, options, force)
    out.print(f"The card is {file}.", highlight=False, soft_wrap=True)
    for line in missing_files(folder):
        err.print(f"Left out: {line}", highlight=False, soft_wrap=True)


@app.command(epilog="Example: dspark-hf push my-drafter me/my-drafter --private")
def push(
    folder: FolderArgument,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="owner/name on the Hub; made if there is none.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private, if it is made now.")] = False,
    token: Annotated[
        str | None, typer.Option(help="A token with write access. (default: of `hf auth login`, or HF_TOKEN)")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch; made if there is none. (default: main)")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, list what would go up, send nothing.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Upload a drafter's folder with its card and the code that loads it anywhere."""
    from dataclasses import asdict

    from ..publishing.push import push as upload

    done = upload(folder, repo, private=private, token=token, revision=revision, dry_run=dry_run)
    if json_output:
        out.print_json(data=asdict(done) | {"dry_run": dry_run})
        return
    for name, size in done.files.items():
        out.print(f"{size:>12,}  {name}", highlight=False, soft_wrap=True)
    megabytes = sum(done.files.values()) / 1e6
    verb = "would go to" if dry_run else "are at"
    out.print(f"{len(done.files)} files, {megabytes:.1f} MB, {verb} {done.url}", highlight=False, soft_wrap=True)
