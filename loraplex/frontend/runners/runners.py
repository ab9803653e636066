"""All engine processes of a front: they start together, each request is placed at one, each verb reaches all.

start    every one is ready, or the front does not start
place    snapshots -> routing.place -> one runner, which keeps the request to its end
death    that runner's requests fail; its supervisor starts it again, it joins the store, it takes requests again
load     falls: requests move to the others, and its process ends; rises: it starts again, as after a death
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from loraplex.adapter_store import MemoryQuota
from loraplex.config import EngineConfig
from loraplex.core import AdapterSpec, EngineInfo, TokenOutput
from loraplex.errors import EngineDeadError, EngineTimeoutError, LoraplexError
from loraplex.events import EngineEvent
from loraplex.frontend import messages as msg
from loraplex.frontend.client import ProgressCallback
from loraplex.frontend.runners.consolidator import Consolidator
from loraplex.frontend.runners.runner import Placement, Runner, needs_of
from loraplex.frontend.runners.settings import RunnerSettings
from loraplex.frontend.runners.store import StoreOfRunners
from loraplex.frontend.runners.streams import Mover, OutputStream
from loraplex.frontend.runners.sums import info_of_all, stats_of_all
from loraplex.frontend.supervisor import EngineSupervisor, Supervision
from loraplex.metrics import EngineStats, RunnerReport
from loraplex.routing import Needs, RunnerState, place

_log = logging.getLogger(__name__)

STATS_PATIENCE_S = 4.0
"""How long the figures of the others wait for one runner's; a page of metrics waits a little longer for all."""


