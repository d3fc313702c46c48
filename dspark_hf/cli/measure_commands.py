"""`dspark-hf bench`, `profile`, `calibrate` and `eval`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from ..evaluation.questions import DecodingOptions
from ..loading import AUTO, DEFAULT_TARGET
from .app import (
    DeviceOption,
    DtypeOption,
    PairOptions,
    TargetOption,
    app,
    at_least,
    err,
    existing_file,
    need_modules,
    out,
)
from .flags import numbers

PromptsOption = Annotated[
    str | None,
    typer.Option(
        help="JSONL with 'prompt', 'turns' or 'messages' and a 'domain'; or gsm8k, math500, humaneval, mbpp, mt-bench, "
        "alpaca from the Hub. (default: our own 24)"
    ),
]
LimitOption = Annotated[int | None, typer.Option(help="Only the first prompts of each source.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]


@dataclass(frozen=True)
class _Bench(DecodingOptions):
    """Short answers, from the whole distribution."""

    max_new_tokens: int = field(default=128, metadata={"help": "Tokens per answer at most."})
    top_p: float = 1.0


@dataclass(frozen=True)
class _Calibrate(_Bench):
    """As a drafter is most often used."""

    temperature: float = field(default=1.0, metadata={"help": "Of the decoding that is calibrated on; 0 is greedy."})


@app.command(
    epilog="Example: dspark-hf bench --max-new-tokens 128 --policies fixed:1,fixed:3,throughput --json bench.json, or "
    "dspark-hf bench --concurrency 1,2,4,8,16 --plots figures"
)
def bench(
    *,
    prompts: Path | None = Option(None, help="JSONL of prompts with 'domain'. (default: our own 24)"),
    named: PairOptions,
    decoding: _Bench,
    limit: int | None = Option(None, help="Only the first prompts of each domain."),
    draft_tokens: int | None = Option(None, help="Tokens drafted a round. (default: the drafter's)"),
    policies: str = Option(
        "", help="Measured beside the drafter's own: fixed:N, threshold:T, throughput, lagged, lookahead."
    ),
    concurrency: str = Option(
        "", help="Many requests at once instead, e.g. 1,2,4,8,16; --policies are then static lengths 1, 3, 7."
    ),
    sweeps: int = Option(3, help="With --concurrency: waves of prompts at each number of requests."),
    plots: Path | None = Option(None, help="With --concurrency: folder for the two figures (PNG)."),
    stock_layers: bool = Option(False, "--stock-layers", help="Leave the linear layers on a CPU as torch has them."),
    json_file: Path | None = Option(None, "--json", help="Write the figures to this file."),
) -> None:
    """Measure plain decoding, DSpark and prompt lookup on the same prompts in one run, or many requests at once."""
    from ..evaluation.bench import run_bench, run_concurrency, step_seconds, summarise
    from ..evaluation.completion import check_policy
    from ..evaluation.prompt_sets import first_of_each_domain, load_conversations
    from ..evaluation.reports import bench_sheets, concurrency_sheet
    from ..loading.files import write_json
    from ..scheduling.policy import FixedLength

    at_least(decoding.max_new_tokens, 2, "--max-new-tokens")
    at_least(limit, 1, "--limit")
    at_least(draft_tokens, 0, "--draft-tokens")
    existing_file(prompts)
    levels = numbers(concurrency, int, "--concurrency")
    for level in levels:
        at_least(level, 1, "--concurrency")
    at_least(sweeps, 1, "--sweeps")
    if plots is not None:
        need_modules("matplotlib")
        if not levels:
            raise ValueError("--plots draws what --concurrency measures: give that too, e.g. --concurrency 1,2,4,8.")
    names = numbers(policies, str, "--policies") or (("fixed:1", "fixed:3", "fixed:7") if levels else ())
    for name in names:
        check_policy(name)
    pair = named.load()
    pair.drafter.options.skinny_linear = not stock_layers
    if draft_tokens is not None:
        pair.drafter.options.policy = FixedLength(draft_tokens)
        pair.drafter.generation_config.num_assistant_tokens = draft_tokens
    chosen = first_of_each_domain(load_conversations(prompts), limit)
    if levels:
        summary = run_concurrency(pair.target, pair.drafter, chosen, decoding, sorted(set(levels)), names, sweeps)
        out.print(concurrency_sheet(summary))
        if json_file is not None:
            write_json(summary, json_file)
        if plots is not None:
            from ..evaluation.plots import budget_curve, throughput_curves, write_png

            write_png(throughput_curves(summary), plots / "throughput.png")
            write_png(budget_curve(summary), plots / "budget.png")
        return
    seconds = step_seconds(pair.target.model, pair.drafter)
    summary = summarise(run_bench(pair.target, pair.drafter, chosen, decoding, names)) | {"step_seconds": seconds}
    out.print(*bench_sheets(summary))
    if json_file is not None:  # after printing, so that a file that can't be written costs no figures
        write_json(summary, json_file)


@app.command(epilog="Example: dspark-hf profile --max-rows 16 --depths 128,1024 --plot curve.png")
def profile(
    *,
    named: PairOptions,
    max_rows: int = Option(64, help="Most tokens in one forward."),
    depths: str = Option("128,1024,4096", help="Tokens of context before them."),
    sweeps: int = Option(5, help="Repeats of every measurement, interleaved."),
    plot: Path | None = Option(None, help="Draw the curve into this PNG file."),
    json_output: JsonFlag = False,
) -> None:
    """Measure what a forward of the target and a draft cost here, and keep the table for the scheduler."""
    from ..decoding.profiling import ProfilePlan, measure_step_rates
    from ..evaluation.reports import step_rate_sheet

    at_least(max_rows, 1, "--max-rows")
    plan = ProfilePlan(tuple(range(1, max_rows + 1)), numbers(depths, int, "--depths"), sweeps)
    if plot is not None:
        need_modules("matplotlib")
    pair = named.load()
    rates = measure_step_rates(pair.target.model, pair.drafter, plan)
    try:
        place = f"Kept in {rates.save()}."
    except OSError as error:
        place = f"The table can't be kept: {error}"
    if plot is not None:
        from ..evaluation.plots import step_rate_curve, write_png

        write_png(step_rate_curve(rates), plot)
    if json_output:
        out.print_json(data=asdict(rates))
        return
    out.print(step_rate_sheet(rates))
    out.print(place, soft_wrap=True)


@app.command(epilog="Example: dspark-hf calibrate --prompts held-out.jsonl --drafter my-drafter --report calibration")
def calibrate(
    *,
    prompts: PromptsOption = None,
    named: PairOptions,
    out_folder: Path | None = Option(
        None, "--out", help="Folder for the calibrated drafter. (default: the drafter's own)"
    ),
    decoding: _Calibrate,
    limit: LimitOption = None,
    report: Path | None = Option(
        None, help="Folder for the reliability diagram and the rounds (an interrupted run goes on)."
    ),
    json_output: JsonFlag = False,
) -> None:
    """Calibrate a drafter's confidences on prompts it was not trained on; every second one judges the fit."""
    from ..evaluation.calibrate import check_destination, run_calibration, store_calibration
    from ..evaluation.prompt_sets import load_conversations
    from ..evaluation.reports import calibration_sheet
    from ..loading.pairs import choose_drafter, drafter_folder

    at_least(decoding.max_new_tokens, 8, "--max-new-tokens")
    at_least(limit, 1, "--limit")
    need_modules("sklearn", *(["matplotlib"] if report is not None else []))
    named = replace(named, drafter=choose_drafter(named.drafter, named.target))
    source = drafter_folder(named.drafter)
    destination = check_destination(source, out_folder)
    conversations = load_conversations(prompts, limit)
    pair = named.load()
    rounds_file = None if report is None else report / "rounds.jsonl"
    result = run_calibration(pair.target, pair.drafter, conversations, decoding, rounds_file)
    store_calibration(pair.drafter, result, source, destination)
    if report is not None:
        from ..evaluation.plots import calibration_diagram, write_png

        write_png(calibration_diagram(result), report / "reliability.png")
    if json_output:
        out.print_json(data=result.to_dict())
        return
    out.print(calibration_sheet(result))
    if result.calibration.too_few:
        positions = ", ".join(map(str, result.calibration.too_few))
        err.print(
            f"Too few rounds reached position {positions}: left as the drafter gives it. More prompts would help."
        )
    out.print(f"The calibration is in {destination}.", soft_wrap=True)


