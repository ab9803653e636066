"""An engine's memory as its monitor sees it: the tiers of adapters, the KV cache, scratch memory, the machine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

from loraplex.engine.forecast import Forecast
from loraplex.engine.scheduler import Scheduler
from loraplex.kvcache.allocator import KVBlockAllocator
from loraplex.memory.care.monitor import MemoryLook
from loraplex.memory.manager import LoRAModelManager
from loraplex.metrics import MEMORY_TIERS, TierReport

COMPACT_BYTES = 64 << 20
COMPACT_S = 0.001
"""What compaction may copy and spend between two steps."""

THROTTLED_SHARE = 4
"""In low-memory mode one in so many of the usual places of a batch is given out anew."""


class Workspace(Protocol):
    """Scratch memory that is kept between steps. `release_workspace` gives back what it can; returns the bytes."""

    @property
    def workspace_nbytes(self) -> int: ...

    def release_workspace(self) -> int: ...


class EngineMemory:
    """monitor.MonitoredMemory. `adapters` is None in an engine without LoRA; `forecast` is None when nothing is predicted."""

    def __init__(
        self,
        adapters: LoRAModelManager | None,
        blocks: KVBlockAllocator,
        workspace: Workspace,
        scheduler: Scheduler,
        system_pressure: Callable[[], float | None],
        forecast: Forecast | None,
        clock: Callable[[], float],
    ) -> None:
        self._adapters = adapters
        self._blocks = blocks
        self._workspace = workspace
        self._scheduler = scheduler
        self._system_pressure = system_pressure
        self._forecast = forecast
        self._clock = clock

    def look(self) -> MemoryLook:
        pressure = {"kv": 1 - self._blocks.num_free_blocks / self._blocks.num_blocks}
        occupancy: dict[str, float] = {}
        used_bytes: dict[str, int] = {"workspace": self._workspace.workspace_nbytes}
        fragmentation = 0.0
        system = self._system_pressure()
        if system is not None:
            pressure["system"] = system
        if self._adapters is not None:
            report = self._adapters.report()
            for name in MEMORY_TIERS:
                tier = report.tier(name)
                occupancy[name] = _occupancy(tier)
                used_bytes[name] = tier.used_bytes
                if name == "device" or not self._adapters.is_shared:
                    pressure[name] = tier.pressure
            fragmentation = report.most_fragmentation
        return MemoryLook(pressure, occupancy, used_bytes, fragmentation)

    def reclaim_idle(self, tier: str, idle_s: float, share: int) -> int:
        return 0 if self._adapters is None else self._adapters.housekeeping.reclaim_idle(tier, idle_s, share)

    def compact(self) -> int:
        return (
            0 if self._adapters is None else self._adapters.compact(COMPACT_BYTES, self._clock() + COMPACT_S).num_moved
        )

    def prefetch_predicted(self) -> int:
        if self._adapters is None or self._forecast is None:
            return 0
        return self._adapters.housekeeping.prefetch(self._forecast.due())

    def release_caches(self) -> int:
        released = self._workspace.release_workspace()
        self._blocks.reset_cache()
        if self._adapters is not None:
            released += self._adapters.housekeeping.release_idle()
            self._adapters.release_pages()
        _trim_heap()
        return released

    def throttle(self, is_on: bool) -> None:
        self._scheduler.throttle(THROTTLED_SHARE if is_on else 1)


def _occupancy(tier: TierReport) -> float:
    by_count = tier.num_adapters / tier.max_adapters if tier.max_adapters else 0.0
    return max(tier.used_bytes / tier.max_bytes, by_count)


def _trim_heap() -> None:
    """What malloc keeps for later goes back to the system; glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
