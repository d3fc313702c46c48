"""From the target's scores to tokens of the text: what stands of a round, appended until something stops the text.

Owns: processing the rows of one verification, one text with the scores kept of it. Does not own: the acceptance rule
(`verification`), forwards, caches.
Axes: L committed tokens, K drafted tokens, V vocabulary; one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..drafting_dspark import scores_dtype
from .sampling import process_rows
from .verification import Verification, verify_block, verify_greedy


@dataclass(frozen=True)
class Choice:
    """What the target made of a round: the verification, the drafted tokens [1, K], its logits and scores [K + 1, V]."""

    verification: Verification
    tokens: torch.LongTensor
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
    """Process the target's scores and decide which drafted tokens stand, and what follows them."""
    raw = logits.to(candidate_ids.device, scores_dtype(logits) if do_sample else torch.float32)
    scores = process_rows(processors, candidate_ids, raw)
    drafted = logits.shape[0] - 1
    tokens = candidate_ids[:, candidate_ids.shape[1] - drafted :]
    if not do_sample:
        return Choice(verify_greedy(tokens, scores.argmax(-1)[None]), tokens, raw, scores)
    if draft_probs is None:
        draft_probs = scores.new_zeros(1, 0, scores.shape[-1])
    probs = draft_probs.to(scores.device, scores.dtype)
    return Choice(verify_block(tokens, probs, scores.softmax(-1)[None], generator=generator), tokens, raw, scores)


class Text:
    """One text and what is kept of each of its new tokens (scores, logits: where `config` asks for them)."""

    def __init__(
        self,
        input_ids: torch.LongTensor,  # [1, L]
        config: GenerationConfig,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
    ) -> None:
        self.input_ids, self.criteria, self.streamer = input_ids, criteria, streamer
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
        accepted = int(choice.verification.num_accepted)
        new = torch.cat([choice.tokens[0, :accepted], choice.verification.next_token])
        committed = 0
        while committed < len(new) and not self.finished:
            token = new[committed : committed + 1]
            self.input_ids = torch.cat([self.input_ids, token[None]], dim=1)
            if self.streamer is not None:
                self.streamer.put(token.cpu())
            if self.scores is not None:
                self.scores += (choice.scores[committed : committed + 1],)
            if self.logits is not None:
                self.logits += (choice.raw[committed : committed + 1],)
            if record is not None:
                record(committed)
            committed += 1
            self.finished = bool(self.criteria(self.input_ids, self.scores).all())
        return committed
