"""HTTP/1.1 on one connection: httptools behind uvicorn, with bounds on what a client sends and on how long it takes.

The parser itself takes a head of any length and any duration, and gathers it at a cost that grows with its square: one
client could stop all others. Here whatever is neither body nor the end of a head is counted: request line, headers,
chunk extensions, trailers. More of it than `max_header_bytes` at a time is answered with 431, a head that takes longer
than `header_timeout_s` with 408. A head has at most MAX_HEADERS headers, and a body comes in chunks that are not all
tiny (MAX_TINY_CHUNKS): each costs as much as many bytes.

A body has `body_timeout_s` from its head to its end; a longer one must bring `min_transfer_rate` in each such time.
Bodies of all connections together are bounded by `Connections`, in shares. A request without a valid key
(`server_admitted`) has no body here: it is dropped as it comes. An answer that begins before its request's body has
come is the last one of its connection.

What the client does not read has the same rule with `send_timeout_s`. An answer of any size is written in pieces, each
when the last one is gone, and the next request of the connection begins when the answer before it is gone.

An `Upgrade` is ignored, as HTTP allows. The parser would take what follows for another protocol's, so it is given the
same head once more, without that header.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import httptools
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from loraplex.errors import EngineShutdownError, LoraplexError
from loraplex.server.api_error import ApiError, error_response
from loraplex.server.auth import OPEN_PATHS, Caller
from loraplex.server.config import ServerConfig
from loraplex.server.connections import LET_GO, Connections, Refusal, Slot, account_of, forwarded_for, too_many_bodies
from loraplex.server.pacing import PARSED_BYTES, SHORT_READ_BYTES, PacedFlow, SmallReads, unsent_bytes
from loraplex.server.request_id import RequestIdMiddleware, closing_answer
from loraplex.server.urls import fault_of_head

MAX_PIPELINED = 32
"""Requests that a client may send before the answer to the first."""

MAX_HEADERS = 128
"""Of one request, and of its trailers; Apache allows 100. Each is read by every middleware."""

MAX_TINY_CHUNKS = 4096
MIN_CHUNK_BYTES = 64
"""A body may have MAX_TINY_CHUNKS chunks, and one more for each MIN_CHUNK_BYTES of it."""

PIECE_BYTES = 64 * 2**10
"""Of an answer: what is written at a time."""

LATE_S = 0.01  # uvloop calls the timers that are due before it reads: after so long it has read what had come

LINGER_S, MAX_LINGERS, MAX_LINGER_BYTES = 1.0, 5, 32 * 2**20
"""What a refused client still sends is dropped until it is silent so long, at most so many times and so much: a reset
would overtake the answer."""


@dataclass(slots=True, eq=False)
class _Incoming:
    """One request: what came of its body, and what it counts for in `Connections`.

    client: whose it is, among those that share memory; None: its body is not kept. num_chunks: that came of its body.
    num_held: bytes of its body, once it runs. num_waiting: bytes of its head and body while it waits for the answer to
    an earlier one. is_last: its answer closes the connection.
    """

    client: str | None
    is_waiting: bool
    cycle: RequestResponseCycle | None = None
    num_received: int = 0
    num_chunks: int = 0
    num_held: int = 0
    num_waiting: int = 0
    is_last: bool = False
    is_over: bool = False


class BoundedHttpProtocol(HttpToolsProtocol, SmallReads):
    """One connection. `bounded_http_protocol` makes a class of it with a server's settings."""

    server_settings: ServerConfig
    server_connections: Connections
    server_admitted: Callable[[Headers], Caller | None]

    slot: Slot | None = None
    _num_stuck_bytes = 0  # received since the parser last finished a head or gave a piece of a body
    _is_stuck = True
    _has_begun = False  # a message of which something came and something is missing
    _is_in_head = True  # or between two messages
    _is_upgrade = False
    _is_refused = False  # what comes from now on is dropped
    _is_busy = False  # with a request that is admitted
    _num_dropped = 0
    _incoming: _Incoming  # the request whose body comes
    _running: _Incoming | None = None
    _header_timer: asyncio.TimerHandle | None = None
    _body_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._held: set[_Incoming] = set()
        self._unparsed = bytearray()
        self._chunks: list[bytes] = []  # of the body, since the parser was fed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: PacedFlow = PacedFlow(transport)
        transport.set_write_buffer_limits(high=1, low=0)  # paused means: the client has not read all of it
        if self.slot is not None:
            self.slot.end_handshake()
        self.server_connections.set_new(self, "" if self.slot is None else self.slot.source)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Thousands may be lost at the same moment."""
        self.server_connections.disown(self)  # at once: its tenant may open the next one now
        self._unparsed.clear()
        self._stop_waiting()
        self._unset_keepalive_if_required()  # uvicorn does not where it was reset: the timer would keep all of it
        for timer in (self._send_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        if self._running is not None and self._running.cycle is not None:
            self._running.cycle.disconnected = True  # nothing is written any more
        self._run_in_slices(partial(self._forget, exc), is_short=True)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Closed as `connection_lost` is; over TLS the transport closes itself."""
        if self.scheme == "https":
            return False
        self._run_in_slices(self.transport.close, is_short=True)
        return True

    def _forget(self, exc: Exception | None) -> None:
        self._disconnect(self._running)
        super().connection_lost(exc)
        for incoming in tuple(self._held):
            if incoming is not self._running:  # it never began to run
                self._release(incoming)
        self.server_connections.set_busy(self)
        if self.slot is not None:
            self.slot.release()

    def close_now(self) -> None:
        """For another connection. Nothing is unsent but an answer that is not read; a client of TLS need not agree."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._num_dropped += len(data)
            if self._num_dropped > MAX_LINGER_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        is_behind = bool(self._unparsed)
        self._unparsed += data
        if not is_behind:
            self._run_in_slices(self._parse_piece, len(data) <= SHORT_READ_BYTES)
            self.flow.set_behind(bool(self._unparsed))

    def _run_in_slices(self, work: Callable[[], None], is_short: bool) -> None:
        self.server_connections.slices.run(work, is_short, "" if self.slot is None else self.slot.source)

    def _parse_piece(self) -> None:
        """Some of what came; the rest when other connections have had their time. Meanwhile no more is read."""
        piece = bytes(self._unparsed[:PARSED_BYTES])
        del self._unparsed[:PARSED_BYTES]
        if piece and not self._is_refused:
            self._receive(piece)
        if self._is_refused:
            self._unparsed.clear()
        self.flow.set_behind(bool(self._unparsed))
        if self._unparsed:
            self._run_in_slices(self._parse_piece, is_short=False)

    def _receive(self, data: bytes) -> None:
        self._is_stuck = True
        self._num_stuck_bytes += len(data)
        if not self._parse(data):
            return
        if not self._is_stuck:
            self._num_stuck_bytes = 0
        elif self._num_stuck_bytes > self.server_settings.max_header_bytes:
            self._refuse_length()
            return
        if self._header_timer is None and self.timeout_keep_alive_task is None and self._is_head_due():
            self._await_head()
        if self._body_timer is None and self._has_begun and not self._is_in_head:
            self._await_body()

    def _parse(self, data: bytes) -> bool:
        """Whether the connection is still in use."""
        while data and not self._is_refused:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as stop:
                data = self._head_without_upgrade() + data[stop.args[0] :]
            except httptools.HttpParserError:
                self._refuse(Refusal.NOT_HTTP, ApiError("the request is not valid HTTP/1.1"))
        self._keep_chunks()
        return not self._is_refused

    def _head_without_upgrade(self) -> bytes:
        """Of the request whose head has just been read, for a parser that has seen nothing of it."""
        first = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        lines = [first, *(b"%s: %s" % each for each in self.headers if each[0] != b"upgrade")]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._is_upgrade = False
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _is_head_due(self) -> bool:
        """Whether the client has to end a head."""
        is_idle = self.cycle is None or self.cycle.response_complete
        return (is_idle or (self._is_in_head and self._has_begun)) and not self.transport.is_closing()

    # ------------------------------------------------------------------------------------------- the parser's callbacks

    def on_message_begin(self) -> None:
        self._is_in_head = self._has_begun = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            text = f"a request has at most {MAX_HEADERS} headers"
            self._refuse(Refusal.NUM_HEADERS, ApiError(text, status=431, code="too_many_headers"))
            raise ConnectionAbortedError  # the parser stops here
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """What is wrong with a head is said here: before the application sees it."""
        limit = self.server_settings.max_header_bytes
        if self._is_refused:
            raise ConnectionAbortedError  # the parser stops here
        if self._num_stuck_bytes > limit and self._head_bytes() > limit:
            self._refuse_length()
            raise ConnectionAbortedError
        if fault := fault_of_head(self.parser.get_http_version(), self.parser.get_method(), self.url, self.headers):
            self._refuse(Refusal.NOT_HTTP, ApiError(fault))
            raise ConnectionAbortedError
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(Refusal.PIPELINE, ApiError(f"more than {MAX_PIPELINED} requests wait on one connection"))
            raise ConnectionAbortedError
        if self.parser.should_upgrade():
            self._is_upgrade = True  # the parser stops after this head
            return
        caller = self.server_admitted(Headers(raw=self.headers))
        if (error := self.server_connections.claim(self, caller)) is not None:
            self._refuse(Refusal.TENANT, error)
            raise ConnectionAbortedError
        self._begin_request(caller)
        if self._incoming.is_waiting and not self._hold(self._incoming, self._head_bytes()):
            raise ConnectionAbortedError
        self._is_stuck = self._is_in_head = False
        self._stop_waiting()
        self.headers = []  # trailers come as headers do: they are no part of the request's

    def _begin_request(self, caller: Caller | None) -> None:
        is_waiting = self.flow.write_paused or not (self.cycle is None or self.cycle.response_complete)
        client = account_of(caller, "" if self.client is None else self.client[0], self.headers)
        self._incoming = incoming = _Incoming(client, is_waiting)
        if incoming.client is not None:
            if is_waiting:
                self.server_connections.set_busy(self)
            else:
                self.server_connections.set_receiving(self, incoming.client)
            self._is_busy = True
        app: Any = self.app
        self.app = cast(Any, partial(self._run, app, incoming))
        try:
            super().on_headers_complete()
        finally:
            self.app = app
        incoming.cycle = self.cycle

    async def _run(self, app: ASGIApp, incoming: _Incoming, scope: Scope, receive: Receive, send: Send) -> None:
        self._running = incoming
        if self.client is not None and (address := forwarded_for(self.client[0], scope["headers"])):
            scope["client"] = (address, 0)
        connections = self.server_connections
        try:
            client = None if scope["path"] in OPEN_PATHS else incoming.client
            await connections.turn(client, scope["client"], lambda: not self.transport.is_closing())
            if self.flow.write_paused:
                self.flow.pause_reading()
                await self.flow.drain()
                if self.transport.is_closing():
                    self._disconnect(incoming)
                    return
            if self._is_refused:
                self._disconnect(incoming)  # there is no way back to the client
                return
            if incoming.is_waiting and not self._end_waiting(incoming):
                app = RequestIdMiddleware(error_response(too_many_bodies()))
            scope[LET_GO] = partial(self._let_go, incoming)
            connections.begin_outputs(self, incoming.client or "")
            await app(scope, partial(self._receive_message, receive), partial(self._send, incoming, send))
        except ConnectionAbortedError:  # its client was gone when its turn came
            self._disconnect(incoming)
        except asyncio.CancelledError:
            self._cut(incoming)
        finally:
            scope.pop(LET_GO, None)  # the connection has the scope, and this has the connection
            connections.outputs.release(self)
            self._release(incoming)
            if incoming.cycle is not None:
                incoming.cycle.body = bytearray()  # what the request left of it counts no longer

    async def _receive_message(self, receive: Receive) -> Message:
        message = await receive()
        if message["type"] == "http.disconnect":
            await self.server_connections.ends.next()  # what the request began is ended now
        return message

    async def _send(self, incoming: _Incoming, send: Send, message: Message) -> None:
        assert incoming.cycle is not None
        if message["type"] == "http.response.start" and incoming is self._incoming and not self._is_in_head:
            incoming.is_last = True
            await send({**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]})
            incoming.cycle.keep_alive = True  # else uvicorn closes the connection, and the client may miss the answer
            return
        rest = whole = memoryview(message.get("body", b""))
        try:
            while len(rest) > PIECE_BYTES and not incoming.cycle.disconnected:
                self.server_connections.answers.hold(self, incoming.client or "", len(whole))
                await send({"type": message["type"], "body": rest[:PIECE_BYTES], "more_body": True})
                await asyncio.sleep(0)  # others have their piece
                rest = rest[PIECE_BYTES:]
        finally:
            self.server_connections.answers.release(self)
        await send({**message, "body": rest} if rest.nbytes < len(message.get("body", b"")) else message)
        self.server_connections.outputs.touch(self)

    def _hold(self, incoming: _Incoming, num_bytes: int) -> bool:
        """Count `num_bytes` more of a request; refuse it, and say False, where there is no room for them."""
        connections, client = self.server_connections, incoming.client or ""
        self._held.add(incoming)
        if incoming.is_waiting:
            if not connections.hold_waiting(client, num_bytes, incoming.num_waiting):
                text = "the requests that wait behind others on their connections are too large together"
                self._refuse(Refusal.PIPELINE, ApiError(text, status=503, kind="overloaded_error"))
                return False
            incoming.num_waiting += num_bytes
            return True
        if not connections.hold_body(client, num_bytes, incoming.num_held):
            self._refuse(Refusal.BODY_MEMORY, too_many_bodies())
            return False
        incoming.num_held += num_bytes
        return True

    def _let_go(self, incoming: _Incoming, num_bytes: int) -> None:
        num_bytes = min(num_bytes, incoming.num_held)
        self.server_connections.release_body(incoming.client or "", num_bytes)
        incoming.num_held -= num_bytes

    def _end_waiting(self, incoming: _Incoming) -> bool:
        """Its body counts among the bodies from now on. False where these have no room for it: then it is dropped."""
        assert incoming.cycle is not None
        self._release(incoming)
        incoming.is_waiting = incoming.is_over = False
        num_bytes = len(incoming.cycle.body)
        if not self.server_connections.hold_body(incoming.client or "", num_bytes, 0):
            incoming.is_over = True
            incoming.cycle.body.clear()
            self._count_refusal(Refusal.BODY_MEMORY, too_many_bodies().message)
            return False
        incoming.num_held = num_bytes
        return True

    def _cut(self, incoming: _Incoming) -> None:
        """The server ends and waits no longer: an answer that has not begun says so, another one breaks off."""
        if incoming.cycle is not None and not incoming.cycle.response_started and not self.transport.is_closing():
            error = EngineShutdownError("the server is shutting down, and the request did not end in time")
            self.transport.write(closing_answer(error, incoming.cycle.scope["headers"]))
        self._disconnect(incoming)
        self.transport.close()

    def _release(self, incoming: _Incoming) -> None:
        client = incoming.client or ""
        self.server_connections.release_body(client, incoming.num_held)
        self.server_connections.release_waiting(client, incoming.num_waiting)
        self._held.discard(incoming)
        incoming.num_held = incoming.num_waiting = 0
        incoming.is_over = True

    def on_body(self, body: bytes) -> None:
        self._is_stuck = False
        incoming = self._incoming
        incoming.num_received += len(body)
        incoming.num_chunks += 1
        if incoming.num_chunks > MAX_TINY_CHUNKS + incoming.num_received // MIN_CHUNK_BYTES:
            text = (
                f"a long body comes in chunks of {MIN_CHUNK_BYTES} bytes or more: send larger ones, or Content-Length"
            )
            self._refuse(Refusal.CHUNKS, ApiError(text, code="chunks_too_small"))
            raise ConnectionAbortedError
        if incoming.client is not None:
            self._chunks.append(body)

    def _keep_chunks(self) -> None:
        """One piece of the body of all that came at once."""
        if not self._chunks:
            return
        body, incoming = b"".join(self._chunks), self._incoming
        self._chunks.clear()
        is_dropped = self._is_refused or incoming.is_over or self.cycle.response_complete
        if not is_dropped and self._hold(incoming, len(body)):
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._keep_chunks()
        self._is_stuck = self._has_begun = False
        self._is_in_head = True
        self._stop_waiting_for_body()
        if self._is_busy:
            self.server_connections.set_busy(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._running is not None and self._running.is_last:
            self.server_state.total_requests += 1
            if not self.transport.is_closing():
                self._close_softly()
            return
        super().on_response_complete()
        self._note_idle()

    def _note_idle(self) -> None:
        """All is answered and sent, and no body comes. Without admitted requests it is idle from its begin."""
        is_answered = self.cycle.response_complete and not self.pipeline
        is_sent = not (self.flow.write_paused or self.transport.is_closing())
        if self._is_busy and is_answered and self._is_in_head and is_sent:
            self._set_idle()

    def _set_idle(self) -> None:
        self._is_busy = False
        self.server_connections.set_idle(self)

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)

    # --------------------------------------------------------------------------------------------------------- refusals

    def _refuse_length(self) -> None:
        text = f"the request line and headers are longer than {self.server_settings.max_header_bytes} bytes"
        self._refuse(Refusal.HEADER_LENGTH, ApiError(text, status=431, code="header_too_long"))

    def _refuse(self, reason: Refusal, error: LoraplexError) -> None:
        """Close the connection, with an answer unless one has begun or that of an earlier request is still to come."""
        self._stop_waiting()
        if self._is_refused or self.transport.is_closing():
            return
        self._count_refusal(reason, error.message)
        if self._can_answer():
            self.transport.write(closing_answer(error, () if self._is_in_head else self.scope["headers"]))
        self._disconnect(self._running)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._close_softly()

    def _count_refusal(self, reason: Refusal, text: str) -> None:
        self.server_connections.refuse(reason, text, self.client[0] if self.client else "")

    def _close_softly(self) -> None:
        """Close, but first read for a moment what the client still sends. Another connection may have its place."""
        self._is_refused = True
        self._stop_waiting()
        self._unset_keepalive_if_required()
        if self._is_busy:
            self._set_idle()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._linger(MAX_LINGERS)

    def _linger(self, num_left: int) -> None:
        check = partial(self._check_silence, self._num_dropped, num_left - 1)
        self._linger_timer = self.loop.call_later(LINGER_S, check)

    def _check_silence(self, num_dropped: int, num_left: int) -> None:
        if num_left and self._num_dropped > num_dropped:
            self._linger(num_left)
        else:
            self.transport.close()

    def _disconnect(self, incoming: _Incoming | None) -> None:
        """Tell a running request that its client is gone. uvicorn tells the latest one, which may not run yet."""
        if incoming is not None and incoming.cycle is not None and not incoming.cycle.response_complete:
            incoming.cycle.disconnected = True
            incoming.cycle.message_event.set()

    def _can_answer(self) -> bool:
        if self._is_in_head:
            return self.cycle is None or self.cycle.response_complete
        return not self.cycle.response_started and not self.pipeline

    # ------------------------------------------------------------------------------------------------------------- time

    def _await_head(self) -> None:
        self._header_timer = self.loop.call_later(self.server_settings.header_timeout_s, self._time_out)

    def _stop_waiting(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        self._stop_waiting_for_body()

    def _time_out(self, is_second: bool = False) -> None:
        self._header_timer = None
        if self._has_begun:
            text = f"the headers did not come within {self.server_settings.header_timeout_s:g} s"
            self._refuse(Refusal.HEADER_TIME, ApiError(text, status=408, code="header_timeout"))
        elif self._unparsed or not is_second:  # it may have come, and the loop was late
            self._header_timer = self.loop.call_later(LATE_S, self._time_out, True)
        else:
            self.transport.close()

    def _await_body(self) -> None:
        check = partial(self._check_body, self._incoming, self._incoming.num_received)
        self._body_timer = self.loop.call_later(self.server_settings.body_timeout_s, check)

    def _stop_waiting_for_body(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _check_body(self, incoming: _Incoming, num_received: int) -> None:
        """A body may go on for what it brought; one that this server does not read now has all the time."""
        settings = self.server_settings
        self._body_timer = None
        if self.flow.read_paused or self._is_enough(incoming.num_received - num_received, settings.body_timeout_s):
            self._await_body()
            return
        text = f"the body did not come within {settings.body_timeout_s:g} s, nor at {settings.min_transfer_rate} byte/s"
        self._refuse(Refusal.BODY_TIME, ApiError(text, status=408, code="body_timeout"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        if self.cycle is not None:
            self._note_idle()

    def _await_reader(self) -> None:
        check = partial(self._check_reader, unsent_bytes(self.transport))
        self._send_timer = self.loop.call_later(self.server_settings.send_timeout_s, check)

    def _check_reader(self, num_unsent: int) -> None:
        settings = self.server_settings
        self._send_timer = None
        if self._is_enough(num_unsent - unsent_bytes(self.transport), settings.send_timeout_s):
            self._await_reader()
            return
        text = f"its client did not read the answer within {settings.send_timeout_s:g} s"
        self._count_refusal(Refusal.SEND_TIME, text)
        self.transport.abort()

    def _is_enough(self, num_bytes: int, seconds: float) -> bool:
        return num_bytes >= self.server_settings.min_transfer_rate * seconds


def bounded_http_protocol(
    config: ServerConfig, connections: Connections, admitted: Callable[[Headers], Caller | None]
) -> type[BoundedHttpProtocol]:
    """The protocol with a server's limits: uvicorn makes one for each connection. `admitted`: whose bodies are read."""
    members = {"server_settings": config, "server_connections": connections, "server_admitted": staticmethod(admitted)}
    members["read_buffer"] = connections.read_buffer
    return cast("type[BoundedHttpProtocol]", type("BoundedHttpProtocol", (BoundedHttpProtocol,), members))
