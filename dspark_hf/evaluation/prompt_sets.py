"""Prompt sets to measure with: JSONL files, our own, and public ones from the Hub by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from ..loading.chat_template import messages_of, read_jsonl

_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Conversation:
    """One prompt and the user turns that follow its answers; counted in `domain` and `source`."""

    domain: str
    source: str
    messages: list[dict[str, str]]
    later_turns: tuple[str, ...] = ()


@dataclass(frozen=True)
class _PublicSet:
    path: str
    domain: str
    turns: Callable[[dict[str, Any]], Sequence[str]]
    name: str | None = None
    split: str = "test"


PUBLIC_SETS = {
    "gsm8k": _PublicSet("openai/gsm8k", "math", lambda r: [r["question"] + _BOXED], name="main"),
    "math500": _PublicSet("HuggingFaceH4/MATH-500", "math", lambda r: [r["problem"] + _BOXED]),
    "humaneval": _PublicSet(
        "openai/openai_humaneval",
        "code",
        lambda r: ["Complete this Python function.\n```python\n" + r["prompt"] + "```"],
    ),
    "mbpp": _PublicSet("google-research-datasets/mbpp", "code", lambda r: [r["prompt"]], name="sanitized"),
    "mt-bench": _PublicSet("HuggingFaceH4/mt_bench_prompts", "chat", lambda r: r["prompt"], split="train"),
    "alpaca": _PublicSet(
        "tatsu-lab/alpaca", "chat", lambda r: ["\n\n".join(filter(None, (r["instruction"], r["input"])))], split="train"
    ),
}


def load_conversations(source: str | Path | None, limit: int | None = None) -> list[Conversation]:
    """Conversations of a JSONL file, of a public set by name, or (`None`) our own; the first `limit` of each source.

    Raises:
        OSError: no such file or set, or the Hub can't be reached. ValueError: a line without a prompt, or no prompts.
    """
    if isinstance(source, str) and source in PUBLIC_SETS:
        chosen = list(islice(_public_conversations(source), limit))
    else:
        path = Path(str(resources.files(__package__) / "prompts" / "bench.jsonl" if source is None else source))
        chosen = _first(_conversations_of(path), limit, lambda c: (c.domain, c.source))
    if not chosen:
        raise ValueError(f"{source}: no prompts in it.")
    return chosen


def first_of_each_domain(conversations: Sequence[Conversation], limit: int | None) -> list[Conversation]:
    """The first `limit` conversations of each domain; all of them where that is `None`."""
    return _first(conversations, limit, lambda c: c.domain)


def _first(
    conversations: Iterable[Conversation], limit: int | None, group: Callable[[Conversation], Hashable]
) -> list[Conversation]:
    counts: Counter[Hashable] = Counter()
    chosen = []
    for conversation in conversations:
        counts[group(conversation)] += 1
        if limit is None or counts[group(conversation)] <= limit:
            chosen.append(conversation)
    return chosen


def _conversations_of(path: Path) -> Iterator[Conversation]:
    if not path.is_file():
        raise OSError(f"No such file: {path}. Give a JSONL file or one of {', '.join(PUBLIC_SETS)}.")
    for number, record in read_jsonl(path):
        domain = str(record.get("domain", "all"))
        messages = messages_of(record, f"{path}, line {number}")
        later = tuple(str(turn) for turn in (record.get("turns") or [])[1:]) if not record.get("messages") else ()
        yield Conversation(domain, str(record.get("source", domain)), messages, later)


def _public_conversations(name: str) -> Iterator[Conversation]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise OSError(f"The prompt set {name} comes from the Hub: pip install 'dspark-hf[eval]' first.") from None
    public = PUBLIC_SETS[name]
    try:
        for record in load_dataset(public.path, public.name, split=public.split, streaming=True):
            first, *later = public.turns(record)
            yield Conversation(public.domain, name, [{"role": "user", "content": first}], tuple(later))
    except (OSError, ConnectionError) as error:
        raise OSError(f"The prompt set {name} ({public.path}) can't be had from the Hub: {error}") from None
