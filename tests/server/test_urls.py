"""Paths that no route has: a slash more, another server's routes, typing errors; and methods that a route lacks."""

from __future__ import annotations

import time

import httpx
import pytest
from fastapi import FastAPI

from loraplex.server import ServerConfig, create_app
from loraplex.server.urls import NOT_HERE, PEERS
from loraplex.testing import FakeAsyncEngine
from tests.server.conftest import client_of

BODY = {"model": "base", "prompt": "hi", "max_tokens": 1}


def message(response: httpx.Response, status: int = 404, code: str = "unknown_url") -> str:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    return str(error["message"])


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/adapters", "/v1/models/base", "/health", "/docs", "/v1/adapters/sql"]
)
@pytest.mark.parametrize("slashes", ["/", "//"])
async def test_a_trailing_slash_is_the_same_path(client: httpx.AsyncClient, path: str, slashes: str) -> None:
    bare, slashed = await client.get(path), await client.get(path + slashes)
    assert (slashed.status_code, slashed.content) == (bare.status_code, bare.content) == (200, bare.content)


async def test_a_body_survives_a_trailing_slash(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/completions/", json=BODY)).status_code == 200
    assert (await client.post("/v1/adapters/sql/pin/")).json()["name"] == "sql"


async def test_a_trailing_slash_is_no_way_around_a_key() -> None:
    app = create_app(FakeAsyncEngine(), ServerConfig(api_keys=("k",)))
    async with client_of(app) as client:
        assert (await client.get("/health/")).status_code == 200
        for path in ("/v1/models/", "/v1/models//", "/health/x", "/docs/../v1/models", "/%2e/v1/models"):
            assert (await client.get(path)).status_code == 401, path


async def test_each_route_of_a_peer_has_a_hint(app: FastAPI, client: httpx.AsyncClient) -> None:
    """And what the hint says is a route: GET or POST of it is neither 404 nor 405."""
    for path, ours in PEERS.items():
        assert message(await client.post(path, json={})).endswith(f"is no route of this server: use {ours}")
        method, target = ours.split()[:2]
        assert (await client.request(method, target)).status_code not in (404, 405), ours


@pytest.mark.parametrize(
    "path",
    [
        *sorted(NOT_HERE.keys() - {"/v1/responses"}),
        "/v1/responses/resp_1",
        "/v1/audio/speech",
        "/v1/files/file-1/content",
    ],
)
async def test_what_is_not_here_is_said(client: httpx.AsyncClient, path: str) -> None:
    for method in ("GET", "POST"):
        assert message(await client.request(method, path)).startswith(f"{method} {path} is not supported: ")


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/chat/completions", "POST /v1/chat/completions"),
        ("/v1/v1/chat/completions", "POST /v1/chat/completions"),
        ("/v1/chat/completion", "POST /v1/chat/completions"),
        ("/models", "GET /v1/models"),
        ("/V1/Models", "GET /v1/models"),
        ("/v1/adapter", "GET /v1/adapters"),
        ("/tokenise", "POST /tokenize"),
        ("/metric", "GET /metrics"),
    ],
)
async def test_the_nearest_route_is_named(client: httpx.AsyncClient, path: str, nearest: str) -> None:
    assert message(await client.get(path)).endswith(f"did you mean {nearest}?")


@pytest.mark.parametrize("path", ["/nowhere", "/wp-login.php", "/" + "x" * 9000, "/%00%0a%1b[2J", "/é"])
async def test_what_is_like_nothing_gets_a_short_answer(client: httpx.AsyncClient, path: str) -> None:
    text = message(await client.get(path))
    assert text.endswith("is no route of this server: GET /docs lists them")
    assert len(text) < 120


async def test_a_long_path_costs_no_more_than_a_short_one(client: httpx.AsyncClient) -> None:
    began = time.process_time()
    for index in range(20):
        await client.get(f"/v1/{'adapters/' * 1000}{index}", headers={"Host": "localhost"})
        await client.get(f"/v2/{'a/' * 4000}{index}")
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/models", "GET"),
        ("PATCH", "/v1/adapters/sql", "DELETE, GET, PUT"),
        ("POST", "/v1/adapters/sql/nope", "DELETE, GET, PUT"),
        ("OPTIONS", "/v1/adapters", "GET, POST"),
        ("TRACE", "/ping", "GET, HEAD, POST"),
        ("POST", "/docs", "GET, HEAD"),
    ],
)
async def test_405_lists_the_methods(client: httpx.AsyncClient, method: str, path: str, allowed: str) -> None:
    response = await client.request(method, path)
    assert message(response, 405, "method_not_allowed") == f"{method} {path}: this route has {allowed}"
    assert response.headers["allow"] == allowed


async def test_405_of_the_schema(client: httpx.AsyncClient) -> None:
    response = await client.post("/openapi.json", json={})
    assert message(response, 405, "method_not_allowed").startswith("POST /openapi.json: this route has ")
    assert set(response.headers["allow"].split(", ")) == {"GET", "HEAD"}
