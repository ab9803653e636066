"""Requests through an ingress and a replica: the answers are those of a server over the same engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from loraplex.adapters.journal.postgres_journal import PostgresJournal
from loraplex.errors import EngineError, EngineOverloadedError, JournalError
from loraplex.routing import Needs, prefix_digests
from loraplex.serve import ingress as serve_ingress
from loraplex.serve import ray_run
from loraplex.serve.exchange import REPLICA_HEADER
from loraplex.serve.ingress import ReplicaLostError, Watch, open_tenants
from loraplex.serve.scaling import LATE_SHARE
from loraplex.serve.settings import RaySettings
from loraplex.server import ServerConfig, bind, connections, generation
from loraplex.server.app import create_app
from loraplex.server.body import SHORT_BODY_BYTES
from loraplex.server.off_loop import MAX_THREADS
from loraplex.tenants.records import Role, TenantTable
from loraplex.tenants.store import TenantStore, open_store
from loraplex.testing import FakeAsyncEngine
from tests.serve.parts import ADAPTERS, LocalFleet, ingress
from tests.server.asgi_call import AsgiCall

COMPLETION = {"model": "sql", "prompt": "hi", "max_tokens": 6, "ignore_eos": True}


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@pytest.fixture
async def front() -> AsyncIterator[tuple[Starlette, LocalFleet]]:
    async with ingress() as made:
        yield made


async def until(condition: Callable[[], bool]) -> None:
    """pytest's timeout ends it otherwise."""
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", COMPLETION),
        ("POST", "/v1/completions", {**COMPLETION, "stream": True}),
        ("POST", "/v1/completions", {**COMPLETION, "model": "none"}),
        ("POST", "/v1/completions", {**COMPLETION, "temperature": "hot"}),
        ("POST", "/tokenize", {"model": "sql", "prompt": "hi"}),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/sql", None),
        ("GET", "/v1/adapters?limit=1", None),
        ("GET", "/v1/nothing", None),
        ("DELETE", "/v1/completions", None),
        ("POST", "/metrics", None),
        ("GET", "/docs", None),
    ],
)
async def test_an_answer_is_that_of_a_server(
    front: tuple[Starlette, LocalFleet], method: str, path: str, body: Any
) -> None:
    plain = create_app(FakeAsyncEngine(ADAPTERS), ServerConfig(served_model_names=("demo",)))
    headers = {"X-Request-Id": "mine"}
    async with client_of(plain) as alone, client_of(front[0]) as client:
        one, other = [await each.request(method, path, json=body, headers=headers) for each in (alone, client)]
    assert other.status_code == one.status_code
    assert other.headers.pop(REPLICA_HEADER) == "r0"
    assert undated(str(sorted(other.headers.items()))) == undated(str(sorted(one.headers.items())))
    assert undated(other.text) == undated(one.text)


def undated(text: str) -> str:
    """Without Unix times, whose number of digits varies."""
    return re.sub(r"\b1\d{9}(\.\d+)?\b|'content-length', '\d+'", "*", text)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_routes_of_other_forms_tell_it_too(
    front: tuple[Starlette, LocalFleet], path: str, body: dict[str, Any]
) -> None:
    app, fleet = front
    async with client_of(app) as client:
        assert (await client.post(path, json={**body, "model": "sql"})).status_code == 200
    assert fleet.calls[0].needs.adapter == "sql"


async def test_a_request_tells_what_it_needs(front: tuple[Starlette, LocalFleet]) -> None:
    app, fleet = front
    prompt = "x" * 2000
    async with client_of(app) as client:
        for model in ("demo:sql", "demo"):
            await client.post("/v1/completions", json={**COMPLETION, "model": model, "prompt": prompt})
        await client.get("/v1/models")
    needs, base, other = [call.needs for call in fleet.calls]
    assert (needs.adapter, base.adapter, other.adapter) == ("sql", None, None)
    assert needs.num_prompt_tokens == 500
    assert tuple(needs.prefix_digests) == prefix_digests(f'"{prompt}"'.encode(), "None sql", 512, 64)
    assert needs.prefix_digests != base.prefix_digests


