"""The application's side of a call: answers that are not taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from loraplex.routing import Needs
from loraplex.serve.exchange import MAX_UNSENT_BYTES, Call, Exchange, Head
from loraplex.server.streaming import EventStream

EVENTS = b"data: 1\n\n" * 100
COUNT = 1000
CALL = Call(
    front="front",
    method="POST",
    target=b"/v1/completions",
    query=b"",
    headers=(),
    client=None,
    body=b"",
    request_id="mine",
    needs=Needs(),
)


class Stream:
    """An application whose answer is EVENTS, COUNT times, as fast as they are taken."""

    def __init__(self) -> None:
        self.num_made = 0
        self.has_ended = False

    async def events(self) -> AsyncGenerator[bytes, None]:
        for _ in range(COUNT):
            self.num_made += len(EVENTS)
            yield EVENTS

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        events = self.events()
        await EventStream(events, events)(scope, receive, send)
        self.has_ended = True


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def answer_of(app: Any) -> AsyncIterator[Head | bytes]:
    return Exchange(app, CALL).answer()


async def test_an_answer_is_made_as_it_is_taken() -> None:
    app = Stream()
    parts = answer_of(app)
    assert isinstance(await anext(parts), Head)
    num_taken, most = 0, MAX_UNSENT_BYTES + len(EVENTS)
    await turns()
    assert app.num_made <= most
    async for part in parts:
        assert isinstance(part, bytes)
        num_taken += len(part)
        await turns()
        assert app.num_made <= num_taken + most
    assert num_taken == COUNT * len(EVENTS)
    assert app.has_ended


async def test_an_application_that_waits_ends_when_its_answer_is_left() -> None:
    app = Stream()
    parts: Any = answer_of(app)
    await anext(parts)
    await turns()
    assert app.num_made < COUNT * len(EVENTS)
    await parts.aclose()
    assert app.has_ended
