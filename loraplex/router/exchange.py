"""An exchange with a replica: what passes of the heads of request and answer, and what came of a verb as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.errors import LoraplexError
from loraplex.router.connection import UNREADABLE, Answer, Headers
from loraplex.router.replica import VERB_TIMEOUT_S, Replica
from loraplex.server.request_id import HEADER

SENT_HEADERS = frozenset(
    {b"accept", b"authorization", b"content-type", b"last-event-id", b"traceparent", b"tracestate", b"user-agent"}
    | {b"content-digest", b"if-match", b"if-none-match", b"x-api-key"}
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

MAX_ANSWER_BYTES = 2**20
KEY_REFUSALS = frozenset({"admin_key_required", "role_required"})
LOOK_TIMEOUT_S = 10.0
"""For what a replica says of itself."""


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
    own = (b"authorization", b"x-api-key", b"x-request-id", b"x-forwarded-for")
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


# ------------------------------------------------------------------------------------------------------ verbs


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replica said; status 0: it was lost, and may have done it or not. waits: for what it will say of a verb
    that has taken effect."""

    replica: Replica
    status: int
    body: bytes = b""
    headers: Headers = ()
    reason: str = ""
    waits: asyncio.Future[Outcome] | None = None

    @property
    def is_done(self) -> bool:
        return 200 <= self.status < 300

    @property
    def message(self) -> str:
        return self.reason or self._of_error("message") or self.body[:200].decode(errors="replace")

    @property
    def is_of_key(self) -> bool:
        """Whether the key is refused, whatever is asked for with it."""
        return self.status == 401 or (self.status == 403 and self._of_error("code") in KEY_REFUSALS)

    def _of_error(self, field: str) -> str:
        try:
            return str(msgspec.json.decode(self.body)["error"][field] or "")
        except (*UNREADABLE, KeyError, TypeError):
            return ""


async def send(
    method: str, target: bytes, headers: Headers, body: bytes, replica: Replica, timeout_s: float = VERB_TIMEOUT_S
) -> Outcome:
    """A verb, and its whole answer."""
    try:
        async with asyncio.timeout(timeout_s):
            answer = await replica.send(method, target, headers, body, timeout_s)
            answered = await answer.read(MAX_ANSWER_BYTES)
    except TimeoutError:
        return Outcome(replica, 0, reason=f"replica {replica.name} did not answer within {timeout_s:g} s")
    except LoraplexError as error:
        return Outcome(replica, 0, reason=str(error))
    return Outcome(replica, answer.status, answered, answer_headers(answer))


async def look(replica: Replica, path: bytes, headers: Headers) -> Outcome:
    return await send("GET", path, headers, b"", replica, LOOK_TIMEOUT_S)


def path_of(name: str, verb: str = "") -> bytes:
    """Of an adapter's routes."""
    return f"/v1/adapters/{quote(name, safe='')}{verb}".encode()


def typed(headers: Headers) -> Headers:
    """With the type of a JSON body."""
    return [*headers, (b"content-type", b"application/json")]
