"""The base model of a server is fetched in front of the engine process, which has no token."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from loraplex.adapters.merging import base
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


@pytest.mark.parametrize("what", ["model", "adapter"])
async def test_a_signal_does_not_wait_for_the_hub(
    what: str, started: list[EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, release = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        release.wait(60)

    def resolve(model: str, revision: str | None) -> Path:
        hang()
        return Path(BASE)

    def fetched(path_or_id: str) -> tuple[str, str]:
        hang()
        return "", ""

    monkeypatch.setattr(async_engine, "resolve_model", resolve)
    monkeypatch.setattr(base, "fetched", fetched)
    config = EngineConfig(model="org/model")
    if what == "adapter":
        config = EngineConfig(model=BASE, lora=None, merge_adapter="org/adapter")
    start = asyncio.ensure_future(AsyncEngine.start(config))
    await asyncio.to_thread(begun.wait, 60)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within(start)
    fetch = next((thread for thread in threading.enumerate() if thread.name == f"fetch {what}"), None)
    assert fetch is not None
    assert fetch.daemon, "the end of the process must not wait for it"
    release.set()
    await asyncio.to_thread(fetch.join, 60)
    assert started == []
