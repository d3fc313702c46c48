"""`dspark-hf generate`, `batch` and `race`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ..evaluation.questions import DecodingOptions
from .app import PairOptions, app, at_least, err, out, writable_file


@app.command(epilog="Example: dspark-hf generate --prompt 'Write a haiku about rain.' --temperature 0.7")
def generate(
    prompt: Annotated[str, typer.Option(help="What to ask; the target's chat template is put around it.")],
    *,
    named: PairOptions,
    decoding: DecodingOptions,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print the text as it comes.")] = True,
    json_output: Annotated[bool, typer.Option("--json", help="Print text and statistics as JSON.")] = False,
) -> None:
    """Answer one prompt with target and drafter."""
    from ..evaluation.completion import complete

    if not prompt.strip():
        raise ValueError("The prompt is empty. Give some text with --prompt.")
    pair = named.load()
    result = complete(pair.target, prompt, decoding, pair.drafter, stream=stream and not json_output)
    if json_output:
        out.print_json(data=result.to_dict())
        return
    if not stream:
        out.print(result.text, highlight=False)
    err.print(
        f"{len(result.token_ids)} tokens, {result.tokens_per_second:.1f} tok/s, τ {result.accept_length:.2f}",
        highlight=False,
    )


@dataclass(frozen=True)
class BatchDecoding(DecodingOptions):
    """As for one prompt."""

    seed: int = field(default=0, metadata={"help": "Seed of each request's draws."})


@app.command(epilog="Example: dspark-hf batch --prompts prompts.jsonl --out answers.jsonl --max-sequences 8")
def batch(
    prompts: Annotated[
        Path,
        typer.Option(
            help="JSONL with 'prompt', 'turns' or 'messages' a line; 'max_new_tokens', 'temperature', 'top_p' and 'seed' in a "
            "line go before the options."
        ),
    ],
    *,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="JSONL of answers, in the order of the prompts.")
    ] = None,
    named: PairOptions,
    max_sequences: Annotated[int, typer.Option(help="Most requests at once.")] = 8,
    decoding: BatchDecoding,
    json_output: Annotated[
        bool,
        typer.Option("--json", help="Print a JSON line for each answer as it comes, and one of the engine a second."),
    ] = False,
) -> None:
    """Answer a file of prompts together, with one verification for all of them in every step."""
    from tqdm import tqdm

    from ..evaluation.answers import answer_all
    from ..evaluation.questions import read_questions
    from ..loading.files import write_text

    at_least(max_sequences, 1, "--max-sequences")
    writable_file(out_file)
    questions = read_questions(prompts, decoding)
    pair = named.load()
    answers: dict[int, dict[str, Any]] = {}
    engine: dict[str, Any] = {}

    with tqdm(total=len(questions), desc="batch", unit="prompt", disable=None) as bar:

        def take(record: dict[str, Any]) -> None:
            if json_output:
                print(json.dumps(record), flush=True)
            elif record["type"] == "request" and out_file is None:
                tqdm.write(f"--- {record['index'] + 1}\n{record['text']}")
            if record["type"] == "engine":
                engine.update(record)
                bar.set_postfix_str(f"{record['tokens_per_second']:.1f} tok/s")
            else:
                answers[record["index"]] = record
                bar.update()

        try:
            answer_all(pair.target, pair.drafter, questions, max_sequences, take)
        finally:
            if out_file is not None and answers:
                lines = [json.dumps(answers[i]) for i in sorted(answers)]
                write_text("\n".join(lines) + "\n", out_file)
    failed = [a for a in answers.values() if a["error"] is not None]
    if engine:
        err.print(
            f"{engine['new_tokens']} tokens, {engine['tokens_per_second']:.1f} tok/s, "
            f"{engine['verified_per_request']:.2f} drafts verified for a request in a step",
            highlight=False,
        )
    if failed:
        err.print(
            f"{len(failed)} of {len(answers)} requests failed, the first with {failed[0]['error']}", highlight=False
        )


@app.command(epilog="Example: dspark-hf race --prompt 'Explain why the sky is blue.'")
def race(
    prompt: Annotated[str, typer.Option(help="What to ask.")] = (
        "Write a Python function that returns all prime numbers up to n with the sieve of Eratosthenes."
    ),
    *,
    named: PairOptions,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 160,
) -> None:
    """Plain decoding against DSpark in the terminal: the same prompt, greedy, one after the other."""
    from ..evaluation.completion import complete

    options = DecodingOptions(max_new_tokens)
    with err.status("Loading target and drafter"):
        pair = named.load()
        for assistant in (None, pair.drafter):  # warm-up
            complete(pair.target, prompt, DecodingOptions(max_new_tokens=4), assistant)
    results = []
    for title, assistant in (("plain decoding", None), ("DSpark", pair.drafter)):
        out.rule(title)
        results.append(complete(pair.target, prompt, options, assistant, stream=True))
        out.print(f"{results[-1].tokens_per_second:.1f} tok/s", style="bold", highlight=False)
    plain, fast = results
    out.rule("result")
    same = "the same tokens" if plain.token_ids == fast.token_ids else "DIFFERENT tokens (a tie? see dspark-hf bench)"
    speedup = f"{fast.tokens_per_second / plain.tokens_per_second:.2f}×"
    out.print(
        Text.assemble((speedup, "bold"), f" the speed, {same}, τ {fast.accept_length:.2f} tokens a round"),
        highlight=False,
    )
