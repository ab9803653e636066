"""Every route of an application, whichever way it was added."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from loraplex.server.auth import OPEN_PATHS
from loraplex.server.pages import PAGE_PATHS

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


@dataclass(frozen=True)
class FoundRoute:
    """`url`: its path with a name in the place of each parameter."""

    path: str
    methods: frozenset[str]
    endpoint: Callable[..., Any]
    kind: type

    @property
    def url(self) -> str:
        return re.sub(r"\{[^}]*\}", "sql", self.path)


def is_open(route: FoundRoute) -> bool:
    """Whether it needs no key: a probe, or a page that is read."""
    return route.path in OPEN_PATHS or (route.path in PAGE_PATHS and route.methods <= {"GET", "HEAD"})


def routes_of(app: FastAPI) -> list[FoundRoute]:
    return list(_walk(app.router))


def _walk(router: Any) -> Iterator[FoundRoute]:
    for route in router.routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            yield from _walk(included)
        else:
            yield FoundRoute(route.path, frozenset(route.methods), route.endpoint, type(route))