@app.command(
    name="eval",
    epilog="Example: dspark-hf eval --prompts gsm8k --limit 50 --temperature 1 --threshold-sweep --report out, or "
    "dspark-hf eval --drafter ours=my-drafter --drafter theirs=other-drafter --temperature 1,0 --report out",
)
def evaluate(
    *,
    prompts: PromptsOption = None,
    target: TargetOption = DEFAULT_TARGET,
    drafter: list[str] | None = Option(
        None,
        help="Drafter: a Hub id or a folder, or auto (the known one of the target, also where none is given); again for each "
        "one to compare, as name=path if you like.",
    ),
    policy: str = Option(
        "full", help="full (whole blocks), own (the drafter's), fixed:N, threshold:T, throughput, lagged, lookahead."
    ),
    temperature: str = Option("0", help="0 is greedy; several with commas between them, e.g. 1,0."),
    context_window: str = Option(
        "",
        help="Compare windows of the drafter's context: tokens kept, or none, e.g. none,256,1024. (default: the drafter's)",
    ),
    max_new_tokens: int = Option(128, help="Tokens per answer at most."),
    limit: LimitOption = None,
    threshold_sweep: bool = Option(
        False, "--threshold-sweep", help="What confidence thresholds from 0 to 0.95 would have cut."
    ),
    report: Path | None = Option(None, help="Folder for table, figures, JSON and rounds (an interrupted run goes on)."),
    seed: int = Option(0, help="Seed of the draws."),
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
    json_output: JsonFlag = False,
) -> None:
    """Measure acceptance by domain and source: τ, acceptance by position, wasted drafts, reliability; several drafters side by
    side."""
    from ..evaluation.comparison import named_drafters, with_windows
    from ..evaluation.completion import check_policy
    from ..evaluation.figures import summarise_evaluation
    from ..evaluation.prompt_sets import load_conversations
    from ..evaluation.reports import evaluation_sheets, write_report
    from ..evaluation.rounds import collect
    from ..loading.pairs import choose_drafter, load_drafter, load_target

    at_least(max_new_tokens, 2, "--max-new-tokens")
    temperatures = numbers(temperature, float, "--temperature")
    for value in temperatures:
        at_least(value, 0, "--temperature")
    if not temperatures or len(set(temperatures)) < len(temperatures):
        raise ValueError(f"--temperature takes one number or more, each once, got {temperature!r}.")
    at_least(limit, 1, "--limit")
    check_policy(policy)
    windows = _windows(context_window)
    named = named_drafters(drafter or [AUTO])
    several = max(len(named), len(windows), len(temperatures)) > 1
    if threshold_sweep and policy != "full":
        raise ValueError(f"--threshold-sweep needs whole blocks: leave --policy at full, got {policy}.")
    if threshold_sweep and several:
        raise ValueError(
            "--threshold-sweep is of one drafter at one temperature: give one --drafter, --temperature and --context-window."
        )
    if report is not None:
        need_modules("matplotlib", "scipy")
    conversations = load_conversations(prompts, limit)
    named = {label: choose_drafter(path, target) for label, path in named.items()}
    loaded = load_target(target, device, dtype)
    models = {label: load_drafter(path, loaded.model) for label, path in named.items()}
    if windows:
        models, named = with_windows(models, named, windows)
    check_policy(policy, models)
    options = [DecodingOptions(max_new_tokens, value, seed=seed) for value in temperatures]
    if several:
        facts: dict[str, Any] = {"target": target, "drafters": named, "policy": policy, "prompts": prompts or "our own"}
        facts |= {"tokens per answer at most": max_new_tokens, "seed": seed}
        _compare(loaded, models, conversations, options, policy, facts, report, json_output)
        return
    ((label, draft_model),) = models.items()
    if threshold_sweep and draft_model.confidence_head is None:
        raise ValueError("--threshold-sweep needs a drafter with a confidence head.")
    file = None if report is None else report / "rounds.jsonl"
    samples = collect(loaded, draft_model, conversations, options[0], policy, file)
    summary = summarise_evaluation(samples, draft_model.config, threshold_sweep)
    if report is not None:
        facts = {"target": target, "drafter": named[label], "policy": policy, "temperature": temperatures[0]}
        write_report(summary, samples, draft_model.config, facts, report)
    if json_output:
        out.print_json(data=summary)
    else:
        out.print(*evaluation_sheets(summary))
        _say_where(report)
    failed = summary["groups"]["all"]["failed"]
    if failed:
        err.print(f"{failed} turns failed and are not in the figures (the JSON says why).{_again(report)}")
    if not summary["groups"]["all"]["samples"]:
        raise typer.Exit(2)


