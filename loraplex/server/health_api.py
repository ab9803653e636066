"""What probes and scrapers ask: /health, /ping, /version, /metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from loraplex import __version__
from loraplex.errors import LoraplexError
from loraplex.server.access import Access, GuardedRoute, requires
from loraplex.server.api_error import ApiError
from loraplex.server.context import ServerContext
from loraplex.server.metrics_page import CONTENT_TYPE
from loraplex.server.openapi import operation
from loraplex.server.responses import encode

T = TypeVar("T")

STATS_TIMEOUT_S = 10.0
"""An engine answers between two steps."""


class Health(msgspec.Struct, frozen=True):
    status: str = "ok"


class Version(msgspec.Struct, frozen=True):
    version: str
    backend: str


class HealthRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def router(self) -> APIRouter:
        router = APIRouter(tags=["health"], route_class=GuardedRoute)
        for path, (route, reply) in self._routes().items():
            text_type = None if reply else "text/plain"
            router.add_api_route(
                path,
                route,
                methods=["GET"],
                operation_id=path.removeprefix("/"),
                openapi_extra=operation(reply=reply, text_type=text_type),
                response_class=JSONResponse if reply else PlainTextResponse,
            )
            router.add_api_route(path, route, methods=["HEAD"], include_in_schema=False)
        extra = operation(reply=Health)
        router.add_api_route("/ping", self.health, methods=["POST"], operation_id="post_ping", openapi_extra=extra)
        return router

    def _routes(self) -> dict[str, tuple[Callable[[], Awaitable[Response]], Any]]:
        """Each path, what answers it, and the form of the answer (None: text)."""
        return {
            "/health": (self.health, Health),
            "/ping": (self.health, Health),
            "/version": (self.version, Version),
            "/metrics": (self.metrics, None),
        }

    @requires(Access.OPEN)
    async def health(self) -> Response:
        """200 while requests can be served, else 503 with the reason."""
        health = self._context.engine.health()
        if self._context.in_flight.is_closing or not health.is_alive:
            reason = health.message or "shutting down"
            raise ApiError(
                f"the engine cannot serve: {reason}", status=503, kind="unavailable_error", code="engine_dead"
            )
        return Response(encode(Health()), media_type="application/json")

    @requires(Access.OPEN)
    async def version(self) -> Response:
        """Of Loraplex, and which kernels run."""
        version = Version(__version__, self._context.engine.model_info.backend)
        return Response(encode(version), media_type="application/json")

    @requires(Access.OPEN)
    async def metrics(self) -> Response:
        """Prometheus' text. It is there while the engine is not, and says so."""
        context = self._context
        registry = context.engine.registry
        refs = {} if registry is None else registry.refs()
        engine = context.engine
        stats, memory = await asyncio.gather(self._answer(engine.stats), self._answer(engine.memory_report))
        page = context.metrics_page.render(stats, refs, memory, engine.events.counts)
        return Response(page, media_type=CONTENT_TYPE)

    async def _answer(self, ask: Callable[[], Awaitable[T]]) -> T | None:
        if not self._context.engine.health().is_alive:
            return None
        try:
            return await asyncio.wait_for(ask(), STATS_TIMEOUT_S)
        except (LoraplexError, TimeoutError):
            return None
