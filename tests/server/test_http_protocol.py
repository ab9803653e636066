"""Requests whose head, trailer or chunk extension has no end, byte by byte and over a real port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from loraplex.errors import ConfigError
from loraplex.server import ServerConfig
from loraplex.server.http_protocol import MAX_HEADERS, MAX_TINY_CHUNKS, MIN_CHUNK_BYTES
from loraplex.server.pacing import READ_BYTES
from loraplex.testing import FakeAsyncEngine
from tests.server.live_server import LiveServer
from tests.server.raw_connection import GET, LIMIT, PIECE, POST, Connection


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    connection = Connection()
    yield connection
    connection.protocol.connection_lost(None)
    await connection.settle()


@pytest.mark.parametrize(
    "begin",
    [GET + b"X-A: ", GET + b"X", b"GET /", b"GET /health?", GET + b"X-A: 1\r\nX-B: 2\r\nX-C:"],
    ids=["value", "name", "path", "query", "third header"],
)
async def test_a_head_without_end_is_431_after_the_limit(connection: Connection, begin: bytes) -> None:
    connection.feed(begin)
    assert connection.feed_endlessly() <= LIMIT + len(PIECE)
    assert (connection.transport.status, connection.transport.error["code"]) == (431, "header_too_long")
    assert "4096" in connection.transport.error["message"]


async def test_small_headers_without_end_are_431(connection: Connection) -> None:
    connection.feed(GET)
    assert connection.feed_endlessly(b"a:b\r\n") <= LIMIT + 5
    assert connection.transport.status == 431


async def test_line_ends_before_a_request_without_end_are_refused(connection: Connection) -> None:
    assert connection.feed_endlessly(b"\r\n" * 100) <= LIMIT + 200
    assert connection.transport.status == 431


@pytest.mark.parametrize("head", [GET + b"a:b\r\n" * 10_000 + b"\r\n", GET + b"X: " + b"b" * 65536 + b"\r\n\r\n"])
async def test_a_long_head_in_one_piece_is_refused_before_the_application(connection: Connection, head: bytes) -> None:
    connection.feed(head)
    await connection.settle()
    assert connection.transport.status == 431
    assert connection.transport.is_closed
    assert connection.app.headers == []


@pytest.mark.parametrize(
    "begin",
    [POST + b"1;", POST + b"1\r\nx\r\n1;", POST + b"1\r\nx\r\n0\r\nX-A: ", POST + b"1\r\nx\r\n0\r\n"],
    ids=["first extension", "extension", "trailer", "trailers"],
)
async def test_what_is_no_body_in_a_body_is_431(connection: Connection, begin: bytes) -> None:
    connection.feed(begin)
    await asyncio.sleep(0)
    assert connection.feed_endlessly(b"a:b\r\n" if begin.endswith(b"0\r\n") else PIECE) <= LIMIT + len(PIECE)
    await connection.settle()
    assert connection.app.bodies == []
    assert connection.transport.status == 431


async def test_headers_up_to_the_limit_are_served_again_and_again(connection: Connection) -> None:
    for _ in range(5):
        connection.feed(GET, b"X-A: " + b"b" * (LIMIT - len(GET) - 50), b"\r\n\r\n")
        await connection.settle()
    assert connection.transport.written.count(b"200 OK") == 5
    assert not connection.transport.is_closed


async def test_a_long_body_is_no_head(connection: Connection) -> None:
    head = b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n" % (100 * len(PIECE))
    connection.feed(head, *[PIECE] * 100, GET + b"\r\n")
    await connection.settle()
    assert connection.app.bodies == [PIECE * 100, b""]


async def test_a_body_of_many_small_chunks_is_no_head(connection: Connection) -> None:
    connection.feed(POST, *[b"1\r\nx\r\n"] * LIMIT, b"0\r\n\r\n")
    await connection.settle()
    assert connection.app.bodies == [b"x" * LIMIT]


async def test_a_long_body_of_tiny_chunks_is_refused(connection: Connection) -> None:
    connection.feed(POST, b"1\r\nb\r\n" * (2 * MAX_TINY_CHUNKS))
    await connection.settle()
    assert (connection.transport.status, connection.transport.error["code"]) == (400, "chunks_too_small")
    assert connection.connections.refused == {"chunks_too_small": 1}
    assert connection.app.bodies == []


async def test_chunks_of_some_size_go_on(connection: Connection) -> None:
    chunk = b"%x\r\n%s\r\n" % (MIN_CHUNK_BYTES, b"b" * MIN_CHUNK_BYTES)
    connection.feed(POST, *[chunk * 1024] * 12, b"0\r\n\r\n")
    await connection.settle()
    assert connection.app.bodies == [b"b" * MIN_CHUNK_BYTES * 1024 * 12]


async def test_the_chunks_of_each_request_are_its_own(connection: Connection) -> None:
    one = b"%s%s0\r\n\r\n" % (POST, b"1\r\nb\r\n" * 3000)
    connection.feed(one, one[:9000], one[9000:] + one)
    await connection.settle()
    assert connection.app.bodies == [b"b" * 3000] * 3


async def test_many_headers_are_431(connection: Connection) -> None:
    connection.feed(GET + b"a:\r\n" * MAX_HEADERS + b"\r\n")
    await connection.settle()
    assert (connection.transport.status, connection.transport.error["code"]) == (431, "too_many_headers")
    assert connection.connections.refused == {"too_many_headers": 1}
    assert connection.app.paths == []


async def test_as_many_headers_as_allowed_are_served(connection: Connection) -> None:
    connection.feed((GET + b"a:\r\n" * (MAX_HEADERS - 1) + b"\r\n") * 2)
    await connection.settle()
    assert connection.app.paths == ["/health"] * 2


async def test_many_trailers_are_refused(connection: Connection) -> None:
    connection.feed(POST, b"0\r\n" + b"a:\r\n" * (MAX_HEADERS + 1) + b"\r\n")
    await connection.settle()
    assert connection.connections.refused == {"too_many_headers": 1}
    assert connection.transport.is_closed


async def test_trailers_are_no_headers(connection: Connection) -> None:
    connection.feed(POST + b"1\r\nx\r\n0\r\nAuthorization: Bearer key\r\n\r\n")
    await connection.settle()
    assert [name for name, _ in connection.app.headers[0]] == [b"host", b"transfer-encoding"]


async def test_nothing_is_written_into_the_answer_of_an_earlier_request(connection: Connection) -> None:
    connection.feed(GET + b"\r\n" + GET + b"X-A: ")
    connection.feed_endlessly()
    assert connection.transport.written == b""


async def test_what_is_no_http_is_answered_in_the_form_of_every_error(connection: Connection) -> None:
    connection.feed(b"\x16\x03\x01 no HTTP\r\n\r\n")
    assert connection.transport.status == 400
    assert connection.transport.is_closed
    assert "HTTP" in connection.transport.error["message"]


async def test_a_chunk_that_is_none_is_400(connection: Connection) -> None:
    connection.feed(POST + b"1\r\nx\r\nnone\r\n")
    await connection.settle()
    assert connection.transport.status == 400
    assert connection.app.bodies == []


class Clock:
    """Stands in for the loop's `call_later`: nothing happens until `ring`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._timers: list[tuple[asyncio.TimerHandle, Callable[[], object]]] = []
        self._loop = asyncio.get_running_loop()
        self._call_later = self._loop.call_later
        monkeypatch.setattr(self._loop, "call_later", self.call_later)
        self.delays: list[float] = []

    def call_later(self, delay_s: float, callback: Callable[[], object], *args: Any, **kwargs: Any) -> Any:
        timer = self._call_later(3600, callback)
        self.delays.append(delay_s)
        self._timers.append((timer, partial(callback, *args)))
        return timer

    def ring(self) -> None:
        timers, self._timers = self._timers, []
        for timer, callback in timers:
            if not timer.cancelled():
                timer.cancel()
                callback()


