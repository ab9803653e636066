"""Connections of tenants over a real port: one that holds many leaves room for the others."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import sqlalchemy as sa
import uvloop

from loraplex.adapters.journal.tables import JournalTables
from loraplex.server import ServerConfig, connections
from loraplex.tenants.limits import Limits
from loraplex.tenants.records import Role
from loraplex.tenants.store import TenantStore
from loraplex.testing import FakeAsyncEngine
from tests.security.test_connections import all_of, connect, error_of, until
from tests.server.live_server import LiveServer

BODY = b'{"model": "base", "prompt": "hi", "max_tokens": 2}'


def status_of(sock: socket.socket) -> int:
    """Of a whole answer on a connection that stays open."""
    received = b""
    while (found := re.search(rb"content-length: (\d+)\r\n.*?\r\n\r\n", received, re.DOTALL)) is None or (
        len(received) < found.end() + int(found[1])
    ):
        data = sock.recv(2**16)
        assert data, received
        received += data
    return int(received.split()[1])


class Live:
    """A server of at most 8 connections, with keys of acme (at most 2), beta (no limit of its own) and an operator."""

    def __init__(self, server: LiveServer, keys: dict[str, str]) -> None:
        self.server, self.keys = server, keys
        self.open = ExitStack()

    def head(self, key: str, rest: bytes = b"") -> bytes:
        length = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(BODY)
        auth = f"Authorization: Bearer {self.keys.get(key, key)}\r\n".encode()
        return b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + auth + length + rest + b"\r\n"

    def hold(self, key: str) -> socket.socket:
        """A request whose body is still to come, once the server has its head."""
        held = self.server.connections.tenant_counts.total()
        sock = self.open.enter_context(connect(self.server, self.head(key)))
        until(lambda: self.server.connections.tenant_counts.total() == held + 1)
        return sock

    def ask(self, key: str) -> bytes:
        """The whole answer on a connection of its own."""
        with connect(self.server, self.head(key, b"Connection: close\r\n") + BODY) as sock:
            return all_of(sock)


@pytest.fixture(params=[None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def live(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Live]:
    file = tmp_path / "journal.sqlite"
    JournalTables(file, "base").close()
    url = sa.URL.create("sqlite", database=str(file))
    engine = FakeAsyncEngine()
    engine.state = sa.create_engine(url)
    keys = {}
    with closing(TenantStore(sa.create_engine(url))) as store:
        store.create_tenant("acme", limits=Limits(connections=2))
        store.create_tenant("beta")
        for tenant in ("acme", "beta"):
            _, keys[tenant] = store.create_key(Role.TENANT, tenant)
        _, keys["operator"] = store.create_key(Role.OPERATOR)
    config = ServerConfig(port=0, access_log=False, shutdown_grace_s=0.0, max_connections=8)
    with LiveServer(engine, config, request.param) as server:
        made = Live(server, keys)
        with made.open:
            yield made
        until(lambda: not server.connections.num_open)
        assert not server.connections.tenant_counts


def test_beyond_its_limit_a_tenant_gets_429_and_others_are_served(live: Live) -> None:
    first, _ = live.hold("acme"), live.hold("acme")
    answer = live.ask("acme")
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert answer.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 1" in head
    assert b"connection: close" in head
    error = error_of(answer)
    assert (error["code"], error["type"]) == ("tenant_limit", "rate_limit_error")
    assert "2 connections" in error["message"]
    assert live.server.connections.refused["tenant_connections"] == 1
    for key in ("beta", "operator"):
        assert live.ask(key).startswith(b"HTTP/1.1 200 ")
    first.sendall(BODY)
    assert status_of(first) == 200
    assert live.ask("acme").startswith(b"HTTP/1.1 200 "), "the one that is idle now made room"


def test_without_a_limit_a_tenant_leaves_half_of_the_rest(live: Live) -> None:
    for _ in range(4):
        live.hold("beta")
    assert live.ask("beta").startswith(b"HTTP/1.1 429 ")
    live.hold("acme")
    for _ in range(3):
        live.hold("operator")
    assert live.server.connections.num_open == 8


def test_an_idle_connection_is_closed_for_the_tenants_next_one(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_AT_LEAST_S", 0.0)
    idle, other = live.hold("acme"), live.hold("beta")
    for sock in (idle, other):
        sock.sendall(BODY)
        assert status_of(sock) == 200
    live.hold("acme")
    with connect(live.server, live.head("acme") + BODY) as sock:
        assert status_of(sock) == 200
    with contextlib.suppress(ConnectionResetError):
        assert idle.recv(1) == b""
    other.sendall(live.head("beta") + BODY)
    assert status_of(other) == 200


def test_a_connection_of_several_tenants_is_closed_for_none(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router may be sending the request of one of them while another is at its limit."""
    monkeypatch.setattr(connections, "IDLE_AT_LEAST_S", 0.0)
    proxy = live.open.enter_context(connect(live.server, b""))
    for key in ("beta", "acme"):
        proxy.sendall(live.head(key) + BODY)
        assert status_of(proxy) == 200
    until(lambda: not live.server.connections.tenant_counts)
    live.hold("acme")
    live.hold("acme")
    assert live.ask("acme").startswith(b"HTTP/1.1 429 ")
    proxy.sendall(live.head("beta") + BODY)
    assert status_of(proxy) == 200


def test_connections_one_after_another_are_never_too_many(live: Live) -> None:
    live.hold("acme")
    for _ in range(20):
        assert live.ask("acme").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("key", ["", "lp-nobodys"])
def test_without_a_key_a_connection_is_no_tenants(live: Live, key: str) -> None:
    live.hold("acme")
    live.hold("acme")
    answer = live.ask(key)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert live.server.connections.tenant_counts == {"acme": 2}


def test_connections_of_refused_requests_are_not_counted(live: Live) -> None:
    live.hold("acme")
    live.hold("acme")
    assert all(live.ask("acme").startswith(b"HTTP/1.1 429 ") for _ in range(20))
    until(lambda: live.server.connections.num_open == 2)
    assert live.server.connections.tenant_counts == {"acme": 2}
