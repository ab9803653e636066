"""How many clients follow events, and that they all leave when the server ends."""

from __future__ import annotations

import asyncio

from loraplex.server.api_error import ApiError


class EventStreams:
    """Open streams of events, bounded in number, and their end."""

    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        self._num_open = 0
        self._closing = asyncio.Event()

    @property
    def num_open(self) -> int:
        return self._num_open

    def close(self) -> None:
        """Every stream ends, and no other is opened: an open one would hold up the end of the server."""
        self._closing.set()

    def enter(self) -> None:
        """Raises ApiError 503 when there are too many, or the server ends."""
        if self._closing.is_set() or self._num_open >= self._max_streams:
            reason = "the server ends" if self._closing.is_set() else f"{self._num_open} streams of events are open"
            raise ApiError(f"{reason}; try again later", status=503, kind="overloaded_error", code="too_many_streams")
        self._num_open += 1

    def leave(self) -> None:
        self._num_open -= 1

    async def until_closed(self) -> None:
        await self._closing.wait()
