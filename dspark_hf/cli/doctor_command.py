"""`dspark-hf doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..loading import AUTO, DEFAULT_TARGET
from .app import DeviceOption, DrafterOption, DtypeOption, TargetOption, app, out


@app.command(epilog="Example: dspark-hf doctor --target Qwen/Qwen3-0.6B --drafter my-drafter")
def doctor(
    target: TargetOption = DEFAULT_TARGET,
    drafter: DrafterOption = AUTO,
    speed: Annotated[
        bool,
        typer.Option("--speed/--no-speed", help="Measure whether drafting pays here (about ten seconds, then kept)."),
    ] = True,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
    json_output: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Check that a drafter fits its target and is read rightly; exit code 1 where a check failed."""
    from ..doctor.examine import examine
    from ..doctor.report import report_table, verdict
    from ..loading.pairs import choose_drafter, load_target

    drafter = choose_drafter(drafter, target)
    report = examine(load_target(target, device, dtype), drafter, speed)
    if json_output:
        out.print_json(data=report.to_dict())
    else:
        out.print(report_table(report))
        out.print(verdict(report), highlight=False, soft_wrap=True)
    if not report.is_healthy:
        raise typer.Exit(1)
