"""The memory as `GET /v1/memory` shows it (metrics.MemoryReport)."""

from __future__ import annotations

import itertools

from loraplex.memory.arena import Arena
from loraplex.memory.stats import MemoryStats, TierStats
from loraplex.metrics import ChunkRun, MemoryReport, TierReport


def memory_report(stats: MemoryStats, arena: Arena) -> MemoryReport:
    counters = stats.counters
    return MemoryReport(
        tiers=tuple(_tier(tier, stats.committed_bytes) for tier in (stats.device, stats.host)),
        pinned_bytes=stats.pinned_bytes,
        in_use_bytes=stats.in_use_bytes,
        retiring_bytes=stats.retiring_bytes,
        num_adapters=stats.num_adapters,
        num_loading=stats.num_loading,
        chunk_bytes=arena.chunk_bytes,
        chunks=chunk_runs(arena),
        fragmentation=stats.fragmentation,
        counters={
            **{f"loads_{cause}": count for cause, count in counters.loads.items()},
            **{f"evictions_{cause}": count for cause, count in counters.evictions.items()},
            "load_seconds": counters.load_s,
            "copy_seconds": counters.copy_s,
            "load_failures": counters.num_load_failures,
            "promotions": counters.num_promotions,
            "copies": counters.num_copies,
            "drops": counters.num_drops,
            "hits": counters.num_hits,
            "misses": counters.num_misses,
        },
    )


def chunk_runs(arena: Arena) -> tuple[ChunkRun, ...]:
    """The arena from its first chunk to its last."""
    runs = itertools.groupby(arena.owners())  # by identity: a name for each of many chunks would hold up a step
    return tuple(ChunkRun("free" if owner is None else owner.value, len(list(run))) for owner, run in runs)


def _tier(tier: TierStats, committed_bytes: int) -> TierReport:
    pressure = min(1.0, committed_bytes / tier.max_bytes)
    return TierReport(tier.tier.value, tier.used_bytes, tier.max_bytes, tier.num_adapters, pressure)
