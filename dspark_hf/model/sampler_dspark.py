"""The sequential stage: drawing a block left to right (paper §3.1, eq. 4).

Owns: which tokens a position is drawn from, head bias, processors, the draw of x_k, confidence and survival, asking the
admission policy with nothing of x_k.
Does not own: the parallel stage (`modeling_dspark`), which policy (`scheduling.admission`), accepting drafts.
Axes: B sequences, K tokens drafted so far, N candidates of a position, r rank, d hidden size, V target vocabulary, V_d draft
vocabulary.
This file travels with a checkpoint (`auto_map`), so it imports nothing else of the package.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.cache_utils import Cache
from transformers.generation import logits_process

if TYPE_CHECKING:
    from .configuration_dspark import DSparkConfig
    from .modeling_dspark import DSparkDraftModel

# Processors that look at one row of scores only: they may run in the draft vocabulary, and on many rows at once.
VALUE_ONLY_PROCESSORS = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "LogitNormalization",
    )
)

# By default, and from such a draft vocabulary on. With the default pair (8,192 tokens) τ at temperature 1 was 1.757 with all
# tokens, 1.744 with 1,024, 1.706 with 256 and 1.628 with 32 (greedy 2.043, 2.046, 2.043 and 2.021); and only a large matrix
# takes longer to read than to choose from.
TOP_CANDIDATES = 1024
LARGE_VOCABULARY = 32 * TOP_CANDIDATES


_TAKE_EMPTY_ROWS = tuple(
    getattr(logits_process, name)
    for name in ("TemperatureLogitsWarper", "TopKLogitsWarper", "RepetitionPenaltyLogitsProcessor")
)


class Admission(Protocol):
    """Says whether position k is drafted, without knowing x_k (design decision 3)."""

    reads_survival: bool

    def admit(self, position: int, survival_so_far: list[float]) -> bool:
        """`position` k counts from 1; `survival_so_far` is (a_1, ..., a_k), empty unless `reads_survival`."""


@dataclass(frozen=True)
class DraftBlock:
    """One drafted block.

    token_ids: [B, K], ids of the target's vocabulary, K <= γ.
    logits: [B, K, N], corrected and processed: what each token was drawn from.
    candidate_ids: [B, K, N], the target ids that the columns of `logits` stand for; `None`: the target's whole vocabulary.
    confidence_logits: [B, K], as the head gives them, not calibrated; `None` without a confidence head.
    survival: for each row the calibrated (a_1, a_2, ...) that the policy read, of the refused position too.
    policy_seconds: what asking the policy took.
    num_admitted: [B], on the CPU, how many of the K tokens the admission policy let through in each row.
    cache: K/V of the context alone.
    """

    token_ids: torch.LongTensor
    logits: torch.Tensor
    candidate_ids: torch.LongTensor | None
    confidence_logits: torch.Tensor | None
    num_admitted: torch.LongTensor
    survival: list[list[float]]
    policy_seconds: float
    cache: Cache


def draw_tokens(probs: torch.Tensor, generator: torch.Generator | None = None) -> torch.LongTensor:
    """One token id for every row of probabilities. [..., V] -> [...]"""
    flat = torch.multinomial(probs.reshape(-1, probs.shape[-1]), 1, generator=generator)
    return flat.view(probs.shape[:-1])


def scores_dtype(logits: torch.Tensor) -> torch.dtype:
    """Scores are float32, as in transformers, or float64 where the model itself is."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def are_value_only(processors: Callable | None) -> bool:
    """Whether all processors read nothing but one row of scores."""
    if processors is None:
        return True
    return isinstance(processors, list) and all(isinstance(p, VALUE_ONLY_PROCESSORS) for p in processors)


