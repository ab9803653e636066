"""HTTP/1.1 to a replica: connections that are kept for the next request, and the answer as it comes.

httptools reads what comes, some of it in a turn of the event loop: what one replica sends, in however small chunks,
does not hold up the requests of others. An answer is bounded in its head and in its silence, and no more of it is read
than its reader takes. Answers to the router's own polls are decoded whole (`watching.py`): a replica that fills their
bounds does hold others up, so replicas are to be the operator's. A connection costs the same beside ten others or ten
thousand.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import httpx
import msgspec

from loraplex.errors import LoraplexError
from loraplex.server.listener import EXHAUSTED
from loraplex.server.pacing import READ_BYTES, SmallReads, Turns

KEEP_ALIVE_S = 5.0
"""Shorter than a server's: so that no request is sent on a connection that its server is closing."""

MAX_IDLE_CONNECTIONS = 64
MAX_HEAD_BYTES = 2**16
MAX_UNREAD_BYTES = 2**16
"""Of an answer, and one read more."""

PIECES_A_TURN = 4
"""Of the answers of one replica, their beginnings included: thousands of streams may go on at the same moment."""

UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeError)
"""What the decoder raises for an answer of another form."""

_TARGET = re.compile(rb"[!-~]+")
_VALUE = re.compile(rb"[\t -~\x80-\xff]*")

Headers = Sequence[tuple[bytes, bytes]]


class NotSentError(LoraplexError):
    """The replica cannot be reached: it has seen nothing of the request. is_own: this process has no room for it."""

    is_own = False


class LostError(LoraplexError):
    """The replica stopped answering: it may have seen the request."""


class Answer:
    """Its head has come. `close` it: where all was read, its connection is kept. It has the connection until then."""

    def __init__(self, connection: _Connection, status: int, headers: Headers, silence_s: float, turns: Turns) -> None:
        self.status = status
        self.headers = headers
        self._connection: _Connection | None = connection
        self._silence_s = silence_s
        self._turns = turns
        self._unread: bytes | None = None

    def header(self, name: bytes) -> bytes:
        """The first one of this name, or nothing."""
        return next((value for each, value in self.headers if each == name), b"")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Raises LostError where it breaks off, or is silent for too long."""
        if self._unread is not None:
            yield self._unread
            return
        while self._connection is not None and (piece := await self._connection.piece(self._silence_s)):
            yield piece
            await self._turns.next()

    async def read(self, max_bytes: int) -> bytes:
        """All of it, and it is closed. Raises LostError where it breaks off or is longer."""
        body = bytearray()
        assert self._connection is not None, "it was closed"
        name = self._connection.name
        try:
            async for piece in self.pieces():
                body += piece
                if len(body) > max_bytes:
                    raise LostError(f"{name} answered with more than {max_bytes} bytes")
        finally:
            self.close()
        return bytes(body)

    async def peek(self, max_bytes: int) -> bytes:
        """The same, and `pieces` has it once more."""
        self._unread = await self.read(max_bytes)
        return self._unread

    def close(self) -> None:
        """It may be called again: the connection may have the next request by then."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end()


