"""Turns of threads that read what clients name: so many at a time, and none of one client stands before all others'.

Such threads run Python, which takes the interpreter's lock from each other and from a server's event loop, and they may
hang with a file system.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from loraplex.logs import request_context

STUCK_S = 10.0
"""A job that takes longer probably hangs, and does not count any more. One that is slow has company meanwhile."""

LOOK_S = 1.0
"""How often one that waits looks for others that hang."""


@dataclass(slots=True, eq=False)
class _Turn:
    client: str
    began_s: float = 0.0


class FairTurns:
    """`num_turns` at a time, `most_of_a_client` of one. The next is for the client that has fewest, of those for the
    thread that waits longest."""

    def __init__(self, num_turns: int, most_of_a_client: int) -> None:
        self._num_turns = num_turns
        self._most_of_a_client = most_of_a_client
        self._running: list[_Turn] = []
        self._waiting: list[_Turn] = []
        self._changed = threading.Condition()

    @contextmanager
    def own(self) -> Iterator[None]:
        """A turn of the tenant whose request this thread works for."""
        request = request_context.get()
        with self.of("" if request is None else request.tenant):
            yield

    @contextmanager
    def of(self, client: str) -> Iterator[None]:
        turn = _Turn(client)
        with self._changed:
            self._waiting.append(turn)
            while self._next() is not turn:
                self._changed.wait(LOOK_S)
            self._waiting.remove(turn)
            turn.began_s = time.monotonic()
            self._running.append(turn)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._running.remove(turn)
                self._changed.notify_all()

    def _next(self) -> _Turn | None:
        """Which of those that wait may begin now."""
        stuck_since_s = time.monotonic() - STUCK_S
        running = [turn.client for turn in self._running if turn.began_s > stuck_since_s]
        if len(running) >= self._num_turns:
            return None
        found = min(self._waiting, key=lambda turn: running.count(turn.client))
        return found if running.count(found.client) < self._most_of_a_client else None
