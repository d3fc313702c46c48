"""Writing a drafter in the forms that other programs read: their configs and tensors, and what each can't express.

Reading them is `model/packagings_dspark.py`'s. Axes: V target vocabulary, V_d draft vocabulary, d hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..loading.files import new_folder, write_json
from ..loading.pairs import load_drafter, load_model
from ..model.configuration_dspark import CALIBRATION_FIELDS, DSparkConfig
from ..model.modeling_dspark import DSparkDraftModel

FORMS = ("dspark", "deepspec", "speculators")
_SPECULATORS_VERSION = "0.9.0"
# Fields of our config that both other forms have by the same names: of the layers, and of the drafter.
_LAYER_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *("attention_bias", "attention_dropout", "layer_types", "pad_token_id", "bos_token_id", "eos_token_id"),
)
_DRAFTER_KEYS = ("block_size", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head")


@dataclass(frozen=True)
class Written:
    """A form's files: config.json and the tensors of model.safetensors; `lost` says what it has no place for."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    lost: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Conversion:
    """What was written where.

    num_draft_tokens: γ, what an engine is passed to draft a round. num_parameters: of the drafter, without what it shares with
    the target. lost: what the form has no place for.
    """

    folder: str
    form: str
    target: str | None
    num_draft_tokens: int
    num_parameters: int
    lost: list[str]


def convert(source: str, destination: Path, form: str, target_name: str | None = None) -> Conversion:
    """Read the drafter `source` and write it to the new folder `destination` in another form, as a whole or not at all.

    Raises:
        OSError: the destination is in use, the source can't be read, or the form needs the target's weights.
        ValueError: an unknown form, or one in which this drafter would draft otherwise.
    """
    if form not in FORMS:
        raise ValueError(f"--to must be one of {', '.join(FORMS)}, got {form!r}.")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise OSError(f"{destination} exists and is not an empty folder. Give a new one.")
    drafter = load_drafter(source, dtype="auto")
    target = None if target_name is None else load_model(target_name, "cpu")
    if target is not None:
        drafter.bind_target(target)
    name = target_name or drafter.config.target_model_name_or_path
    lost: list[str] = []
    with new_folder(destination) as temporary:
        if form == "dspark":
            drafter.config.target_model_name_or_path = name
            drafter.save_pretrained(temporary)
        else:
            written = to_deepspec(drafter, target) if form == "deepspec" else to_speculators(drafter, target, name)
            lost = written.lost
            # Cloned, because a tied target gives the same memory as embedding and LM head.
            tensors = {key: tensor.detach().cpu().clone().contiguous() for key, tensor in written.tensors.items()}
            save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
            write_json(dict(sorted(written.config.items())), temporary / "config.json")
    count = sum(p.numel() for p in drafter.parameters())
    return Conversion(str(destination), form, name, drafter.config.num_draft_tokens, count, lost)


