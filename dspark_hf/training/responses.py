"""The target's own answers to the training prompts, kept in a JSONL file that can be continued after a kill.

Owns: the answers' file and its form (`{"key", "domain", "temperature", "input_ids", "response_ids"}`, token ids of the
target's tokenizer), which answers are worth keeping, invented prompts.
Does not own: which prompts (`prompts`), the decode loop (`batched_decode`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..decoding.targets import eos_ids
from ..loading.chat_template import encode_messages, read_jsonl
from .batched_decode import TextRequest, TextResult, decode_batched, supports_slots
from .prompts import AnswerPlan, Prompt, user_turn_prefix

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Answer:
    """One training text: the prompt's ids, the target's answer and the domain it belongs to."""

    domain: str
    input_ids: list[int]
    response_ids: list[int]


def read_answers(paths: Iterable[str | Path], min_response: int = 8) -> list[Answer]:
    """Answers of one or more JSONL files; those with fewer than `min_response` answer tokens are left out."""
    answers = []
    for path in paths:
        for number, record in read_jsonl(path):
            if not {"input_ids", "response_ids"} <= record.keys():
                raise ValueError(f"{path}, line {number}: an answer needs 'input_ids' and 'response_ids'.")
            if len(record["response_ids"]) >= min_response:
                answers.append(Answer(str(record.get("domain", "all")), record["input_ids"], record["response_ids"]))
    if not answers:
        raise ValueError(f"No answer of at least {min_response} tokens in {', '.join(map(str, paths))}.")
    return answers


def _done_keys(path: Path) -> set[int]:
    """Keys of the whole lines in `path`; a line cut off by a kill is removed."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return {json.loads(line)["key"] for line in whole.splitlines()}


def decode_requests(
    target: PreTrainedModel, requests: Sequence[TextRequest], *, num_slots: int, seed: int, max_length: int
) -> Iterator[TextResult]:
    """Answer requests, `num_slots` at once where the target's layers allow it, each as it is done."""
    eos = eos_ids(target)
    if supports_slots(target):
        yield from decode_batched(
            target,
            requests,
            eos_token_ids=eos,
            pad_token_id=next(iter(eos), 0),
            num_slots=num_slots,
            max_length=max_length,
            seed=seed,
        )
        return
    logger.warning(
        "This target has layers that are not full attention: answering one prompt at a time with generate()."
    )
    torch.manual_seed(seed)
    for request in requests:
        ids = torch.tensor([request.input_ids], device=target.device)
        sampling = {"do_sample": True, "temperature": request.temperature} if request.temperature else {}
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_new_tokens, **sampling
        )
        yield TextResult(request.key, request.input_ids, output[0, ids.shape[1] :].tolist())


def missing_answers(plans: Sequence[AnswerPlan], path: str | Path) -> list[AnswerPlan]:
    """The planned answers that `path` does not hold yet."""
    done = _done_keys(Path(path))
    return [plan for plan in plans if plan.key not in done]


def write_answers(
    target: PreTrainedModel,
    plans: Sequence[AnswerPlan],
    path: str | Path,
    *,
    max_new_tokens: int = 192,
    num_slots: int = 128,
    seed: int = 0,
) -> int:
    """Answer the planned prompts and append them to `path`; answers already there are not made again.

    Returns the number of answer tokens made in this call.
    """

    def record(plan: AnswerPlan, result: TextResult) -> dict:
        return {
            "key": plan.key,
            "domain": plan.prompt.domain,
            "temperature": plan.temperature,
            "input_ids": result.input_ids,
            "response_ids": result.response_ids,
        }

    requests = [TextRequest(p.key, list(p.prompt.input_ids), max_new_tokens, p.temperature) for p in plans]
    by_key = {plan.key: plan for plan in plans}
    return _append(target, requests, Path(path), lambda r: record(by_key[r.key], r), "answers", num_slots, seed)


def _append(
    target: PreTrainedModel,
    requests: Sequence[TextRequest],
    path: Path,
    record: Callable[[TextResult], dict],
    what: str,
    num_slots: int,
    seed: int,
) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    done = _done_keys(path)
    todo = [r for r in requests if r.key not in done]
    if not todo:
        return 0
    longest = max(len(r.input_ids) + r.max_new_tokens for r in todo)
    made = 0
    with path.open("a", encoding="utf-8") as file, tqdm(total=len(todo), desc=what, unit="text") as bar:
        slots = min(num_slots, len(todo))
        for result in decode_requests(target, todo, num_slots=slots, seed=seed + len(done), max_length=longest):
            file.write(json.dumps(record(result)) + "\n")
            file.flush()
            made += len(result.response_ids)
            bar.update()
            bar.set_postfix_str(f"{made / max(bar.format_dict['elapsed'], 1e-3):.0f} tok/s")
    return made


def invent_prompts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    path: str | Path,
    *,
    domain: str = "chat",
    temperature: float = 1.0,
    num_slots: int = 128,
    seed: int = 0,
) -> list[Prompt]:
    """Let the target write `count` user turns itself: it continues the chat template's opening of a user's turn.

    The texts are kept in `path` (JSONL `{"key", "domain", "prompt"}`) and read back from there; those shorter than
    four words, cut off or standing there twice are left out (the idea is that of Magpie, arXiv 2406.08464).
    """
    prefix = user_turn_prefix(tokenizer)
    eos = eos_ids(target)
    requests = [TextRequest(i, prefix, 96, temperature) for i in range(count)]

    def record(result: TextResult) -> dict:
        whole = bool(result.response_ids) and result.response_ids[-1] in eos
        text = tokenizer.decode(result.response_ids, skip_special_tokens=True).strip() if whole else ""
        return {"key": result.key, "domain": domain, "prompt": text}

    _append(target, requests, Path(path), record, "prompts", num_slots, seed)
    return [Prompt(domain, tuple(ids)) for ids in _invented(Path(path), tokenizer)]


def _invented(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    seen: set[str] = set()
    for _, line in read_jsonl(path):
        text = line["prompt"]
        if len(re.findall(r"\w+", text)) >= 4 and text not in seen:
            seen.add(text)
            yield encode_messages(tokenizer, [{"role": "user", "content": text}])
