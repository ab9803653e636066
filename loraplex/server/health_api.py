"""What probes and scrapers ask: /health, /ping, /version, /metrics."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Response

from loraplex import __version__
from loraplex.server.api_error import ApiError
from loraplex.server.context import ServerContext
from loraplex.server.responses import encode


class Health(msgspec.Struct, frozen=True):
    status: str = "ok"


class Version(msgspec.Struct, frozen=True):
    version: str


class HealthRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def router(self) -> APIRouter:
        router = APIRouter(tags=["health"])
        router.add_api_route("/health", self.health, methods=["GET"])
        router.add_api_route("/ping", self.health, methods=["GET"], operation_id="ping")
        router.add_api_route("/ping", self.health, methods=["POST"], include_in_schema=False)
        router.add_api_route("/version", self.version, methods=["GET"])
        return router

    async def health(self) -> Response:
        """200 while requests can be served, else 503 with the reason."""
        health = self._context.engine.health()
        if self._context.in_flight.is_closing or not health.is_alive:
            reason = health.message or "shutting down"
            raise ApiError(
                f"the engine cannot serve: {reason}", status=503, kind="unavailable_error", code="engine_dead"
            )
        return Response(encode(Health()), media_type="application/json")

    async def version(self) -> Response:
        return Response(encode(Version(__version__)), media_type="application/json")
