"""The requests that the local server takes: OpenAI's fields, as far as they are served.

Owns: fields, their ranges, what is refused. Does not own: routes (`api`), decoding.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

_MOST_STOPS = 4


class StreamOptions(BaseModel):
    """include_usage: a last chunk with the token counts."""

    include_usage: bool = False


class Sampling(BaseModel):
    """What both routes share. Fields that are not named here are ignored, as clients send many; `n` is 1."""

    model_config = ConfigDict(extra="ignore")

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    stop: list[str] = Field(default_factory=list)
    seed: int | None = None
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    n: Literal[1] = 1

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, value: Any) -> Any:
        return [] if value is None else [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: list[str]) -> list[str]:
        if len(value) > _MOST_STOPS or not all(value):
            raise ValueError(f"stop takes at most {_MOST_STOPS} strings, none of them empty")
        return value

    @field_validator("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "n", mode="before")
    @classmethod
    def _null_is_default(cls, value: Any, info) -> Any:
        return cls.model_fields[info.field_name].default if value is None else value


class ContentPart(BaseModel):
    """One part of a message's content; only text is served."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]

    def as_template(self) -> dict[str, str]:
        """The form that chat templates take."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @field_validator("logprobs", "top_logprobs", mode="before")
    @classmethod
    def _null_is_off(cls, value: Any) -> Any:
        return 0 if value is None else value


class CompletionRequest(Sampling):
    """`POST /v1/completions`; `prompt` is one text, or its token ids."""

    prompt: str | list[int] = Field(min_length=1)
    echo: Literal[False] = False
    best_of: Literal[1] = 1
    logprobs: int | None = Field(None, ge=0, le=5)
