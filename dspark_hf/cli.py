"""The `dspark-hf` command: each sub-command parses, calls one function and prints.

Owns: options, help texts, exit codes (0 done, 2 bad input, 130 interrupted). Does not own: any work.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .pairs import DEFAULT_DRAFTER, DEFAULT_TARGET

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Faster generation with Hugging Face language models, token for token the same.",
)
# In a file or a pipe, rich would squeeze tables into 80 columns.
out = Console(width=None if sys.stdout.isatty() else 130)
err = Console(stderr=True)

TargetOption = Annotated[str, typer.Option(help="Target model: a Hub id or a folder.")]
DrafterOption = Annotated[str, typer.Option(help="Drafter: a Hub id or a folder.")]
DtypeOption = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")]
DeviceOption = Annotated[str | None, typer.Option(help="Device, e.g. cpu or cuda; an accelerator where there is one.")]


@app.callback()
def _root() -> None:
    """Faster generation with Hugging Face language models, token for token the same."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading weights; work of ours has bars of its own


def _numbers(text: str, kind: type, option: str) -> tuple:
    try:
        return tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"{option} takes numbers with commas between them, got {text!r}.") from None


def _at_least(value: float, low: float, option: str) -> None:
    if value < low:
        raise ValueError(f"{option} must be at least {low:g}, got {value:g}.")


