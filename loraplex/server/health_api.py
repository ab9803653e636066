"""What probes and scrapers ask: /health, /ping, /version, /metrics."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import StringConstraints

from loraplex import __version__
from loraplex.adapters.registry import DatabaseState
from loraplex.adapters.sources.named import ORIGIN
from loraplex.core import SamplingParams
from loraplex.errors import EngineDeadError, EngineOverloadedError, LoraplexError
from loraplex.server.access import Access, GuardedRoute, check_access, requires
from loraplex.server.api_error import ApiError
from loraplex.server.auth import caller_of
from loraplex.server.context import ServerContext
from loraplex.server.engine_surface import EngineSurface
from loraplex.server.metrics_page import CONTENT_TYPE, MAX_ASKED
from loraplex.server.openapi import operation
from loraplex.server.responses import encode

T = TypeVar("T")
AdapterName = Annotated[str, StringConstraints(max_length=512)]

STATS_TIMEOUT_S = 5.0
"""An engine answers between two steps. Prometheus gives a page 10 s."""

KEPT_S = 0.5
"""The outcome of a probe, and a page of metrics, answer those that ask so soon after them."""

STEP_POLL_S = 0.05
"""How often an engine that has no place for a probe is asked whether it steps."""


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """`status`: ok; busy for a probe that had no turn beside others; degraded while some of several runners take no
    requests, or the database is away. probe_ms: how long its token took. runners, serving, released: how many there
    are, serve and were ended since the load does not need them, if several; starting: which ones are being started
    again. database, with --database-url: connected;
    down: verbs are refused; silent: adapters are refused, too. database_away_s: since when.
    """

    status: str
    probe_ms: float | None = None
    runners: int | None = None
    serving: int | None = None
    released: int | None = None
    starting: tuple[str, ...] = ()
    database: str | None = None
    database_away_s: float | None = None


class Version(msgspec.Struct, frozen=True, omit_defaults=True):
    """model: the base's family, and how its weights and KV cache are kept. instance: of this process, another one after
    each start. runners: how many engine processes there are, where there are several; devices: of each, as torch names
    it."""

    version: str
    backend: str
    model: str
    instance: str
    runners: int = 1
    devices: tuple[str, ...] = ()


class Shared(Generic[T]):
    """`work` for all that ask: one run at a time, whose outcome is kept for KEPT_S. For routes that need no key.

    The death of an engine is not kept: work that begins later meets one that serves again.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._work = work
        self._run: asyncio.Task[T] | None = None
        self._ended_s = 0.0

    async def __call__(self) -> T:
        """Raises what `work` raises."""
        if self._run is None or (self._run.done() and time.monotonic() - self._ended_s > KEPT_S):
            self._run = asyncio.ensure_future(self._work())
            self._run.add_done_callback(self._note_end)
        return await asyncio.shield(self._run)  # a client that goes away ends nothing that others wait for

    def _note_end(self, run: asyncio.Task[T]) -> None:
        self._ended_s = time.monotonic()
        error = None if run.cancelled() else run.exception()  # perhaps nothing waits
        if isinstance(error, EngineDeadError) and self._run is run:
            self._run = None


class GenerateProbe:
    """One token of the base model through the scheduler.

    A probe that is refused, or still waits at its deadline, says nothing of an engine with a long queue. Then the
    engine's steps do.
    """

    def __init__(self, engine: EngineSurface, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)

    async def run(self) -> float | None:
        """Milliseconds of the token, None when the engine stepped for others. Raises LoraplexError, TimeoutError."""
        first = asyncio.ensure_future(self._num_steps())
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    return await self._generate_somewhere()
                except EngineOverloadedError:
                    while await self._num_steps() <= await first:
                        await asyncio.sleep(STEP_POLL_S)
                    return None
        except TimeoutError:
            if not first.done() or await self._num_steps() <= await first:
                raise
            return None
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    async def _num_steps(self) -> int:
        async with asyncio.timeout(STATS_TIMEOUT_S):
            return (await self._engine.stats()).step_times.num_steps

    async def _generate_somewhere(self) -> float:
        """Where a runner ends meanwhile, another one that serves gets its chance."""
        for num_left in reversed(range(self._engine.num_runners)):
            try:
                return await self._generate()
            except EngineDeadError:
                if not num_left or not self._engine.health().is_alive:
                    raise
        raise AssertionError("an engine has a runner")

    async def _generate(self) -> float:
        began_s = time.monotonic()
        params = SamplingParams(max_tokens=1, temperature=0.0)
        outputs = self._engine.generate((0,), params, f"health-probe-{next(self._numbers)}")
        try:
            async for _ in outputs:
                pass
        finally:
            if isinstance(outputs, AsyncGenerator):
                await outputs.aclose()
        return (time.monotonic() - began_s) * 1e3


class HealthRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._probe = Shared(GenerateProbe(context.engine, context.config.probe_timeout_s).run)
        self._page = Shared(self._render_page)
        self._instance = secrets.token_hex(8)

    def router(self) -> APIRouter:
        router = APIRouter(tags=["health"], route_class=GuardedRoute)
        for path, (route, reply) in self._routes().items():
            text_type = None if reply else "text/plain"
            router.add_api_route(
                path,
                route,
                methods=["GET"],
                operation_id=path.removeprefix("/"),
                openapi_extra=operation(replies=(reply,) if reply else (), text_type=text_type),
                response_class=JSONResponse if reply else PlainTextResponse,
            )
            router.add_api_route(path, route, methods=["HEAD"], include_in_schema=False)
        extra = operation(replies=(Health,))
        router.add_api_route("/ping", self.health, methods=["POST"], operation_id="post_ping", openapi_extra=extra)
        return router

    def _routes(self) -> dict[str, tuple[Callable[..., Awaitable[Response]], Any]]:
        """Each path, what answers it, and the form of the answer (None: text)."""
        return {
            "/health": (self.health, Health),
            "/ping": (self.health, Health),
            "/health_generate": (self.health_generate, Health),
            "/version": (self.version, Version),
            "/metrics": (self.metrics, None),
        }

    @requires(Access.OPEN)
    async def health(self, probe: Literal["generate"] | None = None) -> Response:
        """200 while requests can be served, else 503 with the reason. With `probe=generate`: after one token of the
        base model, or steps of the engine for others."""
        health = self._context.engine.health()
        if self._context.in_flight.is_closing or not health.is_alive:
            raise _unhealthy(health.message or "shutting down")
        if probe is None:
            return Response(encode(self._now("ok")), media_type="application/json")
        try:
            probe_ms = await self._probe()
        except TimeoutError:
            raise _unhealthy(f"a probe got no token within {self._context.config.probe_timeout_s:g} s") from None
        except LoraplexError as error:
            raise _unhealthy(str(error)) from None
        health_now = self._now("busy") if probe_ms is None else self._now("ok", round(probe_ms, 3))
        return Response(encode(health_now), media_type="application/json")

    @requires(Access.OPEN)
    async def health_generate(self) -> Response:
        """SGLang's name for `/health?probe=generate`."""
        return await self.health("generate")

    def _now(self, status: str, probe_ms: float | None = None) -> Health:
        num_all, health = self._context.engine.num_runners, self._context.engine.health()
        now = Health(status, probe_ms)
        if num_all > 1:
            released = health.num_released or None
            starting = tuple(health.starting)
            now = msgspec.structs.replace(
                now, runners=num_all, serving=health.num_serving, released=released, starting=starting
            )
        if health.database is not None:
            state, away_s = health.database.state, round(health.database.away_s, 1) or None
            now = msgspec.structs.replace(now, database=state.value, database_away_s=away_s)
        is_whole = health.num_serving + health.num_released >= num_all
        is_whole = is_whole and now.database in (None, DatabaseState.CONNECTED.value)
        return now if is_whole else msgspec.structs.replace(now, status="degraded")

    @requires(Access.OPEN)
    async def version(self) -> Response:
        """Of Loraplex, which kernels run, and where, and the form of the model."""
        engine = self._context.engine
        info = engine.model_info
        version = Version(__version__, info.backend, info.form, self._instance, engine.num_runners)
        if engine.num_runners > 1:
            version = msgspec.structs.replace(version, devices=tuple(engine.devices))
        return Response(encode(version), media_type="application/json")

    @requires(Access.OPEN)
    async def metrics(
        self,
        request: Request,
        adapter: Annotated[list[AdapterName] | None, Query(max_length=MAX_ASKED)] = None,
    ) -> Response:
        """Prometheus' text. It is there while the engine is not, and says so. Where there are tenants, a tenant's key
        does not read it. With `adapter=NAME`, repeatable: the series of these adapters alone."""
        if caller_of(request).scope.tenant is not None:
            check_access(request, Access.ADMIN)
        if adapter:
            return Response(self._context.metrics_page.render_adapters(adapter), media_type=CONTENT_TYPE)
        return Response(await self._page(), media_type=CONTENT_TYPE)

    async def _render_page(self) -> bytes:
        context = self._context
        registry = context.engine.registry
        refs = {} if registry is None else registry.refs()
        num_skipped = 0 if registry is None else len(registry.skipped)
        stats, counts = await self._answer(context.engine.stats), context.engine.events.counts
        is_several = context.engine.num_runners > 1
        reports = await self._answer(context.engine.runner_reports) if is_several else None
        num_by_need = 0 if registry is None else registry.num_from(ORIGIN)
        return context.metrics_page.render(stats, refs, counts, num_skipped, num_by_need, reports or ())

    async def _answer(self, ask: Callable[[], Awaitable[T]]) -> T | None:
        if not self._context.engine.health().is_alive:
            return None
        try:
            return await asyncio.wait_for(ask(), STATS_TIMEOUT_S)
        except (LoraplexError, TimeoutError):
            return None


def _unhealthy(reason: str) -> ApiError:
    return ApiError(f"the engine cannot serve: {reason}", status=503, kind="unavailable_error", code="engine_dead")
