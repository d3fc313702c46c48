"""Which drafter belongs to which target: the known pairs.

Owns: the list (`known_drafters.json`), what a target's name and config say about which model it is, where the default drafter
lies. Does not own: loading (`pairs`, `pretrained_dspark`), whether drafter and target fit (`decoding.hook.check_pair`).

A name decides: two models of one shape (Qwen3-4B and Qwen3-4B-Base) need drafters of their own, so a shape alone never does.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import cached_file, logging

from .hub_files import hub_is_reachable

AUTO = "auto"  # in place of a drafter's name: the known one of the target
DEFAULT_DRAFTER = "smollm2-135m-instruct-dspark"

logger = logging.get_logger(__name__)

_CACHE_ALONE = {"local_files_only": True}  # what a loaded model came from is there already
_SHAPE = ("hidden_size", "num_hidden_layers", "vocab_size")
# What quantised and reformatted copies add to a model's name. Not here: -Base, -Instruct, -Thinking-2507, -128K are other models.
_COPY_SUFFIX = re.compile(
    r"""(?:-(?:
        gptq | awq | gguf | ggml | mlx | bnb | unsloth | hqq | exl[23] | onnx | marlin | gptqmodel | hf | safetensors
      | (?:auto-?round | torchao | ao | inc | modelopt | compressed-tensors | ct | dwq | qat | unquantized)
      | quantized | quant | dynamic | static | block | channel | sym | asym | ud | imatrix | i1
      | (?:mx|nv)?fp[468] | nf4 | u?int[2-8] | [2-8]-?bits? | b?f(?:p|loat)?(?:16|32) | w\d+a\d+(?:fp8|int8)?
      | \d(?:-\d+)?bpw | (?:g|gs|group-?size-?)\d+ | \d+g
      | i?q\d(?:-(?:k|xxs|xs|s|m|l|xl|nl|0|1))*
    ))*""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class KnownDrafter:
    """One known pair; the numbers are of the target's text model."""

    target: str  # owner/name on the Hub
    drafter: str  # owner/name on the Hub, or the default drafter's name
    packaging: str
    licence: str
    note: str
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int

    def has_name(self, name: str) -> bool:
        """Whether `name`, an owner before it or not, is the target's or a quantised or reformatted copy's of it."""
        owner, base = map(_dashed, self.target.split("/"))
        given = _dashed(name.rsplit("/", 1)[-1])
        starts = (base, f"{owner}-{base}")  # some collections of GGUF files keep the owner in the name
        return any(given.startswith(s) and _COPY_SUFFIX.fullmatch(given[len(s) :]) for s in starts)

    def has_shape(self, config: Mapping[str, Any]) -> bool:
        """Whether a model's config (as in its file) is of the target's architecture and size."""
        text = {**config, **(config.get("text_config") or {})}
        is_family = str(text.get("model_type")).startswith(self.model_type)
        return is_family and all(text.get(key) == getattr(self, key) for key in _SHAPE)


@lru_cache(maxsize=1)
def known_drafters() -> tuple[KnownDrafter, ...]:
    """All known pairs, in the order of the list."""
    text = (Path(__file__).parent / "known_drafters.json").read_text(encoding="utf-8")
    return tuple(KnownDrafter(**entry) for entry in json.loads(text))


def find_drafter(target: str | os.PathLike | PreTrainedModel, **hub: Any) -> KnownDrafter:
    """The known pair of a target: a Hub id, a folder or a loaded model (a `PeftModel` too), quantised or not.

    The config of a Hub id is only looked at where its name says nothing, with `hub`: `cache_dir`, `local_files_only`.

    Raises:
        ValueError: no drafter is known for it.
    """
    if hasattr(target, "get_base_model"):  # a PeftModel, which is no PreTrainedModel
        target = target.get_base_model()
    if isinstance(target, PreTrainedModel):
        place, config, hub = target.config._name_or_path, target.config.get_text_config().to_dict(), _CACHE_ALONE
    else:
        place = os.fspath(target)
        config = _stored_config(place, hub) if Path(place).expanduser().is_dir() else {}
    names = _names_of_place(place)
    if (found := _by_name(names, config)) is not None:
        return found
    stored = _stored_config(place, hub)
    config = config or stored
    stated = stored.get("_name_or_path")
    if stated and (found := _by_name([stated], config)) is not None:
        logger.warning(f"{place} is taken for {found.target}, whose name its config.json gives; its drafter is used.")
        return found
    raise ValueError(_unknown(place, names, config))


def drafter_folder(name: str) -> str:
    """The default drafter's folder in a checkout of this repository; any other name as it is, but for a ~ before it."""
    if name != DEFAULT_DRAFTER:
        return os.path.expanduser(name)
    folder = Path(__file__).parents[2] / "model_cards" / name
    if not (folder / "model.safetensors").is_file():
        raise OSError(
            f"The default drafter is not at {folder}: it comes with the repository's checkout. Give --drafter, or train "
            "one with `dspark-hf train`."
        )
    return str(folder)


def _dashed(name: str) -> str:
    return re.sub(r"[-_.\s]+", "-", name.lower())


def _names_of_place(place: str) -> list[str]:
    """The names that a folder or Hub id has."""
    path = Path(place).expanduser()
    if not path.is_dir():
        return [place]
    cached = [part.removeprefix("models--").replace("--", "/") for part in path.parts if part.startswith("models--")]
    return list(dict.fromkeys([*cached, path.name, path.resolve().name]))


def _stored_config(place: str, hub: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a folder or Hub id as it is, or {} where there is none to be had."""
    try:
        if not place:
            return {}
        if not Path(place).expanduser().is_dir() and "local_files_only" not in hub and not hub_is_reachable():
            hub = {**hub, **_CACHE_ALONE}
        file = cached_file(place, "config.json", **hub)
        stored = json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _by_name(names: list[str], config: Mapping[str, Any]) -> KnownDrafter | None:
    """The pair of whose target one of these is the name, and whose shape the config, where there is one, has."""
    fits = (k for k in known_drafters() if any(map(k.has_name, names)) and (not config or k.has_shape(config)))
    return next(fits, None)


def _unknown(place: str, names: list[str], config: Mapping[str, Any]) -> str:
    shown = place or "this model (it was not loaded from a folder or the Hub)"
    hint = ""
    if (same_shape := next((k for k in known_drafters() if config and k.has_shape(config)), None)) is not None:
        hint = (
            f" Its shape is that of {same_shape.target}: if it is a copy of that and of no other model, name the drafter "
            f"{same_shape.drafter} yourself."
        )
    elif (same_name := _by_name(names, {})) is not None:
        hint = f" Its name is that of {same_name.target}, its shape is another."
    return (
        f"No drafter is known for {shown}.{hint} Train one: dspark-hf train --target {place or 'TARGET'} --prompts "
        "prompts.jsonl --output my-drafter. Known targets: dspark-hf drafters."
    )
