"""TLS over a real port, and what is said about files that cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import struct
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from loraplex.errors import ConfigError, LoraplexError
from loraplex.server import ServerConfig, connections, listener
from loraplex.server.connections import Connections
from loraplex.server.http_protocol import PIECE_BYTES, BoundedHttpProtocol
from loraplex.server.listener import Listener
from loraplex.server.pacing import READ_BYTES, TimeSlices
from loraplex.server.tls import FED_BYTES, KEY_PASSWORD, PacedTls, tls_context
from loraplex.testing import FakeAsyncEngine
from loraplex.views.remote import RemoteServer
from tests.server.live_server import LiveServer

BUFFER = memoryview(bytearray(READ_BYTES))


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, and cert.pem with key.pem for localhost; secret.pem: the key with the password `word`; other.pem:
    another."""
    folder = tmp_path_factory.mktemp("tls")
    path = {name: str(folder / f"{name}.pem") for name in ("ca", "cakey", "cert", "key", "request", "secret", "other")}
    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    constraints = ("-addext", "keyUsage=critical,keyCertSign")
    openssl(*new, "-x509", "-subj", "/CN=test CA", *constraints, "-keyout", path["cakey"], "-out", path["ca"])
    extension = folder / "extension"
    extension.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    openssl(*new[:-2], "-subj", "/CN=localhost", "-keyout", path["key"], "-out", path["request"])
    issuer = ("-CA", path["ca"], "-CAkey", path["cakey"], "-CAcreateserial", "-days", "2", "-extfile", str(extension))
    openssl("x509", "-req", "-in", path["request"], *issuer, "-out", path["cert"])
    openssl("pkey", "-in", path["key"], "-aes256", "-passout", "pass:word", "-out", path["secret"])
    openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", path["other"])
    return folder


def settings(files: Path, **more: Any) -> ServerConfig:
    names = {"ssl_certfile": str(files / "cert.pem"), "ssl_keyfile": str(files / "key.pem")}
    return ServerConfig(port=0, access_log=False, shutdown_grace_s=0.0, **names | more)


@pytest.fixture
def live(files: Path) -> Iterator[LiveServer]:
    with LiveServer(FakeAsyncEngine(), settings(files)) as server:
        yield server


def client_context(files: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(files / "ca.pem"))


def url_of(server: LiveServer) -> str:
    return f"https://localhost:{server.address[1]}"


def test_requests_and_streams_over_tls(files: Path, live: LiveServer) -> None:
    with httpx.Client(base_url=url_of(live), verify=client_context(files)) as client:
        assert client.get("/health").status_code == 200
        body = {"model": "base", "prompt": "hi"}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "[base] hi"
        assert client.post("/v1/completions", json={**body, "stream": True}).text.endswith("data: [DONE]\n\n")


def connect(files: Path, server: LiveServer) -> ssl.SSLSocket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(20)
    sock.connect(server.address)
    return client_context(files).wrap_socket(sock, server_hostname="localhost")


