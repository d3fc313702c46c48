"""Forwards of a target that are run for their time alone, over a cache that they leave as it was.

Axes: rows of one forward, `depth` tokens of context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from .compat import CACHE_ARGUMENT
from .rollback import Rollback


def context_length(target: PreTrainedModel) -> int:
    """The target's longest context in tokens; very long where its config names none (ALiBi, recurrent models)."""
    return target.config.get_text_config().to_dict().get("max_position_embeddings") or 1 << 30


def _forward_arguments(target: PreTrainedModel, cache: DynamicCache, rows: int) -> dict[str, Any]:
    """As the decoding loop calls the target: logits of `rows` tokens, where it can be told."""
    keep = {"logits_to_keep": rows} if target._supports_logits_to_keep() else {}
    return {"use_cache": True, CACHE_ARGUMENT: cache} | keep


def filled_cache(target: PreTrainedModel, depth: int) -> DynamicCache:
    """A cache of `depth` tokens: a short real prefill, repeated (only its size matters here)."""
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    first = min(depth, 32)
    vocab = target.config.get_text_config().vocab_size
    ids = torch.randint(vocab, (1, first), generator=torch.Generator().manual_seed(0)).to(target.device)
    target(input_ids=ids, **_forward_arguments(target, cache, 1))
    # Layers that keep no keys (convolutions, layers that share another's) cost the same at any depth.
    layers = [(i, layer) for i, layer in enumerate(cache.layers) if isinstance(vars(layer).get("keys"), torch.Tensor)]
    length = cache.get_seq_length()
    while layers and (missing := depth - length) > 0:
        added = min(missing, first)
        for i, layer in layers:
            cache.update(layer.keys[:, :, -added:].clone(), layer.values[:, :, -added:].clone(), i)
        length += added
    return cache


def target_run(target: PreTrainedModel, cache: DynamicCache, rows: int) -> Callable[[], None]:
    ids = torch.ones(1, rows, dtype=torch.long, device=target.device)
    rollback = Rollback(cache, target)

    def run() -> None:
        rollback.snapshot(rows)
        target(input_ids=ids, **_forward_arguments(target, cache, rows))
        rollback.roll_back(rows, committed=0)

    return run
