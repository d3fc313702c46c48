"""The engine in a thread of its own, between the event loop's requests.

Only the thread touches the engine: the event loop posts commands, and gets events back through `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..engine.engine import BatchEngine
from ..engine.request import RequestOutput

logger = logging.get_logger(__name__)
_DRAIN_SECONDS = 30.0

Event = list[int] | RequestOutput  # new tokens; at last the record


class _TokenStreamer(BaseStreamer):
    """Hands the new tokens of one request over; the prompt, which comes first, is left out."""

    def __init__(self, post: Callable[[list[int]], None]) -> None:
        self.post, self.prompt_seen = post, False

    def put(self, value: torch.Tensor) -> None:
        if self.prompt_seen:
            self.post(value.flatten().tolist())
        self.prompt_seen = True

    def end(self) -> None:
        """The record says that it is over."""


class Ticket:
    """One request in flight: an asynchronous iterator over its events."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker, self._loop = worker, asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self.id: int | None = None  # set by the thread
        self.cancelled = False

    def post(self, event: Event | Exception) -> None:
        """From the thread."""
        with contextlib.suppress(RuntimeError):  # the loop is gone: nobody listens
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Tokens as they come, then the record. Leaving early cancels the request.

        Raises:
            ValueError: the engine refused the request.
            RuntimeError: the engine broke down.
        """
        over = False
        try:
            while not over:
                event = await self._events.get()
                over = not isinstance(event, list)
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            if not over:
                self._worker.cancel(self)


class EngineWorker:
    """Steps the engine while there are requests."""

    def __init__(self, engine: BatchEngine, max_waiting: int = 64) -> None:
        self.engine, self.max_waiting = engine, max_waiting
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._posted = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float = _DRAIN_SECONDS) -> None:
        """Finish what runs, for at most `seconds`; nothing new is taken."""
        self._stopping = True
        self._commands.put(None)
        self._thread.join(seconds)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def num_requests(self) -> int:
        """Requests in flight, those just handed in included."""
        return len(self._tickets) + self._posted

    def submit(self, **request: Any) -> Ticket:
        """Hand in what `BatchEngine.add` takes; called from the event loop.

        Raises:
            RuntimeError: the server is shutting down, or has too many requests.
        """
        if not self.is_alive:
            raise RuntimeError("The server is shutting down.")
        if self.num_requests >= self.max_waiting:
            raise RuntimeError(f"The server has {self.max_waiting} requests in flight already; try again later.")
        ticket = Ticket(self)
        self._posted += 1
        self._commands.put(lambda: self._add(ticket, request))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request at the next step; called from the event loop."""
        self._commands.put(lambda: self._cancel(ticket))

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                idle = not self.engine.num_unfinished
                if self._take_commands(wait=idle) and not self.engine.num_unfinished:
                    return
                self._deliver(self.engine.step())
            except Exception as error:  # the engine has ended all its requests; the next ones may go well
                logger.exception("The engine broke down in a step; its requests are over.")
                self._deliver(self.engine.interrupt(), error)

    def _take_commands(self, wait: bool) -> bool:
        """Carry out what was posted; whether the server is to stop."""
        while True:
            try:
                command = self._commands.get(block=wait and not self._stopping)
            except queue.Empty:
                return self._stopping
            if command is not None:
                command()
            wait = False

    def _add(self, ticket: Ticket, request: dict[str, Any]) -> None:
        self._posted -= 1
        if ticket.cancelled:
            return
        try:
            ticket.id = self.engine.add(streamer=_TokenStreamer(ticket.post), **request)
        except Exception as error:
            ticket.post(error)
            return
        self._tickets[ticket.id] = ticket

    def _cancel(self, ticket: Ticket) -> None:
        ticket.cancelled = True
        if ticket.id is not None and self.engine.cancel(ticket.id):
            self._tickets.pop(ticket.id, None)

    def _deliver(self, outputs: Sequence[RequestOutput], error: Exception | None = None) -> None:
        for output in outputs:
            if (ticket := self._tickets.pop(output.id, None)) is not None:
                ticket.post(output if error is None else RuntimeError(f"The engine broke down: {error}"))
