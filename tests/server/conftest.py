"""A server over a fake engine: `client` speaks to it in this process, `live` over a loopback port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from fastapi import FastAPI

from loraplex.server import ServerConfig, create_app
from loraplex.testing import FakeAsyncEngine
from tests.server.live_server import LiveServer

ADAPTERS = {"sql": "/adapters/sql", "chat": "/adapters/chat"}


@pytest.fixture
def engine() -> Iterator[FakeAsyncEngine]:
    """At the end nothing runs and no reference is held, whatever the test did."""
    engine = FakeAsyncEngine(ADAPTERS)
    yield engine
    assert engine.num_running == 0
    assert engine.registry is not None
    assert engine.registry.num_references == 0
    engine.registry.check_integrity()


@pytest.fixture
def app(engine: FakeAsyncEngine) -> FastAPI:
    return create_app(engine, ServerConfig())


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as client:
        yield client


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@pytest.fixture
def live() -> Iterator[LiveServer]:
    with LiveServer(FakeAsyncEngine({f"a{index}": f"/adapters/a{index}" for index in range(8)})) as server:
        yield server
