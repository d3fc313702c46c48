"""One reply: from a checked request to what the engine is asked, and from its events to OpenAI's objects."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from ..engine.request import RequestOutput
from .schema import ApiError, ChatRequest, CompletionRequest
from .text import TextStream
from .worker import EngineWorker


class PenaltyProcessor(LogitsProcessor):
    """OpenAI's penalties: score - frequency · count - presence · (count > 0), counted in the answer alone."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """[1, L], [1, V] -> [1, V]"""
        said = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, said, torch.ones_like(said, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


@dataclass
class Reply:
    """One reply in the making, to a chat or a completion."""

    request: ChatRequest | CompletionRequest
    prompt_ids: list[int]
    tokenizer: PreTrainedTokenizerBase
    model: str
    max_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))
    started: float = field(default_factory=time.perf_counter)
    token_ids: list[int] = field(default_factory=list)
    output: RequestOutput | None = None  # there at the end, unless a stop string came first

    def __post_init__(self) -> None:
        self.is_chat = isinstance(self.request, ChatRequest)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.text = TextStream(self.tokenizer, self.request.stop)

    # -- from the engine ---------------------------------------------------------------------------------------------

    def engine_request(self) -> dict[str, Any]:
        """As `BatchEngine.add` takes it."""
        request = self.request
        asked: dict[str, Any] = {"input_ids": self.prompt_ids, "seed": request.seed}
        asked |= {"max_new_tokens": self.max_tokens, "do_sample": request.temperature > 0}
        if request.temperature > 0:
            asked |= {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        if request.num_logprobs is not None:
            asked |= {"return_dict_in_generate": True, "output_logits": True}
        if request.presence_penalty or request.frequency_penalty:
            penalty = PenaltyProcessor(len(self.prompt_ids), request.presence_penalty, request.frequency_penalty)
            asked["logits_processor"] = LogitsProcessorList([penalty])
        return asked

    async def pieces(self, worker: EngineWorker) -> AsyncGenerator[str, None]:
        """Text as it comes, "" where tokens show none yet; a stop string ends it too.

        Raises:
            ApiError: the engine refused the request, or it failed.
        """
        try:
            events = worker.submit(**self.engine_request()).events()
        except RuntimeError as error:
            raise ApiError(503, str(error), code="overloaded") from None
        try:
            async for event in events:
                if isinstance(event, RequestOutput):
                    self.output = event
                    if event.error is not None:
                        raise ApiError(500, f"The request failed: {type(event.error).__name__}: {event.error}")
                    yield self.text.end()
                    return
                self.token_ids += event
                yield self.text.push(event)
                if self.text.stopped:
                    return
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        except RuntimeError as error:
            raise ApiError(500, str(error)) from None
        finally:
            await events.aclose()

    # -- to OpenAI's objects -----------------------------------------------------------------------------------------

    def whole(self, text: str) -> dict[str, Any]:
        """The reply at once."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = self._end({"message": message} if self.is_chat else {"text": text})
        return self._object("chat.completion", choice, usage=self._usage(), dspark=self._dspark())

    def opening(self) -> list[dict[str, Any]]:
        """What a stream begins with: of a chat, who speaks."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}})] if self.is_chat else []

    def chunk(self, text: str) -> dict[str, Any]:
        """One piece of a stream."""
        return self._chunk({"delta": {"content": text}} if self.is_chat else {"text": text})

    def closing(self) -> list[dict[str, Any]]:
        """The last chunk, with the record, and the one of the usage where it is asked for."""
        choice = self._end({"delta": {}} if self.is_chat else {"text": ""})
        chunks = [self._object("chat.completion.chunk", choice, dspark=self._dspark())]
        options = self.request.stream_options
        if options is not None and options.include_usage:
            chunks.append(self._object("chat.completion.chunk", None, usage=self._usage()))
        return chunks

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._object("chat.completion.chunk", choice | {"finish_reason": None, "logprobs": None})

    def _object(self, kind: str, choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        """OpenAI's frame; a completion is of one kind, whole or in a stream."""
        kind = kind if self.is_chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": [] if choice is None else [{"index": 0} | choice]} | more

    def _end(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A choice with what is known when it is over."""
        is_long = not self.text.stopped and self.output is not None and self.output.finish_reason == "length"
        logprobs = None if self.output is None else self._logprobs(self.output)
        return choice | {"finish_reason": "length" if is_long else "stop", "logprobs": logprobs}

    def _usage(self) -> dict[str, int]:
        prompt, new = len(self.prompt_ids), len(self.token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _dspark(self) -> dict[str, Any]:
        """What drafting did for this reply; counts are missing where a stop string cut it short."""
        seconds = time.perf_counter() - self.started
        record: dict[str, Any] = {"tokens_per_second": len(self.token_ids) / seconds if seconds else 0.0}
        if self.output is not None:
            stats = self.output.stats
            record |= {"accept_length": stats.accept_length, "rounds": stats.rounds}
            record |= {name: sum(getattr(stats, name)) for name in ("drafted", "verified", "accepted")}
        return record

    def _logprobs(self, output: RequestOutput) -> dict[str, Any] | None:
        """Of each new token: its log-probability under the model itself, and the best alternatives; in the route's form."""
        count, entries = self.request.num_logprobs, []
        if count is None:
            return None
        for token, logits in zip(output.token_ids, output.logits or ()):
            values = logits[0].float().log_softmax(-1)
            best = [self._logprob(i, values) for i in values.topk(count).indices.tolist()]
            entries.append(self._logprob(token, values) | {"top_logprobs": best})
        if self.is_chat:
            return {"content": entries, "refusal": None}
        tokens = [entry["token"] for entry in entries]
        return {
            "tokens": tokens,
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{t["token"]: t["logprob"] for t in entry["top_logprobs"]} for entry in entries],
            "text_offset": [0, *accumulate(map(len, tokens))][:-1],
        }

    def _logprob(self, token: int, values: torch.Tensor) -> dict[str, Any]:
        text = self.tokenizer.decode([token])
        return {"token": text, "bytes": list(text.encode()), "logprob": max(float(values[token]), -9999.0)}
