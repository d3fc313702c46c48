"""`DraftContext`: what the drafter has seen of one text, and how much of it is kept.

Owns: K/V and waiting features of the committed tokens, their positions, the window, turning features into K/V.
Does not own: the layers (`modeling_dspark`), when to draft (`candidates`).
Axes: C tokens whose K/V are kept, S tokens whose features wait, L committed tokens, m tapped layers.

With a window the kept tokens are the first ones (sinks) and the last ones. Keys are rotated once, so what is dropped in
between changes nothing in what is kept; only the positions have a gap.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache
from transformers.utils import logging

from ..model.modeling_dspark import DSparkDraftModel
from .quick_forward import grow_in_place

logger = logging.get_logger(__name__)
MOST_PENDING = 256  # features that may wait; those of several layers are larger than the K/V they become
_CONTEXT_ATTRIBUTE = "dspark_context"


@dataclass
class DraftContext:
    """What the drafter has seen of one text: K/V of tokens already projected, features of those still to be.

    `start` is the position of the first of them; it is not 0 where a cache came without a context. `dropped` tokens are
    missing after the first `sinks`; there are at least that many then.
    """

    drafter_id: int
    start: int = 0
    cache: DynamicCache = field(default_factory=DynamicCache)
    pending: list[torch.Tensor] = field(default_factory=list)  # each [1, S, m * d_target]
    window: int | None = None
    sinks: int = 0
    dropped: int = 0

    @property
    def num_pending(self) -> int:
        return sum(part.shape[1] for part in self.pending)

    @property
    def num_kept(self) -> int:
        return self.cache.get_seq_length() + self.num_pending

    @property
    def end(self) -> int:
        """Position after the last token seen."""
        return self.start + self.num_kept + self.dropped

    def positions(self, first: int = 0) -> torch.LongTensor:
        """Of what is kept from the `first` token on, the K/V before the waiting features. [C + S - first]"""
        kept = torch.arange(first, self.num_kept)
        return self.start + kept + self.dropped * (kept >= self.sinks)

    def limit(self, window: int | None, sinks: int) -> None:
        """Keep the first `sinks` and the last `window` tokens from now on; what was dropped before stays so."""
        self.window = window
        if not self.dropped:
            self.sinks = sinks
        self._drop_middle()

    def add(self, features: torch.Tensor) -> None:
        """Features of the tokens at `end`, [1, S, m * d_target]."""
        if features.shape[1]:
            self.pending.append(features)
            self._drop_middle()

    @torch.no_grad()
    def project(self, drafter: DSparkDraftModel, input_ids: torch.LongTensor, leave: int = 0) -> None:
        """Turn waiting features into K/V, but for the last `leave`. `input_ids` [1, L] end with the token at `end`."""
        while (surplus := self.num_pending - leave) > 0:
            count, cached = min(surplus, MOST_PENDING), self.cache.get_seq_length()
            positions = self.positions(cached)[:count]
            next_ids = None
            if drafter.config.is_autoregressive:
                next_ids = input_ids[:, (positions - self.end + input_ids.shape[1]).to(input_ids.device)]
            features = self._take(count)
            drafter.extend_context(features, positions[None].to(drafter.device), self.cache, next_ids)
        grow_in_place(self.cache)

    def _take(self, count: int) -> torch.Tensor:
        """The first `count` waiting features, which wait no more. [1, count, m * d_target]"""
        parts: list[torch.Tensor] = []
        while count > 0:
            part = self.pending.pop(0)
            if part.shape[1] > count:
                self.pending.insert(0, part[:, count:])
            parts.append(part[:, :count])
            count -= parts[-1].shape[1]
        return torch.cat(parts, dim=1)

    def take_pending(self) -> torch.Tensor | None:
        """All waiting features, which wait no more. [1, S, m * d_target]"""
        return self._take(self.num_pending) if self.pending else None

    def _drop_middle(self) -> None:
        """Drop what is neither sink nor in the window, once that is a quarter of the window: each copy then costs little."""
        if self.window is None:
            return
        surplus = self.num_kept - self.sinks - self.window
        if surplus > self.window // 4:
            self._remove(self.sinks, self.sinks + surplus)
            self.dropped += surplus

    def _remove(self, first: int, last: int) -> None:
        """Forget the kept tokens from the `first` one up to the `last`, which stays."""
        place = self.cache.get_seq_length()
        if first < place:
            for layer in self.cache.layers:
                layer.keys, layer.values = (_without(t, first, last, dim=2) for t in (layer.keys, layer.values))
        parts = []
        for part in self.pending:
            low, high = max(first - place, 0), max(last - place, 0)
            place += part.shape[1]
            # Copied, because a view would hold on to the features of the whole prompt.
            parts.append(_without(part, low, high, dim=1) if low < high else part)
        self.pending = [part for part in parts if part.shape[1]]

    def crop(self, end: int) -> None:
        """Forget what lies at `end` and after. Where that is among what was dropped, the sinks alone are left."""
        surplus = max(self.end - end, 0)
        missing = min(max(surplus - (self.num_kept - self.sinks), 0), self.dropped)
        self.dropped -= missing
        surplus -= missing
        while surplus > 0 and self.pending:
            last = self.pending.pop()
            if last.shape[1] > surplus:
                self.pending.append(last[:, :-surplus])
            surplus -= last.shape[1]
        if surplus > 0:
            self.cache.crop(-surplus)

    def forget_before(self, position: int) -> None:
        """Forget all tokens before `position`."""
        end, count = self.end, int((self.positions() < position).sum())
        if not count:
            return
        self._remove(0, count)
        if count >= self.sinks:
            self.dropped = 0
        elif self.dropped:
            self.sinks -= count
        self.start = end - self.num_kept - self.dropped


def _without(tensor: torch.Tensor, first: int, last: int, dim: int) -> torch.Tensor:
    """A copy that lacks `first` to `last` along `dim`."""
    size = tensor.shape[dim]
    first, last = min(first, size), min(last, size)
    return torch.cat([tensor.narrow(dim, 0, first), tensor.narrow(dim, last, size - last)], dim=dim)


def context_of(target_cache: Cache, drafter: DSparkDraftModel, num_tokens: int) -> DraftContext:
    """The drafter's context that came along with a kept target cache of `num_tokens` real tokens, or a new one."""
    context: DraftContext | None = getattr(target_cache, _CONTEXT_ATTRIBUTE, None)
    if context is not None and (context.drafter_id != id(drafter) or not context.start <= num_tokens <= context.end):
        context = None
    if num_tokens == 0 or context is None:
        if num_tokens:
            logger.warning_once(
                f"The cache holds {num_tokens} tokens that this drafter has not seen (it was filled without it), so fewer "
                "drafts will be accepted at first. The output is not affected."
            )
        context = DraftContext(id(drafter), start=num_tokens)
    context.crop(num_tokens)
    return context


def keep_context(target_cache: Cache, context: DraftContext) -> None:
    """Let the context travel with the target's cache, for a next turn."""
    setattr(target_cache, _CONTEXT_ATTRIBUTE, context)
