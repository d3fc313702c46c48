"""The differences between the transformers releases that we support, and nothing else.

5.24 renamed the forward argument and the output field `past_key_values` to `cache`.
"""

from __future__ import annotations

from typing import Any

from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE_ARGUMENT: str = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


def cache_of(output: Any) -> Cache:
    """The key/value cache that a model's forward returned."""
    return getattr(output, CACHE_ARGUMENT)
