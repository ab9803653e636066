"""A request of the router's own to a replica, and what came of it: for verbs, and for replicas that start again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import quote

import msgspec

from loraplex.errors import LoraplexError
from loraplex.router.connection import UNREADABLE, Headers
from loraplex.router.headers import answer_headers
from loraplex.router.replica import VERB_TIMEOUT_S, Replica

MAX_ANSWER_BYTES = 2**20
LOOK_TIMEOUT_S = 10.0
"""For what a replica says of itself."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replica said; status 0: it was lost, and may have done it or not."""

    replica: Replica
    status: int
    body: bytes = b""
    headers: Headers = ()
    reason: str = ""

    @property
    def is_done(self) -> bool:
        return 200 <= self.status < 300

    @property
    def message(self) -> str:
        if self.reason:
            return self.reason
        try:
            return str(msgspec.json.decode(self.body)["error"]["message"])
        except (*UNREADABLE, KeyError, TypeError):
            return self.body[:200].decode(errors="replace")


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
