"""The application's side of a call: answers that are not taken, and what outputs of all calls hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from loraplex.routing import Needs
from loraplex.serve.exchange import MAX_UNSENT_BYTES, Call, Exchange, Head
from loraplex.server import ServerConfig, connections
from loraplex.server.connections import Connections
from loraplex.server.streaming import EVENT_STREAM, EventStream

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


class Logprobs:
    """An application whose outputs take 60 bytes, until its client is gone. has_begun: so has its answer, a stream."""

    def __init__(self, has_begun: bool) -> None:
        self.has_begun = has_begun

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        hold = connections.hold_outputs.get()
        assert hold is not None
        hold(60)
        if self.has_begun:
            headers = [(b"content-type", EVENT_STREAM.encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": EVENTS, "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def answer_of(app: Any, shared: Connections | None = None) -> AsyncIterator[Head | bytes]:
    return Exchange(app, CALL, shared or Connections(ServerConfig(), 10), "a client").answer()


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


@pytest.mark.parametrize("has_begun", [True, False])
async def test_outputs_of_all_calls_are_bounded_together(has_begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the client that has most, the one that was not read for longest ends in an error."""
    monkeypatch.setattr(connections, "MAX_OUTPUT_BYTES", 100)
    shared = Connections(ServerConfig(), 10)
    taken: list[list[Head | bytes]] = [[], [], []]

    async def take(number: int) -> None:
        async for part in answer_of(Logprobs(has_begun), shared):
            taken[number].append(part)

    tasks = []
    for number in range(len(taken)):
        tasks.append(asyncio.ensure_future(take(number)))
        await turns()
        assert [task.done() for task in tasks] == [True] * number + [False]
    assert shared.refused == {"unread_answers": 2}
    for number in range(2):
        *_, head, error = taken[number]
        assert b'"code":"engine_overloaded"' in error
        if has_begun:
            assert (head, error[:6], error[-2:]) == (EVENTS, b"data: ", b"\n\n")
        else:
            assert isinstance(head, Head)
            assert head.status == 429
            assert (b"retry-after", b"1") in head.headers
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
