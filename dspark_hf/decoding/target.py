"""The only file that touches a target's internals: its decoder layers and what they put out, checks that need its inside.

Axes: B sequences, S tokens of one forward, m tapped layers, d_target the target's hidden size.

Forward hooks, and not `output_hidden_states=[...]`: the meaning of the selected index changed between transformers 5.17
(output of layer i) and 5.24 (entry i of all hidden states), and a chunked prefill returns its last chunk only.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The target's decoder layers in order.

    Raises:
        ValueError: no list of as many layers as the text config names.
    """
    count = target.config.get_text_config().num_hidden_layers
    for module in (target.get_decoder(), target):
        for name, child in module.named_modules():
            is_list = isinstance(child, nn.ModuleList) and name.rsplit(".", 1)[-1] in ("layers", "h", "blocks")
            if is_list and len(child) == count:
                return child
    raise ValueError(f"{type(target).__name__}: found no list of {count} decoder layers to take features from.")


def placeholder_ids(target: PreTrainedModel) -> set[int]:
    """Token ids that stand for an image or the like, and mean nothing without it."""
    config = target.config.to_dict()
    names = [name for name in config if name.endswith(("image_token_id", "video_token_id", "audio_token_id"))]
    return {config[name] for name in names if isinstance(config[name], int)}


def check_layer_ids(target: PreTrainedModel, layer_ids: Sequence[int]) -> None:
    """Refuse tapped layers that the target lacks, and its last one (transformers reports it after the final norm)."""
    count = target.config.get_text_config().num_hidden_layers
    wrong = [i for i in layer_ids if not -1 <= i < count - 1]
    if wrong:
        raise ValueError(
            f"The drafter taps target layers {list(layer_ids)}, but {wrong} can't be tapped: this target has {count} "
            f"layers, so ids from -1 (the embeddings) to {count - 2} are allowed. Use a drafter trained for this target."
        )


def eos_ids(target: PreTrainedModel) -> set[int]:
    """The ids at which the target's generation ends, from its generation config."""
    ids = target.generation_config.eos_token_id
    if ids is None:
        return set()
    return set(ids) if isinstance(ids, (list, tuple)) else {ids}


def cross_attention_layers(target: PreTrainedModel) -> set[int]:
    """Layers whose keys and values are those of an image, not of tokens."""
    return set(target.config.get_text_config().to_dict().get("cross_attention_layers") or ())


def check_image_mask(target: PreTrainedModel, cache: Cache, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse an image in cross-attention layers whose mask was left out.

    Raises:
        ValueError: without a mask, transformers lets the i-th of several tokens see the first i of the image alone, so
            verification would not see what plain decoding does.
    """
    fixed = cross_attention_layers(target)
    held = any(cache.layers[i].is_initialized for i in fixed if i < len(cache.layers))
    has_image = held or model_kwargs.get("pixel_values") is not None
    if fixed and has_image and model_kwargs.get("cross_attention_mask") is None:
        raise ValueError(
            f"{type(target).__name__} reads an image here, and drafts can't be verified without its cross_attention_mask. Pass "
            "the one that the processor returns, in later turns too."
        )


def has_recurrent_layers(target: PreTrainedModel) -> bool:
    """Whether a layer sums up what it has read in a state, or keeps it in a cache of its own kind.

    transformers said so in `_is_stateful` before 5.25. Short convolutions (LFM2's) hold their inputs: these can be cropped.
    """
    if getattr(target, "_is_stateful", False):
        return True
    config = target.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    return kinds is not None and any(
        type(layer).__module__ != Cache.__module__
        or (isinstance(layer, LinearAttentionCacheLayerMixin) and kind != "conv")
        for kind, layer in zip(kinds, DynamicCache(config=config).layers, strict=False)
    )


def keeps_state_in_modules(target: PreTrainedModel) -> bool:
    """Whether a module itself holds a state between forwards, as RecurrentGemma's do."""
    names = ("recurrent_state", "ssm_state", "conv1d_state")  # and not any `state`: quantised layers have `quant_state`
    return any(name.startswith(names) for module in target.modules() for name in vars(module))


def has_bounded_time_step(target: PreTrainedModel) -> bool:
    """Whether a Mamba-2 layer bounds its time step from below; transformers does so for several tokens at once only."""
    limits = [vars(module).get("time_step_limit") for module in target.modules()]
    return any(limit is not None and limit[0] > 0 for limit in limits)


def length_dependent_rope(target: PreTrainedModel) -> tuple[str, int] | None:
    """The kind of rotary embedding whose frequencies depend on the length of a forward's text, and from which length on."""
    config = target.config.get_text_config()
    found = config.to_dict().get("rope_parameters") or {}
    for rope in (found, *(part for part in found.values() if isinstance(part, dict))):
        if (kind := rope.get("rope_type")) in ("longrope", "dynamic"):
            border = rope.get("original_max_position_embeddings") if kind == "longrope" else None
            return kind, border or config.max_position_embeddings
    return None


def most_read_alike(rope: tuple[str, int] | None, length: int) -> int | None:
    """How many tokens may be read behind the last of `length` ones with its frequencies; `None`: any.

    One forward uses the frequencies of its longest text for all its tokens. `rope`: as `length_dependent_rope` tells.
    """
    if rope is None:
        return None
    kind, border = rope
    if length > border:
        return 0 if kind == "dynamic" else None  # these change with every token, or have changed
    return border - length


class TargetTaps:
    """Context manager that records the outputs of `layer_ids` (id i = output of layer i, -1 = embeddings).

    During a prefill it holds them for the whole prompt: m * d_target numbers a token, twice that for a moment in `take` (four
    layers of 2,048 in bfloat16: 16 KB a token). A drafter's window bounds only what is kept afterwards.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        check_layer_ids(target, layer_ids)
        self.layer_ids = list(layer_ids)
        self._layers = decoder_layers(target)
        self._recorded: dict[int, list[torch.Tensor]] = {i: [] for i in self.layer_ids}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> TargetTaps:
        for i in self._recorded:
            if i == -1:
                handle = self._layers[0].register_forward_pre_hook(self._record_input, with_kwargs=True)
            else:
                handle = self._layers[i].register_forward_hook(self._recorder(i))
            self._handles.append(handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _recorder(self, i: int):
        def record(module: nn.Module, args: tuple, output: torch.Tensor | tuple) -> None:
            if self._is_ours():
                self._recorded[i].append(output[0] if isinstance(output, tuple) else output)

        return record

    def _is_ours(self) -> bool:
        """Whether this forward is not another thread's, which may run the same target."""
        return torch.compiler.is_compiling() or threading.get_ident() == self._thread

    def _record_input(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._is_ours():
            self._recorded[-1].append(args[0] if args else kwargs["hidden_states"])

    def take(self, device: torch.device | None = None) -> torch.Tensor:
        """What was recorded since the last call, layers side by side: [B, S, m * d_target]."""
        columns = []
        for i in self.layer_ids:
            parts = [part.to(device) for part in self._recorded[i]]
            columns.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
        self.drop()
        return torch.cat(columns, dim=-1)

    def check(self) -> None:
        """After a forward.

        Raises:
            RuntimeError: a layer's output was not seen, as where compiled code runs that was made without these hooks.
        """
        missing = [i for i in self.layer_ids if not self._recorded[i]]
        if missing:
            raise RuntimeError(
                f"The target ran without reporting what its layers {missing} put out. Where it is compiled, pass "
                "disable_compile=True to generate()."
            )

    def drop(self) -> None:
        """Forget what was recorded."""
        for parts in self._recorded.values():
            parts.clear()
