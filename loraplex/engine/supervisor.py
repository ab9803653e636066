"""One engine process kept alive: started again when it dies, given up when it dies too often."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from loraplex.config import EngineConfig
from loraplex.core import EngineInfo, TokenOutput
from loraplex.engine.client import ENGINE_MODULE, EngineClient, ProgressCallback
from loraplex.errors import EngineDeadError
from loraplex.events import Detail, EngineEvent, EventKind

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
DEATHS_WINDOW_S = 60.0


class EngineSupervisor:
    """`death` says why nothing can be served now; None while it can.

    on_outputs gets the tokens of each step; on_death is called when a process that served has ended unasked; restore gives a new
    process its adapters again, before anything is served; on_event gets what the process tells, its deaths and its returns.
    module: what the process runs.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_outputs: Callable[[tuple[TokenOutput, ...]], None],
        on_death: Callable[[EngineDeadError], None],
        restore: Callable[[], Awaitable[None]],
        on_progress: ProgressCallback | None = None,
        on_event: Callable[[EngineEvent], None] | None = None,
        module: str = ENGINE_MODULE,
    ) -> None:
        self._config = config
        self._module = module
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._restore = restore
        self._on_progress = on_progress
        self._on_event = on_event
        self._client: EngineClient | None = None
        self._deaths: list[float] = []
        self._revival: asyncio.Task[None] | None = None
        self.death: EngineDeadError | None = None
        self.info: EngineInfo  # once it has started

    @property
    def client(self) -> EngineClient:
        assert self._client is not None, "the engine was not started"
        return self._client

    async def start(self) -> None:
        """Start a process and wait until its model is ready. Raises the error that kept it from starting."""
        self._client = EngineClient(
            self._config,
            self._on_outputs,
            self._on_client_death,
            self._on_progress,
            on_events=self._on_engine_events,
            module=self._module,
        )
        self.info = await self._client.start()

    async def stop(self) -> None:
        if self._revival is not None:
            self._revival.cancel()
            await asyncio.gather(self._revival, return_exceptions=True)
        if self._client is not None:
            await self._client.stop()

    def _on_client_death(self, error: EngineDeadError) -> None:
        self._on_death(self._note(error))
        if self._revival is None or self._revival.done():
            self._revival = asyncio.get_running_loop().create_task(self._revive())

    def _note(self, error: EngineDeadError) -> EngineDeadError:
        """Count a death; returns what to tell those who wait."""
        now = time.monotonic()
        self._deaths = [death for death in self._deaths if now - death < DEATHS_WINDOW_S] + [now]
        stays_down = f"it died {MAX_DEATHS} times in {DEATHS_WINDOW_S:.0f} s and stays down; see the log, then restart the server"
        return self._set_death(f"{error}; {'it is being restarted' if self._is_worth_a_try else stays_down}")

    @property
    def _is_worth_a_try(self) -> bool:
        return len(self._deaths) < MAX_DEATHS

    async def _revive(self) -> None:
        """Start processes until one serves with its adapters, or there is no point in it."""
        while self._is_worth_a_try:
            await self.client.stop()
            try:
                await self.start()
                await self._restore()
            except EngineDeadError as error:
                self._note(error)
                continue
            except Exception as error:
                self._set_death(f"the engine process could not be restarted: {error}")
                return
            if self.client.death is None:
                self.death = None
                logger.warning("the engine process is back")
                down_s = time.monotonic() - self._deaths[-1]
                self._tell(EventKind.RESTART, "the engine process is back", seconds=down_s)
                return

    def _set_death(self, reason: str) -> EngineDeadError:
        self.death = EngineDeadError(reason)
        logger.error("%s", reason)
        self._tell(EventKind.FAULT, reason, what="process", num_deaths=len(self._deaths))
        return self.death

    def _on_engine_events(self, events: tuple[EngineEvent, ...]) -> None:
        if self._on_event is not None:
            for event in events:
                self._on_event(event)

    def _tell(self, kind: EventKind, text: str, **details: Detail) -> None:
        self._on_engine_events((EngineEvent(kind, time.time(), text, details=details),))
