"""A key that is revoked, or loses rights, while its request runs: a body that is still coming, a stream without end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from numpy import float32, full
from safetensors.numpy import save

from loraplex.events import EngineEvent, EventKind
from loraplex.server import ServerConfig, create_app
from loraplex.server.access import declared_access
from loraplex.server.events_api import GREETING
from loraplex.tenants.records import Role, TenantTable
from loraplex.testing import FakeAsyncEngine
from tests.security.routes import FoundRoute, routes_of
from tests.security.tenancy import ADAPTERS, Tenancy, tenancy
from tests.server.asgi_call import AsgiCall
from tests.server.conftest import client_of

RAW = {"content-type": "application/octet-stream"}
JSON = {"content-type": "application/json"}
TENSORS = save({"lora_A": full(4, 1.0, float32)})
FORM = httpx.Request(
    "POST",
    "http://localhost/v1/adapters",
    data={"name": "sql", "load_inplace": "true"},
    files=[("file", ("adapter_config.json", b"{}")), ("file", ("adapter_model.safetensors", b"weights"))],
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Tenancy]:
    with tenancy(tmp_path) as made:
        yield made


def revoke(server: Tenancy, role: str) -> None:
    server.store.revoke_key(server.key_ids[role])
    server.refresh()


def delete(server: Tenancy, tenant: str) -> None:
    server.store.delete_tenant(tenant)
    server.refresh()


def give_role(server: Tenancy, role: str, new: Role) -> None:
    """No command lowers a role: another server's version may."""
    assert server.context.tenants is not None
    table = server.context.tenants.table
    keys = {
        digest: replace(key, role=new) if key.key_id == server.key_ids[role] else key
        for digest, key in table.keys.items()
    }
    server.context.tenants.table = replace(table, keys=keys)


class Body:
    """Of a client that stops in the middle, until `meanwhile` is done. has_come: whether the server read it."""

    def __init__(self, content: bytes, meanwhile: Callable[[], object]) -> None:
        self._content = content
        self._meanwhile = meanwhile
        self.has_come = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        half = len(self._content) // 2
        yield self._content[:half]
        self._meanwhile()
        self.has_come = True
        yield self._content[half:]


async def send(
    server: Tenancy, role: str, method: str, url: str, headers: Mapping[str, str], body: Body
) -> httpx.Response:
    async with client_of(server.app) as client:
        return await client.request(method, url, content=body, headers={**server.headers(role), **headers})


def check_unknown(answer: httpx.Response) -> None:
    assert answer.status_code == 401, answer.text
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


def state_of(server: Tenancy) -> list[tuple[str, int, bool]]:
    assert server.engine.registry is not None
    registry = server.engine.registry
    return [(name, registry.resolve(name).adapter_version, registry.describe(name).is_pinned) for name in ADAPTERS]


# -------------------------------------------------------------------------------------------------------------- bodies


SENT = [
    ("PUT", "/v1/adapters/sql/tensors", RAW, TENSORS),
    ("POST", "/v1/adapters", {"content-type": FORM.headers["content-type"]}, FORM.read()),
    ("POST", "/v1/adapters", JSON, b'{"name": "sql", "path": "/srv/acme/new", "load_inplace": true}'),
    ("PUT", "/v1/adapters/sql", JSON, b'{"path": "/srv/acme/new", "is_pinned": true}'),
    ("POST", "/v1/unload_lora_adapter", JSON, b'{"lora_name": "sql"}'),
]
SENT_IDS = ["tensors", "form", "load", "put", "unload"]


@pytest.mark.parametrize("is_tenant_gone", [False, True])
@pytest.mark.parametrize(("method", "url", "headers", "content"), SENT, ids=SENT_IDS)
async def test_a_body_that_comes_after_its_key_changes_nothing(
    server: Tenancy, method: str, url: str, headers: dict[str, str], content: bytes, is_tenant_gone: bool
) -> None:
    before = state_of(server)
    body = Body(content, lambda: delete(server, "acme") if is_tenant_gone else revoke(server, "acme"))
    check_unknown(await send(server, "acme", method, url, headers, body))
    assert body.has_come
    assert state_of(server) == before
    assert server.engine.uploads.num_bytes == 0


@pytest.mark.parametrize(("method", "url", "headers", "content"), SENT, ids=SENT_IDS)
async def test_it_does_with_a_key_that_stays(
    server: Tenancy, method: str, url: str, headers: dict[str, str], content: bytes
) -> None:
    answer = await send(server, "acme", method, url, headers, Body(content, lambda: revoke(server, "beta")))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("method", "url", "headers", "content"), SENT, ids=SENT_IDS)
async def test_a_key_of_a_lower_role_is_403(
    server: Tenancy, method: str, url: str, headers: dict[str, str], content: bytes
) -> None:
    before = state_of(server)
    body = Body(content, lambda: give_role(server, "acme", Role.READ_ONLY))
    answer = await send(server, "acme", method, url, headers, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "role_required")
    assert state_of(server) == before


def verbs() -> Iterator[tuple[str, FoundRoute, str]]:
    """Those whose body is described, and its type."""
    app = create_app(FakeAsyncEngine(), ServerConfig())
    paths = app.openapi()["paths"]
    for route in routes_of(app):
        access = declared_access(route.endpoint)
        for method in route.methods if access is not None and access.is_verb else ():
            described = paths[route.path.replace(":path", "")][method.lower()]
            if "requestBody" in described:
                yield method, route, next(iter(described["requestBody"]["content"]))


