"""Every response carries `X-Request-Id`: the client's own when it is usable, else a new one. The last guard: an
unforeseen error is answered here, so that no request stays without an answer.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from loraplex.errors import LoraplexError, without_keys
from loraplex.logs import RequestContext, request_context
from loraplex.server.api_error import ApiError, error_reply, error_response, status_of
from loraplex.server.browser_guard import BROWSER_HEADERS

HEADER = "X-Request-Id"
USABLE = re.compile(r"[A-Za-z0-9._:\-]{1,128}")

_log = logging.getLogger("loraplex.server")


def new_request_id() -> str:
    return uuid.uuid4().hex


def request_id_of(given: str) -> str:
    """What a client sent, if it is usable: it stands in logs, so a key is not."""
    return given if USABLE.fullmatch(given) and without_keys(given) == given else new_request_id()


def checked_id(given: str, param: str) -> str:
    """An id in a body. Raises ApiError for one with a key in it."""
    if without_keys(given) == given:
        return given
    raise ApiError(f"{param} has the form of a key, and ids stand in logs: send another one", param=param)


class RequestIdMiddleware:
    """Puts `request_id` into the scope's state, and into the response the header and those that browsers obey."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(Headers(scope=scope).get(HEADER, ""))
        scope.setdefault("state", {})["request_id"] = request_id
        outside = request_context.set(RequestContext(request_id))
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                headers = MutableHeaders(scope=message)
                headers[HEADER] = request_id
                for name, value in BROWSER_HEADERS:
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            _log.debug("request %s: the client went away", request_id)
        except Exception as error:
            _log.error("request %s failed", request_id, exc_info=error)
            if has_started:
                raise
            await error_response(error)(scope, receive, send_with_id)
        finally:
            request_context.reset(outside)


def closing_answer(error: LoraplexError, headers: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """An answer of this server on a connection that is closed after it, as bytes; headers: of the request, in lower
    case, where it has a head."""
    given = next((value for name, value in headers if name == b"x-request-id"), b"")
    body, request_id = error_reply(error), request_id_of(given.decode("latin-1"))
    lines = ["content-type: application/json", f"content-length: {len(body)}", f"x-request-id: {request_id}"]
    lines += ["retry-after: 1"] if status_of(error) in (429, 503) else []
    head = "\r\n".join([*lines, "connection: close", "", ""])
    return STATUS_LINE[status_of(error)] + head.encode() + body
