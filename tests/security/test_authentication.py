"""Attacks on the way in: every route without a key, with a wrong one, one of too low a rank, in another spelling."""

from __future__ import annotations

import functools
import hmac
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Response

from loraplex.server import ServerConfig, create_app
from loraplex.server.access import Access, GuardedRoute, declared_access
from loraplex.server.auth import OPEN_PATHS, KeyRing
from loraplex.server.pages import PAGE_PATHS
from loraplex.testing import FakeAsyncEngine
from tests.security.routes import METHODS, FoundRoute, is_open, routes_of
from tests.server.conftest import client_of
from tests.server.live_server import LiveServer

KEY, ADMIN_KEY = "inference-key-0123456789", "admin-key-0123456789"
OF_FASTAPI = {"/openapi.json"}
"""A route of the framework itself. It is the same on every server, as are the pages."""

OPEN = OPEN_PATHS | PAGE_PATHS


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def app_with_ranks(**settings: Any) -> FastAPI:
    config = ServerConfig(api_keys=(KEY,), admin_api_keys=(ADMIN_KEY,), **settings)
    return create_app(FakeAsyncEngine({"sql": "/sql"}), config)


@functools.cache
def shared_app() -> FastAPI:
    """For tests that add nothing to it: making one takes longer than asking it."""
    return app_with_ranks()


ROUTES = routes_of(create_app(FakeAsyncEngine(), ServerConfig()))
DECLARED = [(route, declared_access(route.endpoint)) for route in ROUTES if route.path not in OF_FASTAPI]


def ids(value: object) -> str:
    return f"{'|'.join(sorted(value.methods))} {value.path}" if isinstance(value, FoundRoute) else str(value)


def test_the_routes_are_all_there() -> None:
    """Else the tests below would prove nothing."""
    documented = create_app(FakeAsyncEngine(), ServerConfig()).openapi()["paths"]
    assert len(ROUTES) > 25
    assert {path.replace("{name}", "{name:path}").replace("{model}", "{model:path}") for path in documented} <= {
        route.path for route in ROUTES
    }


def test_what_needs_no_key_is_these_routes_and_no_others() -> None:
    """Spelled out: a path that is added to a set of the server opens nothing unless it is added here, too."""
    opened = {(route.path, method) for route, access in DECLARED if access is Access.OPEN for method in route.methods}
    files = {each for each in opened if each[0].startswith(("/docs/", "/dashboard/"))}
    assert all(path.endswith((".js", ".css")) for path, _ in files)
    probes, pages = ("/health", "/health_generate", "/ping", "/version", "/metrics"), ("/", "/docs", "/dashboard")
    assert opened - files == {(path, method) for path in (*probes, *pages) for method in ("GET", "HEAD")} | {
        ("/ping", "POST")
    }
    assert {path for path, _ in files} | {*probes, *pages} | OF_FASTAPI == OPEN


@pytest.mark.parametrize(("route", "access"), DECLARED, ids=ids)
def test_every_route_says_which_key_it_needs(route: FoundRoute, access: Access | None) -> None:
    assert access is not None, f"decorate the function of {route.path} with @requires(Access...)"
    assert issubclass(route.kind, GuardedRoute), f"{route.path} is in a router without route_class=GuardedRoute"
    assert (access is Access.OPEN) == is_open(route)
    if access in (Access.OPEN, Access.KEY):
        assert not route.methods & {"PUT", "PATCH", "DELETE"}, f"{route.path} changes something"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("headers", [{}, bearer("wrong"), {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}])
async def test_no_route_answers_without_a_key(method: str, headers: dict[str, str]) -> None:
    async with client_of(shared_app()) as client:
        for route in ROUTES:
            answer = await client.request(method, route.url, headers=headers)
            is_read = route.path in OPEN_PATHS or method in ("GET", "HEAD")
            assert answer.status_code == 401 or (route.path in OPEN and is_read), (method, route.path)


@pytest.mark.parametrize(("route", "access"), DECLARED, ids=ids)
async def test_a_key_opens_what_its_rank_allows(route: FoundRoute, access: Access) -> None:
    async with client_of(shared_app()) as client:
        for method in route.methods:
            refused = await client.request(method, route.url, headers=bearer(KEY), params={"stream": "false"})
            needs_admin = access not in (Access.OPEN, Access.READ, Access.KEY)
            assert (refused.status_code == 403) == needs_admin, refused.text
            if needs_admin:
                assert refused.json()["error"]["code"] == "admin_key_required"
                assert "--admin-api-key" in refused.json()["error"]["message"]
            if route.path == "/v1/events":
                continue  # a stream without end
            allowed = await client.request(method, route.url, headers=bearer(ADMIN_KEY))
            assert allowed.status_code not in (401, 403), allowed.text


async def test_a_route_that_forgot_to_say_it_needs_an_admin_key() -> None:
    async def forgotten() -> Response:
        return Response("secret")

    app = app_with_ranks()
    router = APIRouter(route_class=GuardedRoute)
    router.add_api_route("/v1/forgotten", forgotten, methods=["GET"])
    app.include_router(router)
    async with client_of(app) as client:
        assert (await client.get("/v1/forgotten")).status_code == 401
        assert (await client.get("/v1/forgotten", headers=bearer(KEY))).status_code == 403
        assert (await client.get("/v1/forgotten", headers=bearer(ADMIN_KEY))).text == "secret"


