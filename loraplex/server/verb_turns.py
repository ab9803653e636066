"""Verbs on adapters, so many at a time: one that hangs (on a file system, say) takes a place of its client alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from loraplex.server.api_error import ApiError

PATIENCE_S = 10.0


@dataclass(slots=True)
class _Client:
    turns: asyncio.Semaphore
    num_verbs: int = 0


class VerbTurns:
    """`max_running` verbs at a time, `max_of_a_client` of one client. One that has waited `patience_s` (PATIENCE_S) is
    refused: 429 behind its client's own, 503 behind others'. `what` is the subject of the message.
    """

    def __init__(self, what: str, max_running: int, max_of_a_client: int, patience_s: float | None = None) -> None:
        self._what = what
        self._patience_s = patience_s
        self._max_of_a_client = max_of_a_client
        self._turns = asyncio.Semaphore(max_running)
        self._clients: dict[str, _Client] = {}

    @asynccontextmanager
    async def of(self, client: str) -> AsyncIterator[None]:
        own = self._clients.setdefault(client, _Client(asyncio.Semaphore(self._max_of_a_client)))
        own.num_verbs += 1
        try:
            async with AsyncExitStack() as held:
                await self._take(held, own.turns, f"as many {self._what} of this client as may", 429)
                await self._take(held, self._turns, f"as many {self._what} as may", 503)
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
            raise ApiError(
                f"{who} run, and none of them ended for {patience_s:g} s: some may wait for a file system or a hub "
                "that does not answer; try again later",
                status=status,
                kind="overloaded_error",
                code="too_many_verbs",
            ) from None
