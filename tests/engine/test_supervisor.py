"""Deaths and restarts of engine processes, with processes that are only played: each order of events, and no waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.config import EngineConfig
from loraplex.core import EngineInfo
from loraplex.engine import supervisor as supervisor_module
from loraplex.engine.supervisor import DEATHS_WINDOW_S, MAX_DEATHS, EngineSupervisor
from loraplex.errors import EngineDeadError, ModelNotFoundError
from loraplex.events import EngineEvent, EventKind

INFO = EngineInfo("/model", "llama", "float32", "torch", 100, 64, 8, 16, 0, (), "float32")


class PlayedClient:
    """Starts at once, unless `failures` has an error for it."""

    def __init__(self, failures: list[Exception | None], on_death: Callable[[EngineDeadError], None]) -> None:
        self._failures = failures
        self._on_death = on_death
        self.death: EngineDeadError | None = None
        self.is_stopped = False

    async def start(self) -> EngineInfo:
        await asyncio.sleep(0)
        failure = self._failures.pop(0) if self._failures else None
        if failure is not None:
            if isinstance(failure, EngineDeadError):
                self.death = failure
            raise failure
        return INFO

    def die(self) -> None:
        self.death = EngineDeadError("killed")
        self._on_death(self.death)

    async def stop(self) -> None:
        self.is_stopped = True


class Stage:
    """A supervisor over played processes. `failures`: what the next starts fail with; `at_restore` runs with each restore."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clients: list[PlayedClient] = []
        self.failures: list[Exception | None] = []
        self.told: list[str] = []
        self.events: list[EngineEvent] = []
        self.num_restores = 0
        self.at_restore: Callable[[], None] = lambda: None
        self.now_s = 0.0
        monkeypatch.setattr(supervisor_module, "EngineClient", self._make_client)
        monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=lambda: self.now_s, time=lambda: 5.0))
        self.supervisor = EngineSupervisor(
            EngineConfig(model="/model"),
            lambda outputs: None,
            lambda error: self.told.append(str(error)),
            self._restore,
            on_event=self.events.append,
        )

    def _make_client(
        self, config: Any, on_outputs: Any, on_death: Any, on_progress: Any, *, on_events: Any, **_options: Any
    ) -> PlayedClient:
        self.clients.append(PlayedClient(self.failures, on_death))
        self.tell_events = on_events
        return self.clients[-1]

    async def _restore(self) -> None:
        self.num_restores += 1
        assert self.supervisor.death is not None, "nothing is served before its adapters are there"
        await asyncio.sleep(0)
        self.at_restore()

    async def settle(self) -> None:
        """Let the supervisor do what it has to do."""
        for _ in range(100):
            await asyncio.sleep(0)


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage(monkeypatch)
    await stage.supervisor.start()
    assert stage.supervisor.info == INFO
    assert stage.supervisor.death is None
    return stage


async def test_a_start_that_fails_is_the_callers_error_and_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    stage.failures = [ModelNotFoundError("nowhere")]
    with pytest.raises(ModelNotFoundError):
        await stage.supervisor.start()
    await stage.supervisor.stop()
    await stage.settle()
    assert (len(stage.clients), stage.told, stage.num_restores) == (1, [], 0)
    assert stage.clients[0].is_stopped


async def test_a_dead_process_is_replaced_and_gets_its_adapters(stage: Stage) -> None:
    stage.clients[0].die()
    assert str(stage.supervisor.death) == "killed; it is being restarted"
    assert stage.told == ["killed; it is being restarted"]
    await stage.settle()
    assert stage.supervisor.death is None
    assert stage.supervisor.client is stage.clients[1]
    assert stage.clients[0].is_stopped
    assert stage.num_restores == 1


async def test_a_death_while_adapters_are_restored(stage: Stage) -> None:
    """It was up already: told, counted once, and the next process starts from the beginning."""
    deaths = iter([True])
    stage.at_restore = lambda: stage.clients[-1].die() if next(deaths, False) else None
    stage.clients[0].die()
    await stage.settle()
    assert stage.supervisor.death is None
    assert (len(stage.clients), stage.num_restores, len(stage.told)) == (3, 2, 2)


async def test_a_death_while_the_next_process_starts(stage: Stage) -> None:
    stage.failures = [EngineDeadError("killed at the start")]
    stage.clients[0].die()
    await stage.settle()
    assert stage.supervisor.death is None
    assert (len(stage.clients), stage.num_restores, len(stage.told)) == (3, 1, 1)


async def test_too_many_deaths_are_the_end(stage: Stage) -> None:
    for _ in range(MAX_DEATHS):
        stage.clients[-1].die()
        await stage.settle()
    assert (
        str(stage.supervisor.death)
        == "killed; it died 3 times in 60 s and stays down; see the log, then restart the server"
    )
    assert stage.told[-1] == str(stage.supervisor.death)
    assert len(stage.clients) == MAX_DEATHS


async def test_deaths_at_the_start_count(stage: Stage) -> None:
    stage.failures = [EngineDeadError("no memory")] * 10
    stage.clients[0].die()
    await stage.settle()
    assert (
        str(stage.supervisor.death)
        == "no memory; it died 3 times in 60 s and stays down; see the log, then restart the server"
    )
    assert len(stage.clients) == MAX_DEATHS


async def test_deaths_long_ago_are_forgotten(stage: Stage) -> None:
    for _ in range(3 * MAX_DEATHS):
        stage.clients[-1].die()
        await stage.settle()
        assert stage.supervisor.death is None
        stage.now_s += DEATHS_WINDOW_S / 2
    assert len(stage.clients) == 1 + 3 * MAX_DEATHS


@pytest.mark.parametrize("error", [ModelNotFoundError("the directory is gone"), OSError("no more processes")])
async def test_what_no_restart_can_mend_is_the_end(stage: Stage, error: Exception) -> None:
    stage.failures = [error]
    stage.clients[0].die()
    await stage.settle()
    assert str(stage.supervisor.death) == f"the engine process could not be restarted: {error}"
    assert len(stage.clients) == 2


async def test_a_restore_that_fails_is_the_end(stage: Stage) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    stage.at_restore = fail
    stage.clients[0].die()
    await stage.settle()
    assert str(stage.supervisor.death) == "the engine process could not be restarted: a bug"


async def test_stop_while_a_process_is_being_replaced(stage: Stage) -> None:
    stage.clients[0].die()
    await asyncio.sleep(0)
    await stage.supervisor.stop()
    await stage.settle()
    assert all(client.is_stopped for client in stage.clients)
    assert stage.supervisor.death is not None


async def test_stop_before_a_start_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Stage(monkeypatch).supervisor
    await supervisor.stop()
    assert supervisor.death is None


async def test_a_death_and_the_return_are_events(stage: Stage) -> None:
    """The process's own are passed on between them."""
    stage.now_s = 1.0
    stage.clients[0].die()
    stage.now_s = 3.5
    await stage.settle()
    load = EngineEvent(EventKind.LOAD, 6.0, "adapter 'a' is in host memory")
    stage.tell_events((load,))
    fault, restart, passed_on = stage.events
    assert (fault.kind, fault.text) == (EventKind.FAULT, "killed; it is being restarted")
    assert fault.details == {"what": "process", "num_deaths": 1}
    assert (restart.kind, restart.details) == (EventKind.RESTART, {"seconds": 2.5})
    assert passed_on is load
