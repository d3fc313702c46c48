"""The drafter configs found in the wild, translated into ours: told apart by their keys, refused by name where not read.

Weights have the same names in all packagings; only configs differ. Shapes of the weights go before what a config says.
This file travels with a checkpoint (`auto_map`), so it imports nothing else of the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.modeling_rope_utils import RopeParameters

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
# What all packagings call by our name, and what it means where a config leaves it out.
_SHARED: dict[str, Any] = {
    "block_size": None,
    "mask_token_id": None,
    "target_layer_ids": None,
    "sample_from_anchor": True,
    "sliding_window_non_causal": False,
    "markov_rank": 0,
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
    "confidence_temperatures": None,
}
# By packaging, where that is something else.
_ABSENT: dict[str, dict[str, Any]] = {
    "DeepSpec": {"block_size": 7},
    "DeepSpec Gemma 4": {"block_size": 7},
    "DeepSpec Eagle3": {},
    "z-lab": {"block_size": 16, "sample_from_anchor": None},
    "SpecForge": {"block_size": 16},
    "speculators dflash": {"block_size": 8, "sample_from_anchor": False},
    "speculators dspark": {
        "block_size": 8,
        "markov_rank": 256,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}
_OF_THE_PAIR = ("draft_vocab_size", "num_target_layers", "num_anchors", "pad_token_id", "bos_token_id", "eos_token_id")
_OF_THE_FILE = ("dtype", "torch_dtype", "transformers_version", "_commit_hash", "_name_or_path")
# mrope sections and partial rotation describe the target that a config was copied from.
_TARGETS_ROPE_KEYS = {"mrope_section", "partial_rotary_factor"}
_ROPE_KEYS = {*RopeParameters.__annotations__, "mscale", "mscale_all_dim", "truncate"} - _TARGETS_ROPE_KEYS
_QUANTISED = "a quantised drafter (NVFP4 or the like): only float weights are read"
_DFLASH2_KEYS = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
# Keys that change what a drafter computes in a way that is not implemented, and the values that change nothing.
_FOREIGN_KEYS: dict[str, tuple[str, tuple]] = {
    "rope_is_neox_style": ("interleaved rotary positions", (None, True)),
    "enable_qwen35_gated_q_proj": ("gated queries (Ornith)", (None, False)),
    "log_snr_conditioning": ("conditioning on the noise level (Bonsai)", (None, False)),
    "attention_value_scale": ("a scale on the attention's values", (None, 1, 1.0)),
    "dflash_query_causal": ("causal queries (Nemotron)", (None, False)),
    "attention_mode": ("another attention than grouped queries", (None, "gqa")),
    "causal": ("blocks that are causal in every layer (ModelOpt)", (None, False)),
    "use_swa": ("a sliding window in every layer (ModelOpt)", (None, False)),
}


def to_dspark_dict(config: dict[str, Any], shapes: Shapes | None = None) -> dict[str, Any]:
    """Our form of any config that we can read; our own comes back unchanged.

    `shapes` of the checkpoint's weights, by name, go before what the config says or leaves open about heads, embedding
    and LM head.

    Raises:
        ValueError: the config is no DSpark drafter's, or of a packaging that is not read, and it is named; or a key of it
            is missing or wrong.
    """
    if config.get("model_type") == "dspark" or not config:
        return config
    says_what = ("model_type", "architectures", "speculators_model_type", "speculators_config")
    if not (any(config.get(key) for key in says_what) or "dflash_config" in config or _is_deepseek_v4(config)):
        return config  # a plain dict of our own fields, e.g. DSparkConfig.from_dict({...})
    architectures = list(config.get("architectures") or [])
    named = f"architectures {architectures}, model_type {config.get('model_type')!r}"
    try:
        _refuse_by_name(config, architectures, named)
        packaging = packaging_of(config)
        if packaging is None:
            raise ValueError(_not_read(config, architectures, named))
        ours = _translated(packaging, config, named)
    except (TypeError, AttributeError, KeyError, IndexError, ArithmeticError) as error:
        raise ValueError(
            f"This drafter's config can't be read: a value in it is of a wrong kind or missing ({error}; {named}). Mend "
            "config.json."
        ) from error
    ours |= {"model_type": "dspark", "architectures": ["DSparkDraftModel"]}
    return ours if shapes is None else _matched(ours, shapes, named)


def packaging_of(config: Mapping[str, Any]) -> str | None:
    """The packaging of a config that is read, by its keys alone; `None` for any other."""
    nested = config.get("dflash_config") or {}
    architectures = config.get("architectures") or []
    signs = {
        "dspark-hf": config.get("model_type") == "dspark",
        "speculators": config.get("speculators_model_type") or config.get("speculators_config"),
        "SpecForge": nested.get("projector_type") == "dspark",
        "DeepSpec Eagle3": "Qwen3Eagle3Model" in architectures,
        "DeepSpec Gemma 4": "Gemma4DSparkModel" in architectures,
        "DeepSpec": "Qwen3DSparkModel" in architectures or (_has_taps(config) and "markov_rank" in config),
        "z-lab": nested or "DFlashDraftModel" in architectures,
    }
    return next((name for name, is_there in signs.items() if is_there), None)


def check_taps(ids: Any, key: str = "target_layer_ids") -> None:
    """Refuse ids of tapped layers that can't be: features of a layer twice fit the weights' shapes and mean nothing."""
    if not (isinstance(ids, list | tuple) and ids and all(type(i) is int for i in ids) and len(set(ids)) == len(ids)):
        raise ValueError(
            f"{key} must name the target layers that the drafter reads, at least one, each once and by a whole number, got "
            f"{ids!r}."
        )


def _has_taps(config: Mapping[str, Any]) -> bool:
    return "target_layer_ids" in config and "mask_token_id" in config


def _is_deepseek_v4(config: Mapping[str, Any]) -> bool:
    return any(key.startswith("dspark_") for key in config) and "block_size" not in config


def _not_read(config: dict[str, Any], architectures: list[str], named: str) -> str:
    """What is said of a config of no packaging that is read."""
    own_code = " The code that it brings (auto_map) is not run." if config.get("auto_map") else ""
    if _has_taps(config):
        return f"This drafter's packaging is not read ({named}).{own_code}"
    is_model = any(name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in architectures)
    return (
        f"This is {'a language model and no' if is_model else 'no'} DSpark drafter ({named}).{own_code} Give the folder "
        "or Hub id of a drafter (our own form, DeepSpec's, speculators' or z-lab's), or make one with `dspark-hf train`."
    )


def _refuse_by_name(config: dict[str, Any], architectures: list[str], named: str) -> None:
    """Raise for a drafter that is known and not read; the sentence says what is missing."""
    nested = config.get("dflash_config") or {}
    names = [*architectures, config.get("speculators_model_type") or ""]
    has_nested_taps_alone = (
        any("DSpark" in name for name in architectures)
        and "target_layer_ids" in nested
        and "target_layer_ids" not in config
        and "projector_type" not in config | nested
        and config.get("rope_is_neox_style") is not True
    )
    is_eagle3 = any("eagle3" in name.lower() for name in names) and "Qwen3Eagle3Model" not in architectures
    is_v4 = _is_deepseek_v4(config)
    is_dflash2 = "DFlash2DraftModel" in architectures or any(key in config | nested for key in _DFLASH2_KEYS)
    is_lfm2 = has_nested_taps_alone or any(name.startswith("Lfm2") for name in architectures)
    is_ornith = "Qwen35DSparkModel" in architectures
    is_native = config.get("model_type") == "muse_glimmer_assistant"
    known = {
        "an Eagle3 drafter in another form than DeepSpec's (Qwen3Eagle3Model), which alone is read": is_eagle3,
        "a DeepSeek-V4 checkpoint with an embedded drafter: its layers are not read, nor can it be used alone": is_v4,
        "a DFlash 2 drafter: its convolutions and candidate selector are not read": is_dflash2,
        "a drafter in LFM2's packaging: its interleaved rotary positions are not read": is_lfm2,
        "an Ornith drafter (Qwen35DSparkModel): its gated queries, partial rotation and shifted norms are not read": is_ornith,
        "transformers' own DFlash assistant (muse_glimmer_assistant): load it with transformers, not with dspark-hf": is_native,
        _QUANTISED: config.get("quantization_config") or config.get("compression_config"),
    }
    for key, (feature, harmless) in _FOREIGN_KEYS.items():
        differs = any(place.get(key) not in harmless for place in (config, nested))
        known[f"a drafter with {feature} (config key {key!r}), which is not read"] = differs
    for what, applies in known.items():
        if applies:
            raise ValueError(f"This is {what} ({named}).")


def _translated(packaging: str, config: dict[str, Any], named: str) -> dict[str, Any]:
    """Our keys of one packaging: the layers' shape, what all share, and what is its own."""
    options, layers = config, config
    if packaging in ("z-lab", "SpecForge"):  # in `dflash_config` first, then at the top
        options = config | (config.get("dflash_config") or {})
    elif packaging == "speculators":
        packaging, layers = f"speculators {_algorithm(config, named)}", config["transformer_layer_config"]
    ours = _backbone(layers, packaging) | _carried(config) | _filled(options, _SHARED | _ABSENT[packaging])
    ours["has_own_embeddings"] = packaging not in ("z-lab", "SpecForge")
    if own := _OWN.get(packaging):
        ours |= own(options, ours)
    for key in ("mask_token_id", "target_layer_ids"):
        if ours[key] is None:
            raise ValueError(f"This drafter's config lacks {key} ({packaging}'s form, {named}).")
    check_taps(ours["target_layer_ids"])
    if not ours["markov_rank"]:
        ours |= {"markov_rank": 0, "markov_head_type": "none"}  # the type is absent where the head is
    return ours


