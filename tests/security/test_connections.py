"""Clients that hold connections, descriptors or memory: each bound is reached over a real port, on both event loops
where they differ."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import select
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from loraplex.core import CompletionOutput, RequestOutput, SamplingParams
from loraplex.server import ServerConfig, connections, urls
from loraplex.server.http_protocol import BoundedHttpProtocol
from loraplex.testing import FakeAsyncEngine
from tests.server.live_server import LiveServer

REPOSITORY = Path(__file__).parents[2]
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = {"model": "base", "prompt": "hi"}

Serve = Callable[..., LiveServer]


ON_BOTH_LOOPS = pytest.mark.parametrize(
    "serve", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"], indirect=True
)


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Iterator[Serve]:
    """Start a server with these settings. At its end no connection and no byte of a body is counted any longer."""
    with contextlib.ExitStack() as stack:

        def start(engine: FakeAsyncEngine | None = None, **settings: Any) -> LiveServer:
            config = ServerConfig(port=0, access_log=False, shutdown_grace_s=0.0, **settings)
            server = LiveServer(engine or FakeAsyncEngine(), config, getattr(request, "param", uvloop.new_event_loop))
            return stack.enter_context(server)

        yield start


def connect(server: LiveServer, data: bytes = b"", source: str = "") -> socket.socket:
    sock = socket.create_connection(server.address, timeout=20, source_address=(source, 0) if source else None)
    sock.sendall(data)
    return sock


def all_of(sock: socket.socket) -> bytes:
    """Until the server closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(2**16):
            received += data
    return received


