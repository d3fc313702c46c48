"""Records of answered turns, and the file that keeps them while a run goes on.

Owns: one answered turn as a record, going on with a file that an interrupted run left. Does not own: answering.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..loading.files import write_text
from ..loading.pairs import Target
from .completion import DecodingOptions
from .prompt_sets import Conversation


@dataclass
class Sample:
    """One answered turn: its rounds as (drafted, accepted), raw confidence logits of each round, or what went wrong.

    text: digest of the text that the rounds were replayed on, if they were.
    """

    index: int
    turn: int
    domain: str
    source: str
    tokens: int = 0
    seconds: float = 0.0
    rounds: list[tuple[int, int]] = field(default_factory=list)
    logits: list[list[float]] = field(default_factory=list)
    parked: int = 0
    error: str | None = None
    text: str = ""

    def __post_init__(self) -> None:
        self.rounds = [(drafted, accepted) for drafted, accepted in self.rounds]  # JSON has lists


@dataclass
class AnsweredTurn:
    """The target's own text of one turn, by token ids, or what went wrong."""

    index: int
    turn: int
    prompt_ids: list[int] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def digest(self) -> str:
        """Tells this answer from another one."""
        return hashlib.sha256(json.dumps(self.answer_ids).encode()).hexdigest()[:16]


Record = TypeVar("Record", Sample, AnsweredTurn)


def settings_of(
    target: Target, conversations: Sequence[Conversation], options: DecodingOptions, **more: Any
) -> dict[str, Any]:
    """What a file of records is good for: no other target, prompts or options."""
    return {
        "target": target.name,
        "dtype": str(target.model.dtype),
        **more,
        "prompts": hashlib.sha256(json.dumps([asdict(c) for c in conversations]).encode()).hexdigest(),
        "options": asdict(options),
    }


class Journal(Generic[Record]):
    """Records of whole conversations, in `file` where there is one; an earlier run's are taken over from it.

    A conversation with a turn that failed, or that was cut off, is not taken over: it is to be answered again.

    Raises:
        ValueError: `file` was written with other settings.
    """

    def __init__(
        self, kind: type[Record], file: Path | None, settings: dict[str, Any], conversations: Sequence[Conversation]
    ) -> None:
        self.file = file
        known: list[Record] = _read(kind, file, settings)
        self.done = {r.index for r in known if r.error is None and r.turn == len(conversations[r.index].later_turns)}
        self.records: list[Record] = [r for r in known if r.index in self.done]
        if file is not None:
            write_text("".join(json.dumps(r) + "\n" for r in (settings, *map(asdict, self.records))), file)

    def add(self, records: Sequence[Record]) -> None:
        """Keep the records of one conversation."""
        self.records += records
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps(asdict(r)) + "\n" for r in records)


def _read(kind: type[Record], file: Path | None, settings: dict[str, Any]) -> list[Record]:
    records: list[Record] = []
    if file is None or not file.exists():
        return records
    header, *lines = file.read_text(encoding="utf-8").splitlines() or [""]
    try:
        same = json.loads(header) == settings
    except ValueError:
        same = False
    if not same:
        raise ValueError(f"{file} was written with other settings or prompts. Remove it, or give another folder.")
    for line in lines:
        try:
            records.append(kind(**json.loads(line)))
        except (ValueError, TypeError):  # cut off, or another release's: its conversation is done again
            break
    return records
