"""HTTP/1.1 on one connection: httptools behind uvicorn, with bounds on what comes before a body.

The parser itself takes a head of any length and any duration, and gathers it at a cost that grows with its square: one client
could stop all others. Here whatever is neither body nor the end of a head is counted: request line, headers, chunk extensions,
trailers. More of it than `max_header_bytes` at a time is answered with 431, a head that takes longer than `header_timeout_s` with 408.
A head that comes in one piece, as nearly all do, costs a comparison and no timer.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from loraplex.server.api_error import ApiError, error_reply
from loraplex.server.config import ServerConfig

_log = logging.getLogger("loraplex.server")


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. `bounded_http_protocol` makes a class of it with a server's settings."""

    max_header_bytes: int
    header_timeout_s: float

    _num_stuck_bytes = 0  # received since the parser last finished a head or gave a piece of a body
    _is_stuck = True
    _has_begun = False  # a message of which something came and something is missing
    _is_in_head = True  # or between two messages
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._is_stuck = True
        self._num_stuck_bytes += len(data)
        super().data_received(data)
        if not self._is_stuck:
            self._num_stuck_bytes = 0
        elif self._num_stuck_bytes > self.max_header_bytes:
            self._refuse_length()
        if self._header_timer is None and self.timeout_keep_alive_task is None and self._is_head_due():
            self._await_head()

    def _is_head_due(self) -> bool:
        """Whether the client has to end a head, or the rest of a request that was answered before it was read."""
        is_idle = self.cycle is None or self.cycle.response_complete
        return (is_idle or (self._is_in_head and self._has_begun)) and not self.transport.is_closing()

    # ------------------------------------------------------------------------------------------------- the parser's callbacks

    def on_message_begin(self) -> None:
        self._is_in_head = self._has_begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A long head is refused here, too, when all of it came in one piece: before the application sees it."""
        if self._num_stuck_bytes > self.max_header_bytes and self._head_bytes() > self.max_header_bytes:
            self._refuse_length()
            raise ConnectionAbortedError  # the parser stops here
        self._is_stuck = self._is_in_head = False
        self._stop_waiting()
        super().on_headers_complete()
        self.headers = []  # trailers come as headers do: they are no part of the request's

    def on_body(self, body: bytes) -> None:
        self._is_stuck = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_stuck = self._has_begun = False
        self._is_in_head = True
        super().on_message_complete()

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)

    # ------------------------------------------------------------------------------------------------------------- refusals

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError("the request is not valid HTTP/1.1"))

    def _refuse_length(self) -> None:
        limit = self.max_header_bytes
        self._refuse(
            ApiError(f"the request line and headers are longer than {limit} bytes", status=431, code="header_too_long")
        )

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, with an answer unless one has begun or that of an earlier request is still to come."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        _log.info("a connection was closed: %s", error)
        if self._can_answer():
            body = error_reply(error)
            headers = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + headers + body)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _can_answer(self) -> bool:
        if self._is_in_head:
            return self.cycle is None or self.cycle.response_complete
        return not self.cycle.response_started and not self.pipeline

    # ----------------------------------------------------------------------------------------------------------------- time

    def _await_head(self) -> None:
        self._header_timer = self.loop.call_later(self.header_timeout_s, self._time_out)

    def _stop_waiting(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _time_out(self) -> None:
        self._header_timer = None
        if not self._has_begun:
            self.transport.close()
            return
        timeout_s = self.header_timeout_s
        self._refuse(ApiError(f"the headers did not come within {timeout_s:g} s", status=408, code="header_timeout"))


def bounded_http_protocol(config: ServerConfig) -> type[BoundedHttpProtocol]:
    """The protocol with a server's limits: uvicorn makes one of it for each connection."""
    limits = {"max_header_bytes": config.max_header_bytes, "header_timeout_s": config.header_timeout_s}
    return cast("type[BoundedHttpProtocol]", type("BoundedHttpProtocol", (BoundedHttpProtocol,), limits))
