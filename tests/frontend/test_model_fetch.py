"""The base model of a server is fetched in front of the engine process, which has no token."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from loraplex.config import EngineConfig
from loraplex.errors import EngineDeadError, ModelNotFoundError
from loraplex.frontend import async_engine
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.frontend.supervisor import EngineSupervisor
from tests.frontend.processes import BASE, within


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """The settings of each engine process that was to be started; none is."""
    configs: list[EngineConfig] = []

    async def start(supervisor: EngineSupervisor) -> None:
        configs.append(supervisor._config)
        raise EngineDeadError("not in this test")

    monkeypatch.setattr(EngineSupervisor, "start", start)
    return configs


@pytest.mark.parametrize("name", ["org/model", BASE])
async def test_the_engine_gets_a_directory(
    name: str, started: list[EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def resolve(model: str, revision: str | None) -> Path:
        asked.append((model, revision))
        return Path(BASE)

    monkeypatch.setattr(async_engine, "resolve_model", resolve)
    with pytest.raises(EngineDeadError):
        await within(AsyncEngine.start(EngineConfig(model=name, revision="v1")))
    assert [config.model for config in started] == [BASE]
    assert asked == ([("org/model", "v1")] if name == "org/model" else [])


async def test_what_the_hub_does_not_give_starts_no_process(started: list[EngineConfig]) -> None:
    with pytest.raises(ModelNotFoundError, match="/nowhere"):
        await within(AsyncEngine.start(EngineConfig(model="/nowhere")))
    assert started == []


async def test_a_signal_does_not_wait_for_the_hub(started: list[EngineConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release = threading.Event(), threading.Event()

    def resolve(model: str, revision: str | None) -> Path:
        begun.set()
        release.wait(60)
        return Path(BASE)

    monkeypatch.setattr(async_engine, "resolve_model", resolve)
    start = asyncio.ensure_future(AsyncEngine.start(EngineConfig(model="org/model")))
    await asyncio.to_thread(begun.wait, 60)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within(start)
    release.set()
    fetch = next((thread for thread in threading.enumerate() if thread.name == "fetch model"), None)
    if fetch is not None:
        await asyncio.to_thread(fetch.join, 60)
    assert started == []