def _compare(target, models, conversations, options, policy, facts, report: Path | None, json_output: bool) -> None:
    from ..evaluation.comparison import compare, run_comparison, run_folder
    from ..evaluation.figures import summarise_evaluation
    from ..evaluation.reports import comparison_sheets, write_comparison, write_report

    results = run_comparison(target, models, conversations, options, policy, report)
    summary = compare(results, models)
    if report is not None:
        write_comparison(summary, facts, report)
        for temperature, runs in results.items():
            for label, samples in runs.items():
                of_run = {"target": target.name, "drafter": facts["drafters"][label], "policy": policy}
                figures = summarise_evaluation(samples, models[label].config, sweep=False)
                folder = run_folder(report, label, float(temperature))
                write_report(figures, samples, models[label].config, of_run | {"temperature": temperature}, folder)
    if json_output:
        out.print_json(data={"facts": facts} | summary)
    else:
        out.print(*comparison_sheets(summary))
        _say_where(report)
    for temperature, compared in summary["temperatures"].items():
        if compared["left_out"]:
            err.print(
                f"Temperature {temperature}: {compared['left_out']} prompts failed under a drafter and are left out for all (the "
                f"JSON says why).{_again(report)}"
            )
    if all(compared["left_out"] == len(conversations) for compared in summary["temperatures"].values()):
        raise typer.Exit(2)


def _windows(text: str) -> tuple[int | None, ...]:
    windows = numbers(text, lambda part: None if part == "none" else int(part), "--context-window (none, too)")
    if len(set(windows)) < len(windows) or any(w is not None and w < 1 for w in windows):
        raise ValueError(f"--context-window takes numbers from 1, and none, each once, got {text!r}.")
    return windows


def _again(report: Path | None) -> str:
    return "" if report is None else " Run again with the same --report to retry."


def _say_where(report: Path | None) -> None:
    if report is not None:
        out.print(f"The report is in {report}.", soft_wrap=True)
