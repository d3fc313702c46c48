"""What the server takes and how it refuses: OpenAI's request fields as far as they are served, and its errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, Field, field_validator, model_validator
from starlette.responses import JSONResponse
from transformers import PreTrainedTokenizerBase

from ..loading.chat_template import encode_messages

_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "server_error"}


class ApiError(Exception):
    """What a client is told: `{"error": {"message", "type", "param", "code"}}` with an HTTP status."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = _ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        headers = {"www-authenticate": "Bearer"} if self.status == 401 else None
        return JSONResponse(self.body(), self.status, headers)


class StreamOptions(BaseModel):
    """include_usage: a last chunk with the token counts."""

    include_usage: bool = False


class Sampling(BaseModel):
    """What both routes share. Fields that are not named here are ignored, as clients send many; `n` is 1."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    max_tokens: int | None = Field(None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    stop: list[Annotated[str, Field(min_length=1)]] = Field([], max_length=4)
    seed: int | None = None
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    n: Literal[1] = 1

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, fields: Any) -> Any:
        return {k: v for k, v in fields.items() if v is not None} if isinstance(fields, dict) else fields

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class ContentPart(BaseModel):
    """One part of a message's content; only text is served."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]

    def as_template(self) -> dict[str, str]:
        """The form that chat templates take."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to each token's log-probability; `None` where none are asked for."""
        return self.top_logprobs if self.logprobs else None

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The prompt's token ids.

        Raises:
            ApiError: the chat template refuses the messages.
        """
        try:
            return encode_messages(tokenizer, [message.as_template() for message in self.messages])
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from None


class CompletionRequest(Sampling):
    """`POST /v1/completions`; `prompt` is one text, or its token ids."""

    prompt: str | list[int] = Field(min_length=1)
    echo: Literal[False] = False
    best_of: Literal[1] = 1
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def num_logprobs(self) -> int | None:
        """As of a chat."""
        return self.logprobs

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The prompt's token ids."""
        return tokenizer(self.prompt)["input_ids"] if isinstance(self.prompt, str) else self.prompt