async def test_without_a_key_no_body_is_read_and_no_replica_asked() -> None:
    async with ingress(api_keys=("a-key-of-sixteen",), guard_metrics=True) as (app, fleet), client_of(app) as client:
        refused = await client.post("/v1/completions", json=COMPLETION)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await client.get("/metrics")).status_code == 401
        assert fleet.calls == []
        assert (await client.get("/health")).status_code == 200
        served = await client.post(
            "/v1/completions", json=COMPLETION, headers={"Authorization": "Bearer a-key-of-sixteen"}
        )
        assert served.status_code == 200
        assert "a-key-of-sixteen" not in str(fleet.calls[0].needs)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[tuple[str, TenantStore]]:
    """Of a database that a server has been in, with tenant acme."""
    pytest.importorskip("psycopg", reason="psycopg is not installed (pip install loraplex[postgres])")
    url: str = request.getfixturevalue("postgres_cluster").new_schema()
    PostgresJournal(url, "demo").close()
    with closing(open_store(None, url)) as opened:
        opened.create_tenant("acme")
        yield url, opened


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("server", [{}, {"api_keys": ("a-key-of-sixteen",)}], ids=["no key", "a key"])
async def test_the_ingress_knows_the_keys_of_tenants(server: dict[str, Any], store: tuple[str, TenantStore]) -> None:
    """They were 401 beside a key of the command line, and without one every client had its body read."""
    url, tenants = store
    _, secret = tenants.create_key(Role.TENANT, "acme")
    _, watching = tenants.create_key(Role.READ_ONLY)
    tenants.share("sql", [TenantTable.ALL])
    async with ingress(database_url=url, **server) as (app, fleet), client_of(app) as client:
        unknown = await client.post("/v1/completions", json=COMPLETION)
        assert (unknown.status_code, fleet.calls) == (401, [])
        assert (await client.post("/v1/completions", json=COMPLETION, headers=bearer(secret))).status_code == 200
        pages = [await client.get("/metrics", headers=bearer(each)) for each in ("none", secret, watching)]
        assert [page.status_code for page in pages] == [401, 403, 200]
        (key,) = [each for each in tenants.read().keys.values() if each.tenant == "acme"]
        tenants.revoke_key(key.key_id)
        while (await client.post("/v1/completions", json=COMPLETION, headers=bearer(secret))).status_code != 401:
            await asyncio.sleep(0.01)


async def test_the_front_of_the_command_reads_no_body_without_a_key_of_a_tenant(
    store: tuple[str, TenantStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`loraplex serve --ray`, with other replicas than Ray's."""
    url, tenants = store
    before = threading.enumerate()  # other tests' servers
    _, secret = tenants.create_key(Role.TENANT, "acme")
    is_ready = asyncio.Event()
    monkeypatch.setattr(ray_run, "_announce", lambda *arguments: is_ready.set())
    async with ingress(database_url=url) as (_, fleet):
        config = replace(fleet.config.server, port=0, access_log=False)
        with closing(bind(config)) as sock:
            task = asyncio.ensure_future(ray_run._serve(lambda: (fleet, Watch(lambda: 1)), config, sock))
            await is_ready.wait()
            base_url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
                answer = await client.post("/v1/completions", json={**COMPLETION, "model": "demo"})
                assert (answer.status_code, fleet.calls) == (401, [])
                answer = await client.get("/v1/models", headers=bearer(secret))
                assert answer.status_code == 200
            os.kill(os.getpid(), signal.SIGTERM)
            assert await task == 0
    assert "loraplex-tenants" not in {thread.name for thread in threading.enumerate() if thread not in before}


async def test_a_database_that_does_not_answer_ends_the_start_of_an_ingress() -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed (pip install loraplex[postgres])")
    with pytest.raises(JournalError, match="the database of tenants cannot be used"):
        open_tenants(ServerConfig(database_url="postgresql://loraplex@127.0.0.1:1/none"))


async def test_bodies_hosts_and_origins_are_bounded_at_the_ingress(front: tuple[Starlette, LocalFleet]) -> None:
    app, fleet = front
    async with client_of(app) as client:
        long = await client.post("/v1/completions", json={"prompt": "x" * 2**24})
        assert (long.status_code, long.json()["error"]["code"]) == (413, "body_too_long")
        other = await client.get("/v1/models", headers={"Host": "evil.example"})
        assert other.status_code in (400, 403, 421)
        crossing = await client.post("/v1/completions", json=COMPLETION, headers={"Origin": "https://evil.example"})
        assert crossing.status_code == 403
    assert fleet.calls == []


async def test_a_client_that_goes_away_ends_its_request(front: tuple[Starlette, LocalFleet]) -> None:
    app, fleet = front
    (engine,) = fleet.engines
    for is_stream in (True, False):
        engine.hold(after_tokens=2 if is_stream else 0)
        call = AsgiCall(app, "/v1/completions", {**COMPLETION, "stream": is_stream})
        if is_stream:
            assert await call.start() == 200
            assert b"data" in (await call.next_chunk() or b"")
        await until(lambda: engine.num_running == 1)
        call.disconnect()
        await until(lambda: engine.num_running == 0)
        engine.resume()
        await asyncio.gather(call.task, return_exceptions=True)


KEYS = ("a-key-of-sixteen", "b-key-of-sixteen")


@contextlib.asynccontextmanager
async def crowded(app: Starlette, fleet: LocalFleet, key: str) -> AsyncIterator[list[AsgiCall]]:
    """Streams of a client: four that have the four places, two that wait."""
    fleet.engines[0].hold(after_tokens=2)
    body, headers = {**COMPLETION, "stream": True}, {"authorization": f"Bearer {key}"}
    streams = [AsgiCall(app, "/v1/completions", body, headers=headers) for _ in range(6)]
    await until(lambda: len(fleet.calls) == 4)
    try:
        yield streams
    finally:
        fleet.engines[0].resume()
        for stream in streams:
            stream.disconnect()
        await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)


@pytest.fixture
async def narrow() -> AsyncIterator[tuple[Starlette, LocalFleet]]:
    """Four places, and two that wait."""
    async with ingress(ray=RaySettings(ray_replica_requests=4), max_waiting_requests=2, api_keys=KEYS) as made:
        yield made


async def test_a_client_that_has_all_places_leaves_others_theirs(narrow: tuple[Starlette, LocalFleet]) -> None:
    """Serve's queue is first come, first served: a short request waited for the streams of another client to end, and
    for those that waited in front of it."""
    app, fleet = narrow
    async with crowded(app, fleet, KEYS[0]), client_of(app) as client:
        for path in ("/v1/models", "/version"):
            assert (await client.get(path, headers=bearer(KEYS[1]))).status_code == 200
        assert (await client.get("/version")).status_code == 200
        assert len(fleet.calls) == 7
        refused = await client.post("/v1/completions", json=COMPLETION, headers=bearer(KEYS[0]))
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "overloaded_error")
        assert "2 requests wait for a place in a replica, and 2 are the limit" in refused.json()["error"]["message"]
        other = asyncio.ensure_future(client.post("/v1/completions", json=COMPLETION, headers=bearer(KEYS[1])))
        await until(lambda: fleet.engines[0].num_running == 5)
        fleet.engines[0].resume()
        assert (await other).status_code == 200