def error_of(answer: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    return error


def until(is_true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.01)


# --------------------------------------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize("framing", [b"Content-Length: 1000\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"])
def test_a_body_that_stops_is_408(serve: Serve, framing: bytes) -> None:
    server = serve(body_timeout_s=0.1)
    with connect(server, POST + framing) as sock:
        answer = all_of(sock)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer
    assert error_of(answer)["code"] == "body_timeout"
    assert server.connections.refused == {"body_timeout": 1}


@ON_BOTH_LOOPS
def test_a_body_that_trickles_is_408(serve: Serve) -> None:
    server = serve(body_timeout_s=0.2, min_transfer_rate=1000)
    with connect(server, POST + b"Content-Length: 1000\r\n\r\n") as sock:
        while not select.select([sock], [], [], 0.01)[0]:
            sock.sendall(b" ")
        assert all_of(sock).startswith(b"HTTP/1.1 408 ")


def test_a_long_body_at_the_rate_is_served(serve: Serve) -> None:
    server = serve(body_timeout_s=0.2, min_transfer_rate=100)
    body = json.dumps(BODY).encode()
    with connect(server, POST + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % (len(body) + 2000)) as sock:
        for _ in range(20):
            sock.sendall(b" " * 100)
            time.sleep(0.03)
        sock.sendall(body)
        assert all_of(sock).startswith(b"HTTP/1.1 200 ")


def test_the_rest_of_a_body_that_was_answered_ends_in_time(serve: Serve) -> None:
    server = serve(body_timeout_s=0.1, header_timeout_s=0.1)
    with connect(server, POST.replace(b"/v1/completions", b"/nowhere") + b"Content-Length: 1000\r\n\r\n ") as sock:
        answer = all_of(sock)
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_all_bodies_together_are_bounded(serve: Serve) -> None:
    """Counted as they arrive, not as they are declared; short requests are served beside long ones that fill the
    memory."""
    size = 400 * 2**10
    server = serve(max_body_bytes=size, max_inflight_body_bytes=4 * size)
    long = POST + b"Content-Length: %d\r\n\r\n" % size
    with contextlib.ExitStack() as stack:
        declared = [stack.enter_context(connect(server, long, f"127.0.0.{i}")) for i in range(10, 30)]
        assert httpx.post(server.url + "/v1/completions", json=BODY).status_code == 200
        for sock in declared[:3]:
            sock.sendall(b" " * (size - 1))
        until(lambda: server.connections.body_bytes == 3 * (size - 1))
        declared[3].sendall(b" " * (size - 1))
        answer = all_of(declared[3])
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in answer
        assert error_of(answer)["code"] == "too_many_bodies"
        assert httpx.post(server.url + "/v1/completions", json=BODY).status_code == 200
        page = httpx.get(server.url + "/metrics").text
        assert re.search(r"^loraplex:http_body_bytes\{.*\} 1\.2\d+e\+06$", page, re.MULTILINE)
        assert 'reason="max_inflight_body_bytes"} 1.0' in page
    until(lambda: server.connections.body_bytes == 0)


def test_the_bodies_of_one_client_leave_room_for_another(serve: Serve) -> None:
    """However many it begins, and whatever their size: it holds at most as much as is free."""
    size = 400 * 2**10
    server = serve(max_body_bytes=size, max_inflight_body_bytes=4 * size)
    long = POST + b"Content-Length: %d\r\n\r\n" % size
    with contextlib.ExitStack() as stack:
        greedy = [stack.enter_context(connect(server, long, "127.0.0.9")) for _ in range(8)]
        for sock in greedy[:2]:
            sock.sendall(b" " * (size - 1))
        until(lambda: server.connections.body_bytes == 2 * (size - 1))
        for sock in greedy[2:]:
            sock.sendall(b" " * 2**15)
            assert error_of(all_of(sock))["code"] == "too_many_bodies"
        closing = long.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        with connect(server, closing + b" " * size) as other:
            assert all_of(other).startswith(b"HTTP/1.1 400 ")  # it is read, and is no JSON
    until(lambda: server.connections.body_bytes == 0)


def test_a_body_counts_until_its_request_is_over(serve: Serve) -> None:
    engine = FakeAsyncEngine()
    engine.hold()
    server = serve(engine)
    with connect(server, request()):
        until(lambda: engine.num_running == 1)
        assert server.connections.body_bytes == len(json.dumps(BODY))
    until(lambda: server.connections.body_bytes == 0)
    assert engine.num_running == 0


# --------------------------------------------------------------------------------------------- clients that do not read


class Talkative(FakeAsyncEngine):
    """Every request has an answer of 12 MiB: more than the kernel takes for a client that does not read."""

    num_talking = 0

    async def generate(  # type: ignore[override]
        self, prompt: Sequence[int], params: SamplingParams, request_id: str, **named: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        self.num_talking += 1
        try:
            for num_pieces in range(1, 193):
                await asyncio.sleep(0)
                is_last = num_pieces == 192
                text, reason = "x" * 2**16 * num_pieces, "stop" if is_last else None
                completion = CompletionOutput(0, text, (1,) * num_pieces, None, None, reason, None)
                yield RequestOutput(request_id, None, tuple(prompt), (completion,), is_last)
        finally:
            self.num_talking -= 1


def request(**fields: Any) -> bytes:
    body = json.dumps({**BODY, **fields}).encode()
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


def connect_with_small_buffer(server: LiveServer, data: bytes) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(20)
    sock.connect(server.address)
    sock.sendall(data)
    return sock


@ON_BOTH_LOOPS
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "answer"])
def test_a_client_that_does_not_read_is_closed_and_its_request_aborted(serve: Serve, is_stream: bool) -> None:
    engine = Talkative()
    server = serve(engine, send_timeout_s=0.3)
    with connect_with_small_buffer(server, request(stream=is_stream)):
        until(lambda: server.connections.refused.get("send_timeout", 0) == 1)
        until(lambda: server.connections.num_open == 0)
        until(lambda: engine.num_talking == 0)
    assert server.connections.refused == {"send_timeout": 1}


def test_a_client_that_reads_slowly_gets_all_of_it(serve: Serve) -> None:
    server = serve(Talkative(), send_timeout_s=0.2)
    received = 0
    with connect(server, request()) as sock:
        while received <= 12 * 2**20:
            received += len(sock.recv(2**16))
            time.sleep(0.004)
    assert server.connections.refused == {}


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> dict[type, weakref.WeakSet[Any]]:
    """Connections, and their requests, that are in memory."""
    found: dict[type, weakref.WeakSet[Any]] = {}
    for kind in (BoundedHttpProtocol, RequestResponseCycle):
        monkeypatch.setattr(kind, "__init__", noting(kind.__init__, found.setdefault(kind, weakref.WeakSet())))
    return found


