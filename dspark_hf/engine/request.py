"""One request of the batch engine: prepared exactly as `generate()` would, its text, its outcome as a record.

Axes: L tokens of the text, V vocabulary.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode

from ..decoding.ragged_target import place
from ..decoding.sequence import TextSequence
from ..decoding.statistics import GenerationStats

FinishReason = Literal["stop", "length", "cancelled", "interrupted", "error"]


@dataclass(frozen=True)
class RequestOutput:
    """What became of one request.

    token_ids: the new tokens, the one that ended the text included. finish_reason: "stop" (end-of-sequence token or another
    criterion), "length", "cancelled", "interrupted" (Ctrl-C) or "error", with the exception in `error`; the tokens are those
    committed until then. stats: rounds, acceptance, seconds; `total_seconds` counts from `add`, waiting included.
    scores, logits: one [1, V] for each new token, where the request's config asks for them (`return_dict_in_generate`).
    """

    id: int
    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason
    error: Exception | None
    stats: GenerationStats
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without scores and the history of rounds."""
        stats = self.stats.to_dict()
        del stats["history"]
        return {
            "id": self.id,
            "prompt_tokens": len(self.prompt_ids),
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "error": None if self.error is None else f"{type(self.error).__name__}: {self.error}",
            "stats": stats,
        }


@dataclass(frozen=True)
class Prepared:
    """A request as `generate()` understands it."""

    input_ids: torch.LongTensor  # [1, L]
    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList


def prompt_tensor(prompt: Sequence[int] | torch.Tensor, target: PreTrainedModel) -> torch.LongTensor:
    """A prompt as [1, L] on the target's device.

    Raises:
        ValueError: no tokens, more than one sequence, no integers, or one that is not in the target's vocabulary.
    """
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0)
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or not len(ids) or ids.is_floating_point():
        raise ValueError(
            f"A prompt is a list of token ids, or a tensor [L] or [1, L] of them, with at least one; got {_short(prompt)}."
        )
    vocabulary = target.config.get_text_config().vocab_size
    if wrong := [i for i in (int(ids.min()), int(ids.max())) if not 0 <= i < vocabulary]:
        raise ValueError(f"Token id {wrong[0]} is not in the target's vocabulary of {vocabulary}.")
    return ids.to(target.device, torch.long)[None]


def _short(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def prepare(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,  # [1, L]
    generation_config: GenerationConfig | None,
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList | None,
    settings: dict[str, Any],
) -> Prepared:
    """Let `generate()` itself work out config, processors and criteria, up to the point where decoding would begin.

    Raises:
        ValueError: settings that `generate()` or the engine refuses, a prompt that fills the target's context.
    """
    context = _context_of(target)
    if context is not None and input_ids.shape[1] >= context:
        raise ValueError(
            f"The prompt has {input_ids.shape[1]} tokens, which leaves no room in the target's context of {context}. Shorten it."
        )
    if unknown := sorted(settings.keys() - vars(GenerationConfig()).keys() - {"prefix_allowed_tokens_fn", "tokenizer"}):
        raise ValueError(
            f"The batch engine has no use for {', '.join(unknown)}: it serves text prompts without padding, with the fields of "
            "GenerationConfig as settings, logits processors, stopping criteria, prefix_allowed_tokens_fn and tokenizer."
        )
    settings = dict(settings)
    generation_config, stopping_criteria = _with_stop_strings(target, generation_config, stopping_criteria, settings)
    found: list[Prepared] = []

    def capture(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        found.append(Prepared(input_ids, generation_config, logits_processor, stopping_criteria))
        return input_ids

    target.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        generation_config=generation_config,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        custom_generate=capture,
        **settings,
    )
    config = found[0].config
    mode = config.get_generation_mode()
    guided = config.guidance_scale not in (None, 1.0)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE) or config.num_return_sequences > 1 or guided:
        raise ValueError(
            "The batch engine decodes greedily or by sampling, one text a request; got "
            f"{mode.value.replace('_', ' ')}, num_beams {config.num_beams}, num_return_sequences {config.num_return_sequences}"
            f"{f' and guidance_scale {config.guidance_scale}' if guided else ''}. Add a request for each text."
        )
    return found[0]


