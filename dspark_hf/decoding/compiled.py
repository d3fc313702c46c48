"""The target's forward through `torch.compile`, where transformers would compile it in plain decoding.

Axes: rows of one forward.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.utils import ModelOutput

from ..model.modeling_dspark import DSparkDraftModel
from .compat import CACHE_ARGUMENT
from .prompt_lookup import MOST_TOKENS
from .target import TargetTaps

# Each number of rows is a CUDA graph to record, and with static shapes a compilation. Doubling wastes less than half of a
# forward, where rows hardly cost anything; the last one is a whole copy from the text.
_SIZES = (1, 2, 4, 8, MOST_TOKENS + 1)


class CompiledForward:
    """One generation's compiled forward of the target. `sizes`: the numbers of rows that it may have, ascending from 1."""

    def __init__(self, target: PreTrainedModel, most_rows: int, options: dict[str, Any]) -> None:
        self.sizes = tuple(sorted({*_SIZES, max(most_rows, _SIZES[-1])}))
        self._target = target
        # Made anew for each generation: what was compiled is found again by the function that it was compiled of.
        self._run = torch.compile(_tapped_forward, **options)

    def __call__(self, taps: TargetTaps, inputs: dict[str, Any]) -> ModelOutput:
        outputs = self._run(self._target, taps, inputs)
        # A CUDA graph's outputs are written over by its next run.
        for name, value in outputs.items():
            if name != CACHE_ARGUMENT:
                outputs[name] = _copied(value)
        return outputs


def compiled_forward(
    target: PreTrainedModel, drafter: DSparkDraftModel, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> CompiledForward | None:
    """By transformers' own criteria; `None` where a generation's forwards are not compiled.

    Nor are they across devices and with convolutional layers: dispatching breaks the graph apart, so that the pieces may have
    been compiled without our hooks, and convolutional layers that can be cropped change their shapes.
    """
    layers = model_kwargs[CACHE_ARGUMENT].layers
    whole = len(set((vars(target).get("hf_device_map") or {}).values())) < 2
    if not whole or any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        return None
    if not target._valid_auto_compile_criteria(model_kwargs, config):
        return None
    options = config.compile_config or target._default_compile_config()
    if target.get_compiled_call(options) == target.__call__:  # transformers compiles no such model
        return None
    return CompiledForward(target, drafter.config.num_draft_tokens + 1, options.to_dict())


def uncompiled(config: GenerationConfig) -> GenerationConfig:
    """For the prefill: transformers compiles one in chunks, and its compiled code was made without our hooks."""
    config = copy.copy(config)
    config.disable_compile = True
    return config


def _tapped_forward(target: nn.Module, taps: TargetTaps, inputs: dict[str, Any]) -> ModelOutput:
    """A function of our own, so that no code compiled without hooks is taken for it: dynamo does not look for new ones."""
    outputs = target(**inputs, return_dict=True)
    taps.check()  # its reading the tapped layers here also ties compiled code to them
    return outputs


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return tuple(_copied(part) for part in value) if isinstance(value, tuple) else value
