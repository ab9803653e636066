"""Heads of other versions, without or with several hosts, and more requests at once than a client needs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loraplex.server import ServerConfig
from loraplex.server.connections import Connections, forwarded_for
from loraplex.server.http_protocol import MAX_PIPELINED, PARSED_BYTES
from loraplex.server.urls import MAX_PATH_BYTES, MAX_QUERY_PARAMETERS
from tests.server.raw_connection import Connection

REFUSED = {
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "two equal hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
    "two hosts in 1.0": b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n",
    "0.9": b"GET /\r\n\r\n",
    "0.9 by name": b"GET / HTTP/0.9\r\nHost: a\r\n\r\n",
    "2.0": b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
    "2": b"GET / HTTP/2\r\nHost: a\r\n\r\n",
    "the preface of 2.0": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "1.2": b"GET / HTTP/1.2\r\nHost: a\r\n\r\n",
    "3.0": b"GET / HTTP/3.0\r\nHost: a\r\n\r\n",
    "01.1": b"GET / HTTP/01.1\r\nHost: a\r\n\r\n",
    "1.10": b"GET / HTTP/1.10\r\nHost: a\r\n\r\n",
    "small letters": b"GET / http/1.1\r\nHost: a\r\n\r\n",
    "no version": b"GET / HTTP/\r\nHost: a\r\n\r\n",
    "a method that is none": b"G@T / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a control character": b"GET /\x01 HTTP/1.1\r\nHost: a\r\n\r\n",
    "no ASCII": b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
    "no path": b"GET http://a HTTP/1.1\r\nHost: a\r\n\r\n",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
}


@pytest.mark.parametrize("head", REFUSED.values(), ids=REFUSED.keys())
async def test_heads_that_are_refused(connection: Connection, head: bytes) -> None:
    connection.feed(head)
    await connection.settle()
    assert (connection.transport.status, connection.app.paths) == (400, [])
    assert connection.transport.is_closed
    assert connection.transport.error["message"]
    assert connection.connections.refused == {"not_http": 1}


@pytest.mark.parametrize(
    "head",
    [
        b"GET /a HTTP/1.0\r\n\r\n",
        b"GET /a HTTP/1.0\r\nHost: a\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost:\r\n\r\n",
        b"GET http://other/a HTTP/1.1\r\nhOST: a\r\n\r\n",
    ],
)
async def test_heads_that_are_fine(connection: Connection, head: bytes) -> None:
    connection.feed(head)
    await connection.settle()
    assert (connection.transport.status, connection.app.paths) == (200, ["/a"])


@pytest.mark.parametrize(("num_parameters", "status"), [(MAX_QUERY_PARAMETERS, 200), (MAX_QUERY_PARAMETERS + 1, 400)])
async def test_a_query_has_few_parameters(connection: Connection, num_parameters: int, status: int) -> None:
    query = b"&".join([b"a"] * num_parameters)
    connection.feed(b"GET /a&b?%s HTTP/1.1\r\nHost: a\r\n\r\n" % query)
    await connection.settle()
    assert connection.transport.status == status


@pytest.mark.parametrize(("num_bytes", "status"), [(MAX_PATH_BYTES, 200), (MAX_PATH_BYTES + 1, 400)])
async def test_a_path_is_short(num_bytes: int, status: int) -> None:
    connection = Connection(max_header_bytes=2**15)
    connection.feed(b"GET /%s?%s HTTP/1.1\r\nHost: a\r\n\r\n" % (b"a" * (num_bytes - 1), b"x" * 9000))
    await connection.settle()
    assert connection.transport.status == status
    connection.protocol.connection_lost(None)


async def test_requests_that_come_at_once_begin_one_after_the_other() -> None:
    """In the order in which they came, one in each turn of the event loop; what needs no key waits for none."""
    order: list[str] = []
    shared = Connection()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        order.append(scope["path"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    clients = [shared, *(Connection() for _ in range(20))]
    for index, client in enumerate(clients):
        client.protocol.server_connections.turns_of_clients = shared.connections.turns_of_clients
        client.protocol.app = app
        client.feed(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % index)
    last = Connection()
    last.protocol.server_connections.turns_of_clients = shared.connections.turns_of_clients
    last.protocol.app = app
    last.feed(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    for client in (*clients, last):
        await client.settle()
        client.protocol.connection_lost(None)
    assert [path for path in order if path != "/health"] == [f"/{index}" for index in range(len(clients))]
    assert order.index("/health") < 5


async def test_requests_without_a_key_and_of_other_clients_delay_none_that_has_one() -> None:
    """All were in one queue: two thousand connections without a key held a request of a key for seconds."""
    connections, order = Connections(ServerConfig(), 10_000), list[str]()

    async def begin(client: str | None) -> None:
        await connections.turn(client, ("10.0.0.1", 1), lambda: True)
        order.append(client or "none")

    flood = [asyncio.ensure_future(begin(client)) for _ in range(500) for client in (None, "one")]
    await asyncio.sleep(0)
    await begin("two")
    assert order.count("one") <= 2
    assert order.count("none") <= 12
    await asyncio.gather(*flood)
    assert len(order) == 1001


async def test_what_came_on_a_connection_is_parsed_in_pieces_between_others() -> None:
    """Its client is not read meanwhile, also when the application has taken a body in between."""
    busy, other = Connection(), Connection()
    other.protocol.server_connections.slices = busy.connections.slices
    busy.connections.slices.seconds = 1e-9  # one piece in each turn of the event loop
    paused: list[bool] = []
    busy.transport.pause_reading = lambda: paused.append(True)  # type: ignore[method-assign]
    busy.transport.resume_reading = lambda: paused.append(False)  # type: ignore[method-assign]
    size = 50 * PARSED_BYTES
    busy.feed(b"POST /long HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
    other.feed(b"GET /short HTTP/1.1\r\nHost: a\r\n\r\n")
    for _ in range(12):
        await asyncio.sleep(0)
    assert other.app.paths == ["/short"]
    assert busy.app.bodies == []
    busy.protocol.flow.pause_reading()
    busy.protocol.flow.resume_reading()
    assert False not in paused
    while not busy.app.bodies:
        await asyncio.sleep(0)
    assert busy.app.bodies == [b"x" * size]
    assert paused[-1] is False
    busy.feed(b"GET /next HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 5000)
    busy.protocol.connection_lost(None)
    other.protocol.connection_lost(None)
    for _ in range(12):
        await asyncio.sleep(0)
    assert busy.app.paths == ["/long"]


FORWARDED = {
    "1.2.3.4": "1.2.3.4",
    "6.6.6.6, 1.2.3.4": "1.2.3.4",
    "1.2.3.4, 127.0.0.1, ::1": "1.2.3.4",
    "2001:db8::1": "2001:db8::1",
    'fe80::1%eth0 with key=admin: 200 "x"': "fe80::1",
    "1.2.3.4%eth0": None,
    "1.2.3.4, EVIL": None,
    "EVIL\x9b31m": None,
    "127.0.0.1": None,
    ", ".join(["1.2.3.4", *["::1"] * 7]): "1.2.3.4",
    ", ".join(["1.2.3.4", *["::1"] * 8]): None,
    "": None,
}


@pytest.mark.parametrize("listed", FORWARDED, ids=ascii)
def test_a_proxy_on_this_machine_says_an_address_and_nothing_else(listed: str) -> None:
    headers = [(b"host", b"a"), (b"x-forwarded-for", listed.encode("latin-1"))]
    assert forwarded_for("127.0.0.1", headers) == forwarded_for("::1", headers) == FORWARDED[listed]
    assert forwarded_for("10.0.0.1", headers) is None
    assert forwarded_for("", headers) is None


async def test_some_requests_may_be_sent_before_the_first_answer(connection: Connection) -> None:
    connection.feed(b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n" * MAX_PIPELINED)
    await connection.settle()
    assert connection.app.paths == ["/a"] * MAX_PIPELINED


async def test_a_thousand_requests_at_once_are_refused(connection: Connection) -> None:
    connection.feed(b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n" * 1000)
    await connection.settle()
    assert connection.transport.is_closed
    assert connection.connections.refused == {"pipeline": 1}
    assert len(connection.app.paths) <= 1
    assert not connection.transport.written  # nothing can be sent behind the end of a connection


async def test_many_upgrades_at_once_are_refused_soon(connection: Connection) -> None:
    """Each makes a parser, and is read twice."""
    connection.feed(b"GET /a HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n" * 1000)
    await connection.settle()
    assert connection.connections.refused == {"pipeline": 1}
