"""One prompt answered, with or without a drafter, and what it took.

Owns: chat template, limits, one `generate()` call, the record of it. Does not own: printing, comparing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, TextStreamer

from ..decoding.stats import GenerationStats, synchronize
from ..loading.chat_template import encode_messages
from ..loading.pairs import Target
from ..model.modeling_dspark import DSparkDraftModel
from .questions import DecodingOptions


@dataclass(frozen=True)
class Completion:
    """Text, token ids of the answer, seconds in all, and the drafter's statistics (`None` when decoded plainly)."""

    text: str
    token_ids: list[int]
    seconds: float
    stats: GenerationStats | None

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, the prefill included."""
        return len(self.token_ids) / self.seconds

    @property
    def accept_length(self) -> float:
        """τ, tokens committed per round; 1 for plain decoding."""
        return 1.0 if self.stats is None else self.stats.accept_length

    def to_dict(self) -> dict[str, Any]:
        """For JSON output."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "dspark": None if self.stats is None else self.stats.to_dict(),
        }


def check_length(target: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Refuse a prompt that leaves no room for `max_new_tokens` in the target's context."""
    limit = target.config.get_text_config().max_position_embeddings
    if prompt_tokens + max_new_tokens > limit:
        raise ValueError(
            f"The prompt has {prompt_tokens} tokens; with {max_new_tokens} new ones that is more than the target's context "
            f"of {limit}. Shorten the prompt or ask for fewer new tokens."
        )


def sampling_settings(options: DecodingOptions) -> dict[str, Any]:
    """As `generate()` takes them; the pure distribution but for what the options say (no default top-k)."""
    if options.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p, "top_k": 0}


def timed_generate(
    target: PreTrainedModel, input_ids: list[int], options: DecodingOptions, **method: Any
) -> tuple[list[int], float]:
    """The new token ids of one `generate()` call and its seconds; `method` are further arguments of the call."""
    ids = torch.tensor([input_ids], device=target.device)
    torch.manual_seed(options.seed)
    synchronize(target.device)
    start = time.perf_counter()
    output = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=options.max_new_tokens,
        **sampling_settings(options),
        **method,
    )
    synchronize(target.device)
    return output[0, len(input_ids) :].tolist(), time.perf_counter() - start


def complete(
    target: Target,
    prompt: str,
    options: DecodingOptions,
    drafter: DSparkDraftModel | None = None,
    stream: bool = False,
) -> Completion:
    """Answer `prompt`; `stream` prints the text to standard output as it comes.

    Raises:
        ValueError: an empty prompt, or one that does not fit the target's context.
    """
    if not prompt.strip():
        raise ValueError("The prompt is empty. Give some text with --prompt.")
    ids = encode_messages(target.tokenizer, [{"role": "user", "content": prompt}])
    check_length(target.model, len(ids), options.max_new_tokens)
    method: dict[str, Any] = {}
    if drafter is not None:
        method["assistant_model"] = drafter
    if stream:
        method["streamer"] = TextStreamer(target.tokenizer, skip_prompt=True, skip_special_tokens=True)
    answer, seconds = timed_generate(target.model, ids, options, **method)
    return Completion(
        text=target.tokenizer.decode(answer, skip_special_tokens=True),
        token_ids=answer,
        seconds=seconds,
        stats=None if drafter is None else drafter.last_generation,
    )
