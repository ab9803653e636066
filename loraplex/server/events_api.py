"""GET /v1/events: what happened to adapters and memory, as server-sent events or as one JSON page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from loraplex.events import Detail, EventKind
from loraplex.frontend.event_hub import EventBatch, NumberedEvent
from loraplex.server.access import Access, StrictRoute, may_use, requires
from loraplex.server.context import ServerContext
from loraplex.server.event_streams import EventStreams
from loraplex.server.openapi import operation
from loraplex.server.responses import encode
from loraplex.server.streaming import EVENT_STREAM, EventStream

HEARTBEAT_S = 15.0
HEARTBEAT = b": heartbeat\n\n"
GREETING = b"retry: 2000\n\n"
"""Sent at once: a client that loses the stream comes back after these milliseconds."""

KEY_CHECK_S = 0.5
"""So often at least the key of a stream is looked up; also when something has happened, before that is sent."""

Sleep = Callable[[float], Awaitable[object]]


class EventCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event. `adapter` and `adapter_id` when it is about one; times are Unix seconds."""

    id: int
    kind: str
    time: float
    text: str
    adapter: str | None = None
    adapter_id: int | None = None
    details: dict[str, Detail] = {}

    @classmethod
    def of(cls, numbered: NumberedEvent) -> EventCard:
        event = numbered.event
        return cls(
            numbered.event_id,
            event.kind.value,
            event.time_s,
            event.text,
            event.adapter_name,
            event.adapter_id,
            dict(event.details),
        )


class EventPage(msgspec.Struct, frozen=True):
    """last_id: of the newest event, whatever its kind; lost: events that are not kept any longer."""

    data: list[EventCard]
    last_id: int
    lost: int
    object: str = "list"


class EventsQuery(BaseModel):
    """Query of `GET /v1/events`: only these kinds (repeatable), after this id. Without `stream`: a page of them."""

    model_config = ConfigDict(extra="forbid")

    kind: list[EventKind] = []
    last_id: Annotated[int, Field(ge=0)] | None = None
    stream: bool = True


class Gap(msgspec.Struct, frozen=True):
    lost: int


class _CountedStream(EventStream):
    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: AsyncGenerator[EventBatch, None],
        streams: EventStreams,
    ) -> None:
        super().__init__(events, source)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.leave()


class EventRoutes:
    """`sleep` is waited for between heartbeats."""

    def __init__(self, context: ServerContext, sleep: Sleep = asyncio.sleep) -> None:
        self._hub = context.engine.events
        self._streams = context.event_streams
        self._keys = context.keys
        self._sleep = sleep

    def router(self) -> APIRouter:
        router = APIRouter(tags=["memory"], route_class=StrictRoute)
        extra = operation(replies=(EventPage,), text_type=EVENT_STREAM)
        router.add_api_route("/v1/events", self.events, methods=["GET"], openapi_extra=extra)
        return router

    @requires(Access.ADMIN)
    async def events(
        self,
        request: Request,
        query: Annotated[EventsQuery, Query()],
        last_event_id: Annotated[int | None, Header(ge=0)] = None,
    ) -> Response:
        """Events after the header Last-Event-ID, or else after `last_id`, or else from now on."""
        after = query.last_id if last_event_id is None else last_event_id
        kinds = frozenset(query.kind or EventKind)
        if not query.stream:
            return Response(encode(_page(self._hub.after(after or 0), kinds)), media_type="application/json")
        self._streams.enter()
        batches = self._hub.subscribe(self._hub.last_id if after is None else after)
        return _CountedStream(self._sent(request.headers, batches, kinds), batches, self._streams)

    async def _sent(
        self, headers: Headers, batches: AsyncGenerator[EventBatch, None], kinds: frozenset[EventKind]
    ) -> AsyncGenerator[bytes, None]:
        """The bytes of a stream, until the hub or the server ends, or the key that opened it may not any longer."""
        yield GREETING
        closing = asyncio.ensure_future(self._streams.until_closed())
        news = asyncio.ensure_future(anext(batches, None))
        timer = asyncio.ensure_future(self._sleep(HEARTBEAT_S))
        try:
            while not closing.done():
                waited = news, timer, closing
                await asyncio.wait(waited, timeout=KEY_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
                if not self._may_follow(headers):
                    return
                if news.done():
                    batch = news.result()
                    if batch is None:
                        return
                    news = asyncio.ensure_future(anext(batches, None))
                    for chunk in _chunks(batch, kinds):
                        yield chunk
                if timer.done():
                    timer = asyncio.ensure_future(self._sleep(HEARTBEAT_S))
                    yield HEARTBEAT
        finally:
            for task in (news, timer, closing):
                task.cancel()
            await asyncio.gather(news, timer, closing, return_exceptions=True)

    def _may_follow(self, headers: Headers) -> bool:
        caller = self._keys.admitted(headers)
        return caller is not None and may_use(caller, Access.ADMIN)


def _page(batch: EventBatch, kinds: frozenset[EventKind]) -> EventPage:
    cards = [EventCard.of(numbered) for numbered in batch.events if numbered.event.kind in kinds]
    return EventPage(cards, batch.last_id, batch.num_lost)


def _chunks(batch: EventBatch, kinds: frozenset[EventKind]) -> Iterator[bytes]:
    if batch.num_lost:
        yield _sse(batch.events[0].event_id - 1, "gap", encode(Gap(batch.num_lost)))
    for numbered in batch.events:
        if numbered.event.kind in kinds:
            yield _sse(numbered.event_id, numbered.event.kind.value, encode(EventCard.of(numbered)))


def _sse(event_id: int, kind: str, data: bytes) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event_id, kind.encode(), data)
