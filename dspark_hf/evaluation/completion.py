"""One prompt answered, with or without a drafter, and what it took.

Owns: chat template, limits, one `generate()` call, the record of it. Does not own: printing, comparing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TextStreamer

from ..decoding.stats import GenerationStats
from ..modeling_dspark import DSparkDraftModel
from ..pairs import Target
from ..texts import encode_messages
from .speed import check_length


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


@dataclass(frozen=True)
class CompletionOptions:
    """`temperature` 0 is greedy; `seed` makes a sampled answer repeatable."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def complete(
    target: Target,
    prompt: str,
    options: CompletionOptions,
    drafter: DSparkDraftModel | None = None,
    stream: bool = False,
) -> Completion:
    """Answer `prompt`; `stream` prints the text to standard output as it comes.

    Raises:
        ValueError: empty prompt, a setting out of range, or a prompt that does not fit the target's context.
    """
    if not prompt.strip():
        raise ValueError("The prompt is empty. Give some text with --prompt.")
    if options.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {options.max_new_tokens}.")
    if options.temperature < 0 or not 0 < options.top_p <= 1:
        raise ValueError(
            f"temperature must be at least 0 and top_p in (0, 1], got {options.temperature:g} and {options.top_p:g}."
        )
    ids = encode_messages(target.tokenizer, [{"role": "user", "content": prompt}])
    check_length(target.model, len(ids), options.max_new_tokens)
    inputs = torch.tensor([ids], device=target.model.device)
    arguments: dict[str, Any] = {"do_sample": False}
    if options.temperature > 0:
        arguments = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p}
    if drafter is not None:
        arguments["assistant_model"] = drafter
    if stream:
        arguments["streamer"] = TextStreamer(target.tokenizer, skip_prompt=True, skip_special_tokens=True)
    torch.manual_seed(options.seed)
    start = time.perf_counter()
    output = target.model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=options.max_new_tokens, **arguments
    )
    seconds = time.perf_counter() - start
    answer = output[0, len(ids) :].tolist()
    return Completion(
        text=target.tokenizer.decode(answer, skip_special_tokens=True),
        token_ids=answer,
        seconds=seconds,
        stats=None if drafter is None else drafter.last_generation,
    )
