"""The sequential stage: drawing blocks left to right for n sequences (paper §3.1, eq. 4).

Axes: n sequences, K tokens drafted so far, N candidates of a position, r rank, d hidden size, V vocabulary of the target, V_d of
the drafts.
This file travels with a checkpoint (`auto_map`), so it imports only its neighbours `*_dspark.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import functional as F
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
_TAKE_EMPTY_ROWS = tuple(
    getattr(logits_process, name)
    for name in ("TemperatureLogitsWarper", "TopKLogitsWarper", "RepetitionPenaltyLogitsProcessor")
)

# By default, and from such a draft vocabulary on; docs/performance.md has what fewer cost in τ.
TOP_CANDIDATES = 1024
LARGE_VOCABULARY = 32 * TOP_CANDIDATES


class Noise(Protocol):
    """The exponential numbers by which a text's next tokens will be drawn."""

    def at(self, position: int) -> torch.Tensor:
        """Of one position, 0 being that of the first token drafted. [V]"""


class Admission(Protocol):
    """Says whether position k of each sequence is drafted, without knowing any x_k."""

    reads_survival: bool

    def admit(self, position: int, open_sequences: Sequence[int], survival: Sequence[Sequence[float]]) -> list[bool]:
        """`position` k counts from 1. `survival`: (a_1, ..., a_k) of every sequence, empty unless `reads_survival`."""


@dataclass(frozen=True)
class DraftBlock:
    """What `DSparkDraftModel.draft` returns for B sequences.

    token_ids: [B, K], ids of the target's vocabulary, K <= γ.
    logits: [B, K, N], corrected and processed: what each token was drawn from.
    candidate_ids: [B, K, N], the target ids that the columns of `logits` stand for; `None`: the drafter's whole vocabulary.
    confidence_logits: [B, K], as the head gives them, not calibrated; `None` without a confidence head.
    num_admitted: [B], on the CPU, how many of the K tokens the sequence has; zeros lie behind them.
    survival: for each sequence the calibrated (a_1, a_2, ...) that the policy read, of the refused position too.
    cache: K/V of the context alone.
    """

    token_ids: torch.LongTensor
    logits: torch.Tensor
    candidate_ids: torch.LongTensor | None
    confidence_logits: torch.Tensor | None
    num_admitted: torch.LongTensor
    survival: list[list[float]]
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
    """Processed scores; no tensor of inference mode gets to a processor, which may write into it or keep it. [n, N]"""
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
    """c_k of every sequence at `position` k, from 1 (§3.2.1)."""
    temperatures, shifts = config.confidence_temperatures, config.confidence_shifts
    temperature = 1.0 if temperatures is None else temperatures[position - 1]
    shift = 0.0 if shifts is None else shifts[position - 1]
    # A handful of numbers: plain Python is faster than tensors here.
    return [1.0 / (1.0 + math.exp(min(-x / temperature - shift, 700.0))) for x in logits]


def in_target_vocabulary(
    values: torch.Tensor,  # [..., N]
    token_ids: torch.LongTensor | None,  # [..., N], target ids of the columns; `None`: they are the first ones
    vocab_size: int,
    elsewhere: float,
) -> torch.Tensor:
    """`values` of some tokens spread over the target's vocabulary, `elsewhere` for all others. [..., V]"""
    if token_ids is None:
        missing = vocab_size - values.shape[-1]
        return F.pad(values, (0, missing), value=elsewhere) if missing else values
    return values.new_full((*values.shape[:-1], vocab_size), elsewhere).scatter_(-1, token_ids, values)


