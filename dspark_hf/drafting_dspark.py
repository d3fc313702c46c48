"""The sequential stage: drawing a block left to right (paper §3.1, eq. 4).

Owns: head bias, processors, the draw of x_k, confidence and survival, asking the admission policy before x_k exists.
Does not own: the parallel stage (`modeling_dspark`), which policy (`scheduling.admission`), accepting drafts.
Axes: B sequences, K tokens drafted so far, r rank, d hidden size, V target vocabulary, V_d draft vocabulary.
This file travels with a checkpoint (`auto_map`), so it imports nothing else of the package.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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


class Admission(Protocol):
    """Says whether position k is drafted, before x_k exists (design decision 3)."""

    reads_survival: bool

    def admit(self, position: int, survival_so_far: list[float]) -> bool:
        """`position` k counts from 1; `survival_so_far` is (a_1, ..., a_k), empty unless `reads_survival`."""


@dataclass(frozen=True)
class DraftBlock:
    """One drafted block.

    token_ids: [B, K], ids of the target's vocabulary, K <= γ.
    logits: [B, K, V_d], corrected and processed: what each token was drawn from; `None` where nothing was drawn (a copy).
    confidence_logits: [B, K], as the head gives them, not calibrated; `None` without a confidence head.
    survival: for each row the calibrated (a_1, a_2, ...) that the policy read, of the refused position too.
    policy_seconds: what asking the policy took.
    num_admitted: [B], how many of the K tokens the admission policy let through in each row.
    cache: K/V of the context alone.
    """

    token_ids: torch.LongTensor
    logits: torch.Tensor | None
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


def calibrated_confidences(config: DSparkConfig, logits: Sequence[float], position: int) -> list[float]:
    """c_k of every row at `position` k, from 1 (§3.2.1)."""
    temperatures, shifts = config.confidence_temperatures, config.confidence_shifts
    temperature = 1.0 if temperatures is None else temperatures[position - 1]
    shift = 0.0 if shifts is None else shifts[position - 1]
    # A handful of numbers: plain Python is faster than tensors here.
    return [1.0 / (1.0 + math.exp(min(-x / temperature - shift, 700.0))) for x in logits]


class SequentialLoop:
    """The state of one left-to-right draft: previous token, recurrent state, survival, what has been drawn."""

    def __init__(
        self,
        model: DSparkDraftModel,
        prefix: torch.LongTensor,  # [B, L], the last one is the anchor
        draft_ids: torch.LongTensor | None,  # [V_d], target ids of a reduced draft vocabulary
        do_sample: bool,
        logits_processor: Callable | None,
        admission: Admission | None,
        generator: torch.Generator | None,
    ) -> None:
        self.model, self.prefix, self.draft_ids = model, prefix, draft_ids
        self.do_sample, self.admission, self.generator = do_sample, admission, generator
        self.processors = None if isinstance(logits_processor, list) and not logits_processor else logits_processor
        self.value_only = are_value_only(self.processors)
        self.state: torch.Tensor | None = None
        self.previous = prefix[:, -1]
        rows = prefix.shape[0]
        self.survival: list[list[float]] = [[] for _ in range(rows)]
        self.open_rows = [True] * rows
        self.num_admitted = [0] * rows
        self.policy_seconds = 0.0
        self.tokens: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self.confidences: list[torch.Tensor] = []

    def skip(self, hidden: torch.Tensor) -> None:
        """Pass a slot that proposes nothing. [B, d]"""
        if (head := self.model.markov_head) is not None:
            _, self.state = head.step(head.markov_w1(self.previous), hidden, self.state)

    def step(self, hidden: torch.Tensor, base_logits: torch.Tensor) -> bool:
        """Draft x_k from h_k [B, d] and U_k [B, V_d]; `False` where the policy, or the lack of allowed tokens, ends it."""
        head = self.model.markov_head
        embedding = latent = confidence = None
        if head is not None:
            embedding = head.markov_w1(self.previous)
            latent, self.state = head.step(embedding, hidden, self.state)
        if self.model.confidence_head is not None:
            confidence = self.model.confidence(hidden, embedding)
        if self.admission is not None and not self._admit(confidence):
            return False
        scores = self._process(base_logits if head is None else base_logits + head.project(latent))
        if not self.value_only and bool(torch.isneginf(scores).all(-1).any()):
            return False
        token = draw_tokens(scores.softmax(-1), self.generator) if self.do_sample else scores.argmax(-1)
        self.previous = token if self.draft_ids is None else self.draft_ids[token]
        self.tokens.append(self.previous)
        self.logits.append(scores)
        if confidence is not None:
            self.confidences.append(confidence)
        for row, is_open in enumerate(self.open_rows):
            self.num_admitted[row] += is_open
        return True

    def _admit(self, confidence: torch.Tensor | None) -> bool:
        """Ask the policy for every row still open; whether any remains."""
        started, position = time.perf_counter(), len(self.tokens) + 1
        if self.admission.reads_survival:
            if confidence is None:
                raise ValueError("This admission policy needs a drafter with a confidence head.")
            known = calibrated_confidences(self.model.config, confidence.tolist(), position)
            for survival, c in zip(self.survival, known, strict=True):
                survival.append(c * (survival[-1] if survival else 1.0))
        for row, survival in enumerate(self.survival):
            if self.open_rows[row]:
                self.open_rows[row] = bool(self.admission.admit(position, survival))
        self.policy_seconds += time.perf_counter() - started
        return any(self.open_rows)

    def _process(self, scores: torch.Tensor) -> torch.Tensor:
        if self.processors is None:
            return scores
        ids = torch.cat([self.prefix, *(t[:, None] for t in self.tokens)], dim=1) if self.tokens else self.prefix
        if self.draft_ids is None or self.value_only:
            return self.processors(ids, scores)
        full = scores.new_full((scores.shape[0], self.model.config.vocab_size), float("-inf"))
        full[:, self.draft_ids] = scores
        return self.processors(ids, full)[:, self.draft_ids]

    def block(self, cache: Cache, base_logits: torch.Tensor) -> DraftBlock:
        """What has been drafted."""
        rows = self.prefix.shape[0]
        confidences = None
        if self.model.confidence_head is not None:
            confidences = torch.stack(self.confidences, dim=1) if self.confidences else base_logits.new_zeros(rows, 0)
        return DraftBlock(
            token_ids=torch.stack(self.tokens, dim=1) if self.tokens else self.prefix.new_zeros(rows, 0),
            logits=torch.stack(self.logits, dim=1) if self.logits else base_logits[:, :0],
            confidence_logits=confidences,
            num_admitted=torch.tensor(self.num_admitted, device=self.prefix.device),
            survival=self.survival,
            policy_seconds=self.policy_seconds,
            cache=cache,
        )
