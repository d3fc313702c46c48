"""What a drafter's files say, as the words and rows of a card.

Owns: reading a folder's config and the JSON files of training, bench and calibration; their layout as text.
Does not own: the card (`card`), making those files (`training`, `evaluation`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..loading.files import holds_drafter
from ..model.configuration_dspark import DSparkConfig

Rows = list[list[str]]
TRAINING, BENCH, CALIBRATION, RELIABILITY = "training.json", "bench.json", "calibration.json", "reliability.png"
_MADE_BY = {
    TRAINING: "dspark-hf train --output DIR",
    BENCH: "dspark-hf bench --target TARGET --drafter DIR --json DIR/bench.json",
    CALIBRATION: "dspark-hf calibrate --target TARGET --drafter DIR --prompts HELD_OUT.jsonl",
    RELIABILITY: "dspark-hf calibrate --target TARGET --drafter DIR --report DIR",
}


@dataclass(frozen=True)
class Facts:
    """A drafter's config and what its folder holds; a part is `None` where its file is missing."""

    config: DSparkConfig
    megabytes: float
    speed: dict[str, Any] | None
    calibration: dict[str, Any] | None
    training: dict[str, Any] | None
    picture: str | None


def read_facts(folder: Path) -> Facts:
    """Read a drafter's folder.

    Raises:
        OSError: no such folder, or a file in it can't be read.
        ValueError: it holds no drafter of this package's form, or a file is not what the command that makes it writes.
    """
    check_drafter(folder)
    config = DSparkConfig.from_pretrained(folder)
    return Facts(
        config,
        sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6,
        _part(folder, BENCH, _speed),
        _part(folder, CALIBRATION, _calibration),
        _part(folder, TRAINING, _training),
        RELIABILITY if (folder / RELIABILITY).is_file() else None,
    )


def check_drafter(folder: Path) -> None:
    """Raise where `folder` is not a drafter's."""
    if not folder.is_dir():
        raise OSError(f"No folder {folder}: give one that `dspark-hf train` or save_pretrained wrote.")
    if not holds_drafter(folder):
        raise ValueError(
            f"{folder} holds no drafter of this package's form (a config.json with model_type 'dspark'). Give a folder "
            "that `dspark-hf train` or save_pretrained wrote."
        )


def missing_files(folder: Path) -> list[str]:
    """A line for each file that a card could tell more from, with the command that makes it."""
    return [
        f"no {name} ({command.replace('DIR', str(folder))})"
        for name, command in _MADE_BY.items()
        if not (folder / name).is_file()
    ]


def _part(folder: Path, name: str, read: Any) -> Any:
    file = folder / name
    if not file.is_file():
        return None
    try:
        return read(json.loads(file.read_text(encoding="utf-8")))
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        command = _MADE_BY[name].replace("DIR", str(folder))
        raise ValueError(
            f"{file} is not what `{command}` writes ({type(error).__name__}: {error}). Make it again, or take it away."
        ) from None


def _speed(bench: dict[str, Any]) -> dict[str, Any]:
    domains = bench["domains"]
    rows, policies = [], []
    for name, figures in domains.items():
        plain, tuned, dspark, lookup = (figures[m] for m in ("plain", "plain_tuned", "dspark", "prompt_lookup"))
        identical = dspark["identical_share"]
        rows.append(
            [
                name,
                f"{dspark['accept_length']:.2f}",
                f"{plain['tokens_per_second']:.1f}",
                f"{tuned['tokens_per_second']:.1f}",
                f"{dspark['tokens_per_second']:.1f}",
                f"**{dspark['speedup']:.2f}×**",
                f"{dspark['tokens_per_second'] / tuned['tokens_per_second']:.2f}×",
                f"{lookup['speedup']:.2f}×",
                "-" if identical is None else f"{identical:.0%}",
            ]
        )
    for method, figures in domains["all"].items():
        if "policy" in figures:
            policies.append(
                [
                    "the drafter's own" if method == "dspark" else method,
                    f"{figures['tokens_per_second']:.1f}",
                    f"{figures['speedup']:.2f}×",
                    f"{figures['accept_length']:.2f}",
                    f"{figures['verified_per_round']:.2f}",
                ]
            )
    everything = domains["all"]["dspark"]
    positions = [share for share in everything["acceptance_by_position"] if share is not None]
    return {
        "rows": rows,
        "policies": policies if len(policies) > 1 else [],
        "prompts": len(bench["prompts"]),
        "new_tokens": max(prompt["tokens"]["plain"] for prompt in bench["prompts"]),
        "greedy": everything["identical_share"] is not None,
        "macro": f"{everything['macro_speedup']:.2f}",
        "worst": f"{everything['worst_speedup']:.2f}",
        "positions": " ".join(f"{share:.2f}" for share in positions),
    }


def _calibration(report: dict[str, Any]) -> dict[str, Any]:
    fitted = report["calibration"]
    rows: Rows = []
    for p, temperature, shift in zip(report["positions"], fitted["temperatures"], fitted["shifts"]):
        auc = "-" if p["auc_after"] is None else f"{p['auc_after']:.3f}"
        errors = f"{p['ece_before']:.1%}", f"{p['ece_after']:.1%}"
        rows.append([str(p["position"]), str(p["reached"]), *errors, auc, f"{temperature:.2f}", f"{shift:+.2f}"])
    return {
        "rows": rows,
        "fit_rounds": f"{report['fit_rounds']:,}",
        "report_rounds": f"{report['report_rounds']:,}",
        "temperature": f"{report['temperature']:g}",
        "too_few": ", ".join(map(str, fitted["too_few"])),
    }


def _training(record: dict[str, Any]) -> dict[str, Any]:
    options, report = record["options"], record["report"]
    files = ", ".join(f"`{name}`" for name in (*options["prompts"], *options["answers"]))
    blocks = str(options["block_size"])
    if options["min_block_size"]:
        blocks = f"{options['min_block_size']} to {blocks}"
    covered = report.get("draft_vocab_coverage")  # newer than the rest, as is `init_from`
    rows = [
        ["answers of the target", f"{report['answers']:,} ({report['answer_tokens']:,} tokens)"],
        ["longest answer made", f"{options['max_new_tokens']} tokens"],
        ["temperatures of the answers, in turn", ", ".join(f"{t:g}" for t in options["temperatures"])],
        ["files of prompts and answers", files],
        ["prompts that the target wrote itself", f"{options['invented_prompts']:,}"],
        ["steps × answers a step × blocks an answer", f"{report['steps']} × {options['batch_size']} × {options['num_anchors']}"],
        ["block size in training", blocks],
        ["peak learning rate", f"{options['learning_rate']:g}"],
        ["seed", str(options["seed"])],
        ["time in the training loop", f"{report['training_seconds'] / 60:.0f} min"],
        ["went on from", f"`{options.get('init_from')}`" if options.get("init_from") else ""],
        ["the answers' tokens in the draft vocabulary", f"{covered:.2%}" if covered else ""],
    ]  # fmt: skip
    held_out = report["held_out"]
    return {
        "rows": [row for row in rows if row[1] not in ("", "0")],
        "accept_length": f"{held_out['accept_length']:.2f}",
        "acceptance": " ".join(f"{a:.3f}" for a in held_out["acceptance"]),
    }