def _eagle3(config: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """DeepSpec's Eagle3 baseline: one autoregressive layer; as many tokens a round as training unrolled."""
    heads = {"markov_rank": 0, "enable_confidence_head": False, "confidence_temperatures": None}
    return heads | {
        "layer_form": "eagle3",
        "block_size": config.get("ttt_length", 7),
        "mask_token_id": 0,  # nothing reads it
        "sample_from_anchor": True,
    }


def _gemma4(config: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """DeepSpec's Gemma 4: as its Qwen3 form, with the global layers' head size and rotation, and two numbers more."""
    if "sliding_attention" in (config.get("layer_types") or []):
        raise ValueError("This is a Gemma 4 drafter with sliding layers, whose own head size is not read.")
    layer: dict[str, Any] = next(iter((config.get("per_layer_config") or {}).values()), {})  # newer transformers' form
    k_eq_v = bool(config.get("attention_k_eq_v", False))
    kv_heads = layer.get("num_key_value_heads")
    if kv_heads is None and k_eq_v:
        kv_heads = config.get("num_global_key_value_heads")
    rope = dict((config.get("rope_parameters") or {}).get("full_attention") or {})
    return {
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


def _algorithm(config: dict[str, Any], named: str) -> str:
    """What a speculators config says it holds, as far as that is read."""
    algorithm = config.get("speculators_model_type") or (config.get("speculators_config") or {}).get("algorithm")
    if algorithm not in ("dspark", "dflash"):
        raise ValueError(
            f"This is a speculators drafter of the algorithm {algorithm!r}; 'dspark' and 'dflash' are read ({named})."
        )
    if not config.get("transformer_layer_config") or config.get("aux_hidden_state_layer_ids") is None:
        raise ValueError(
            f"This speculators config lacks transformer_layer_config or aux_hidden_state_layer_ids ({named}); both are needed."
        )
    return algorithm


def _speculators(config: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """speculators: the backbone in a nested config; an auxiliary id counts the embeddings as 0, so ours is one lower."""
    taps = config["aux_hidden_state_layer_ids"]
    check_taps(taps, "aux_hidden_state_layer_ids")
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return {
        "target_layer_ids": [i - 1 for i in taps],
        "target_hidden_size": config.get("target_hidden_size"),
        "draft_vocab_size": config.get("draft_vocab_size", 32000),
        "sliding_window_origin": "anchor",
        "embedding_scale": 1.0,
        "target_model_name_or_path": verifier.get("name_or_path"),
    }


def _zlab(options: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """z-lab's DFlash and SpecForge's DSpark: windows counted from the query, scales of embedding and logits."""
    is_causal, taps = options.get("is_causal"), ours["target_layer_ids"]
    if taps is None and (depth := options.get("num_target_layers")) is not None:
        # z-lab's choice: from layer 1 to the third last, evenly.
        last = ours["num_hidden_layers"] - 1
        taps = [round(1 + i * (depth - 4) / last) for i in range(last + 1)] if last else [depth // 2]
    window, cap = ours["sliding_window"], options.get("final_logit_softcapping")
    if window is None and "sliding_attention" in ours["layer_types"]:
        window = ours["max_position_embeddings"]  # causal, without a window
    # A Markov head under z-lab's label makes it a DSpark drafter, whose slots predict the next token.
    anchor_first = bool(ours["markov_rank"]) if ours["sample_from_anchor"] is None else ours["sample_from_anchor"]
    return {
        "target_layer_ids": taps,
        "sample_from_anchor": anchor_first,
        "sliding_window": window,
        "sliding_window_origin": "query",
        "sliding_window_non_causal": is_causal is not None and not is_causal,
        "full_attention_causal": bool(is_causal),
        "embedding_scale": float(options.get("input_embedding_scale", 1.0)),
        "output_scale": float(options.get("output_multiplier", 1.0)),
        "final_logit_softcapping": cap if cap and cap > 0 else None,
    }


def _backbone(config: dict[str, Any], packaging: str) -> dict[str, Any]:
    """The layers' shape as Qwen3Config would read it, what is absent or None included."""
    ours = _filled(config, _BACKBONE) | _carried(config)
    is_speculators, is_qwen3 = packaging.startswith("speculators"), config.get("model_type", "qwen3") == "qwen3"
    if ours["num_key_value_heads"] is None:
        given = "num_key_value_heads" in config or not is_qwen3
        ours["num_key_value_heads"] = ours["num_attention_heads"] if given else 32
    if ours["head_dim"] is None:
        ours["head_dim"] = 128 if is_qwen3 else ours["hidden_size"] // ours["num_attention_heads"]
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if entries := {kind: entry for kind, entry in rope.items() if isinstance(entry, dict)}:  # by type of layer
        wanted = "sliding_attention" if is_speculators else "full_attention"
        rope = entries.get(wanted) or next(iter(entries.values()))
    kept = {key: rope[key] for key in _ROPE_KEYS if rope.get(key) is not None}
    kept.setdefault("rope_type", rope.get("type") or "default")
    kept.setdefault("rope_theta", config.get("rope_theta") or 10_000.0)
    layer_types, count = config.get("layer_types"), ours["num_hidden_layers"]
    if layer_types is None:
        first = config.get("max_window_layers", 28) if config.get("use_sliding_window") else count
        layer_types = ["full_attention" if i < first else "sliding_attention" for i in range(count)]
    has_window = config.get("use_sliding_window") is not False and "sliding_attention" in layer_types
    window = config.get("sliding_window") if has_window else None
    if window is None and is_speculators:  # the package then masks nothing
        layer_types = ["full_attention"] * count
    return ours | {"rope_parameters": kept, "layer_types": layer_types, "sliding_window": window}


def _filled(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] if config.get(key) is not None else default for key, default in defaults.items()}


def _carried(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in _OF_THE_PAIR + _OF_THE_FILE if key in config}


_OWN = {
    "DeepSpec Eagle3": _eagle3,
    "DeepSpec Gemma 4": _gemma4,
    "z-lab": _zlab,
    "SpecForge": _zlab,
    "speculators dflash": _speculators,
    "speculators dspark": _speculators,
}


def _matched(ours: dict[str, Any], shapes: Shapes, named: str) -> dict[str, Any]:
    """`ours` with what the weights say about heads, biases, embedding and LM head."""
    shapes = {name.removeprefix(OLD_HEAD_PREFIX): shape for name, shape in shapes.items()}
    if any(name.endswith((".weight_scale", ".weight_scale_2", ".weight_packed")) for name in shapes):
        raise ValueError(f"This is {_QUANTISED} ({named}).")
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
