"""Prompts as text: JSONL lines, chat messages, token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict]]:
    """Yield (line number, object) of a JSONL file; a broken line is a `ValueError` that names it."""
    path = Path(path)
    if not path.is_file():
        raise OSError(f"No such file: {path}. Give a JSONL file with one prompt a line.")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg}).") from None
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not UTF-8 ({error.reason}). Save the file as UTF-8."
                ) from None
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number}: expected a JSON object, got {type(record).__name__}.")
            yield number, record


def messages_of(record: dict, where: str) -> list[dict[str, str]]:
    """The chat messages of one prompt line: from `messages`, from `turns` (the first one) or from `prompt`."""
    if messages := record.get("messages"):
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise ValueError(f"{where}: 'messages' takes a list of objects with a 'role' and a 'content'.")
        return messages
    turns = record.get("turns")
    text = record.get("prompt") if record.get("prompt") is not None else (turns[0] if turns else None)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: no prompt found. Allowed: a non-empty 'prompt', 'turns' or 'messages'.")
    return [{"role": "user", "content": text}]


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and message.get("content") is not None


def encode_messages(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of `messages` up to where the assistant begins; the bare text where there is no chat template.

    Raises:
        ValueError: the template refuses the messages.
    """
    if tokenizer.chat_template is None:
        return tokenizer("\n\n".join(m["content"] for m in messages))["input_ids"]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # jinja's own, from within the template
        raise ValueError(f"The chat template refuses these messages: {error}") from None
    return tokenizer(text, add_special_tokens=False)["input_ids"]
