"""One engine process kept alive: started again when it dies or hangs, at once at first, with growing pauses when that
does not help.

A process that fails by itself (a crash, an exit, a hang, a start that raises) is a failure. Failures in a row make
pauses of 0, 1, 2, 4 ... MAX_PAUSE_S seconds. One that is killed from outside is none: the next starts at once, or after
KILLED_PAUSE_S when it was killed during its start. A process that has served for CALM_S ends the row.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from loraplex.config import EngineConfig
from loraplex.core import EngineInfo, TokenOutput
from loraplex.errors import EngineDeadError
from loraplex.events import Detail, EngineEvent, EventKind
from loraplex.frontend.client import ENGINE_TIMEOUT_S, EngineClient, ProgressCallback
from loraplex.processes.engine_child import ENGINE_MODULE, EngineChild

logger = logging.getLogger(__name__)

MAX_PAUSE_S = 60.0
KILLED_PAUSE_S = 1.0
CALM_S = 60.0
SPARE_DELAY_S = 2.0
"""After an engine is ready, its first requests come before the spare's imports."""


@dataclass(frozen=True, slots=True)
class Supervision:
    """How an engine process is watched.

    engine_timeout_s: silence of its loop after which it is killed; has_standby: a second process has imported
    everything and waits to take over; max_restarts: failures in a row after which nothing is tried any more (None: no
    limit); module: what processes run; child: the first one, where it was made before the rest.
    """

    engine_timeout_s: float = ENGINE_TIMEOUT_S
    has_standby: bool = False
    max_restarts: int | None = None
    module: str = ENGINE_MODULE
    child: EngineChild | None = None


