"""One replica: an engine, and the whole HTTP application over it, for calls of ingresses instead of connections."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Any

from starlette.datastructures import Headers

from loraplex.adapters.registry import LoRARegistry, NameQuery
from loraplex.core import Tier
from loraplex.errors import EngineError, LoraplexError
from loraplex.routing.policies import TIER_ORDER
from loraplex.serve.choice import MAX_ADAPTERS, Figures
from loraplex.serve.exchange import REPLICA_HEADER, Call, Exchange, Head
from loraplex.serve.scaling import LATE_SHARE, LateShare
from loraplex.serve.settings import FAILED_STARTS, RayConfig
from loraplex.server.api_error import ApiError, error_reply
from loraplex.server.app import create_app
from loraplex.server.config import ServerConfig
from loraplex.server.connections import account_of
from loraplex.server.context import ServerContext
from loraplex.server.engine_surface import EngineSurface

STATS_TIMEOUT_S = 5.0


class Replica:
    """`answer` is for ingresses, all else for Serve. The engine stays the caller's until `close`."""

    def __init__(self, name: str, engine: EngineSurface, config: RayConfig) -> None:
        self._name = name
        self._engine = engine
        self._app = create_app(engine, config.server)
        self._context: ServerContext = self._app.state.context
        target_s = config.ray.ray_target_first_token_s
        self._late = None if target_s is None else LateShare(target_s)
        self._numbers = itertools.count(1)
        self._figures = Figures()
        self._num_by_front: Counter[str] = Counter()
        self._giving_up = asyncio.ensure_future(engine.wait_until_given_up())

    async def answer(self, call: Call) -> AsyncIterator[Head | bytes]:
        """What the application answers, with this replica's name in the head."""
        own = (REPLICA_HEADER.lower().encode(), self._name.encode())
        if call.replica not in (None, self._name):
            error = ApiError(
                f"replica {call.replica!r} is not there, or has no place for a request now: leave out the header "
                f"{REPLICA_HEADER}, or take it from an answer and try again later",
                status=404,
                kind="not_found_error",
                code="replica_not_found",
            )
            yield Head(error.status, ((b"content-type", b"application/json"), own))
            yield error_reply(error)
            return
        context = self._context
        caller = context.keys.admitted(Headers(raw=list(call.headers)))
        client = account_of(caller, call.client or "", call.headers) or ""
        exchange = Exchange(self._app, call, context.connections, client).answer()
        self._num_by_front[call.front] += 1
        try:
            async for part in exchange:
                yield Head(part.status, (*part.headers, own)) if isinstance(part, Head) else part
        finally:
            self._num_by_front[call.front] -= 1
            self._num_by_front += Counter()  # without those that have none
            await exchange.aclose()  # type: ignore[attr-defined]

    def check(self) -> None:
        """Raises EngineError where the engine has given up: Serve replaces the replica. One that is being restarted
        gets no requests, and is waited for."""
        if self._giving_up.done():
            raise EngineError(f"the engine of replica {self._name} does not start any more")

    async def figures(self) -> dict[str, Any]:
        """`Figures`, for the fronts."""
        number, is_alive = next(self._numbers), self._engine.health().is_alive
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                stats = await self._engine.stats()
        except (LoraplexError, TimeoutError):  # it steps for longer, or is being restarted
            self._figures = replace(
                self._figures, number=number, is_healthy=is_alive, num_by_front=dict(self._num_by_front)
            )
            return asdict(self._figures)
        registry, memory = self._engine.registry, stats.memory
        self._figures = Figures(
            number=number,
            is_healthy=is_alive,
            num_waiting=stats.num_waiting,
            num_by_front=dict(self._num_by_front),
            num_kv_blocks=memory.num_kv_blocks or None,
            num_free_kv_blocks=memory.num_free_kv_blocks if memory.num_kv_blocks else None,
            adapter_room=1.0 - min(1.0, max(0.0, memory.tier(Tier.DEVICE.value).pressure)),
            tiers={} if registry is None else await asyncio.to_thread(_tiers, registry),
        )
        return asdict(self._figures)

    async def levels(self) -> dict[str, float]:
        """What Serve scales by, beside the queues."""
        if self._late is None:
            return {}
        (family,) = self._context.metrics_page.histograms.first_token.collect()
        return {LATE_SHARE: self._late.look(family.samples)}

    async def close(self) -> None:
        """All requests have ended."""
        self._giving_up.cancel()
        self._context.close()
        await self._context.finish()
        await self._engine.shutdown()


def _tiers(registry: LoRARegistry) -> dict[str, str]:
    """By name, in the order of `Figures`."""
    held = (info for info in registry.infos(NameQuery()) if info.tier is not Tier.SOURCE)
    nearest = heapq.nlargest(MAX_ADAPTERS, held, lambda info: (-TIER_ORDER[info.tier], info.last_used_time))
    return {info.ref.adapter_name: info.tier.value for info in reversed(nearest)}


def server_of_replica(server: ServerConfig) -> ServerConfig:
    """An engine that fails again and again ends its replica, since Serve may have a better place for it."""
    is_set = server.max_engine_restarts is not None
    return server if is_set else replace(server, max_engine_restarts=FAILED_STARTS)