@dataclass(frozen=True)
class Candidates:
    """The tokens that positions are drawn from, with their base logits.

    logits: [..., N]. rows: [..., N], their draft ids; `None`: the whole draft vocabulary. token_ids: [..., N], their target
    ids; `None`: the drafter's whole vocabulary.
    """

    logits: torch.Tensor
    rows: torch.LongTensor | None
    token_ids: torch.LongTensor | None

    @classmethod
    def of(cls, model: DSparkDraftModel, base_logits: torch.Tensor, count: int | None) -> Candidates:
        """The `count` most likely tokens of each position, or all of them (`None`). base_logits: [..., V_d]

        Fewer spare the head reading its whole matrix for every token, so without a head all stay.
        """
        head, rows, ids = model.markov_head, None, None
        base_logits = base_logits.to(scores_dtype(base_logits))
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
        """Scores after the processors, which get rows of the target's vocabulary where they may read the prefix. [1, N]"""
        if are_value_only(processors):
            return apply_processors(_until_empty(processors), input_ids, scores)
        full = in_target_vocabulary(scores, self.token_ids, vocab_size, float("-inf"))
        full = apply_processors(_until_empty(processors), input_ids, full)
        return full[..., : scores.shape[-1]] if self.token_ids is None else full.gather(-1, self.token_ids)


@dataclass(eq=False)
class DraftRow:
    """One sequence of a draft: what it asks for, and what was drawn.

    prefix: [1, L] committed ids, the anchor last. limit: tokens at most. survival: calibrated (a_1, a_2, ...) that the policy
    read, of the refused position too. error: raised by a processor, which ends this sequence's draft alone. noise: of a
    sampled text, where the target will draw its tokens by it; the draft guesses them by the same numbers.
    """

    prefix: torch.LongTensor
    limit: int
    do_sample: bool = False
    processors: Callable | None = None
    generator: torch.Generator | None = None
    noise: Noise | None = None
    survival: list[float] = field(default_factory=list)
    error: Exception | None = None
    # Tensors of all sequences and the place in them, so that nothing is computed for what is never looked at:
    # token ids [n], scores [n, N], candidate ids [n, N] or None of each token; confidences [n], of a refused position too.
    _drawn: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]] = field(default_factory=list)
    _confidences: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._drawn)

    def token_ids(self, count: int | None = None) -> torch.LongTensor:
        """The first `count` tokens, all by default. [K]"""
        drawn = self._drawn[:count]
        return torch.cat([ids[j : j + 1] for ids, _, _, j in drawn]) if drawn else self.prefix.new_zeros(0)

    def scores(self, count: int | None = None) -> torch.Tensor:
        """What each of them was drawn from; needs a token. [K, N]"""
        return torch.stack([scores[j] for _, scores, _, j in self._drawn[:count]])

    def candidate_ids(self, count: int | None = None) -> torch.LongTensor | None:
        """The target ids of the columns of `scores`, [K, N]; `None`: the drafter's whole vocabulary."""
        known = [ids[j] for _, _, ids, j in self._drawn[:count] if ids is not None]
        return torch.stack(known) if known else None

    def probs(self, count: int, vocab_size: int) -> torch.Tensor:
        """The distributions of the first `count` tokens over the target's vocabulary. [K, V]"""
        return in_target_vocabulary(self.scores(count).softmax(-1), self.candidate_ids(count), vocab_size, 0.0)

    def confidence_logits(self, count: int | None = None) -> torch.Tensor | None:
        """As the head gives them, of the first `count` positions. [K]"""
        known = self._confidences[:count]
        return torch.cat([values[j : j + 1] for values, j in known]) if known else None


class Slots(Protocol):
    """The positions that tokens are drawn at."""

    def at(self, k: int, sequences: Sequence[int], previous: torch.LongTensor) -> tuple[torch.Tensor, Candidates]:
        """h_k [n, d] and the candidates of x_k [n, N] of these sequences, after their tokens `previous` [n]; k from 0."""

    def skipped(self, sequences: Sequence[int]) -> torch.Tensor | None:
        """Hidden states [n, d] of a slot before the first that proposes nothing, which a recurrent head passes all the same."""


