"""A drafter's model card.

Owns: its metadata, filling the template (`card.md`), not writing over a card that is there.
Does not own: figures (`facts`), uploading (`hub`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from ..loading.files import is_hub_id, write_text
from ..model.configuration_dspark import DSparkConfig
from .facts import Facts, read_facts

CARD = "README.md"
TAGS = ("dspark", "speculative-decoding", "draft-model")
# The Hub knows finetune, adapter, quantized and merge. A drafter leaves the target as it is and is loaded beside it, as an
# adapter is; the Hub's own guess from the files would be finetune.
RELATION = "adapter"
_TEMPLATE = Path(__file__).with_name("card.md")
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
# What an earlier card said by hand and no file knows.
_KEPT = ("license", "license_name", "license_link", "datasets", "language")


@dataclass(frozen=True)
class CardOptions:
    """What no file of a training run knows; `None` or empty: as the card that is there says, or left out."""

    licence: str | None = None  # the Hub's identifier, e.g. apache-2.0
    datasets: tuple[str, ...] = ()  # Hub ids
    languages: tuple[str, ...] = ()  # ISO 639 codes
    base_model: str | None = None  # the target's Hub id
    repo: str | None = None  # owner/name that the usage names


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
    _check(options)
    facts = read_facts(folder)
    config = facts.config
    earlier = read_card(folder)
    data = _metadata(config, options, {} if earlier is None else earlier.data.to_dict())
    base = data.base_model if isinstance(data.base_model, str) else None
    name = (base or config.target_model_name_or_path or "its target").rstrip("/").split("/")[-1]
    return ModelCard.from_template(
        data,
        template_str=_TEMPLATE.read_text(encoding="utf-8"),
        target_name=name,
        target_link=f"[{name}](https://huggingface.co/{base})" if base else name,
        repo=options.repo or f"OWNER/{folder.resolve().name}",
        draft_tokens=config.num_draft_tokens,
        megabytes=f"{facts.megabytes:.0f}" if facts.megabytes >= 1 else f"{facts.megabytes:.1g}",
        calibrated=config.is_calibrated,
        architecture=_architecture(facts),
        **{part: getattr(facts, part) for part in ("speed", "calibration", "training", "picture")},
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


def _check(options: CardOptions) -> None:
    if options.licence is not None and not _LICENCE.fullmatch(options.licence):
        raise ValueError(
            f"--licence takes an identifier that the Hub knows, e.g. apache-2.0, mit or other; got {options.licence!r}."
        )
    for option, name in (("--base-model", options.base_model), ("--repo", options.repo)):
        if name is not None and not is_hub_id(name):
            raise ValueError(f"{option} takes a Hub id of the form owner/name, got {name!r}.")
    for language in options.languages:
        if not re.fullmatch(r"[a-z]{2,3}|code|multilingual", language):
            raise ValueError(f"--language takes a code of two or three letters, e.g. en, got {language!r}.")


def _metadata(config: DSparkConfig, options: CardOptions, earlier: dict[str, Any]) -> ModelCardData:
    given = {
        "license": options.licence,
        "datasets": list(options.datasets) or None,
        "language": list(options.languages) or None,
    }
    kept: dict[str, Any] = {key: earlier[key] for key in _KEPT if key in earlier}
    if options.licence is not None:
        kept = {key: value for key, value in kept.items() if not key.startswith("license")}
    described = kept | {key: value for key, value in given.items() if value is not None}
    trained_for = config.target_model_name_or_path
    base = options.base_model or (trained_for if is_hub_id(trained_for) else earlier.get("base_model"))
    tags = [*TAGS, *(tag for tag in earlier.get("tags") or [] if tag not in TAGS)]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base,
        base_model_relation=RELATION if base else None,
        tags=tags,
        **described,
    )


def _architecture(facts: Facts) -> list[list[str]]:
    config = facts.config
    heads = f"{config.num_attention_heads} heads, {config.num_key_value_heads} K/V heads"
    layout = "anchor first" if config.sample_from_anchor else "fill-in"
    head = "none" if config.markov_head_type == "none" else f"{config.markov_head_type}, rank {config.markov_rank}"
    vocabulary = f"{config.draft_vocab_size:,}" + (f" of {config.vocab_size:,}" if config.has_reduced_vocab else "")
    return [
        ["layers", f"{config.num_hidden_layers} of width {config.hidden_size} ({heads})"],
        ["tapped layers of the target", ", ".join(map(str, config.target_layer_ids or []))],
        [
            "block",
            "none: one forward a token (Eagle3)" if config.is_autoregressive else f"{config.block_size} ({layout})",
        ],
        ["sequential (Markov) head", head],
        ["confidence head", "yes" if config.enable_confidence_head else "no"],
        ["tokens it can propose", vocabulary],
        ["embedding and LM head", "its own copies" if config.has_own_embeddings else "the target's"],
    ]
