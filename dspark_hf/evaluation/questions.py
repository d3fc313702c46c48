"""What is asked: how an answer is to be decoded, and files of prompts with settings of their own. Loads without torch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PROMPT_KEYS = {
    "prompt",
    "turns",
    "messages",
    "domain",
    "source",
    "id",
}  # domain, source and id are for the user's own use


@dataclass(frozen=True)
class DecodingOptions:
    """How one answer is decoded; `temperature` 0 is greedy, `seed` starts the draws."""

    max_new_tokens: int = field(default=256, metadata={"help": "Longest answer, in tokens."})
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy."})
    top_p: float = field(default=1.0, metadata={"help": "Draw from the most likely tokens of this probability mass."})
    seed: int = field(default=0, metadata={"help": "Seed of the draws."})

    def __post_init__(self) -> None:
        if not _is_number(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` must be a whole number and at least 1, got {self.max_new_tokens!r}.")
        if not _is_number(self.temperature, int, float) or not 0 <= self.temperature < math.inf:
            raise ValueError(f"`temperature` must be a number, at least 0 and finite, got {self.temperature!r}.")
        if not _is_number(self.top_p, int, float) or not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must be a number above 0 and at most 1, got {self.top_p!r}.")
        if not _is_number(self.seed, int) or not -(2**63) <= self.seed < 2**64:  # what torch takes
            raise ValueError(f"`seed` must be a whole number of at most 64 bits, got {self.seed!r}.")

    @property
    def arguments(self) -> dict[str, Any]:
        """As `generate()` takes them: the pure distribution but for what the options say (no default top-k)."""
        if self.temperature == 0:
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        drawn = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        return {"max_new_tokens": self.max_new_tokens} | drawn


def _is_number(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


@dataclass(frozen=True)
class Question:
    """One prompt with its settings; `where` it stands, for errors."""

    messages: list[dict[str, str]]
    options: DecodingOptions
    where: str


def read_questions(path: Path, options: DecodingOptions) -> list[Question]:
    """The lines of a JSONL file; `max_new_tokens`, `temperature`, `top_p` and `seed` in a line go before `options`.

    Raises:
        ValueError: a line that is no prompt, a setting that is not allowed, an unknown key; it names the line.
        OSError: no such file.
    """
    from ..loading.chat_template import messages_of, read_jsonl

    settings = [setting.name for setting in dataclasses.fields(DecodingOptions)]
    questions = []
    for number, record in read_jsonl(path):
        where = f"{path}, line {number}"
        if unknown := sorted(record.keys() - _PROMPT_KEYS - {*settings}):
            raise ValueError(
                f"{where}: unknown {', '.join(map(repr, unknown))}. Allowed: {', '.join([*sorted(_PROMPT_KEYS), *settings])}."
            )
        try:
            chosen = dataclasses.replace(options, **{name: record[name] for name in settings if name in record})
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        questions.append(Question(messages_of(record, where), chosen, where))
    if not questions:
        raise ValueError(f"{path} has no prompts.")
    return questions