def to_deepspec(drafter: DSparkDraftModel, target: PreTrainedModel | None) -> Written:
    """DeepSpec's form: the target's kind of config with the drafter's keys, and copies of embedding and LM head.

    Scales of embedding and logits are multiplied into the copies.

    Raises:
        OSError: embedding or LM head are neither in the drafter nor given by a target.
        ValueError: the form can't express this drafter.
    """
    config = drafter.config
    is_gemma = config.layer_form == "gemma4"
    has_softcap = config.final_logit_softcapping is not None
    _refuse(
        "deepspec",
        drafter,
        target,
        {
            "the fill-in layout (sample_from_anchor false)": not config.sample_from_anchor,
            "sliding layers": "sliding_attention" in config.layer_types,
            "a reduced draft vocabulary": config.has_reduced_vocab,
            "a soft cap of the logits without Gemma 4 layers": has_softcap and not is_gemma,
            "Gemma 4 layers with a scale on the logits": is_gemma and config.output_scale != 1.0,
        },
    )
    scale = _embedding_scale(drafter, target) / (config.hidden_size**0.5 if is_gemma else 1.0)
    tensors = _own_tensors(drafter) | {
        "embed_tokens.weight": _scaled(_rows(drafter, target, "embedding"), scale, drafter),
        "lm_head.weight": _scaled(_rows(drafter, target, "LM head"), config.output_scale, drafter),
    }
    written = _fields(config, *_LAYER_KEYS, *_DRAFTER_KEYS, "target_layer_ids", "num_anchors") | {
        "architectures": ["Gemma4DSparkModel" if is_gemma else "Qwen3DSparkModel"],
        "model_type": "gemma4_text" if is_gemma else "qwen3",
        "dtype": _dtype_name(drafter),
        "tie_word_embeddings": False,
        "num_target_layers": config.num_target_layers
        or (None if target is None else target.config.get_text_config().num_hidden_layers),
    }
    if is_gemma:
        written |= _fields(config, "attention_k_eq_v", "final_logit_softcapping") | {
            "global_head_dim": config.head_dim,
            "num_global_key_value_heads": config.num_key_value_heads if config.attention_k_eq_v else None,
            "hidden_activation": config.hidden_act,
            "rope_parameters": {"full_attention": config.rope_parameters},
        }
    else:
        written |= _fields(config, "hidden_act", "rope_parameters")
    if not config.markov_rank:
        del written["markov_head_type"]
    if config.enable_confidence_head:
        written |= _fields(config, "confidence_head_with_markov")
    return Written(written, tensors, _lost(drafter))


def to_speculators(drafter: DSparkDraftModel, target: PreTrainedModel | None, target_name: str | None) -> Written:
    """speculators' form: nested layer config, ids one higher, no embedding, an LM head only for a reduced vocabulary.

    Raises:
        OSError: the target's name is not known, or the rows of its LM head are needed and not there.
        ValueError: the form can't express this drafter.
    """
    config, reduced = drafter.config, drafter.config.has_reduced_vocab
    has_embedding, has_whole_head = drafter.embed_tokens is not None, drafter.lm_head is not None and not reduced
    sliding = "sliding_attention" in config.layer_types
    if target_name is None:
        raise OSError("speculators' form names its target, and this drafter's config does not. Give --target.")
    _refuse(
        "speculators",
        drafter,
        target,
        {
            "Gemma 4 layers": config.layer_form == "gemma4",
            "a sliding window counted from each query": sliding and config.sliding_window_origin == "query",
            "a scaled embedding": _embedding_scale(drafter, target) != 1.0,
            "a soft cap of the logits": config.final_logit_softcapping is not None,
            "a scale on the logits of the whole vocabulary": config.output_scale != 1.0 and not reduced,
            "an embedding of its own, other than the target's": target is not None and has_embedding,
            "an LM head of its own, other than the target's": target is not None and has_whole_head,
        },
    )
    lost = _lost(drafter)
    if has_embedding or has_whole_head:
        lost.append("its copies of embedding and LM head: the target's are used, which --target would have compared")
    tensors = _own_tensors(drafter)
    if reduced:
        ids = drafter.draft_token_ids()
        rows = _rows(drafter, target, "LM head")
        if drafter.lm_head is None:
            rows = rows[ids]
        tensors["lm_head.weight"] = _scaled(rows, config.output_scale, drafter)
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids] = True
    is_dflash = not config.sample_from_anchor and not config.markov_rank and not config.enable_confidence_head
    algorithm = "dflash" if is_dflash else "dspark"
    layers = _fields(config, *_LAYER_KEYS, "hidden_act", "rope_parameters") | {
        "model_type": "qwen3",
        "sliding_window": config.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "tie_word_embeddings": False,
    }
    proposal = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": config.num_draft_tokens,
        "verifier_accept_k": 1,
    }
    verifier = {"name_or_path": target_name, "architectures": [] if target is None else [type(target).__name__]}
    written = _fields(config, "draft_vocab_size", "sample_from_anchor", "sliding_window_non_causal", *_DRAFTER_KEYS) | {
        "architectures": ["DFlashDraftModel" if is_dflash else "DSparkDraftModel"],
        "speculators_model_type": algorithm,
        "speculators_version": _SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": layers,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "dtype": _dtype_name(drafter),
        "target_hidden_size": None,
        "tie_word_embeddings": False,
    }
    if is_dflash:  # that model knows no such heads
        for key in ("markov_rank", "markov_head_type", "enable_confidence_head"):
            del written[key]
    else:
        written |= _fields(config, "confidence_head_with_markov")
        if not config.markov_rank:
            written["markov_head_type"] = "vanilla"
    return Written(written, tensors, lost)


