"""Server-sent events, several streams as one, and the client that goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

MAX_CANCELLED = 4
"""In a turn of the event loop, each with the request that it follows."""

PIECE_BYTES = 2**18
"""Of events that are sent together. More of them are not made before these are sent."""

EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]\n\n"


def sse(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def in_pieces(events: Iterable[bytes]) -> Iterator[bytes]:
    """Events together, PIECE_BYTES or more at a time, and what is left."""
    waiting: list[bytes] = []
    size = 0
    for event in events:
        waiting.append(event)
        size += len(event)
        if size >= PIECE_BYTES:
            yield b"".join(waiting)
            waiting.clear()
            size = 0
    if waiting:
        yield b"".join(waiting)


class EventStream(StreamingResponse):
    """Sends events as they come. At any end (all sent, client gone, server stopped) they and their source are closed.

    `source` is what `events` reads: closing events whose reading has not begun would not reach it.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], source: AsyncGenerator[Any, None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type=EVENT_STREAM)
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await self._source.aclose()


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. When the client goes away first, `work` is cancelled and ClientDisconnect raised.

    The body must have been read: from then on the only message that can come is the disconnect.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _cancel((task, watcher))


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Until they have ended, however often this is cancelled meanwhile: where a client goes, once more in each turn of
    the event loop."""
    cancelling = asyncio.ensure_future(_cancel_in_turns(tasks))
    try:
        await asyncio.wait((cancelling,))
    except asyncio.CancelledError:
        while not cancelling.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((cancelling,))
        raise


async def _cancel_in_turns(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Some at a time: a thousand prompts that end in one turn of the event loop would hold it for half a second."""
    for start in range(0, len(tasks), MAX_CANCELLED):
        some = tasks[start : start + MAX_CANCELLED]
        for task in some:
            task.cancel()
        await asyncio.gather(*some, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _End:
    """The last entry of one source: it is finished, or failed."""

    error: Exception | None


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all sources as they come, each with the index of its source. The first error ends and closes all."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | _End] = asyncio.Queue(maxsize=len(sources))
    pumps: list[asyncio.Future[None]] = []
    entry: tuple[int, T] | _End | None = None
    num_running = len(sources)
    try:
        for index, source in enumerate(sources):
            pumps.append(asyncio.ensure_future(_pump(index, source, queue)))
            await asyncio.sleep(0)  # each begins in a turn of the event loop of its own: its prompt may be long
        while num_running:
            entry = await queue.get()
            if not isinstance(entry, _End):
                yield entry
            elif entry.error is not None:
                raise entry.error
            else:
                num_running -= 1
    finally:
        await _cancel(pumps)
        entry = None  # an error that its own frames refer to would keep the request until a collection of all garbage
        while not queue.empty():
            queue.get_nowait()


async def _pump(index: int, source: AsyncGenerator[T, None], queue: asyncio.Queue[tuple[int, T] | _End]) -> None:
    try:
        async with contextlib.aclosing(source):
            async for item in source:
                await queue.put((index, item))
    except Exception as error:
        await queue.put(_End(error))
    else:
        await queue.put(_End(None))
