"""Places of requests in the replicas, and the turns of those that wait for one, in front of Serve's own queue: that one
knows no clients, and is first come, first served."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator

from loraplex.errors import EngineOverloadedError
from loraplex.tenants.fair_limit import FairLimit


class Places:
    """A client may have all places; others then still find theirs beyond (`FairLimit`). What finds none waits, and the
    next place is for the client that has fewest. At most `max_waiting` wait, by the same rule."""

    def __init__(self, max_waiting: int) -> None:
        self._taken = FairLimit(0)
        self._waiting = FairLimit(max_waiting)
        self._num_taken: Counter[str] = Counter()
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def of(self, client: str, num_places: int) -> AsyncIterator[None]:
        """num_places: that there are now. Raises EngineOverloadedError."""
        self._taken.limit = num_places
        self._hand_out()
        if client in self._queues or not self._take(client):
            await self._wait(client)
        try:
            yield
        finally:
            self._give_back(client)

    async def _wait(self, client: str) -> None:
        if not self._waiting.take(client, 1):
            raise EngineOverloadedError(
                f"{self._waiting.total} requests wait for a place in a replica, and {self._waiting.limit} are the "
                "limit; try again later (--max-waiting-requests)"
            )
        turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was its turn already
                self._give_back(client)
            elif turn in self._queues.get(client, ()):
                self._leave(client, turn)
            raise
        finally:
            self._waiting.give_back(client, 1)

    def _take(self, client: str) -> bool:
        if not self._taken.take(client, 1):
            return False
        self._num_taken[client] += 1
        return True

    def _give_back(self, client: str) -> None:
        self._taken.give_back(client, 1)
        self._num_taken[client] -= 1
        if not self._num_taken[client]:
            del self._num_taken[client]
        self._hand_out()

    def _hand_out(self) -> None:
        """The client that has fewest finds a place where any does."""
        while self._queues:
            client = min(self._queues, key=lambda each: self._num_taken[each])
            turn = self._queues[client][0]
            if not turn.cancelled():
                if not self._take(client):
                    return
                turn.set_result(None)
            self._leave(client, turn)

    def _leave(self, client: str, turn: asyncio.Future[None]) -> None:
        self._queues[client].remove(turn)
        if not self._queues[client]:
            del self._queues[client]