async def test_a_tenant_is_not_told_how_full_the_ingress_is(store: tuple[str, TenantStore]) -> None:
    """It read how many requests wait, and how many may: a server says neither."""
    url, tenants = store
    _, secret = tenants.create_key(Role.TENANT, "acme")
    tenants.share("sql", [TenantTable.ALL])
    made = ingress(ray=RaySettings(ray_replica_requests=4), max_waiting_requests=2, database_url=url)
    async with made as (app, fleet), crowded(app, fleet, secret), client_of(app) as client:
        refused = await client.post("/v1/completions", json=COMPLETION, headers=bearer(secret))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "engine_overloaded")
    assert refused.json()["error"]["message"] == "the server is busy; try again later"


async def test_a_place_that_is_free_is_for_the_client_that_has_fewest(narrow: tuple[Starlette, LocalFleet]) -> None:
    app, fleet = narrow
    async with crowded(app, fleet, KEYS[0]) as streams, client_of(app) as client:
        bodies = [{**COMPLETION, "prompt": f"own {number}"} for number in range(2)]
        own = [
            asyncio.ensure_future(client.post("/v1/completions", json=each, headers=bearer(KEYS[1]))) for each in bodies
        ]
        await until(lambda: len(fleet.calls) == 5)  # one has its client's share, the other one waits
        streams[0].disconnect()
        await until(lambda: len(fleet.calls) == 5 and fleet.engines[0].num_running == 4)
        streams[1].disconnect()
        await until(lambda: len(fleet.calls) == 6)
        assert b"own" in fleet.calls[-1].body
        fleet.engines[0].resume()
        assert [answer.status_code for answer in await asyncio.gather(*own)] == [200, 200]


async def test_one_that_leaves_while_it_waits_leaves_no_trace(narrow: tuple[Starlette, LocalFleet]) -> None:
    app, fleet = narrow
    async with crowded(app, fleet, KEYS[0]) as streams, client_of(app) as client:
        for stream in streams[4:]:
            stream.disconnect()
        await asyncio.gather(*(stream.task for stream in streams[4:]), return_exceptions=True)
        waits = asyncio.ensure_future(client.get("/v1/models", headers=bearer(KEYS[0])))
        streams[0].disconnect()
        assert (await waits).status_code == 200
        assert len(fleet.calls) == 5


