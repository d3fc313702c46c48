"""The drafter configs found in the wild, translated into ours, one function each.

Owns: telling the packagings apart, by config and weights and never by path; anchor layout and tap offset of each; refusing
by name what is not read. Does not own: weights (their names are the same in all of them), the fields' meaning
(`configuration_dspark`), writing other forms (`conversion`).
This file travels with a checkpoint (`auto_map`), so it imports nothing else of the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

OLD_HEAD_PREFIX = "logit_head."  # SpecForge's first checkpoints have it before the heads' names
Shapes = Mapping[str, Sequence[int]]

# What Qwen3Config, which all packagings but Gemma's build on, takes for a key that a config leaves out.
_BACKBONE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
# The rest of a rope entry (mrope sections, partial rotation) describes the target that the config was copied from.
_ROPE_KEYS = (
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "short_factor",
    "long_factor",
    "low_freq_factor",
    "high_freq_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
_CARRIED_KEYS = (
    "draft_vocab_size",
    "num_target_layers",
    "num_anchors",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "_commit_hash",
    "_name_or_path",
)
_HEAD_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_DFLASH2_KEYS = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
# Keys that change what a drafter computes in a way that is not implemented, and the values that change nothing.
_FOREIGN_KEYS: dict[str, tuple[str, tuple]] = {
    "rope_is_neox_style": ("interleaved rotary positions", (None, True)),
    "enable_qwen35_gated_q_proj": ("gated queries (Ornith)", (None, False)),
    "log_snr_conditioning": ("conditioning on the noise level (Bonsai)", (None, False)),
    "attention_value_scale": ("a scale on the attention's values", (None, 1, 1.0)),
    "dflash_query_causal": ("causal queries (Nemotron)", (None, False)),
    "attention_mode": ("another attention than grouped queries", (None, "gqa")),
}


def to_dspark_dict(config: dict[str, Any], shapes: Shapes | None = None) -> dict[str, Any]:
    """Our form of any config that we can read; our own comes back unchanged.

    `shapes` of the checkpoint's weights, by name, go before what the config says or leaves open about heads, embedding
    and LM head.

    Raises:
        ValueError: the config is no DSpark drafter's, or of a packaging that is not read; it is named.
    """
    if config.get("model_type") == "dspark" or not config:
        return config
    architectures = list(config.get("architectures") or [])
    is_embedded = any(key.startswith("dspark_") for key in config) and "block_size" not in config
    if not (
        config.get("model_type") or architectures or _is_speculators(config) or is_embedded or "dflash_config" in config
    ):
        return config  # a plain dict of our own fields, e.g. DSparkConfig.from_dict({...})
    named = f"architectures {architectures}, model_type {config.get('model_type')!r}"
    nested = config.get("dflash_config") or {}
    _refuse_by_name(config, nested, architectures, named)
    packaging = packaging_of(config)
    if packaging == "speculators":
        ours = _from_speculators(config, named)
    elif packaging == "SpecForge":
        ours = _from_specforge(config, nested)
    elif packaging == "DeepSpec Eagle3":
        ours = _from_deepspec_eagle3(config, named)
    elif packaging == "DeepSpec Gemma 4":
        ours = _from_deepspec_gemma4(config)
    elif packaging == "DeepSpec":
        ours = _from_deepspec(config)
    elif packaging == "z-lab":
        ours = _from_zlab(config, nested)
    elif _has_taps(config):
        raise ValueError(f"This drafter's packaging is not read ({named}).{_own_code(config)}")
    else:
        raise ValueError(_no_drafter(config, architectures, named))
    ours |= {"model_type": "dspark", "architectures": ["DSparkDraftModel"]}
    return ours if shapes is None else _matched(ours, shapes, named)


def _no_drafter(config: dict[str, Any], architectures: list[str], named: str) -> str:
    is_model = any(name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in architectures)
    return (
        f"This is {'a language model and no' if is_model else 'no'} DSpark drafter ({named}).{_own_code(config)} Give the folder "
        "or Hub id of a drafter (our own form, DeepSpec's, speculators' or z-lab's), or make one with `dspark-hf train`."
    )


def _own_code(config: dict[str, Any]) -> str:
    return " The code that it brings (auto_map) is not run." if config.get("auto_map") else ""


def packaging_of(config: Mapping[str, Any]) -> str | None:
    """The packaging of a config that is read, by its keys alone; `None` for any other."""
    nested = config.get("dflash_config") or {}
    architectures = config.get("architectures") or []
    if config.get("model_type") == "dspark":
        return "dspark-hf"
    if _is_speculators(config):
        return "speculators"
    if nested.get("projector_type") == "dspark":
        return "SpecForge"
    if "Qwen3Eagle3Model" in architectures:
        return "DeepSpec Eagle3"
    if "Gemma4DSparkModel" in architectures:
        return "DeepSpec Gemma 4"
    if "Qwen3DSparkModel" in architectures or (_has_taps(config) and "markov_rank" in config):
        return "DeepSpec"
    if nested or "DFlashDraftModel" in architectures:
        return "z-lab"
    return None


def _has_taps(config: Mapping[str, Any]) -> bool:
    return "target_layer_ids" in config and "mask_token_id" in config


def _is_speculators(config: Mapping[str, Any]) -> bool:
    return bool(config.get("speculators_model_type") or config.get("speculators_config"))


def _refuse_by_name(config: dict[str, Any], nested: dict[str, Any], architectures: list[str], named: str) -> None:
    """Raise for a drafter that is known and not read; the sentence says what is missing."""
    what = None
    is_eagle3 = (
        any("eagle3" in name.lower() for name in architectures) or config.get("speculators_model_type") == "eagle3"
    )
    if is_eagle3 and "Qwen3Eagle3Model" not in architectures:
        what = "an Eagle3 drafter in another form than DeepSpec's (Qwen3Eagle3Model), which alone is read"
    elif any(key.startswith("dspark_") for key in config) and "block_size" not in config:
        what = "a DeepSeek-V4 checkpoint with an embedded drafter: its layers are not read, nor can it be used alone"
    elif "DFlash2DraftModel" in architectures or any(key in config or key in nested for key in _DFLASH2_KEYS):
        what = "a DFlash 2 drafter: its convolutions and candidate selector are not read"
    elif any(name.startswith("Lfm2") for name in architectures) or (
        any("DSpark" in name for name in architectures)
        and "target_layer_ids" in nested
        and "target_layer_ids" not in config
        and "projector_type" not in config | nested
        and config.get("rope_is_neox_style") is not True
    ):
        what = "a drafter in LFM2's packaging: its interleaved rotary positions are not read"
    elif "Qwen35DSparkModel" in architectures:
        what = (
            "an Ornith drafter (Qwen35DSparkModel): its gated queries, partial rotation and shifted norms are not read"
        )
    elif config.get("model_type") == "muse_glimmer_assistant":
        what = (
            "transformers' own DFlash assistant (muse_glimmer_assistant): load it with transformers, not with dspark-hf"
        )
    elif config.get("quantization_config") or config.get("compression_config"):
        what = "a quantised drafter (NVFP4 or the like): only float weights are read"
    for key, (feature, harmless) in _FOREIGN_KEYS.items():
        if what is None and any(place.get(key) not in harmless for place in (config, nested)):
            what = f"a drafter with {feature} (config key {key!r}), which is not read"
    if what is not None:
        raise ValueError(f"This is {what} ({named}).")


def _from_deepspec(config: dict[str, Any]) -> dict[str, Any]:
    """DeepSpec, and MiniCPM5's form of it: the target's text config with the drafter's keys added, anchor-first."""
    return _backbone(config) | {
        "block_size": config.get("block_size", 7),
        "mask_token_id": config["mask_token_id"],
        "target_layer_ids": config["target_layer_ids"],
        "sample_from_anchor": config.get("sample_from_anchor", True),
        "sliding_window_non_causal": config.get("sliding_window_non_causal", False),
        "has_own_embeddings": True,
        **_heads(config),
    }