class EngineSupervisor:
    """`death` says why nothing can be served now; None while it can.

    on_outputs gets the tokens of each step; on_death is called when a process that served is gone; restore gives a new
    process its adapters again, before anything is served; on_event gets what the process tells, its deaths and its
    returns. has_given_up is set after `max_restarts` failures in a row.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_outputs: Callable[[tuple[TokenOutput, ...]], None],
        on_death: Callable[[EngineDeadError], None],
        restore: Callable[[], Awaitable[None]],
        on_progress: ProgressCallback | None = None,
        on_event: Callable[[EngineEvent], None] | None = None,
        supervision: Supervision | None = None,
    ) -> None:
        self._config = config
        self._supervision = supervision or Supervision()
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._restore = restore
        self._on_progress = on_progress
        self._on_event = on_event
        self._client: EngineClient | None = None
        self._spare: EngineClient | None = None
        self._making_spare: asyncio.Task[None] | None = None
        self._revival: asyncio.Task[None] | None = None
        self._noted: EngineClient | None = None  # its death is counted
        self._row = _Row(self._supervision.max_restarts)
        self._releasing: asyncio.Task[None] | None = None
        self.start_s = 0.0  # what the last start took
        self.has_given_up = asyncio.Event()
        self.death: EngineDeadError | None = None
        self.info: EngineInfo  # once it has started

    @property
    def client(self) -> EngineClient:
        assert self._client is not None, "the engine was not started"
        return self._client

    async def start(self) -> None:
        """Start a process and wait until its model is ready. Raises the error that kept it from starting."""
        began_s = time.monotonic()
        self._client = self._make_client(self._supervision.child)
        self.info = await self._client.start()
        self._serves(began_s)

    async def stop(self) -> None:
        tasks = [task for task in (self._revival, self._making_spare, self._releasing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in (self._client, self._spare):
            if client is not None:
                await client.stop()

    def release(self) -> None:
        """End its process, which serves nothing now, until `resume`. A spare stays."""
        self.death = EngineDeadError("the load does not need it: its process was ended", self._patience_s)
        self._row.end()
        self._releasing = asyncio.get_running_loop().create_task(self.client.stop())

    def resume(self) -> None:
        """Start a process again, as after a death."""
        self._revival = asyncio.get_running_loop().create_task(self._revive(time.monotonic(), is_resumed=True))

    @property
    def _patience_s(self) -> float:
        """When to ask again while a process starts."""
        return min(max(1.0, self.start_s), MAX_PAUSE_S)

    def _make_client(self, child: EngineChild | None = None) -> EngineClient:
        return EngineClient(
            self._config,
            self._on_outputs,
            self._on_client_death,
            self._on_progress,
            on_events=self._on_engine_events,
            child=child or EngineChild(self._supervision.module),
            timeout_s=self._supervision.engine_timeout_s,
        )

    def _serves(self, began_s: float) -> None:
        """From now on requests are served; a spare is made beside them."""
        self.death = None
        self._row.serving_since_s = time.monotonic()
        self.start_s = self._row.serving_since_s - began_s
        if self._supervision.has_standby:
            self._making_spare = asyncio.get_running_loop().create_task(self._make_spare())

    async def _make_spare(self) -> None:
        await asyncio.sleep(SPARE_DELAY_S)
        if self._spare is None:
            self._spare = self._make_client()
            self._spare.make_process()

    async def _next_client(self) -> EngineClient:
        """The spare, if there is one that can start; else a new one."""
        if self._making_spare is not None:
            self._making_spare.cancel()
            await asyncio.gather(self._making_spare, return_exceptions=True)
        spare, self._spare = self._spare, None
        if spare is not None and not spare.can_start:
            await spare.stop()
            spare = None
        return spare or self._make_client()

    def _on_client_death(self, error: EngineDeadError) -> None:
        self._noted = self._client
        self._on_death(self._note(str(error), self.client.was_killed))
        if self._revival is None or self._revival.done():
            self._revival = asyncio.get_running_loop().create_task(self._revive(time.monotonic()))

    async def _revive(self, died_s: float, *, is_resumed: bool = False) -> None:
        """Start processes until one serves with its adapters. is_resumed: the last one was released, it did not die."""
        if self._releasing is not None:
            await asyncio.gather(self._releasing, return_exceptions=True)
        while (pause_s := self._row.pause_s) is not None:
            await self.client.stop()
            await asyncio.sleep(pause_s)
            began_s = time.monotonic()
            try:
                self._client = await self._next_client()
            except Exception as error:  # no room for its folder, no descriptor: perhaps later
                self._note(_reason(error), was_killed=False)
                continue
            try:
                self.info = await self._client.start(is_watched=True)
                await self._restore()
            except Exception as error:
                if self._noted is not self._client:
                    self._note(_reason(error), self.client.was_killed)
                continue
            if self._noted is not self._client:
                self._serves(began_s)
                seconds = time.monotonic() - died_s
                self._tell_return(is_resumed and not self._row.num_deaths, seconds)
                return

    def _tell_return(self, is_resumed: bool, seconds: float) -> None:
        text = "the engine process serves again" if is_resumed else "the engine process is back"
        logger.log(logging.INFO if is_resumed else logging.WARNING, "%s after %.1f s", text, seconds)
        self._tell(EventKind.RESUME if is_resumed else EventKind.RESTART, text, seconds=seconds)

    def _note(self, reason: str, was_killed: bool) -> EngineDeadError:
        """Count a death or a start that failed; returns what to tell those who wait."""
        pause_s = self._row.add(was_killed, time.monotonic())
        failures = f"{self._row.num_failures} failures in a row"
        if pause_s is None:
            outlook = f"it is not restarted after {failures} (--max-engine-restarts)"
            self.has_given_up.set()
        elif pause_s:
            outlook = f"it is restarted in {pause_s:.0f} s" + ("" if was_killed else f", after {failures}")
        else:
            outlook = "it is being restarted"
        self.death = EngineDeadError(f"{reason}; {outlook}", (pause_s or 0.0) + self._patience_s)
        logger.error("%s", self.death)
        self._tell(EventKind.FAULT, str(self.death), what="process", num_deaths=self._row.num_deaths)
        return self.death

    def _on_engine_events(self, events: tuple[EngineEvent, ...]) -> None:
        if self._on_event is not None:
            for event in events:
                self._on_event(event)

    def _tell(self, kind: EventKind, text: str, **details: Detail) -> None:
        self._on_engine_events((EngineEvent(kind, time.time(), text, details=details),))


def _reason(error: Exception) -> str:
    """What clients are told of a start that failed. The text of an error of its own may name the operator's paths: it
    is for the log."""
    if isinstance(error, EngineDeadError):
        return str(error)
    logger.error("the engine process could not be restarted: %s", error)
    return f"the engine process could not be restarted ({type(error).__name__})"


class _Row:
    """Deaths with no calm between them, and the pause before the next start; None: more than `max_restarts`."""

    def __init__(self, max_restarts: int | None) -> None:
        self._max_restarts = max_restarts
        self.num_failures = 0
        self.num_deaths = 0
        self.pause_s: float | None = 0.0
        self.serving_since_s: float | None = None

    def end(self) -> None:
        """It was ended in order: the next start is without a pause."""
        self.serving_since_s, self.num_failures, self.num_deaths, self.pause_s = None, 0, 0, 0.0

    def add(self, was_killed: bool, now_s: float) -> float | None:
        served_s = 0.0 if self.serving_since_s is None else now_s - self.serving_since_s
        self.serving_since_s = None
        if served_s >= CALM_S:
            self.num_failures = self.num_deaths = 0
        self.num_deaths += 1
        self.num_failures += not was_killed
        self.pause_s = self._pause_s(was_killed, served_s)
        return self.pause_s

    def _pause_s(self, was_killed: bool, served_s: float) -> float | None:
        if self._max_restarts is not None and self.num_failures > self._max_restarts:
            return None
        if was_killed:
            return 0.0 if served_s >= KILLED_PAUSE_S or self.num_deaths == 1 else KILLED_PAUSE_S
        return 0.0 if self.num_failures == 1 else min(MAX_PAUSE_S, 2.0 ** min(self.num_failures - 2, 16))
