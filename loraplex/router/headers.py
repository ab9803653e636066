"""What passes of the heads of requests and answers, and what ends at the router."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response

from loraplex.router.connection import Answer, Headers
from loraplex.server.request_id import HEADER

SENT_HEADERS = frozenset(
    {b"accept", b"authorization", b"content-type", b"last-event-id", b"traceparent", b"tracestate", b"user-agent"}
)
"""Of a client's headers; all others end here: hop-by-hop ones, cookies, what pages and proxies add."""

DROPPED_HEADERS = frozenset(
    {
        b"alt-svc",
        b"clear-site-data",
        b"connection",
        b"content-security-policy",
        b"date",
        b"keep-alive",
        b"location",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"refresh",
        b"server",
        b"set-cookie",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Of a replica's headers, and what its Connection header names: what a browser obeys is the router's to say."""

CORS = b"access-control-"

REPLICAS_HEADER = "X-Loraplex-Replicas"
"""Of a verb: the names of the replicas that it is for. Of an answer: of those that it is from."""


def target_of(request: Request) -> bytes:
    """The path and query as the client wrote them, which the parser of the connection has checked."""
    path: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    query: bytes = request.scope["query_string"]
    return path + (b"?" + query if query else b"")


def sent_headers(request: Request) -> Headers:
    """What a replica gets of a client's head, with its address and the request's id."""
    headers = [(name, value) for name, value in request.scope["headers"] if name in SENT_HEADERS]
    headers.append((HEADER.lower().encode(), request.state.request_id.encode()))
    if request.client is not None:
        headers.append((b"x-forwarded-for", request.client.host.encode()))
    return headers


def own_headers(request: Request) -> Headers:
    """Of what the router asks by itself in a client's name."""
    own = (b"authorization", b"x-request-id", b"x-forwarded-for")
    return [each for each in sent_headers(request) if each[0] in own]


def response_of(status: int, headers: Headers, body: bytes) -> Response:
    """What a replica answered, as a whole; headers are those of `answer_headers`."""
    names = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    names.pop("content-length", None)
    return Response(body, status, names)


def answer_headers(answer: Answer) -> list[tuple[bytes, bytes]]:
    """What a client gets of a replica's head."""
    dropped = DROPPED_HEADERS | _names_in(value for name, value in answer.headers if name == b"connection")
    if answer.status in (204, 304):  # they have no body, whatever they say of one
        dropped |= {b"content-length"}
    return [each for each in answer.headers if each[0] not in dropped and not each[0].startswith(CORS)]


def _names_in(values: Iterable[bytes]) -> set[bytes]:
    return {name.strip().lower() for value in values for name in value.split(b",")}
