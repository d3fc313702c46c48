"""A drafter's model card: what its folder's files say, in the template `card.md`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from ..loading.files import holds_drafter, is_hub_id, write_text
from ..model.configuration_dspark import DSparkConfig

CARD = "README.md"
TRAINING, BENCH, CALIBRATION, RELIABILITY = "training.json", "bench.json", "calibration.json", "reliability.png"
TAGS = ("dspark", "speculative-decoding", "draft-model")
# The Hub knows finetune, adapter, quantized and merge. A drafter leaves the target as it is and is loaded beside it, as an
# adapter is; the Hub's own guess from the files would be finetune.
RELATION = "adapter"
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
# What an earlier card said by hand and no file knows.
_KEPT = ("license", "license_name", "license_link", "datasets", "language")
_MADE_BY = {
    TRAINING: "dspark-hf train --output DIR",
    BENCH: "dspark-hf bench --target TARGET --drafter DIR --json DIR/bench.json",
    CALIBRATION: "dspark-hf calibrate --target TARGET --drafter DIR --prompts HELD_OUT.jsonl",
    RELIABILITY: "dspark-hf calibrate --target TARGET --drafter DIR --report DIR",
}


@dataclass(frozen=True)
class CardOptions:
    """What no file of a training run knows; `None` or empty: as the card that is there says, or left out."""

    licence: str | None = None  # the Hub's identifier, e.g. apache-2.0
    datasets: tuple[str, ...] = ()  # Hub ids
    languages: tuple[str, ...] = ()  # ISO 639 codes
    base_model: str | None = None  # the target's Hub id
    repo: str | None = None  # owner/name that the usage names

    def check(self) -> None:
        """Refuse what the Hub would not allow."""
        if self.licence is not None and not _LICENCE.fullmatch(self.licence):
            raise ValueError(
                f"--licence takes an identifier that the Hub knows, e.g. apache-2.0, mit or other; got {self.licence!r}."
            )
        for option, name in (("--base-model", self.base_model), ("--repo", self.repo)):
            if name is not None and not is_hub_id(name):
                raise ValueError(f"{option} takes a Hub id of the form owner/name, got {name!r}.")
        for language in self.languages:
            if not re.fullmatch(r"[a-z]{2,3}|code|multilingual", language):
                raise ValueError(f"--language takes a code of two or three letters, e.g. en, got {language!r}.")


def check_drafter(folder: Path) -> None:
    """Raise where `folder` is not a drafter's."""
    if not folder.is_dir():
        raise OSError(f"No folder {folder}: give one that `dspark-hf train` or save_pretrained wrote.")
    if not holds_drafter(folder):
        raise ValueError(
            f"{folder} holds no drafter of this package's form (a config.json with model_type 'dspark'). Give a folder "
            "that `dspark-hf train` or save_pretrained wrote."
        )


def read_card(folder: Path) -> ModelCard | None:
    """The card in a folder, if any.

    Raises:
        ValueError: its metadata is no YAML mapping.
    """
    file = folder / CARD
    if not file.is_file():
        return None
    try:
        return ModelCard.load(file)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"The metadata at the top of {file} can't be read: {error}. Mend or remove it.") from None


def make_card(folder: Path, options: CardOptions) -> ModelCard:
    """The card of a drafter's folder, from the files that are there.

    Raises:
        OSError, ValueError: the folder or a file is not what it should be, or an option is not what the Hub allows.
    """
    options.check()
    check_drafter(folder)
    config = DSparkConfig.from_pretrained(folder)
    megabytes = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6
    earlier = read_card(folder)
    data = _metadata(config, options, {} if earlier is None else earlier.data.to_dict())
    base = data.base_model if isinstance(data.base_model, str) else None
    name = (base or config.target_model_name_or_path or "its target").rstrip("/").split("/")[-1]
    return ModelCard.from_template(
        data,
        template_str=Path(__file__).with_name("card.md").read_text(encoding="utf-8"),
        target_name=name,
        target_link=f"[{name}](https://huggingface.co/{base})" if base else name,
        repo=options.repo or f"OWNER/{folder.resolve().name}",
        draft_tokens=config.num_draft_tokens,
        megabytes=f"{megabytes:.0f}" if megabytes >= 1 else f"{megabytes:.1g}",
        calibrated=config.is_calibrated,
        architecture=_architecture(config),
        speed=_part(folder, BENCH, _speed),
        calibration=_part(folder, CALIBRATION, _calibration),
        training=_part(folder, TRAINING, _training),
        picture=RELIABILITY if (folder / RELIABILITY).is_file() else None,
    )


def write_card(folder: Path, options: CardOptions, force: bool = False) -> Path:
    """Write the card into the folder.

    Raises:
        ValueError: a card is there and `force` is not set; it stays as it is.
    """
    card, file = make_card(folder, options), folder / CARD
    if file.exists() and not force:
        raise ValueError(
            f"{file} is there and was left as it is. Give --force to write over it, or --stdout to see the new one."
        )
    write_text(str(card).rstrip() + "\n", file)
    return file


def missing_files(folder: Path) -> list[str]:
    """A line for each file that a card could say more from, with the command that makes it."""
    return [f"no {name} ({_command(folder, name)})" for name in _MADE_BY if not (folder / name).is_file()]


