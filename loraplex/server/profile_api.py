"""POST /v1/profile/start and /stop, GET /v1/profile: a profile of the engine while it serves."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from loraplex.errors import LoraplexError
from loraplex.performance.report import LoraPerformanceReport
from loraplex.performance.requests import ServiceTargets
from loraplex.server.access import Access, StrictRoute, requires
from loraplex.server.api_error import ApiError
from loraplex.server.context import ServerContext
from loraplex.server.openapi import operation
from loraplex.server.request_model import RequestModel
from loraplex.server.responses import encode

Seconds = Annotated[float, Field(ge=0.001, le=86400)]

logger = logging.getLogger("loraplex.server")


class StartProfileRequest(RequestModel):
    """`seconds`: end by itself after that long. `first_token_s`, `inter_token_s`: what service is to keep."""

    seconds: Seconds | None = None
    first_token_s: Seconds = ServiceTargets().first_token_s
    inter_token_s: Seconds = ServiceTargets().inter_token_s


class ProfileState(msgspec.Struct, frozen=True):
    """begun_time and elapsed_s: of the profile that runs; has_report: one ended by itself; stop gives its report."""

    is_running: bool
    begun_time: float | None
    elapsed_s: float | None
    seconds: float | None
    has_report: bool
    object: str = "profile"


class ProfileRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._engine = context.engine
        self._bodies = context.bodies
        self._lock = asyncio.Lock()
        self._begun_time: float | None = None
        self._seconds: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._report: LoraPerformanceReport | None = None

    def router(self) -> APIRouter:
        router = APIRouter(tags=["profile"], route_class=StrictRoute)
        extra = operation(replies=(ProfileState,))
        router.add_api_route("/v1/profile", self.state, methods=["GET"], openapi_extra=extra)
        extra = operation(StartProfileRequest, replies=(ProfileState,), errors=(409, 504))
        router.add_api_route("/v1/profile/start", self.start, methods=["POST"], openapi_extra=extra)
        extra = operation(replies=(LoraPerformanceReport,), errors=(409, 504))
        router.add_api_route("/v1/profile/stop", self.stop, methods=["POST"], openapi_extra=extra)
        return router

    @requires(Access.ADMIN)
    async def state(self) -> Response:
        return _json(self._state())

    @requires(Access.VERB)
    async def start(self, request: Request) -> Response:
        """Record from now on. 409 while another profile runs; a report that was not fetched is forgotten."""
        wish = await self._bodies.read(request, StartProfileRequest)
        async with self._lock:
            if self._engine.is_profiling:
                raise _conflict("a profile runs already; POST /v1/profile/stop ends it")
            await self._engine.start_lora_profiling(ServiceTargets(wish.first_token_s, wish.inter_token_s))
            self._report = None
            self._begun_time, self._seconds = time.time(), wish.seconds
            if wish.seconds is not None:
                self._timer = asyncio.get_running_loop().call_later(wish.seconds, self._end_soon)
        return _json(self._state())

    @requires(Access.VERB)
    async def stop(self) -> Response:
        """End the profile; its report. That of one that ended by itself, if that is so; else 409."""
        async with self._lock:
            if self._engine.is_profiling:
                await self._end()
            report, self._report = self._report, None
        if report is None:
            raise _conflict("no profile runs; POST /v1/profile/start begins one")
        return _json(report)

    def _state(self) -> ProfileState:
        is_running = self._engine.is_profiling
        begun = self._begun_time if is_running else None
        elapsed_s = None if begun is None else time.time() - begun
        return ProfileState(
            is_running, begun, elapsed_s, self._seconds if is_running else None, self._report is not None
        )

    async def _end(self) -> None:
        self._report = await self._engine.generate_lora_performance_report()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_soon(self) -> None:
        self._timer = None
        self._ending = asyncio.ensure_future(self._end_by_itself())

    async def _end_by_itself(self) -> None:
        async with self._lock:
            if self._engine.is_profiling:
                try:
                    await self._end()
                except LoraplexError as error:
                    logger.warning("the profile goes on, its report cannot be had now: %s", error)


def _conflict(message: str) -> ApiError:
    return ApiError(message, status=409, kind="conflict_error", code="profile_state")


def _json(reply: ProfileState | LoraPerformanceReport) -> Response:
    return Response(encode(reply), media_type="application/json")
