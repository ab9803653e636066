"""Every answer has its request's id, also those that no route gives; lines that are written for it know it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from loraplex.errors import EngineShutdownError
from loraplex.logs import RequestContext, request_context
from loraplex.processes.environment import child_environment
from loraplex.server.http_protocol import MAX_TINY_CHUNKS
from loraplex.server.request_id import closing_answer
from tests.security.tenancy import Tenancy, tenancy
from tests.server.conftest import client_of
from tests.server.raw_connection import LIMIT, Connection

MADE = re.compile(rb"x-request-id: [0-9a-f]{32}\r\n")
MINE = b"X-Request-Id: mine\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
CHUNKS = b"1\r\nb\r\n" * (2 * MAX_TINY_CHUNKS)


async def test_a_refused_body_has_the_id_of_its_head() -> None:
    connection = Connection()
    connection.feed(POST + MINE + b"\r\n", CHUNKS)
    assert connection.transport.status == 400
    assert b"x-request-id: mine\r\n" in connection.transport.written


@pytest.mark.parametrize(
    "pieces", [(b"GARBAGE\r\n\r\n",), (POST + MINE, b"a: " + b"b" * 2 * LIMIT), (POST + b"\r\n", CHUNKS)]
)
async def test_a_refusal_without_a_usable_head_has_a_new_id(pieces: tuple[bytes, ...]) -> None:
    connection = Connection()
    connection.feed(*pieces)
    assert connection.transport.status in (400, 431)
    assert MADE.search(connection.transport.written)


@pytest.mark.parametrize("given", [b"a b", b"a\x9b", b"x" * 129, b"", b"a:lp-" + b"Ab_9" * 11])
def test_an_id_that_cannot_be_used_does_not_reach_the_answer(given: bytes) -> None:
    answer = closing_answer(EngineShutdownError("the server ends"), [(b"x-request-id", given)])
    head, _, body = answer.partition(b"\r\n\r\n")
    assert MADE.search(head + b"\r\n")
    assert f"content-length: {len(body)}".encode() in head
    assert b"retry-after: 1" in head


async def test_errors_have_it(client: httpx.AsyncClient) -> None:
    for method, path in (("GET", "/no"), ("DELETE", "/health"), ("POST", "/v1/completions"), ("GET", "/v1/models?a=b")):
        answer = await client.request(method, path, headers={"x-request-id": "mine"})
        assert answer.status_code >= 400
        assert answer.headers["x-request-id"] == "mine"


async def test_what_runs_for_a_request_knows_it(app: FastAPI) -> None:
    """And so do its threads; nothing of it is left afterwards."""
    seen: list[RequestContext | None] = []

    async def look(request: Request) -> Response:
        context = app.state.context
        seen.append(request_context.get())
        seen.append(await context.views.run("client", request_context.get, 0))
        seen.append(await context.engine.on_registry(lambda registry: request_context.get()))
        return Response()

    app.add_api_route("/look", look)
    vars(look)["access"] = "open"
    async with client_of(app) as client:
        assert (await client.get("/look", headers={"x-request-id": "mine"})).status_code == 200
    found = [context for context in seen if context is not None]
    assert [context.request_id for context in found] == ["mine"] * len(seen)
    assert request_context.get() is None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Tenancy]:
    with tenancy(tmp_path) as made:
        yield made


async def test_lines_name_tenant_and_adapter(server: Tenancy, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RequestContext] = []
    keep = RequestContext.__init__
    monkeypatch.setattr(RequestContext, "__init__", lambda self, *values: (made.append(self), keep(self, *values))[1])
    async with client_of(server.app) as client:
        body = {"model": "sql", "prompt": "hi", "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body, headers=server.headers("acme"))).status_code == 200
        assert (await client.post("/v1/adapters/sql/pin", headers=server.headers("acme"))).status_code == 200
        assert (await client.post("/v1/completions", json=body)).status_code == 401
    assert [(each.tenant, each.adapter) for each in made] == [("acme", "acme/sql"), ("acme", "sql"), ("", "")]


def test_headers_of_an_exporter_stay_in_the_server() -> None:
    """They hold a key of the collector, and a child process reads what clients send."""
    given = {
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=x",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "a=b",
        "PATH": "/bin",
    }
    assert child_environment(given) == {"PATH": "/bin"}
