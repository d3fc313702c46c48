"""A drafter found, examined, rewritten, described, uploaded: `dspark-hf drafters`, `doctor`, `convert`, `card`, `push`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer
from rich.table import Table
from typer import Argument, Option

from .app import PairOptions, app, err, out


@app.command(epilog="Example: dspark-hf drafters --json")
def drafters(json_output: bool = Option(False, "--json", help="Print the list as JSON.")) -> None:
    """List the known pairs: which drafter `--drafter auto` takes for which target."""
    from ..loading.pairs import known_drafters

    known = known_drafters()
    if json_output:
        out.print_json(data=[asdict(pair) for pair in known])
        return
    table = Table()
    for column in ("target, quantised copies too", "drafter", "licence"):
        table.add_column(column, no_wrap=True)
    for pair in known:
        table.add_row(pair.target, pair.drafter, pair.licence)
    out.print(table)
    for note in dict.fromkeys(pair.note for pair in known):
        names = ", ".join(pair.drafter for pair in known if pair.note == note)
        out.print(f"{names}: {note}.", soft_wrap=True)


@app.command(epilog="Example: dspark-hf doctor --target Qwen/Qwen3-0.6B --drafter my-drafter")
def doctor(
    *,
    named: PairOptions,
    speed: bool = Option(
        True, "--speed/--no-speed", help="Measure whether drafting pays here (about ten seconds, then kept)."
    ),
    json_output: bool = Option(False, "--json", help="Print the checks as JSON."),
) -> None:
    """Check that a drafter fits its target and is read rightly; exit code 1 where a check failed."""
    from ..doctor.examine import examine
    from ..loading.pairs import choose_drafter, load_target

    drafter = choose_drafter(named.drafter, named.target)
    report = examine(load_target(named.target, named.device, named.dtype), drafter, speed)
    if json_output:
        out.print_json(data=report.to_dict())
    else:
        out.print(report.table())
        out.print(report.verdict(), soft_wrap=True)
    if not report.is_healthy:
        raise typer.Exit(1)


@app.command(epilog="Example: dspark-hf convert my-drafter my-drafter-vllm --to speculators --target Qwen/Qwen3-0.6B")
def convert(
    source: str = Argument(..., help="Drafter in any form that is read: a Hub id or a folder."),
    destination: Path = Argument(..., help="New folder."),
    to: str = Option(..., help="dspark (our own), deepspec or speculators."),
    target: str | None = Option(
        None, help="Its target: gives embedding and LM head where a form holds them, and drops equal copies."
    ),
    json_output: bool = Option(False, "--json", help="Print what was written as JSON."),
) -> None:
    """Write a drafter in another form, for vLLM, SGLang or DeepSpec; refuses where it would draft otherwise."""
    from ..publishing.convert import convert as write

    done = write(source, destination, to, target)
    if json_output:
        out.print_json(data=asdict(done))
        return
    line = f"{done.folder}: {done.form} form, {done.num_draft_tokens} tokens a round"
    out.print(line, soft_wrap=True)
    for what in done.lost:
        err.print(f"Not in this form: {what}.", soft_wrap=True)


@app.command(epilog="Example: dspark-hf card my-drafter --licence apache-2.0 --dataset openai/gsm8k --language en")
def card(
    folder: Path = Argument(..., metavar="DIR", help="A drafter's folder."),
    licence: str | None = Option(None, "--licence", "--license", help="The Hub's identifier, e.g. apache-2.0."),
    dataset: list[str] | None = Option(None, help="Hub id of a data set the prompts came from; may be given again."),
    language: list[str] | None = Option(
        None, help="Code of a language it was trained on, e.g. en; may be given again."
    ),
    base_model: str | None = Option(None, help="Hub id of the target. (default: what it was trained for)"),
    repo: str | None = Option(None, help="owner/name that the usage names. (default: OWNER/DIR)"),
    stdout: bool = Option(False, "--stdout", help="Print the card and write nothing."),
    force: bool = Option(False, "--force", help="Write over a README.md; licence, data sets and languages in it stay."),
) -> None:
    """Write a drafter's model card (README.md) from the files of training, calibration and bench in its folder."""
    from ..publishing.card import CardOptions, make_card, missing_files, write_card

    options = CardOptions(licence, tuple(dataset or ()), tuple(language or ()), base_model, repo)
    if stdout:
        typer.echo(str(make_card(folder, options)).rstrip())
        return
    file = write_card(folder, options, force)
    out.print(f"The card is {file}.", soft_wrap=True)
    for line in missing_files(folder):
        err.print(f"Left out: {line}", soft_wrap=True)


@app.command(epilog="Example: dspark-hf push my-drafter me/my-drafter --private")
def push(
    folder: Path = Argument(..., metavar="DIR", help="A drafter's folder."),
    repo: str = Argument(..., metavar="REPO", help="owner/name on the Hub; made if there is none."),
    private: bool = Option(False, "--private", help="Make the repository private, if it is made now."),
    token: str | None = Option(None, help="A token with write access. (default: of `hf auth login`, or HF_TOKEN)"),
    revision: str | None = Option(None, help="Branch; made if there is none. (default: main)"),
    dry_run: bool = Option(False, "--dry-run", help="Check, list what would go up, send nothing."),
    json_output: bool = Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Upload a drafter's folder with its card and the code that loads it anywhere."""
    from ..publishing.push import push as upload

    done = upload(folder, repo, private=private, token=token, revision=revision, dry_run=dry_run)
    if json_output:
        out.print_json(data=asdict(done) | {"dry_run": dry_run})
        return
    for name, size in done.files.items():
        out.print(f"{size:>12,}  {name}", soft_wrap=True)
    megabytes = sum(done.files.values()) / 1e6
    verb = "would go to" if dry_run else "are at"
    out.print(f"{len(done.files)} files, {megabytes:.1f} MB, {verb} {done.url}", soft_wrap=True)
