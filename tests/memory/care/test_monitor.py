"""The monitor on a fake clock: when it looks, what it does then, and the way into low-memory mode and back."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from loraplex.events import EventKind, EventLog
from loraplex.memory.care.monitor import (
    CRITICAL_LOOK_S,
    MAX_HISTORY,
    RELAXED_LOOKS,
    MemoryLook,
    MemoryMonitor,
    Thresholds,
)
from loraplex.metrics import MemoryMode
from tests.memory.rig import FakeClock


@dataclass
class FakeMemory:
    """Shows what a test sets; writes down what it is told."""

    pressure: dict[str, float] = field(default_factory=lambda: {"device": 0.1, "host": 0.1, "kv": 0.1, "system": 0.1})
    occupancy: dict[str, float] = field(default_factory=dict)
    fragmentation: float = 0.0
    chunks_to_free: int = 0
    gpu: float | None = None
    of_device: float = 0.0
    calls: list[str] = field(default_factory=list)
    short_of: list[str | None] = field(default_factory=list)
    num_reclaimed_beyond_quotas: int = 0

    def look(self) -> MemoryLook:
        self.calls.append("look")
        return MemoryLook(
            dict(self.pressure), dict(self.occupancy), {"host": 7}, self.of_device, self.fragmentation, self.gpu
        )

    def reclaim_idle(self, tier: str, idle_s: float, share: int) -> int:
        self.calls.append(f"reclaim {tier} after {idle_s:.0f}")
        return 1

    def reclaim_beyond_quotas(self) -> None:
        self.num_reclaimed_beyond_quotas += 1

    def compact(self) -> int:
        self.calls.append("compact")
        self.chunks_to_free -= 1
        return int(self.chunks_to_free >= 0)

    def prefetch_predicted(self) -> int:
        self.calls.append("prefetch")
        return 0

    def release_caches(self, short_of: str | None) -> int:
        self.calls.append("release")
        self.short_of.append(short_of)
        return 640

    def release_gpu(self) -> int:
        self.calls.append("release gpu")
        return 64

    def throttle(self, is_on: bool) -> None:
        self.calls.append(f"throttle {is_on}")


class Bench:
    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self.memory, self.clock, self.events = FakeMemory(), FakeClock(), EventLog(lambda: 5.0)
        self.monitor = MemoryMonitor(self.memory, thresholds or Thresholds(), self.events, self.clock, lambda: 1000.0)

    def after(self, seconds: float) -> list[str]:
        """What one tick does, so much later."""
        self.clock.now_s += seconds
        self.memory.calls.clear()
        self.monitor.tick()
        return self.memory.calls.copy()


def test_it_acts_at_thirty_seconds_and_not_before() -> None:
    bench = Bench()
    bench.memory.occupancy = {"device": 0.9, "host": 0.5}
    assert bench.after(29.9) == []
    assert bench.after(0.1) == ["look", "reclaim device after 300", "prefetch"]
    assert bench.after(29.9) == []
    assert bench.after(0.1)[0] == "look"


def test_a_tier_that_is_not_full_is_left_alone() -> None:
    bench = Bench()
    bench.memory.occupancy = {"device": 0.79, "host": 0.0}
    assert bench.after(30) == ["look", "prefetch"]


def test_high_pressure_stops_prefetching_until_a_look_sees_less() -> None:
    bench = Bench()
    bench.memory.pressure["kv"] = 0.85
    assert bench.after(30) == ["look"]
    bench.memory.calls.clear()
    bench.monitor.prefetch()
    assert bench.memory.calls == []
    bench.memory.pressure["kv"] = 0.5
    assert bench.after(30) == ["look", "prefetch"]


def test_compaction_goes_on_at_every_tick_until_there_is_nothing_to_gain() -> None:
    bench = Bench()
    bench.memory.fragmentation, bench.memory.chunks_to_free = 0.3, 2
    assert "compact" in bench.after(30)
    assert bench.after(0.1) == ["compact"]
    assert bench.after(0.1) == ["compact"]
    assert bench.after(0.1) == []


@pytest.mark.parametrize("tier", ["host", "system"])
def test_critical_pressure_enters_low_memory_mode_and_relaxed_looks_leave_it(tier: str) -> None:
    bench = Bench()
    bench.memory.pressure[tier] = 0.96
    assert bench.after(30) == ["look", "release", "throttle True"]
    assert bench.monitor.mode is MemoryMode.LOW_MEMORY
    assert bench.memory.short_of == [tier]
    bench.memory.pressure[tier] = 0.75  # under critical, not yet relaxed
    for _ in range(5):
        assert bench.after(CRITICAL_LOOK_S) == ["look"]
    bench.memory.pressure[tier] = 0.5
    for _ in range(RELAXED_LOOKS - 1):
        assert bench.after(CRITICAL_LOOK_S) == ["look"]
    bench.memory.pressure[tier] = 0.75  # one that is not relaxed begins the count again
    assert bench.after(CRITICAL_LOOK_S) == ["look"]
    bench.memory.pressure[tier] = 0.5
    for _ in range(RELAXED_LOOKS - 1):
        assert bench.after(CRITICAL_LOOK_S) == ["look"]
    assert bench.after(CRITICAL_LOOK_S) == ["look", "throttle False", "prefetch"]
    assert bench.monitor.mode is MemoryMode.NORMAL
    assert bench.monitor.num_mode_changes == 2
    events = [(event.kind, event.details["mode"]) for event in bench.events.take()]
    assert events == [(EventKind.MODE, "low_memory"), (EventKind.MODE, "normal")]
    assert bench.after(CRITICAL_LOOK_S) == [], "looks are rare again"


@pytest.mark.parametrize("tier", ["device", "kv"])
def test_a_full_device_is_load_and_no_danger(tier: str) -> None:
    bench = Bench()
    bench.memory.pressure[tier] = 1.0
    bench.after(30)
    assert bench.monitor.mode is MemoryMode.NORMAL


def test_a_gpu_that_is_nearly_all_taken_gets_back_what_the_allocator_keeps_and_is_no_pressure() -> None:
    bench = Bench()
    bench.memory.gpu = 0.94
    assert bench.after(30) == ["look", "prefetch"]
    assert bench.monitor.history[-1].pressure["gpu"] == 0.94
    bench.memory.gpu = 0.95
    assert bench.after(30) == ["look", "release gpu", "prefetch"]
    assert bench.monitor.mode is MemoryMode.NORMAL


def test_the_devices_fragmentation_is_shown_and_that_of_either_memory_is_acted_on() -> None:
    bench = Bench()
    bench.memory.of_device, bench.memory.fragmentation = 0.1, 0.3
    assert "compact" in bench.after(30)
    assert bench.monitor.history[-1].fragmentation == 0.1
    assert "gpu" not in bench.monitor.history[-1].pressure


def test_a_failed_allocation_alone_leaves_the_hosts_copies() -> None:
    bench = Bench()
    bench.monitor.alarm("no memory")
    bench.after(1)
    assert bench.memory.short_of == [None]


def test_a_failed_allocation_is_looked_at_at_once() -> None:
    bench = Bench()
    bench.monitor.alarm("a load could not allocate memory")
    assert bench.after(0) == ["look", "release", "throttle True"]
    (event,) = bench.events.take()
    assert "a load could not allocate memory" in event.text
    bench.monitor.alarm("again")
    assert bench.after(0) == ["look", "release"], "in the mode already: what has gathered since is released"


def test_the_history_is_kept_and_bounded() -> None:
    bench = Bench()
    for _ in range(MAX_HISTORY + 3):
        bench.after(30)
    assert len(bench.monitor.history) == MAX_HISTORY
    last = bench.monitor.history[-1]
    assert (last.time_s, last.mode, last.pressure["host"], last.used_bytes) == (1000.0, "normal", 0.1, {"host": 7})


def test_without_anything_known_of_the_system_it_goes_by_the_host() -> None:
    bench = Bench()
    del bench.memory.pressure["system"]
    assert bench.after(30) == ["look", "prefetch"]