@pytest.mark.parametrize(("method", "route", "media_type"), list(verbs()), ids=lambda each: getattr(each, "path", each))
async def test_no_verb_outlives_its_key(server: Tenancy, method: str, route: FoundRoute, media_type: str) -> None:
    """Also not one that makes keys: a new one would open for ever what the revoked one did."""
    body = Body(b"{ }", lambda: revoke(server, "admin"))
    check_unknown(await send(server, "admin", method, route.url, {"content-type": media_type}, body))
    assert body.has_come


def test_most_verbs_have_a_body() -> None:
    assert len(list(verbs())) >= 15


async def test_a_key_that_is_made_with_a_revoked_one_is_not_made(server: Tenancy) -> None:
    before = server.store.keys_of()
    body = Body(b'{"role": "admin"}', lambda: revoke(server, "admin"))
    check_unknown(await send(server, "admin", "POST", "/v1/keys", JSON, body))
    assert [each.key_id for each in server.store.keys_of()] == [each.key_id for each in before]


async def test_roots_that_a_tenant_lost_meanwhile_are_not_read(server: Tenancy) -> None:
    def narrow() -> None:
        server.store.change_tenant("acme", ["/srv/acme/other"])
        server.refresh()

    body = Body(b'{"name": "sql", "path": "/srv/acme/new", "load_inplace": true}', narrow)
    assert (await send(server, "acme", "POST", "/v1/adapters", JSON, body)).status_code == 400


async def test_the_record_names_the_revoked_key(server: Tenancy, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "loraplex.audit"):
        body = Body(TENSORS, lambda: revoke(server, "acme"))
        await send(server, "acme", "PUT", "/v1/adapters/sql/tensors", RAW, body)
    assert caplog.messages[-1].endswith(f"with key {server.key_ids['acme']} of tenant acme: 401")


async def test_the_first_tenant_closes_a_server_to_bodies_without_a_key(server: Tenancy) -> None:
    """Its requests were those of an administrator."""
    assert server.context.tenants is not None
    table, server.context.tenants.table = server.context.tenants.table, TenantTable()
    server.context.keys._callers = ()

    def make_tenant() -> None:
        assert server.context.tenants is not None
        server.context.tenants.table = table

    async with client_of(server.app) as client:
        body = Body(b'{"path": "/srv/new"}', make_tenant)
        headers = {**JSON, "x-requested-with": "test"}
        check_unknown(await client.put("/v1/adapters/private", content=body, headers=headers))


async def test_a_completion_goes_on(server: Tenancy) -> None:
    body = Body(b'{"model": "sql", "prompt": "hi"}', lambda: revoke(server, "acme"))
    assert (await send(server, "acme", "POST", "/v1/completions", JSON, body)).status_code == 200


# -------------------------------------------------------------------------------------------------- the endless stream


class Stream:
    """`GET /v1/events` of a key, past its greeting."""

    def __init__(self, server: Tenancy, role: str) -> None:
        self._call = AsgiCall(server.app, "/v1/events", {}, "GET", headers=server.headers(role))

    async def __aenter__(self) -> Stream:
        assert await self._call.start() == 200
        assert await self._call.next_chunk() == GREETING
        return self

    async def next(self) -> bytes | None:
        async with asyncio.timeout(5):
            return await self._call.next_chunk()

    async def __aexit__(self, *error: object) -> None:
        self._call.disconnect()
        await self._call.task


def happen(server: Tenancy, text: str) -> None:
    server.engine.record_event(EngineEvent(EventKind.LOAD, 5.0, text, 1, "private", {}))


@pytest.mark.parametrize("role", ["admin", "operator", "read-only"])
async def test_a_stream_ends_with_its_key(server: Tenancy, role: str, caplog: pytest.LogCaptureFixture) -> None:
    async with Stream(server, role) as stream, Stream(server, "flag admin") as other:
        happen(server, "before")
        assert b"before" in (await stream.next() or b"")
        revoke(server, role)
        assert await stream.next() is None
        assert b"before" in (await other.next() or b"")
        happen(server, "after")
        assert b"after" in (await other.next() or b"")
    assert server.context.event_streams.num_open == 0
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


async def test_what_happens_after_the_end_of_a_key_is_not_told(server: Tenancy) -> None:
    async with Stream(server, "operator") as stream, client_of(server.app) as client:
        url = f"/v1/keys/{server.key_ids['operator']}"
        assert (await client.delete(url, headers=server.headers("admin"))).status_code == 200  # an event itself
        happen(server, "after")
        assert await stream.next() is None


async def test_a_stream_ends_with_the_role_that_opened_it(server: Tenancy) -> None:
    async with Stream(server, "operator") as stream:
        give_role(server, "operator", Role.TENANT)
        assert await stream.next() is None


async def test_a_stream_of_another_key_goes_on(server: Tenancy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.server.events_api.KEY_CHECK_S", 0.01)
    async with Stream(server, "operator") as stream:
        revoke(server, "read-only")
        delete(server, "beta")
        await asyncio.sleep(0.1)
        happen(server, "after")
        assert b"after" in (await stream.next() or b"")