async def test_a_long_body_whose_client_has_gone_is_not_read(
    front: tuple[Starlette, LocalFleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read in its turn, before bodies of clients that are there, and sent to a replica."""
    release, read = threading.Event(), list[str]()

    def needs_of(body: bytes, *arguments: Any) -> Needs:
        release.wait(60)
        read.append(json.loads(body)["user"])
        return Needs()

    monkeypatch.setattr(serve_ingress, "needs_of", needs_of)
    app, fleet = front
    body = {**COMPLETION, "prompt": "x" * SHORT_BODY_BYTES}
    names = [f"user {number}" for number in range(MAX_THREADS + 1)]  # the last one waits for a thread
    calls = [AsgiCall(app, "/v1/completions", {**body, "user": name}) for name in names]
    try:
        await asyncio.sleep(0.01)
        calls[-1].disconnect()
        async with asyncio.timeout(30):
            await asyncio.wait((calls[-1].task,))
    finally:
        release.set()
    await asyncio.gather(*(call.task for call in calls))
    assert sorted(read) == sorted(names[:-1])
    assert len(fleet.calls) == MAX_THREADS


async def test_log_probabilities_in_a_replica_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing counted them there: the port alone did."""
    monkeypatch.setattr(connections, "MAX_OUTPUT_BYTES", 2000)
    monkeypatch.setattr(generation, "TOLD_BYTES", 1)
    async with ingress() as (app, fleet):
        (engine,) = fleet.engines
        engine.hold(after_tokens=4)
        calls = []
        for _ in range(2):
            calls.append(AsgiCall(app, "/v1/completions", {**COMPLETION, "stream": True, "logprobs": 3}))
            assert await calls[-1].start() == 200
            text = b""
            while text.count(b"data: ") < 4:
                text += await calls[-1].next_chunk() or b""
        await until(lambda: engine.num_running == 1)
        assert b'"code":"engine_overloaded"' in await calls[0].rest()
        engine.resume()
        assert (await calls[1].rest()).endswith(b"data: [DONE]\n\n")


async def test_a_replica_that_is_lost_is_said_with_what_to_do(front: tuple[Starlette, LocalFleet]) -> None:
    app, fleet = front
    fleet.error = ReplicaLostError("its process is gone")
    async with client_of(app) as client:
        lost = await client.post("/v1/completions", json=COMPLETION)
        assert (lost.status_code, lost.json()["error"]["code"]) == (502, "replica_lost")
        assert "send the request again" in lost.json()["error"]["message"]
        fleet.is_error_late = True
        stream = await client.post("/v1/completions", json={**COMPLETION, "stream": True})
        *_, last, _ = stream.text.split("\n\n")
        assert stream.status_code == 200
        assert '"code":"replica_lost"' in last
        page = (await client.get("/metrics")).text
        assert 'loraplex:router_lost_total{replica="r0"} 1.0' in page
        assert 'loraplex:router_requests_total{replica="r0",status="200"} 1.0' in page
        fleet.error, fleet.is_error_late = EngineOverloadedError("too many wait"), False
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 429


async def test_without_a_replica_it_is_unavailable(front: tuple[Starlette, LocalFleet]) -> None:
    app, fleet = front
    fleet.num_running = 0
    async with client_of(app) as client:
        for answer in (await client.get("/health"), await client.post("/v1/completions", json=COMPLETION)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert (await client.get("/v1/events")).status_code == 404


async def test_a_header_names_the_replica() -> None:
    async with ingress(3) as (app, fleet), client_of(app) as client:
        for name in ("r2", "r0", "r1"):
            answer = await client.get("/v1/models", headers={REPLICA_HEADER: name})
            assert answer.headers[REPLICA_HEADER] == name
            page = await client.get("/metrics", headers={REPLICA_HEADER: name})
            assert "vllm:num_requests_running" in page.text
        gone = await client.get("/v1/models", headers={REPLICA_HEADER: "r9"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "replica_not_found")
        assert fleet.calls[-1].replica == "r9"


async def test_a_replica_says_what_it_has_and_how_it_is() -> None:
    settings = RaySettings(ray_target_first_token_s=0.5)
    async with ingress(ray=settings) as (app, fleet), client_of(app) as client:
        (replica,), (engine,) = fleet.replicas, fleet.engines
        assert await replica.levels() == {LATE_SHARE: 0.0}
        await client.post("/v1/completions", json=COMPLETION)
        first, second = await replica.figures(), await replica.figures()
        assert first["number"] < second["number"]
        assert first["is_healthy"]
        assert list(first["tiers"]) == [] or first["tiers"].keys() <= ADAPTERS.keys()
        replica.check()
        engine.die()
        assert not (await replica.figures())["is_healthy"]
        replica.check()
        engine.give_up()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="does not start any more"):
            replica.check()


async def test_a_count_that_fails_changes_nothing() -> None:
    counts: list[Any] = [2, RuntimeError("the controller is away"), 1]

    def count() -> int:
        found = counts.pop(0)
        if isinstance(found, Exception):
            raise found
        return int(found)

    watch, seen = Watch(count), []
    for _ in range(3):
        await watch.look()
        seen.append(watch.num_running)
    assert seen == [2, 2, 1]
