"""`generate_batch`: a list of prompts in, their texts out, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ..model.modeling_dspark import DSparkDraftModel
from .engine import BatchEngine
from .sequence import RequestOutput

logger = logging.get_logger(__name__)


def generate_batch(
    target: PreTrainedModel,
    drafter: DSparkDraftModel | None,
    prompts: Sequence[Sequence[int] | torch.Tensor],
    generation_config: GenerationConfig | Sequence[GenerationConfig | None] | None = None,
    *,
    seeds: Sequence[int] | None = None,
    on_finished: Callable[[RequestOutput], None] | None = None,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> list[RequestOutput]:
    """Decode all prompts together, each as `generate()` would; outputs in the order of the prompts.

    prompts: token ids, [L] or [1, L] each, not padded. generation_config: for all, or one for each. seeds: one for each.
    on_finished: called with each output when it is there. engine: arguments of `BatchEngine` (`max_sequences`, ...).
    settings: as in `generate()` (`max_new_tokens`, `do_sample`, `temperature`, ...).

    A request that fails has its exception in `error`. After Ctrl-C the list is returned all the same: requests not finished have
    `finish_reason` "interrupted" and the tokens they had.

    Raises:
        ValueError: a prompt or setting that the engine refuses; nothing was decoded then.
    """
    for name, values in (("generation_config", generation_config), ("seeds", seeds)):
        if isinstance(values, Sequence) and len(values) != len(prompts):
            raise ValueError(f"generate_batch: {len(prompts)} prompts, but {len(values)} entries in {name}.")
    batch = BatchEngine(target, drafter, **engine or {})
    ids = []
    for i, prompt in enumerate(prompts):
        config = generation_config[i] if isinstance(generation_config, Sequence) else generation_config
        ids.append(batch.add(prompt, config, seed=None if seeds is None else seeds[i], **settings))
    outputs: dict[int, RequestOutput] = {}
    try:
        for output in batch.run():
            outputs[output.id] = output
            if on_finished is not None:
                on_finished(output)
    except KeyboardInterrupt:
        logger.warning("Interrupted: requests that were not finished are returned as far as they came.")
        outputs |= {output.id: output for output in batch.interrupt()}
    return [outputs[i] for i in ids]
