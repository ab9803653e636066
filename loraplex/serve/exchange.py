"""One HTTP request between an ingress and a replica: its message, and the application's side of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

from loraplex.errors import EngineOverloadedError
from loraplex.routing import Needs
from loraplex.server.api_error import error_response
from loraplex.server.connections import Connections
from loraplex.server.request_id import HEADER
from loraplex.server.streaming import EVENT_STREAM
from loraplex.server.wires.native_forms import error_event

REPLICA_HEADER = "X-Loraplex-Replica"
"""Of an answer: the replica that it is from. Of a request: the one that it is for."""

MAX_UNSENT_BYTES = 64 * 2**10
"""Of an answer: while more was not taken the application waits, as it does for a socket."""

END_S = 10.0
"""How long a request whose client is gone may take to end, until it is cut."""

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A request whose body is whole.

    front: the name of the ingress, another one for each. target: path as the client wrote it, without the query.
    replica: that it is for; None: the policy says which.
    """

    front: str
    method: str
    target: bytes
    query: bytes
    headers: Headers
    client: str | None
    body: bytes
    request_id: str
    needs: Needs
    replica: str | None = None

    def scope(self) -> Scope:
        own = HEADER.lower().encode()
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": unquote(self.target.decode("ascii")),
            "raw_path": self.target,
            "root_path": "",
            "query_string": self.query,
            "headers": [*(each for each in self.headers if each[0] != own), (own, self.request_id.encode())],
            "client": None if self.client is None else (self.client, 0),
            "server": None,
            "state": {},
        }


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of an answer."""

    status: int
    headers: Headers

    @property
    def is_stream(self) -> bool:
        """Of events."""
        kind = next((value for name, value in self.headers if name == b"content-type"), b"")
        return kind.startswith(EVENT_STREAM.encode())


class Exchange:
    """Runs an ASGI application for one call. `answer` is its head, and then its body as it comes.

    What is not taken yet goes together as one piece. Leaving `answer` early is the client's disconnect. connections:
    count what outputs of the call take, as the client's, and close it where all take too much.
    """

    def __init__(self, app: ASGIApp, call: Call, connections: Connections, client: str) -> None:
        self._app = app
        self._call = call
        self._connections = connections
        self._client = client
        self._is_read = False
        self._is_over = asyncio.Event()
        self._has_more = asyncio.Event()
        self._is_taken = asyncio.Event()
        self._is_cut = False
        self._head: Head | None = None
        self._pieces: deque[bytes] = deque()
        self._num_unsent = 0

    async def answer(self) -> AsyncIterator[Head | bytes]:
        """Raises what the application raises beside an answer of its own."""
        running = asyncio.ensure_future(self._run())
        running.add_done_callback(lambda _: self._has_more.set())
        is_begun = False
        try:
            while True:
                await self._has_more.wait()
                self._has_more.clear()
                if self._is_cut:
                    for part in self._refusal(is_begun):
                        yield part
                    return
                if self._head is not None:
                    head, self._head = self._head, None
                    is_begun = True
                    yield head
                if self._pieces:
                    piece = b"".join(self._pieces)
                    self._pieces.clear()
                    self._num_unsent = 0
                    self._is_taken.set()
                    self._connections.outputs.touch(self)
                    yield piece
                elif running.done():
                    break
                if running.done():
                    self._has_more.set()
            running.result()
        finally:
            self._end()
            await _ended(running)

    def close_now(self) -> None:
        """For the application its client is gone; the answer ends in an error."""
        self._is_cut = True
        self._end()
        self._has_more.set()

    def _end(self) -> None:
        self._is_over.set()
        self._is_taken.set()

    async def _run(self) -> None:
        self._connections.begin_outputs(self, self._client)
        try:
            await self._app(self._call.scope(), self._receive, self._send)
        finally:
            self._connections.outputs.release(self)

    def _refusal(self, is_begun: bool) -> tuple[Head | bytes, ...]:
        """In the place of what is still to come. An answer that has begun is a stream of whole events."""
        error = EngineOverloadedError(
            "the log probabilities of all requests take too much memory, and most of them are this client's; ask for "
            "fewer, or try again later"
        )
        if is_begun:
            return (error_event(self._call.target.decode("ascii"), error),)
        response = error_response(error)
        return Head(response.status_code, tuple(response.raw_headers)), bytes(response.body)

    async def _receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._call.body, "more_body": False}
        await self._is_over.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._is_over.is_set():
            return
        if message["type"] == "http.response.start":
            self._head = Head(message["status"], tuple((bytes(k), bytes(v)) for k, v in message.get("headers", ())))
            if not self._head.is_stream:
                self._connections.outputs.release(self)  # what is whole has no outputs any longer
        elif message["type"] == "http.response.body" and (body := bytes(message.get("body", b""))):
            self._pieces.append(body)
            self._num_unsent += len(body)
        self._has_more.set()
        if self._num_unsent > MAX_UNSENT_BYTES:
            self._is_taken.clear()
            await self._is_taken.wait()


async def _ended(running: asyncio.Future[None]) -> None:
    """The application ends what it began; it is cut where that takes too long, or this is cancelled."""
    try:
        await asyncio.wait((running,), timeout=END_S)
    finally:
        running.cancel()
        if running.done():
            with contextlib.suppress(BaseException):
                running.exception()
