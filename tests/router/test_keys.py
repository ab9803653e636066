"""A client whose key no replica takes has no body read by the router; a key that is taken is asked for now and then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from loraplex.router import keys, settings
from loraplex.router.replica import Replica
from tests.router.parts import RawReplica, Router, completion, replicas, router

KEY = "k" * 32


def head(path: str, num_bytes: int, key: str = "") -> bytes:
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{authorization}"
        f"Content-Length: {num_bytes}\r\n\r\n"
    ).encode()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize", "/v1/adapters"])
@pytest.mark.parametrize("key", ["", "guessed"])
async def test_no_body_is_read_of_a_client_whose_key_no_replica_takes(path: str, key: str) -> None:
    """20 connections with 16 MiB each took the memory for bodies: clients with a key were refused for 60 s."""
    async with replicas(1, api_keys=(KEY,)) as (a,), router([a.name]) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(head(path, 2**24, key) + b'{"model": "')
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 401")
        assert b"www-authenticate: bearer" in answer.lower()
        writer.close()
        assert f'router_requests_total{{replica="{a.name}"' not in (await front.client.get("/metrics")).text


async def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    found: list[bytes] = []
    real = Replica.send

    async def send(self: Replica, method: str, target: bytes, headers: Any, *rest: Any) -> Any:
        if target == keys.PATH:
            found.extend(value for name, value in headers if name == b"authorization")
        return await real(self, method, target, headers, *rest)

    monkeypatch.setattr(Replica, "send", send)
    return found


async def test_a_key_that_is_taken_is_asked_for_once_until_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await asked_for(monkeypatch)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with replicas(1, api_keys=(KEY,)) as (a,), router([a.name]) as front:
        for _ in range(3):
            assert (await front.client.post("/v1/completions", json=completion(), headers=headers)).status_code == 200
        assert found == [f"Bearer {KEY}".encode()]
        assert (await front.client.post("/v1/completions", json=completion())).status_code == 401
        monkeypatch.setattr(keys, "FRESH_S", 0.0)
        assert (await front.client.post("/v1/completions", json=completion(), headers=headers)).status_code == 200
        assert len(found) == 2


@pytest.mark.parametrize("status", [b"500 Internal Server Error", b"429 Too Many Requests", b"404 Not Found"])
async def test_a_replica_that_does_not_say_refuses_no_key(status: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        body = b"{}"
        line = b"200 OK" if request.startswith(b"POST") else status
        writer.write(b"HTTP/1.1 " + line + b"\r\nconnection: close\r\ncontent-length: 2\r\n\r\n" + body)

    monkeypatch.setattr(keys, "PATH", b"/v1/adapters?limit=1")
    async with RawReplica(answer).running() as raw, router([raw.name]) as front:
        for _ in range(2):
            assert (await front.client.post("/v1/completions", json=completion())).status_code == 200
        assert sum(request.startswith(b"GET") for request in raw.requests) == 2, "nor is it taken"


async def test_a_head_that_a_replica_refuses_makes_no_key_a_taken_one() -> None:
    """431 for a long one counted as a key that sees all names: it opened guarded metrics, and bodies were read."""
    async with replicas(1, api_keys=(KEY,)) as (a,), router([a.name], guard_metrics=True) as front:
        headers = {"X-Long": "x" * 32_500}  # with what a router adds it is too long
        for path in ("/metrics", "/v1/models"):
            assert (await front.client.get(path, headers=headers)).status_code in (401, 431)
        assert (await front.client.get("/metrics")).status_code == 401
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(head("/v1/completions", 2**24) + b'{"model": "')
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401")
        writer.close()


async def test_a_replica_that_hangs_refuses_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        if request.startswith(b"GET"):
            await asyncio.sleep(60)
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")

    monkeypatch.setattr(keys, "PATH", b"/v1/adapters?limit=1")
    async with RawReplica(answer).running() as raw, router([raw.name], connect_timeout_s=0.3) as front:
        assert (await front.client.post("/v1/completions", json=completion())).status_code == 200


# ------------------------------------------------------------------------------------------------ bodies of one address


TAKEN = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\ndata: {}\n\n"
LONG = completion(prompt="x" * 900_000)


@asynccontextmanager
async def front_of_tenants(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> AsyncIterator[tuple[RawReplica, Router]]:
    """With 2 MiB for bodies, before a replica whose keys are called after their tenants: it answers a request for an
    adapter with `begun`, and goes on for long."""

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        if request.startswith(b"GET"):
            tenant = request.partition(b"Bearer ")[2].partition(b"-")[0]
            writer.write(TAKEN + b"x-loraplex-tenant: " + tenant + b"\r\n\r\n{}")
        elif b'"sql"' not in request:
            writer.write(TAKEN + b"\r\n{}")
        else:
            writer.write(begun)
            await asyncio.sleep(60)

    monkeypatch.setattr(keys, "PATH", b"/v1/adapters?limit=1")
    monkeypatch.setattr(settings, "BODIES_BYTES", 2**20)
    bounds = {"max_body_bytes": 2**20, "max_upload_bytes": 2**20}
    async with RawReplica(answer).running() as raw, router([raw.name], **bounds) as front:
        for key in ("a-1", "a-2", "b-1"):
            assert (await call(front, key, model="none", prompt="hi")).status_code == 200
        yield raw, front


async def call(front: Router, key: str, **fields: Any) -> httpx.Response:
    body = {**LONG, **fields}
    return await front.client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})


async def test_a_body_is_held_until_its_answer_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bodies of one tenant's long streams took the memory for bodies for as long as those went on."""
    async with front_of_tenants(monkeypatch, STREAM) as (_, front), AsyncExitStack() as streams:
        for _ in range(4):
            headers = {"Authorization": "Bearer a-1"}
            stream = front.client.stream("POST", "/v1/completions", json=LONG, headers=headers)
            assert (await streams.enter_async_context(stream)).status_code == 200


async def test_bodies_of_one_address_are_counted_by_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a proxy one tenant's bodies had those of all others refused."""
    async with front_of_tenants(monkeypatch, b"") as (raw, front):
        num_asked = len(raw.requests)
        waiting = asyncio.ensure_future(call(front, "a-1"))
        await front.until(lambda: len(raw.requests) > num_asked)
        found = {key: await call(front, key, model="none", prompt="x" * 800_000) for key in ("a-2", "b-1")}
        assert found["a-2"].json()["error"]["code"] == "too_many_bodies", "another key of the same tenant"
        assert found["b-1"].status_code == 200
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
