"""A file of prompts answered together by the batch engine.

Owns: prompt lines with settings of their own, the stream of records. Does not own: the engine, files, printing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..engine.engine import BatchEngine
from ..engine.sequence import RequestOutput
from ..loading.chat_template import encode_messages
from ..loading.pairs import Target
from ..model.modeling_dspark import DSparkDraftModel
from .completion import sampling_settings
from .questions import Question

_ENGINE_LINES = 1.0  # seconds between two records of the engine


def answer_all(
    target: Target,
    drafter: DSparkDraftModel | None,
    questions: Sequence[Question],
    max_sequences: int,
    on_record: Callable[[dict[str, Any]], None],
) -> None:
    """Answer all questions; `on_record` gets one record for each as it is finished (`type` "request", with its `index`), and
    about every second one of the engine (`type` "engine").

    Ctrl-C ends it with records of what was not finished (`finish_reason` "interrupted") before it is raised again.

    Raises:
        ValueError: a prompt that does not fit the target's context; nothing was decoded then.
    """
    engine = BatchEngine(target.model, drafter, max_sequences=max_sequences)
    for question in questions:
        options = question.options
        try:
            ids = encode_messages(target.tokenizer, question.messages)
            engine.add(ids, seed=options.seed, max_new_tokens=options.max_new_tokens, **sampling_settings(options))
        except ValueError as error:
            raise ValueError(f"{question.where}: {error}") from None

    def record(output: RequestOutput) -> dict[str, Any]:
        entry = output.to_dict()
        text = target.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        return {"type": "request", "index": entry.pop("id"), "text": text} | entry

    try:
        for entry in _with_engine(engine, record):
            on_record(entry)
    except KeyboardInterrupt:
        for output in engine.interrupt():
            on_record(record(output))
        raise


def _with_engine(engine: BatchEngine, record: Callable[[RequestOutput], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    last = time.perf_counter()
    while engine.num_unfinished:
        yield from map(record, engine.step())
        if time.perf_counter() - last >= _ENGINE_LINES or not engine.num_unfinished:
            last = time.perf_counter()
            yield {"type": "engine"} | engine.stats.to_dict()
