"""Errors of Anthropic's routes: `{"type": "error", "error": {"type", "message"}}`, with its names for statuses.

Whatever refuses a request to these paths, a key, a guard or a route, says so in the form of this server; it becomes
Anthropic's here, on its way out. `param` and `code` stay beside what Anthropic has.
"""

from __future__ import annotations

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.server.api_error import ErrorBody, ErrorReply, error_body, status_of
from loraplex.server.request_id import HEADER
from loraplex.server.streaming import sse

PATH = "/v1/messages"
MAX_ERROR_BYTES = 2**17
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: ErrorBody
    request_id: str | None = None


def is_anthropic(path: str) -> bool:
    return path.rstrip("/") == PATH or path.startswith(f"{PATH}/")


def anthropic_error(status: int, body: ErrorBody, request_id: str | None = None) -> bytes:
    """Of an answer with this status."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode(AnthropicError(msgspec.structs.replace(body, type=kind), request_id))


def anthropic_event(error: Exception) -> bytes:
    """In the middle of a stream."""
    return b"event: error\n" + sse(anthropic_error(status_of(error), error_body(error)))


class AnthropicErrors:
    """Errors that leave Anthropic's routes have its form. Answers of them name the request in its header, too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_anthropic(scope["path"]):
            await self._app(scope, receive, send)
            return
        held: Message | None = None

        async def send_in_form(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                request_id = headers.get(HEADER)
                if request_id is not None:
                    headers["request-id"] = request_id
                is_error = message["status"] >= 400 and headers.get("content-type", "").startswith("application/json")
                if is_error:
                    held = message
                    return
            elif held is not None:
                start, held = held, None
                message = _rewritten(start, message)
                await send(start)
            await send(message)

        await self._app(scope, receive, send_in_form)


def _rewritten(start: Message, body: Message) -> Message:
    """The body in Anthropic's form; as it is, where it is more than an error of this server."""
    data = body.get("body", b"")
    if body.get("more_body") or len(data) > MAX_ERROR_BYTES:
        return body
    try:
        reply = msgspec.json.decode(data, type=ErrorReply)
    except (msgspec.MsgspecError, UnicodeError):
        return body
    headers = MutableHeaders(scope=start)
    data = anthropic_error(start["status"], reply.error, headers.get(HEADER))
    headers["content-length"] = str(len(data))
    return {**body, "body": data}