def apply_processors(processors: Callable, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
    """Processed scores; no tensor of inference mode gets to a processor, which may write into it or keep it. [B, N]"""
    if not torch.is_inference_mode_enabled():
        return processors(input_ids, scores)
    with torch.inference_mode(False), torch.no_grad():
        return processors(input_ids.clone(), scores.clone())


def may_forbid_all(processors: Callable) -> bool:
    """Whether the processors could leave no token of some candidates, which costs a look at every row of scores."""
    harmless = (*VALUE_ONLY_PROCESSORS, logits_process.RepetitionPenaltyLogitsProcessor)
    return not isinstance(processors, list) or not all(isinstance(p, harmless) for p in processors)


def _until_empty(processors: Callable) -> Callable:
    """These processors, but for those behind the one that leaves a row no token: some fail on it, or make it NaN."""
    if not may_forbid_all(processors) or not isinstance(processors, list):
        return processors

    def process(input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        for i, processor in enumerate(processors):
            fails = not isinstance(processor, _TAKE_EMPTY_ROWS)
            if i and fails and bool(torch.isneginf(scores).all(-1).any()):
                break
            scores = processor(input_ids, scores)
        return scores

    return process


def calibrated_confidences(config: DSparkConfig, logits: Sequence[float], position: int) -> list[float]:
    """c_k of every row at `position` k, from 1 (§3.2.1)."""
    temperatures, shifts = config.confidence_temperatures, config.confidence_shifts
    temperature = 1.0 if temperatures is None else temperatures[position - 1]
    shift = 0.0 if shifts is None else shifts[position - 1]
    # A handful of numbers: plain Python is faster than tensors here.
    return [1.0 / (1.0 + math.exp(min(-x / temperature - shift, 700.0))) for x in logits]


def in_target_vocabulary(
    values: torch.Tensor,  # [..., N]
    token_ids: torch.LongTensor | None,  # [..., N], target ids of the columns; `None`: they are the vocabulary
    vocab_size: int,
    elsewhere: float,
) -> torch.Tensor:
    """`values` of some tokens spread over the target's vocabulary, `elsewhere` for all others. [..., V]"""
    if token_ids is None:
        return values
    return values.new_full((*values.shape[:-1], vocab_size), elsewhere).scatter_(-1, token_ids, values)


@dataclass(frozen=True)
class Candidates:
    """The tokens that positions are drawn from, with their base logits.

    logits: [..., N]. rows: [..., N], their draft ids; `None`: the whole draft vocabulary. token_ids: [..., N], their target
    ids; `None`: the target's whole vocabulary.
    """

    logits: torch.Tensor
    rows: torch.LongTensor | None
    token_ids: torch.LongTensor | None

    @classmethod
    def of(cls, model: DSparkDraftModel, base_logits: torch.Tensor) -> Candidates:
        """The `model.top_candidates` most likely tokens of each position, or all of them. base_logits: [..., V_d]

        Fewer spare the head reading its whole matrix for every token, so without a head all stay.

        Raises:
            ValueError: `top_candidates` below 1.
        """
        count, head, rows, ids = model.top_candidates, model.markov_head, None, None
        if count is not None and (type(count) is not int or count < 1):
            raise ValueError(f"top_candidates must be a whole number from 1, or None for all tokens, got {count!r}.")
        # Single rows of a quantised matrix can't be had.
        narrows = count is not None and head is not None and head.markov_w2.weight.is_floating_point()
        if narrows and count < base_logits.shape[-1]:
            base_logits, rows = base_logits.topk(count, sorted=False)
        if model.config.has_reduced_vocab:
            ids = model.draft_token_ids()
            ids = ids.expand(base_logits.shape) if rows is None else ids[rows]
        return cls(base_logits, rows, rows if ids is None else ids)

    def __getitem__(self, index: Any) -> Candidates:
        """Those of some positions."""
        rows, ids = self.rows, self.token_ids
        return Candidates(
            self.logits[index], None if rows is None else rows[index], None if ids is None else ids[index]
        )

    def chosen(self, columns: torch.LongTensor) -> torch.LongTensor:
        """Target ids of one column of each position. [...] -> [...]"""
        return columns if self.token_ids is None else self.token_ids.gather(-1, columns[..., None])[..., 0]

    def process(
        self, processors: Callable, input_ids: torch.LongTensor, scores: torch.Tensor, vocab_size: int
    ) -> torch.Tensor:
        """Scores after the processors, which get rows of the target's vocabulary where they may read the prefix. [B, N]"""
        if self.token_ids is None or are_value_only(processors):
            return apply_processors(_until_empty(processors), input_ids, scores)
        full = in_target_vocabulary(scores, self.token_ids, vocab_size, float("-inf"))
        return apply_processors(_until_empty(processors), input_ids, full).gather(-1, self.token_ids)


class SequentialLoop:
    """The state of one left-to-right draft: previous token, recurrent state, survival, what has been drawn.

    On an accelerator whatever is read back waits for all that was queued before it. There (`deferred`) the tokens are drawn
    first, as many as are planned; then the policy is asked position by position about the same numbers, which tell nothing of
    x_k, and what it refuses is dropped.
    """

    def __init__(
        self,
        model: DSparkDraftModel,
        prefix: torch.LongTensor,  # [B, L], the last one is the anchor
        do_sample: bool,
        logits_processor: Callable | None,
        admission: Admission | None,
        generator: torch.Generator | None,
    ) -> None:
        self.model, self.prefix = model, prefix
        self.do_sample, self.admission, self.generator = do_sample, admission, generator
        self.reads_survival = admission is not None and admission.reads_survival
        if self.reads_survival and model.confidence_head is None:
            raise ValueError("This admission policy needs a drafter with a confidence head.")
        deferred = prefix.device.type != "cpu" if model.deferred_admission is None else model.deferred_admission
        self.asks_later = self.reads_survival and deferred
        self.processors = None if isinstance(logits_processor, list) and not logits_processor else logits_processor
        self.state: torch.Tensor | None = None
        self.previous = prefix[:, -1]
        rows = prefix.shape[0]
        self.survival: list[list[float]] = [[] for _ in range(rows)]
        self.open_rows = [True] * rows
        self.num_admitted = [0] * rows
        self.policy_seconds = 0.0
        self.tokens: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self.confidences: list[torch.Tensor] = []  # of the position that ended the draft too

    def skip(self, hidden: torch.Tensor) -> None:
        """Pass a slot that proposes nothing. [B, d]"""
        if (head := self.model.markov_head) is not None:
            _, self.state = head.step(head.markov_w1(self.previous), hidden, self.state)

    def step(self, hidden: torch.Tensor, candidates: Candidates) -> bool:
        """Draft x_k from h_k [B, d] and U_k [B, N]; `False` where the policy, or the lack of allowed tokens, ends it."""
        head = self.model.markov_head
        embedding = latent = None
        if head is not None:
            embedding = head.markov_w1(self.previous)
            latent, self.state = head.step(embedding, hidden, self.state)
        if self.model.confidence_head is not None:
            self.confidences.append(self.model.confidence(hidden, embedding))
        if not self.asks_later:
            known = self.confidences[-1].tolist() if self.reads_survival else ()
            if not self._admit(len(self.tokens) + 1, known):
                return False
        scores = candidates.logits if head is None else candidates.logits + head.project(latent, candidates.rows)
        if self.processors is not None:
            ids = torch.cat([self.prefix, *(t[:, None] for t in self.tokens)], dim=1) if self.tokens else self.prefix
            scores = candidates.process(self.processors, ids, scores, self.model.config.vocab_size)
            if may_forbid_all(self.processors) and bool(torch.isneginf(scores).all(-1).any()):
                return False
        token = draw_tokens(scores.softmax(-1), self.generator) if self.do_sample else scores.argmax(-1)
        self.previous = candidates.chosen(token)
        self.tokens.append(self.previous)
        self.logits.append(scores)
        return True

    def _admit(self, position: int, confidence: Sequence[float]) -> bool:
        """Ask the policy for every row still open; whether any remains. `confidence`: of each row, where it reads survival."""
        started = time.perf_counter()
        if self.reads_survival:
            known = calibrated_confidences(self.model.config, confidence, position)
            for survival, c in zip(self.survival, known, strict=True):
                survival.append(c * (survival[-1] if survival else 1.0))
        for row, survival in enumerate(self.survival):
            if self.open_rows[row] and self.admission is not None:
                self.open_rows[row] = bool(self.admission.admit(position, survival))
            if self.open_rows[row]:
                self.num_admitted[row] = position
        self.policy_seconds += time.perf_counter() - started
        return any(self.open_rows)

    def _num_kept(self) -> int:
        """How many of the drawn tokens stay: the policy is asked now where it was not before each of them."""
        drawn = len(self.tokens)
        if self.asks_later and self.confidences:
            # All in one transfer.
            for k, known in enumerate(torch.stack(self.confidences).tolist()):
                if not self._admit(k + 1, known):
                    return min(k, drawn)
        return drawn

    def block(self, cache: Cache, candidates: Candidates) -> DraftBlock:
        """What has been drafted; `candidates` are those of all positions, [B, K or more, N]."""
        count, rows = self._num_kept(), self.prefix.shape[0]
        confidences = None
        if self.model.confidence_head is not None:
            empty = candidates.logits.new_zeros(rows, 0)
            confidences = torch.stack(self.confidences[:count], dim=1) if count else empty
        return DraftBlock(
            token_ids=torch.stack(self.tokens[:count], dim=1) if count else self.prefix.new_zeros(rows, 0),
            logits=torch.stack(self.logits[:count], dim=1) if count else candidates.logits[:, :0],
            candidate_ids=None if candidates.token_ids is None else candidates.token_ids[:, :count],
            confidence_logits=confidences,
            num_admitted=torch.tensor([min(n, count) for n in self.num_admitted]),
            survival=self.survival,
            policy_seconds=self.policy_seconds,
            cache=cache,
        )
