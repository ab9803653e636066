"""Work in Python that many threads have at once: so many at a time, and the turns of one client are not before others'.

Threads that run Python take the interpreter's lock from each other and from a server's event loop. A semaphore bounds
how many do; in its queue the work of one client would stand before all others'.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    client: str


class FairTurns:
    """`num_turns` threads at a time. The next turn is for the client that has fewest, and of those for the thread that
    waits longest."""

    def __init__(self, num_turns: int) -> None:
        self._num_free = num_turns
        self._running: Counter[str] = Counter()
        self._waiting: list[_Waiting] = []
        self._changed = threading.Condition()

    @contextmanager
    def of(self, client: str) -> Iterator[None]:
        """A turn of this client, which waits for it."""
        own = _Waiting(client)
        with self._changed:
            self._waiting.append(own)
            self._changed.wait_for(lambda: self._num_free > 0 and self._next() is own)
            self._waiting.remove(own)
            self._num_free -= 1
            self._running[client] += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._num_free += 1
                self._running[client] -= 1
                self._running += Counter()  # without clients that have none
                self._changed.notify_all()

    def _next(self) -> _Waiting:
        return min(self._waiting, key=lambda each: self._running[each.client])
