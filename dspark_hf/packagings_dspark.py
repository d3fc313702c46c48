"""The drafter configs found in the wild, translated into ours, one function each.

Owns: telling the packagings apart and renaming their keys. Does not own: weights (their names are the same in all of
them), the fields' meaning (`configuration_dspark`), writing other forms.
This file travels with a checkpoint (`auto_map`), so it imports nothing else of the package.
"""

from __future__ import annotations

from typing import Any

_DEEPSPEC_ARCHITECTURES = ("Qwen3DSparkModel",)
_KEPT_KEYS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "rope_parameters",
    "attention_bias",
    "attention_dropout",
    "layer_types",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "markov_rank",
    "enable_confidence_head",
    "num_anchors",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "_commit_hash",
    "_name_or_path",
]


def to_dspark_dict(config: dict[str, Any]) -> dict[str, Any]:
    """Our form of any config that we can read; our own comes back unchanged.

    Raises:
        ValueError: the config is no DSpark drafter's, or of a packaging that is not read yet; it is named.
    """
    if config.get("model_type") == "dspark" or not config:
        return config
    architectures = config.get("architectures") or []
    named = f"architectures {architectures}, model_type {config.get('model_type')!r}"
    if config.get("speculators_model_type") or config.get("speculators_config"):
        raise ValueError(f"This is a drafter in the speculators packaging ({named}), which is not read yet.")
    if any(key.startswith("dspark_") for key in config) and "block_size" not in config:
        raise ValueError(
            f"This is a DeepSeek-V4 checkpoint with an embedded drafter ({named}), which can't be used alone."
        )
    if "dflash_config" in config:
        raise ValueError(f"This is a drafter in the z-lab DFlash packaging ({named}), which is not read yet.")
    if set(architectures) & set(_DEEPSPEC_ARCHITECTURES):
        return _from_deepspec(config)
    if "target_layer_ids" in config and "mask_token_id" in config:
        raise ValueError(f"This drafter's packaging is not read yet ({named}).")
    if not config.get("model_type") and not architectures:
        return config  # a plain dict of our own fields, e.g. DSparkConfig.from_dict({...})
    raise ValueError(
        f"This is no DSpark drafter ({named}). Give the folder or Hub id of a drafter whose config says "
        "model_type 'dspark' or architectures ['Qwen3DSparkModel']; make one with `dspark-hf train`."
    )


def _from_deepspec(config: dict[str, Any]) -> dict[str, Any]:
    """DeepSpec: the target's text config with the drafter's keys added; `model_type` stays the target's."""
    ours = {key: config[key] for key in _KEPT_KEYS if key in config}
    if ours.get("rope_parameters") is None and config.get("rope_theta") is not None:
        ours["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    if "sliding_attention" in (config.get("layer_types") or []):
        ours["sliding_window"] = config.get("sliding_window")
    ours |= {
        "model_type": "dspark",
        "architectures": ["DSparkDraftModel"],
        "sample_from_anchor": config.get("sample_from_anchor", True),
        # absent where the head itself is absent
        "markov_head_type": config.get("markov_head_type", "none"),
        "confidence_head_with_markov": config.get("confidence_head_with_markov", False),
        "has_own_embeddings": True,
    }
    return ours
