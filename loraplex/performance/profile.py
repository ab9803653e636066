"""One profile of a running engine, seen from the front: the state before, what happens, the state after, the report."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from loraplex.events import Detail, EngineEvent, EventKind
from loraplex.metrics import EngineStats, KernelSpeedup
from loraplex.performance.findings import find
from loraplex.performance.histogram import Histogram
from loraplex.performance.profiler import DEVICE_PART, KERNEL_PARTS, STEP_PARTS
from loraplex.performance.report import AdapterPerformance, LoraPerformanceReport, MixPerformance, SwitchCost
from loraplex.performance.requests import OTHERS, Latencies, NameOf, RequestRecorder, ServiceTargets
from loraplex.performance.steps import StepProfile, StepSums

MAX_LISTED_ADAPTERS = 200
TIERS = ("device", "host", "disk", "source")

T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class AdapterFootprint:
    """Where an adapter is, and how large. is_kept: an earlier version, which is listed only when it had requests."""

    name: str
    tier: str
    nbytes: int
    rank: int
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which backend runs, and in words why no faster one."""

    backend: str
    description: str
    device: str = "cpu"


class LoraProfile:
    """Give `requests` to the output processor and events to `see`; `report` when the steps are there. `see` may be
    called by any thread."""

    def __init__(
        self,
        name_of: NameOf,
        targets: ServiceTargets | None = None,
    ) -> None:
        self.targets = targets or ServiceTargets()
        self.requests = RequestRecorder(self.targets, name_of)
        self.begun_time = time.time()
        self._begun_s = time.perf_counter()
        self._before = EngineStats()
        self._lock = threading.Lock()
        self._loads = Histogram()
        self._switches = Histogram()
        self._num_events: Counter[EventKind] = Counter()

    def begin(self, before: EngineStats) -> None:
        """What grows is counted from this state on."""
        self._before = before

    def see(self, event: EngineEvent) -> None:
        with self._lock:
            self._num_events[event.kind] += 1
            if event.kind is EventKind.LOAD:
                _observe(self._loads, event.details.get("seconds"))
            elif event.kind is EventKind.SWITCH:
                _observe(self._switches, event.details.get("promote_s"))

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._begun_s

    def report(
        self,
        after: EngineStats,
        steps: StepProfile,
        kernels: Kernels,
        footprints: Sequence[AdapterFootprint],
        speedups: Sequence[KernelSpeedup] = (),
    ) -> LoraPerformanceReport:
        parts = steps.part_seconds
        before, counted = self._before.memory, after.memory
        base = LoraPerformanceReport(
            begun_time=self.begun_time,
            seconds=self.elapsed_s,
            backend=kernels.backend,
            backend_description=kernels.description,
            device=kernels.device,
            targets=self.targets,
            requests=self._all(),
            adapters=self._adapters(footprints),
            num_adapters=self._num_adapters(footprints),
            admitted=_counts(self._before.num_admitted, after.num_admitted),
            served_from={**dict.fromkeys(TIERS, 0), **_counts(self._before.adapters_found, after.adapters_found)},
            loads=_counts(before.loads, counted.loads),
            num_load_failures=_counts(before.counters, counted.counters).get("load_failures", 0),
            evictions=_counts(before.evictions, counted.evictions),
            switch_cost=self._switch_cost(after),
            memory=counted,
            fragmentation_before=before.fragmentation,
            num_steps=steps.num_steps,
            num_prefill_tokens=sum(each.num_prefill_tokens for each in steps.sums),
            num_tokens=sum(each.num_tokens for each in steps.sums),
            num_preemptions=_more(self._before.num_preemptions, after.num_preemptions),
            part_seconds={part: parts.get(part, 0.0) for part in STEP_PARTS},
            operator_seconds={part: parts[part] for part in KERNEL_PARTS if part in parts}
            if steps.has_kernel_parts
            else {},
            device_share=_device_share(steps, kernels.device),
            kernel_fallbacks=_counts(self._before.kernel_fallbacks, after.kernel_fallbacks),
            kernel_speedups=tuple(speedups),
            cpu=after.cpu.since(self._before.cpu),
            mixes=mixes(steps),
            slowdown=slowdown([each for each in steps.sums if each.kind.num_adapters], steps.sums),
            timeline=steps.timeline,
            num_restarts=self._num_events[EventKind.RESTART],
            num_faults=self._num_events[EventKind.FAULT],
        )
        return replace(base, findings=find(base))

    def _num_adapters(self, footprints: Sequence[AdapterFootprint]) -> int:
        """Names that are loaded, or were; their kept versions are no adapters more."""
        kept = {each.name for each in footprints if each.is_kept}
        return len({*self.requests.by_adapter, *(each.name for each in footprints)} - kept - {None, OTHERS})

    def _all(self) -> AdapterPerformance:
        total = Latencies()
        for each in self.requests.by_adapter.values():
            total.add(each)
        return _performance("(all)", total)

    def _adapters(self, footprints: Sequence[AdapterFootprint]) -> tuple[AdapterPerformance, ...]:
        """Those with requests, most first, then what is only in memory, largest first; at most MAX_LISTED_ADAPTERS."""
        where: dict[str | None, AdapterFootprint] = {each.name: each for each in footprints}
        measured = self.requests.by_adapter
        names = [*measured, *(each.name for each in footprints if each.name not in measured and not each.is_kept)]

        def order(name: str | None) -> tuple[int, int, str]:
            num_requests = measured[name].num_requests if name in measured else 0
            return (-num_requests, -where[name].nbytes if name in where else 0, name or "")

        listed = sorted(names, key=order)[:MAX_LISTED_ADAPTERS]
        return tuple(_placed(_performance(name, measured.get(name, Latencies())), where.get(name)) for name in listed)

    def _switch_cost(self, after: EngineStats) -> SwitchCost:
        grown = _growth(self._before.memory.counters, after.memory.counters)
        num_copies, copy_s = grown.get("copies", 0), grown.get("copy_seconds", 0.0)
        return SwitchCost(
            self._loads.quantiles(),
            int(grown.get("promotions", 0)),
            int(num_copies),
            copy_s / num_copies if num_copies else 0.0,
            self._switches.quantiles(),
        )


