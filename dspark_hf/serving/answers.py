"""One answer: from a checked request to a job for the engine, and from its events to OpenAI's objects.

Owns: settings, log-probabilities, usage, the `dspark` record of an answer. Does not own: HTTP, the engine's thread.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase

from ..engine.request import RequestOutput
from .errors import ApiError
from .schema import ChatRequest, CompletionRequest, Sampling
from .text import PenaltyProcessor, TextStream
from .worker import EngineWorker, Job


@dataclass
class Piece:
    """Text that came with some tokens."""

    text: str
    token_ids: list[int]


@dataclass
class Answer:
    """One answer in the making."""

    request: Sampling
    prompt_ids: list[int]
    tokenizer: PreTrainedTokenizerBase
    model: str
    max_tokens: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    started: float = field(default_factory=time.perf_counter)
    token_ids: list[int] = field(default_factory=list)
    output: RequestOutput | None = None
    stopped: bool = False

    def __post_init__(self) -> None:
        self.text = TextStream(self.tokenizer, self.request.stop)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to each token's log-probability; `None` where none are asked for."""
        request = self.request
        if isinstance(request, ChatRequest):
            return request.top_logprobs if request.logprobs else None
        assert isinstance(request, CompletionRequest)
        return request.logprobs

    def job(self) -> Job:
        """What the engine is asked."""
        request = self.request
        settings: dict[str, Any] = {"max_new_tokens": self.max_tokens, "do_sample": request.temperature > 0}
        if request.temperature > 0:
            settings |= {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        if self.num_logprobs is not None:
            settings |= {"return_dict_in_generate": True, "output_logits": True}
        processors = None
        if request.presence_penalty or request.frequency_penalty:
            penalty = PenaltyProcessor(len(self.prompt_ids), request.presence_penalty, request.frequency_penalty)
            processors = LogitsProcessorList([penalty])
        return Job(self.prompt_ids, settings, processors, request.seed)

    async def pieces(self, worker: EngineWorker) -> AsyncGenerator[Piece, None]:
        """Text as it comes; ends at a stop string too. Afterwards `output` is there, unless a stop string ended it.

        Raises:
            ApiError: the engine refused the request, or it failed.
        """
        try:
            ticket = worker.submit(self.job())
        except RuntimeError as error:
            raise ApiError(503, str(error), code="overloaded") from None
        events = ticket.events()
        try:
            async for event in events:
                if isinstance(event, RequestOutput):
                    self.output = event
                    if event.error is not None:
                        raise ApiError(500, f"The request failed: {type(event.error).__name__}: {event.error}")
                    if rest := self.text.end():
                        yield Piece(rest, [])
                    return
                self.token_ids += event
                text = self.text.push(event)
                yield Piece(text, event)
                if self.text.stopped:
                    self.stopped = True
                    return
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        except RuntimeError as error:
            raise ApiError(500, str(error)) from None
        finally:
            await events.aclose()

    @property
    def finish_reason(self) -> str:
        """OpenAI's words."""
        if self.stopped or self.output is None:
            return "stop"
        return {"stop": "stop", "length": "length"}.get(self.output.finish_reason, "stop")

    def usage(self) -> dict[str, int]:
        """Token counts."""
        prompt, new = len(self.prompt_ids), len(self.token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def dspark(self) -> dict[str, Any]:
        """What drafting did for this answer; counts are missing where a stop string cut it short."""
        seconds = time.perf_counter() - self.started
        record: dict[str, Any] = {"tokens_per_second": len(self.token_ids) / seconds if seconds else 0.0}
        if self.output is not None:
            stats = self.output.stats
            record |= {
                "accept_length": stats.accept_length,
                "rounds": stats.rounds,
                "drafted": sum(stats.drafted),
                "verified": sum(stats.verified),
                "accepted": sum(stats.accepted),
            }
        return record

    def logprobs(self) -> list[dict[str, Any]]:
        """Of each new token: its text, bytes and log-probability under the model itself, and the best alternatives."""
        assert self.output is not None
        entries = []
        most = self.num_logprobs or 0
        for token, logits in zip(self.output.token_ids, self.output.logits or ()):
            values = logits[0].float().log_softmax(-1)
            best = values.topk(most) if most else None
            entry = self._logprob(token, values)
            entry["top_logprobs"] = [] if best is None else [self._logprob(i, values) for i in best.indices.tolist()]
            entries.append(entry)
        return entries

    def _logprob(self, token: int, values: torch.Tensor) -> dict[str, Any]:
        text = self.tokenizer.decode([token])
        return {"token": text, "bytes": list(text.encode()), "logprob": max(float(values[token]), -9999.0)}