@app.command(
    epilog="Example: dspark-hf train --target HuggingFaceTB/SmolLM2-135M-Instruct --prompts prompts.jsonl "
    "--output my-drafter --steps 3000"
)
def train(
    output: Annotated[Path, typer.Option(help="Folder for the finished drafter (Hub-ready).")],
    prompts: Annotated[
        list[Path] | None, typer.Option(help="JSONL with 'prompt', 'turns' or 'messages'; may be given again.")
    ] = None,
    answers: Annotated[
        list[Path] | None,
        typer.Option(help="JSONL with 'input_ids' and 'response_ids' made earlier; may be given again."),
    ] = None,
    target: TargetOption = DEFAULT_TARGET,
    work_dir: Annotated[
        Path | None, typer.Option(help="Answers, features, checkpoints. [default: OUTPUT-work]")
    ] = None,
    num_answers: Annotated[int | None, typer.Option(help="Answers to make. [default: one a prompt]")] = None,
    invented_prompts: Annotated[int, typer.Option(help="Prompts that the target writes itself, as domain 'chat'.")] = 0,
    temperatures: Annotated[str, typer.Option(help="Temperatures of the answers in turn; 0 is greedy.")] = "0,0.6,0.8",
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 192,
    slots: Annotated[int, typer.Option(help="Answers decoded side by side.")] = 128,
    num_layers: Annotated[int, typer.Option(help="Depth of the drafter.")] = 3,
    block_size: Annotated[int, typer.Option(help="Tokens drafted a round at most.")] = 7,
    min_block_size: Annotated[int | None, typer.Option(help="Train on blocks of this size and up too.")] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(help="Drafted a round when used. [default: all of a block]")
    ] = None,
    markov_head: Annotated[str, typer.Option(help="none, vanilla, gated or rnn.")] = "vanilla",
    markov_rank: Annotated[int, typer.Option(help="Rank of the sequential head.")] = 64,
    draft_vocab_size: Annotated[int, typer.Option(help="Most frequent tokens to propose from; 0 is all.")] = 8192,
    target_layers: Annotated[str, typer.Option(help="Tapped layers. [default: five, spread]")] = "",
    steps: Annotated[int | None, typer.Option(help="Training steps. [default: --epochs over the answers]")] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the answers where --steps is not given.")] = 10.0,
    batch_size: Annotated[int, typer.Option(help="Answers a step and process.")] = 8,
    num_anchors: Annotated[int, typer.Option(help="Blocks drawn in each answer and step.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Peak of the learning rate.")] = 1e-3,
    feature_cache_gb: Annotated[
        float, typer.Option(help="Most disk for kept features; the rest is recomputed.")
    ] = 20.0,
    seed: Annotated[int, typer.Option(help="Seed of answers, anchors and weights.")] = 0,
    init_from: Annotated[
        Path | None, typer.Option(help="Folder of a drafter to go on from, with the same shape options.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw an earlier run's working files away and begin anew.")
    ] = False,
    device: DeviceOption = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Train a drafter: answers by the target, features, training. Goes on where an earlier run stopped."""
    from .pairs import load_target
    from .training.pipeline import TrainOptions, run_training

    for value, low, option in (
        (max_new_tokens, 8, "--max-new-tokens"),
        (num_layers, 1, "--num-layers"),
        (block_size, 1, "--block-size"),
        (draft_vocab_size, 0, "--draft-vocab-size"),
        (batch_size, 1, "--batch-size"),
        (num_anchors, 1, "--num-anchors"),
        (slots, 1, "--slots"),
        (1 if steps is None else steps, 1, "--steps"),
        (1 if draft_tokens is None else draft_tokens, 1, "--draft-tokens"),
        (feature_cache_gb, 0, "--feature-cache-gb"),
    ):
        _at_least(value, low, option)
    for file in (*(prompts or ()), *(answers or ())):
        if not file.is_file():
            raise OSError(f"No such file: {file}.")
    output = output.resolve()
    options = TrainOptions(
        prompts=tuple(prompts or ()),
        output=output,
        work_dir=work_dir or output.with_name(output.name + "-work"),
        answers=tuple(answers or ()),
        num_answers=num_answers,
        invented_prompts=invented_prompts,
        temperatures=_numbers(temperatures, float, "--temperatures"),
        max_new_tokens=max_new_tokens,
        slots=slots,
        num_layers=num_layers,
        block_size=block_size,
        min_block_size=min_block_size,
        draft_tokens=draft_tokens,
        markov_head=markov_head,
        markov_rank=markov_rank,
        draft_vocab_size=draft_vocab_size or None,
        target_layers=_numbers(target_layers, int, "--target-layers") or None,
        steps=steps,
        epochs=epochs,
        batch_size=batch_size,
        num_anchors=num_anchors,
        learning_rate=learning_rate,
        feature_cache_gb=feature_cache_gb,
        seed=seed,
        restart=restart,
        init_from=init_from,
    )
    report = run_training(load_target(target, device), options, say=err.print)
    if json_output:
        out.print_json(data=_plain(report))
    else:
        acceptance = " ".join(f"{a:.3f}" for a in report.held_out.acceptance)
        out.print(
            f"{report.output}: held-out acceptance by position {acceptance}, τ {report.held_out.accept_length:.2f}"
        )


def _plain(record) -> dict:
    from dataclasses import asdict

    return asdict(record)


@app.command(epilog="Example: dspark-hf generate --prompt 'Write a haiku about rain.' --temperature 0.7")
def generate(
    prompt: Annotated[str, typer.Option(help="What to ask; the target's chat template is put around it.")],
    target: TargetOption = DEFAULT_TARGET,
    drafter: DrafterOption = DEFAULT_DRAFTER,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens of this probability mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print the text as it comes.")] = True,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
    json_output: Annotated[bool, typer.Option("--json", help="Print text and statistics as JSON.")] = False,
) -> None:
    """Answer one prompt with target and drafter."""
    from .evaluation.completion import DecodingOptions, complete
    from .pairs import load_drafter, load_target

    if not prompt.strip():
        raise ValueError("The prompt is empty. Give some text with --prompt.")
    _at_least(max_new_tokens, 1, "--max-new-tokens")
    _at_least(temperature, 0, "--temperature")
    loaded = load_target(target, device, dtype)
    options = DecodingOptions(max_new_tokens, temperature, top_p, seed)
    draft_model = load_drafter(drafter, loaded.model)
    result = complete(loaded, prompt, options, draft_model, stream=stream and not json_output)
    if json_output:
        out.print_json(data=result.to_dict())
        return
    if not stream:
        out.print(result.text, markup=False, highlight=False)
    err.print(
        f"{len(result.token_ids)} tokens, {result.tokens_per_second:.1f} tok/s, τ {result.accept_length:.2f}",
        highlight=False,
    )


@app.command(epilog="Example: dspark-hf race --prompt 'Explain why the sky is blue.'")
def race(
    prompt: Annotated[str, typer.Option(help="What to ask.")] = (
        "Write a Python function that returns all prime numbers up to n with the sieve of Eratosthenes."
    ),
    target: TargetOption = DEFAULT_TARGET,
    drafter: DrafterOption = DEFAULT_DRAFTER,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 160,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
) -> None:
    """Plain decoding against DSpark in the terminal: the same prompt, greedy, one after the other."""
    from .evaluation.completion import DecodingOptions, complete
    from .pairs import load_drafter, load_target

    _at_least(max_new_tokens, 1, "--max-new-tokens")
    with err.status("Loading target and drafter"):
        loaded = load_target(target, device, dtype)
        draft_model = load_drafter(drafter, loaded.model)
        for assistant in (None, draft_model):  # warm-up
            complete(loaded, prompt, DecodingOptions(max_new_tokens=4), assistant)
    options = DecodingOptions(max_new_tokens=max_new_tokens)
    results = []
    for title, assistant in (("plain decoding", None), ("DSpark", draft_model)):
        out.rule(title)
        results.append(complete(loaded, prompt, options, assistant, stream=True))
        out.print(f"[bold]{results[-1].tokens_per_second:.1f} tok/s[/bold]", highlight=False)
    plain, fast = results
    out.rule("result")
    same = "the same tokens" if plain.token_ids == fast.token_ids else "DIFFERENT tokens (a tie? see dspark-hf bench)"
    out.print(
        f"[bold]{fast.tokens_per_second / plain.tokens_per_second:.2f}×[/bold] the speed, {same}, "
        f"τ {fast.accept_length:.2f} tokens a round",
        highlight=False,
    )


@app.command(epilog="Example: dspark-hf bench --max-new-tokens 128 --json bench.json")
def bench(
    prompts: Annotated[Path | None, typer.Option(help="JSONL of prompts with 'domain'. [default: our own 24]")] = None,
    target: TargetOption = DEFAULT_TARGET,
    drafter: DrafterOption = DEFAULT_DRAFTER,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per answer at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    limit: Annotated[int | None, typer.Option(help="Only the first prompts of each domain.")] = None,
    draft_tokens: Annotated[int | None, typer.Option(help="Tokens drafted a round. [default: the drafter's]")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Measure plain decoding, DSpark and prompt lookup on the same prompts in one run."""
    from .evaluation.completion import DecodingOptions
    from .evaluation.report import bench_table
    from .evaluation.speed import bench_prompts, run_bench, summarise
    from .files import write_json
    from .pairs import load_drafter, load_target

    _at_least(max_new_tokens, 2, "--max-new-tokens")
    _at_least(temperature, 0, "--temperature")
    _at_least(1 if limit is None else limit, 1, "--limit")
    _at_least(0 if draft_tokens is None else draft_tokens, 0, "--draft-tokens")
    if prompts is not None and not prompts.is_file():
        raise OSError(f"No such file: {prompts}.")
    loaded = load_target(target, device, dtype)
    draft_model = load_drafter(drafter, loaded.model)
    if draft_tokens is not None:
        draft_model.generation_config.num_assistant_tokens = draft_tokens
    chosen = bench_prompts(loaded, prompts, limit)
    summary = summarise(run_bench(loaded, draft_model, chosen, DecodingOptions(max_new_tokens, temperature, seed=seed)))
    if json_file is not None:
        write_json(summary, json_file)
    out.print(bench_table(summary))


def main() -> None:
    """Entry point: user errors become one line and exit code 2."""
    try:
        code = app(standalone_mode=False)  # typer hands an early exit's code back, 130 for Ctrl-C
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except (ValueError, OSError) as error:
        err.print(f"[red]Error:[/red] {' '.join(str(error).split())}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except Exception as error:
        if not hasattr(error, "show"):  # click's usage errors print themselves
            raise
        error.show()
        sys.exit(2)
    if code == 130:
        err.print("Interrupted. What was finished is kept.")
    sys.exit(code or 0)
