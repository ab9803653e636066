"""Verbs through the router that wait for requests (`deadline_s`): which ones do, and that none keeps others waiting."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from loraplex.router import exchange, verbs
from tests.router.parts import RawReplica, completion, replicas, router
from tests.router.test_verbs import ADMIN, HEADER, Slow, cards, completion_at, lost, pin, verbs_of


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the router waits for each answer; 0: as long as for any verb."""
    found: list[float] = []
    send = verbs.send

    async def sent(*arguments: Any, timeout_s: float = 0.0) -> exchange.Outcome:
        found.append(timeout_s)
        return await send(*arguments, timeout_s or 20.0)

    monkeypatch.setattr(verbs, "send", sent)
    return found


@pytest.mark.parametrize(("path", "status"), [("/v1/adapters/sql/evict", 200), ("/v1/adapters/switch", 400)])
async def test_a_verb_that_names_nothing_is_not_looked_for(path: str, status: int) -> None:
    """It was a 500, and went on at the first replica alone when its turn was over."""
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        await front.until(lambda: front.fleet.num_open == 2)
        answer = await front.client.post(path, json={"deadline_s": 5})
        assert answer.status_code == status, answer.text
        assert answer.headers[HEADER] == (f"{a.name}, {b.name}" if status == 200 else a.name)


@pytest.mark.parametrize(
    ("method", "path", "content_type"),
    [
        ("PUT", "/v1/adapters/sql/tensors", "application/octet-stream"),
        ("PUT", "/v1/adapters/sql", "application/json"),
        ("POST", "/v1/adapters/sql/pin", "application/json"),
    ],
)
async def test_of_a_verb_that_does_not_wait_no_deadline_is_read(
    method: str, path: str, content_type: str, patience: list[float]
) -> None:
    """64 MiB of tensors were decoded in the event loop, to look for one."""
    async with replicas(1) as (a,), router([a.name]) as front:
        headers = {"content-type": content_type}
        await front.client.request(method, path, content=b'{"deadline_s": 400}', headers=headers)
        assert max(patience) == 300.0


async def test_a_deadline_that_the_replica_refuses_is_its_refusal(patience: list[float]) -> None:
    async with replicas(1) as (a,), router([a.name]) as front:
        for deadline_s in ("nan", "-1", "1e9", "soon"):
            answer = await front.client.delete("/v1/adapters/sql", params={"deadline_s": deadline_s})
            assert answer.status_code == 400, answer.text
        assert max(patience) == 300.0


