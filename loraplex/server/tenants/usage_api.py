"""GET /v1/usage: what keys have used, by day, key and adapter, as JSON or CSV; each caller its own tenant's."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from loraplex.errors import DatabaseUnavailableError
from loraplex.server.access import Access, StrictRoute, requires
from loraplex.server.api_error import ApiError
from loraplex.server.auth import Caller, caller_of
from loraplex.server.context import ServerContext
from loraplex.server.off_loop import OffLoop
from loraplex.server.openapi import operation
from loraplex.server.responses import encode
from loraplex.tenants.usage import UsageQuery, as_csv

MAX_ROWS = 10_000

NUM_LOOKS = 2
"""At a time. They ask the database, which may be silent, and nothing else waits for their threads."""

MAX_LOOK_S = 10.0

Day = Annotated[str, Field(pattern=r"^[1-9]\d{3}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$")]
Text = Annotated[str, Field(max_length=256)]


class UsageFields(BaseModel):
    """Query of `GET /v1/usage`: days in UTC, both included; `tenant` for operators; `after`: the `next` of the page
    before. adapter "": the base model."""

    model_config = ConfigDict(extra="forbid")

    first_day: Day | None = None
    last_day: Day | None = None
    tenant: Text | None = None
    key: Text | None = None
    adapter: Text | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_ROWS)] = 1000
    after: Annotated[str, Field(max_length=512)] | None = None
    format: Literal["json", "csv"] = "json"


class UsageCard(msgspec.Struct, frozen=True):
    """requests: prompts; errors: of them those that failed; waiting_s: until the first token of each. adapter: empty
    for the base model, `//mix` for mixes. cached_tokens: null for a tenant where prefixes are shared with others."""

    day: str
    key: str
    tenant: str
    adapter: str
    requests: int
    errors: int
    prompt_tokens: int
    cached_tokens: int | None
    generated_tokens: int
    waiting_s: float


class UsagePage(msgspec.Struct, frozen=True):
    """next: of a further page; null: there is none."""

    data: list[UsageCard]
    next: str | None
    object: str = "list"


class UsageRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._looks = OffLoop(NUM_LOOKS)

    def router(self) -> APIRouter:
        router = APIRouter(tags=["tenants"], route_class=StrictRoute)
        extra = operation(replies=(UsagePage,), text_type="text/csv", errors=(404, 503))
        router.add_api_route("/v1/usage", self.usage, methods=["GET"], openapi_extra=extra)
        return router

    @requires(Access.READ)
    async def usage(self, request: Request, query: Annotated[UsageFields, Query()]) -> Response:
        """Tokens, requests, errors and seconds waited, by day, key and adapter: what was used until now."""
        accounts, caller = self._context.accounts, caller_of(request)
        if accounts is None or not self._context.keys.table.is_configured:
            text = "usage is counted where there are tenants: see `loraplex tenant create`, on --state-dir"
            raise ApiError(text, code="no_tenants")
        wanted, after, book = self._wanted(query, caller), _place(query.after), accounts.book

        hides_cached = caller.scope.tenant is not None and not self._context.keys.shows_cached_tokens

        def answer() -> Response:
            if wanted is None:
                return _answer([], query, caller)
            book.flush()
            rows = book.rows(wanted, query.limit + 1, after)
            for row in rows if hides_cached else ():
                row["cached_tokens"] = None
            return _answer(rows, query, caller)

        try:
            async with asyncio.timeout(MAX_LOOK_S):
                return await self._looks.run(caller.account, answer, 0)
        except TimeoutError:
            text = f"the database has not answered for {MAX_LOOK_S:g} s; try again later, or ask for fewer days"
            raise DatabaseUnavailableError(text) from None

    def _wanted(self, query: UsageFields, caller: Caller) -> UsageQuery | None:
        """None: nothing of that is the caller's to know."""
        adapters = () if query.adapter is None else (query.adapter,)
        wanted = UsageQuery(query.first_day, query.last_day, query.tenant, query.key, adapters)
        tenant = caller.scope.tenant
        if tenant is None:
            return wanted
        if query.tenant not in (None, tenant):
            return None
        if not tenant:  # a key of --api-key: its own alone
            return replace(wanted, tenant="", key_id=caller.fingerprint)
        own = tuple(map(caller.scope.own, adapters))  # rows are shown under both spellings
        return replace(wanted, tenant=tenant, adapters=(*adapters, *own))


def _place(after: str | None) -> tuple[str, ...]:
    """Raises ApiError."""
    if after is None:
        return ()
    text = unquote(after)  # a header has no other letters than ASCII's
    parts = tuple(text.split("|", 2))
    if len(parts) != 3 or "\0" in text:
        raise ApiError("after is not the `next` of a page of this route", param="after")
    return parts


def _answer(rows: list[dict[str, Any]], query: UsageFields, caller: Caller) -> Response:
    is_more, rows = len(rows) > query.limit, rows[: query.limit]
    last = rows[-1] if is_more else None
    place = None if last is None else quote(f"{last['day']}|{last['key_id']}|{last['adapter']}", safe="|/")
    for row in rows:
        row["key"], row["adapter"] = row.pop("key_id"), caller.scope.shown(row["adapter"])
    if query.format == "csv":
        headers = {} if place is None else {"X-Next": place}
        text = as_csv(rows, [each.name for each in msgspec.structs.fields(UsageCard)])
        return Response(text, headers=headers, media_type="text/csv")
    page = UsagePage([UsageCard(**row) for row in rows], place)
    return Response(encode(page), media_type="application/json")
