"""Prompts to train with: read from JSONL, or begun so that the target writes them itself.

Owns: the order in which prompts are answered, and at which temperature. Does not own: line forms and chat template
(`texts`), decoding (`batched_decode`), the answers' file (`responses`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..loading.chat_template import encode_messages, messages_of, read_jsonl

_SENTINEL = "\u241f"  # a character that no chat template writes by itself


@dataclass(frozen=True)
class Prompt:
    """One prompt as token ids, chat template applied; `domain` groups prompts in reports and for balance."""

    domain: str
    input_ids: tuple[int, ...]


@dataclass(frozen=True)
class AnswerPlan:
    """One answer to make: which prompt, and the temperature to draw it at (0 = greedy)."""

    key: int
    prompt: Prompt
    temperature: float


def load_prompts(path: str | Path, tokenizer: PreTrainedTokenizerBase, max_length: int = 256) -> list[Prompt]:
    """Prompts of a JSONL file, chat template applied; those over `max_length` tokens are left out."""
    prompts = []
    for number, record in read_jsonl(path):
        ids = encode_messages(tokenizer, messages_of(record, f"{path}, line {number}"))
        if len(ids) <= max_length:
            prompts.append(Prompt(str(record.get("domain", "all")), tuple(ids)))
    if not prompts:
        raise ValueError(f"{path}: no prompt of at most {max_length} tokens in it.")
    return prompts


def user_turn_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that stand before a user's first words. Continued by the target, they make a prompt of its own."""
    if tokenizer.chat_template is None:
        raise ValueError("Prompts can only be invented with a tokenizer that has a chat template.")
    text = tokenizer.apply_chat_template([{"role": "user", "content": _SENTINEL}], tokenize=False)
    return tokenizer(text.split(_SENTINEL)[0], add_special_tokens=False)["input_ids"]


def plan_answers(prompts: Sequence[Prompt], num_answers: int, temperatures: Sequence[float]) -> list[AnswerPlan]:
    """Which prompts to answer, domains in turn, so that each has the same number of answers.

    A domain with few prompts is gone through again at the next temperature; a greedy answer is made once a prompt.
    """
    if not temperatures or any(t < 0 for t in temperatures):
        raise ValueError(f"temperatures must be one or more numbers >= 0, got {list(temperatures)}.")
    domains: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).append(prompt)
    passes = {name: _passes(members, temperatures) for name, members in domains.items()}
    plans: list[AnswerPlan] = []
    while passes and len(plans) < num_answers:
        for name in list(passes):
            choice = next(passes[name], None)
            if choice is None:
                del passes[name]
            elif len(plans) < num_answers:
                plans.append(AnswerPlan(len(plans), *choice))
    return plans


def _passes(members: list[Prompt], temperatures: Sequence[float]) -> Iterator[tuple[Prompt, float]]:
    greedy_done: set[int] = set()
    sampled = [t for t in temperatures if t > 0]
    for turn in range(1_000):
        drew = False
        for i, prompt in enumerate(members):
            temperature = temperatures[(i + turn) % len(temperatures)]
            if temperature == 0 and i in greedy_done:
                if not sampled:
                    continue
                temperature = sampled[turn % len(sampled)]
            if temperature == 0:
                greedy_done.add(i)
            drew = True
            yield prompt, temperature
        if not drew:
            return
