"""What stands before every route: the key and the size of a body.

Owns: an ASGI middleware for both. Does not own: routes.
"""

from __future__ import annotations

import hmac
import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError

_OPEN_PATHS = {"/health"}


class Gate:
    """Refuses a wrong key (401) and too large a body (413), also one that says no length."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int) -> None:
        self.app, self.api_key, self.max_body_bytes = app, api_key, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not self._may_pass(scope["path"], headers.get(b"authorization", b"")):
            await _refuse(send, ApiError(401, "Wrong or missing API key: send it as 'Authorization: Bearer KEY'."))
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.max_body_bytes:
            await _refuse(send, self._too_large())
            return
        # The body is read here, so that nothing of it reaches a route before its size is known.
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.max_body_bytes:
                await _refuse(send, self._too_large())
                return
        handed = False

        async def replay() -> Message:
            nonlocal handed
            if handed:
                return await receive()
            handed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    def _may_pass(self, path: str, given: bytes) -> bool:
        if self.api_key is None or path in _OPEN_PATHS:
            return True
        return hmac.compare_digest(given, f"Bearer {self.api_key}".encode())

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self.max_body_bytes} bytes.", code="request_too_large")


async def _refuse(send: Send, error: ApiError) -> None:
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
