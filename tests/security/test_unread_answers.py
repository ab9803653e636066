"""Clients without a key that do not read, do not send, or send what is not wanted: what they hold, and their place.

The first tests see one connection byte by byte; the last are over a real port.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from loraplex.core import CompletionOutput, RequestOutput, SamplingParams
from loraplex.server import ServerConfig, connections, create_app, generation, http_protocol, pacing, pages, responses
from loraplex.server.http_protocol import MAX_LINGER_BYTES, MAX_LINGERS, PIECE_BYTES
from loraplex.testing import FakeAsyncEngine
from tests.server.conftest import client_of
from tests.server.live_server import LiveServer
from tests.server.raw_connection import GET, Connection

KEY = "an-inference-key"
ASK = GET + b"\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
UNFINISHED = HEAD + b"Content-Length: 100000\r\n\r\n"
ANSWER = bytes(range(256)) * 4096


def post(body: bytes, key: str = "") -> bytes:
    authorization = f"Authorization: Bearer {key}\r\n".encode() if key else b""
    return HEAD + authorization + b"Content-Length: %d\r\n\r\n" % len(body) + body


class LongAnswers:
    """An application whose every answer is ANSWER, in one message."""

    def __init__(self) -> None:
        self.num_begun = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_begun += 1
        headers = [(b"content-length", b"%d" % len(ANSWER))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": ANSWER})


class StreamsOfLogprobs:
    """An application whose answers are streams, each of outputs that take so many bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        hold = connections.hold_outputs.get()
        assert hold is not None
        hold(self.num_bytes)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(100):
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def turns(count: int = 100) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """As a wrong key or path is answered: before the body is asked for."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


# ----------------------------------------------------------------------------------------------------------- answers


async def test_of_a_long_answer_one_piece_waits_for_the_client(connection: Connection) -> None:
    connection.protocol.app = LongAnswers()
    connection.transport.is_unread = True
    connection.feed(ASK)
    num_reads = 0
    while connection.state.tasks:
        await turns()
        assert connection.transport.num_unsent <= PIECE_BYTES
        connection.transport.read()
        num_reads += 1
    assert num_reads > len(ANSWER) // PIECE_BYTES
    assert connection.transport.written.endswith(b"\r\n\r\n" + ANSWER)


@pytest.mark.parametrize(
    ("limit", "num_bytes", "app"),
    [
        ("MAX_UNREAD_BYTES", 2 * len(ANSWER), LongAnswers()),
        ("MAX_OUTPUT_BYTES", 100, StreamsOfLogprobs(50)),  # kept until they are sent: 52 streams took 1.2 GB
    ],
    ids=["answers", "log probabilities of streams"],
)
async def test_answers_that_are_not_read_are_bounded_together(
    limit: str, num_bytes: int, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read least recently is cut off; one alone never is, and what is read to its end counts no more."""
    monkeypatch.setattr(connections, limit, num_bytes)
    shared = Connection().connections
    clients = []
    for _ in range(4):
        client = Connection()
        client.protocol.server_connections = client.connections = shared  # type: ignore[misc]
        client.protocol.app = app
        client.transport.is_unread = True
        client.feed(ASK)
        await turns()
        clients.append(client)
        if len(clients) == 2:  # the first client reads, the second does not
            clients[0].transport.read()
            await turns()
        if len(clients) == 3:
            assert [client.transport.is_aborted for client in clients] == [False, True, False]
    assert [client.transport.is_aborted for client in clients] == [True, True, False, False]
    assert shared.refused == {"unread_answers": 2}
    while clients[2].state.tasks:
        clients[2].transport.read()
        await turns()
    again = Connection()
    again.protocol.server_connections = shared  # type: ignore[misc]
    again.protocol.app = app
    again.transport.is_unread = True
    again.feed(ASK)
    await turns()
    assert not clients[3].transport.is_aborted
    for client in (*clients, again):
        client.protocol.connection_lost(None)
        await client.settle()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_log_probabilities_take_is_counted_for_their_connection(
    is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "TOLD_BYTES", 1)
    told: list[int] = []
    engine = FakeAsyncEngine()
    async with client_of(create_app(engine, ServerConfig())) as client:
        for fields in ({}, {"logprobs": 3, "echo": True}):
            token = connections.hold_outputs.set(told.append)
            try:
                body = {"model": "base", "prompt": ["one two", "three"], "max_tokens": 4, "stream": is_stream, **fields}
                response = await client.post("/v1/completions", json=body)
            finally:
                connections.hold_outputs.reset(token)
            assert response.status_code == 200, response.text
            assert bool(told) == bool(fields)
    assert told == sorted(told)
    assert told[-1] >= 2 * 4 * 4 * generation.CANDIDATE_BYTES, "of two outputs of four tokens with four candidates"