class Runners:
    """One runner is an engine as it always was: nothing is placed, and its store is its process's own.

    on_outputs, on_death and restore are told which runner it is; restore makes a new process of several know what is
    registered by `join`.
    """

    def __init__(
        self,
        config: EngineConfig,
        settings: RunnerSettings,
        on_outputs: Callable[[Runner, tuple[TokenOutput, ...]], None],
        on_death: Callable[[Runner, EngineDeadError], None],
        restore: Callable[[Runner], Awaitable[None]],
        on_progress: ProgressCallback | None,
        on_event: Callable[[EngineEvent], None],
        supervision: Supervision | None,
    ) -> None:
        self._policy = settings.policy
        self._rules = settings.rules
        self._on_event = on_event
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._restore = restore
        self._consolidator: Consolidator | None = None
        self._quotas: Mapping[str, MemoryQuota] = {}
        self._telling: set[asyncio.Task[None]] = set()
        specs: dict[int, AdapterSpec] = {}
        self.all = tuple(Runner(number, each, specs) for number, each in enumerate(settings.configs(config)))
        self._store = StoreOfRunners(self.all, self._death_now, specs)
        of_first = supervision or Supervision()
        of_others = replace(of_first, child=None)
        for runner in self.all:
            runner.supervisor = EngineSupervisor(
                runner.config,
                partial(on_outputs, runner),
                partial(self._on_runner_death, runner),
                partial(self._restore_runner, runner),
                on_progress if runner is self.all[0] else None,
                partial(self._on_runner_event, runner),
                of_first if runner is self.all[0] else of_others,
            )

    def __len__(self) -> int:
        return len(self.all)

    @property
    def first(self) -> Runner:
        return self.all[0]

    @property
    def info(self) -> EngineInfo:
        return info_of_all([runner.supervisor.info for runner in self.all])

    @property
    def death(self) -> EngineDeadError | None:
        """Why nothing can be served now: of the runner that is back soonest. None while one serves."""
        if self.num_serving:
            return None
        wanted = [runner for runner in self.all if runner.state is not RunnerState.RELEASED] or self.all
        deaths = [death for runner in wanted if (death := runner.supervisor.death) is not None]
        return min(deaths, key=lambda each: each.retry_after_s)

    @property
    def num_serving(self) -> int:
        return sum(runner.is_serving for runner in self.all)

    @property
    def are_behind(self) -> bool:
        """Whether each that serves has much to read."""
        serving = [runner.client.is_behind for runner in self.all if runner.is_serving]
        return bool(serving) and all(serving)

    @property
    def num_released(self) -> int:
        return sum(runner.state is RunnerState.RELEASED for runner in self.all)

    @property
    def starting(self) -> tuple[str, ...]:
        """Names of those that are wanted and take no requests."""
        away = (runner for runner in self.all if not runner.is_serving)
        return tuple(runner.name for runner in away if runner.state is not RunnerState.RELEASED)

    async def start(self) -> None:
        """Raises the first error that kept one from starting; the others are the caller's to stop."""
        await _all_or_first_error([runner.supervisor.start() for runner in self.all])
        for runner in self.all:
            runner.is_member = True

    def consolidate(self, streams: Mapping[str, OutputStream], mover: Mover, is_kept: Callable[[], bool]) -> None:
        """From now on requests move, runners end and come back by load, and hot adapters are copied.

        is_kept: whether no process may be ended now.
        """
        if len(self.all) > 1:
            self._consolidator = Consolidator(
                self.all, self._rules, self._policy, streams, mover, is_kept, self._on_event
            )
            self._consolidator.start()

    async def stop(self) -> None:
        if self._consolidator is not None:
            await self._consolidator.stop()
        await asyncio.gather(*(runner.supervisor.stop() for runner in self.all))

    async def wait_until_given_up(self) -> None:
        """Return when no runner is started again any more."""
        await asyncio.gather(*(runner.supervisor.has_given_up.wait() for runner in self.all))

    # --------------------------------------------------------------------------------------------------------- requests

    def place(self, message: msg.AddRequests, rank: int) -> Placement:
        """Where the completions of one prompt go. rank: of its adapter. Raises EngineDeadError: no runner serves."""
        if len(self.all) == 1:
            return Placement(self.first, Needs(), message)
        needs, now_s = needs_of(message, rank), time.monotonic()
        snapshots = {runner.name: runner.snapshot(now_s) for runner in self.all}
        name = place(needs, snapshots.values(), self._policy, now_s)
        if self._consolidator is not None and (name is None or not snapshots[name].fits(needs)):
            name = self._consolidator.recall(needs, now_s, must_fit=name is not None) or name
        if name is None:
            raise self._death_now()
        return Placement(self.all[int(name)], needs, message)

    def place_at(self, message: msg.AddRequests, rank: int, runner: Runner) -> Placement:
        """In a runner that was chosen before; in another one where it has ended. Raises as `place`."""
        if not runner.is_serving:
            return self.place(message, rank)
        return Placement(runner, needs_of(message, rank), message)

    # --------------------------------------------------------------------------------------------- calls of all of them

    async def call_store(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """For `RemoteStore`: every runner does it, or none."""
        if len(self.all) == 1:
            return await self.first.call(msg.CallStore, method, arguments)
        return await self._store.call(method, arguments)

    async def join(self, runner: Runner) -> None:
        """Make a new process know all that is registered; from then on it is told of every change."""
        await self._store.join(runner)

    def limit_tenants(self, quotas: Mapping[str, MemoryQuota]) -> None:
        """Every process has these limits soon, instead of all before; one that starts has them before its adapters.
        From any thread."""
        self._loop.call_soon_threadsafe(self._tell_all_quotas, quotas)

    def _tell_all_quotas(self, quotas: Mapping[str, MemoryQuota]) -> None:
        self._quotas = quotas
        for runner in self.all:
            if runner.client.is_alive:
                task = asyncio.get_running_loop().create_task(self._tell_quotas(runner))
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)

    async def _tell_quotas(self, runner: Runner) -> None:
        """What is sent is what holds then: of two that are under way the later one is the newer."""
        try:
            await runner.call(msg.CallStore, "set_quotas", (self._quotas,))
        except EngineDeadError:
            return  # the next process is told when it starts
        except LoraplexError as error:
            _log.error("runner %s does not know the limits of tenants in memory: %s", runner.name, error)

    async def _restore_runner(self, runner: Runner) -> None:
        """A new process."""
        if self._quotas:
            await runner.call(msg.CallStore, "set_quotas", (self._quotas,))
        await self._restore(runner)

    async def call(self, message_type: type, *values: Any) -> list[Any]:
        """Call all that serve, and raise what the first one answers with."""
        serving = [runner for runner in self.all if runner.is_serving] or self.all
        return await _all_or_first_error([runner.call(message_type, *values) for runner in serving])

    async def stats(self) -> EngineStats:
        """Of all that answer, with the counters of those that were released. Raises EngineError when none does."""
        if len(self.all) == 1:
            stats: EngineStats = await self.first.call(msg.GetStats)
            return stats
        found = [report.stats for report in await self.reports() if report.stats is not None]
        if not found and self.death is None:
            raise EngineTimeoutError(f"no runner answered within {STATS_PATIENCE_S:g} s; try again later")
        if not found:
            raise self._death_now()
        ended = None if self._consolidator is None else self._consolidator.ended
        return stats_of_all(found if ended is None else [*found, ended])

    async def reports(self) -> tuple[RunnerReport, ...]:
        return tuple(await asyncio.gather(*map(_report, self.all)))

    def _death_now(self) -> EngineDeadError:
        """An error of its own for each who meets it."""
        death = self.death or EngineDeadError("the engine processes are being restarted")
        return EngineDeadError(str(death), death.retry_after_s)

    # --------------------------------------------------------------------------------------------- what processes tell

    def _on_runner_death(self, runner: Runner, error: EngineDeadError) -> None:
        runner.lose_process()
        self._on_death(runner, error)

    def _on_runner_event(self, runner: Runner, event: EngineEvent) -> None:
        if len(self.all) > 1:
            runner.hear(event)
            event = replace(event, details={**event.details, "runner": runner.number})
        self._on_event(event)


async def _report(runner: Runner) -> RunnerReport:
    info, death = runner.supervisor.info, runner.supervisor.death
    report = RunnerReport(runner.name, info.device, num_moved=runner.num_moved)
    if death is not None:
        return replace(report, message=str(death), is_released=runner.state is RunnerState.RELEASED)
    try:
        async with asyncio.timeout(STATS_PATIENCE_S):
            stats = await runner.call(msg.GetStats)
    except (EngineDeadError, EngineTimeoutError, TimeoutError):
        return report
    return replace(report, stats=stats)


async def _all_or_first_error(work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All values in order; or the first error, and what is not done by then is cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