def _from_deepspec_eagle3(config: dict[str, Any], named: str) -> dict[str, Any]:
    """DeepSpec's Eagle3 baseline: one autoregressive layer; as many tokens a round as training unrolled."""
    taps, length = _needed(config, "target_layer_ids", named), config.get("ttt_length", 7)
    return _backbone(config) | {
        "layer_form": "eagle3",
        "block_size": length,
        "target_layer_ids": taps,
        "sample_from_anchor": True,
        "has_own_embeddings": True,
        **_heads({}),
    }


def _from_deepspec_gemma4(config: dict[str, Any]) -> dict[str, Any]:
    """DeepSpec's Gemma 4: as its Qwen3 form, with the global layers' head size and rotation, and two numbers more."""
    if "sliding_attention" in (config.get("layer_types") or []):
        raise ValueError("This is a Gemma 4 drafter with sliding layers, whose own head size is not read.")
    layer: dict[str, Any] = next(iter((config.get("per_layer_config") or {}).values()), {})  # newer transformers' form
    k_eq_v = bool(config.get("attention_k_eq_v", False))
    kv_heads = layer.get("num_key_value_heads")
    if kv_heads is None and k_eq_v:
        kv_heads = config.get("num_global_key_value_heads")
    rope = dict((config.get("rope_parameters") or {}).get("full_attention") or {})
    return _from_deepspec(config) | {
        "layer_form": "gemma4",
        "attention_k_eq_v": k_eq_v,
        "head_dim": layer.get("head_dim") or config.get("global_head_dim") or 512,
        "num_key_value_heads": kv_heads or config["num_key_value_heads"],
        "hidden_act": config.get("hidden_activation", "gelu_pytorch_tanh"),
        "rope_parameters": rope
        or {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        "embedding_scale": config["hidden_size"] ** 0.5,
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }


def _from_speculators(config: dict[str, Any], named: str) -> dict[str, Any]:
    """speculators: the backbone in a nested config; an auxiliary id counts the embeddings as 0, so ours is one lower."""
    details = config.get("speculators_config") or {}
    algorithm = config.get("speculators_model_type") or details.get("algorithm")
    if algorithm not in ("dspark", "dflash"):
        raise ValueError(
            f"This is a speculators drafter of the algorithm {algorithm!r}; 'dspark' and 'dflash' are read ({named})."
        )
    layers = config.get("transformer_layer_config") or {}
    taps = config.get("aux_hidden_state_layer_ids")
    if not layers or taps is None:
        raise ValueError(
            f"This speculators config lacks transformer_layer_config or aux_hidden_state_layer_ids ({named}); both are needed."
        )
    backbone = _backbone(layers, nested_rope="sliding_attention")
    if backbone["sliding_window"] is None:  # the package then masks nothing
        backbone["layer_types"] = ["full_attention"] * backbone["num_hidden_layers"]
    is_dspark = algorithm == "dspark"
    return backbone | {
        **_carried(config),
        "block_size": config.get("block_size", 8),
        "mask_token_id": _needed(config, "mask_token_id", named),
        "target_layer_ids": [i - 1 for i in taps],
        "target_hidden_size": config.get("target_hidden_size"),
        "draft_vocab_size": config.get("draft_vocab_size", 32000),
        "sample_from_anchor": config.get("sample_from_anchor", is_dspark),
        "sliding_window_origin": "anchor",
        "sliding_window_non_causal": config.get("sliding_window_non_causal", False),
        "embedding_scale": 1.0,
        "has_own_embeddings": True,
        "target_model_name_or_path": (details.get("verifier") or {}).get("name_or_path"),
        **(_heads({"markov_rank": 256, "enable_confidence_head": True, **config}, True) if is_dspark else _heads({})),
    }


def _from_zlab(config: dict[str, Any], nested: dict[str, Any]) -> dict[str, Any]:
    """z-lab's DFlash: options in `dflash_config` first, then at the top; fill-in, windows counted from the query."""
    options = config | nested
    backbone = _backbone(config)
    is_causal = config.get("is_causal")
    if backbone["sliding_window"] is None and "sliding_attention" in backbone["layer_types"]:
        backbone["sliding_window"] = backbone["max_position_embeddings"]  # causal, without a window
    taps = options.get("target_layer_ids")
    if taps is None:
        taps = _spread_taps(_needed(options, "num_target_layers", "z-lab's form"), backbone["num_hidden_layers"])
    cap = options.get("final_logit_softcapping")
    # A Markov head under z-lab's label makes it a DSpark drafter, whose slots predict the next token.
    return backbone | {
        "block_size": options.get("block_size", 16),
        "mask_token_id": _needed(options, "mask_token_id", "z-lab's form"),
        "target_layer_ids": taps,
        "sample_from_anchor": options.get("sample_from_anchor", bool(options.get("markov_rank"))),
        "sliding_window_origin": "query",
        "sliding_window_non_causal": is_causal is not None and not is_causal,
        "full_attention_causal": bool(is_causal),
        "embedding_scale": float(options.get("input_embedding_scale", 1.0)),
        "output_scale": float(options.get("output_multiplier", 1.0)),
        "final_logit_softcapping": cap if cap and cap > 0 else None,
        "has_own_embeddings": False,
        **_heads(options),
    }


def _from_specforge(config: dict[str, Any], nested: dict[str, Any]) -> dict[str, Any]:
    """SpecForge's DSpark: z-lab's form with the heads' keys in `dflash_config`, anchor-first as DeepSpec's."""
    return _from_zlab(config, {"sample_from_anchor": config.get("sample_from_anchor", True), **nested})


def _backbone(config: dict[str, Any], nested_rope: str = "full_attention") -> dict[str, Any]:
    """The layers' shape as Qwen3Config would read it, what is absent or None included."""
    ours = {key: config[key] if config.get(key) is not None else default for key, default in _BACKBONE.items()}
    ours |= _carried(config)
    is_qwen3 = config.get("model_type", "qwen3") == "qwen3"
    if ours["num_key_value_heads"] is None:
        given = "num_key_value_heads" in config or not is_qwen3
        ours["num_key_value_heads"] = ours["num_attention_heads"] if given else 32
    if ours["head_dim"] is None:
        ours["head_dim"] = 128 if is_qwen3 else ours["hidden_size"] // ours["num_attention_heads"]
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope = dict(rope.get(nested_rope) or rope)
    kept = {key: rope[key] for key in _ROPE_KEYS if rope.get(key) is not None}
    kept.setdefault("rope_type", rope.get("type") or "default")
    kept.setdefault("rope_theta", config.get("rope_theta") or 10_000.0)
    windowed = config.get("use_sliding_window") is not False
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = config.get("max_window_layers", 28) if config.get("use_sliding_window") else ours["num_hidden_layers"]
        layer_types = ["full_attention" if i < first else "sliding_attention" for i in range(ours["num_hidden_layers"])]
    return ours | {
        "rope_parameters": kept,
        "layer_types": layer_types,
        "sliding_window": config.get("sliding_window") if windowed and "sliding_attention" in layer_types else None,
    }


def _carried(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in _CARRIED_KEYS if key in config}


def _heads(options: dict[str, Any], with_markov: bool = False) -> dict[str, Any]:
    """The heads' keys; `with_markov` is what an absent `confidence_head_with_markov` means."""
    rank = options.get("markov_rank") or 0
    return {
        "markov_rank": rank,
        # absent where the head itself is absent
        "markov_head_type": options.get("markov_head_type", "vanilla") if rank else "none",
        "enable_confidence_head": bool(options.get("enable_confidence_head", False)),
        "confidence_head_with_markov": bool(options.get("confidence_head_with_markov", with_markov)),
    }


def _needed(options: dict[str, Any], key: str, named: str) -> Any:
    if options.get(key) is None:
        raise ValueError(f"This drafter's config lacks {key} ({named}).")
    return options[key]


def _spread_taps(num_target_layers: int, num_layers: int) -> list[int]:
    """z-lab's choice where a config names none: from layer 1 to the third last, evenly."""
    if num_layers == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (num_layers - 1)) for i in range(num_layers)]


