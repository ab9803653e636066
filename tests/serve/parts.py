"""Replicas over fake engines behind an ingress, without Ray."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.applications import Starlette

from loraplex.adapters.journal.database import Database
from loraplex.config import EngineConfig
from loraplex.serve.exchange import Call, Head
from loraplex.serve.ingress import create_ingress, open_tenants
from loraplex.serve.replica import Replica
from loraplex.serve.settings import RayConfig, RaySettings
from loraplex.server import ServerConfig
from loraplex.server.auth import KeyRing
from loraplex.server.connections import Connections
from loraplex.testing import FakeAsyncEngine

ADAPTERS = {"sql": "/adapters/sql", "chat": "/adapters/chat"}


class LocalFleet:
    """What a handle does, with calls of functions. `error`: of the next call, after its head where it has one."""

    def __init__(self, config: RayConfig, count: int) -> None:
        self.config = config
        self.engines = [FakeAsyncEngine(ADAPTERS) for _ in range(count)]
        for engine in self.engines:
            url = config.server.database_url
            engine.state = None if url is None else Database(url).pooled()
        self.replicas = [Replica(f"r{number}", engine, config) for number, engine in enumerate(self.engines)]
        self.calls: list[Call] = []
        self.num_running = count
        self.max_waiting = config.engine.max_waiting_requests
        self.error: Exception | None = None
        self.is_error_late = False

    @property
    def num_places(self) -> int:
        return self.num_running * self.config.ray.ray_replica_requests

    async def send(self, call: Call) -> AsyncGenerator[Head | bytes, None]:
        self.calls.append(call)
        if self.error is not None and not self.is_error_late:
            raise self.error
        names = [f"r{number}" for number in range(len(self.replicas))]
        replica = self.replicas[names.index(call.replica) if call.replica in names else len(self.calls) % len(names)]
        parts: Any = replica.answer(call)
        try:
            async for part in parts:
                yield part
                if self.error is not None and isinstance(part, bytes):
                    raise self.error
        finally:
            await parts.aclose()


@contextlib.asynccontextmanager
async def ingress(
    count: int = 1, ray: RaySettings | None = None, max_waiting_requests: int = 4096, **server: Any
) -> AsyncIterator[tuple[Starlette, LocalFleet]]:
    config = RayConfig(
        engine=EngineConfig(model="demo", max_waiting_requests=max_waiting_requests),
        server=ServerConfig(served_model_names=("demo",), disable_dynamic_loading=count > 1, **server),
        ray=ray or RaySettings(ray_min_replicas=count),
    )
    fleet, tenants = LocalFleet(config, count), open_tenants(config.server)
    keys = KeyRing.of(config.server, tenants)
    try:
        yield create_ingress(fleet, config.server, Connections(config.server, 100), keys), fleet
    finally:
        if tenants is not None:
            tenants.close()
        for engine, replica in zip(fleet.engines, fleet.replicas, strict=True):
            engine.resume()
            await replica.close()
