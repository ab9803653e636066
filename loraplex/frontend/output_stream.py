"""What one request's client reads: the latest output, or the error that ended it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from loraplex.core import RequestOutput
from loraplex.errors import LoraplexError


class OutputStream:
    """The latest output of one request. Outputs are cumulative, so a slow reader skips some and memory stays bounded."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._latest: RequestOutput | None = None
        self._error: LoraplexError | None = None
        self._has_news = asyncio.Event()
        self._on_end: Callable[[], None] | None = on_end

    def put(self, output: RequestOutput) -> None:
        self._latest = output
        self._has_news.set()
        if output.finished:
            self.end()

    def fail(self, error: LoraplexError) -> None:
        self._error = error
        self._has_news.set()
        self.end()

    def end(self) -> None:
        """Return what the request held, once."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        is_finished = False
        while not is_finished:
            await self._has_news.wait()
            self._has_news.clear()
            if self._latest is not None:
                output, self._latest = self._latest, None
                is_finished = output.finished
                yield output
            if self._error is not None and not is_finished:
                raise self._error