def check_room(prepared: Prepared, target: PreTrainedModel, most: int | None) -> None:
    """Refuse a request whose text may outgrow the target's context, or `most` tokens."""
    prompt, capacity, context = prepared.input_ids.shape[1], prepared.config.max_length, _context_of(target)
    if context is not None and capacity > context:
        raise ValueError(
            f"The prompt has {prompt} tokens; with {capacity - prompt} new ones that is more than the target's context of "
            f"{context}. Shorten the prompt or ask for fewer new tokens."
        )
    if most is not None and capacity > most:
        raise ValueError(
            f"The request may come to hold {capacity} tokens, more than max_tokens_in_cache allows in all ({most}). Shorten the "
            "prompt, ask for fewer new tokens or raise max_tokens_in_cache."
        )


def _context_of(target: PreTrainedModel) -> int | None:
    return target.config.get_text_config().to_dict().get("max_position_embeddings")


def _with_stop_strings(
    target: PreTrainedModel,
    config: GenerationConfig | None,
    criteria: StoppingCriteriaList | None,
    settings: dict[str, Any],
) -> tuple[GenerationConfig | None, StoppingCriteriaList | None]:
    """`generate()` hands no tokenizer on to a method that is not its own, so stop strings become a criterion here."""
    tokenizer = settings.pop("tokenizer", None)
    strings = settings.pop("stop_strings", None)
    if strings is None and (config or target.generation_config).stop_strings is not None:
        config = copy.deepcopy(config or target.generation_config)
        strings, config.stop_strings = config.stop_strings, None
    if strings is None:
        return config, criteria
    if tokenizer is None:
        raise ValueError("stop_strings need the tokenizer: pass tokenizer=... to add() too.")
    return config, StoppingCriteriaList([*(criteria or []), StopStringCriteria(tokenizer, strings)])


class Request(TextSequence):
    """A text in the engine. to_read: tokens of the text when it was admitted; they are read before it decodes."""

    def __init__(self, prepared: Prepared, *args: Any, **settings: Any) -> None:
        super().__init__(prepared.input_ids, prepared.config, prepared.processors, prepared.criteria, *args, **settings)
        self.prompt_ids = prepared.input_ids
        self.started = time.perf_counter()
        self.to_read = 0

    @property
    def capacity(self) -> int:
        """Most tokens it may come to hold."""
        return self.config.max_length

    @property
    def is_reading(self) -> bool:
        """Whether some of the text that it was admitted with is not in the cache yet."""
        return self.slot is not None and self.slot.length < self.to_read

    @property
    def unread(self) -> torch.LongTensor:
        """Tokens of the text that are not in the cache. [L]"""
        return self.input_ids[0, place(self).length :]

    @property
    def reason(self) -> FinishReason:
        """Why a finished text ended."""
        stops = self.config.eos_token_id
        ends = {stops} if isinstance(stops, int) else set(stops or ())
        ran_out = self.length >= self.config.max_length
        return "length" if ran_out and int(self.input_ids[0, -1]) not in ends else "stop"

    def output(self, reason: FinishReason, error: Exception | None = None) -> RequestOutput:
        """Its record, at its end."""
        self.stats.total_seconds = time.perf_counter() - self.started
        return RequestOutput(
            id=self.id,
            prompt_ids=self.prompt_ids[0].tolist(),
            token_ids=self.input_ids[0, self.prompt_ids.shape[1] :].tolist(),
            finish_reason=reason,
            error=error,
            stats=self.stats,
            scores=_ordinary(self.scores),
            logits=_ordinary(self.logits),
        )


def _ordinary(rows: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, ...] | None:
    """Tensors for any use; rounds run in inference mode."""
    with torch.inference_mode(False):
        return None if rows is None else tuple(row.clone() for row in rows)
