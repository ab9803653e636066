"""Lists of names and pages of them, as OpenAI's: `limit`, `after`, `has_more` in the answer. Threads make them by card.

With any parameter a list is in the order of names, so that `after` is a place in it whether its name is still there or
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from loraplex.adapters.registry import AdapterInfo, NameQuery
from loraplex.server.api_error import ApiError, clipped
from loraplex.server.responses import ListReply, encode

MAX_PAGE = 1000
MAX_SOURCE_PAGE = 500
"""Of what a source has: an object store tells at most 1,000 names at a time."""

Text = Annotated[str, Field(max_length=4096)]


class PageQuery(BaseModel):
    """Query of a list: at most `limit` names that come after `after`, begin with `prefix` and contain `contains`."""

    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] | None = None
    after: Text = ""
    prefix: Text = ""
    contains: Text = ""

    @property
    def is_page(self) -> bool:
        return bool(self.model_fields_set)

    @property
    def names(self) -> NameQuery:
        return NameQuery(self.prefix, self.contains, self.after, is_sorted=self.is_page)


_ORDERS: Mapping[str, Callable[[AdapterInfo], float]] = {
    "bytes": lambda info: info.nbytes,
    "last_used": lambda info: info.last_used_time,
    "requests": lambda info: info.num_requests,
}


class AdapterQuery(PageQuery):
    """Query of `GET /v1/adapters`: also those in a `state` (a tier, `loading`, `failed`), those pinned or not. order:
    of names, or the most first. Or what a `source` of the operator has, registered or not: always a page."""

    source: Text = ""
    state: Literal["device", "host", "disk", "source", "loading", "failed"] | None = None
    pinned: bool | None = None
    order: Literal["name", "bytes", "last_used", "requests"] = "name"

    @property
    def names(self) -> NameQuery:
        names = super().names
        return names if self.order == "name" else replace(names, after="")

    @property
    def operators_field(self) -> str | None:
        """A parameter that tells what is the operator's to know."""
        if self.order != "name":
            return "order"
        return next((name for name in ("state", "pinned") if getattr(self, name) is not None), None)

    def ordered(self, infos: Iterable[AdapterInfo]) -> Iterable[AdapterInfo]:
        """By `order`, and those behind `after`, whose place is that of its values now. Raises ApiError when it is not
        among them any longer."""
        if self.order == "name":
            return infos
        value = _ORDERS[self.order]
        found = sorted(infos, key=lambda info: (-value(info), info.ref.adapter_name))
        if not self.after:
            return found
        for place, info in enumerate(found, 1):
            if info.ref.adapter_name == self.after:
                return found[place:]
        text = f"adapter {clipped(self.after)!r} is not in this list any longer; begin again without `after`"
        raise ApiError(text, param="after")

    def names_in(self, source: str) -> NameQuery:
        """Of adapters as the source calls them; `NAME/` before them is left out."""
        head = f"{source}/"
        prefix = self.prefix.removeprefix(head) if self.prefix.startswith(head) else self.prefix
        return NameQuery(prefix, self.contains, self.after.removeprefix(head), is_sorted=True)

    def has(self, info: AdapterInfo) -> bool:
        if self.pinned is not None and info.is_pinned is not self.pinned:
            return False
        if self.state == "loading":
            return info.is_loading
        if self.state == "failed":
            return info.error is not None
        return self.state in (None, info.tier.value)


def encode_list(cards: Iterable[tuple[str, Any]], query: PageQuery) -> bytes:
    """The answer: what `cards` yields by name, up to the query's limit. One at a time, for the event loop's turns."""
    names: list[str] = []
    written: list[bytes] = []
    has_more = False
    for name, card in cards:
        if len(written) == query.limit:
            has_more = True
            break
        names.append(name)
        written.append(encode(card))
    reply: ListReply[Any] = ListReply([])
    if query.is_page:
        first_id, last_id = (names[0], names[-1]) if names else (None, None)
        reply = ListReply([], first_id=first_id, last_id=last_id, has_more=has_more)
    head, tail = encode(reply).split(b"[]", 1)
    return b"".join((head, b"[", b",".join(written), b"]", tail))
