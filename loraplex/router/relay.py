"""A request on its way: to the replica that placement chose, to another one if it was not taken, and the answer back.

A request is sent again only where the replica cannot have begun it: no connection came about, or the answer is a
refusal of RETRIED. One whose replica is lost in the middle is answered with 502 and not sent again: it may be what
ended the replica. 404 for an adapter that a new process is yet to load becomes 503; of a process that has it, it is
passed on, since the client may not see it. For a client that may not know of an adapter (keys.py) as many replicas are
asked as for a name that does not exist. Once an answer begins that is no such refusal, the body is kept no longer. A
stream passes through piece by piece; the next piece is read when the client has taken the last.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loraplex.errors import LoraplexError
from loraplex.logs import request_context
from loraplex.router.connection import UNREADABLE, Answer, LostError, NotSentError
from loraplex.router.exchange import answer_headers, sent_headers, target_of
from loraplex.router.fleet import Fleet
from loraplex.router.keys import Keys
from loraplex.router.metrics import RouterMetrics
from loraplex.router.replica import Replica
from loraplex.routing import Needs
from loraplex.server.api_error import ApiError, clipped, error_response
from loraplex.server.connections import LET_GO
from loraplex.server.streaming import EVENT_STREAM, until_disconnect
from loraplex.server.telemetry.tracing import current_trace
from loraplex.server.wires.native_forms import error_event

_log = logging.getLogger("loraplex.router")

GENERATION_PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/generate",
        "/generate_stream",
        "/",
    }
)
"""After an answer there the replica has the adapter's weights on its device."""

RETRIED = {
    404: {"model_not_found", "adapter_not_found"},
    429: {"engine_overloaded"},
    503: {"engine_shutdown", "too_many_bodies", "too_many_connections"},
}
"""Refusals of a request that has not begun. engine_dead is none: the request may be what ended the engine."""

MAX_REFUSAL_BYTES = 2**16


class Relayed(Response):
    """The answer of a replica to a request, which `body` is the whole body of."""

    def __init__(
        self,
        fleet: Fleet,
        keys: Keys,
        metrics: RouterMetrics,
        request: Request,
        body: bytes,
        needs: Needs,
        max_attempts: int,
    ) -> None:
        super().__init__()
        self._fleet = fleet
        self._keys = keys
        self._metrics = metrics
        self._request = request
        self._body = body
        self._needs = keys.meant(needs)
        self._max_attempts = max_attempts
        self._has_started = False
        if self._needs.adapter is not None and (context := request_context.get()) is not None:
            context.adapter = str(self._needs.adapter)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(self._request, self._relay(send))
        except LoraplexError as error:
            if self._has_started:
                raise ClientDisconnect from error  # the connection is cut: the answer is not whole
            await error_response(error)(scope, receive, send)

    async def _relay(self, send: Send) -> None:
        headers, target = sent_headers(self._request), target_of(self._request)
        tried: list[Replica] = []
        last: LoraplexError | tuple[Answer, bytes] | None = None
        adapter, is_denied = self._needs.adapter, False
        while len(tried) < self._max_attempts:
            replica = self._fleet.choose(self._needs, tried)
            if replica is None and not self._keys.may_know(self._needs):
                replica = self._fleet.choose(replace(self._needs, adapter=None), tried)
            if replica is None:
                break
            if tried:
                self._metrics.count_retry(tried[-1].name)
            tried.append(replica)
            with replica.holding(self._needs):
                listed = replica.names.instance
                try:
                    answer = await replica.send(self._request.method, target, headers, self._body)
                except NotSentError as error:
                    if not error.is_own:
                        replica.fail()
                    last = error
                    continue
                except LostError as error:
                    self._metrics.count_request(replica.name, 502)
                    raise _lost(replica, error) from error
                try:
                    self._metrics.count_request(replica.name, answer.status)
                    if (trace := current_trace.get()) is not None:
                        trace.attributes["loraplex.replica"] = replica.name
                    refusal = await _refusal(answer, replica)
                    if refusal is not None:
                        if answer.status == 404 and adapter is not None:
                            is_denied |= await replica.has_denied(adapter, listed)
                        last = answer, refusal
                        continue
                    if answer.status < 300 and self._request.scope["path"] in GENERATION_PATHS:
                        replica.known.learn_served(self._needs, self._keys.account(self._request.headers))
                        self._keys.learn_served(self._needs)
                    await self._pass_on(answer, replica, send)
                finally:
                    answer.close()
            return
        is_promised = not is_denied and self._fleet.num_open > 0 and self._fleet.is_promised(adapter)
        is_promised = is_promised and self._keys.may_know(self._needs)
        if isinstance(last, tuple) and not (last[0].status == 404 and is_promised):
            await self._send_whole(*last, send)
            return
        if isinstance(last, LoraplexError):
            _log.warning("request %s: %s", self._request.state.request_id, last)
        reason = "no replica can be reached now" if isinstance(last, LoraplexError) else "no replica is healthy"
        if is_promised:
            reason = f"no replica that has adapter {clipped(str(adapter))!r} takes requests now"
        text = f"{reason}; try again later"
        raise ApiError(text, status=503, kind="unavailable_error", code="no_replica")

    def _let_go(self) -> None:
        """Of the body: it is not sent again, and a stream may go on for long."""
        if (let_go := self._request.scope.get(LET_GO)) is not None:
            let_go(len(self._body))
        self._body = b""

    async def _start(self, answer: Answer, send: Send) -> None:
        self._has_started = True
        self._let_go()
        await send({"type": "http.response.start", "status": answer.status, "headers": answer_headers(answer)})

    async def _send_whole(self, answer: Answer, body: bytes, send: Send) -> None:
        await self._start(answer, send)
        await send({"type": "http.response.body", "body": body})

    async def _pass_on(self, answer: Answer, replica: Replica, send: Send) -> None:
        await self._start(answer, send)
        is_stream = answer.header(b"content-type").startswith(EVENT_STREAM.encode())
        tail = b"\n\n"
        try:
            async for piece in answer.pieces():
                tail = (tail + piece[-2:])[-2:]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except LostError as error:
            self._metrics.count_lost(replica.name)
            lost = _lost(replica, error)
            _log.warning("request %s: %s", self._request.state.request_id, lost.message)
            if not is_stream or tail != b"\n\n":
                raise lost from error
            event = error_event(self._request.scope["path"], lost)
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _refusal(answer: Answer, replica: Replica) -> bytes | None:
    """The body of an answer after which the request may go elsewhere; None for any other, which is not read."""
    codes = RETRIED.get(answer.status)
    length = answer.header(b"content-length")
    if codes is None or not length.isdigit() or int(length[:20]) > MAX_REFUSAL_BYTES:
        return None
    try:
        body = await answer.peek(MAX_REFUSAL_BYTES)
    except LostError as error:
        raise _lost(replica, error) from error
    return body if _code_of(body) in codes else None


class _Error(msgspec.Struct):
    code: str | None = None


class _ErrorReply(msgspec.Struct):
    """LoRAX's has a text as its error, and the code beside it."""

    error: _Error | str
    code: str | None = None


def _code_of(body: bytes) -> str | None:
    try:
        reply = msgspec.json.decode(body, type=_ErrorReply)
    except UNREADABLE:
        return None
    return reply.code if isinstance(reply.error, str) else reply.error.code


def _lost(replica: Replica, error: LostError) -> ApiError:
    reason = error.message
    text = f"the replica of this request, {replica.name}, is no longer responding ({reason}); send the request again"
    return ApiError(text, status=502, kind="server_error", code="replica_lost")