class Line:
    """The connections to one replica, each for a request at a time. `name` is the subject of errors."""

    def __init__(self, name: str, url: str, connect_timeout_s: float) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._name = name
        self._authority = parts.netloc.encode("ascii")
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._tls: ssl.SSLContext | None = None
        self._is_tls = parts.scheme == "https"
        self._connect_timeout_s = connect_timeout_s
        self._turns = Turns(PIECES_A_TURN)
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._idle: deque[_Connection] = deque()

    def close(self) -> None:
        for connection in tuple(self._idle):
            connection.abort()

    async def send(self, method: str, target: bytes, headers: Headers, body: bytes, silence_s: float) -> Answer:
        """The answer as soon as it begins. Raises NotSentError, LostError."""
        head = self._head(method, target, headers, len(body))
        connection = self._kept() or await self._connect()
        try:
            status, answered = await connection.ask(method, head, body, silence_s)
            await self._turns.next()
        except BaseException:
            connection.abort()
            raise
        return Answer(connection, status, answered, silence_s, self._turns)

    def _kept(self) -> _Connection | None:
        """The idle one that was used last. Those that replicas have closed leave a turn of the event loop later."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closing:
                return connection
        return None

    def _head(self, method: str, target: bytes, headers: Headers, num_bytes: int) -> bytes:
        if not _TARGET.fullmatch(target) or not all(_VALUE.fullmatch(value) for _, value in headers):
            raise LostError(f"{self._name} cannot be sent this request: its head has other characters than HTTP's")
        lines = [b"%s %s HTTP/1.1" % (method.encode(), target), b"host: " + self._authority]
        lines += [b"%s: %s" % each for each in headers]
        if num_bytes or method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d" % num_bytes)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if self._is_tls and self._tls is None:
            self._tls = httpx.create_ssl_context(trust_env=False)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._name, self._buffer, self._idle), self._host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            lost = NotSentError(f"{self._name} cannot be reached: {_reason(error)}")
            lost.is_own = isinstance(error, OSError) and error.errno in EXHAUSTED
            raise lost from error
        return connection


class _Connection(SmallReads):
    """Idle, or with one request. `idle` is where it waits for the next one."""

    def __init__(self, name: str, buffer: memoryview, idle: deque[_Connection]) -> None:
        self.name = name
        self.read_buffer = buffer
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._parser: Any = None
        self._is_writable = True
        self._begin("")

    def _begin(self, method: str) -> None:
        self._is_head_request = method == "HEAD"
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._num_head_bytes = 0
        self._pieces: deque[bytes] = deque()
        self._chunks: list[bytes] = []
        self._num_unread = 0
        self._error: LostError | None = None
        self._has_head = self._is_whole = self._is_reusable = False

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    # ------------------------------------------------------------------------------------------------------ one request

    async def ask(self, method: str, head: bytes, body: bytes, silence_s: float) -> tuple[int, Headers]:
        if self._expiry is not None:
            self._expiry.cancel()
        self._begin(method)
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(head)
        if body:
            self._transport.write(body)
        await self._until(lambda: self._is_writable or self._has_head, silence_s)
        await self._until(lambda: self._has_head, silence_s)
        return self._status, self._headers

    async def piece(self, silence_s: float) -> bytes:
        """Of the body, what came at once; b"": that was all."""
        await self._until(lambda: bool(self._pieces) or self._is_whole, silence_s)
        if not self._pieces:
            return b""
        piece = self._pieces.popleft()
        self._num_unread -= len(piece)
        if self._num_unread <= MAX_UNREAD_BYTES and not self._transport.is_closing():
            self._transport.resume_reading()
        return piece

    def end(self) -> None:
        """The request is over."""
        self._parser = None
        is_usable = self._is_reusable and self._is_whole and not self.is_closing
        if not is_usable or len(self._idle) >= MAX_IDLE_CONNECTIONS:
            self.abort()
            return
        self._transport.resume_reading()
        self._idle.append(self)
        self._expiry = self._loop.call_later(KEEP_ALIVE_S, self.abort)

    def abort(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        if self in self._idle:
            self._idle.remove(self)
        self._transport.abort()

    async def _until(self, condition: Callable[[], bool], silence_s: float) -> None:
        while not condition():
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            try:
                async with asyncio.timeout(silence_s):
                    await self._waiter
            except TimeoutError:
                raise LostError(f"{self.name} was silent for {silence_s:g} s") from None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, reason: str) -> None:
        if self._error is None and not self._is_whole:
            where = "within its answer" if self._has_head else "before it answered"
            self._error = LostError(f"{self.name} stopped {where}: {reason}")
        self._is_reusable = False
        self._wake()

    # ----------------------------------------------------------------------------------------------- what the loop says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._parser is None:
            self.abort()
            return
        lengths = {name for name, _ in self._headers} & {b"content-length", b"transfer-encoding"}
        if self._has_head and exc is None and not lengths:
            self._is_whole = True  # it has no length: its end is the connection's
        self._fail("the connection was closed" if exc is None else _reason(exc))

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self._parser is None:  # of an idle connection
            self.abort()
            return
        had_head = self._has_head
        if not had_head:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"its answer is not HTTP/1.1: {error}")
        if not self._has_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self._fail(f"the head of its answer is longer than {MAX_HEAD_BYTES} bytes")
        if self._chunks:
            self._pieces.append(b"".join(self._chunks))
            self._num_unread += len(self._pieces[-1])
            self._chunks.clear()
        if self._num_unread > MAX_UNREAD_BYTES or self._error is not None:
            self._transport.pause_reading()
        if self._pieces or self._is_whole or self._has_head != had_head:  # the endless extension of a chunk is silence
            self._wake()

    # -------------------------------------------------------------------------------------------- what the parser says

    def on_message_begin(self) -> None:
        if self._has_head:  # bytes behind the answer
            self._is_reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._has_head:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            self._headers.clear()
            return
        if not 200 <= status < 600 or (300 <= status < 400 and status != 304):  # no server of ours redirects
            self._fail(f"its status is {status}")
            return
        self._status, self._has_head = status, True
        self._is_whole = self._is_head_request
        self._is_reusable = not self._is_head_request and self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if not self._is_whole:
            self._chunks.append(body)

    def on_message_complete(self) -> None:
        self._is_whole = self._has_head


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
