"""Verbs on adapters, so many at a time: one that hangs (on a file system, say) takes a place of its client alone, and
one that waits for requests takes no place of other verbs, and no thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from loraplex.adapters.registry import Draining
from loraplex.server.api_error import ApiError
from loraplex.server.off_loop import OffLoop

PATIENCE_S = 10.0
TOO_MANY_OF_CLIENT, TOO_MANY = 429, 503
"""The status behind a client's own verbs, and behind others'."""

MAX_WAITS, MAX_WAITS_OF_A_CLIENT = 1024, 128
NUM_END_THREADS = 2

T = TypeVar("T")


@dataclass(slots=True)
class _Client:
    turns: asyncio.Semaphore
    num_verbs: int = 0


class VerbTurns:
    """`max_running` verbs at a time (None: any number), `max_of_a_client` of one client. One that has waited
    `patience_s` (PATIENCE_S) is refused: 429 behind its client's own, 503 behind others'; and at once where
    `max_waiting` of its client wait. `what` is the subject of the message.
    """

    def __init__(
        self,
        what: str,
        max_running: int | None,
        max_of_a_client: int,
        patience_s: float | None = None,
        max_waiting: int | None = None,
    ) -> None:
        self._what = what
        self._patience_s = patience_s
        self._max_of_a_client = max_of_a_client
        self._max_waiting = max_waiting
        self._turns = None if max_running is None else asyncio.Semaphore(max_running)
        self._clients: dict[str, _Client] = {}

    @asynccontextmanager
    async def of(self, client: str) -> AsyncIterator[None]:
        own = self._clients.setdefault(client, _Client(asyncio.Semaphore(self._max_of_a_client)))
        num_waiting = own.num_verbs - self._max_of_a_client
        if self._max_waiting is not None and num_waiting >= self._max_waiting:
            raise _too_many(f"{num_waiting} {self._what} of this client wait", TOO_MANY_OF_CLIENT)
        own.num_verbs += 1
        try:
            async with AsyncExitStack() as held:
                await self._take(held, own.turns, f"as many {self._what} of this client as may", TOO_MANY_OF_CLIENT)
                if self._turns is not None:
                    await self._take(held, self._turns, f"as many {self._what} as may", TOO_MANY)
                yield
        finally:
            own.num_verbs -= 1
            if not own.num_verbs:
                del self._clients[client]

    async def _take(self, held: AsyncExitStack, turns: asyncio.Semaphore, who: str, status: int) -> None:
        patience_s = PATIENCE_S if self._patience_s is None else self._patience_s
        try:
            async with asyncio.timeout(patience_s):
                await held.enter_async_context(turns)
        except TimeoutError:
            text = f"{who} run, and none of them ended for {patience_s:g} s: some may wait for a file system or a hub"
            raise _too_many(f"{text} that does not answer", status) from None


def _too_many(what: str, status: int) -> ApiError:
    return ApiError(f"{what}; try again later", status=status, kind="overloaded_error", code="too_many_verbs")


class DrainWaits:
    """Verbs that wait for requests as long as their clients say. What has begun ends, though its client may be gone."""

    def __init__(self) -> None:
        self._turns = VerbTurns("verbs that wait for requests", MAX_WAITS, MAX_WAITS_OF_A_CLIENT)
        self._ends = OffLoop(NUM_END_THREADS)
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self, client: str, deadline_s: float | None, begin: Callable[[], Awaitable[Draining[T]]]) -> T:
        """The result of what `begin` begins in a turn of its own, which is over when the wait begins."""
        running = asyncio.ensure_future(self._run(client, deadline_s, begin))
        self._running.add(running)
        running.add_done_callback(self._end)
        return await asyncio.shield(running)

    async def _run(self, client: str, deadline_s: float | None, begin: Callable[[], Awaitable[Draining[T]]]) -> T:
        async with AsyncExitStack() as held:
            if deadline_s:
                await held.enter_async_context(self._turns.of(client))
            draining = await begin()
            while draining.waits_for is not None:
                await _wait(*draining.waits_for)
                await self._ends.run(client, draining.go_on, 0)
            return draining.result

    def _end(self, done: asyncio.Future[Any]) -> None:
        self._running.discard(done)
        if not done.cancelled():
            done.exception()  # its client has it, if it is there


async def _wait(drains: Sequence[Future[bool]], timeout_s: float) -> None:
    """As `concurrent.futures.wait`, without a thread."""
    loop, ended = asyncio.get_running_loop(), asyncio.Semaphore(0)

    def note_end(_: Future[bool]) -> None:
        with suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(ended.release)

    for drain in drains:
        drain.add_done_callback(note_end)
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for _ in drains:
                await ended.acquire()
