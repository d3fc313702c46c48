"""Prompts answered under a policy by name: one through `generate()`, many through the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, TextStreamer

from ..decoding.default_policy import scheduled
from ..decoding.profiling import step_rates_of
from ..decoding.statistics import GenerationStats, synchronize
from ..engine.engine import BatchEngine
from ..engine.request import RequestOutput
from ..loading.chat_template import encode_messages
from ..loading.pairs import Target
from ..model.modeling_dspark import DSparkDraftModel
from ..scheduling.policy import ConfidenceThreshold, FixedLength, LaggedScheduler, Policy, ThroughputScheduler
from .questions import DecodingOptions, Question

OWN = "own"
POLICIES = "own, full, fixed:N, threshold:T, throughput, lagged, lookahead, no-lookup"
_ENGINE_LINES = 1.0  # seconds between two records of the engine


# -- policies by name ------------------------------------------------------------------------------------------------


def check_policy(name: str, drafters: Mapping[str, DSparkDraftModel] | None = None) -> None:
    """Refuse a name that is no policy's, or a policy that reads confidences where one of the drafters, by label, gives none."""
    of_block = block_policy(name)
    if of_block is None and name not in POLICIES.split(", "):
        raise ValueError(f"There is no policy {name!r}. Allowed: {POLICIES}.")
    if isinstance(of_block, ConfidenceThreshold) or name in ("throughput", "lagged"):
        for label, drafter in (drafters or {}).items():
            if drafter.confidence_head is None:
                raise ValueError(
                    f"The policy {name} reads confidences, and the drafter {label} has no confidence head. Take full, "
                    "fixed:N or lookahead."
                )


def block_policy(name: str, length: int = 0) -> FixedLength | ConfidenceThreshold | None:
    """The named policy if it decides from the block alone, not from measured times or earlier rounds: full (`length` tokens),
    fixed:3 or threshold:0.4.

    Raises:
        ValueError: a number that is not allowed.
    """
    kind, _, number = name.partition(":")
    try:
        if name == "full":
            return FixedLength(length)
        if kind == "fixed":
            return FixedLength(int(number))
        return ConfidenceThreshold(float(number), patience=None) if kind == "threshold" else None
    except ValueError as error:
        raise ValueError(f"Policy {name!r}: {error} Write for example fixed:3 or threshold:0.4.") from None


def make_policy(name: str, target: PreTrainedModel, drafter: DSparkDraftModel) -> Policy:
    """The policy of a name: one of `block_policy`'s, throughput (Algorithm 1), lagged, lookahead, or no-lookup (lookahead;
    `using_policy` turns prompt lookup off).

    Raises:
        ValueError: another name, or a number that is not allowed.
    """
    check_policy(name)
    if (policy := block_policy(name, drafter.config.num_draft_tokens)) is not None:
        return policy
    if name in ("throughput", "lagged"):
        scheduler = ThroughputScheduler if name == "throughput" else LaggedScheduler
        return scheduler(step_rates_of(target, drafter))
    return scheduled(target, drafter)


@contextmanager
def using_policy(name: str, target: PreTrainedModel, drafter: DSparkDraftModel, lookup: bool = True) -> Iterator[None]:
    """Decode with the named policy inside the block ("own": as the drafter is set), without prompt lookup where `lookup` is
    false; afterwards all is as before."""
    config, length = drafter.generation_config, drafter.config.num_draft_tokens
    options = drafter.options
    before = options.policy, config.num_assistant_tokens, options.lookup_drafts
    if name != OWN:
        policy = make_policy(name, target, drafter)
        # A fixed length's block is made no longer than it needs to be.
        config.num_assistant_tokens = min(policy.length, length) if isinstance(policy, FixedLength) else length
        options.policy = policy
    options.lookup_drafts = before[2] and lookup and name != "no-lookup"
    try:
        yield
    finally:
        options.policy, config.num_assistant_tokens, options.lookup_drafts = before


