"""What web pages try through the browser of a person who visits them: each is refused, and programs go on working."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from loraplex.server import ServerConfig, create_app
from loraplex.testing import FakeAsyncEngine
from tests.server.conftest import client_of

BODY = {"model": "base", "prompt": "hi", "max_tokens": 1}
VERBS = [
    ("POST", "/v1/adapters/sql/pin"),
    ("POST", "/v1/adapters/sql/unpin"),
    ("POST", "/v1/adapters/sql/evict"),
    ("POST", "/v1/adapters/sql/preload"),
    ("POST", "/v1/adapters/sql/rollback"),
    ("DELETE", "/v1/adapters/sql"),
    ("POST", "/v1/profile/stop"),
]
"""What needs no body."""
REVEALING = ["/v1/adapters", "/v1/models", "/v1/memory", "/v1/events?stream=false", "/metrics", "/health", "/", "/docs"]
FORM_TYPES = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
STRANGER = "https://evil.example"


@functools.cache
def app_of(**settings: object) -> FastAPI:
    """One of each configuration: making one takes longer than asking it."""
    return create_app(FakeAsyncEngine({"sql": "/adapters/sql"}), ServerConfig(**settings))  # type: ignore[arg-type]


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app_of()) as client:
        yield client


def check_refusal(response: httpx.Response, status: int, code: str) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (status, code), response.text
    assert response.headers["x-request-id"]
    assert "access-control-allow-origin" not in response.headers


# -------------------------------------------------------------------------------------------------------- DNS rebinding


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evillocalhost",
        "192.168.1.7:8000",
        "0.0.0.0:8000",
        "localhost@evil.example",
        "[::1].evil.example",
        "localhost:8000:8000",
        "localhost/",
        "",
        "127.0.0.1:x",
        "2130706433",
        "x" * 5000,
    ],
)
async def test_a_name_that_was_made_to_point_here(client: httpx.AsyncClient, host: str) -> None:
    for path in REVEALING:
        check_refusal(await client.get(path, headers={"Host": host}), 403, "host_not_allowed")
    for method, path in VERBS:
        check_refusal(await client.request(method, path, headers={"Host": host}), 403, "host_not_allowed")
    response = await client.post("/v1/completions", json=BODY, headers={"Host": host})
    check_refusal(response, 403, "host_not_allowed")
    assert len(response.text) < 400


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "localhost.",
        "a.localhost:1",
        "127.0.0.1:8000",
        "127.1.2.3",
        "[::1]:8000",
        "[::1]",
    ],
)
async def test_names_of_loopback(client: httpx.AsyncClient, host: str) -> None:
    assert (await client.post("/v1/completions", json=BODY, headers={"Host": host})).status_code == 200


async def test_two_hosts_are_no_way_around(client: httpx.AsyncClient) -> None:
    headers = [("Host", "localhost"), ("Host", "evil.example")]
    check_refusal(await client.get("/v1/adapters", headers=headers), 403, "host_not_allowed")
    check_refusal(await client.get("/v1/adapters", headers=headers[::-1]), 403, "host_not_allowed")


async def test_a_forwarded_host_is_not_looked_at(client: httpx.AsyncClient) -> None:
    headers = {"Host": "evil.example", "X-Forwarded-Host": "localhost", "Forwarded": "host=localhost"}
    check_refusal(await client.get("/v1/adapters", headers=headers), 403, "host_not_allowed")


@pytest.mark.parametrize(
    ("settings", "fine", "refused"),
    [
        ({"host": "127.0.0.1", "allowed_hosts": ("api.example",)}, ["API.example:80", "localhost"], ["x.api.example"]),
        ({"allowed_hosts": ("*.example",)}, ["a.b.example", "[::1]"], ["example", "badexample"]),
        ({"allowed_hosts": ("*",)}, ["anything.at.all", ""], []),
        ({"allowed_hosts": ("[fe80::1]",)}, ["[fe80::1]:8000"], ["[fe80::2]"]),
        ({"host": "localhost", "api_keys": ("k",)}, ["localhost"], ["evil.example"]),
        ({"host": "0.0.0.0"}, ["10.0.0.7:8000", "[fd00::1]", "node7", "vllm.prod.svc", "a.local"], ["evil.example"]),
        ({"host": "0.0.0.0", "api_keys": ("k",)}, ["api.example", "10.0.0.7"], []),
        (
            {"host": "::", "api_keys": ("k",), "allowed_hosts": ("api.example",)},
            ["api.example", "10.0.0.7"],
            ["b.example"],
        ),
        ({"host": "node7.example"}, ["node7.example:8000"], ["node8.example"]),
    ],
)
async def test_which_hosts_a_server_answers_to(
    settings: dict[str, object], fine: list[str], refused: list[str]
) -> None:
    async with client_of(app_of(**settings)) as client:
        for host in fine:
            assert (await client.get("/health", headers={"Host": host})).status_code == 200, host
        for host in refused:
            check_refusal(await client.get("/health", headers={"Host": host}), 403, "host_not_allowed")


# ------------------------------------------------------------------------------------------------- pages of other sites


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": STRANGER},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://localhost:3000"},
        {"Origin": "http://localhost"},
        {"Origin": "file://"},
        {"Origin": "http://localhost:8000.evil.example"},
        {"Origin": "localhost:8000"},
        {"Origin": STRANGER, "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"},
        {"Origin": "null", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "nonsense"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
        {
            "Origin": STRANGER,
            "Sec-Fetch-Site": "cross-site",
            "Sec-Fetch-Mode": "navigate",
            "Sec-Fetch-Dest": "document",
        },
    ],
    ids=str,
)
async def test_a_page_of_another_site(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    headers = {"Host": "localhost:8000", **headers}
    for method, path in (*VERBS, *(("GET", path) for path in REVEALING)):
        check_refusal(await client.request(method, path, headers=headers), 403, "origin_not_allowed")
    check_refusal(await client.post("/v1/completions", json=BODY, headers=headers), 403, "origin_not_allowed")
    asked = {**headers, "Access-Control-Request-Method": "POST"}
    check_refusal(await client.options("/v1/completions", headers=asked), 403, "origin_not_allowed")


@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT", "PATCH"])
async def test_a_form_that_opens_a_page_is_no_link(client: httpx.AsyncClient, method: str) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    response = await client.request(method, "/v1/adapters/sql", headers=headers)
    check_refusal(response, 403, "origin_not_allowed")


async def test_a_link_may_be_followed(client: httpx.AsyncClient) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert (await client.get("/docs", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://localhost:8000"},
        {"Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"},
        {"Origin": "https://public.example", "Sec-Fetch-Site": "same-origin"},  # a proxy that changes the Host
        {"Sec-Fetch-Site": "none"},
    ],
    ids=str,
)
async def test_own_pages_and_programs(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    headers = {"Host": "localhost:8000", **headers}
    for method, path in VERBS[:4]:
        assert (await client.request(method, path, headers=headers)).status_code == 200
    assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200


async def test_default_ports_need_not_be_named(client: httpx.AsyncClient) -> None:
    for origin, host in (("http://localhost", "localhost:80"), ("https://localhost:443", "localhost")):
        headers = {"Host": host, "Origin": origin}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_an_origin_that_was_allowed() -> None:
    headers = {"Origin": "https://page.example", "Sec-Fetch-Site": "cross-site"}
    async with client_of(app_of(cors_allowed_origins=("https://page.example",))) as client:
        asked = await client.options("/v1/completions", headers={**headers, "Access-Control-Request-Method": "POST"})
        answer = await client.post("/v1/completions", json=BODY, headers=headers)
        for response in (asked, answer):
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == "https://page.example"
        for stranger in (STRANGER, "https://page.example.evil", "null", "https://page.example:8443"):
            asked = await client.options(
                "/v1/completions", headers={"Origin": stranger, "Access-Control-Request-Method": "POST"}
            )
            check_refusal(asked, 403, "origin_not_allowed")
        forged = await client.post("/v1/adapters/sql/pin", headers={**headers, "Host": "evil.example"})
        check_refusal(forged, 403, "host_not_allowed")


async def test_every_origin_when_the_operator_says_so() -> None:
    async with client_of(app_of(cors_allowed_origins=("*",))) as client:
        response = await client.post("/v1/completions", json=BODY, headers={"Origin": STRANGER})
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, "*")


# ---------------------------------------------------------------------------------------------------------------- forms


@pytest.mark.parametrize("content_type", FORM_TYPES)
@pytest.mark.parametrize("body", [b"", b'{"model": "base"}', b"a=b"])
async def test_a_form_of_an_old_browser(client: httpx.AsyncClient, content_type: str, body: bytes) -> None:
    """It sends neither Origin nor Sec-Fetch-Site, but always a type."""
    for method, path in (*VERBS, ("POST", "/v1/completions"), ("POST", "/v1/profile/start"), ("POST", "/ping")):
        response = await client.request(method, path, content=body, headers={"Content-Type": content_type})
        check_refusal(response, 415, "unsupported_media_type")


async def test_a_body_without_a_type(client: httpx.AsyncClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"{}"

    for method, path in VERBS:
        check_refusal(await client.request(method, path, content=b"{}"), 415, "unsupported_media_type")
        check_refusal(await client.request(method, path, content=chunks()), 415, "unsupported_media_type")


async def test_verbs_without_a_body_are_as_easy_as_before(client: httpx.AsyncClient) -> None:
    for method, path in VERBS[:4]:
        for headers in ({}, {"Content-Length": "0"}, {"Content-Type": "application/json"}):
            assert (await client.request(method, path, headers=headers)).status_code == 200
        assert (await client.request(method, path, json={})).status_code == 200


# -------------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("path", [*REVEALING, "/nowhere", "/v1/adapters/nope", "/openapi.json"])
async def test_what_browsers_are_told_of_every_answer(client: httpx.AsyncClient, path: str) -> None:
    headers = (await client.get(path)).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] in ("no-store", "no-cache")
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "default-src 'none'" in headers["content-security-policy"]


async def test_refusals_say_so_too(client: httpx.AsyncClient) -> None:
    refused = await client.get("/v1/adapters", headers={"Host": "evil.example"})
    assert refused.headers["x-content-type-options"] == "nosniff"
    assert refused.headers["cache-control"] == "no-store"
