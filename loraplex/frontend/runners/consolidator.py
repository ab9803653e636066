"""Does what `routing` decides for runners: drains and releases them, brings them back, moves requests, copies adapters.

It looks every TICK_S at what the front knows; no process is asked. What it begins runs beside it, and ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from loraplex.core import Tier
from loraplex.errors import EngineDeadError, LoraplexError
from loraplex.events import Detail, EngineEvent, EventKind
from loraplex.frontend import messages as msg
from loraplex.frontend.runners.runner import Runner
from loraplex.frontend.runners.streams import Mover, OutputStream
from loraplex.frontend.runners.sums import counts_of, stats_of_all
from loraplex.metrics import EngineStats
from loraplex.routing import Copy, Held, HotAdapters, Load, Member, Needs, Policy, Rules, RunnerState, decide, place

logger = logging.getLogger(__name__)

TICK_S = 0.25
START_PATIENCE_S = 60.0
"""How long a runner that is to come back counts as one that soon serves; others are started in its place then."""

HOT_TICKS = 4
"""Adapters are looked at once in so many ticks."""


class Consolidator:
    """is_kept: whether no process may be released now. Belongs to the runners' event loop."""

    def __init__(
        self,
        runners: Sequence[Runner],
        rules: Rules,
        policy: Policy,
        streams: Mapping[str, OutputStream],
        mover: Mover,
        is_kept: Callable[[], bool],
        on_event: Callable[[EngineEvent], None],
    ) -> None:
        self._by_name = {runner.name: runner for runner in runners}
        self._rules = rules
        self._policy = policy
        self._streams = streams
        self._mover = mover
        self._is_kept = is_kept
        self._on_event = on_event
        self.ended: EngineStats | None = None  # counters of the processes that were released
        self._load = Load()
        self._hot = HotAdapters()
        self._empty_since_s: dict[Runner, float] = {}
        self._releasing: set[Runner] = set()
        self._started_s: dict[Runner, float] = {}
        self._work: set[asyncio.Task[Any]] = set()
        self._moved: Counter[tuple[str, str]] = Counter()  # since they were told, by source and target
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        tasks = [*self._work, *([] if self._loop is None else [self._loop])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def recall(self, needs: Needs, now_s: float, *, must_fit: bool) -> str | None:
        """Open the runner that drains and takes a request for which no other has room, or is open at all; its name."""
        draining = [each for each in self._by_name.values() if each.state is RunnerState.DRAINING and each.is_serving]
        snapshots = [each.snapshot(now_s, is_draining=False) for each in draining]
        name = place(needs, [each for each in snapshots if each.fits(needs) or not must_fit], self._policy, now_s)
        if name is not None:
            self._by_name[name].state = RunnerState.OPEN
        return name

    async def _run(self) -> None:
        num_ticks = 0
        while True:
            await asyncio.sleep(TICK_S)
            num_ticks += 1
            try:
                self._tick(time.monotonic())
                if num_ticks % HOT_TICKS == 0:
                    self._copy_adapters(time.monotonic())
            except Exception:  # what one look trips over must not end all looks
                logger.exception("the runners could not be looked after")

    # ---------------------------------------------------------------------------------------- as few as the load needs

    def _tick(self, now_s: float) -> None:
        if self._rules.min_runners >= len(self._by_name):
            return
        self._tell_moves()
        members = self._members(now_s)
        self._load.note(now_s, sum(each.snapshot.num_requests for each in members))
        start_s = max(runner.supervisor.start_s for runner in self._by_name.values())
        decision = decide(members, self._load, start_s, self._rules, self._policy, now_s)
        self._set(decision.drain, RunnerState.DRAINING)
        self._set(decision.reopen, RunnerState.OPEN)
        for runner in self._set(decision.start, RunnerState.STARTING):
            self._started_s[runner] = now_s
            runner.supervisor.resume()
        for runner in map(self._by_name.__getitem__, () if self._is_kept() else decision.release):
            if runner not in self._releasing:
                self._releasing.add(runner)
                self._begin(self._release(runner))
        for move in decision.moves:
            self._begin(self._move(self._streams[move.key], self._by_name[move.target]))

    def _members(self, now_s: float) -> list[Member]:
        held: dict[Runner, list[Held]] = {runner: [] for runner in self._by_name.values()}
        if self._may_move():
            for stream in self._streams.values():
                held[stream.placement.runner].append(stream.held(now_s))
        members = []
        for runner, each in held.items():
            self._note_start(runner, now_s)
            if runner.num_requests or runner.state in (RunnerState.RELEASED, RunnerState.STARTING):
                self._empty_since_s.pop(runner, None)  # the time that it was away is none that it was idle
            else:
                self._empty_since_s.setdefault(runner, now_s)
            members.append(Member(runner.snapshot(now_s), runner.state, tuple(each), self._empty_since_s.get(runner)))
        return members

    def _note_start(self, runner: Runner, now_s: float) -> None:
        is_overdue = now_s - self._started_s.get(runner, now_s) > START_PATIENCE_S
        is_begun = runner.state in (RunnerState.STARTING, RunnerState.RELEASED)  # RELEASED: it died while it was ended
        has_failed = runner.state is RunnerState.STARTING and (is_overdue or runner.supervisor.has_given_up.is_set())
        if (is_begun and runner.is_serving) or has_failed:
            runner.state = RunnerState.OPEN
            self._started_s.pop(runner, None)

    def _may_move(self) -> bool:
        """Whether anything could: requests are not looked at one by one while all runners are needed."""
        runners = self._by_name.values()
        num_places = sum(runner.config.max_num_seqs for runner in runners if runner.is_serving)
        is_draining = any(runner.state is RunnerState.DRAINING for runner in runners)
        return is_draining or sum(runner.num_requests for runner in runners) <= num_places

    def _set(self, names: Iterable[str], state: RunnerState) -> list[Runner]:
        runners = [self._by_name[name] for name in names]
        for runner in runners:
            runner.state = state
            logger.info("runner %s: %s", runner.name, state.value)
        return runners

    async def _release(self, runner: Runner) -> None:
        """Its counters first; a request that comes meanwhile keeps it."""
        try:
            stats = await runner.call(msg.GetStats)
        except LoraplexError:
            return  # it hangs or has died: that is its supervisor's
        finally:
            self._releasing.discard(runner)
        if runner.state is not RunnerState.DRAINING or runner.num_requests or not runner.is_serving or self._is_kept():
            return
        counts = counts_of(stats)
        self.ended = counts if self.ended is None else stats_of_all([self.ended, counts])
        runner.state = RunnerState.RELEASED
        runner.lose_process()
        runner.supervisor.release()
        text = f"runner {runner.name} was released: the others have room for the load"
        self._tell(EventKind.RELEASE, text, runner=runner.number)

    async def _move(self, stream: OutputStream, target: Runner) -> None:
        source = stream.placement.runner
        if await self._mover.move(stream, target):
            self._moved[source.name, stream.placement.runner.name] += 1

    def _tell_moves(self) -> None:
        for (source, target), count in self._moved.items():
            text = f"requests moved from runner {source} to runner {target}"
            self._tell(EventKind.MOVE, text, runner=int(source), target=int(target), num_requests=count)
        self._moved.clear()

    # ---------------------------------------------------------------------------------------------------- hot adapters

    def _copy_adapters(self, now_s: float) -> None:
        copies = self._hot.decide([runner.snapshot(now_s) for runner in self._by_name.values()], now_s)
        for copy in copies.make:
            self._begin(self._make(copy))
        for copy in copies.take_back:
            self._begin(self._take_back(copy))

    async def _make(self, copy: Copy) -> None:
        runner, adapter_id = self._by_name[copy.runner], int(copy.adapter)
        try:
            await runner.call(msg.CallStore, "promote_adapter", (adapter_id,))
        except LoraplexError as error:
            logger.info("adapter_id %d was not copied to runner %s: %.300s", adapter_id, runner.name, error)
            return
        runner.memory.learn_tiers([(copy.adapter, Tier.DEVICE)])
        logger.info("adapter_id %d has a queue and is on runner %s, too", adapter_id, runner.name)

    async def _take_back(self, copy: Copy) -> None:
        """From the device alone, unless it is in use there."""
        runner, adapter_id = self._by_name[copy.runner], int(copy.adapter)
        try:
            found = await runner.call(msg.CallStore, "list_adapters", ((adapter_id,),))
            if any(each.tier is Tier.DEVICE and not each.is_pinned and not each.num_running for each in found):
                await runner.call(msg.CallStore, "evict_adapter", (adapter_id,))
        except EngineDeadError:
            return
        except LoraplexError as error:
            logger.info("adapter_id %d stays on runner %s: %.300s", adapter_id, runner.name, error)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def _tell(self, kind: EventKind, text: str, **details: Detail) -> None:
        self._on_event(EngineEvent(kind, time.time(), text, details=details))