def _refuse(
    form: str, drafter: DSparkDraftModel, target: PreTrainedModel | None, inexpressible: dict[str, bool]
) -> None:
    """Raise where the form, or any form but ours, would make another draft of this drafter."""
    config = drafter.config
    bias = None if target is None else getattr(target.get_output_embeddings(), "bias", None)
    inexpressible |= {
        "an autoregressive layer (Eagle3)": config.is_autoregressive,
        "full layers that are causal in the block": config.full_attention_causal,
        "tapped layers of another width than the drafter's": config.target_hidden_size != config.hidden_size,
        "a target whose LM head has a bias": drafter.lm_head is None and bias is not None,
    }
    if found := [what for what, holds in inexpressible.items() if holds]:
        raise ValueError(
            f"This drafter has {' and '.join(found)}, which the {form} form can't express, so it is not written."
        )


def _lost(drafter: DSparkDraftModel) -> list[str]:
    """What neither of the other forms has a place for; the whole block's draft does not depend on it."""
    config: DSparkConfig = drafter.config
    lost = []
    if any(getattr(config, name) is not None for name in CALIBRATION_FIELDS):
        lost.append("the calibration of the confidences")
    if config.min_block_size is not None:
        lost.append(f"min_block_size {config.min_block_size}: whole blocks of {config.block_size} are run always")
    if config.context_window is not None:
        lost.append(f"the context window of {config.context_window} tokens: the whole context is read")
    chosen = drafter.generation_config
    if chosen.num_assistant_tokens not in (None, config.num_draft_tokens):
        lost.append(f"the cap of {chosen.num_assistant_tokens} drafted tokens a round")
    if chosen.assistant_confidence_threshold:
        lost.append(f"the confidence threshold {chosen.assistant_confidence_threshold}")
    return lost


def _fields(config: DSparkConfig, *keys: str) -> dict[str, Any]:
    return {key: getattr(config, key) for key in keys}


def _own_tensors(drafter: DSparkDraftModel) -> dict[str, torch.Tensor]:
    """All but embedding and LM head."""
    shared = ("embed_tokens.weight", "lm_head.weight")
    return {key: tensor for key, tensor in drafter.state_dict().items() if key not in shared}


def _embedding_scale(drafter: DSparkDraftModel, target: PreTrainedModel | None) -> float:
    """What the rows of the table that would be written are multiplied by."""
    if drafter.config.embedding_scale is not None:
        return drafter.config.embedding_scale
    if drafter.embed_tokens is not None or target is None:
        return 1.0
    return float(getattr(target.get_input_embeddings(), "scalar_embed_scale", 1.0))  # Gemma's module scales by itself


def _rows(drafter: DSparkDraftModel, target: PreTrainedModel | None, what: str) -> torch.Tensor:
    """The drafter's own embedding [V, d] or LM head [V_d, d], else the target's for the drafter's tokens [V, d]."""
    own = drafter.embed_tokens if what == "embedding" else drafter.lm_head
    if own is not None:
        return own.weight
    if target is None:
        raise OSError(f"This form holds the {what}, and the drafter has none of its own. Give --target.")
    module = target.get_input_embeddings() if what == "embedding" else target.get_output_embeddings()
    if not module.weight.is_floating_point():
        raise ValueError(f"The target's {what} is quantised; give --target the model without quantisation.")
    return module.weight[: drafter.config.vocab_size]


def _scaled(rows: torch.Tensor, scale: float, drafter: DSparkDraftModel) -> torch.Tensor:
    return (rows if scale == 1.0 else rows * scale).to(drafter.dtype)


def _dtype_name(drafter: DSparkDraftModel) -> str:
    return str(drafter.dtype).removeprefix("torch.")