class Sampler:
    """Draws the blocks of n sequences, position by position.

    On an accelerator whatever is read back waits for all that was queued before it. There (`deferred`) all tokens are drawn
    first; then the policy is asked position by position about the same numbers, which tell nothing of x_k, and what it refuses
    is dropped. policy_seconds: what asking took.

    Raises:
        ValueError: a policy that reads survival, for a drafter without a confidence head.
    """

    def __init__(
        self, model: DSparkDraftModel, rows: Sequence[DraftRow], admission: Admission | None, deferred: bool
    ) -> None:
        self.model, self.rows, self.admission = model, rows, admission
        self.reads_survival = admission is not None and admission.reads_survival
        if self.reads_survival and model.confidence_head is None:
            raise ValueError(
                f"{type(admission).__name__} needs a drafter with a confidence head, and this one has none. Use another policy."
            )
        self.asks_later = self.reads_survival and deferred
        self.policy_seconds = 0.0
        self._survival = [row.survival for row in rows]

    def draw(self, slots: Slots) -> None:
        """Fill in the rows."""
        model, head = self.model, self.model.markov_head
        going = [i for i, row in enumerate(self.rows) if row.limit > 0]
        if not going:
            return
        previous = torch.cat([self.rows[i].prefix[0, -1:] for i in going]).to(model.device)
        state = None
        if head is not None and (skipped := slots.skipped(going)) is not None:
            state = head.step(head.markov_w1(model.known_ids(previous)), skipped, None)[1]
        for k in range(max(self.rows[i].limit for i in going)):
            kept = [i for i in going if self.rows[i].limit > k]
            previous, state, going = _narrowed(previous, going, kept), _narrowed(state, going, kept), kept
            hidden, candidates = slots.at(k, going, previous)
            embedding = latent = None
            if head is not None:
                embedding = head.markov_w1(model.known_ids(previous))
                latent, state = head.step(embedding, hidden, state)
            if model.confidence_head is not None:
                confidences = model.confidence(hidden, embedding)
                for j, i in enumerate(going):
                    self.rows[i]._confidences.append((confidences, j))
            if self.admission is not None and not self.asks_later:
                kept = self._admitted(k + 1, going, confidences.tolist() if self.reads_survival else ())
                if not kept:
                    break
                if len(kept) < len(going):
                    latent, state = _narrowed(latent, going, kept), _narrowed(state, going, kept)
                    candidates, going = candidates[[going.index(i) for i in kept]], kept
            scores = candidates.logits if latent is None else candidates.logits + head.project(latent, candidates.rows)
            previous, kept = self._draw_tokens(going, candidates, scores)
            if not kept:
                break
            state, going = _narrowed(state, going, kept), kept
        if self.asks_later:
            self._ask_later()

    def _draw_tokens(
        self, going: list[int], candidates: Candidates, scores: torch.Tensor
    ) -> tuple[torch.LongTensor, list[int]]:
        """One token each; the tokens, and the sequences that got one."""
        if not any(self.rows[i].do_sample or self.rows[i].processors for i in going):
            tokens = candidates.chosen(scores.argmax(-1))
            for j, i in enumerate(going):
                self.rows[i]._drawn.append((tokens, scores, candidates.token_ids, j))
            return tokens, going
        drawn, kept = [], []
        for j, i in enumerate(going):
            token = self._draw_one(self.rows[i], candidates[j : j + 1], scores[j : j + 1])
            if token is not None:
                drawn.append(token)
                kept.append(i)
        return torch.cat(drawn) if drawn else scores.new_zeros(0, dtype=torch.long), kept

    def _draw_one(self, row: DraftRow, candidates: Candidates, scores: torch.Tensor) -> torch.LongTensor | None:
        """A token [1] from `scores` [1, N]; `None` where the row's processors leave none, or fail."""
        try:
            if row.processors:
                ids = torch.cat([row.prefix, row.token_ids()[None].to(row.prefix.device)], dim=1)
                vocab_size = self.model.target_vocab_size
                scores = candidates.process(row.processors, ids.to(scores.device), scores, vocab_size)
                if may_forbid_all(row.processors) and bool(torch.isneginf(scores).all()):
                    return None
            column = _column(row, candidates, scores)
        except Exception as error:
            row.error = error
            return None
        token = candidates.chosen(column)
        row._drawn.append((token, scores, candidates.token_ids, 0))
        return token

    def _admitted(self, position: int, going: list[int], confidences: Sequence[float]) -> list[int]:
        """Those of `going` that the policy lets draft `position`; `confidences`: of each, where it reads survival."""
        started = time.perf_counter()
        if self.reads_survival:
            for i, c in zip(going, calibrated_confidences(self.model.config, confidences, position), strict=True):
                self._survival[i].append(c * (self._survival[i][-1] if self._survival[i] else 1.0))
        assert self.admission is not None
        admitted = self.admission.admit(position, going, self._survival)
        self.policy_seconds += time.perf_counter() - started
        return [i for i, goes_on in zip(going, admitted, strict=True) if goes_on]

    def _ask_later(self) -> None:
        """All confidences in one transfer, then the policy as if each token were still to be drawn."""
        rows = self.rows
        flat = iter(torch.cat([c for row in rows if (c := row.confidence_logits()) is not None]).tolist())
        known = [[next(flat) for _ in row._confidences] for row in rows]
        going = [i for i, row in enumerate(rows) if row.limit > 0]
        for k in range(max(map(len, known))):
            going = [i for i in going if len(known[i]) > k]
            kept = self._admitted(k + 1, going, [known[i][k] for i in going]) if going else []
            for i in set(going) - set(kept):
                del rows[i]._drawn[k:]
            going = kept


