"""A pair at work: `dspark-hf generate`, `batch`, `race` and `serve`."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.text import Text
from typer import Option

from ..evaluation.questions import DecodingOptions
from .app import PairOptions, app, at_least, err, need_modules, out, writable_file


@app.command(epilog="Example: dspark-hf generate --prompt 'Write a haiku about rain.' --temperature 0.7")
def generate(
    *,
    prompt: str = Option(..., help="What to ask; the target's chat template is put around it."),
    named: PairOptions,
    decoding: DecodingOptions,
    stream: bool = Option(True, "--stream/--no-stream", help="Print the text as it comes."),
    json_output: bool = Option(False, "--json", help="Print text and statistics as JSON."),
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
        out.print(result.text)
    err.print(f"{len(result.token_ids)} tokens, {result.tokens_per_second:.1f} tok/s, τ {result.accept_length:.2f}")


@dataclass(frozen=True)
class _Batch(DecodingOptions):
    """As for one prompt."""

    seed: int = field(default=0, metadata={"help": "Seed of each request's draws."})


@app.command(epilog="Example: dspark-hf batch --prompts prompts.jsonl --out answers.jsonl --max-sequences 8")
def batch(
    *,
    prompts: Path = Option(
        ...,
        help="JSONL with 'prompt', 'turns' or 'messages' a line; 'max_new_tokens', 'temperature', 'top_p' and 'seed' in a "
        "line go before the options.",
    ),
    out_file: Path | None = Option(None, "--out", help="JSONL of answers, in the order of the prompts."),
    named: PairOptions,
    max_sequences: int = Option(8, help="Most requests at once."),
    decoding: _Batch,
    json_output: bool = Option(
        False, "--json", help="Print a JSON line for each answer as it comes, and one of the engine a second."
    ),
) -> None:
    """Answer a file of prompts together, with one verification for all of them in every step."""
    from tqdm import tqdm

    from ..evaluation.completion import answer_all
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
            f"{engine['verified_per_request']:.2f} drafts verified for a request in a step"
        )
    if failed:
        err.print(f"{len(failed)} of {len(answers)} requests failed, the first with {failed[0]['error']}")


@app.command(epilog="Example: dspark-hf race --prompt 'Explain why the sky is blue.'")
def race(
    *,
    prompt: str = Option(
        "Write a Python function that returns all prime numbers up to n with the sieve of Eratosthenes.",
        help="What to ask.",
    ),
    named: PairOptions,
    max_new_tokens: int = Option(160, help="Longest answer, in tokens."),
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
        out.print(f"{results[-1].tokens_per_second:.1f} tok/s", style="bold")
    plain, fast = results
    out.rule("result")
    same = "the same tokens" if plain.token_ids == fast.token_ids else "DIFFERENT tokens (a tie? see dspark-hf bench)"
    speedup = f"{fast.tokens_per_second / plain.tokens_per_second:.2f}×"
    out.print(Text.assemble((speedup, "bold"), f" the speed, {same}, τ {fast.accept_length:.2f} tokens a round"))


@app.command(epilog="Example: dspark-hf serve --port 8000, then point any OpenAI client at http://127.0.0.1:8000/v1")
def serve(
    *,
    named: PairOptions,
    host: str = Option("127.0.0.1", help="Address to listen at; others can reach 0.0.0.0, so give a key with it."),
    port: int = Option(8000, help="Port to listen at."),
    api_key: str | None = Option(None, envvar="DSPARK_API_KEY", help="Key that every route but /health asks for."),
    max_sequences: int = Option(8, help="Most requests decoded at once; others wait."),
    max_requests: int = Option(64, help="Most requests in flight; more get 503."),
    max_answer_tokens: int = Option(4096, help="Longest answer that may be asked for."),
    max_body_bytes: int = Option(1 << 20, help="Largest body of a request."),
) -> None:
    """Serve target and drafter on this machine with OpenAI's API: chat, completions, streams; many requests at once."""
    for value, option in (
        (port, "--port"),
        (max_sequences, "--max-sequences"),
        (max_requests, "--max-requests"),
        (max_answer_tokens, "--max-answer-tokens"),
        (max_body_bytes, "--max-body-bytes"),
    ):
        at_least(value, 1, option)
    if port > 65535:
        raise ValueError(f"--port must be at most 65535, got {port}.")
    need_modules("fastapi", "uvicorn", "prometheus_client", extra="serve")
    import uvicorn

    from ..engine.engine import BatchEngine
    from ..serving.api import ServerLimits, make_app

    try:  # before anything is loaded
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OSError(
            f"Can't listen at {host}, port {port} ({error.strerror}): choose another --host or --port."
        ) from None
    pair = named.load()
    engine = BatchEngine(pair.target.model, pair.drafter, max_sequences=max_sequences, keep_finished=max_sequences)
    if host not in ("127.0.0.1", "localhost", "::1") and api_key is None:
        err.print(f"Anyone who reaches {host} can use this server: give --api-key.", style="yellow")
    limits = ServerLimits(max_body_bytes, max_answer_tokens, max_requests)
    place = f"[{host}]" if ":" in host else host
    err.print(f"{pair.target.name} at http://{place}:{port}/v1 (Ctrl-C stops it)", soft_wrap=True)
    served = make_app(pair.target, engine, api_key, limits)
    config = uvicorn.Config(served, log_level="warning", timeout_graceful_shutdown=30)
    uvicorn.Server(config).run(sockets=[listener])
