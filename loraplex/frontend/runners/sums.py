"""What several runners say together: one engine's figures, as a reader of one engine expects them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from typing import Any, TypeVar

from loraplex.core import EngineInfo, Tier
from loraplex.cpu import CpuUse
from loraplex.metrics import EngineStats, MemoryMode, MemoryReport, StepTimes, TierReport

T = TypeVar("T")

WORST = ("compression_max_error",)
"""Of the memory's counters: those of which the largest counts, not the sum."""


def info_of_all(infos: Sequence[EngineInfo]) -> EngineInfo:
    """What every one of them can take: a request is checked before it has a runner."""
    if len(infos) == 1:
        return infos[0]
    choices = dict.fromkeys(chain.from_iterable(info.choices for info in infos))
    return replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        num_kv_blocks=min(info.num_kv_blocks for info in infos),
        adapter_memory_bytes=min(info.adapter_memory_bytes for info in infos),
        choices=tuple(choices),
    )


def stats_of_all(all_stats: Sequence[EngineStats]) -> EngineStats:
    """Sums; ids of adapters once."""
    if len(all_stats) == 1:
        return all_stats[0]
    return replace(
        _sum(all_stats, EngineStats()),
        running_adapter_ids=_each_once(stats.running_adapter_ids for stats in all_stats),
        waiting_adapter_ids=_each_once(stats.waiting_adapter_ids for stats in all_stats),
        memory=memory_of_all([stats.memory for stats in all_stats]),
    )


def counts_of(stats: EngineStats) -> EngineStats:
    """What stays of an engine that ends: its counters, so that sums with them only grow."""
    return replace(
        stats,
        num_running=0,
        num_waiting=0,
        waiting_by_cause={},
        running_adapter_ids=(),
        waiting_adapter_ids=(),
        max_lora=0,
        cpu=replace(stats.cpu, num_threads=0, num_active=0),
        memory=MemoryReport(counters=stats.memory.counters, found=stats.memory.found),
    )


def memory_of_all(reports: Sequence[MemoryReport]) -> MemoryReport:
    """Sums of bytes, the worst of shares and modes, all chunks one after the other; no history."""
    is_low = any(report.mode is MemoryMode.LOW_MEMORY for report in reports)
    names = dict.fromkeys(tier.tier for report in reports for tier in report.tiers)
    total = _sum(reports, MemoryReport())
    worst = {
        name: max(report.counters.get(name, 0.0) for report in reports) for name in WORST if name in total.counters
    }
    return replace(
        total,
        counters={**total.counters, **worst},
        mode=MemoryMode.LOW_MEMORY if is_low else MemoryMode.NORMAL,
        tiers=tuple(_tier_of_all(name, [report.tier(name) for report in reports]) for name in names),
        chunks=tuple(chain.from_iterable(report.chunks for report in reports)),
        fragmentation=max(report.fragmentation for report in reports),
        most_fragmentation=max(report.most_fragmentation for report in reports),
        num_adapters=max(report.num_adapters for report in reports),
        chunk_bytes=reports[0].chunk_bytes,
        kv_block_bytes=reports[0].kv_block_bytes,
        quarantined={each: why for report in reports for each, why in report.quarantined.items()},
        merged=tuple(dict.fromkeys(chain.from_iterable(report.merged for report in reports))),
        history=(),
    )


def _tier_of_all(name: str, tiers: Sequence[TierReport]) -> TierReport:
    """The disk's folder is one for all processes of a machine."""
    limits = [tier.max_adapters for tier in tiers if tier.max_adapters is not None]
    if name == Tier.DISK:
        return max(tiers, key=lambda tier: tier.used_bytes)
    return TierReport(
        name,
        sum(tier.used_bytes for tier in tiers),
        sum(tier.max_bytes for tier in tiers),
        sum(tier.num_adapters for tier in tiers),
        max(tier.pressure for tier in tiers),
        sum(limits) if limits else None,
    )


def _each_once(all_ids: Any) -> tuple[int, ...]:
    return tuple(sorted(set(chain.from_iterable(all_ids))))


def _sum(items: Sequence[T], empty: T) -> T:
    """Of numbers, of mappings of numbers by key, and of dataclasses of these by field; other fields as in `empty`."""
    assert is_dataclass(empty)
    summed: dict[str, Any] = {}
    for name in (each.name for each in fields(empty)):
        values = [getattr(item, name) for item in items]
        first = values[0]
        if isinstance(first, int | float):
            summed[name] = sum(values)
        elif isinstance(first, Mapping):
            summed[name] = _sum_of_mappings(values)
        elif isinstance(first, StepTimes | CpuUse):
            summed[name] = _sum(values, type(first)())
    return replace(empty, **summed)  # type: ignore[type-var]


def _sum_of_mappings(values: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    total: dict[Any, Any] = {}
    for key, value in chain.from_iterable(each.items() for each in values):
        if isinstance(value, int | float):
            total[key] = total.get(key, 0) + value
    return total
