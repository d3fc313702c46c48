"""Who waits and who runs: letting requests in as memory allows, and giving their places back.

Owns: the waiting line, the running requests, their slots, which prompt tokens are read next.
Does not own: forwards, committing, outputs (`engine`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .cache import is_out_of_memory
from .drafting import BatchDrafter
from .runner import Runner
from .sequence import Request

_ALONE = 4  # prompt tokens read in one step when nobody waits for it, as a multiple of the usual


@dataclass
class RequestQueue:
    """max_sequences, max_tokens: most requests and tokens (prompt and budget of each) at once; others wait."""

    runner: Runner
    drafter: BatchDrafter | None
    max_sequences: int
    max_tokens: int | None
    prefill_chunk: int
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
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
            try:
                request.slot = self.runner.store.open(request.text.length + 1)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
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

    def release(self, request: Request) -> None:
        """Take a request out and free what it holds."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if request.slot is not None:
            self.runner.store.close(request.slot)
        if request.draft_slot is not None and self.drafter is not None:
            self.drafter.store.close(request.draft_slot)
        request.slot = request.draft_slot = None
        request.pending.clear()
        self.is_full = False


def no_memory(request: Request, error: Exception) -> Exception:
    """What a request fails with that does not fit even alone."""
    return MemoryError(
        f"There is not enough memory for a text of {request.text.length} tokens, though no other request is running "
        f"({type(error).__name__}). Shorten the prompt, or free memory."
    )
