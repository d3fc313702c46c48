"""How drafts fare on real prompts: conversations decoded and their rounds kept, in a file that another run goes on with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from tqdm import tqdm
from transformers.utils import logging

from ..loading.chat_template import encode_messages
from ..loading.files import write_text
from ..loading.pairs import Target
from ..model.modeling_dspark import DSparkDraftModel
from .completion import check_length, timed_generate, using_policy
from .prompt_sets import Conversation
from .questions import DecodingOptions

logger = logging.get_logger(__name__)


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
        return digest(self.answer_ids)


Record = TypeVar("Record", Sample, AnsweredTurn)


def digest(data: Any) -> str:
    """A short name for what JSON can hold."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def fingerprint(drafter: DSparkDraftModel) -> str:
    """Tells this drafter from another one, and from itself before more training or calibration."""
    config = {k: v for k, v in drafter.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    weights = [float(p.detach().cpu().double().sum()) for p in drafter.parameters()]
    return digest([config, weights, drafter.num_candidates(drafter.options.top_candidates)])


def settings_of(
    target: Target, conversations: Sequence[Conversation], options: DecodingOptions, **more: Any
) -> dict[str, Any]:
    """What a file of records is good for: no other target, prompts or options."""
    return {
        "target": target.name,
        "dtype": str(target.model.dtype),
        **more,
        "prompts": digest([asdict(c) for c in conversations]),
        "options": asdict(options),
    }


def turn_seed(options: DecodingOptions, index: int, turn: int) -> int:
    """Starts the draws of one turn of one conversation, whatever was decoded before it."""
    return options.seed + 1000 * index + turn


def fault(record: AnsweredTurn | Sample, error: Exception) -> str:
    """What is kept of an error; says it too."""
    text = f"{type(error).__name__}: {error}"
    logger.warning(f"Prompt {record.index + 1}, turn {record.turn + 1} failed: {text}")
    return text


class Journal(Generic[Record]):
    """Records of whole conversations, in `file` where there is one; an earlier run's are taken over from it.

    A conversation with a turn that failed, or that was cut off, is not taken over: it is to be answered again.

    Raises:
        ValueError: `file` was written with other settings.
    """

    def __init__(
        self, kind: type[Record], file: Path | None, settings: dict[str, Any], conversations: Sequence[Conversation]
    ) -> None:
        self.file: Path | None = file
        known: list[Record] = []
        if file is not None and file.exists():
            header, *lines = file.read_text(encoding="utf-8").splitlines() or [""]
            if header != json.dumps(settings):
                raise ValueError(
                    f"{file} was written with other settings or prompts. Remove it, or give another folder."
                )
            for line in lines:
                try:
                    known.append(kind(**json.loads(line)))
                except (ValueError, TypeError):  # cut off, or another release's: its conversation is done again
                    break
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


def collect(
    target: Target,
    drafter: DSparkDraftModel,
    conversations: Sequence[Conversation],
    options: DecodingOptions,
    policy: str = "full",
    file: Path | None = None,
    description: str = "eval",
) -> list[Sample]:
    """Decode every turn of every conversation and keep its rounds; with `file`, go on where an earlier run stopped.

    A turn that fails is kept with its error, and the rest of its conversation is left out; another run tries it again.

    Raises:
        ValueError: `file` was written with other settings.
    """
    settings = settings_of(target, conversations, options, drafter=fingerprint(drafter), policy=policy)
    journal = Journal(Sample, file, settings, conversations)
    for index, conversation in enumerate(tqdm(conversations, desc=description, unit="prompt", disable=None)):
        if index not in journal.done:
            with using_policy(policy, target.model, drafter, lookup=False):  # the drafter is judged
                journal.add(_answer(target, drafter, index, conversation, options))
    return journal.records


def _answer(
    target: Target, drafter: DSparkDraftModel, index: int, conversation: Conversation, options: DecodingOptions
) -> list[Sample]:
    messages, samples = list(conversation.messages), []
    for number, later in enumerate((*conversation.later_turns, None)):
        sample = Sample(index, number, conversation.domain, conversation.source)
        samples.append(sample)
        try:
            ids = encode_messages(target.tokenizer, messages)
            check_length(target.model, len(ids), options.max_new_tokens)
            seeded = replace(options, seed=turn_seed(options, index, number))
            answer, sample.seconds = timed_generate(target.model, ids, seeded, assistant_model=drafter)
        except (ValueError, RuntimeError) as error:
            sample.error = fault(sample, error)
            break
        stats = drafter.last_generation
        sample.tokens, sample.parked = len(answer), stats.parked_rounds
        sample.rounds = [(r.verified, r.accepted) for r in stats.history]
        sample.logits = [
            rounded(None if r.confidence_logits is None else r.confidence_logits[: r.verified]) for r in stats.history
        ]
        if later is not None:
            messages = next_turn(target, messages, answer, later)
    return samples


def rounded(logits: Any) -> list[float]:
    """Confidence logits of one round [1, K] (`None` without a head) as they are kept."""
    return [] if logits is None else [round(x, 4) for x in logits.flatten().tolist()]


def next_turn(target: Target, messages: list[dict[str, str]], answer: list[int], text: str) -> list[dict[str, str]]:
    """The messages with the answer (token ids) and the user's next one behind them."""
    said = target.tokenizer.decode(answer, skip_special_tokens=True)
    return [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": text}]
