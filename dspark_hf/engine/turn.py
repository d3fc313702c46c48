"""One request in one step: what it asked for, its draft, what the target made of it.

Owns: the rows it verifies, committing them, the request's own record of the round. Does not own: forwards, drafting, faults.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..decoding.stats import RoundRecord
from ..scheduling.batch import BatchRequest
from .drafting import BatchDrafter, RequestDraft
from .runner import Span, SpanOutput
from .sequence import Request


@dataclass(eq=False)
class Turn:
    """asked: what the policy was told. verified, accepted, committed: tokens, as they become known."""

    request: Request
    asked: BatchRequest
    draft: RequestDraft = field(init=False)
    verified: int = 0
    accepted: int = 0
    committed: int = 0

    def __post_init__(self) -> None:
        self.draft = RequestDraft(self.request, 0)

    def span(self) -> Span:
        """The anchor and the drafted tokens that are verified."""
        anchor, drafted = self.request.unread, self.draft.token_ids[: self.verified]
        return Span(self.request.place, torch.cat([anchor, anchor.new_tensor(drafted)]), keep=len(drafted) + 1)

    def commit(
        self, drafter: BatchDrafter | None, output: SpanOutput, draft_seconds: float, verify_seconds: float
    ) -> None:
        """Accept, append, keep what stands.

        Raises:
            Exception: whatever a processor, criterion or streamer of the request raises, or raised while drafting.
        """
        if self.draft.error is not None:
            raise self.draft.error
        request, stats = self.request, self.request.stats
        probs = None
        if self.verified and request.prepared.config.do_sample:
            assert drafter is not None, "somebody drafted"
            probs = drafter.probs(self.draft, self.verified)
        ids = request.text.input_ids
        candidates = torch.cat([ids, ids.new_tensor([self.draft.token_ids[: self.verified]])], dim=1)
        self.committed, self.accepted = request.append(candidates, output.logits, probs)
        request.keep(output, self.committed)
        confidences = self.draft.confidence_logits[: len(self.draft.token_ids)]
        stats.count_round(
            RoundRecord(
                planned=self.draft.limit,
                parked=self.asked.limit > 0 and self.draft.limit == 0,
                drafted=len(self.draft.token_ids),
                verified=self.verified,
                accepted=self.accepted,
                rows=self.verified + 1,
                survival=self.draft.survival,
                confidence_logits=torch.tensor([confidences]) if confidences else None,
            )
        )
        stats.draft_seconds += draft_seconds
        stats.verify_seconds += verify_seconds
