"""`dspark-hf train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..loading import DEFAULT_TARGET
from .app import DeviceOption, TargetOption, app, at_least, err, existing_file, out
from .flags import numbers


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
        Path | None, typer.Option(help="Answers, features, checkpoints. (default: OUTPUT-work)")
    ] = None,
    num_answers: Annotated[int | None, typer.Option(help="Answers to make. (default: one a prompt)")] = None,
    invented_prompts: Annotated[int, typer.Option(help="Prompts that the target writes itself, as domain 'chat'.")] = 0,
    temperatures: Annotated[str, typer.Option(help="Temperatures of the answers in turn; 0 is greedy.")] = "0,0.6,0.8",
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 192,
    slots: Annotated[int, typer.Option(help="Answers decoded side by side.")] = 128,
    method: Annotated[
        str, typer.Option(help="dspark, or what it is compared with: dflash (no heads, fill-in blocks), eagle3.")
    ] = "dspark",
    num_layers: Annotated[int | None, typer.Option(help="Depth of the drafter. (default: 3; eagle3 has 1)")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens drafted a round at most.")] = 7,
    min_block_size: Annotated[int | None, typer.Option(help="Train on blocks of this size and up too.")] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(help="Drafted a round when used. (default: all of a block)")
    ] = None,
    markov_head: Annotated[str, typer.Option(help="none, vanilla, gated or rnn (dspark).")] = "vanilla",
    markov_rank: Annotated[int, typer.Option(help="Rank of the sequential head.")] = 64,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="Most frequent tokens to propose from; 0 is all. (default: 8192)")
    ] = None,
    draft_vocab_coverage: Annotated[
        float | None, typer.Option(help="Instead: as many as cover this share of the answers' tokens, e.g. 0.995.")
    ] = None,
    target_layers: Annotated[str, typer.Option(help="Tapped layers. (default: five, spread)")] = "",
    steps: Annotated[int | None, typer.Option(help="Training steps. (default: --epochs over the answers)")] = None,
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
    from ..loading.pairs import load_target
    from ..training.pipeline import METHODS, TrainOptions, run_training

    for value, low, option in (
        (max_new_tokens, 8, "--max-new-tokens"),
        (num_layers, 1, "--num-layers"),
        (block_size, 1, "--block-size"),
        (draft_vocab_size, 0, "--draft-vocab-size"),
        (batch_size, 1, "--batch-size"),
        (num_anchors, 1, "--num-anchors"),
        (slots, 1, "--slots"),
        (steps, 1, "--steps"),
        (draft_tokens, 1, "--draft-tokens"),
        (feature_cache_gb, 0, "--feature-cache-gb"),
    ):
        at_least(value, low, option)
    if draft_vocab_coverage is not None:
        if draft_vocab_size is not None:
            raise ValueError("--draft-vocab-size and --draft-vocab-coverage exclude each other: give one of them.")
        if not 0.0 < draft_vocab_coverage <= 1.0:
            raise ValueError(f"--draft-vocab-coverage must be above 0 and at most 1, got {draft_vocab_coverage}.")
    if method not in METHODS:
        raise ValueError(f"--method must be one of {', '.join(METHODS)}, got {method!r}.")
    if min_block_size is not None and not 1 <= min_block_size <= block_size:
        raise ValueError(f"--min-block-size must be between 1 and --block-size ({block_size}), got {min_block_size}.")
    if init_from is not None and not init_from.is_dir():
        raise OSError(f"--init-from: no folder {init_from}.")
    for file in (*(prompts or ()), *(answers or ())):
        existing_file(file)
    output = output.resolve()
    options = TrainOptions(
        prompts=tuple(prompts or ()),
        output=output,
        work_dir=work_dir or output.with_name(output.name + "-work"),
        answers=tuple(answers or ()),
        num_answers=num_answers,
        invented_prompts=invented_prompts,
        temperatures=numbers(temperatures, float, "--temperatures"),
        max_new_tokens=max_new_tokens,
        slots=slots,
        method=method,
        num_layers=num_layers,
        block_size=block_size,
        min_block_size=min_block_size,
        draft_tokens=draft_tokens,
        markov_head=markov_head,
        markov_rank=markov_rank,
        draft_vocab_size=8192 if draft_vocab_size is None else draft_vocab_size or None,
        draft_vocab_coverage=draft_vocab_coverage,
        target_layers=numbers(target_layers, int, "--target-layers") or None,
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
    err.print(
        f"Next: dspark-hf calibrate --target {target} --drafter {output} --prompts HELD_OUT.jsonl", soft_wrap=True
    )
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
