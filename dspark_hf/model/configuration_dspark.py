"""`DSparkConfig`: every field of a drafter, its unit and its check.

Symbols: γ tokens drafted a round, d the drafter's hidden size, m tapped target layers, V the target's vocabulary.
This file travels with a checkpoint (`auto_map`), so it imports nothing else of the package but `packagings_dspark`.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import field, fields
from types import UnionType
from typing import Any, ClassVar, get_args, get_origin

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .packagings_dspark import check_taps, to_dspark_dict

# What calibration adds; it changes no weight and no cost.
CALIBRATION_FIELDS = (
    "confidence_temperatures",
    "confidence_shifts",
    "expected_acceptance",
    "acceptance_persistence",
)
_LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "least": (operator.ge, "at least"),
    "most": (operator.le, "at most"),
    "above": (operator.gt, "above"),
    "one_of": (lambda value, allowed: value in allowed, "one of"),
}


def _limited(default: Any, **limits: Any) -> Any:
    """A field that may only hold values within `limits` (names of `_LIMITS`), or lists of such, or None."""
    return field(default=default, metadata=limits)


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
        context_window (`int`, *optional*), context_sinks (`int`): a draft sees this many last tokens of the text (up to a
            quarter more, because what lies before is dropped in pieces) and this many first ones. `None`: all of them. May
            be set at run time.
        expected_acceptance (`list[float]`, *optional*): at calibration, the share of x_k accepted where x_<k were.
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

    vocab_size: int = _limited(151936, least=1)
    draft_vocab_size: int | None = _limited(None, least=1)
    hidden_size: int = _limited(2560, least=1)
    target_hidden_size: int | None = _limited(None, least=1)
    intermediate_size: int = _limited(9728, least=1)
    num_hidden_layers: int = _limited(5, least=1)
    num_attention_heads: int = _limited(32, least=1)
    num_key_value_heads: int = _limited(8, least=1)
    head_dim: int = _limited(128, least=1)
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float = 0.0
    layer_form: str = _limited("qwen3", one_of=("qwen3", "gemma4", "eagle3"))
    attention_k_eq_v: bool = False
    layer_types: list[str] | None = _limited(None, one_of=("full_attention", "sliding_attention"))
    sliding_window: int | None = None
    sliding_window_origin: str = _limited("anchor", one_of=("anchor", "query"))
    sliding_window_non_causal: bool = False
    full_attention_causal: bool = False
    tie_word_embeddings: bool = False

    block_size: int = _limited(7, least=1)
    min_block_size: int | None = _limited(None, least=1)
    sample_from_anchor: bool = True
    mask_token_id: int = _limited(0, least=0)
    target_layer_ids: list[int] | None = _limited(None, least=-1)
    num_target_layers: int | None = None
    markov_head_type: str = _limited("vanilla", one_of=("none", "vanilla", "gated", "rnn"))
    markov_rank: int = _limited(256, least=0)
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    context_window: int | None = None
    context_sinks: int = 4
    confidence_temperatures: list[float] | None = _limited(None, above=0)
    confidence_shifts: list[float] | None = None
    expected_acceptance: list[float] | None = _limited(None, least=0, most=1)
    acceptance_persistence: float | None = _limited(None, least=0, most=1)
    embedding_scale: float | None = _limited(None, above=0)
    output_scale: float = _limited(1.0, above=0)
    final_logit_softcapping: float | None = _limited(None, above=0)
    has_own_embeddings: bool = False
    has_own_lm_head: bool | None = None
    num_anchors: int = 512
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    target_model_name_or_path: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        _refuse(self._wrong_fields())
        if self.rope_parameters is None and not kwargs.get("rope_scaling"):
            self.rope_parameters = {"rope_type": "default", "rope_theta": kwargs.pop("rope_theta", None) or 1_000_000.0}
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
        _refuse(self._conflicts())

    def _wrong_fields(self) -> Iterator[str]:
        """What is of another type than its field, or outside its limits."""
        for known in fields(self):
            if known.name not in DSparkConfig.__annotations__:
                continue  # transformers' own
            value, kind = getattr(self, known.name), known.type
            if not _is_of_type(value, kind):
                yield f"{known.name} must be of the type {kind.__name__ if isinstance(kind, type) else kind}, got {value!r}."
            for limit, bound in known.metadata.items():
                holds, words = _LIMITS[limit]
                values = value if isinstance(value, list | tuple) else [value]
                if value is not None and not all(holds(item, bound) for item in values):
                    allowed = ", ".join(bound) if isinstance(bound, tuple) else bound
                    yield f"{known.name} must be {words} {allowed}, got {value!r}."

    def _conflicts(self) -> Iterator[str]:
        """What of one field does not go with another."""
        if self.num_attention_heads % self.num_key_value_heads:
            yield (
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})."
            )
        if len(self.layer_types) != self.num_hidden_layers:
            yield f"layer_types must name {self.num_hidden_layers} layers, got {self.layer_types}."
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            yield "sliding layers need a sliding_window of at least 1 token."
        if self.attention_k_eq_v and self.layer_form != "gemma4":
            yield f"attention_k_eq_v is for layer_form 'gemma4', got {self.layer_form!r}."
        if self.is_autoregressive:
            if self.num_hidden_layers != 1 or self.layer_types != ["full_attention"]:
                yield f"layer_form 'eagle3' means one full-attention layer, got {self.num_hidden_layers} ({self.layer_types})."
            if self.markov_rank or self.enable_confidence_head or self.min_block_size is not None:
                yield "layer_form 'eagle3' has no Markov head, no confidence head and no min_block_size."
            if not self.sample_from_anchor:
                yield "layer_form 'eagle3' drafts from the anchor: sample_from_anchor must be true."
        if self.num_draft_tokens < 1:
            yield f"block_size {self.block_size} leaves no token to draft."
        for name, most in (("min_block_size", "block_size"), ("draft_vocab_size", "vocab_size")):
            value, bound = getattr(self, name), getattr(self, most)
            if value is not None and value > bound:
                yield f"{name} must be between 1 and {most} ({bound}), got {value}."
        if self.mask_token_id >= self.vocab_size:
            yield f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}."
        for name in ("confidence_temperatures", "confidence_shifts", "expected_acceptance"):
            values = getattr(self, name)
            if values is not None and len(values) != self.num_draft_tokens:
                yield f"{name} must have one entry for each of {self.num_draft_tokens} drafted tokens, got {values}."
        yield from self._wrong_rope()
        self.check_context_window()
        check_taps(self.target_layer_ids, "DSparkConfig: target_layer_ids")
        depth = self.num_target_layers
        if wrong := [i for i in self.target_layer_ids if depth is not None and i > depth - 2]:
            yield (
                f"target_layer_ids {wrong} are outside -1..{depth - 2}: the target has {depth} layers and its last one can't "
                "be tapped (it is reported after the final norm)."
            )

    def _wrong_rope(self) -> Iterator[str]:
        """One entry for all layers, of a kind that transformers has, with all that this kind needs."""
        rope, kinds = self.rope_parameters, {"default": None, **ROPE_INIT_FUNCTIONS}
        base, kind = rope.get("rope_theta"), rope.get("rope_type")
        if kind not in kinds or not _is_of_type(base, float) or base <= 0:
            yield f"rope_parameters must have a rope_theta above 0 and a rope_type out of {', '.join(kinds)}, got {rope}."
        try:
            if (frequencies := kinds[kind]) is not None:
                frequencies(self, None)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            yield f"rope_parameters of the rope_type {kind!r} lack a key or have a wrong one ({error}), got {rope}."

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
        return self.confidence_temperatures is not None and self.enable_confidence_head

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


def _refuse(faults: Iterator[str]) -> None:
    for fault in faults:
        raise ValueError(f"DSparkConfig: {fault}")


def _is_of_type(value: Any, kind: Any) -> bool:
    """Whether a value is what a field's annotation says. Whole numbers are numbers, booleans are none."""
    if isinstance(kind, UnionType):
        return any(_is_of_type(value, part) for part in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list | tuple) and all(_is_of_type(item, get_args(kind)[0]) for item in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


__all__ = ["DSparkConfig"]
