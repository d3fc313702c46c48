"""The local OpenAI-compatible server: what stands before its routes, the routes, and their way to the batch engine."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers.utils import logging

from ..engine.engine import BatchEngine
from ..loading.pairs import Target
from .reply import Reply
from .schema import ApiError, ChatRequest, CompletionRequest
from .worker import EngineWorker

logger = logging.get_logger(__name__)
_DEFAULT_TOKENS = 256
_LOOK_SECONDS = 0.25  # how often a waiting request looks whether its client is still there


@dataclass(frozen=True)
class ServerLimits:
    """Most bytes of a body, tokens of an answer, requests in flight."""

    body_bytes: int = 1 << 20
    answer_tokens: int = 4096
    requests: int = 64


class Gate:
    """What stands before every route: refuses a wrong key (401) and too large a body (413), also one of unsaid length."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int) -> None:
        self.app, self.api_key, self.max_body_bytes = app, api_key, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            self._check_key(request)
            body = await self._body(request)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        except ClientDisconnect:
            return
        read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return read.pop() if read else await receive()

        await self.app(scope, replay, send)

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if self.api_key is None or request.url.path == "/health":
            return
        if not hmac.compare_digest(given.encode("latin-1"), f"Bearer {self.api_key}".encode()):
            raise ApiError(401, "Wrong or missing API key: send it as 'Authorization: Bearer KEY'.")

    async def _body(self, request: Request) -> bytes:
        """Read here, so that nothing of it reaches a route before its size is known."""
        too_large = ApiError(413, f"The body is larger than {self.max_body_bytes} bytes.", code="request_too_large")
        length = request.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self.max_body_bytes:
            raise too_large
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > self.max_body_bytes:
                raise too_large
        return body


class Server:
    """One target with its engine behind HTTP."""

    def __init__(self, target: Target, engine: BatchEngine, limits: ServerLimits) -> None:
        self.target, self.limits = target, limits
        self.worker = EngineWorker(engine, limits.requests)
        self.started = int(time.time())

    def reply(self, request: ChatRequest | CompletionRequest) -> Reply:
        """A checked request as a reply to be made.

        Raises:
            ApiError: another model, a prompt that is too long, a template that refuses the messages.
        """
        if request.model not in (self.target.name, self.target.name.rsplit("/", 1)[-1]):
            message = f"The model {request.model!r} is not served here, but {self.target.name!r} is."
            raise ApiError(404, message, "model", "model_not_found")
        ids, wanted = request.encode(self.target.tokenizer), request.max_tokens
        context = self.target.model.config.get_text_config().to_dict().get("max_position_embeddings") or 1 << 30
        most = min(self.limits.answer_tokens, context - len(ids))
        if (wanted or 1) > most:
            raise ApiError(
                400,
                f"The prompt has {len(ids)} tokens and {wanted or 1} are asked for: at most {self.limits.answer_tokens} new ones "
                f"are served, and {context} in all fit the model's context.",
                "max_tokens",
                "context_length_exceeded",
            )
        return Reply(request, ids, self.target.tokenizer, self.target.name, wanted or min(_DEFAULT_TOKENS, most))

    async def respond(self, request: ChatRequest | CompletionRequest, http: Request) -> Response:
        """A whole reply, or a stream of its pieces."""
        reply = self.reply(request)
        pieces = reply.pieces(self.worker)
        if request.stream:
            first = await anext(pieces, None)  # so that a refusal still gets its status
            return StreamingResponse(self._stream(reply, first, pieces), media_type="text/event-stream")

        async def gather() -> str:
            return "".join([piece async for piece in pieces])

        gathering = asyncio.ensure_future(gather())
        while not (await asyncio.wait([gathering], timeout=_LOOK_SECONDS))[0]:
            if await http.is_disconnected():
                gathering.cancel()
                return Response(status_code=499)
        return JSONResponse(reply.whole(gathering.result()))

    async def _stream(self, reply: Reply, first: str | None, pieces: AsyncGenerator[str, None]) -> AsyncIterator[str]:
        def event(data: dict[str, Any]) -> str:
            return f"data: {json.dumps(data)}\n\n"

        try:
            for chunk in reply.opening():
                yield event(chunk)
            piece = first
            while piece is not None:
                if piece:
                    yield event(reply.chunk(piece))
                piece = await anext(pieces, None)
            for chunk in reply.closing():
                yield event(chunk)
        except ApiError as error:
            yield event(error.body())
        finally:
            await pieces.aclose()
        yield "data: [DONE]\n\n"


class EngineCollector:
    """The engine's counters for Prometheus, read when it asks."""

    def __init__(self, worker: EngineWorker) -> None:
        self.worker = worker

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        engine, stats = self.worker.engine, self.worker.engine.stats
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens read", stats.prompt_tokens),
            ("new_tokens", "Tokens committed", stats.new_tokens),
            ("drafted_tokens", "Tokens drafted", sum(stats.drafted)),
            ("verified_tokens", "Drafted tokens verified", sum(stats.verified)),
            ("accepted_tokens", "Drafted tokens accepted", sum(stats.accepted)),
            ("steps", "Forwards of the target", stats.rounds),
            ("step_seconds", "Seconds of all steps", stats.total_seconds),
        ):
            yield CounterMetricFamily(f"dspark_{name}", text, value=value)
        finished = CounterMetricFamily("dspark_requests", "Requests that are over", labels=["reason"])
        for reason, count in list(stats.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        yield GaugeMetricFamily("dspark_requests_in_flight", "Requests not over yet", value=self.worker.num_requests)
        last = stats.history[-1] if stats.history else None
        yield GaugeMetricFamily("dspark_cache_tokens", "Tokens in the cache", value=last.cache_tokens if last else 0)
        yield GaugeMetricFamily("dspark_cache_bytes", "Memory of the cache", value=engine.cache_bytes if last else 0)


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
    metrics_registry = CollectorRegistry(auto_describe=False)
    metrics_registry.register(EngineCollector(server.worker))

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        return ApiError(400, f"{place or 'body'}: {first['msg']}", place or None).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}.").response()

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        logger.error(f"{request.method} {request.url.path} failed", exc_info=error)
        return ApiError(500, "The server failed at this request; its log says why.").response()

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
        return Response(generate_latest(metrics_registry), media_type="text/plain; version=0.0.4")

    return app