def noting(begin: Callable[..., None], alive: weakref.WeakSet[Any]) -> Callable[..., None]:
    def noted(self: Any, *arguments: Any, **named: Any) -> None:
        alive.add(self)
        begin(self, *arguments, **named)

    return noted


@ON_BOTH_LOOPS
@pytest.mark.parametrize(
    "data",
    [
        GET,
        POST + b"Content-Length: 60000\r\n\r\n" + b"x" * 60_000,
        POST + b"Content-Length: 70000\r\n\r\n" + b"x" * 60_000,
        b"".join((POST, b"Content-Length: 34\r\n\r\n", json.dumps(BODY).encode())),
    ],
    ids=["read", "refused", "cut off", "answered"],
)
@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
def test_a_lost_connection_is_freed_without_a_collection(
    serve: Serve, data: bytes, is_reset: bool, alive: dict[type, weakref.WeakSet[Any]]
) -> None:
    """After a reset the timer of its keep-alive kept it, with its last body, and then a cycle: 500 MB in 30 s."""
    server = serve()
    gc.disable()  # a collection that looks at what lived some seconds is rare
    try:
        socks = [connect(server, data) for _ in range(8)]
        until(lambda: len(alive[BoundedHttpProtocol]) == 8)
        time.sleep(0.2)
        for sock in socks:
            if is_reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        until(lambda: not alive[BoundedHttpProtocol] and not alive[RequestResponseCycle])
        assert server.connections.num_open == 0
    finally:
        gc.enable()


def test_a_body_is_let_go_with_its_answer(serve: Serve, alive: dict[type, weakref.WeakSet[Any]]) -> None:
    """The connection stays: 60 KB of each that was refused before its body was read stayed, too."""
    server = serve(api_keys=("key",), admin_api_keys=("admin",))
    head = POST.replace(b"/v1/completions", b"/v1/load_lora_adapter") + b"Authorization: Bearer key\r\n"
    with connect(server, head + b"Content-Length: 60000\r\n\r\n" + b"x" * 60_000) as sock:
        assert b" 403 " in sock.recv(2**16)
        until(lambda: not any(len(cycle.body) for cycle in alive[RequestResponseCycle]))


def test_a_running_request_ends_with_its_client_though_another_waits_behind_it(serve: Serve) -> None:
    engine = FakeAsyncEngine()
    engine.hold()
    server = serve(engine)
    with connect(server, request() * 2):
        until(lambda: engine.num_running == 1)
    until(lambda: engine.num_running == 0)
    assert len(engine.requests) == 1


# ---------------------------------------------------------------------------------------------------------- connections


