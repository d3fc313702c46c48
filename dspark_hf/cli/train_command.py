"""`dspark-hf train`."""

from __future__ import annotations

from dataclasses import asdict

from typer import Option

from ..loading import DEFAULT_TARGET
from ..training.recipe import TrainOptions
from .app import DeviceOption, TargetOption, app, err, out


@app.command(
    epilog="Example: dspark-hf train --target HuggingFaceTB/SmolLM2-135M-Instruct --prompts prompts.jsonl "
    "--output my-drafter --steps 3000"
)
def train(
    *,
    options: TrainOptions,
    target: TargetOption = DEFAULT_TARGET,
    device: DeviceOption = None,
    json_output: bool = Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Train a drafter: answers by the target, features, training. Goes on where an earlier run stopped."""
    from ..loading.pairs import load_target
    from ..training.pipeline import run_training

    options.check()  # before the target is loaded
    report = run_training(load_target(target, device), options, say=err.print)
    err.print(
        f"Next: dspark-hf calibrate --target {target} --drafter {options.output} --prompts HELD_OUT.jsonl",
        soft_wrap=True,
    )
    if json_output:
        out.print_json(data=asdict(report))
    else:
        acceptance = " ".join(f"{a:.3f}" for a in report.held_out.acceptance)
        out.print(
            f"{report.output}: held-out acceptance by position {acceptance}, τ {report.held_out.accept_length:.2f}"
        )
