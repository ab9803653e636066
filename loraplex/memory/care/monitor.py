"""The memory's periodic look at itself: pressure by tier, its remedies, and the low-memory mode with its way back.

    every interval_s, at once when an allocation failed, every CRITICAL_LOOK_S in low-memory mode
    pressure   the share that cannot be freed now (in use, pinned); what is idle is no pressure
    occupancy  used / budget: a full cache is no danger, but from `high` on the long idle leave, a few at each look
    critical   system or host pressure >= critical, or an allocation failed  ->  low-memory mode
    relaxed    both of these < relaxed for RELAXED_LOOKS looks in a row      ->  normal again
    gpu        taken share of a GPU's memory >= critical  ->  torch's allocator gives back what it keeps, in any mode

No thread of its own: the engine calls `tick` between steps and when it is idle. What it does is behind
`MonitoredMemory`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loraplex.events import EventKind, EventLog
from loraplex.metrics import MemoryMode, MemorySample

MAX_HISTORY = 240
"""Looks that are kept: two hours of them at the default interval."""

CRITICAL_LOOK_S = 1.0
RELAXED_LOOKS = 3
"""So many relaxed looks in a row end the low-memory mode: one may be a gap between two bursts."""

RECLAIMED_SHARE = 8
"""At each look one in so many of the long idle leaves, so that a full tier empties over minutes and not at once."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """interval_s: seconds between looks. high, critical, relaxed: shares. long_idle_s: unused so long, it may leave.

    max_fragmentation: share of the adapters' chunks that packing frees, from which compaction is worth its copying.
    """

    interval_s: float = 30.0
    high: float = 0.80
    critical: float = 0.95
    relaxed: float = 0.70
    long_idle_s: float = 300.0
    max_fragmentation: float = 0.25


@dataclass(frozen=True, slots=True)
class MemoryLook:
    """What the monitor sees. Pressure by `device`, `host`, `kv`, `system`; occupancy and bytes by tier.

    fragmentation: of the device's adapters; most_fragmentation: of those or of the host's. gpu: the share of the GPU's
    memory that is taken, by all processes; no pressure, since the arena is a fixed part of it. None without a GPU.
    """

    pressure: Mapping[str, float]
    occupancy: Mapping[str, float]
    used_bytes: Mapping[str, int]
    fragmentation: float
    most_fragmentation: float
    gpu: float | None = None


class MonitoredMemory(Protocol):
    """What the monitor sees and does. No call blocks for long."""

    def look(self) -> MemoryLook: ...

    def reclaim_idle(self, tier: str, idle_s: float, share: int) -> int:
        """Let one in `share` of those that were not used for `idle_s` leave a tier (at least one); returns how many."""
        ...

    def reclaim_beyond_quotas(self) -> None:
        """What is idle of tenants that have more than their limits leaves both tiers."""
        ...

    def compact(self) -> int:
        """Move extents for a moment; returns how many. 0 when there is nothing to gain."""
        ...

    def prefetch_predicted(self) -> int:
        """Bring adapters nearer that are about to be asked for; returns how many."""
        ...

    def release_caches(self, short_of: str | None) -> int:
        """Give back what can be made again: idle adapters on the device, scratch memory, cached prefixes, free pages;
        returns bytes.

        short_of: what is critical, `host` or `system`; then copies of a host tier beside the device leave too. None: an
        allocation failed.
        """
        ...

    def release_gpu(self) -> int:
        """Have torch's allocator give back what it keeps for later; returns bytes."""
        ...

    def throttle(self, is_on: bool) -> None:
        """Admit fewer requests at once, or as many as ever."""
        ...


