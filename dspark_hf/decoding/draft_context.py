"""`DraftContext`: what the drafter has seen of one text, and how much of it is kept.

Axes: C tokens whose K/V are kept, S tokens whose features wait, L committed tokens, m tapped layers.

With a window the kept tokens are the first ones (sinks) and the last ones. Keys are rotated once, so what is dropped in
between changes nothing in what is kept; only the positions have a gap.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache
from transformers.utils import logging

from ..model.modeling_dspark import DSparkDraftModel
from .ragged_cache import RaggedStore, Slot

logger = logging.get_logger(__name__)
_CONTEXT_ATTRIBUTE = "dspark_context"


@dataclass(eq=False)
class DraftContext:
    """K/V of tokens already projected, in a slot of `store`, and the features of those still to be (`pending`).

    The slot's `start` is the position of the first of them; it is not 0 where a cache came without a context. Its `dropped`
    tokens are missing after the first `sinks`; there are at least that many then.
    """

    drafter_id: int
    store: RaggedStore
    slot: Slot
    window: int | None = None
    pending: list[torch.Tensor] = field(default_factory=list)  # each [1, S, m * d_target]

    @classmethod
    def open(cls, drafter: DSparkDraftModel, store: RaggedStore, start: int = 0) -> DraftContext:
        """An empty context whose first token will be the one at `start`."""
        context = cls(id(drafter), store, store.open(1))
        context.slot.start = start
        context.limit(drafter.config.context_window, drafter.config.context_sinks)
        return context

    def close(self) -> None:
        """Free its place."""
        self.pending.clear()
        self.store.close(self.slot)

    @property
    def num_pending(self) -> int:
        return sum(part.shape[1] for part in self.pending)

    @property
    def num_kept(self) -> int:
        return self.slot.length + self.num_pending

    @property
    def end(self) -> int:
        """Position after the last token seen."""
        return self.slot.start + self.num_kept + self.slot.dropped

    def positions(self) -> list[int]:
        """Of all that is kept, the K/V before the waiting features."""
        return [self.slot.position(place) for place in range(self.num_kept)]

    def limit(self, window: int | None, sinks: int) -> None:
        """Keep the first `sinks` and the last `window` tokens from now on; what was dropped before stays so."""
        self.window = window
        if not self.slot.dropped:
            self.slot.sinks = sinks
        self._drop_middle()

    def add(self, features: torch.Tensor) -> None:
        """Features of the tokens at `end`, [1, S, m * d_target]."""
        if features.shape[1]:
            self.pending.append(features)
            self._drop_middle()

    def take(self, count: int) -> torch.Tensor:
        """The first `count` waiting features, which wait no more. [1, count, m * d_target]"""
        parts: list[torch.Tensor] = []
        while count > 0:
            part = self.pending.pop(0)
            if part.shape[1] > count:
                self.pending.insert(0, part[:, count:])
            parts.append(part[:, :count])
            count -= parts[-1].shape[1]
        return torch.cat(parts, dim=1)

    def _drop_middle(self) -> None:
        """Drop what is neither sink nor in the window, once that is a quarter of the window: each copy then costs little."""
        if self.window is None:
            return
        sinks = self.slot.sinks
        surplus = self.num_kept - sinks - self.window
        if surplus > self.window // 4:
            self._remove(sinks, sinks + surplus)
            self.slot.dropped += surplus

    def _remove(self, first: int, last: int) -> None:
        """Forget the kept tokens from the `first` one up to the `last`, which stays."""
        place = self.slot.length
        if first < place:
            self.store.remove(self.slot, first, min(last, place))
        parts = []
        for part in self.pending:
            low, high = (min(max(at - place, 0), part.shape[1]) for at in (first, last))
            place += part.shape[1]
            # Copied, because a view would hold on to the features of the whole prompt.
            parts.append(torch.cat([part[:, :low], part[:, high:]], dim=1) if low < high else part)
        self.pending = [part for part in parts if part.shape[1]]

    def crop(self, end: int) -> None:
        """Forget what lies at `end` and after. Where that is among what was dropped, the sinks alone are left."""
        slot = self.slot
        surplus = max(self.end - end, 0)
        missing = min(max(surplus - (self.num_kept - slot.sinks), 0), slot.dropped)
        slot.dropped -= missing
        surplus -= missing
        while surplus > 0 and self.pending:
            last = self.pending.pop()
            if last.shape[1] > surplus:
                self.pending.append(last[:, :-surplus])
            surplus -= last.shape[1]
        slot.length -= max(surplus, 0)

    def forget_before(self, position: int) -> None:
        """Forget all tokens before `position`."""
        end, count = self.end, sum(at < position for at in self.positions())
        if not count:
            return
        slot = self.slot
        self._remove(0, count)
        if count >= slot.sinks:
            slot.dropped = 0
        elif slot.dropped:
            slot.sinks -= count
        slot.start = end - self.num_kept - slot.dropped


def context_of(target_cache: Cache, drafter: DSparkDraftModel, num_tokens: int) -> DraftContext:
    """The drafter's context that came along with a kept target cache of `num_tokens` real tokens, or a new one."""
    context: DraftContext | None = getattr(target_cache, _CONTEXT_ATTRIBUTE, None)
    if context is not None and (
        context.drafter_id != id(drafter) or not context.slot.start <= num_tokens <= context.end
    ):
        context = None
    if num_tokens and context is None:
        logger.warning_once(
            f"The cache holds {num_tokens} tokens that this drafter has not seen (it was filled without it), so fewer "
            "drafts will be accepted at first. The output is not affected."
        )
    if num_tokens == 0 or context is None:
        return DraftContext.open(drafter, RaggedStore(), num_tokens)
    context.crop(num_tokens)
    context.limit(drafter.config.context_window, drafter.config.context_sinks)
    return context


def keep_context(target_cache: Cache, context: DraftContext) -> None:
    """Let the context travel with the target's cache, for a next turn."""
    setattr(target_cache, _CONTEXT_ATTRIBUTE, context)
