"""The routes of a profile: its states, its end by itself, and that the report is whole."""

from __future__ import annotations

import asyncio
import time

import httpx
import msgspec

from loraplex.events import EngineEvent, EventKind
from loraplex.performance.report import LoraPerformanceReport
from loraplex.testing import FakeAsyncEngine


async def test_start_state_stop(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    assert (await client.get("/v1/profile")).json() == {
        "object": "profile",
        "is_running": False,
        "begun_time": None,
        "elapsed_s": None,
        "seconds": None,
        "has_report": False,
    }
    begun = (await client.post("/v1/profile/start", json={"first_token_s": 0.5})).json()
    assert begun["is_running"]
    assert abs(begun["begun_time"] - time.time()) < 600
    engine.record_event(EngineEvent(EventKind.LOAD, 1.0, "loaded", details={"seconds": 0.25}))
    response = await client.post("/v1/profile/stop")
    report = msgspec.json.decode(response.content, type=LoraPerformanceReport)
    assert report.targets.first_token_s == 0.5
    assert report.switch_cost.load.count == 1
    assert {adapter.name for adapter in report.adapters} == {"sql", "chat"}
    assert report.findings
    assert not (await client.get("/v1/profile")).json()["is_running"]


async def test_only_one_runs(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/profile/stop")).status_code == 409
    await client.post("/v1/profile/start", json={})
    response = await client.post("/v1/profile/start", json={})
    assert (response.status_code, response.json()["error"]["code"]) == (409, "profile_state")
    assert (await client.post("/v1/profile/stop")).status_code == 200
    assert (await client.post("/v1/profile/stop")).status_code == 409


async def test_it_ends_by_itself_and_keeps_the_report(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    await client.post("/v1/profile/start", json={"seconds": 0.001})
    while engine.is_profiling:
        await asyncio.sleep(0)
    while not (await client.get("/v1/profile")).json()["has_report"]:
        await asyncio.sleep(0)
    assert (await client.post("/v1/profile/stop")).status_code == 200
    assert (await client.post("/v1/profile/stop")).status_code == 409


async def test_a_new_start_forgets_an_old_report(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    await client.post("/v1/profile/start", json={"seconds": 0.001})
    while engine.is_profiling:
        await asyncio.sleep(0)
    assert (await client.post("/v1/profile/start", json={"seconds": 3600})).json()["has_report"] is False
    await client.post("/v1/profile/stop")


async def test_what_is_refused(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    for body in ({"seconds": 0}, {"seconds": "3"}, {"nope": 1}, {"inter_token_s": -1}):
        assert (await client.post("/v1/profile/start", json=body)).status_code == 400
    engine.die()
    assert (await client.post("/v1/profile/start", json={})).status_code == 503
    assert not engine.is_profiling


async def test_an_engine_that_does_not_answer_keeps_the_profile(
    client: httpx.AsyncClient, engine: FakeAsyncEngine
) -> None:
    await client.post("/v1/profile/start", json={})
    engine.die()
    assert (await client.post("/v1/profile/stop")).status_code == 503
    assert engine.is_profiling
