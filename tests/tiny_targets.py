"""Tiny random targets that are not plain text transformers: hybrids with a recurrent state, and vision-language models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformers
from conftest import _COMMON, prompt_ids

_LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_head": 8,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}
# transformers' experts know no float64, so there are none.
_NO_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "mlp_only_layers": [0, 1, 2, 3]}
_GRANITE = _MAMBA2 | {
    "layer_types": ["mamba", "attention"] * 2,
    "num_local_experts": 0,
    "shared_intermediate_size": 32,
}
RECURRENT = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _LINEAR | _NO_EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _LINEAR),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", _LINEAR),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", _MAMBA2 | {"mamba_d_ssm": 64}),
    "bamba": ("BambaConfig", "BambaForCausalLM", _MAMBA2 | {"attn_layer_indices": [1, 3]}),
    "granite": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", _GRANITE),
}
CONVOLUTIONAL = {
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    )
}
_BOUNDED = {"chunk_size": 8, "layers_block_type": ["mamba", "attention"] * 2, "mamba_num_heads": 8, "mamba_head_dim": 8}
REFUSED = {
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {"mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        _BOUNDED | {"ssm_state_size": 8, "n_groups": 1, "time_step_limit": (0.001, float("inf"))},
    ),
    "zamba2": (
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "mamba_d_state": 8,
            "mamba_headdim": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "chunk_size": 8,
            "num_mem_blocks": 1,
        },
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        {"lru_width": 32, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
    ),
    "minimax": (
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        {"layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 2, "block_size": 8},
    ),
}


def make_hybrid(family: str, vocab_size: int = 24, seed: int = 0, dtype=torch.float64, **overrides):
    """A tiny random target with layers that are not attention."""
    config_name, model_name, extra = (RECURRENT | CONVOLUTIONAL | REFUSED)[family]
    config = getattr(transformers, config_name)(**_COMMON | extra | {"vocab_size": vocab_size} | overrides)
    torch.manual_seed(seed)
    return getattr(transformers, model_name)(config).to(dtype).eval()


# -- vision-language -------------------------------------------------------------------------------------------------

_IMAGE, _BEGIN, _END = 20, 22, 23
_NUM_IMAGE_TOKENS = 4
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}


def _tower(kind: str, **extra) -> dict:
    """As many vision layers as text layers, so that the two can be mistaken for each other."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
    return {"model_type": kind, **sizes, "image_size": 8, "patch_size": 4, **extra}


def _qwen(config_name: str, text: dict, vision: dict):
    tower = {"depth": 4, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
    return getattr(transformers, config_name)(
        vision_config=tower | {"temporal_patch_size": 2, "out_hidden_size": 32} | vision,
        text_config=text | {"rope_parameters": _MROPE | text.pop("rope", {})},
        image_token_id=_IMAGE,
        video_token_id=21,
        vision_start_token_id=_BEGIN,
        vision_end_token_id=_END,
    )


def _config(family: str, text: dict):
    if family == "llava":
        return transformers.LlavaConfig(
            vision_config=_tower("clip_vision_model", projection_dim=16),
            text_config=text | {"model_type": "llama"},
            image_token_index=_IMAGE,
            image_seq_length=_NUM_IMAGE_TOKENS,
        )
    if family == "gemma3":
        layers = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
        return transformers.Gemma3Config(
            vision_config=_tower("siglip_vision_model", vision_use_head=False),
            text_config=text | layers,
            image_token_index=_IMAGE,
            boi_token_index=_BEGIN,
            eoi_token_index=_END,
            mm_tokens_per_image=_NUM_IMAGE_TOKENS,
        )
    if family == "paligemma":
        return transformers.PaliGemmaConfig(
            vision_config=_tower("siglip_vision_model", vision_use_head=False),
            text_config=text | {"model_type": "gemma"},
            image_token_index=_IMAGE,
            projection_dim=32,
        )
    if family == "mllama":
        tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_global_layers": 1}
        tower |= {"attention_heads": 2, "image_size": 8, "patch_size": 4, "max_num_tiles": 1, "vision_output_dim": 32}
        rope = {"rope_type": "default", "rope_theta": 10_000.0}
        return transformers.MllamaConfig(
            vision_config=tower | {"intermediate_layers_indices": [1], "supported_aspect_ratios": [[1, 1]]},
            text_config=text | {"cross_attention_layers": [1, 3], "rope_parameters": rope, "bos_token_id": 1},
            image_token_index=_IMAGE,
        )
    if family == "qwen2_5_vl":
        return _qwen("Qwen2_5_VLConfig", text, {"window_size": 8, "fullatt_block_indexes": [1, 3]})
    if family == "qwen3_vl":
        deep = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        return _qwen("Qwen3VLConfig", text | {"rope": {"mrope_interleaved": True}}, deep)
    return _qwen(
        "Qwen3_5Config", text | _LINEAR | {"rope": {"mrope_interleaved": True}}, {"num_position_embeddings": 16}
    )


VISION = {
    "llava": "LlavaForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "mllama": "MllamaForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
}


@dataclass(frozen=True)
class VisionTarget:
    """A tiny random vision-language model, its kind beside it."""

    family: str
    model: transformers.PreTrainedModel

    def prompt(self, tail: int = 3, seed: int = 3, image_seed: int = 0) -> dict[str, torch.Tensor]:
        """What a processor would give for text, an image, and `tail` more tokens."""
        before, after = prompt_ids(4, 20, seed), prompt_ids(max(tail, 1), 20, seed + 50)[:, :tail]
        image = torch.full((1, 1 if self.family == "mllama" else _NUM_IMAGE_TOKENS), _IMAGE)
        ids = torch.cat([before, torch.tensor([[_BEGIN]]), image, after], dim=1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        generator = torch.Generator().manual_seed(image_seed)
        pixels = torch.randn(16 * 3 * 2 * 4 * 4, generator=generator, dtype=self.model.dtype)
        if self.family.startswith("qwen"):
            inputs |= {"pixel_values": pixels.view(16, -1), "image_grid_thw": torch.tensor([[1, 4, 4]])}
            return inputs | {"mm_token_type_ids": (ids == _IMAGE).int()}
        inputs["pixel_values"] = pixels[: 3 * 8 * 8].view(1, 3, 8, 8)
        if self.family == "mllama":
            one = torch.ones(1, 1, dtype=torch.long)
            inputs["pixel_values"] = inputs["pixel_values"][None, None]
            inputs |= {"aspect_ratio_ids": one, "aspect_ratio_mask": one[None]}
            return inputs | {"cross_attention_mask": torch.ones(1, ids.shape[1], 1, 1, dtype=torch.long)}
        if self.family == "gemma3":
            inputs["token_type_ids"] = (ids == _IMAGE).long()
        if self.family == "paligemma":
            inputs["token_type_ids"] = torch.zeros_like(ids)
        return inputs


def make_vision_target(family: str, vocab_size: int = 24, seed: int = 0, dtype=torch.float64, **text) -> VisionTarget:
    """A tiny random vision-language model whose image matters to its text."""
    config = _config(family, _COMMON | {"vocab_size": vocab_size} | text)
    torch.manual_seed(seed)
    model = getattr(transformers, VISION[family])(config).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if "mm_input_projection" in name or (name.endswith("_gate") and "cross_attn" in name):
            torch.nn.init.normal_(parameter, std=1.0)  # zero at first: the image would say nothing
    return VisionTarget(family, model)
