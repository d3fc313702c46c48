"""Drafters in files: what `from_pretrained` and `save_pretrained` add to transformers'.

A checkpoint's weights are looked at before its config is settled; what is missing, damaged or of another form is refused.
This file travels with a checkpoint (`auto_map`), so it imports only its neighbours `*_dspark.py`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
    has_file,
)
from transformers.utils.hub import get_checkpoint_shard_files

from .configuration_dspark import DSparkConfig
from .packagings_dspark import OLD_HEAD_PREFIX

_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def weight_files(name_or_path: Any, **hub: Any) -> list[str]:
    """The safetensors files of a checkpoint, fetched where they must be.

    Raises:
        OSError: there are none, or none to be had without a network.
    """
    single = cached_file(name_or_path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False, **hub)
    if single is not None:
        return [single]
    try:
        index = cached_file(name_or_path, SAFE_WEIGHTS_INDEX_NAME, **hub)
    except OSError as error:
        if isinstance(error.__cause__, LocalEntryNotFoundError):
            raise
    else:
        return get_checkpoint_shard_files(name_or_path, index, **hub)[0]
    options = {key: hub[key] for key in ("revision", "token", "local_files_only", "cache_dir") if key in hub}
    for pickle in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        if has_file(name_or_path, os.path.join(hub.get("subfolder", ""), pickle), **options):
            raise OSError(
                f"{name_or_path} holds its weights as a pickle ({pickle}), which is not read because reading one can run code: "
                f"if you trust it, write them as {SAFE_WEIGHTS_NAME} yourself, e.g. safetensors.torch.save_file(torch.load("
                f"'{WEIGHTS_NAME}', weights_only=True), '{SAFE_WEIGHTS_NAME}', metadata={{'format': 'pt'}}), or ask for a "
                "checkpoint in safetensors."
            )
    raise OSError(
        f"{name_or_path} holds no weights: neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME} is there."
    )


def weight_shapes(files: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Shapes by name, from the files' headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


class DSparkPreTrainedModel(PreTrainedModel):
    config_class = DSparkConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _supports_flash_attn = False
    _no_split_modules = ["DSparkLayer", "Gemma4Layer"]
    # What only training reads, and the offsets of a draft vocabulary that is the whole one.
    _keys_to_ignore_on_load_unexpected = [r"^t2d$", r"^d2t$", r"^verifier_(norm|lm_head)\.", r"rotary_emb\."]

    # Set where the whole package is imported: it knows the pairs, these travelling files do not.
    _load_for_target: ClassVar[Callable[..., Any] | None] = None

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # A Markov head that starts at zero bias leaves the base logits as they are.
        if module is getattr(self, "markov_head", None):
            nn.init.zeros_(module.markov_w2.weight)

    @classmethod
    def for_target(cls, target: str | os.PathLike | PreTrainedModel, **kwargs: Any):
        """The known drafter of a target: a Hub id, a folder or a loaded model, quantised or not.

        `kwargs` are `from_pretrained`'s and are about the drafter (`dtype`, `device_map`, `revision`, `cache_dir`, ...).

        Raises:
            ValueError: no drafter is known for this target.
            OSError: the drafter can't be had.
        """
        if cls._load_for_target is None:
            raise ImportError("for_target needs the list of known pairs: pip install dspark-hf, then import dspark_hf.")
        return cls._load_for_target(cls, target, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args: Any, config: Any = None, **kwargs: Any):
        """As in transformers; safetensors only, reads the other packagings too, refuses a checkpoint that lacks weights.

        Raises:
            OSError: nothing to read there, or the weights' file is damaged.
            ValueError: no DSpark drafter, one of a packaging or architecture that is not read, or weights are missing.
        """
        name = pretrained_model_name_or_path
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs |= {"use_safetensors": True, "ignore_mismatched_sizes": True}  # `_check_weights` refuses those
        hub = {k: kwargs[k] for k in _HUB_OPTIONS if k in kwargs}
        try:
            files: list[str] = []
            if not isinstance(config, PreTrainedConfig):
                fields = {k: kwargs.pop(k) for k in list(kwargs) if k in cls.config_class.__annotations__}
                source = name if config is None else config
                # Once without the weights, so that other models are refused before theirs are fetched.
                config = cls.config_class.from_pretrained(source, **fields, **hub)
                files = weight_files(name, **hub)
                shapes = weight_shapes(files)
                config = cls.config_class.from_pretrained(source, weight_shapes=shapes, **fields, **hub)
                if any(key.startswith(OLD_HEAD_PREFIX) for key in shapes):
                    kwargs.setdefault("key_mapping", {f"^{OLD_HEAD_PREFIX}": ""})
            elif name is not None and kwargs.get("state_dict") is None:
                files = weight_files(name, **hub)
            model, info = super().from_pretrained(name, *args, config=config, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise OSError(
                f"The weights of {name} can't be read ({error}). The file is damaged or not whole: download or copy it again."
            ) from None
        except OSError as error:
            if not isinstance(error.__cause__, LocalEntryNotFoundError):
                raise
            revision = f" --revision {hub['revision']}" if hub.get("revision") else ""
            raise OSError(
                f"The drafter {name} is not in the cache as a whole, and the Hugging Face Hub can't be reached or must not be "
                f"(offline mode, local_files_only). Fetch it where there is a network: hf download {name}{revision}"
            ) from error
        model._check_weights(name, info, files)
        with contextlib.suppress(OSError):  # other packagings have none; the defaults stand
            stored = GenerationConfig.from_pretrained(name, **hub)
            model.generation_config.update(**stored.to_diff_dict())
        return (model, info) if wants_info else model

    def _check_weights(self, name: Any, info: dict[str, Any], files: Sequence[str]) -> None:
        """Leave embedding and LM head to the target where they are missing; refuse where anything else is, or is too much."""
        missing = set(info["missing_keys"])
        for part in ("embed_tokens", "lm_head"):
            if f"{part}.weight" in missing:
                missing.discard(f"{part}.weight")
                setattr(self, part, None)
        if info["mismatched_keys"]:
            key, stored, wanted = min(info["mismatched_keys"])
            raise ValueError(
                f"The weights of {name} do not fit its config: {key} is {list(stored)}, by the config it would be "
                f"{list(wanted)} ({len(info['mismatched_keys'])} such weights). Mend config.json."
            )
        if missing:
            raise ValueError(f"{name} lacks weights of a DSpark drafter: {', '.join(sorted(missing))}.")
        # A weight that nothing reads would change the draft: the layers are of another form than the config says.
        parts = ("layers.", "markov_head.", "confidence_head.")
        foreign = sorted(key for key in info["unexpected_keys"] if key.startswith(parts))
        if foreign:
            raise ValueError(
                f"{name} holds weights that a drafter of this packaging does not have ({', '.join(foreign[:3])}, {len(foreign)} "
                "in all): its layers or heads are of a form that is not read."
            )
        for file in files if not self.config.has_reduced_vocab else ():
            with safe_open(file, "pt") as tensors:
                if "d2t" in tensors.keys() and bool(tensors.get_tensor("d2t").any()):  # noqa: SIM118
                    raise ValueError(
                        f"{name} says that its draft vocabulary is the target's whole one, but its d2t maps tokens to others."
                    )
        ids = None if self.d2t is None else self.draft_token_ids().tolist()
        if ids is not None and (min(ids) < 0 or max(ids) >= self.config.vocab_size or len(set(ids)) < len(ids)):
            raise ValueError(
                f"{name} has a d2t that names tokens twice or outside the vocabulary of {self.config.vocab_size}. Its "
                "values are offsets: target id = draft id + d2t[draft id]."
            )

    def save_pretrained(self, save_directory, *args: Any, **kwargs: Any) -> None:
        """As in transformers, and the generation config (`num_assistant_tokens`, `assistant_confidence_threshold`) too."""
        self.config.has_own_embeddings = self.embed_tokens is not None  # dropped where they were the target's
        self.config.has_own_lm_head = self.lm_head is not None
        super().save_pretrained(save_directory, *args, **kwargs)
        self.generation_config.save_pretrained(save_directory)


__all__ = ["DSparkPreTrainedModel"]