@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_answers_that_a_client_of_tls_does_not_read_are_bounded_and_end_in_time(
    files: Path, loop_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer below had no flow control: 1,600 requests of 53 bytes without a key were 3 GB of answers."""
    sizes = [0]
    pause_writing = BoundedHttpProtocol.pause_writing

    def measured(self: BoundedHttpProtocol) -> None:
        sizes.append(self.transport.get_write_buffer_size())
        pause_writing(self)

    monkeypatch.setattr(BoundedHttpProtocol, "pause_writing", measured)
    with LiveServer(FakeAsyncEngine(), settings(files, send_timeout_s=0.5), loop_factory) as server:
        with connect(files, server) as sock:
            sock.sendall(b"GET /docs/swagger-ui.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
            end_s = time.monotonic() + 20
            while not server.connections.refused and time.monotonic() < end_s:
                time.sleep(0.01)
        assert server.connections.refused == {"send_timeout": 1}
    assert 0 < max(sizes) < 4 * PIECE_BYTES


@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_client_of_tls_that_reads_slowly_gets_all_of_it(files: Path, loop_factory: Any) -> None:
    with LiveServer(FakeAsyncEngine(), settings(files, send_timeout_s=0.3), loop_factory) as server:
        with connect(files, server) as sock:
            sock.sendall(b"GET /docs/swagger-ui.js HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            received = bytearray()
            while data := sock.recv(2**14):
                received += data
                time.sleep(0.002)
        head, _, body = bytes(received).partition(b"\r\n\r\n")
        assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"
        assert len(body) > 2**20
        assert server.connections.refused == {}


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_versions_of_tls_are_refused(files: Path, live: LiveServer, version: ssl.TLSVersion) -> None:
    context = client_context(files)
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = version
    with (
        socket.create_connection(live.address, timeout=20) as sock,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        context.wrap_socket(sock, server_hostname="localhost")


def test_a_handshake_that_does_not_end_is_a_connection_and_is_closed(files: Path) -> None:
    with LiveServer(FakeAsyncEngine(), settings(files, header_timeout_s=0.3, max_connections=2)) as server:
        silent = [socket.create_connection(server.address, timeout=20) for _ in range(2)]
        until_open(server, 2)
        with socket.create_connection(server.address, timeout=20) as third:
            assert silent[0].recv(1) == b""  # it is the oldest of those that have not said whose they are
            assert third.recv(1) == b""
        assert server.connections.refused == {"closed_for_another": 1}
        for sock in silent:
            assert sock.recv(1) == b""
            sock.close()
        until_open(server, 0)


class Wire(asyncio.Transport):
    """Keeps what is written, and what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_reading, self.is_closed = True, False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close


class Texts(asyncio.Protocol):
    """What each turn of the event loop decrypts."""

    def __init__(self) -> None:
        self.received: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self.received.append(data)


async def test_tiny_records_are_decrypted_in_slices(files: Path) -> None:
    """11,000 records of one byte may come with one read: no turn of the loop decrypts more than some of them."""
    texts, wire, failed = Texts(), Wire(), list[bool]()
    slices = TimeSlices(1e-9)  # one piece in each turn
    layer = PacedTls(texts, tls_context(settings(files)), slices, BUFFER, 60.0, lambda: failed.append(True))  # type: ignore[arg-type]
    layer.connection_made(wire)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context(files).wrap_bio(incoming, outgoing, server_hostname="localhost")
    while not layer.handshake.done():
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        if data := outgoing.read():
            layer.data_received(data)
        await asyncio.sleep(0)
        incoming.write(bytes(wire.written))
        wire.written.clear()
    for _ in range(2000):
        client.write(b"x")
    layer.data_received(outgoing.read())
    assert not wire.is_reading
    layer.eof_received()
    while not wire.is_closed:
        await asyncio.sleep(0)
    assert b"".join(texts.received) == b"x" * 2000
    assert max(map(len, texts.received)) <= FED_BYTES // 22
    assert wire.is_reading
    layer.connection_lost(None)
    assert failed == []


async def test_a_connection_that_is_lost_in_its_handshake_has_no_place_any_more(files: Path) -> None:
    failed = list[bool]()
    layer = PacedTls(Texts(), tls_context(settings(files)), TimeSlices(), BUFFER, 60.0, lambda: failed.append(True))  # type: ignore[arg-type]
    layer.connection_made(Wire())
    layer.data_received(b"\x16\x03\x01\x02\x00\x01")
    layer.connection_lost(None)
    assert failed == [True]
    await layer.handshake


HALF_A_HELLO = b"\x16\x03\x01\x02\x00\x01"
LOOPS = pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


class Port:
    """A listener in the event loop of the test, and what it makes for its connections."""

    def __init__(self, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers: list[weakref.ref[PacedTls]] = []

        def layer(*arguments: Any) -> PacedTls:
            made = PacedTls(*arguments)
            self.layers.append(weakref.ref(made))
            return made

        monkeypatch.setattr(listener, "PacedTls", layer)
        config = settings(files)
        self.sock = listener.bind(config)
        self.address = self.sock.getsockname()
        self.connections = Connections(config, 200)
        self.listener = Listener(self.sock, self.connections, lambda slot: Texts(), tls_context(config), 60.0)
        self.listener.start()

    def connect(self, data: bytes, source: str = "127.0.0.1") -> socket.socket:
        sock = socket.create_connection(self.address, timeout=20, source_address=(source, 0))
        sock.sendall(data)
        return sock

    async def until(self, is_met: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_met():
                await asyncio.sleep(0)

    async def close(self) -> None:
        self.listener.close()
        await self.listener.wait_closed()


@LOOPS
def test_a_client_that_is_gone_costs_no_handshake(
    files: Path, loop_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it has sent, and however it has closed its connection."""

    async def run() -> None:
        port = Port(files, monkeypatch)
        for number in range(90):
            sock = port.connect(HALF_A_HELLO if number % 3 else b"")
            if number % 2:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        await port.until(lambda: port.connections.num_open > 0)
        await port.until(lambda: port.connections.num_open == 0)
        assert port.layers == []
        await port.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())


@LOOPS
@pytest.mark.parametrize("data", [b"\x16\x03\x01\xff\xff" + b"a" * 2000, HALF_A_HELLO], ids=["garbage", "half a hello"])
def test_a_handshake_that_failed_leaves_nothing_for_the_garbage_collector(
    files: Path, loop_factory: Any, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer has 100 KB that the collector does not count: of 6,000 that failed it kept hundreds of megabytes."""

    async def run() -> None:
        port = Port(files, monkeypatch)
        clients = [port.connect(data) for _ in range(20)]
        await port.until(lambda: len(port.layers) == 20)
        for sock in clients:
            sock.close()
        await port.until(lambda: port.connections.num_open == 0)
        await port.until(lambda: not any(each() for each in port.layers))
        await port.close()

    gc.disable()
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(run())
    finally:
        gc.enable()


@LOOPS
def test_handshakes_of_one_address_displace_themselves(
    files: Path, loop_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_HANDSHAKES", 4)

    async def run() -> None:
        port = Port(files, monkeypatch)
        slow = port.connect(HALF_A_HELLO, "127.0.0.2")
        await port.until(lambda: len(port.layers) == 1)
        flood = [port.connect(HALF_A_HELLO) for _ in range(20)]
        await port.until(lambda: len(port.layers) == 21)
        assert (port.connections.num_open, port.connections.refused) == (4, {"closed_for_another": 17})
        await port.until(lambda: sum(each() is not None for each in port.layers) == 4)
        assert port.layers[0]() is not None
        for sock in (slow, *flood):
            sock.close()
        await port.until(lambda: port.connections.num_open == 0)
        await port.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())


def until_open(server: LiveServer, count: int) -> None:
    end_s = time.monotonic() + 20
    while server.connections.num_open != count:
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_plain_http_to_a_tls_port_ends_at_once(live: LiveServer) -> None:
    with socket.create_connection(live.address, timeout=20) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not sock.recv(2**16).startswith(b"HTTP")
    until_open(live, 0)


@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "half a hello"])
def test_handshakes_that_do_not_end_keep_no_client_out(files: Path, data: bytes) -> None:
    with LiveServer(FakeAsyncEngine(), settings(files, max_connections=4)) as server, contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(socket.create_connection(server.address, timeout=20)).sendall(data)
        until = time.monotonic() + 20
        while server.connections.refused.get("closed_for_another", 0) < 6:
            assert time.monotonic() < until
            time.sleep(0.01)
        with httpx.Client(base_url=url_of(server), verify=client_context(files)) as client:
            for _ in range(3):
                assert client.get("/v1/models").status_code == 200
        assert server.connections.refused == {"closed_for_another": 7}
        until_open(server, 3)


def test_client_certificates(files: Path) -> None:
    config = settings(files, ssl_ca_certs=str(files / "ca.pem"), ssl_cert_reqs=2)
    with LiveServer(FakeAsyncEngine(), config) as server:
        context = client_context(files)
        with httpx.Client(base_url=url_of(server), verify=context) as client, pytest.raises(httpx.TransportError):
            client.get("/health")
        context.load_cert_chain(files / "cert.pem", files / "key.pem")
        with httpx.Client(base_url=url_of(server), verify=context) as client:
            assert client.get("/health").status_code == 200


def test_a_key_with_a_password(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(files, ssl_keyfile=str(files / "secret.pem"))
    with pytest.raises(ConfigError, match=KEY_PASSWORD):
        tls_context(config)
    monkeypatch.setenv(KEY_PASSWORD, "word")
    assert tls_context(config) is not None


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("ssl_certfile", "nowhere.pem", r"--ssl-certfile .*nowhere.pem.*: No such file or directory$"),
        ("ssl_certfile", "extension", r"--ssl-certfile .*extension.*is it PEM"),
        ("ssl_keyfile", "nowhere.pem", r"--ssl-keyfile .*nowhere.pem: No such file or directory$"),
        ("ssl_keyfile", "other.pem", r"does the key belong to it"),
        ("ssl_ca_certs", "nowhere.pem", r"--ssl-ca-certs .*nowhere.pem: No such file"),
        ("ssl_ca_certs", "extension", r"--ssl-ca-certs .*is it PEM"),
    ],
)
def test_files_that_cannot_be_used_are_named(files: Path, name: str, path: str, message: str) -> None:
    more = {"ssl_cert_reqs": 2} if name == "ssl_ca_certs" else {}
    with pytest.raises(ConfigError, match=message):
        tls_context(settings(files, **{name: str(files / path)}, **more))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ssl_keyfile": "key.pem"}, "ssl_keyfile needs ssl_certfile"),
        ({"ssl_ca_certs": "ca.pem"}, "ssl_ca_certs needs ssl_certfile"),
        ({"ssl_certfile": "cert.pem", "ssl_ca_certs": "ca.pem"}, "belong together"),
        ({"ssl_certfile": "cert.pem", "ssl_cert_reqs": 1}, "belong together"),
        ({"ssl_certfile": "cert.pem", "ssl_cert_reqs": 3}, "must be 0, 1 or 2"),
        ({"max_connections": 0}, "max_connections must be >= 1"),
        ({"max_connections_per_ip": 0}, "max_connections_per_ip must be >= 1"),
        ({"body_timeout_s": 0.0}, "body_timeout_s must be > 0"),
        ({"send_timeout_s": 0.0}, "send_timeout_s must be > 0"),
        ({"min_transfer_rate": 0}, "min_transfer_rate must be >= 1"),
        ({"max_inflight_body_bytes": 1024}, "max_inflight_body_bytes must be >= max_body_bytes"),
        ({"log_format": "xml"}, "log_format must be one of"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**given)


def test_our_own_clients_over_tls(files: Path, live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LoraplexError, match="SSL_CERT_FILE"):
        RemoteServer(url_of(live)).get("/health")
    with pytest.raises(ConnectionError, match="does it speak https"):
        RemoteServer(url_of(live).replace("https", "http")).get("/health")
    monkeypatch.setenv("SSL_CERT_FILE", str(files / "ca.pem"))
    assert RemoteServer(url_of(live)).get_json("/health") == {"status": "ok"}
