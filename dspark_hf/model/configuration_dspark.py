"""`DSparkConfig`: every field of a drafter, its unit and its check.

Owns: fields, defaults, validation. Does not own: the configs of other packagings (`packagings_dspark`).
Symbols: γ tokens drafted a round, d the drafter's hidden size, m tapped target layers, V the target's vocabulary.
This file travels with a checkpoint (`auto_map`), so it imports nothing else of the package but `packagings_dspark`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from .packagings_dspark import to_dspark_dict

MARKOV_HEAD_TYPES = ("none", "vanilla", "gated", "rnn")
LAYER_TYPES = ("full_attention", "sliding_attention")
LAYER_FORMS = ("qwen3", "gemma4", "eagle3")
# What calibration adds; it changes no weight and no cost.
CALIBRATION_FIELDS = (
    "confidence_temperatures",
    "confidence_shifts",
    "expected_acceptance",
    "acceptance_persistence",
)


class DSparkConfig(PreTrainedConfig):
    r"""Configuration of a [`DSparkDraftModel`] (paper §3.1; defaults are those of the released recipe where it has one).

    Args:
        vocab_size (`int`): the target's vocabulary V.
        draft_vocab_size (`int`, *optional*): tokens the drafter can propose; `None` or V means all of them.
        hidden_size (`int`): width d of drafter and of the target's embeddings and LM head.
        target_hidden_size (`int`, *optional*): width of one tapped layer; `hidden_size` where absent.
        num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, intermediate_size, hidden_act,
            rms_norm_eps, rope_parameters, attention_bias, attention_dropout, max_position_embeddings: as in `Qwen3Config`.
        layer_form (`str`): the family of the layers, `"qwen3"` or `"gemma4"`, or `"eagle3"`: one autoregressive layer (no
            blocks, no heads; γ = `block_size` is then the most tokens drafted a round).
        attention_k_eq_v (`bool`): in Gemma 4 layers, the values are the keys before their norm (no `v_proj`).
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` for each layer.
        sliding_window (`int`, *optional*): context tokens that a sliding layer sees.
        sliding_window_origin (`str`): the window is counted back from the `"anchor"` (speculators) or each `"query"` (z-lab).
        sliding_window_non_causal (`bool`): whether sliding layers look ahead inside the block.
        full_attention_causal (`bool`): whether full layers do not look ahead inside the block (z-lab's `is_causal`).
        block_size (`int`): inputs of the parallel stage: the anchor and `block_size - 1` mask tokens.
        min_block_size (`int`, *optional*): the shortest block the drafter was trained with; drafts of fewer than γ tokens
            then run a shorter parallel stage. `None`: always `block_size`.
        sample_from_anchor (`bool`): anchor-first layout (slot k predicts the token after it, γ = `block_size`);
            `False` is the fill-in layout (mask slots predict themselves, γ = `block_size - 1`).
        mask_token_id (`int`): the token that stands for a position still to be drafted.
        target_layer_ids (`list[int]`): tapped target layers; id i is the output of decoder layer i, -1 the embeddings.
        num_target_layers (`int`): decoder layers of the target; its last one can't be tapped.
        markov_head_type (`str`): `"none"`, `"vanilla"`, `"gated"` or `"rnn"` (§3.1, eqs. 5 and 6).
        markov_rank (`int`): rank r of the sequential head.
        enable_confidence_head (`bool`), confidence_head_with_markov (`bool`): the confidence head of eq. 7, with or
            without W_1[x_{k-1}] among its inputs.
        confidence_temperatures, confidence_shifts (`list[float]`, *optional*): calibration of the confidences, one entry for
            each of γ positions: c_k = σ(logit_k / T_k + s_k) (§3.2.1; `dspark-hf calibrate`). `None`: not calibrated.
        context_window (`int`, *optional*): a draft sees this many last tokens of the text (up to a quarter more, because what
            lies before is dropped in pieces) and its first `context_sinks`. `None`: all of them. May be set at run time.
        context_sinks (`int`): see `context_window`.
        expected_acceptance (`list[float]`, *optional*): at calibration, the share of x_k that stood where x_<k did.
        acceptance_persistence (`float`, *optional*): share of a position's deviation from that, in logits, that carries on
            to the next position.
        embedding_scale (`float`, *optional*): the embedding table's rows are multiplied by it, whatever the target's own
            embedding module does to them. `None`: they are used as that module gives them, own copies as they are.
        output_scale (`float`): the LM head's output is multiplied by it, before the soft cap.
        final_logit_softcapping (`float`, *optional*): the target's soft cap of its logits.
        has_own_embeddings (`bool`): the checkpoint brings an embedding of its own, else the target's is used.
        has_own_lm_head (`bool`, *optional*): the same of the LM head; as `has_own_embeddings` where absent.
        num_anchors (`int`): blocks drawn per sequence in training.
        pad_token_id, bos_token_id, eos_token_id: the target's (`pipeline()` compares them).
        target_model_name_or_path (`str`, *optional*): the target this drafter was trained for.
    """

    model_type = "dspark"
    _auto_class: ClassVar[str | None] = "AutoConfig"  # as `DSparkDraftModel`'s

    vocab_size: int = 151936
    draft_vocab_size: int | None = None
    hidden_size: int = 2560
    target_hidden_size: int | None = None
    intermediate_size: int = 9728
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float = 0.0
    layer_form: str = "qwen3"
    attention_k_eq_v: bool = False
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    sliding_window_origin: str = "anchor"
    sliding_window_non_causal: bool = False
    full_attention_causal: bool = False
    tie_word_embeddings: bool = False

    block_size: int = 7
    min_block_size: int | None = None
    sample_from_anchor: bool = True
    mask_token_id: int = 0
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    markov_head_type: str = "vanilla"
    markov_rank: int = 256
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    context_window: int | None = None
    context_sinks: int = 4
    confidence_temperatures: list[float] | None = None
    confidence_shifts: list[float] | None = None
    expected_acceptance: list[float] | None = None
    acceptance_persistence: float | None = None
    embedding_scale: float | None = None
    output_scale: float = 1.0
    final_logit_softcapping: float | None = None
    has_own_embeddings: bool = False
    has_own_lm_head: bool | None = None
    num_anchors: int = 512
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    target_model_name_or_path: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 1_000_000.0}
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.target_layer_ids is None:
            self.target_layer_ids = [1]
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.has_own_lm_head is None:
            self.has_own_lm_head = self.has_own_embeddings
        if self.markov_head_type == "none" or not self.markov_rank:
            self.markov_head_type, self.markov_rank = "none", 0
        if not self.enable_confidence_head or not self.markov_rank:
            self.confidence_head_with_markov = False
        super().__post_init__(**kwargs)
        self._check()

    def _check(self) -> None:
        def require(condition: bool, message: str) -> None:
            if not condition:
                raise ValueError(f"DSparkConfig: {message}")

        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}.")
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
            f"({self.num_key_value_heads}).",
        )
        require(
            self.markov_head_type in MARKOV_HEAD_TYPES,
            f"markov_head_type must be one of {', '.join(MARKOV_HEAD_TYPES)}, got {self.markov_head_type!r}.",
        )
        require(
            len(self.layer_types) == self.num_hidden_layers and set(self.layer_types) <= set(LAYER_TYPES),
            f"layer_types must name {self.num_hidden_layers} layers out of {', '.join(LAYER_TYPES)}, got {self.layer_types}.",
        )
        require(
            "sliding_attention" not in self.layer_types or bool(self.sliding_window),
            "sliding layers need a sliding_window of at least 1 token.",
        )
        require(
            self.sliding_window_origin in ("anchor", "query"),
            f"sliding_window_origin must be 'anchor' or 'query', got {self.sliding_window_origin!r}.",
        )
        require(
            self.layer_form in LAYER_FORMS,
            f"layer_form must be one of {', '.join(LAYER_FORMS)}, got {self.layer_form!r}.",
        )
        require(
            self.layer_form == "gemma4" or not self.attention_k_eq_v,
            f"attention_k_eq_v is for layer_form 'gemma4', got {self.layer_form!r}.",
        )
        if self.is_autoregressive:
            require(
                self.num_hidden_layers == 1 and self.layer_types == ["full_attention"],
                f"layer_form 'eagle3' means one full-attention layer, got {self.num_hidden_layers} ({self.layer_types}).",
            )
            require(
                not self.markov_rank and not self.enable_confidence_head and self.min_block_size is None,
                "layer_form 'eagle3' has no Markov head, no confidence head and no min_block_size.",
            )
            require(
                self.sample_from_anchor, "layer_form 'eagle3' drafts from the anchor: sample_from_anchor must be true."
            )
        for name in ("embedding_scale", "output_scale", "final_logit_softcapping"):
            value = getattr(self, name)
            require(value is None or value > 0.0, f"{name} must be above 0, got {value}.")
        require(self.num_draft_tokens >= 1, f"block_size {self.block_size} leaves no token to draft.")
        require(
            self.min_block_size is None or 1 <= self.min_block_size <= self.block_size,
            f"min_block_size must be between 1 and block_size ({self.block_size}), got {self.min_block_size}.",
        )
        require(
            0 <= self.mask_token_id < self.vocab_size,
            f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}.",
        )
        require(
            1 <= self.draft_vocab_size <= self.vocab_size,
            f"draft_vocab_size must be between 1 and vocab_size ({self.vocab_size}), got {self.draft_vocab_size}.",
        )
        for name in ("confidence_temperatures", "confidence_shifts", "expected_acceptance"):
            values = getattr(self, name)
            require(
                values is None or len(values) == self.num_draft_tokens,
                f"{name} must have one entry for each of {self.num_draft_tokens} drafted tokens, got {values}.",
            )
        require(
            min(self.confidence_temperatures or [1.0]) > 0.0,
            f"confidence_temperatures must be above 0, got {self.confidence_temperatures}.",
        )
        require(
            self.acceptance_persistence is None or 0.0 <= self.acceptance_persistence <= 1.0,
            f"acceptance_persistence must be between 0 and 1, got {self.acceptance_persistence}.",
        )
        require(
            self.expected_acceptance is None or all(0.0 <= p <= 1.0 for p in self.expected_acceptance),
            f"expected_acceptance must hold probabilities, got {self.expected_acceptance}.",
        )
        self.check_context_window()
        require(len(self.target_layer_ids) >= 1, "target_layer_ids must name at least one target layer.")
        if self.num_target_layers is not None:
            allowed = range(-1, self.num_target_layers - 1)
            wrong = [i for i in self.target_layer_ids if i not in allowed]
            require(
                not wrong,
                f"target_layer_ids {wrong} are outside -1..{self.num_target_layers - 2}: the target has "
                f"{self.num_target_layers} layers and its last one can't be tapped (it is reported after the final norm).",
            )

    def check_context_window(self) -> None:
        """Refuse a window that can't be; it may be set at run time, so it is looked at where it is used too."""
        window, sinks = self.context_window, self.context_sinks
        if window is not None and (type(window) is not int or window < 1):
            raise ValueError(f"DSparkConfig: context_window must be None or a whole number from 1, got {window!r}.")
        if not (isinstance(sinks, int) and sinks >= 0):
            raise ValueError(f"DSparkConfig: context_sinks must be a whole number from 0, got {sinks!r}.")

    @property
    def num_draft_tokens(self) -> int:
        """γ, the most tokens one round can draft."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def is_autoregressive(self) -> bool:
        """Whether tokens are drafted one forward each (Eagle3), and not a block at once."""
        return self.layer_form == "eagle3"

    @property
    def is_calibrated(self) -> bool:
        """Whether the confidences were calibrated (`dspark-hf calibrate`)."""
        return self.confidence_temperatures is not None

    @property
    def has_reduced_vocab(self) -> bool:
        """Whether the drafter proposes from fewer tokens than the target knows."""
        return self.draft_vocab_size != self.vocab_size

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """As in transformers, and it also takes the configs of the other packagings (`packagings_dspark`)."""
        return super().from_dict(to_dspark_dict(config_dict), **kwargs)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs: Any):
        """As in transformers, with other packagings already translated (so that their `model_type` raises no warning).

        `weight_shapes` (by name), where they are known, settle what such a config leaves open.
        """
        shapes = kwargs.pop("weight_shapes", None)
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return to_dspark_dict(config_dict, shapes), kwargs


__all__ = ["DSparkConfig"]
