"""/health, /ping, /version, /openapi.json."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

import loraplex
from loraplex.adapters.registry import DatabaseHealth, DatabaseState
from loraplex.core import RequestOutput, SamplingParams
from loraplex.errors import EngineDeadError, EngineOverloadedError
from loraplex.metrics import EngineStats, RunnerReport, StepTimes
from loraplex.server import ServerConfig, create_app, health_api
from loraplex.server.context import ServerContext
from loraplex.server.schemas import CompletionRequest
from loraplex.testing import FakeAsyncEngine
from loraplex.testing.fake_engine import FakeHealth, FakeModelInfo
from tests.server.conftest import client_of


async def test_healthy(client: httpx.AsyncClient) -> None:
    for method, url in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        assert (await client.request(method, url)).status_code == 200


@pytest.mark.parametrize("url", ["/health", "/ping", "/version", "/metrics"])
async def test_head_is_get_without_the_body(client: httpx.AsyncClient, engine: FakeAsyncEngine, url: str) -> None:
    response = await client.head(url)
    assert (response.status_code, response.headers["content-type"]) == (
        200,
        (await client.get(url)).headers["content-type"],
    )
    engine.die()
    assert (await client.head(url)).status_code == (await client.get(url)).status_code


async def test_probes_may_have_a_query(client: httpx.AsyncClient) -> None:
    for url in ("/health", "/ping", "/version", "/metrics"):
        assert (await client.get(url, params={"now": "1"})).status_code == 200


async def test_a_dead_engine_is_503_with_the_reason(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.die("it ran out of memory; it is being restarted")
    for url in ("/health", "/ping"):
        response = await client.get(url)
        assert response.status_code == 503
        assert "it ran out of memory" in response.json()["error"]["message"]
    response = await client.post("/v1/completions", json={"model": "base", "prompt": "hi"})
    assert response.status_code == 503
    assert "it ran out of memory" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("state", "away_s", "expected"),
    [
        (DatabaseState.CONNECTED, 0.0, {"status": "ok", "database": "connected"}),
        (DatabaseState.DOWN, 12.34, {"status": "degraded", "database": "down", "database_away_s": 12.3}),
        (DatabaseState.SILENT, 2.0, {"status": "degraded", "database": "silent", "database_away_s": 2.0}),
    ],
)
async def test_a_database_that_is_away_is_said_and_is_no_reason_to_start_the_server_again(
    client: httpx.AsyncClient,
    engine: FakeAsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    state: DatabaseState,
    away_s: float,
    expected: dict[str, object],
) -> None:
    monkeypatch.setattr(engine, "health", lambda: FakeHealth(True, database=DatabaseHealth(state, away_s)))
    response = await client.get("/health")
    assert (response.status_code, response.json()) == (200, expected)


async def test_a_dead_engine_says_when_to_come_again(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    """On every route that needs it, and before anything of the body is looked at."""
    engine.die("it is restarted in 8 s", retry_after_s=8.5)
    chat = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
    bodies = {"/v1/completions": {"model": "base", "prompt": "hi"}, "/v1/chat/completions": chat}
    for url, body in bodies.items():
        for sent in (body, {**body, "stream": True}, {"unknown": 1}):
            response = await client.post(url, json=sent)
            assert (response.status_code, response.headers["retry-after"]) == (503, "9")
            assert response.json()["error"]["code"] == "engine_dead"
    loading = {"lora_name": "x", "lora_path": "/x"}
    verbs = {
        "/v1/load_lora_adapter": loading,
        "/v1/unload_lora_adapter": {"lora_name": "sql"},
        "/v1/adapters": {"name": "x", "path": "/x"},
        "/v1/adapters/sql/pin": {},
        "/v1/adapters/switch": {"old": "sql", "new": "chat"},
    }
    answers = [await client.post(url, json=body) for url, body in verbs.items()]
    answers += [await client.get("/v1/memory"), await client.get("/health"), await client.get("/v1/adapters")]
    for response in answers:
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
    assert engine.requests == []
    assert (await client.post("/tokenize", json={"prompt": "hi"})).status_code == 200, "that needs no engine"


async def test_a_probe_generates_one_token(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    response = await client.get("/health", params={"probe": "generate"})
    assert response.status_code == 200
    assert (response.json()["status"], response.json()["probe_ms"] > 0) == ("ok", True)
    (request,) = engine.requests
    assert (request.model, len(request.prompt_token_ids), request.params.max_tokens) == (None, 1, 1)


async def test_probes_that_come_together_are_one(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    """The route needs no key: for any number the engine has one request, and a client that leaves harms no other."""
    engine.hold()
    asking = [asyncio.create_task(client.get("/health", params={"probe": "generate"})) for _ in range(50)]
    async with asyncio.timeout(30):
        while engine.num_running == 0:
            await asyncio.sleep(0.01)
    asking[0].cancel()
    await asyncio.sleep(0.01)
    engine.resume()
    answers = await asyncio.gather(*asking[1:])
    assert {answer.status_code for answer in answers} == {200}
    assert len(engine.requests) == 1


async def test_a_probe_has_a_deadline(engine: FakeAsyncEngine) -> None:
    engine.hold()
    async with client_of(create_app(engine, ServerConfig(probe_timeout_s=0.05))) as client:
        for _ in range(2):  # the second gets the outcome of the first
            response = await client.get("/health", params={"probe": "generate"})
            assert response.status_code == 503
            assert "a probe got no token within 0.05 s" in response.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 200
    assert (len(engine.requests), engine.num_running) == (1, 0)


async def probe_beside(engine: FakeAsyncEngine, is_stepping: bool) -> httpx.Response:
    """A probe that is refused, while a request of another client runs, or is held."""
    engine.token_delay_s = 0.001
    engine.hold(after_tokens=10**6 if is_stepping else 0)
    other = engine.generate((5,), SamplingParams(max_tokens=400), "other")
    reading = asyncio.ensure_future(drain(other))
    while engine.num_running == 0:
        await asyncio.sleep(0)
    engine.fail_next(EngineOverloadedError("4096 requests are running or waiting, the limit"))
    async with client_of(create_app(engine, ServerConfig(probe_timeout_s=0.2 if not is_stepping else 30))) as client:
        response = await client.get("/health", params={"probe": "generate"})
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await other.aclose()
    return response


async def drain(outputs: AsyncIterator[RequestOutput]) -> None:
    async for _ in outputs:
        pass


async def test_a_full_queue_does_not_fail_a_probe_while_the_engine_steps(engine: FakeAsyncEngine) -> None:
    """An orchestrator would end a healthy server at its busiest."""
    response = await probe_beside(engine, is_stepping=True)
    assert (response.status_code, response.json()) == (200, {"status": "busy"})


async def test_a_full_queue_before_an_engine_that_does_not_step_fails_a_probe(engine: FakeAsyncEngine) -> None:
    response = await probe_beside(engine, is_stepping=False)
    assert response.status_code == 503
    assert "a probe got no token within 0.2 s" in response.json()["error"]["message"]


async def test_a_probe_that_still_waits_at_its_deadline_is_no_failure_while_the_engine_steps(
    engine: FakeAsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = itertools.count()

    async def stats() -> EngineStats:
        return EngineStats(step_times=StepTimes(next(steps)))

    monkeypatch.setattr(engine, "stats", stats)
    engine.hold()
    async with client_of(create_app(engine, ServerConfig(probe_timeout_s=0.05))) as client:
        response = await client.get("/health", params={"probe": "generate"})
    assert (response.status_code, response.json()) == (200, {"status": "busy"})
    assert engine.num_running == 0


async def test_what_is_no_probe(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health", params={"probe": "fly"})).status_code == 400


async def test_metrics_do_not_wait_for_a_silent_engine(
    client: httpx.AsyncClient, engine: FakeAsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent() -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(health_api, "STATS_TIMEOUT_S", 0.01)
    monkeypatch.setattr(engine, "stats", silent)
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert "loraplex:engine_up" in response.text


async def test_a_closing_server_is_503(client: httpx.AsyncClient, app: FastAPI) -> None:
    context: ServerContext = app.state.context
    await context.in_flight.abort_all()
    assert (await client.get("/health")).status_code == 503


async def test_version(client: httpx.AsyncClient) -> None:
    first, second = [(await client.get("/version")).json() for _ in range(2)]
    model = "llama; weights: float32; KV cache: float32"
    instance = first["instance"]
    version = {"version": loraplex.__version__, "backend": "fake", "model": model, "instance": instance}
    assert first == second == version
    assert len(first["instance"]) == 16


async def test_version_says_how_a_quantised_checkpoint_is_kept() -> None:
    words = "llama; weights: GPTQ checkpoint, kept as 14 linears in its own int4 in groups of 128; KV cache: bfloat16"
    app = create_app(FakeAsyncEngine(model_info=FakeModelInfo(form=words)), ServerConfig())
    async with client_of(app) as client:
        assert (await client.get("/version")).json()["model"] == words


async def test_openapi_has_the_bodies(client: httpx.AsyncClient) -> None:
    schema = (await client.get("/openapi.json")).json()
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == {*CompletionRequest.model_fields, *CompletionRequest.neutral}
    assert "$ref" not in str(schema["paths"]["/v1/completions"]["post"]["requestBody"])
    assert {"/v1/models", "/tokenize", "/v1/adapters/switch", "/health"} <= set(schema["paths"])


async def test_every_route_is_in_the_docs(client: httpx.AsyncClient) -> None:
    text = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    paths = (await client.get("/openapi.json")).json()["paths"]
    endings = {path: path.replace("{model}", "{id}").replace("{merge_id}", "{id}") for path in paths}
    short = ("/unpin", "/evict", "/preload")  # listed behind /pin
    missing = [path for path, shown in endings.items() if shown not in text and not path.endswith(short)]
    assert not missing


SERVING = RunnerReport("0", "cpu", stats=EngineStats())


async def test_a_probe_whose_runner_ends_tries_another_one_that_serves(
    client: httpx.AsyncClient, engine: FakeAsyncEngine
) -> None:
    """A balancer would take the whole server out for one runner."""
    engine.reports = (SERVING, RunnerReport("1", "cpu", "it is being restarted"))
    engine.fail_next(EngineDeadError("nothing was heard of it for 10 s"))
    response = await client.get("/health", params={"probe": "generate"})
    assert (response.status_code, response.json()["status"]) == (200, "degraded")
    assert len(engine.requests) == 2


async def test_a_probe_tries_as_many_runners_as_there_are(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.reports = (SERVING, SERVING)
    for _ in range(3):
        engine.fail_next(EngineDeadError("crashed"))
    assert (await client.get("/health", params={"probe": "generate"})).status_code == 503
    assert len(engine.requests) == 2


async def test_the_death_of_an_engine_that_serves_again_is_not_kept(
    client: httpx.AsyncClient, engine: FakeAsyncEngine
) -> None:
    engine.fail_next(EngineDeadError("crashed"))
    response = await client.get("/health", params={"probe": "generate"})
    assert (response.status_code, "crashed" in response.json()["error"]["message"]) == (503, True)
    assert (await client.get("/health", params={"probe": "generate"})).status_code == 200
