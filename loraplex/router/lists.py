"""GET /v1/models and /v1/adapters: what any replica has, once, in the order of names, as pages like theirs.

A list takes a connection to every replica and the memory of their answers: few are made at a time, clients in turns. Of
a card nothing is read but its names; the rest goes through as it came, and beside the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.errors import LoraplexError
from loraplex.router.connection import UNREADABLE, Headers
from loraplex.router.exchange import REPLICAS_HEADER, answer_headers, response_of, sent_headers, target_of
from loraplex.router.fleet import Fleet
from loraplex.router.keys import Keys
from loraplex.router.replica import Replica
from loraplex.server.api_error import ApiError
from loraplex.server.body import SHORT_BODY_BYTES
from loraplex.server.off_loop import OffLoop
from loraplex.server.streaming import until_disconnect
from loraplex.server.verb_turns import VerbTurns

MAX_LIST_BYTES = 32 * 2**20
LIST_TIMEOUT_S = 10.0
MAX_LISTS, MAX_LISTS_OF_A_CLIENT = 8, 4
"""At a time."""


class _Names(msgspec.Struct, gc=False):
    id: str = ""
    name: str = ""
    parent: str | None = None


class _List(msgspec.Struct):
    data: list[msgspec.Raw]
    has_more: bool | None = None


class _NamesInList(msgspec.Struct):
    data: list[_Names]


@dataclass(frozen=True, slots=True)
class _Page:
    """What a replica answered."""

    replica: str
    body: bytes


@dataclass(frozen=True, slots=True)
class _Query:
    """field: that names a card. limit: as the client wrote it."""

    field: str
    is_page: bool
    limit: str


class Lists:
    """The client's own key asks the replicas. One that cannot be reached is left out; the others are in a header."""

    def __init__(self, fleet: Fleet, keys: Keys, off_loop: OffLoop) -> None:
        self._fleet = fleet
        self._keys = keys
        self._off_loop = off_loop
        self._turns = VerbTurns("lists", MAX_LISTS, MAX_LISTS_OF_A_CLIENT)

    async def models(self, request: Request) -> Response:
        return await until_disconnect(request, self._in_turn(request, "id"))

    async def adapters(self, request: Request) -> Response:
        """Raises ApiError for an order of values, which are each replica's own."""
        if request.query_params.get("order", "name") != "name":
            raise ApiError("order: a list of several replicas is in the order of names; ask a replica", param="order")
        return await until_disconnect(request, self._in_turn(request, "name"))

    async def _in_turn(self, request: Request, field: str) -> Response:
        """Of clients with a key: a client without one takes no place that they need."""
        if (refusal := await self._keys.refusal(request)) is not None:
            return refusal
        client = self._keys.client_of(request)
        async with self._turns.of(client):
            return await self._union(request, field, client)

    async def _union(self, request: Request, field: str, client: str) -> Response:
        found = await self._ask_all(request)
        if isinstance(found, Response):
            return found
        query = _Query(field, bool(request.query_params), request.query_params.get("limit", ""))
        make, num_bytes = partial(_union_of, found, query), sum(len(page.body) for page in found)
        asked, body = make() if num_bytes <= SHORT_BODY_BYTES else await self._off_loop.run(client, make, num_bytes)
        if not asked:
            raise ApiError("no replica answers", status=503, kind="unavailable_error", code="no_replica")
        return Response(body, headers={REPLICAS_HEADER: ", ".join(asked)}, media_type="application/json")

    async def _ask_all(self, request: Request) -> list[_Page] | Response:
        """The pages, or the first refusal: the same request would have it from all."""
        headers, target = sent_headers(request), target_of(request)
        replicas = [replica for replica in self._fleet.replicas if replica.snapshot().is_open]
        asking = [asyncio.ensure_future(_ask(each, target, headers)) for each in replicas]
        pages = []
        try:
            for each in asyncio.as_completed(asking):
                with contextlib.suppress(LoraplexError, TimeoutError):
                    answer = await each
                    if isinstance(answer, Response):
                        return answer
                    pages.append(answer)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        order = {replica.name: number for number, replica in enumerate(replicas)}
        return sorted(pages, key=lambda page: order[page.replica])


async def _ask(replica: Replica, target: bytes, headers: Headers) -> _Page | Response:
    async with asyncio.timeout(LIST_TIMEOUT_S):
        answer = await replica.send("GET", target, headers, b"", LIST_TIMEOUT_S)
        body = await answer.read(MAX_LIST_BYTES)
    if answer.status != 200:
        return response_of(answer.status, answer_headers(answer), body)
    return _Page(replica.name, body)


def _union_of(pages: Sequence[_Page], query: _Query) -> tuple[list[str], bytes]:
    """Whose pages are lists, and all of them as one."""
    asked, has_more = [], False
    found: dict[str, tuple[_Names, msgspec.Raw]] = {}
    for page in pages:
        try:
            cards = msgspec.json.decode(page.body, type=_List)
            names = msgspec.json.decode(page.body, type=_NamesInList).data
        except UNREADABLE:
            continue
        asked.append(page.replica)
        has_more |= bool(cards.has_more)
        for each, card in zip(names, cards.data, strict=True):
            found.setdefault(getattr(each, query.field), (each, card))
    return asked, msgspec.json.encode(_reply(found, query, has_more))


def _reply(found: dict[str, tuple[_Names, msgspec.Raw]], query: _Query, has_more: bool) -> dict[str, Any]:
    """As a replica's: with any parameter base models first, then adapters in the order of names, up to the limit."""
    if not query.is_page:
        return {"object": "list", "data": [card for _, card in found.values()]}

    def order(name: str) -> tuple[bool, str]:
        is_base = query.field == "id" and found[name][0].parent is None
        return not is_base, "" if is_base else name

    names = sorted(found, key=order)
    if query.limit.isdecimal() and len(names) > int(query.limit[:20]):
        names, has_more = names[: int(query.limit[:20])], True
    first_id, last_id = (names[0], names[-1]) if names else (None, None)
    cards = [found[name][1] for name in names]
    return {"object": "list", "data": cards, "first_id": first_id, "last_id": last_id, "has_more": has_more}
