"""Turns of threads that read what clients name: so many at a time, and none of one client stands before all others'.

Such threads run Python, which takes the interpreter's lock from each other and from a server's event loop, and they may
hang with a file system.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from loraplex.logs import RequestContext, request_context

STUCK_S = 10.0
"""A job that takes longer probably hangs, and does not count any more. One that is slow has company meanwhile,
unless it says that it computes."""

LOOK_S = 1.0
"""How often one that waits looks for others that hang."""


@contextmanager
def working_for(tenant: str) -> Iterator[None]:
    """Turns that this thread takes meanwhile are those of `tenant`, or without one of the request's client."""
    request = request_context.get() or RequestContext("")
    client = tenant or request.client
    token = request_context.set(RequestContext(request.request_id, tenant, client=client))
    try:
        yield
    finally:
        request_context.reset(token)


def own_tenant() -> str:
    """The one for whose request this thread works."""
    request = request_context.get()
    return "" if request is None else request.tenant


def own_client() -> str:
    """In whose turn it works; "" where no request is known."""
    request = request_context.get()
    return "" if request is None else request.client or request.tenant


@dataclass(slots=True, eq=False)
class _Turn:
    """nbytes: that it has of a budget."""

    client: str
    began_s: float = 0.0
    nbytes: int = 0

    def computes(self) -> None:
        """From here on it waits for nothing that may hang: it counts to its end."""
        self.began_s = math.inf


class FairTurns:
    """`num_turns` at a time, `most_of_a_client` of one; most_without_client: of what works for no request, if that is
    another number. The next is for the client that has fewest, of those for the thread that waits longest."""

    def __init__(self, num_turns: int, most_of_a_client: int, most_without_client: int | None = None) -> None:
        self._num_turns = num_turns
        self._most_of_a_client = most_of_a_client
        self._most_without_client = most_of_a_client if most_without_client is None else most_without_client
        self._running: list[_Turn] = []
        self._waiting: list[_Turn] = []
        self._changed = threading.Condition()

    @contextmanager
    def own(self, timeout_s: float = math.inf) -> Iterator[_Turn]:
        """A turn of the client whose request this thread works for. Raises TimeoutError when it does not come."""
        with self.of(own_client(), timeout_s) as turn:
            yield turn

    @contextmanager
    def of(self, client: str, timeout_s: float = math.inf) -> Iterator[_Turn]:
        turn, until_s = _Turn(client), time.monotonic() + timeout_s
        with self._changed:
            self._waiting.append(turn)
            try:
                while self._next() is not turn:
                    left_s = until_s - time.monotonic()
                    if left_s <= 0:
                        raise TimeoutError
                    self._changed.wait(min(LOOK_S, left_s))
            finally:
                self._waiting.remove(turn)
            turn.began_s = time.monotonic()
            self._running.append(turn)
            self._changed.notify_all()
        try:
            yield turn
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
        most = self._most_of_a_client if found.client else self._most_without_client
        return found if running.count(found.client) < most else None


class ByteBudget:
    """Readers wait until what they all hold is within `max_bytes`. One alone may hold more. The next is of the client
    whose last one began longest ago, of those the one that waits longest; others wait until it fits, so that a large
    one has its turn.

    small_bytes: a reader of so few neither waits nor counts, so that none of them keeps a large one waiting. One that
    holds its bytes for longer than `stuck_s` hangs with a file system, and is counted no more.
    """

    def __init__(self, max_bytes: int, small_bytes: int = 0, stuck_s: float = STUCK_S) -> None:
        self.max_bytes = max_bytes
        self._small_bytes = small_bytes
        self._stuck_s = stuck_s
        self._held: list[_Turn] = []
        self._waiting: list[_Turn] = []
        self._last_s: dict[str, float] = {}  # when a client's last one began: of all while one waits
        self._changed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        stuck_since_s = time.monotonic() - self._stuck_s
        return sum(turn.nbytes for turn in self._held if turn.began_s > stuck_since_s)

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """For the client whose request this thread works for."""
        if nbytes <= self._small_bytes:
            yield
            return
        turn = _Turn(own_client(), nbytes=nbytes)
        with self._changed:
            self._waiting.append(turn)
            try:
                while self._next() is not turn or not self._fits(nbytes):
                    self._changed.wait(LOOK_S)
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()
            turn.began_s = time.monotonic()
            self._held.append(turn)
            self._last_s[turn.client] = turn.began_s
            if not self._waiting:
                self._last_s = {each.client: each.began_s for each in self._held}
        try:
            yield
        finally:
            with self._changed:
                self._held.remove(turn)
                self._changed.notify_all()

    def _next(self) -> _Turn:
        return min(self._waiting, key=lambda turn: self._last_s.get(turn.client, -math.inf))

    def _fits(self, nbytes: int) -> bool:
        held_bytes = self.held_bytes
        return held_bytes == 0 or held_bytes + nbytes <= self.max_bytes