def _device_share(steps: StepProfile, device: str) -> float | None:
    """On a CPU what forward and sampling take; another device runs beside the host, which only launches them."""
    parts = steps.part_seconds
    if not steps.num_steps or not steps.seconds:
        return 0.0
    if device == "cpu":
        return (parts.get("forward", 0.0) + parts.get("sample", 0.0)) / steps.seconds
    return parts[DEVICE_PART] / steps.seconds if DEVICE_PART in parts else None


def _observe(histogram: Histogram, seconds: Detail | None) -> None:
    if isinstance(seconds, int | float):
        histogram.observe(seconds)


def _more(before: T, after: T) -> T:
    """What a counter grew by. An engine that started again counts from 0."""
    return after - before if after >= before else after


def _growth(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Those that grew."""
    grown = {key: _more(before.get(key, 0), count) for key, count in after.items()}
    return {key: count for key, count in grown.items() if count}


def _counts(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int]:
    return {key: int(count) for key, count in _growth(before, after).items()}


def _placed(adapter: AdapterPerformance, footprint: AdapterFootprint | None) -> AdapterPerformance:
    if footprint is None:
        return adapter
    return replace(adapter, tier=footprint.tier, nbytes=footprint.nbytes, rank=footprint.rank)


def _performance(name: str | None, latencies: Latencies) -> AdapterPerformance:
    finished = max(1, latencies.num_finished)
    return AdapterPerformance(
        name,
        latencies.num_requests,
        latencies.num_finished,
        latencies.num_failed,
        latencies.num_tokens,
        latencies.first_token.quantiles(),
        latencies.inter_token.quantiles(),
        latencies.end_to_end.quantiles(),
        latencies.num_in_first_token / finished,
        latencies.num_in_inter_token / finished,
        latencies.num_in_both / finished,
    )


def mixes(steps: StepProfile) -> tuple[MixPerformance, ...]:
    """Decode steps by the number of distinct adapters in them."""
    by_adapters: dict[int, list[StepSums]] = {}
    for sums in steps.sums:
        if not sums.kind.has_prefill:
            by_adapters.setdefault(sums.kind.num_adapters, []).append(sums)
    return tuple(_mix(count, by_adapters[count], steps) for count in sorted(by_adapters))


def _mix(num_adapters: int, all_sums: Sequence[StepSums], steps: StepProfile) -> MixPerformance:
    times = Histogram()
    for sums in all_sums:
        times.add(sums.times)
    num_steps = sum(sums.num_steps for sums in all_sums)
    seconds = StepProfile(sums=tuple(all_sums)).part_seconds
    operators = sum(seconds.get(part, 0.0) for part in KERNEL_PARTS)
    return MixPerformance(
        num_adapters,
        num_steps,
        sum(sums.num_rows for sums in all_sums) / num_steps,
        sum(sums.num_tokens for sums in all_sums) / times.total_s if times.total_s else 0.0,
        times.quantiles(),
        seconds.get("lora", 0.0) / operators if operators else None,
        slowdown(all_sums, steps.sums) if num_adapters else None,
    )


def slowdown(with_adapters: Sequence[StepSums], everything: Sequence[StepSums]) -> float | None:
    """Mean time of decode steps against those of the base model alone, each with as many rows (as `size_class`); None
    without a pair."""
    base = {
        each.kind.num_rows: each for each in everything if each.kind.num_adapters == 0 and not each.kind.has_prefill
    }
    taken_s = expected_s = 0.0
    for each in with_adapters:
        alone = base.get(each.kind.num_rows)
        if alone is not None and not each.kind.has_prefill:
            taken_s += each.times.total_s
            expected_s += each.num_steps * alone.times.total_s / alone.num_steps
    return taken_s / expected_s if expected_s else None