def _command(folder: Path, name: str) -> str:
    return _MADE_BY[name].replace("DIR", str(folder))


def _metadata(config: DSparkConfig, options: CardOptions, earlier: dict[str, Any]) -> ModelCardData:
    given = {"license": options.licence, "datasets": list(options.datasets), "language": list(options.languages)}
    described: dict[str, Any] = {key: earlier[key] for key in _KEPT if key in earlier}
    if options.licence is not None:
        described = {key: value for key, value in described.items() if not key.startswith("license")}
    described |= {key: value for key, value in given.items() if value}
    trained_for = config.target_model_name_or_path
    base = options.base_model or (trained_for if is_hub_id(trained_for) else earlier.get("base_model"))
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base,
        base_model_relation=RELATION if base else None,
        tags=[*TAGS, *(tag for tag in earlier.get("tags") or [] if tag not in TAGS)],
        **described,
    )


# -- parts of the template: what each file says, as text -------------------------------------------------------------


def _part(folder: Path, name: str, read: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any] | None:
    file = folder / name
    if not file.is_file():
        return None
    try:
        return read(json.loads(file.read_text(encoding="utf-8")))
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{file} is not what `{_command(folder, name)}` writes ({type(error).__name__}: {error}). Make it again, or take it "
            "away."
        ) from None


def _architecture(config: DSparkConfig) -> list[list[str]]:
    heads = f"{config.num_attention_heads} heads, {config.num_key_value_heads} K/V heads"
    block = f"{config.block_size} ({'anchor first' if config.sample_from_anchor else 'fill-in'})"
    head = "none" if config.markov_head_type == "none" else f"{config.markov_head_type}, rank {config.markov_rank}"
    vocabulary = f"{config.draft_vocab_size:,}" + (f" of {config.vocab_size:,}" if config.has_reduced_vocab else "")
    return [
        ["layers", f"{config.num_hidden_layers} of width {config.hidden_size} ({heads})"],
        ["tapped layers of the target", ", ".join(map(str, config.target_layer_ids or []))],
        ["block", "none: one forward a token (Eagle3)" if config.is_autoregressive else block],
        ["sequential (Markov) head", head],
        ["confidence head", "yes" if config.enable_confidence_head else "no"],
        ["tokens it can propose", vocabulary],
        ["embedding and LM head", "its own copies" if config.has_own_embeddings else "the target's"],
    ]


def _speed(bench: dict[str, Any]) -> dict[str, Any]:
    rows, policies = [], []
    for name, figures in bench["domains"].items():
        plain, tuned, dspark, lookup = (figures[m] for m in ("plain", "plain_tuned", "dspark", "prompt_lookup"))
        identical = dspark["identical_share"]
        rows.append(
            [
                name,
                f"{dspark['accept_length']:.2f}",
                *(f"{method['tokens_per_second']:.1f}" for method in (plain, tuned, dspark)),
                f"**{dspark['speedup']:.2f}×**",
                f"{dspark['tokens_per_second'] / tuned['tokens_per_second']:.2f}×",
                f"{lookup['speedup']:.2f}×",
                "-" if identical is None else f"{identical:.0%}",
            ]
        )
    for method, figures in bench["domains"]["all"].items():
        if "policy" in figures:
            name = "the drafter's own" if method == "dspark" else method
            speed = f"{figures['tokens_per_second']:.1f}", f"{figures['speedup']:.2f}×"
            policies.append([name, *speed, f"{figures['accept_length']:.2f}", f"{figures['verified_per_round']:.2f}"])
    everything = bench["domains"]["all"]["dspark"]
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
    fitted, rows = report["calibration"], []
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
    options, report, held_out = record["options"], record["report"], record["report"]["held_out"]
    files = ", ".join(f"`{name}`" for name in (*options["prompts"], *options["answers"]))
    shortest = f"{options['min_block_size']} to " if options["min_block_size"] else ""
    covered = report.get("draft_vocab_coverage")  # newer than the rest, as is `init_from`
    rows = [
        ["answers of the target", f"{report['answers']:,} ({report['answer_tokens']:,} tokens)"],
        ["longest answer made", f"{options['max_new_tokens']} tokens"],
        ["temperatures of the answers, in turn", ", ".join(f"{t:g}" for t in options["temperatures"])],
        ["files of prompts and answers", files],
        ["prompts that the target wrote itself", f"{options['invented_prompts']:,}"],
        ["steps × answers a step × blocks an answer", f"{report['steps']} × {options['batch_size']} × {options['num_anchors']}"],
        ["block size in training", f"{shortest}{options['block_size']}"],
        ["peak learning rate", f"{options['learning_rate']:g}"],
        ["seed", str(options["seed"])],
        ["time in the training loop", f"{report['training_seconds'] / 60:.0f} min"],
        ["went on from", f"`{options.get('init_from')}`" if options.get("init_from") else ""],
        ["the answers' tokens in the draft vocabulary", f"{covered:.2%}" if covered else ""],
    ]  # fmt: skip
    return {
        "rows": [row for row in rows if row[1] not in ("", "0")],
        "accept_length": f"{held_out['accept_length']:.2f}",
        "acceptance": " ".join(f"{a:.3f}" for a in held_out["acceptance"]),
    }
