"""GET /v1/events: streams that resume, beat, lose and end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from loraplex.events import EngineEvent, EventKind
from loraplex.server import ServerConfig, create_app
from loraplex.server.context import ServerContext
from loraplex.server.events_api import GREETING, HEARTBEAT, HEARTBEAT_S, EventRoutes, EventsQuery
from loraplex.testing import FakeAsyncEngine
from tests.server.asgi_call import AsgiCall
from tests.server.conftest import client_of
from tests.server.live_server import LiveServer


def event(text: str, kind: EventKind = EventKind.LOAD, **details: Any) -> EngineEvent:
    return EngineEvent(kind, 5.0, text, 1, "sql", details)


def read(chunk: bytes | None) -> dict[str, Any]:
    """id, event and data of one server-sent event."""
    assert chunk is not None
    assert chunk.endswith(b"\n\n")
    fields = dict(line.split(": ", 1) for line in chunk.decode().strip().split("\n"))
    return {"id": int(fields["id"]), "event": fields["event"], "data": json.loads(fields["data"])}


class Stream:
    """An open stream, past its greeting."""

    def __init__(self, app: FastAPI, query: str = "", headers: dict[str, str] | None = None) -> None:
        self.call = AsgiCall(app, "/v1/events", {}, "GET", query=query, headers=headers)

    async def __aenter__(self) -> Stream:
        assert await self.call.start() == 200
        assert await self.call.next_chunk() == GREETING
        return self

    async def next(self) -> dict[str, Any]:
        return read(await asyncio.wait_for(self.call.next_chunk(), 60))

    async def __aexit__(self, *error: object) -> None:
        self.call.disconnect()
        await self.call.task


async def test_events_as_they_happen(app: FastAPI, engine: FakeAsyncEngine) -> None:
    engine.record_event(event("before"))
    async with Stream(app) as stream:
        engine.record_event(event("adapter 'sql' is in host memory", nbytes=7))
        assert await stream.next() == {
            "id": 2,
            "event": "load",
            "data": {
                "id": 2,
                "kind": "load",
                "time": 5.0,
                "text": "adapter 'sql' is in host memory",
                "adapter": "sql",
                "adapter_id": 1,
                "details": {"nbytes": 7},
            },
        }
    context: ServerContext = app.state.context
    assert context.event_streams.num_open == 0


@pytest.mark.parametrize(
    ("query", "headers", "expected"),
    [
        ("last_id=0", {}, [1, 2, 3]),
        ("last_id=2", {}, [3]),
        ("last_id=0", {"last-event-id": "1"}, [2, 3]),
        ("last_id=77", {}, [1, 2, 3]),
        ("last_id=0&kind=evict", {}, [2]),
        ("last_id=0&kind=evict&kind=fault", {}, [2, 3]),
    ],
)
async def test_resume_and_filter(
    app: FastAPI, engine: FakeAsyncEngine, query: str, headers: dict[str, str], expected: list[int]
) -> None:
    for kind in (EventKind.LOAD, EventKind.EVICT, EventKind.FAULT):
        engine.record_event(event(kind.value, kind))
    async with Stream(app, query, headers) as stream:
        assert [(await stream.next())["id"] for _ in expected] == expected
    response = await client_of(app).get(f"/v1/events?stream=false&{query}", headers=headers)
    page = response.json()
    assert [each["id"] for each in page["data"]] == expected
    assert (page["last_id"], page["lost"]) == (3, 0)


async def test_a_slow_reader_is_told_what_it_lost(app: FastAPI, engine: FakeAsyncEngine) -> None:
    async with Stream(app) as stream:
        engine.record_event(event("first"))
        assert (await stream.next())["id"] == 1
        for number in range(1500):  # at once: nothing is read meanwhile
            engine.record_event(event(str(number)))
        gap = await stream.next()
        assert (gap["event"], gap["data"], gap["id"]) == ("gap", {"lost": 500}, 501)
        assert (await stream.next())["id"] == 502
    async with Stream(app, "last_id=501") as resumed:
        assert (await resumed.next())["id"] == 502


@pytest.mark.parametrize("query", ["kind=nope", "last_id=-1", "last_id=x", "nope=1", "stream=maybe"])
async def test_what_is_refused(client: httpx.AsyncClient, query: str) -> None:
    response = await client.get(f"/v1/events?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == query.split("=")[0]
    assert (await client.get("/v1/events", headers={"last-event-id": "x"})).status_code == 400


class FakeSleep:
    """Sleeps end when `pass_by` says so."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._sleeping: list[asyncio.Event] = []

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        self._sleeping.append(asyncio.Event())
        await self._sleeping[-1].wait()

    def pass_by(self) -> None:
        self._sleeping[-1].set()


async def body_of(response: Any) -> AsyncIterator[bytes]:
    return response.body_iterator


async def test_a_heartbeat_every_15_seconds(app: FastAPI, engine: FakeAsyncEngine) -> None:
    sleep, request = FakeSleep(), Request({"type": "http", "headers": []})
    response = await EventRoutes(app.state.context, sleep).events(request, EventsQuery())
    chunks = await body_of(response)
    assert await anext(chunks) == GREETING
    for num_beats in (1, 2):
        beat = asyncio.ensure_future(anext(chunks))
        while len(sleep.asked) < num_beats:
            await asyncio.sleep(0)
        assert not beat.done()
        sleep.pass_by()
        assert await beat == HEARTBEAT
    engine.record_event(event("between beats"))
    assert read(await anext(chunks))["event"] == "load"
    assert set(sleep.asked) == {HEARTBEAT_S}
    await chunks.aclose()  # type: ignore[attr-defined]


async def test_too_many_streams_are_503(engine: FakeAsyncEngine) -> None:
    app = create_app(engine, ServerConfig(max_event_streams=1))
    async with Stream(app):
        response = await client_of(app).get("/v1/events")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "too_many_streams"
        assert (await client_of(app).get("/v1/events?stream=false")).status_code == 200
    async with Stream(app):
        pass


async def test_keys_guard_it(engine: FakeAsyncEngine) -> None:
    app = create_app(engine, ServerConfig(api_keys=("k",)))
    for path in ("/v1/events?stream=false", "/v1/memory", "/v1/profile"):
        assert (await client_of(app).get(path)).status_code == 401
        assert (await client_of(app).get(path, headers={"Authorization": "Bearer k"})).status_code == 200


async def test_the_end_of_the_engine_ends_streams(app: FastAPI, engine: FakeAsyncEngine) -> None:
    async with Stream(app) as stream:
        await engine.shutdown()
        assert await asyncio.wait_for(stream.call.next_chunk(), 60) is None


def test_the_end_of_the_server_ends_streams_before_the_grace() -> None:
    config = ServerConfig(port=0, access_log=False, log_level="warning", shutdown_grace_s=3600.0)
    with (
        LiveServer(FakeAsyncEngine(), config) as server,
        httpx.stream("GET", server.url + "/v1/events", timeout=60) as response,
    ):
        lines = response.iter_lines()
        assert next(lines) == "retry: 2000"
        server.stop()
        assert [line for line in lines if line] == []


async def test_nobody_opens_a_stream_while_the_server_ends(app: FastAPI, client: httpx.AsyncClient) -> None:
    context: ServerContext = app.state.context
    context.event_streams.close()
    assert (await client.get("/v1/events")).status_code == 503
