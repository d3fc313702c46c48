"""The local OpenAI-compatible server: routes over the batch engine.

Owns: routes, their JSON, streams. Does not own: requests' fields (`schema`), answers (`answers`), the engine's thread
(`worker`), key and body size (`limits`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from transformers.utils import logging

from ..engine.engine import BatchEngine
from ..loading.chat_template import encode_messages
from ..loading.pairs import Target
from .answers import Answer, Piece
from .errors import ApiError
from .limits import Gate
from .metrics import metrics_text
from .schema import ChatRequest, CompletionRequest, Sampling
from .worker import EngineWorker

logger = logging.get_logger(__name__)
_DEFAULT_TOKENS = 256


@dataclass(frozen=True)
class ServerLimits:
    """Most bytes of a body, tokens of an answer, requests in flight."""

    body_bytes: int = 1 << 20
    answer_tokens: int = 4096
    requests: int = 64


class Server:
    """One target with its engine behind HTTP."""

    def __init__(self, target: Target, engine: BatchEngine, limits: ServerLimits) -> None:
        self.target, self.limits = target, limits
        self.worker = EngineWorker(engine, limits.requests)
        self.started = int(time.time())

    # -- requests ----------------------------------------------------------------------------------------------------

    def answer(self, request: Sampling) -> Answer:
        """A checked request as an answer to be made.

        Raises:
            ApiError: another model, a prompt that is too long, a template that refuses the messages.
        """
        if request.model not in (self.target.name, self.target.name.rsplit("/", 1)[-1]):
            message = f"The model {request.model!r} is not served here, but {self.target.name!r} is."
            raise ApiError(404, message, "model", "model_not_found")
        wanted = request.max_tokens
        if isinstance(request, ChatRequest):
            wanted = request.max_completion_tokens or wanted
            messages = [m.as_template() for m in request.messages]
            try:
                ids = encode_messages(self.target.tokenizer, messages)
            except ValueError as error:
                raise ApiError(400, str(error), "messages") from None
        else:
            assert isinstance(request, CompletionRequest)
            prompt = request.prompt
            ids = self.target.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        context = self.target.model.config.get_text_config().to_dict().get("max_position_embeddings") or 1 << 30
        room = context - len(ids)
        most = min(self.limits.answer_tokens, room)
        if room < 1 or (wanted or 1) > most:
            raise ApiError(
                400,
                f"The prompt has {len(ids)} tokens and {wanted or 1} are asked for: at most {self.limits.answer_tokens} new ones "
                f"are served, and {context} in all fit the model's context.",
                "max_tokens",
                "context_length_exceeded",
            )
        return Answer(request, ids, self.target.tokenizer, self.target.name, wanted or min(_DEFAULT_TOKENS, most))

    async def respond(self, request: Sampling, http: Request) -> Response:
        """A whole answer, or a stream of its pieces."""
        answer = self.answer(request)
        form = ChatForm(answer) if isinstance(request, ChatRequest) else CompletionForm(answer)
        if request.stream:
            pieces = answer.pieces(self.worker)
            first = await anext(pieces, None)  # so that a refusal still gets its status
            return StreamingResponse(self._stream(form, first, pieces), media_type="text/event-stream")
        gathering = asyncio.ensure_future(self._gather(answer))
        while not gathering.done():
            await asyncio.wait([gathering], timeout=0.25)
            if not gathering.done() and await http.is_disconnected():
                gathering.cancel()
                await asyncio.gather(gathering, return_exceptions=True)
                return Response(status_code=499)
        return JSONResponse(form.whole(gathering.result()))

    async def _gather(self, answer: Answer) -> str:
        pieces = answer.pieces(self.worker)
        try:
            return "".join([piece.text async for piece in pieces])
        finally:
            await pieces.aclose()

    async def _stream(self, form: Form, first: Piece | None, pieces) -> AsyncIterator[str]:
        try:
            for chunk in form.opening():
                yield _event(chunk)
            piece = first
            while piece is not None:
                if piece.text:
                    yield _event(form.chunk(piece))
                piece = await anext(pieces, None)
            for chunk in form.closing():
                yield _event(chunk)
        except ApiError as error:
            yield _event(error.body())
        finally:
            await pieces.aclose()
        yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


class Form:
    """OpenAI's objects around an answer."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def _object(self, kind: str, choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        head = {"id": f"{self.prefix}-{self.answer.id}", "object": kind, "created": self.answer.created}
        choices = [] if choice is None else [{"index": 0} | choice]
        return head | {"model": self.answer.model, "choices": choices} | more

    def whole(self, text: str) -> dict[str, Any]:
        """The answer at once."""
        answer = self.answer
        choice = self.content(text) | {"finish_reason": answer.finish_reason, "logprobs": self.logprobs()}
        return self._object(self.kind, choice, usage=answer.usage(), dspark=answer.dspark())

    def opening(self) -> list[dict[str, Any]]:
        return []

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """One piece of a stream."""
        return self._object(self.chunk_kind, self.delta(piece.text) | {"finish_reason": None, "logprobs": None})

    def closing(self) -> list[dict[str, Any]]:
        """The last chunk, with the record, and the one of the usage where it is asked for."""
        answer = self.answer
        choice = self.delta("") | {"finish_reason": answer.finish_reason, "logprobs": self.logprobs()}
        chunks = [self._object(self.chunk_kind, choice, dspark=answer.dspark())]
        options = answer.request.stream_options
        if options is not None and options.include_usage:
            chunks.append(self._object(self.chunk_kind, None, usage=answer.usage()))
        return chunks

    def content(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def logprobs(self) -> dict[str, Any] | None:
        raise NotImplementedError


class ChatForm(Form):
    """`chat.completion`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self) -> list[dict[str, Any]]:
        choice = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}
        return [self._object(self.chunk_kind, choice)]

    def content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def logprobs(self) -> dict[str, Any] | None:
        answer = self.answer
        if answer.num_logprobs is None or answer.output is None:
            return None
        return {"content": answer.logprobs(), "refusal": None}


class CompletionForm(Form):
    """`text_completion`."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    delta = content

    def logprobs(self) -> dict[str, Any] | None:
        answer = self.answer
        if answer.num_logprobs is None or answer.output is None:
            return None
        entries = answer.logprobs()
        starts = [0]
        for entry in entries:
            starts.append(starts[-1] + len(entry["token"]))
        return {
            "tokens": [e["token"] for e in entries],
            "token_logprobs": [e["logprob"] for e in entries],
            "top_logprobs": [{t["token"]: t["logprob"] for t in e["top_logprobs"]} for e in entries],
            "text_offset": starts[:-1],
        }


def make_app(
    target: Target, engine: BatchEngine, api_key: str | None = None, limits: ServerLimits | None = None
) -> FastAPI:
    """The application; its engine runs between start-up and shutdown."""
    limits = limits or ServerLimits()
    server = Server(target, engine, limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.worker.start()
        yield
        await asyncio.to_thread(server.worker.stop)

    app = FastAPI(title="dspark-hf", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.server = server
    app.add_middleware(Gate, api_key=api_key, max_body_bytes=limits.body_bytes)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        return await api_error(request, ApiError(400, f"{place or 'body'}: {first['msg']}", place or None))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}."
        return await api_error(request, ApiError(error.status_code, message))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        logger.error(f"{request.method} {request.url.path} failed", exc_info=error)
        return await api_error(request, ApiError(500, "The server failed at this request; its log says why."))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await server.respond(body, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await server.respond(body, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": target.name, "object": "model", "created": server.started, "owned_by": "dspark-hf"}
        return {"object": "list", "data": [model]}

    @app.get("/health")
    async def health() -> JSONResponse:
        alive = server.worker.is_alive
        return JSONResponse({"status": "ok" if alive else "stopping"}, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(metrics_text(server.worker), media_type="text/plain; version=0.0.4")

    return app
