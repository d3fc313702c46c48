"""What `dspark-hf train` can be told: its options, their help, and what is refused before any work begins.

Nothing of torch is imported here, so that the command line can be made from the dataclass at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

METHODS = ("dspark", "dflash", "eagle3")
MARKOV_HEADS = ("none", "vanilla", "gated", "rnn")
DRAFT_VOCAB_SIZE = 8192


def _option(default: Any, help: str, least: float | None = None, above: float | None = None) -> Any:
    """A field; its numbers, where given, must be finite and at least `least`, or above `above`."""
    return field(default=default, metadata={"help": help, "least": least, "above": above})


@dataclass(frozen=True)
class TrainOptions:
    """How to train a drafter; `None` means a default that depends on the target or the data. The fields' help says the rest.

    Raises (by `check`, the first thing that training does):
        ValueError: a value that is out of range, or two that exclude each other. OSError: a file or folder that is not there.
    """

    output: Path = field(metadata={"help": "Folder for the finished drafter (Hub-ready)."})
    prompts: tuple[Path, ...] = _option((), "JSONL with 'prompt', 'turns' or 'messages'; may be given again.")
    answers: tuple[Path, ...] = _option(
        (), "JSONL with 'input_ids' and 'response_ids' made earlier; may be given again."
    )
    work_dir: Path | None = _option(None, "Answers, features, checkpoints. (default: OUTPUT-work)")  # noqa: RUF009
    num_answers: int | None = _option(None, "Answers to make. (default: one a prompt)", least=1)
    invented_prompts: int = _option(0, "Prompts that the target writes itself, as domain 'chat'.", least=0)
    temperatures: tuple[float, ...] = _option(
        (0.0, 0.6, 0.8), "Temperatures of the answers in turn; 0 is greedy.", least=0
    )
    max_new_tokens: int = _option(192, "Longest answer, in tokens.", least=8)
    slots: int = _option(128, "Answers decoded side by side.", least=1)
    method: str = _option("dspark", "dspark, or what it is compared with: dflash (no heads, fill-in blocks), eagle3.")
    num_layers: int | None = _option(None, "Depth of the drafter. (default: 3; eagle3 has 1)", least=1)
    block_size: int = _option(7, "Tokens drafted a round at most.", least=1)
    min_block_size: int | None = _option(None, "Train on blocks of this size and up too.", least=1)
    draft_tokens: int | None = _option(None, "Drafted a round when used. (default: all of a block)", least=1)
    markov_head: str = _option("vanilla", "none, vanilla, gated or rnn (dspark).")
    markov_rank: int = _option(64, "Rank of the sequential head.", least=0)
    draft_vocab_size: int | None = _option(
        None, f"Most frequent tokens to propose from; 0 is all. (default: {DRAFT_VOCAB_SIZE})", least=0
    )
    draft_vocab_coverage: float | None = _option(
        None, "Instead: as many as cover this share of the answers' tokens, e.g. 0.995.", above=0
    )
    target_layers: tuple[int, ...] = _option((), "Tapped layers. (default: five, spread)")
    steps: int | None = _option(None, "Training steps. (default: --epochs over the answers)", least=1)
    epochs: float = _option(10.0, "Passes over the answers where --steps is not given.", above=0)
    batch_size: int = _option(8, "Answers a step and process.", least=1)
    num_anchors: int = _option(32, "Blocks drawn in each answer and step.", least=1)
    learning_rate: float = _option(1e-3, "Peak of the learning rate.", above=0)
    feature_cache_gb: float = _option(20.0, "Most disk for kept features; the rest is recomputed.", least=0)
    seed: int = _option(0, "Seed of answers, anchors and weights.")
    init_from: Path | None = _option(None, "Folder of a drafter to go on from, with the same shape options.")  # noqa: RUF009
    restart: bool = _option(False, "Throw an earlier run's working files away and begin anew.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "output", Path(self.output).resolve())  # its name is wanted, and "." has none

    @property
    def folder(self) -> Path:
        """The working folder."""
        return self.work_dir or self.output.with_name(f"{self.output.name}-work")

    def check(self) -> None:
        """Refuse what can't work, in one line."""
        for option in fields(self):
            value, least, above = getattr(self, option.name), option.metadata.get("least"), option.metadata.get("above")
            for number in value if isinstance(value, tuple) else () if value is None else (value,):
                if least is not None and not least <= number < math.inf:
                    raise ValueError(f"{_flag(option.name)} must be at least {least:g} and finite, got {number:g}.")
                if above is not None and not above < number < math.inf:
                    raise ValueError(f"{_flag(option.name)} must be above {above:g} and finite, got {number:g}.")
        for name, allowed in (("method", METHODS), ("markov_head", MARKOV_HEADS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{_flag(name)} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        if not (self.prompts or self.answers or self.invented_prompts):
            raise ValueError("Nothing to train on: give --prompts, --answers or --invented-prompts.")
        if not self.temperatures:
            raise ValueError("--temperatures must be one or more numbers from 0, e.g. 0,0.8.")
        if self.min_block_size is not None and self.min_block_size > self.block_size:
            raise ValueError(
                f"--min-block-size must be between 1 and --block-size ({self.block_size}), got {self.min_block_size}."
            )
        if (coverage := self.draft_vocab_coverage) is not None:
            if coverage > 1:
                raise ValueError(f"--draft-vocab-coverage must be above 0 and at most 1, got {coverage:g}.")
            if self.draft_vocab_size is not None:
                raise ValueError("--draft-vocab-size and --draft-vocab-coverage exclude each other: give one of them.")
            if self.init_from is not None:
                raise ValueError(
                    "--draft-vocab-coverage chooses a draft vocabulary, and --init-from keeps the earlier drafter's: leave "
                    "one out."
                )
        if self.init_from is not None and not self.init_from.is_dir():
            raise OSError(f"--init-from: no folder {self.init_from}.")
        for file in (*self.prompts, *self.answers):
            if not file.is_file():
                raise OSError(f"No such file: {file}.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