def test_texts_of_long_tokens_count_while_they_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of usual tokens do not: their numbers are bounded elsewhere."""
    monkeypatch.setattr(generation, "TOLD_BYTES", 1)
    told: list[int] = []
    token = connections.hold_outputs.set(told.append)
    try:
        meter = generation.OutputMeter([SamplingParams()] * 2)
        assert meter.is_needed
        for index, text in ((0, "word"), (1, "x" * 300), (1, "x" * 600), (0, "word" * 2)):
            completions = tuple(CompletionOutput(each, text, (1,)) for each in range(2))
            meter.see(index, RequestOutput("r", None, (1,), completions, finished=False))
    finally:
        connections.hold_outputs.reset(token)
    extra = [2 * (num_chars - generation.CHARS_A_TOKEN) for num_chars in (300, 600)]
    assert told == [generation.CHAR_BYTES * each for each in extra]


async def test_a_whole_answer_ends_when_its_texts_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all its prompts: they were all kept to their ends, and then not written."""
    monkeypatch.setattr(responses, "MAX_WRITTEN_BYTES", 100)
    engine = FakeAsyncEngine()
    body = {"model": "base", "prompt": ["one two", "three"], "max_tokens": 400, "ignore_eos": True}
    async with client_of(create_app(engine, ServerConfig())) as client:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert "texts of this answer take more than 100 bytes" in answer.json()["error"]["message"]
        assert len(engine.aborted) == 2
        assert engine.num_running == 0
        short = await client.post("/v1/completions", json={**body, "max_tokens": 50})
        assert short.status_code == 200