# -- one prompt ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Completion:
    """Text, token ids of the answer, seconds in all, and the drafter's statistics (`None` when decoded plainly)."""

    text: str
    token_ids: list[int]
    seconds: float
    stats: GenerationStats | None

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, the prefill included."""
        return len(self.token_ids) / self.seconds

    @property
    def accept_length(self) -> float:
        """τ, tokens committed per round; 1 for plain decoding."""
        return 1.0 if self.stats is None else self.stats.accept_length

    def to_dict(self) -> dict[str, Any]:
        """For JSON output."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "dspark": None if self.stats is None else self.stats.to_dict(),
        }


def check_length(target: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Refuse a prompt that leaves no room for `max_new_tokens` in the target's context."""
    limit = target.config.get_text_config().max_position_embeddings
    if prompt_tokens + max_new_tokens > limit:
        raise ValueError(
            f"The prompt has {prompt_tokens} tokens; with {max_new_tokens} new ones that is more than the target's context "
            f"of {limit}. Shorten the prompt or ask for fewer new tokens."
        )


def timed_generate(
    target: PreTrainedModel, input_ids: list[int], options: DecodingOptions, **method: Any
) -> tuple[list[int], float]:
    """The new token ids of one `generate()` call and its seconds; `method` are further arguments of the call."""
    ids = torch.tensor([input_ids], device=target.device)
    torch.manual_seed(options.seed)
    synchronize(target.device)
    start = time.perf_counter()
    output = target.generate(ids, attention_mask=torch.ones_like(ids), **options.arguments, **method)
    synchronize(target.device)
    return output[0, len(input_ids) :].tolist(), time.perf_counter() - start


def complete(
    target: Target,
    prompt: str,
    options: DecodingOptions,
    drafter: DSparkDraftModel | None = None,
    stream: bool = False,
) -> Completion:
    """Answer `prompt`; `stream` prints the text to standard output as it comes.

    Raises:
        ValueError: an empty prompt, or one that does not fit the target's context.
    """
    if not prompt.strip():
        raise ValueError("The prompt is empty. Give some text with --prompt.")
    ids = encode_messages(target.tokenizer, [{"role": "user", "content": prompt}])
    check_length(target.model, len(ids), options.max_new_tokens)
    method: dict[str, Any] = {} if drafter is None else {"assistant_model": drafter}
    if stream:
        method["streamer"] = TextStreamer(target.tokenizer, skip_prompt=True, skip_special_tokens=True)
    answer, seconds = timed_generate(target.model, ids, options, **method)
    text = target.tokenizer.decode(answer, skip_special_tokens=True)
    return Completion(text, answer, seconds, None if drafter is None else drafter.last_generation)


# -- many prompts ----------------------------------------------------------------------------------------------------


def answer_all(
    target: Target,
    drafter: DSparkDraftModel | None,
    questions: Sequence[Question],
    max_sequences: int,
    on_record: Callable[[dict[str, Any]], None],
) -> None:
    """Answer all questions; `on_record` gets one record for each as it is finished (`type` "request", with its `index`), and
    about every second one of the engine (`type` "engine").

    Ctrl-C ends it with records of what was not finished (`finish_reason` "interrupted") before it is raised again.

    Raises:
        ValueError: a prompt that does not fit the target's context; nothing was decoded then.
    """
    engine = BatchEngine(target.model, drafter, max_sequences=max_sequences)
    for question in questions:
        try:
            ids = encode_messages(target.tokenizer, question.messages)
            engine.add(ids, seed=question.options.seed, **question.options.arguments)
        except ValueError as error:
            raise ValueError(f"{question.where}: {error}") from None

    def finished(output: RequestOutput) -> None:
        entry = output.to_dict()
        text = target.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        on_record({"type": "request", "index": entry.pop("id"), "text": text} | entry)

    last = time.perf_counter()
    try:
        while engine.num_unfinished:
            for output in engine.step():
                finished(output)
            if time.perf_counter() - last >= _ENGINE_LINES or not engine.num_unfinished:
                last = time.perf_counter()
                on_record({"type": "engine"} | engine.stats.to_dict())
    except KeyboardInterrupt:
        for output in engine.interrupt():
            finished(output)
        raise
