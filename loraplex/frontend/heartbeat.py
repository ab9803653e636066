"""Whether an engine process hangs: how long its step loop has been silent, and what the process did meanwhile.

A long step is silent too: the prompt of a large model on a slow processor takes minutes. It computes, or waits for the
disk that its weights are mapped from, and a process that is stopped or waits for a lock does neither. So silence
without work counts against the limit, and silence of any kind against MAX_STEP times the limit, which ends a loop that
computes and never comes back.
"""

from __future__ import annotations

from collections.abc import Callable

import psutil

MAX_STEP = 10.0
MIN_WORK = 0.05
"""Share of one core from which a process computes."""

LONGEST_TICK_S = 1.0


class Heartbeat:
    """Counts silence in ticks of the watching loop, so that a stall of the watcher is no silence of the engine.

    `is_working(seconds)`: whether the process did something in the seconds since it was asked last.
    """

    def __init__(self, limit_s: float, is_working: Callable[[float], bool]) -> None:
        self._limit_s = limit_s
        self._is_working = is_working
        self.tick_s = min(LONGEST_TICK_S, limit_s / 4)
        self.silence_s = 0.0
        self._idle_s = 0.0

    def heard(self) -> None:
        self.silence_s = self._idle_s = 0.0

    def tick(self) -> bool:
        """To be called every `tick_s`; returns whether the process hangs."""
        self.silence_s += self.tick_s
        if not self._is_working(self.tick_s):
            self._idle_s += self.tick_s
        return self._idle_s >= self._limit_s or self.silence_s >= MAX_STEP * self._limit_s


class ProcessWork:
    """`Heartbeat`'s question, answered by the system for one process."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._used_s = 0.0

    def __call__(self, seconds: float) -> bool:
        """Raises nothing: a process that has ended does no work, and its end is noticed elsewhere."""
        try:
            times = self._process.cpu_times()
            is_reading = self._process.status() == psutil.STATUS_DISK_SLEEP
        except psutil.Error:
            return False
        before_s, self._used_s = self._used_s, times.user + times.system
        return is_reading or self._used_s - before_s >= MIN_WORK * seconds