async def test_what_a_client_reads_of_the_systems_buffer_counts(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That buffer takes megabytes at once and then nothing for long, while its client reads."""
    clock, num_held = Clock(monkeypatch), 10**7
    monkeypatch.setattr(pacing, "ioctl", lambda *arguments: num_held.to_bytes(4, sys.byteorder))
    with socket.socket() as sock:
        monkeypatch.setattr(connection.transport, "get_extra_info", {"socket": sock}.get)
        connection.transport.is_unread = True
        connection.transport.write(b"x" * 1000)
        for _ in range(3):
            num_held -= 10**6
            clock.ring()
            assert not connection.transport.is_aborted
        clock.ring()
    assert connection.transport.is_aborted
    assert connection.connections.refused == {"send_timeout": 1}


async def test_a_long_answer_of_unknown_length_is_cut_too(connection: Connection) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": ANSWER})

    connection.protocol.app = app
    connection.feed(ASK)
    await connection.settle()
    rest = bytes(connection.transport.written).partition(b"\r\n\r\n")[2]
    chunks = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        chunks.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    assert b"".join(chunks) == ANSWER
    assert max(map(len, chunks)) == PIECE_BYTES


async def test_no_answer_is_made_before_the_one_before_it_is_read(connection: Connection) -> None:
    app = connection.protocol.app = LongAnswers()
    connection.transport.is_unread = True
    connection.feed(ASK * 20)
    for num_answers in range(1, 4):
        for _ in range(len(ANSWER) // PIECE_BYTES):
            await turns()
            assert app.num_begun == num_answers
            connection.transport.read()
        await turns()
        assert app.num_begun == num_answers
        connection.transport.read()  # the last piece
    await turns()
    assert app.num_begun == 4


@pytest.fixture
def app() -> FastAPI:
    return create_app(FakeAsyncEngine(), ServerConfig(api_keys=(KEY,)))


@pytest.mark.parametrize("encoding", ["gzip", "identity", "gzip;q=0", "br, gzip; q=0.5"])
async def test_all_clients_get_the_same_bytes_of_a_page(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """No copy of their own, and nothing is made, packed or unpacked again."""
    calls: list[str] = []
    monkeypatch.setattr(gzip, "decompress", counted(calls, "unpacked", gzip.decompress))
    monkeypatch.setattr(gzip, "compress", counted(calls, "packed", gzip.compress))
    monkeypatch.setattr(app, "openapi", counted(calls, "made", app.openapi))
    for path in (*pages.ASSETS, "/docs", "/openapi.json"):
        bodies = [await body_of(app, path, encoding) for _ in range(2)]
        assert bodies[0] is bodies[1]
        is_packed = encoding not in ("identity", "gzip;q=0")
        assert (bodies[0][:2] == b"\x1f\x8b") == is_packed
        num_calls = len(calls)
        await asyncio.gather(*(body_of(app, path, encoding) for _ in range(5)))
        assert len(calls) == num_calls


def counted(calls: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        calls.append(name)
        return function(*arguments, **named)

    return call


async def body_of(app: FastAPI, path: str, encoding: str) -> bytes:
    """The object that the application sends."""
    sent: list[Any] = []
    headers = [(b"host", b"localhost"), (b"accept-encoding", encoding.encode())]
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"root_path": "", "http_version": "1.1", "headers": headers, "scheme": "http", "client": ("127.0.0.1", 1)}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, asyncio.Event().wait, send)
    assert sent[0]["status"] == 200
    body: bytes = sent[1]["body"]
    return body


async def test_a_page_that_a_client_has_is_304(app: FastAPI) -> None:
    async with client_of(app) as client:
        for path in (*pages.ASSETS, "/docs", "/openapi.json"):
            first = await client.get(path)
            assert "cache-control" in first.headers
            again = await client.get(path, headers={"If-None-Match": first.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")


# ------------------------------------------------------------------------------------------------------------ bodies


async def test_the_body_of_a_request_without_a_key_is_not_kept() -> None:
    connection = Connection(api_keys=(KEY,))
    connection.protocol.app = refuse
    connection.feed(post(b" " * 60_000))
    assert (connection.connections.body_bytes, len(connection.protocol.cycle.body)) == (0, 0)
    await connection.settle()
    assert connection.transport.status == 401
    connection.feed(post(b"{}", KEY))
    assert connection.connections.body_bytes == 2
    await connection.settle()
    connection.protocol.connection_lost(None)


@pytest.mark.parametrize("api_keys", [(), (KEY,)])
async def test_bodies_behind_unread_answers_are_not_counted_with_those_that_run(api_keys: tuple[str, ...]) -> None:
    connection = Connection(api_keys=api_keys)
    answers = connection.app
    connection.protocol.app = LongAnswers()
    connection.transport.is_unread = True
    connection.feed(ASK + post(b"x" * 50_000, KEY))
    await turns()
    assert connection.connections.body_bytes == 0
    assert 50_000 < connection.connections.waiting_bytes < 51_000
    while connection.transport.num_unsent:
        connection.transport.read()
        await turns()
    assert connection.connections.waiting_bytes == 0
    connection.protocol.app = answers
    connection.transport.is_unread = False
    connection.feed(ASK + post(b"y" * 50_000, KEY))
    await connection.settle()
    assert answers.bodies == [b"", b"y" * 50_000]
    assert (connection.connections.body_bytes, connection.connections.waiting_bytes) == (0, 0)
    connection.protocol.connection_lost(None)


async def test_what_waits_behind_unread_answers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_WAITING_BYTES", 40_000)
    connection = Connection()
    connection.transport.is_unread = True
    connection.protocol.app = LongAnswers()
    connection.feed(ASK + post(b"x" * 50_000))
    assert connection.transport.is_closed
    assert connection.connections.refused == {"pipeline": 1}
    connection.protocol.connection_lost(None)
    await connection.settle()
    assert (connection.connections.body_bytes, connection.connections.waiting_bytes) == (0, 0)


async def test_a_body_that_waited_and_finds_no_room_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Connection(max_body_bytes=2**16, max_inflight_body_bytes=2**16)
    assert connection.connections.hold_body("another", 30_000, 0)
    connection.feed(ASK + post(b"x" * 40_000) + ASK)
    await connection.settle()
    assert [int(part[:3]) for part in bytes(connection.transport.written).split(b"HTTP/1.1 ")[1:]] == [200, 503, 200]
    assert connection.app.bodies == [b"", b""]
    assert connection.connections.refused == {"max_inflight_body_bytes": 1}
    assert (connection.connections.body_bytes, connection.connections.waiting_bytes) == (30_000, 0)
    connection.protocol.connection_lost(None)


# ---------------------------------------------------------------------------------------- answered before the body came


class Clock:
    """Stands in for `call_later`; `ring` runs what was asked for since the last time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = asyncio.get_running_loop()
        self._make = self._loop.call_later
        self._callbacks: list[tuple[asyncio.TimerHandle, Callable[[], object]]] = []
        monkeypatch.setattr(self._loop, "call_later", self._keep)

    def _keep(self, delay_s: float, callback: Callable[[], object], *arguments: Any) -> asyncio.TimerHandle:
        timer = self._make(3600, callback)
        self._callbacks.append((timer, callback))
        return timer

    def ring(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for timer, callback in callbacks:
            if not timer.cancelled():
                timer.cancel()
                callback()


@pytest.mark.parametrize("body", [b"", b"x" * 100], ids=["none", "some"])
async def test_an_answer_before_the_body_is_the_last_one(connection: Connection, body: bytes) -> None:
    connection.protocol.app = refuse
    connection.feed(UNFINISHED + body)
    await connection.settle()
    head = bytes(connection.transport.written).partition(b"\r\n\r\n")[0]
    assert head.startswith(b"HTTP/1.1 401 ")
    assert head.count(b"connection: close") == 1
    assert connection.transport.is_closed
    assert not connection.transport.is_aborted
    assert connection.connections.body_bytes == 0


async def test_an_answer_after_the_body_is_not(connection: Connection) -> None:
    connection.protocol.app = refuse
    for _ in range(2):
        connection.feed(post(b"{}"))
        await connection.settle()
    assert connection.transport.written.count(b"HTTP/1.1 401 ") == 2
    assert not connection.transport.is_closed


class HalfOpen(Connection):
    """Its end was said, and the client may still send: `is_closed` is the end of that."""

    def __init__(self) -> None:
        super().__init__()
        self.transport.write_eof = lambda: None  # type: ignore[method-assign]
        self.protocol.app = refuse

    async def answered(self) -> HalfOpen:
        self.feed(UNFINISHED)
        await self.settle()
        assert self.transport.status == 401
        assert not self.transport.is_closed
        return self


async def test_what_comes_after_the_last_answer_is_dropped_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    connection = await HalfOpen().answered()
    connection.feed(b"x" * 1000)
    clock.ring()
    assert not connection.transport.is_closed
    assert connection.connections.body_bytes == 0
    clock.ring()
    assert connection.transport.is_closed


async def test_what_comes_after_the_last_answer_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    slow = await HalfOpen().answered()
    for _ in range(MAX_LINGERS):
        assert not slow.transport.is_closed
        slow.feed(b"x")
        clock.ring()
    assert slow.transport.is_closed
    long = await HalfOpen().answered()
    for _ in range(MAX_LINGER_BYTES // 2**20):
        long.feed(b"x" * 2**20)
    assert not long.transport.is_closed
    long.feed(b"x")
    assert long.transport.is_aborted


async def test_requests_without_a_key_do_not_renew_the_place_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Connection(api_keys=(KEY,))
    renewed: list[Any] = []
    monkeypatch.setattr(connection.connections, "set_idle", renewed.append)
    connection.feed(ASK)
    await connection.settle()
    assert renewed == []
    connection.feed(post(b"{}", KEY))
    await connection.settle()
    assert renewed == [connection.protocol]
    connection.protocol.connection_lost(None)


def keyed(max_connections: int) -> LiveServer:
    config = ServerConfig(
        port=0, access_log=False, shutdown_grace_s=0.0, api_keys=(KEY,), max_connections=max_connections
    )
    return LiveServer(FakeAsyncEngine(), config)


@pytest.mark.parametrize(
    "data",
    [UNFINISHED, UNFINISHED + b" " * 100, b"GET /docs/swagger-ui.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 30],
    ids=["no body", "some body", "not read"],
)
def test_connections_without_a_key_keep_none_with_a_key_out(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(connections, "IDLE_AT_LEAST_S", 0.0)
    monkeypatch.setattr(http_protocol, "LINGER_S", 60.0)
    with keyed(4) as server, contextlib.ExitStack() as stack:
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(server.address)
            sock.sendall(data)
            sock.settimeout(20)
            sock.recv(10, socket.MSG_PEEK)  # it is answered
        with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}) as client:
            for _ in range(3):
                assert client.post("/v1/completions", json={"model": "base", "prompt": "hi"}).status_code == 200
        assert server.connections.refused == {"closed_for_another": 1}


def test_a_connection_with_a_key_is_not_closed_while_its_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_AT_LEAST_S", 0.0)
    with keyed(1) as server, socket.create_connection(server.address, timeout=20) as sock:
        body = json.dumps({"model": "base", "prompt": "hi"}).encode()
        sock.sendall(post(body, KEY)[:-1])
        while not server.connections.body_bytes:
            pass
        with socket.create_connection(server.address, timeout=20) as other:
            other.sendall(ASK)
            assert other.recv(2**16).startswith(b"HTTP/1.1 503 ")
        sock.sendall(body[-1:])
        assert sock.recv(2**16).startswith(b"HTTP/1.1 200 ")


# ------------------------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize("path", ["/v1/adapters/%ff", "/v1/adapters/a%c3", "/%ed%a0%80", "/%c0%af", "/v1/models?x=%ff"])
async def test_a_path_that_is_no_text_is_400(connection: Connection, path: str) -> None:
    connection.feed(f"PUT {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    await connection.settle()
    assert (connection.transport.status, connection.app.paths) == (400, [])
    assert "UTF-8" in connection.transport.error["message"]


@pytest.mark.parametrize(
    "target", ["/v1/tenants/%00", "/v1/keys/a%00b", "/v1/usage?key=%00", "/v1/models?after=a%0Ab", "/a%7f", "/a%1B[2J"]
)
async def test_control_characters_are_400(connection: Connection, target: str) -> None:
    """PostgreSQL refuses a text with NUL: it was 500 with a traceback, as if the database were away."""
    connection.feed(f"DELETE {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    await connection.settle()
    assert (connection.transport.status, connection.app.paths) == (400, [])
    assert "control characters" in connection.transport.error["message"]


async def test_a_path_of_any_letters_is_served(connection: Connection) -> None:
    connection.feed(b"GET /v1/adapters/%C3%A4%F0%9F%98%80%25 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await connection.settle()
    assert connection.app.paths == ["/v1/adapters/ä😀%"]
