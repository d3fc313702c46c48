"""What configs alone tell about a pair that is likely a mistake.

Compares a drafter's config with its target's, in microseconds; what is certain is refused (`hook.check_pair`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..loading.files import is_hub_id
from ..model.modeling_dspark import DSparkDraftModel
from .target import eos_ids

# What readers take for a rope base that a config does not give where they look.
_ABSENT_ROPE_BASE = 10_000.0
_MOST_ADDED = 1024  # tokens that a target has beyond its drafter's; padding and added words are fewer


@dataclass(frozen=True)
class Mistake:
    """`subject` is "depth", "tokens", "rope" or "name"; `found` and `advice` are sentences."""

    subject: str
    found: str
    advice: str


def likely_mistakes(target: PreTrainedModel, drafter: DSparkDraftModel) -> list[Mistake]:
    """What should be looked at before this pair is trusted; empty for most."""
    return [*_depth(target, drafter), *_tokens(target, drafter), *_rope(target, drafter), *_name(target, drafter)]


def _depth(target: PreTrainedModel, drafter: DSparkDraftModel) -> Iterator[Mistake]:
    made_for, count = drafter.config.num_target_layers, target.config.get_text_config().num_hidden_layers
    if made_for is not None and made_for != count:
        yield Mistake(
            "depth",
            f"The drafter was made for a target of {made_for} layers, this one has {count}.",
            "Use the target that it was trained for.",
        )


def _tokens(target: PreTrainedModel, drafter: DSparkDraftModel) -> Iterator[Mistake]:
    config = drafter.config
    known = eos_ids(target) | _ids(vars(target.config.get_text_config()).get("eos_token_id"))
    ours = _ids(config.eos_token_id)
    count = target.config.get_text_config().vocab_size
    if count - config.vocab_size > _MOST_ADDED:
        yield Mistake(
            "tokens",
            f"The drafter was made for {config.vocab_size} tokens, the target has {count}.",
            "Check that both have the same tokenizer.",
        )
    pads = _ids(config.pad_token_id) | _ids(vars(target.config.get_text_config()).get("pad_token_id"))
    if ours and known and not ours & known:
        yield Mistake(
            "tokens",
            f"The drafter was made for a target whose texts end with token {_named(ours)}, this one's with "
            f"{_named(known)}.",
            "Check that both have the same tokenizer.",
        )
    if config.mask_token_id in known and not config.is_autoregressive:
        yield Mistake(
            "tokens",
            f"The drafter's mask token {config.mask_token_id} ends the target's texts.",
            "Check mask_token_id in the drafter's config.json.",
        )
    elif config.mask_token_id in pads and not config.is_autoregressive:
        yield Mistake(
            "tokens",
            f"The drafter's mask token {config.mask_token_id} is also the padding of the target's texts.",
            "Check mask_token_id in the drafter's config.json.",
        )


def _rope(target: PreTrainedModel, drafter: DSparkDraftModel) -> Iterator[Mistake]:
    bases = rope_bases(target)
    if drafter.config.rope_parameters["rope_theta"] == _ABSENT_ROPE_BASE and bases and _ABSENT_ROPE_BASE not in bases:
        yield Mistake(
            "rope",
            f"The drafter's rope base is {_ABSENT_ROPE_BASE:.0f}, as where a config lost its own, and the target's is "
            f"{_named(bases)}.",
            "Check rope_theta in the drafter's config.json.",
        )


def _name(target: PreTrainedModel, drafter: DSparkDraftModel) -> Iterator[Mistake]:
    """Compared loosely, and only where both are Hub ids: copies, quantised forms and fine-tunes have names of their own."""
    trained_for, given = drafter.config.target_model_name_or_path, str(target.config._name_or_path)
    if trained_for is None or not (is_hub_id(trained_for) and is_hub_id(given)):
        return
    names = [re.sub(r"[^a-z0-9]", "", name.split("/")[1].lower()) for name in (trained_for, given)]
    if names[0] not in names[1] and names[1] not in names[0]:
        yield Mistake(
            "name",
            f"The drafter was trained for {trained_for}, and the target is {given}.",
            "Fewer drafts may be accepted than with its own target.",
        )


def rope_bases(target: PreTrainedModel) -> set[float]:
    """The rope bases of the target's layers, of all kinds; empty where its config has none."""
    rope: Any = vars(target.config.get_text_config()).get("rope_parameters") or {}
    entries = [rope, *(entry for entry in rope.values() if isinstance(entry, dict))]
    return {float(entry["rope_theta"]) for entry in entries if entry.get("rope_theta") is not None}


def _ids(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)


def _named(values: set) -> str:
    return ", ".join(f"{value:.0f}" for value in sorted(values))
