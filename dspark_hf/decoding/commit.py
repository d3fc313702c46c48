"""From the target's scores to tokens of the text: what stands of a round, appended until something stops the text.

Owns: processing the rows of one verification, one text with the scores kept of it. Does not own: the acceptance rule
(`verification`), forwards, caches.
Axes: L committed tokens, K drafted tokens, V vocabulary; one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from ..model.sampler_dspark import scores_dtype
from .acceptance import verify_block, verify_greedy
from .sampling import process_rows


@dataclass(frozen=True)
class Choice:
    """What the target made of a round, on the host already.

    accepted: drafted tokens that stand. token_ids: those and the one that follows them; ids: the same as a tensor [accepted + 1].
    raw, scores: the target's logits, and what became of them, [K + 1, V].
    """

    accepted: int
    token_ids: list[int]
    ids: torch.LongTensor
    raw: torch.Tensor
    scores: torch.Tensor


def choose(
    processors: LogitsProcessorList,
    do_sample: bool,
    candidate_ids: torch.LongTensor,  # [1, L + K]
    logits: torch.Tensor,  # [K + 1, V], row i follows the first L + i tokens
    draft_probs: torch.Tensor | None = None,  # [1, K, V]; needed where K > 0 and `do_sample`
    generator: torch.Generator | None = None,
) -> Choice:
    """Process the target's scores and decide which drafted tokens stand, and what follows them; one read of the device."""
    raw = logits.to(candidate_ids.device, scores_dtype(logits) if do_sample else torch.float32)
    scores = process_rows(processors, candidate_ids, raw)
    drafted = logits.shape[0] - 1
    tokens = candidate_ids[:, candidate_ids.shape[1] - drafted :]
    if do_sample:
        if draft_probs is None:
            draft_probs = scores.new_zeros(1, 0, scores.shape[-1])
        probs = draft_probs.to(scores.device, scores.dtype)
        result = verify_block(tokens, probs, scores.softmax(-1)[None], generator=generator)
    else:
        result = verify_greedy(tokens, scores.argmax(-1)[None])
    accepted, *known = torch.cat([result.num_accepted, tokens[0], result.next_token]).tolist()
    ids = torch.cat([tokens[0, :accepted], result.next_token])
    return Choice(accepted, known[:accepted] + known[-1:], ids, raw, scores)


class Text:
    """One text and what is kept of each of its new tokens (scores, logits: where `config` asks for them).

    new_tokens: all that were appended, on the host.
    """

    def __init__(
        self,
        input_ids: torch.LongTensor,  # [1, L]
        config: GenerationConfig,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
    ) -> None:
        self.input_ids, self.streamer = input_ids, streamer
        self.new_tokens: list[int] = []
        # What transformers' own criteria say is known on the host; all others may read the device for every token.
        self._last_tokens: set[int] = set()
        self._max_length = math.inf
        self._others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self._last_tokens.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria and not _may_warn(criterion):
                self._max_length = min(self._max_length, criterion.max_length)
            else:
                self._others.append(criterion)
        keep = config.return_dict_in_generate
        self.scores: tuple[torch.Tensor, ...] | None = () if keep and config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if keep and config.output_logits else None
        self.finished = False

    @property
    def length(self) -> int:
        return self.input_ids.shape[1]

    def commit(self, choice: Choice, record: Callable[[int], None] | None = None) -> int:
        """Append accepted tokens and the next one, one at a time as plain decoding would, until a criterion stops.

        Returns how many were appended; `record` is called with the number of each of them.
        """
        before, committed = self.length, 0
        whole = torch.cat([self.input_ids, choice.ids[None]], dim=1)
        for token in choice.token_ids:
            if self.finished:
                break
            self.input_ids = whole[:, : before + committed + 1]
            self.new_tokens.append(token)
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            if self.scores is not None:
                self.scores += (choice.scores[committed : committed + 1],)
            if self.logits is not None:
                self.logits += (choice.raw[committed : committed + 1],)
            if record is not None:
                record(committed)
            committed += 1
            self.finished = self._stops(token)
        return committed

    def _stops(self, token: int) -> bool:
        """Whether the text ends with `token`, its last one."""
        stops = token in self._last_tokens or self.length >= self._max_length
        if self._others:
            stops = bool(self._others(self.input_ids, self.scores).all()) or stops
        return stops


def _may_warn(criterion: MaxLengthCriteria) -> bool:
    """Whether it also reminds of a text that outgrows the model's context."""
    return criterion.max_position_embeddings is not None and criterion.max_length > criterion.max_position_embeddings
