"""Errors as OpenAI's API words them.

Owns: the exception that becomes a JSON error, its body. Does not own: when it is raised.
"""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """What a client is told: `{"error": {"message", "type", "param", "code"}}` with an HTTP status."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = {401: "authentication_error", 404: "not_found_error", 503: "server_error", 500: "server_error"}
        return {
            "error": {
                "message": self.message,
                "type": kind.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }
