"""Deaths and restarts of engine processes, with processes that are played: each order of events, no waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.config import EngineConfig
from loraplex.core import EngineInfo
from loraplex.errors import EngineDeadError, ModelNotFoundError
from loraplex.events import EngineEvent, EventKind
from loraplex.frontend import supervisor as supervisor_module
from loraplex.frontend.supervisor import (
    CALM_S,
    KILLED_PAUSE_S,
    MAX_PAUSE_S,
    SPARE_DELAY_S,
    EngineSupervisor,
    Supervision,
)
from loraplex.processes.engine_child import EngineChild

INFO = EngineInfo("/model", "llama", "float32", "torch", 100, 64, 8, 16, 0, (), "float32")


class KilledAtStartError(EngineDeadError):
    """By a signal from outside."""


class PlayedClient:
    """Starts at once, unless `failures` has an error for it. `was_killed` as in EngineClient: by a signal from
    outside."""

    def __init__(self, failures: list[Exception | None], on_death: Callable[[EngineDeadError], None]) -> None:
        self._failures = failures
        self._on_death = on_death
        self.death: EngineDeadError | None = None
        self.was_killed = False
        self.is_stopped = False
        self.is_made = False
        self.is_watched_at_start = False

    @property
    def can_start(self) -> bool:
        return self.is_made and self.death is None

    def make_process(self) -> None:
        self.is_made = True

    async def start(self, is_watched: bool = False) -> EngineInfo:
        self.is_watched_at_start = is_watched
        await asyncio.sleep(0)
        failure = self._failures.pop(0) if self._failures else None
        if failure is not None:
            if isinstance(failure, EngineDeadError):
                self.death = failure
                self.was_killed = isinstance(failure, KilledAtStartError)
            raise failure
        return INFO

    def die(self, was_killed: bool = False) -> None:
        self.death, self.was_killed = EngineDeadError("killed" if was_killed else "crashed"), was_killed
        self._on_death(self.death)

    async def stop(self) -> None:
        self.is_stopped = True


class Stage:
    """A supervisor over played processes. `failures`: what the next starts fail with; `at_restore` runs at each
    restore."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clients: list[PlayedClient] = []
        self.failures: list[Exception | None] = []
        self.told: list[str] = []
        self.events: list[EngineEvent] = []
        self.num_restores = 0
        self.at_restore: Callable[[], None] = lambda: None
        self.now_s = 0.0
        self.pauses: list[float] = []
        self.supervision = Supervision()
        monkeypatch.setattr(supervisor_module, "EngineClient", self._make_client)
        monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=lambda: self.now_s, time=lambda: 5.0))
        monkeypatch.setattr(supervisor_module, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": self._sleep}))

    def make(self, **supervision: Any) -> EngineSupervisor:
        self.supervisor = EngineSupervisor(
            EngineConfig(model="/model"),
            lambda outputs: None,
            lambda error: self.told.append(str(error)),
            self._restore,
            on_event=self.events.append,
            supervision=Supervision(**supervision),
        )
        return self.supervisor

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds
        await asyncio.sleep(0)

    def _make_client(
        self,
        config: Any,
        on_outputs: Any,
        on_death: Any,
        on_progress: Any,
        *,
        on_events: Any,
        child: EngineChild,
        **_options: Any,
    ) -> PlayedClient:
        child.end()
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
    await stage.make().start()
    assert stage.supervisor.info == INFO
    assert stage.supervisor.death is None
    return stage


async def test_a_start_that_fails_is_the_callers_error_and_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    stage.failures = [ModelNotFoundError("nowhere")]
    with pytest.raises(ModelNotFoundError):
        await stage.make().start()
    await stage.supervisor.stop()
    await stage.settle()
    assert (len(stage.clients), stage.told, stage.num_restores) == (1, [], 0)
    assert stage.clients[0].is_stopped


async def test_a_dead_process_is_replaced_and_gets_its_adapters(stage: Stage) -> None:
    stage.clients[0].die()
    assert str(stage.supervisor.death) == "crashed; it is being restarted"
    assert stage.told == ["crashed; it is being restarted"]
    await stage.settle()
    assert not stage.clients[0].is_watched_at_start, "a first start may wait for a download"
    assert stage.clients[1].is_watched_at_start
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


async def test_a_death_in_the_middle_of_a_restore_is_counted_once(stage: Stage) -> None:
    """Its calls fail with it."""

    def fail() -> None:
        stage.at_restore = lambda: None
        stage.clients[-1].die()
        raise EngineDeadError("crashed")

    stage.at_restore = fail
    stage.clients[0].die()
    await stage.settle()
    assert stage.supervisor.death is None
    assert [event.details["num_deaths"] for event in stage.events if event.kind is EventKind.FAULT] == [1, 2]


async def test_failures_in_a_row_make_growing_pauses_without_end(stage: Stage) -> None:
    stage.failures = [EngineDeadError("no memory")] * 10
    stage.clients[0].die()
    await stage.settle()
    assert stage.pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0]
    assert max(stage.pauses) == MAX_PAUSE_S
    assert stage.supervisor.death is None
    fault = [event.text for event in stage.events if event.kind is EventKind.FAULT][4]
    assert fault == "no memory; it is restarted in 8 s, after 5 failures in a row"


async def test_the_error_says_when_a_process_may_be_back(stage: Stage) -> None:
    retries: list[float] = []
    stage.failures = [EngineDeadError("no memory")] * 4
    stage.at_restore = lambda: retries.append(stage.supervisor.death.retry_after_s)  # type: ignore[union-attr]
    stage.clients[0].die()
    await stage.settle()
    assert retries == [8.0 + 1.0]


async def test_kills_from_outside_are_no_failures(stage: Stage) -> None:
    """However many, and also while a process starts: pauses do not grow, and nothing is given up."""
    stage.failures = [KilledAtStartError("killed at the start") for _ in range(10)]
    stage.clients[0].die(was_killed=True)
    await stage.settle()
    assert stage.supervisor.death is None
    assert stage.pauses == [0.0] + [KILLED_PAUSE_S] * 10
    for _ in range(10):
        stage.now_s += KILLED_PAUSE_S
        stage.clients[-1].die(was_killed=True)
        await stage.settle()
    assert stage.supervisor.death is None
    assert stage.pauses[11:] == [0.0] * 10, "it had served between them"


async def test_a_crash_after_many_kills_is_the_first_failure(stage: Stage) -> None:
    stage.failures = [KilledAtStartError("killed at the start")] * 5
    stage.clients[0].die(was_killed=True)
    await stage.settle()
    stage.clients[-1].die()
    await stage.settle()
    assert stage.pauses[-1] == 0.0


async def test_failures_before_a_calm_time_are_forgotten(stage: Stage) -> None:
    for _ in range(5):
        stage.clients[-1].die()
        await stage.settle()
        stage.now_s += CALM_S
    assert stage.pauses == [0.0] * 5
    for _ in range(3):
        stage.clients[-1].die()
        await stage.settle()
    assert stage.pauses[5:] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("error", [ModelNotFoundError("the directory is gone"), OSError("no more processes")])
async def test_what_keeps_a_process_from_starting_may_pass(
    stage: Stage, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """A network file system comes back, a limit is raised. Its text is for the log: clients get no paths."""
    stage.failures = [error] * 3
    stage.clients[0].die()
    await stage.settle()
    assert stage.supervisor.death is None
    texts = [event.text for event in stage.events if event.kind is EventKind.FAULT]
    outlook = "it is restarted in 1 s, after 2 failures in a row"
    assert texts[1] == f"the engine process could not be restarted ({type(error).__name__}); {outlook}"
    assert f"the engine process could not be restarted: {error}" in caplog.messages


async def test_a_restore_that_fails_is_a_failure(stage: Stage) -> None:
    def fail() -> None:
        stage.at_restore = lambda: None
        raise RuntimeError("a bug")

    stage.at_restore = fail
    stage.clients[0].die()
    await stage.settle()
    assert stage.clients[1].is_stopped, "a process without its adapters serves nothing"
    assert stage.supervisor.death is None
    assert "the engine process could not be restarted (RuntimeError)" in stage.events[1].text


async def test_it_gives_up_only_where_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    supervisor = stage.make(max_restarts=2)
    await supervisor.start()
    stage.failures = [KilledAtStartError("killed"), EngineDeadError("no memory"), EngineDeadError("no memory")]
    stage.clients[0].die()
    await stage.settle()
    assert supervisor.has_given_up.is_set()
    assert str(supervisor.death) == "no memory; it is not restarted after 3 failures in a row (--max-engine-restarts)"
    assert len(stage.clients) == 4


async def test_a_spare_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    supervisor = stage.make(has_standby=True)
    await supervisor.start()
    await stage.settle()
    spare = stage.clients[1]
    assert stage.pauses == [SPARE_DELAY_S]
    assert spare.is_made
    stage.clients[0].die()
    await stage.settle()
    assert supervisor.client is spare
    assert len(stage.clients) == 3, "the next spare is made"
    assert stage.clients[2].can_start
    await supervisor.stop()
    assert all(client.is_stopped for client in stage.clients)


async def test_a_spare_that_died_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    supervisor = stage.make(has_standby=True)
    await supervisor.start()
    await stage.settle()
    stage.clients[1].death = EngineDeadError("killed")
    stage.clients[0].die()
    await stage.settle()
    assert supervisor.death is None
    assert supervisor.client is stage.clients[2]
    assert stage.clients[1].is_stopped


async def test_stop_while_a_process_is_being_replaced(stage: Stage) -> None:
    stage.clients[0].die()
    await asyncio.sleep(0)
    await stage.supervisor.stop()
    await stage.settle()
    assert all(client.is_stopped for client in stage.clients)
    assert stage.supervisor.death is not None


async def test_stop_before_a_start_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Stage(monkeypatch).make()
    await supervisor.stop()
    assert supervisor.death is None


async def test_a_death_and_the_return_are_events(stage: Stage) -> None:
    """The process's own are passed on between them."""
    stage.now_s = 1.0
    stage.clients[0].die()
    stage.at_restore = lambda: setattr(stage, "now_s", 3.5)
    await stage.settle()
    load = EngineEvent(EventKind.LOAD, 6.0, "adapter 'a' is in host memory")
    stage.tell_events((load,))
    fault, restart, passed_on = stage.events
    assert (fault.kind, fault.text) == (EventKind.FAULT, "crashed; it is being restarted")
    assert fault.details == {"what": "process", "num_deaths": 1}
    assert (restart.kind, restart.details) == (EventKind.RESTART, {"seconds": 2.5})
    assert passed_on is load


async def test_a_process_that_cannot_even_be_made_is_a_failure_and_tried_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room for the socket's folder, or no descriptor: the revival ended silently, and nothing was served any
    more."""
    errors = [OSError(28, "No space left on device"), OSError(24, "Too many open files")]

    def make_client(*arguments: Any, **options: Any) -> PlayedClient:
        if errors:
            raise errors.pop(0)
        return stage._make_client(*arguments, **options)

    monkeypatch.setattr(supervisor_module, "EngineClient", make_client)
    stage.clients[0].die()
    await stage.settle()
    assert stage.supervisor.death is None
    assert not errors
    assert stage.pauses == [0.0, 1.0, 2.0]
