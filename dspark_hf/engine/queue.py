"""Who waits and who runs: letting requests in as memory allows, and giving their places back.

Owns: the waiting line, the running requests, their slots, which prompt tokens are read next.
Does not own: forwards, committing, outputs (`engine`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from .cache import Slot, is_out_of_memory
from .drafting import BatchDrafter
from .runner import Runner
from .sequence import Request

_WORTH = 16  # tokens in common from which a kept cache is used
_ALONE = 4  # prompt tokens read in one step when nobody waits for it, as a multiple of the usual


@dataclass(eq=False)
class KeptText:
    """A finished text's cache: `token_ids` [L] are in it; the drafter's may lack the last ones, which are `pending`."""

    token_ids: torch.LongTensor
    slot: Slot
    draft_slot: Slot | None
    pending: list[torch.Tensor]  # features, [1, S, m * d_target]

    def crop(self, length: int) -> None:
        """Forget what lies behind the first `length` tokens."""
        surplus = self.slot.length - length
        self.slot.length = length
        while surplus and self.pending:
            last = self.pending.pop()
            if last.shape[1] > surplus:
                self.pending.append(last[:, :-surplus])
            surplus -= min(surplus, last.shape[1])
        if surplus and self.draft_slot is not None:
            self.draft_slot.length -= surplus


def _common(kept: torch.LongTensor, ids: torch.LongTensor) -> int:
    """Tokens that both begin with, the last of `ids` aside: that one has to be read in any case."""
    most = min(len(kept), len(ids) - 1)
    different = (kept[:most] != ids[:most]).nonzero()
    return int(different[0]) if len(different) else most


@dataclass
class RequestQueue:
    """max_sequences, max_tokens: most requests and tokens (prompt and budget of each) at once; others wait."""

    runner: Runner
    drafter: BatchDrafter | None
    max_sequences: int
    max_tokens: int | None
    prefill_chunk: int
    keep_finished: int = 0  # texts whose cache outlives them, for the next turn of a conversation
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    kept: list[KeptText] = field(default_factory=list)  # the oldest first
    is_full: bool = False  # memory ran out: nobody is let in before somebody leaves

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def find(self, request_id: int) -> Request | None:
        return next((r for r in (*self.running, *self.waiting) if r.id == request_id), None)

    def let_in(self) -> list[tuple[Request, Exception]]:
        """Give waiting requests a place, first come first served; returns those for whom there is no memory even alone."""
        failed: list[tuple[Request, Exception]] = []
        while self.waiting and len(self.running) < self.max_sequences and not self.is_full:
            request = self.waiting[0]
            held = sum(r.capacity for r in self.running)
            if self.max_tokens is not None and held + request.capacity > self.max_tokens:
                break
            if self.max_tokens is not None:
                self.forget_down_to(self.max_tokens - held - request.capacity)
            try:
                if not self._take_over(request):
                    request.slot = self.runner.store.open(request.text.length + 1)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if self.kept:
                    self.forget_down_to(0)
                    continue
                if self.running:
                    self.is_full = True
                    break
                failed.append((request, no_memory(request, error)))
                self.waiting.popleft()
                continue
            request.to_read = request.text.length
            self.waiting.popleft()
            self.running.append(request)
        return failed

    def chunks(self) -> dict[Request, int]:
        """How many prompt tokens each request reads in this step: half for who came first, then short prompts first."""
        reading = [r for r in self.running if r.is_reading]
        if not reading:
            return {}
        budget = self.prefill_chunk * (_ALONE if len(reading) == len(self.running) else 1)
        first, *others = reading
        chunks = {first: min(len(first.unread), budget if not others else (budget + 1) // 2)}
        for request in [*sorted(others, key=lambda r: len(r.unread)), first]:
            spent = sum(chunks.values())
            more = min(len(request.unread) - chunks.get(request, 0), budget - spent)
            if more > 0:
                chunks[request] = chunks.get(request, 0) + more
        return chunks

    def evict(self, request: Request) -> None:
        """Back to the head of the line, to read its text anew once somebody has left."""
        self.release(request)
        self.waiting.appendleft(request)
        self.is_full = True

    def _take_over(self, request: Request) -> bool:
        """Begin with the cache of the kept text that has most in common with this one, if that is worth it."""
        ids = request.text.input_ids[0]
        common = [_common(kept.token_ids, ids) for kept in self.kept]
        if not common or max(common) < _WORTH:
            return False
        kept = self.kept.pop(common.index(max(common)))
        kept.crop(max(common))
        request.slot, request.draft_slot, request.pending = kept.slot, kept.draft_slot, kept.pending
        return True

    def forget_down_to(self, tokens: int) -> None:
        """Free kept texts, the oldest first, until the others hold no more than `tokens`."""
        while self.kept and sum(len(kept.token_ids) for kept in self.kept) > max(tokens, 0):
            self._close(self.kept[0].slot, self.kept[0].draft_slot)
            del self.kept[0]

    def _close(self, slot: Slot | None, draft_slot: Slot | None) -> None:
        if slot is not None:
            self.runner.store.close(slot)
        if draft_slot is not None and self.drafter is not None:
            self.drafter.store.close(draft_slot)

    def keep(self, request: Request) -> None:
        """Take a request out and keep its cache for a text that goes on from it."""
        slot = request.slot
        if self.keep_finished and slot is not None and slot.length >= _WORTH:
            ids = request.text.input_ids[0, : slot.length]
            self.kept.append(KeptText(ids, slot, request.draft_slot, list(request.pending)))
            request.slot = request.draft_slot = None
        self.release(request)
        while len(self.kept) > self.keep_finished:
            oldest = self.kept.pop(0)
            self._close(oldest.slot, oldest.draft_slot)

    def release(self, request: Request) -> None:
        """Take a request out and free what it holds."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._close(request.slot, request.draft_slot)
        request.slot = request.draft_slot = None
        request.pending.clear()
        self.is_full = False


def no_memory(request: Request, error: Exception) -> Exception:
    """What a request fails with that does not fit even alone."""
    return MemoryError(
        f"There is not enough memory for a text of {request.text.length} tokens, though no other request is running "
        f"({type(error).__name__}). Shorten the prompt, or free memory."
    )
