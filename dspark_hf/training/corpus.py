"""The text that a drafter is trained on: prompts, given or invented, the target's own answers to them, and their tokens.

Answers stand in JSONL files, `{"key", "domain", "temperature", "input_ids", "response_ids"}` with token ids of the target's
tokenizer, which are continued after a kill.
"""

from __future__ import annotations

import collections
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..decoding.target import eos_ids
from ..decoding.trial_forwards import context_length
from ..engine.engine import BatchEngine
from ..loading.chat_template import encode_messages, messages_of, read_jsonl

logger = logging.get_logger(__name__)
_SENTINEL = "\u241f"  # a character that no chat template writes by itself
_VOCABULARY_MULTIPLE = 64  # sizes that matrix products like
_INVENTED_TOKENS = 96  # longest prompt that the target writes


@dataclass(frozen=True)
class Prompt:
    """One prompt as token ids, chat template applied; `domain` groups prompts in reports and for balance."""

    domain: str
    input_ids: tuple[int, ...]


@dataclass(frozen=True)
class AnswerPlan:
    """One answer to make: which prompt, and the temperature to draw it at (0 = greedy)."""

    key: int
    prompt: Prompt
    temperature: float = 0.0


@dataclass(frozen=True)
class Answer:
    """One training text: the prompt's ids, the target's answer and the domain it belongs to."""

    domain: str
    input_ids: list[int]
    response_ids: list[int]


# -- prompts ---------------------------------------------------------------------------------------------------------


def load_prompts(path: str | Path, tokenizer: PreTrainedTokenizerBase, max_length: int = 256) -> list[Prompt]:
    """Prompts of a JSONL file, chat template applied; those over `max_length` tokens are left out."""
    prompts = []
    for number, record in read_jsonl(path):
        ids = encode_messages(tokenizer, messages_of(record, f"{path}, line {number}"))
        if len(ids) <= max_length:
            prompts.append(Prompt(str(record.get("domain", "all")), tuple(ids)))
    if not prompts:
        raise ValueError(f"{path}: no prompt of at most {max_length} tokens in it.")
    return prompts


def plan_answers(prompts: Sequence[Prompt], num_answers: int, temperatures: Sequence[float]) -> list[AnswerPlan]:
    """Which prompts to answer, domains in turn, so that each has the same number of answers.

    A domain with few prompts is gone through again at the next temperature; a greedy answer is made once a prompt.
    """
    domains: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).append(prompt)
    rounds = itertools.zip_longest(*(_passes(members, temperatures) for members in domains.values()))
    choices = (choice for of_domains in rounds for choice in of_domains if choice is not None)
    return [AnswerPlan(key, *choice) for key, choice in enumerate(itertools.islice(choices, num_answers))]


def _passes(members: list[Prompt], temperatures: Sequence[float]) -> Iterator[tuple[Prompt, float]]:
    """A domain's prompts over and over, each time at its next temperature; ends where only greedy answers are wanted."""
    sampled = [t for t in temperatures if t > 0]
    greedy_done: set[int] = set()
    for number in itertools.count():
        for i, prompt in enumerate(members):
            temperature = temperatures[(i + number) % len(temperatures)]
            if temperature == 0 and i in greedy_done:
                if not sampled:
                    return
                temperature = sampled[number % len(sampled)]
            if temperature == 0:
                greedy_done.add(i)
            yield prompt, temperature


# -- answers ---------------------------------------------------------------------------------------------------------


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


def decode_answers(
    target: PreTrainedModel, plans: Iterable[AnswerPlan], *, max_new_tokens: int, num_slots: int, seed: int = 0
) -> Iterator[tuple[AnswerPlan, list[int]]]:
    """The planned answers, each as it is done: `num_slots` at once in the batch engine, or one at a time with `generate()`
    where the engine can't serve the target. An answer's draws depend on `seed` and its key alone."""

    def settings(plan: AnswerPlan) -> dict[str, Any]:
        room = context_length(target) - len(plan.prompt.input_ids)
        drawn = {"do_sample": True, "temperature": plan.temperature, "top_k": 50, "top_p": 0.95}
        return {"max_new_tokens": min(max_new_tokens, room)} | (drawn if plan.temperature else {"do_sample": False})

    try:
        engine = BatchEngine(target, max_sequences=num_slots)
    except ValueError as error:
        logger.warning(f"Answering one prompt at a time: {error}")
        for plan in plans:
            torch.manual_seed(_seed_of(plan, seed))
            ids = torch.tensor([plan.prompt.input_ids], device=target.device)
            output = target.generate(ids, attention_mask=torch.ones_like(ids), **settings(plan))
            yield plan, output[0, ids.shape[1] :].tolist()
        return
    waiting = iter(plans)
    running: dict[int, Any] = {}

    def refill() -> None:
        for plan in itertools.islice(waiting, 2 * num_slots - len(running)):
            running[engine.add(plan.prompt.input_ids, seed=_seed_of(plan, seed), **settings(plan))] = plan

    refill()
    for output in engine.run():
        if output.error is not None:
            raise output.error
        yield running.pop(output.id), output.token_ids
        refill()