@ON_BOTH_LOOPS
def test_connections_beyond_the_limit_are_503_at_once(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeAsyncEngine()
    engine.hold()
    server = serve(engine, max_connections=3)
    with contextlib.ExitStack() as stack:
        first = [stack.enter_context(connect(server, request())) for _ in range(3)]
        until(lambda: engine.num_running == 3)
        for _ in range(5):
            with connect(server, GET) as sock:
                answer = all_of(sock)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"connection: close" in answer
            assert b"retry-after: 1\r\n" in answer
            assert error_of(answer)["code"] == "too_many_connections"
        server.call(engine.resume)
        assert first[0].recv(2**16).startswith(b"HTTP/1.1 200 ")
    until(lambda: server.connections.num_open == 0)
    page = httpx.get(server.url + "/metrics").text
    assert re.search(
        r'^loraplex:http_connections_refused_total\{.*reason="max_connections"\} 5\.0$', page, re.MULTILINE
    )
    assert re.search(r"^loraplex:http_connections\{.*\} 1\.0$", page, re.MULTILINE)
    assert len([each for each in caplog.messages if "3 are open (--max-connections)" in each]) == 1


@ON_BOTH_LOOPS
def test_what_waits_longest_for_a_head_makes_room(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent connections, heads that trickle and idle ones, in this order; never a request that comes or runs."""
    monkeypatch.setattr(connections, "IDLE_AT_LEAST_S", 0.0)
    server = serve(max_connections=4)
    with contextlib.ExitStack() as stack:
        waiting = []
        for count, data in enumerate((b"", GET[:10], GET, POST + b"Content-Length: 10\r\n\r\n "), 1):
            waiting.append(stack.enter_context(connect(server, data)))
            until(lambda num_open=count: server.connections.num_open == num_open)  # type: ignore[misc]
            if data == GET:
                assert waiting[-1].recv(2**16).startswith(b"HTTP/1.1 200 ")
        until(lambda: server.connections.body_bytes == 1)
        for closed in waiting[:3]:
            sock = stack.enter_context(connect(server, GET))
            assert sock.recv(2**16).startswith(b"HTTP/1.1 200 ")
            assert all_of(closed).count(b"HTTP/1.1 ") == 0  # its end, behind what is left of an answer
        waiting[3].sendall(b" " * 9)
        assert waiting[3].recv(2**16).startswith(b"HTTP/1.1 400 ")
        assert server.connections.refused == {"closed_for_another": 3}


@ON_BOTH_LOOPS
def test_bodies_that_trickle_on_all_places_keep_no_other_client_out(serve: Serve) -> None:
    """The oldest of the client that has most of them makes room; a single upload of another client stays."""
    server = serve(max_connections=8)
    upload = POST + b"Content-Length: 10\r\n\r\n "
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(connect(server, upload, "127.0.0.3"))
        until(lambda: server.connections.num_open == 1)
        for _ in range(12):
            stack.enter_context(connect(server, upload, "127.0.0.2"))
        until(lambda: sum(server.connections.refused.values()) == 5)  # some come before the last is seen to upload
        for _ in range(3):
            assert httpx.get(server.url + "/health").status_code == 200
        other.sendall(b" " * 9)
        assert other.recv(2**16).startswith(b"HTTP/1.1 400 ")
        assert server.connections.num_open <= 8
    until(lambda: server.connections.num_open == 0)


def test_one_address_leaves_room_for_others(serve: Serve) -> None:
    server = serve(max_connections_per_ip=2)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connect(server, GET[:10], "127.0.0.2"))
        until(lambda: server.connections.num_open == 2)
        with connect(server, GET, "127.0.0.2") as sock:
            assert all_of(sock).startswith(b"HTTP/1.1 503 ")
        with connect(server, GET, "127.0.0.3") as sock:
            assert sock.recv(2**16).startswith(b"HTTP/1.1 200 ")
    assert server.connections.refused == {"max_connections_per_ip": 1}


@ON_BOTH_LOOPS
def test_a_late_event_loop_does_not_close_what_came_in_time(serve: Serve) -> None:
    """uvloop calls the timers that are due before it reads the sockets: another reader makes both late."""
    server = serve(header_timeout_s=0.3)
    begin, begun = socket.socketpair()
    is_slow = threading.Event()

    def read_slowly() -> None:
        asyncio.get_running_loop().remove_reader(begun)
        is_slow.set()
        time.sleep(0.6)

    with begin, begun, connect(server) as sock:
        server.call(lambda: asyncio.get_running_loop().add_reader(begun, read_slowly))
        until(lambda: server.connections.num_open == 1)
        begin.send(b" ")
        assert is_slow.wait(20)
        sock.sendall(GET)
        assert sock.recv(2**16).startswith(b"HTTP/1.1 200 ")


@ON_BOTH_LOOPS
def test_hundreds_that_trickle_hold_up_nobody(serve: Serve) -> None:
    """500 heads and bodies, a byte at a time: others are served meanwhile, and all of them are closed."""
    server = serve(header_timeout_s=1.0, body_timeout_s=1.0, min_transfer_rate=1000)
    slow: list[socket.socket] = []
    try:
        for index in range(500):
            head = GET[:-4] + b"\r\nX: " if index % 2 else POST + b"Content-Length: 100000\r\n\r\n"
            slow.append(connect(server, head))
        until(lambda: server.connections.num_open == 500)
        for _ in range(3):
            for sock in slow:
                with contextlib.suppress(OSError):
                    sock.send(b" ")
            assert httpx.get(server.url + "/health", timeout=5).status_code == 200
            assert httpx.post(server.url + "/v1/completions", json=BODY, timeout=5).status_code == 200
        until(lambda: server.connections.num_open == 0)
        assert server.connections.refused == {"header_timeout": 250, "body_timeout": 250}
        assert server.connections.body_bytes == 0
    finally:
        for sock in slow:
            sock.close()


# ---------------------------------------------------------------------------------------------------------- descriptors

PROGRAM = """
import asyncio, os, sys, threading
from loraplex.server import ServerConfig, run_server
from loraplex.testing import FakeAsyncEngine

def obey():
    taken = []
    for line in sys.stdin:
        if line == "take all\\n":
            try:
                while True:
                    taken.append(os.dup(0))
            except OSError:
                print("taken", flush=True)
        else:
            while taken:
                os.close(taken.pop())
            print("given", flush=True)

async def start():
    threading.Thread(target=obey, daemon=True).start()
    return FakeAsyncEngine()

sys.exit(run_server(start, ServerConfig(port=0, access_log=False, shutdown_grace_s=0.0)))
"""


@contextlib.contextmanager
def program(num_descriptors: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own that may have so many descriptors, and its URL."""
    shell = f'ulimit -n {num_descriptors}; exec "$0" -c "$1"'
    with subprocess.Popen(
        ["bash", "-c", shell, sys.executable, PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().split()[3]
        finally:
            process.kill()


def say(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def stderr_of(process: subprocess.Popen[str]) -> str:
    process.terminate()
    return process.communicate(timeout=20)[1]


def test_a_flood_leaves_descriptors_for_adapters_and_the_engine() -> None:
    """And place for those that mean well: what the flood holds are heads without an end."""
    with program(100) as (process, url), contextlib.ExitStack() as stack:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        for _ in range(300):
            stack.enter_context(socket.create_connection(address, timeout=20)).sendall(GET[:10])
        until(lambda: httpx.get(url + "/health").status_code == 200)
        assert len(os.listdir(f"/proc/{process.pid}/fd")) < 90
        log = stderr_of(process)
    assert "at most 50 connections" in log
    assert log.count("50 are open (--max-connections)") in (1, 2)  # refused, and closed for another


def test_without_a_descriptor_connections_are_refused_not_left_waiting() -> None:
    with program(100) as (process, url):
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        assert say(process, "take all") == "taken"
        for _ in range(20):
            with socket.create_connection(address, timeout=20) as sock:
                assert all_of(sock).startswith(b"HTTP/1.1 503 ")
        ticks = processor_ticks(process.pid)
        time.sleep(0.5)
        assert processor_ticks(process.pid) - ticks < 25, "the loop spins"
        assert say(process, "give back") == "given"
        assert httpx.get(url + "/health").status_code == 200
        log = stderr_of(process)
        assert log.count("no descriptor is left") == 1
        assert "Traceback" not in log


def processor_ticks(pid: int) -> int:
    """Hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_limit_that_descriptors_are_not_enough_for_is_said_at_start() -> None:
    code = (
        "import sys\n"
        "from loraplex.server import ServerConfig, run_server\n"
        "sys.exit(run_server(None, ServerConfig(port=0, max_connections=10000)))"
    )
    command = ["bash", "-c", 'ulimit -n 1000; exec "$0" -c "$1"', sys.executable, code]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert result.returncode == 1
    assert "max_connections 10000 is more than 744, which 1000 open files (ulimit -n) are enough for" in result.stderr


def test_ids_of_addresses() -> None:
    found = [urls.source_of(each) for each in ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", "2001:db8::2%eth0")]
    assert found[0] == found[1] == "10.0.0.1"
    assert found[2] == found[3] != urls.source_of("2001:db8:0:1::1")
