"""A proposal: a tree of tokens that may follow a sequence's anchor.

Axes: K nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..model.sampler_dspark import DraftRow


@dataclass(eq=False)
class Proposal:
    """token_ids: [K], parents before children. parents: of each node, -1 for the anchor; a chain has -1, 0, 1, ...

    source: the drafter's block, or a copy from the text. survival: calibrated chances that the policy read, of a refused position
    too. error: raised by a processor of the sequence while it was drafted.
    """

    token_ids: torch.LongTensor
    parents: list[int]
    source: Literal["block", "copy"] = "block"
    survival: Sequence[float] = ()
    error: Exception | None = None
    _row: DraftRow | None = field(default=None, repr=False)

    @classmethod
    def chain(cls, token_ids: torch.LongTensor, source: Literal["block", "copy"] = "block") -> Proposal:
        """Tokens one after the other."""
        return cls(token_ids, list(range(-1, len(token_ids) - 1)), source)

    @classmethod
    def drafted(cls, row: DraftRow, device: torch.device) -> Proposal:
        """What the sampler drew, for a target on `device`."""
        proposal = cls.chain(row.token_ids().to(device))
        proposal.survival, proposal.error, proposal._row = row.survival, row.error, row
        return proposal

    def __len__(self) -> int:
        return len(self.parents)

    def cut(self, count: int) -> Proposal:
        """The first `count` nodes."""
        return Proposal(self.token_ids[:count], self.parents[:count], self.source, self.survival, self.error, self._row)

    def probs(self, vocab_size: int) -> torch.Tensor:
        """What each token was drawn from; one-hot for a copy, which has no randomness. [K, V]"""
        if self._row is None:
            zeros = torch.zeros(len(self), vocab_size, device=self.token_ids.device)
            return zeros.scatter_(1, self.token_ids[:, None], 1.0)  # `one_hot` would read the device
        return self._row.probs(len(self), vocab_size)

    def scores(self, vocab_size: int) -> torch.Tensor:
        """The logarithm of `probs`: -inf where a token was no candidate. [K, V]"""
        return self.probs(vocab_size).log()

    def confidence_logits(self) -> torch.Tensor | None:
        """As the head gives them. [K]"""
        return None if self._row is None else self._row.confidence_logits(len(self))
