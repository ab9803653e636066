"""API keys."""

from __future__ import annotations

import logging

import pytest
from fastapi import FastAPI

from loraplex.errors import ConfigError
from loraplex.server import ServerConfig, create_app
from loraplex.testing import FakeAsyncEngine
from tests.server.conftest import client_of

KEYS = ("secret-one", "secret-two")
BODY = {"model": "base", "prompt": "hi"}
GUARDED = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/load_lora_adapter"),
    ("GET", "/v1/models"),
    ("GET", "/v1/adapters"),
    ("POST", "/tokenize"),
    ("GET", "/v1/memory"),
    ("GET", "/v1/events"),
    ("GET", "/no/such/route"),
]


def app_with_keys(cors_allowed_origins: tuple[str, ...] = ()) -> FastAPI:
    config = ServerConfig(api_keys=KEYS, cors_allowed_origins=cors_allowed_origins)
    return create_app(FakeAsyncEngine({"sql": "/sql"}), config)


@pytest.mark.parametrize(
    "header", ["Bearer secret-one", "Bearer secret-two", "bearer secret-one", "BEARER  secret-one"]
)
async def test_a_key_opens(header: str) -> None:
    async with client_of(app_with_keys()) as client:
        response = await client.post("/v1/completions", json=BODY, headers={"Authorization": header})
        assert response.status_code == 200


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "secret-one", "Basic secret-one", "Bearer secret-on", "Bearer é"],
)
async def test_everything_else_is_401(header: str | None) -> None:
    async with client_of(app_with_keys()) as client:
        for method, path in GUARDED:
            headers = {} if header is None else {"Authorization": header.encode()}
            response = await client.request(method, path, json=BODY, headers=headers)  # type: ignore[arg-type]
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]
            assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/health", "/ping", "/version"])
async def test_probes_need_no_key(path: str) -> None:
    async with client_of(app_with_keys()) as client:
        assert (await client.get(path)).status_code == 200


async def test_without_keys_everything_is_open() -> None:
    async with client_of(create_app(FakeAsyncEngine())) as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


async def test_keys_are_never_logged_or_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with client_of(app_with_keys()) as client:
        for key in (*KEYS, "wrong-key"):
            response = await client.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"})
            assert key not in response.text
    assert not any(key in caplog.text for key in (*KEYS, "wrong-key"))
    assert "secret" not in repr(ServerConfig(api_keys=KEYS))


@pytest.mark.parametrize("key", ["", "with space", "new\nline", "ключ"])
def test_keys_that_no_header_can_carry(key: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        ServerConfig(api_keys=(key,))


async def test_browsers_may_ask_before_they_have_a_key() -> None:
    app = app_with_keys(cors_allowed_origins=("https://page.example",))
    async with client_of(app) as client:
        headers = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        response = await client.options("/v1/completions", headers=headers)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://page.example"
        refused = await client.post("/v1/completions", json=BODY, headers={"Origin": "https://page.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://page.example"