class MemoryMonitor:
    """Not thread-safe but for `alarm`: the engine's thread calls it."""

    def __init__(
        self,
        memory: MonitoredMemory,
        thresholds: Thresholds,
        events: EventLog,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._thresholds = thresholds
        self._events = events
        self._clock = clock
        self._wall_clock = wall_clock
        self._next_look_s = clock() + thresholds.interval_s
        self._alarm: str | None = None
        self._num_relaxed = 0
        self._is_compacting = False
        self._is_relaxed = True
        self._entered_s = 0.0
        self.mode = MemoryMode.NORMAL
        self.num_mode_changes = 0
        self.history: deque[MemorySample] = deque(maxlen=MAX_HISTORY)

    def alarm(self, reason: str) -> None:
        """An allocation failed: the next tick looks at once, and enters low-memory mode. From any thread."""
        self._alarm = reason

    @property
    def is_due(self) -> bool:
        """Whether a tick would look, or compact."""
        return self._is_look_due or self._is_compacting

    @property
    def _is_look_due(self) -> bool:
        return self._alarm is not None or self._clock() >= self._next_look_s

    def tick(self) -> None:
        """Once a step, and now and then when idle. Cheap when nothing is due."""
        if self._is_look_due:
            self._look()
        if self._is_compacting:
            self._is_compacting = self._memory.compact() > 0

    def _look(self) -> None:
        alarm, self._alarm = self._alarm, None
        look = self._memory.look()
        self._change_mode(look, alarm)
        self._next_look_s = self._clock() + (
            CRITICAL_LOOK_S if self.mode is MemoryMode.LOW_MEMORY else self._thresholds.interval_s
        )
        self.history.append(
            MemorySample(self._wall_clock(), self.mode, _shown(look), look.used_bytes, look.fragmentation)
        )
        if look.gpu is not None and look.gpu >= self._thresholds.critical:
            self._memory.release_gpu()
        self._memory.reclaim_beyond_quotas()
        self._reclaim(look)
        self._is_compacting = self._is_compacting or look.most_fragmentation > self._thresholds.max_fragmentation
        self._is_relaxed = max(look.pressure.values(), default=0.0) < self._thresholds.high
        self.prefetch()

    def prefetch(self) -> None:
        """Bring what is predicted nearer, if the last look saw normal pressure."""
        if self._is_relaxed and self.mode is MemoryMode.NORMAL:
            self._memory.prefetch_predicted()

    def _reclaim(self, look: MemoryLook) -> None:
        for tier, occupancy in look.occupancy.items():
            if occupancy >= self._thresholds.high:
                self._memory.reclaim_idle(tier, self._thresholds.long_idle_s, RECLAIMED_SHARE)

    # ----------------------------------------------------------------------------------------------------------- mode

    def _change_mode(self, look: MemoryLook, alarm: str | None) -> None:
        worst, pressure = max(
            ((name, look.pressure.get(name, 0.0)) for name in ("host", "system")), key=lambda item: item[1]
        )
        short_of = worst if pressure >= self._thresholds.critical else None
        reason = alarm or (
            f"{worst} pressure is {pressure:.0%}, critical from {self._thresholds.critical:.0%}"
            if short_of is not None
            else None
        )
        if reason is not None:
            self._num_relaxed = 0
            if self.mode is MemoryMode.NORMAL:
                self._enter(reason, short_of)
            else:
                self._memory.release_caches(short_of)
        elif self.mode is MemoryMode.LOW_MEMORY:
            self._num_relaxed = self._num_relaxed + 1 if pressure < self._thresholds.relaxed else 0
            if self._num_relaxed >= RELAXED_LOOKS:
                self._leave()

    def _enter(self, reason: str, short_of: str | None) -> None:
        self.mode = MemoryMode.LOW_MEMORY
        self.num_mode_changes += 1
        self._entered_s = self._clock()
        released = self._memory.release_caches(short_of)
        self._memory.throttle(True)
        text = f"low-memory mode: {reason}; {released} bytes released, fewer requests are admitted"
        self._events.add(EventKind.MODE, text, mode=self.mode.value, reason=reason, released_bytes=released)

    def _leave(self) -> None:
        self.mode = MemoryMode.NORMAL
        self.num_mode_changes += 1
        self._num_relaxed = 0
        self._memory.throttle(False)
        seconds = self._clock() - self._entered_s
        text = f"normal mode again after {seconds:.0f} s of low memory"
        self._events.add(EventKind.MODE, text, mode=self.mode.value, seconds=seconds)


def _shown(look: MemoryLook) -> Mapping[str, float]:
    return look.pressure if look.gpu is None else {**look.pressure, "gpu": look.gpu}


# ------------------------------------------------------------------------------------------------------- system memory


def system_pressure(root: Path = Path("/")) -> float | None:
    """The share of memory that cannot be had any more, 0 to 1: of the machine or of the container's limit, whichever is
    nearer its end."""
    return _pressure_with(0, root)


def has_room(nbytes: int, max_pressure: float, root: Path = Path("/")) -> bool:
    """Whether `system_pressure` stays below a share with so many bytes more; also where it is not known."""
    pressure = _pressure_with(nbytes, root)
    return pressure is None or pressure < max_pressure


def _pressure_with(nbytes: int, root: Path) -> float | None:
    found = [each for each in (_machine(root), _container(root)) if each is not None]
    return max((max(0.0, min(1.0, (used + nbytes) / total)) for used, total in found), default=None)


def _machine(root: Path) -> tuple[int, int] | None:
    """(used bytes, all), from MemAvailable, in which the kernel counts what it can take back."""
    found = _numbers(root / "proc/meminfo", r"^(MemTotal|MemAvailable):\s+(\d+)")
    if "MemAvailable" not in found or not found.get("MemTotal"):
        return None
    return 1024 * (found["MemTotal"] - found["MemAvailable"]), 1024 * found["MemTotal"]


def _container(root: Path) -> tuple[int, int] | None:
    """cgroup v2: what is in use but for inactive file pages, which the kernel takes back."""
    folder = root / "sys/fs/cgroup"
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2 here, or the limit is "max"
        return None
    inactive = _numbers(folder / "memory.stat", r"^(inactive_file) (\d+)").get("inactive_file", 0)
    return (used - inactive, limit) if limit else None


def _numbers(path: Path, pattern: str) -> dict[str, int]:
    try:
        return {name: int(number) for name, number in re.findall(pattern, path.read_text(), re.MULTILINE)}
    except OSError:
        return {}