async def test_a_verb_is_refused_before_its_body_is_read() -> None:
    """A key that may not load cannot make the server read, check or fetch anything."""
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body was asked for")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/load_lora_adapter",
        "raw_path": b"/v1/load_lora_adapter",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"authorization", f"Bearer {KEY}".encode()), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await shared_app()(scope, receive, send)
    assert sent[0]["status"] == 403


@pytest.mark.parametrize("given", ["Bearer " + KEY, "Bearer wrong", "", "Bearer " + "x" * 30000, "Basic " + KEY])
def test_every_key_is_compared_whatever_was_sent(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of an answer does not tell how many keys are before the right one, nor how much of one was right."""
    compared: list[int] = []

    def counted(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return one == other

    ring = KeyRing((KEY, "another-key-0123456"), (ADMIN_KEY,))
    monkeypatch.setattr(hmac, "compare_digest", counted)
    ring.caller_of(given)
    assert compared == [32, 32, 32]


async def test_metrics_can_be_guarded() -> None:
    async with client_of(shared_app()) as client:
        assert (await client.get("/metrics")).status_code == 200
    async with client_of(app_with_ranks(guard_metrics=True)) as client:
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers=bearer(KEY))).status_code == 200
        assert (await client.get("/health")).status_code == 200


# -------------------------------------------------------------------------------------------- other spellings of a path


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    config = ServerConfig(
        port=0,
        access_log=False,
        log_level="critical",
        shutdown_grace_s=0.0,
        api_keys=(KEY,),
        admin_api_keys=(ADMIN_KEY,),
    )
    with LiveServer(FakeAsyncEngine({"sql": "/sql"}), config) as server:
        yield server


def status_of(server: LiveServer, head: bytes) -> tuple[int, bytes]:
    """The status and body of what raw bytes are answered with."""
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 80), timeout=30) as connection:
        connection.sendall(head)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


TARGETS = [
    "//v1/models",
    "///v1/models",
    "/v1//models",
    "/v1/models/",
    "/v1/models/..;/models",
    "/health/../v1/models",
    "/health/..%2fv1/models",
    "/health%2f..%2fv1%2fmodels",
    "/%2e%2e/v1/models",
    "/%2e/v1/models",
    "/v1/%6dodels",
    "/V1/MODELS",
    "/HEALTH",
    "/health;/v1/models",
    "/health%00",
    "/health%3f/v1/models",
    "/metrics/x",
    "/v1/models/",
    "/docs/v1/models",
    "/docs/../v1/models",
    "/docs/docs.js/v1/models",
    "/metrics%20",
    "/version%0a",
    "http://x/v1/models",
    "http://x/health/../v1/models",
    "http://health/v1/models",
    "https://127.0.0.1/v1/adapters",
    "x:/v1/models",
    "*",
    "//v1/models",
    "/redoc",
    "/v1/events?stream=false",
    "/v1/adapters/sql/../../../health",
    "/\\v1\\models",
    "/v1/models?path=/health",
    "/v1/models#/health",
]


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "get", "DELETE"])
def test_no_spelling_of_a_path_gets_past_the_key(server: LiveServer, method: str) -> None:
    for target in TARGETS:
        request = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        status, _ = status_of(server, request.encode())
        assert status in (400, 401), (method, target, status)


@pytest.mark.parametrize(
    "target", ["/health", "http://x/health", "/%68ealth", "/health?/v1/models", "/health#/v1/models", "/health/"]
)
def test_what_is_open_is_only_the_open_route(server: LiveServer, target: str) -> None:
    status, body = status_of(server, f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert (status, body) == (200, b'{"status":"ok"}')


@pytest.mark.parametrize(
    "headers",
    [
        "Authorization: Bearer wrong",
        f"Authorization: Bearer wrong\r\nAuthorization: Bearer {KEY}",
        f"Authorization: Bearer {KEY},wrong",
        f"Proxy-Authorization: Bearer {KEY}",
        f"X-Api-Key: {KEY}wrong",
        f"X-Api-Key: Bearer {KEY}",
        f"X-Key: {KEY}",
        f"Authorization: Bearer wrong\r\nX-Api-Key: {KEY}",
        f"Cookie: Authorization=Bearer {KEY}",
        f"Authorization: Bearer {KEY[:-1]}",
        f"Authorization: Bearer {KEY}\x0b",
        "X-Forwarded-For: 127.0.0.1\r\nX-Original-URL: /health\r\nX-Rewrite-URL: /health",
        "X-HTTP-Method-Override: OPTIONS",
    ],
)
def test_no_other_header_is_a_key(server: LiveServer, headers: str) -> None:
    request = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{headers}\r\nConnection: close\r\n\r\n"
    assert status_of(server, request.encode())[0] in (400, 401)


def test_a_key_in_the_query_is_no_key(server: LiveServer) -> None:
    assert httpx.get(f"{server.url}/v1/models?api_key={KEY}&key={KEY}&token={KEY}").status_code == 401