def _column(row: DraftRow, candidates: Candidates, scores: torch.Tensor) -> torch.LongTensor:
    """The column of `scores` [1, N] that the row's next token is in. [1]"""
    if not row.do_sample:
        return scores.argmax(-1)
    if row.noise is None:
        return draw_tokens(scores.softmax(-1), row.generator)
    noise = row.noise.at(len(row)).to(scores.device)
    ids = candidates.token_ids
    own = noise[None, : scores.shape[-1]] if ids is None else noise[ids]
    return (scores - own.log()).argmax(-1)


def _narrowed(values: torch.Tensor | None, sequences: Sequence[int], kept: Sequence[int]) -> torch.Tensor | None:
    """The rows of `kept` alone, in their order; `sequences` name the rows of `values`."""
    if values is None or len(sequences) == len(kept):
        return values
    return values[[sequences.index(i) for i in kept]]


class BlockSlots:
    """Slots of the blocks that one parallel stage has read.

    hidden: [R, d], of all blocks. first: for each sequence the row of its first prediction; limits: its positions, 0 for a
    sequence that drafts nothing. top_candidates: as in `Candidates.of`.
    """

    def __init__(
        self,
        model: DSparkDraftModel,
        hidden: torch.Tensor,
        first: Sequence[int],
        limits: Sequence[int],
        top_candidates: int | None,
    ) -> None:
        self.hidden, self.first = hidden, first
        self.skips = not model.config.sample_from_anchor
        self.starts: list[int] = []
        rows: list[int] = []
        for at, limit in zip(first, limits, strict=True):
            self.starts.append(len(rows))
            rows += range(at, at + limit)
        together = rows == list(range(rows[0], rows[0] + len(rows)))  # a view is cheaper than a gather
        needed = hidden[rows[0] : rows[0] + len(rows)] if together else hidden[rows]
        self.candidates = Candidates.of(model, model.compute_logits(needed), top_candidates)

    def at(self, k: int, sequences: Sequence[int], previous: torch.LongTensor) -> tuple[torch.Tensor, Candidates]:
        places, starts = [self.first[i] + k for i in sequences], [self.starts[i] + k for i in sequences]
        if len(sequences) == 1:
            return self.hidden[places[0] : places[0] + 1], self.candidates[starts[0] : starts[0] + 1]
        return self.hidden[places], self.candidates[starts]

    def skipped(self, sequences: Sequence[int]) -> torch.Tensor | None:
        return self.hidden[[self.first[i] - 1 for i in sequences]] if self.skips else None
