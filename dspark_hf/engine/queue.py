"""Who waits and who runs: admitting requests as memory allows, and giving their slots back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from ..decoding.backend import Rows
from ..decoding.draft_context import DraftContext
from ..decoding.ragged_cache import RaggedStore, Slot, is_out_of_memory
from ..model.modeling_dspark import DSparkDraftModel
from .request import Request

_WORTH = 16  # tokens in common from which a kept cache is used
_ALONE = 4  # prompt tokens read in one step when nobody waits for it, as a multiple of the usual


@dataclass(eq=False)
class KeptText:
    """A finished text's cache: `token_ids` [L] are in it; the drafter may have seen fewer."""

    token_ids: torch.LongTensor
    slot: Slot
    draft_context: DraftContext | None


def _common(kept: torch.LongTensor, ids: torch.LongTensor) -> int:
    """Tokens that both begin with, the last of `ids` aside: that one has to be read in any case."""
    most = min(len(kept), len(ids) - 1)
    different = (kept[:most] != ids[:most]).nonzero()
    return int(different[0]) if len(different) else most


@dataclass
class RequestQueue:
    """max_sequences, max_tokens: most requests and tokens (prompt and budget of each) at once; others wait."""

    store: RaggedStore
    drafter: DSparkDraftModel | None
    max_sequences: int
    max_tokens: int | None
    prefill_chunk: int
    keep_finished: int = 0  # texts whose cache outlives them, for the next turn of a conversation
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    kept: list[KeptText] = field(default_factory=list)  # the oldest first
    draft_store: RaggedStore = field(default_factory=RaggedStore)
    is_full: bool = False  # memory ran out: nobody is admitted before somebody leaves

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def find(self, request_id: int) -> Request | None:
        return next((r for r in (*self.running, *self.waiting) if r.id == request_id), None)

    def admit(self) -> list[tuple[Request, Exception]]:
        """Give waiting requests a slot, first come first served; returns those for whom there is no memory even alone."""
        failed: list[tuple[Request, Exception]] = []
        while self.waiting and len(self.running) < self.max_sequences and not self.is_full:
            request = self.waiting[0]
            held = sum(r.capacity for r in self.running)
            if self.max_tokens is not None and held + request.capacity > self.max_tokens:
                break
            if self.max_tokens is not None:
                self.forget_down_to(self.max_tokens - held - request.capacity)
            try:
                self._open(request)
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
            request.to_read = request.length
            self.waiting.popleft()
            self.running.append(request)
        return failed

    def chunks(self) -> dict[Request, Rows]:
        """The prompt tokens that each request reads in this step: half for who came first, then short prompts first."""
        reading = [r for r in self.running if r.is_reading]
        if not reading:
            return {}
        budget = self.prefill_chunk * (_ALONE if len(reading) == len(self.running) else 1)
        first, *others = reading
        counts = {first: min(len(first.unread), budget if not others else (budget + 1) // 2)}
        for request in [*sorted(others, key=lambda r: len(r.unread)), first]:
            more = min(len(request.unread) - counts.get(request, 0), budget - sum(counts.values()))
            if more > 0:
                counts[request] = counts.get(request, 0) + more
        # With the prompt's end comes the first new token.
        return {r: Rows(r, r.unread[:n], keep=int(n == len(r.unread))) for r, n in counts.items()}

    def evict(self, request: Request) -> None:
        """Back to the head of the line, to read its text anew once somebody has left."""
        self.release(request)
        self.waiting.appendleft(request)
        self.is_full = True

    def _open(self, request: Request) -> None:
        """A slot, and a draft context: of the kept text that has most in common with this one, if that is worth it."""
        ids = request.input_ids[0]
        common = [_common(kept.token_ids, ids) for kept in self.kept]
        if common and max(common) >= _WORTH:
            kept = self.kept.pop(common.index(max(common)))
            kept.slot.length = max(common)
            request.slot = kept.slot
            if kept.draft_context is not None:
                kept.draft_context.crop(max(common))
                request.draft_context = kept.draft_context
            return
        request.slot = self.store.open(request.length + 1)
        if self.drafter is not None:
            try:
                request.draft_context = DraftContext.open(self.drafter, self.draft_store)
            except BaseException:
                self._close(request)
                request.slot = None
                raise

    def forget_down_to(self, tokens: int) -> None:
        """Free kept texts, the oldest first, until the others hold no more than `tokens`."""
        while self.kept and sum(len(kept.token_ids) for kept in self.kept) > max(tokens, 0):
            self._close(self.kept.pop(0))

    def _close(self, text: KeptText | Request) -> None:
        if text.slot is None:  # it waits, or its cache is kept
            return
        self.store.close(text.slot)
        if text.draft_context is not None:
            text.draft_context.close()

    def keep(self, request: Request) -> None:
        """Take a request out and keep its cache for a text that goes on from it."""
        slot = request.slot
        if self.keep_finished and slot is not None and slot.length >= _WORTH:
            self.kept.append(KeptText(request.input_ids[0, : slot.length], slot, request.draft_context))
            request.slot = None
        self.release(request)
        while len(self.kept) > self.keep_finished:
            self._close(self.kept.pop(0))

    def release(self, request: Request) -> None:
        """Take a request out and free what it holds."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._close(request)
        request.slot = request.draft_context = None  # type: ignore[assignment]
        self.is_full = False


def no_memory(request: Request, error: Exception) -> Exception:
    """What a request fails with that does not fit even alone."""
    return MemoryError(
        f"There is not enough memory for a text of {request.length} tokens, though no other request is running "
        f"({type(error).__name__}). Shorten the prompt, or free memory."
    )