async def test_a_head_that_does_not_come_to_its_end_in_time_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    connection = Connection(timeout_s=7.0)
    for byte in GET:
        connection.feed(bytes([byte]))
    assert clock.delays == [7.0]  # from the connection's begin, and no byte gives it more
    clock.ring()
    assert (connection.transport.status, connection.transport.error["code"]) == (408, "header_timeout")
    assert connection.transport.is_closed


async def test_a_connection_that_says_nothing_is_closed_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    connection = Connection()
    clock.ring()
    assert not connection.transport.is_closed  # what came may be unread where the event loop is late
    clock.ring()
    assert connection.transport.is_closed
    assert connection.transport.written == b""


async def test_the_second_request_of_a_connection_has_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    connection = Connection(timeout_s=7.0)
    connection.feed(GET + b"\r\n")
    await connection.settle()
    connection.transport.written.clear()
    clock.delays.clear()
    connection.feed(GET)
    assert clock.delays == [7.0]
    clock.ring()
    assert connection.transport.status == 408


async def test_line_ends_keep_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    connection = Connection()
    connection.feed(GET + b"\r\n")
    await connection.settle()
    connection.feed(b"\r\n")
    clock.ring()
    clock.ring()
    assert connection.transport.is_closed


async def test_a_request_that_runs_has_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    connection = Connection()
    connection.feed(GET[:10], GET[10:] + b"\r\n")
    clock.ring()
    assert not connection.transport.is_closed
    await connection.settle()
    assert connection.transport.status == 200


async def test_no_timer_stays_behind_a_connection_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    connection = Connection()
    connection.feed(GET)
    connection.protocol.connection_lost(None)
    clock.ring()
    assert connection.transport.written == b""


def test_over_a_port_others_are_served_and_the_long_head_is_refused() -> None:
    settings = ServerConfig(
        port=0, access_log=False, log_level="critical", shutdown_grace_s=0.0, max_header_bytes=LIMIT
    )
    with LiveServer(FakeAsyncEngine(), settings) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=30) as hostile:
            hostile.sendall(GET + b"X-A: " + b"b" * LIMIT)
            reply = hostile.recv(65536)
        assert reply.startswith(b"HTTP/1.1 431 ")
        with socket.create_connection((host, int(port)), timeout=30) as other:
            other.sendall(GET + b"\r\n")
            assert other.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("setting", [{"max_header_bytes": 1023}, {"header_timeout_s": 0.0}])
def test_settings_that_cannot_be(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        ServerConfig(**setting)


async def test_what_is_not_parsed_yet_is_all_that_is_read(connection: Connection) -> None:
    """However much a client sends: reads are small, and the next one waits until this one is parsed."""
    connection.connections.slices.seconds = 0.0  # nothing is parsed in this turn
    buffer = connection.protocol.get_buffer(2**18)
    assert len(buffer) == READ_BYTES
    buffer[:] = b"x" * READ_BYTES
    connection.protocol.buffer_updated(READ_BYTES)
    assert not connection.transport.is_reading
    connection.connections.slices.seconds = float("inf")
    await connection.pause()
    await connection.pause()
    assert connection.transport.is_reading or connection.transport.is_closed
