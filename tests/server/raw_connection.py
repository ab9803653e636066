"""One connection byte by byte: the protocol with its limits over a transport that only keeps what was written."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from loraplex.server import ServerConfig
from loraplex.server.auth import KeyRing
from loraplex.server.connections import Connections
from loraplex.server.http_protocol import BoundedHttpProtocol, bounded_http_protocol

LIMIT = 4096
PIECE = b"b" * 1024
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


class Transport(asyncio.Transport):
    """What was written, and whether it was closed. `is_unread`: the client reads nothing until `read`."""

    protocol: asyncio.Protocol

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = False
        self.is_aborted = False
        self.is_unread = False
        self.num_unsent = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data
        if self.is_unread:
            self.num_unsent += len(data)
            self.protocol.pause_writing()

    def read(self) -> None:
        self.num_unsent = 0
        self.protocol.resume_writing()

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed

    def can_write_eof(self) -> bool:
        return True

    write_eof = close

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    @property
    def status(self) -> int | None:
        return int(self.written.split()[1]) if self.written else None

    @property
    def error(self) -> dict[str, Any]:
        head, _, body = bytes(self.written).partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head
        assert b"connection: close" in head
        found: dict[str, Any] = json.loads(body)["error"]
        return found


class App:
    """Answers every request with 200 once it has its body; keeps what it saw."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[list[tuple[bytes, bytes]]] = []
        self.paths: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        self.paths.append(scope["path"])
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        self.headers.append(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


class Connection:
    def __init__(self, timeout_s: float = 60.0, **settings: Any) -> None:
        self.app = App()
        config = uvicorn.Config(self.app, log_config=None, access_log=False)
        server = ServerConfig(**{"max_header_bytes": LIMIT, "header_timeout_s": timeout_s, **settings})
        self.state = ServerState()
        self.connections = Connections(server, 10)
        self.connections.slices.seconds = float("inf")  # `feed` needs no turn of the event loop
        keys = KeyRing.of(server)
        protocol_class: Any = bounded_http_protocol(server, self.connections, keys.admitted)
        self.protocol: BoundedHttpProtocol = protocol_class(config=config, server_state=self.state, app_state={})
        self.transport = Transport()
        self.transport.protocol = self.protocol
        self.protocol.connection_made(self.transport)

    def feed(self, *pieces: bytes) -> None:
        for piece in pieces:
            if not self.transport.is_closed:
                self.protocol.data_received(piece)

    def feed_endlessly(self, piece: bytes = PIECE) -> int:
        """Feed until the connection is closed; returns how many bytes that took. Fails beyond 100 times the limit."""
        num_bytes = 0
        while not self.transport.is_closed:
            assert num_bytes < 100 * LIMIT, "the connection is still open"
            self.protocol.data_received(piece)
            num_bytes += len(piece)
        return num_bytes

    @staticmethod
    async def pause() -> None:
        await asyncio.sleep(0)

    async def settle(self) -> None:
        while self.state.tasks:
            await asyncio.gather(*self.state.tasks)