def _matched(ours: dict[str, Any], shapes: Shapes, named: str) -> dict[str, Any]:
    """`ours` with what the weights say about heads, biases, embedding and LM head."""
    shapes = {name.removeprefix(OLD_HEAD_PREFIX): shape for name, shape in shapes.items()}
    if any(name.endswith((".weight_scale", ".weight_scale_2", ".weight_packed")) for name in shapes):
        raise ValueError(f"This is a quantised drafter (NVFP4 or the like): only float weights are read ({named}).")
    ours = dict(ours)
    ours["has_own_embeddings"] = "embed_tokens.weight" in shapes
    ours["has_own_lm_head"] = "lm_head.weight" in shapes
    ours["attention_bias"] = "layers.0.self_attn.q_proj.bias" in shapes
    if (w1 := shapes.get("markov_head.markov_w1.weight")) is not None:
        if not ours["markov_rank"] and ours.get("sliding_window_origin") == "query":
            ours["sample_from_anchor"] = True  # labelled DFlash, but a DSpark drafter
        kinds = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
        ours["markov_rank"] = w1[-1]
        ours["markov_head_type"] = next((kind for name, kind in kinds.items() if name in shapes), "vanilla")
    if (confidence := shapes.get("confidence_head.proj.weight")) is not None:
        ours["enable_confidence_head"] = True
        ours["confidence_head_with_markov"] = confidence[-1] != ours["hidden_size"]
    return ours