def _seed_of(plan: AnswerPlan, seed: int) -> int:
    return seed * 1_000_003 + plan.key


def missing_answers(plans: Sequence[AnswerPlan], path: Path) -> list[AnswerPlan]:
    """The planned answers that `path` does not hold yet; a line cut off by a kill is removed from it."""
    if not path.exists():
        return list(plans)
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    done = {json.loads(line)["key"] for line in whole.splitlines()}
    return [plan for plan in plans if plan.key not in done]


def write_answers(
    target: PreTrainedModel,
    plans: Sequence[AnswerPlan],
    path: Path,
    *,
    max_new_tokens: int = 192,
    num_slots: int = 128,
    seed: int = 0,
    what: str = "answers",
    record: Callable[[AnswerPlan, list[int]], dict] | None = None,
) -> None:
    """Answer the planned prompts and append them to `path`, by default as `read_answers` takes them.

    Answers already there are not made again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    missing, made = missing_answers(plans, path), 0
    slots = max(1, min(num_slots, len(missing)))
    results = decode_answers(target, missing, max_new_tokens=max_new_tokens, num_slots=slots, seed=seed)
    with path.open("a", encoding="utf-8") as file, tqdm(total=len(missing), desc=what, unit="text") as bar:
        for plan, ids in results if missing else ():
            line = {"key": plan.key, "domain": plan.prompt.domain}
            if record is None:
                line |= {"temperature": plan.temperature, "input_ids": plan.prompt.input_ids, "response_ids": ids}
            else:
                line |= record(plan, ids)
            file.write(json.dumps(line) + "\n")
            file.flush()
            made += len(ids)
            bar.update()
            bar.set_postfix_str(f"{made / max(bar.format_dict['elapsed'], 1e-3):.0f} tok/s")


# -- invented prompts ------------------------------------------------------------------------------------------------


def invent_prompts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    path: Path,
    *,
    num_slots: int = 128,
    seed: int = 0,
) -> list[Prompt]:
    """Let the target write `count` user turns itself: it continues the chat template's opening of a user's turn.

    The texts are kept in `path` (JSONL `{"key", "domain", "prompt"}`) and read back from there; those shorter than
    four words, cut off or standing there twice are left out (the idea is that of Magpie, arXiv 2406.08464).
    """
    if tokenizer.chat_template is None:
        raise ValueError("Prompts can only be invented with a tokenizer that has a chat template.")
    opening = tokenizer.apply_chat_template([{"role": "user", "content": _SENTINEL}], tokenize=False)
    start = Prompt("chat", tuple(tokenizer(opening.split(_SENTINEL)[0], add_special_tokens=False)["input_ids"]))
    ends = eos_ids(target)

    def record(plan: AnswerPlan, ids: list[int]) -> dict:
        whole = bool(ids) and ids[-1] in ends
        return {"prompt": tokenizer.decode(ids, skip_special_tokens=True).strip() if whole else ""}

    write_answers(
        target,
        [AnswerPlan(i, start, temperature=1.0) for i in range(count)],
        path,
        max_new_tokens=_INVENTED_TOKENS,
        num_slots=num_slots,
        seed=seed,
        what="prompts",
        record=record,
    )
    texts = dict.fromkeys(line["prompt"] for _, line in read_jsonl(path))
    wordy = [text for text in texts if len(re.findall(r"\w+", text)) >= 4]
    return [Prompt("chat", tuple(encode_messages(tokenizer, [{"role": "user", "content": text}]))) for text in wordy]


# -- the draft vocabulary --------------------------------------------------------------------------------------------


def _frequency(answers: Sequence[Answer]) -> collections.Counter[int]:
    return collections.Counter(token for answer in answers for token in answer.response_ids)


def frequent_tokens(answers: Sequence[Answer], count: int, vocab_size: int) -> torch.LongTensor:
    """The `count` most frequent answer tokens, filled up with the lowest ids; ascending."""
    chosen = [token for token, _ in _frequency(answers).most_common(count)]
    seen = set(chosen)
    chosen += [i for i in range(vocab_size) if i not in seen][: count - len(chosen)]
    return torch.tensor(sorted(chosen))


def covering_size(answers: Sequence[Answer], coverage: float, vocab_size: int) -> int:
    """How many of the most frequent tokens make up a share `coverage` of the answers, rounded up to a multiple of 64."""
    counts = [count for _, count in _frequency(answers).most_common()]
    total, covered, size = sum(counts), 0, 0
    while size < len(counts) and covered / total < coverage:
        covered += counts[size]
        size += 1
    return min(max(-(-size // _VOCABULARY_MULTIPLE), 1) * _VOCABULARY_MULTIPLE, vocab_size)


def coverage_of(answers: Sequence[Answer], tokens: torch.LongTensor) -> float:
    """Share of the answers' tokens that are among `tokens`."""
    frequency = _frequency(answers)
    return sum(frequency[token] for token in tokens.tolist()) / frequency.total()