async def test_an_unload_of_what_is_loaded_again_by_need_keeps_no_other_verb_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its card was what it had been before, for as long as the requests of the version before went on."""
    monkeypatch.setattr(verbs, "LOOK_EVERY_S", 0.5)
    (tmp_path / "need").mkdir()
    (tmp_path / "need/adapter_config.json").write_text("{}")
    async with replicas(1, adapter_sources=(f"dir={tmp_path}",)) as (a,), router([a.name]) as front:
        a.engine.hold()
        running = [asyncio.ensure_future(completion_at(a, "need"))]
        await front.until(lambda: a.engine.num_running == 1)
        waiting = asyncio.ensure_future(front.client.delete("/v1/adapters/need", params={"deadline_s": 400}))
        await front.until(lambda: a.engine.registry.find("need") is None)
        running.append(asyncio.ensure_future(completion_at(a, "need")))
        await front.until(lambda: a.engine.num_running == 2)
        assert (await front.client.post("/v1/adapters/chat/pin")).status_code == 200
        assert not waiting.done()
        a.engine.resume()
        assert {each.status_code for each in await asyncio.gather(waiting, *running)} == {200}


async def test_a_switch_that_was_done_before_keeps_no_other_verb_waiting(patience: list[float]) -> None:
    """It waits for the requests of the first one, and its card shows nothing of it."""
    async with replicas(1) as (a,), router([a.name]) as front:
        a.engine.hold()
        running = asyncio.ensure_future(completion_at(a))
        await front.until(lambda: a.engine.num_running == 1)
        switch = {"old": "sql", "new": "chat"}
        assert (await front.client.post("/v1/adapters/switch", json=switch)).status_code == 200
        again = asyncio.ensure_future(front.client.post("/v1/adapters/switch", json={**switch, "deadline_s": 400}))
        await front.until(lambda: 700.0 in patience)
        assert (await front.client.post("/v1/adapters/chat/pin")).status_code == 200
        assert not again.done()
        a.engine.resume()
        assert {each.status_code for each in await asyncio.gather(again, running)} == {200}


async def test_a_verb_that_shows_no_effect_has_its_turn_as_long_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "VERB_TIMEOUT_S", 0.3)
    slow = Slow()
    async with RawReplica(slow).running() as raw, router([raw.name]) as front:
        unload = front.client.delete("/v1/adapters/sql", params={"deadline_s": 400}, headers=ADMIN)
        waiting = asyncio.ensure_future(unload)
        await front.until(lambda: len(verbs_of(raw)) == 1)
        other = pin(front, "sql", at=raw, headers=ADMIN)
        await front.until(lambda: len(verbs_of(raw)) == 2)
        assert not waiting.done()
        slow.release.set()
        assert (await waiting).status_code == 200
        await other


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("DELETE", "/v1/adapters/sql?deadline_s=400", None),
        ("POST", "/v1/adapters/switch", {"old": "sql", "new": "chat", "deadline_s": 400}),
    ],
)
async def test_a_tenants_verb_may_wait_for_requests_as_long_as_an_admins(
    method: str, path: str, body: dict[str, Any] | None, patience: list[float]
) -> None:
    """It was 502 after 300 s, and went on at the replica."""

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        status = b"403 Forbidden" if request.startswith(b"GET") else b"200 OK"
        writer.write(b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}" % status)

    async with RawReplica(answer).running() as raw, router([raw.name]) as front:
        await front.until(lambda: front.fleet.num_open == 1)
        assert (await front.client.request(method, path, json=body)).status_code == 200
        assert max(patience) == 700.0


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("DELETE", "/v1/adapters/sql?deadline_s=400", None),
        ("POST", "/v1/adapters/switch", {"old": "sql", "new": "chat", "deadline_s": 400}),
    ],
)
async def test_a_verb_that_waits_for_requests_keeps_no_other_verb_waiting(
    method: str, path: str, body: dict[str, Any] | None, patience: list[float]
) -> None:
    """It held the turns of all replicas, which drained one after the other; beyond 300 s it was undone."""
    async with replicas(2) as (a, b), router([a.name, b.name], policy="spread") as front:
        for each in (a, b):
            each.engine.hold()
        running = [asyncio.ensure_future(front.client.post("/v1/completions", json=completion())) for _ in range(2)]
        await front.until(lambda: a.engine.num_running == b.engine.num_running == 1)
        waiting = asyncio.ensure_future(front.client.request(method, path, json=body))
        for each in (a, b):
            while (await cards(each)).get("sql", ("", ""))[:2] == ("/adapters/sql", None):
                await asyncio.sleep(0.01)
        assert (await front.client.post("/v1/adapters/chat/pin")).status_code == 200
        assert not waiting.done()
        assert max(patience) == 700.0
        for each in (a, b):
            each.engine.resume()
        assert {each.status_code for each in await asyncio.gather(waiting, *running)} == {200}
        assert (await waiting).headers[HEADER] == f"{a.name}, {b.name}"


async def test_a_verb_that_waits_at_one_replica_is_undone_where_another_one_fails() -> None:
    async with replicas(1) as (a,), RawReplica(lost).running() as raw, router([a.name, raw.name]) as front:
        a.engine.hold()
        running = asyncio.ensure_future(completion_at(a))
        await front.until(lambda: a.engine.num_running == 1)
        before = await cards(a)
        answer = await front.client.delete("/v1/adapters/sql", params={"deadline_s": 60})
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "replicas_disagree")
        assert await cards(a) == before
        a.engine.resume()
        assert (await running).status_code == 200


async def test_a_replica_that_is_lost_while_a_verb_waits_for_requests_is_said() -> None:
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        a.engine.hold()
        running = asyncio.ensure_future(completion_at(a))
        await front.until(lambda: a.engine.num_running == 1)
        waiting = asyncio.ensure_future(front.client.delete("/v1/adapters/sql", params={"deadline_s": 60}))
        await front.until(lambda: not front.replica(b.name).names.has("sql"))
        await a.kill()
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "replicas_disagree")
        found = [(each["status"], each["is_restored"]) for each in answer.json()["replicas"]]
        assert found == [(0, False), (200, False)]
        assert "sql" not in await cards(b), "another verb may have come since"
        await a.start()
        await asyncio.gather(running, return_exceptions=True)
