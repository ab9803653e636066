"""/health, /ping, /version, /openapi.json."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

import loraplex
from loraplex.server.context import ServerContext
from loraplex.server.schemas import CompletionRequest
from loraplex.testing import FakeAsyncEngine


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


async def test_a_closing_server_is_503(client: httpx.AsyncClient, app: FastAPI) -> None:
    context: ServerContext = app.state.context
    await context.in_flight.abort_all()
    assert (await client.get("/health")).status_code == 503


async def test_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": loraplex.__version__, "backend": "fake"}


async def test_openapi_has_the_bodies(client: httpx.AsyncClient) -> None:
    schema = (await client.get("/openapi.json")).json()
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == {*CompletionRequest.model_fields, *CompletionRequest.neutral}
    assert "$ref" not in str(schema["paths"]["/v1/completions"]["post"]["requestBody"])
    assert {"/v1/models", "/tokenize", "/v1/adapters/switch", "/health"} <= set(schema["paths"])


async def test_every_route_is_in_the_docs(client: httpx.AsyncClient) -> None:
    text = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    paths = (await client.get("/openapi.json")).json()["paths"]
    endings = {path: path.replace("{model}", "{id}") for path in paths}
    short = ("/unpin", "/evict", "/preload")  # listed behind /pin
    missing = [path for path, shown in endings.items() if shown not in text and not path.endswith(short)]
    assert not missing
