"""Threads for loads beside the step loop, and places for readers.

Jobs of one tenant run in order, `num_threads` at a time. Those of others do not wait for them: a tenant's directory may
hang, and its files may take seconds to judge.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from loraplex.processes.fair_turns import STUCK_S

MAX_STUCK = 32
"""For so many of a tenant there are other threads."""

MAX_THREADS = 256

Job = Callable[[], None]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Lane:
    """Of a tenant. began_s: of each job that has a thread."""

    jobs: deque[Job] = field(default_factory=deque)
    began_s: dict[object, float] = field(default_factory=dict)


class LoaderThreads:
    """Daemon threads, as many as there are jobs that may run; `num_threads` of them stay. A thread that hangs on a dead
    disk does not keep the process alive, and after `stuck_s` its job does not count any more. Jobs for which the system
    has no thread wait for the next that comes free, and twice in `stuck_s` one is tried to be started.
    """

    def __init__(self, num_threads: int, stuck_s: float = STUCK_S, max_stuck: int = MAX_STUCK) -> None:
        self._num_threads = num_threads
        self._max_stuck = max_stuck
        self._stuck_s = stuck_s
        self._lanes: dict[str, _Lane] = {}
        self._ready: deque[tuple[str, object, Job]] = deque()
        self._changed = threading.Condition()
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._is_closed = threading.Event()
        threading.Thread(target=self._watch, name="loraplex-loader-watch", daemon=True).start()

    def submit(self, job: Job, tenant: str = "") -> None:
        with self._changed:
            if not self._is_closed.is_set():
                self._lanes.setdefault(tenant, _Lane()).jobs.append(job)
                self._start_locked(tenant)

    def close(self, timeout_s: float = 5.0) -> None:
        """Jobs that have not begun are forgotten."""
        with self._changed:
            self._is_closed.set()
            self._ready.clear()
            for lane in self._lanes.values():
                lane.jobs.clear()
            threads = tuple(self._threads)
            self._changed.notify_all()
        for thread in threads:
            thread.join(timeout_s)

    def _start_locked(self, tenant: str) -> None:
        """Give threads to those jobs of a tenant that may run now."""
        lane = self._lanes[tenant]
        stuck_since_s = time.monotonic() - self._stuck_s
        num_stuck = sum(began_s <= stuck_since_s for began_s in lane.began_s.values())
        most = self._num_threads + min(num_stuck, self._max_stuck)
        while lane.jobs and len(lane.began_s) < most:
            if self._num_idle <= len(self._ready):
                if len(self._threads) == MAX_THREADS:
                    return
                thread = threading.Thread(target=self._work, name="loraplex-loader", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the system has none: they wait for a thread that is there
                    _log.warning("no thread for a job: %s", error)
                    return
                self._threads.add(thread)
                self._num_idle += 1  # until it takes a job
            turn = object()
            lane.began_s[turn] = time.monotonic()
            self._ready.append((tenant, turn, lane.jobs.popleft()))
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._is_closed.is_set())
                self._num_idle -= 1
                if not self._ready:
                    break
                tenant, turn, job = self._ready.popleft()
            try:
                job()
            except Exception:
                _log.exception("a job of a loader's thread failed")
            finally:
                with self._changed:
                    del self._lanes[tenant].began_s[turn]
                    self._num_idle += 1
                    self._start_all_locked()
                    is_spare = self._num_idle > self._num_threads + len(self._ready)
                    self._num_idle -= is_spare
            if is_spare:
                break
        with self._changed:
            self._threads.discard(threading.current_thread())

    def _start_all_locked(self) -> None:
        for tenant, lane in list(self._lanes.items()):
            if lane.jobs:
                self._start_locked(tenant)
            elif not lane.began_s:
                del self._lanes[tenant]

    def _watch(self) -> None:
        while not self._is_closed.wait(self._stuck_s / 2):
            with self._changed:
                self._start_all_locked()


class ReadSlots:
    """At most `num_slots` readers at a time, but for those that read for `stuck_s` (a dead disk). While `is_shared`,
    a tenant leaves one of several slots to others; readers of none ("") may take all."""

    def __init__(self, num_slots: int, stuck_s: float = STUCK_S, is_shared: Callable[[], bool] = lambda: True) -> None:
        self._num_slots = num_slots
        self._stuck_s = stuck_s
        self._is_shared = is_shared
        self._changed = threading.Condition()
        self._running: list[tuple[float, str]] = []

    @contextmanager
    def of(self, tenant: str) -> Iterator[None]:
        with self._changed:
            while (wait_s := self._wait_s(tenant)) > 0:
                self._changed.wait(wait_s)
            turn = time.monotonic(), tenant
            self._running.append(turn)
        try:
            yield
        finally:
            with self._changed:
                self._running.remove(turn)
                self._changed.notify_all()

    def _wait_s(self, tenant: str) -> float:
        """Until enough of those that read are stuck; 0 when there is a slot."""
        num_own = max(1, self._num_slots - 1) if tenant and self._is_shared() else self._num_slots
        own_s = [began_s for began_s, each in self._running if each == tenant]
        free_s = max(_nth_last([began_s for began_s, _ in self._running], self._num_slots), _nth_last(own_s, num_own))
        return free_s + self._stuck_s - time.monotonic()


def _nth_last(times_s: list[float], count: int) -> float:
    """-Infinity when there are fewer."""
    return sorted(times_s)[-count] if len(times_s) >= count else -math.inf
