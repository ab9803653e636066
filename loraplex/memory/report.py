"""The memory as `GET /v1/memory` shows it (metrics.MemoryReport)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from loraplex.memory.residency.tiers import Tiers
from loraplex.memory.space.arena import Arena
from loraplex.memory.stats import MemoryLog, MemoryStats, TierStats
from loraplex.memory.weights.compression import CompressedCopies
from loraplex.memory.weights.disk_cache import DiskCache
from loraplex.metrics import ChunkRun, MemoryReport, TierReport


def memory_report(
    tiers: Tiers,
    log: MemoryLog,
    disk_cache: DiskCache | None,
    compressed: CompressedCopies | None,
    stats: MemoryStats,
    quarantined: Mapping[int, str],
) -> MemoryReport:
    """quarantined: adapter id -> why."""
    counters, ledger, arena = stats.counters, log.ledger, tiers.host.pool.arena
    disk = None if disk_cache is None else disk_cache.stats()
    return MemoryReport(
        tiers=(
            _tier(stats.device, stats.committed_bytes),
            _tier(stats.host, stats.committed_bytes if tiers.is_shared else stats.loading_bytes),
            *([] if compressed is None else [_compressed_tier(compressed)]),
            *([] if disk is None else [TierReport("disk", disk.used_bytes, disk.max_bytes, disk.num_files, 0.0)]),
        ),
        pinned_bytes=stats.pinned_bytes,
        in_use_bytes=stats.in_use_bytes,
        retiring_bytes=stats.retiring_bytes,
        num_adapters=stats.num_adapters,
        num_loading=stats.num_loading,
        chunk_bytes=arena.chunk_bytes,
        chunks=chunk_runs(arena),
        fragmentation=stats.fragmentation,
        quarantined=quarantined,
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
            **{f"loads_from_{origin}": count for origin, count in counters.loads_from.items()},
            "compressed": counters.num_compressed,
            "compression_max_error": 0.0 if compressed is None else compressed.max_error,
            "damaged": counters.num_damaged,
            "quarantines": counters.num_quarantined,
            "recoveries": counters.num_recovered,
            "scrubbed_bytes": counters.scrubbed_bytes,
            "prefetch_hits": ledger.num_hits,
            "prefetches_late": ledger.num_late,
            "prefetches_wasted": ledger.num_wasted,
            "prefetch_wasted_bytes": ledger.wasted_bytes,
            "cold_starts": ledger.num_missed,
        },
    )


def chunk_runs(arena: Arena) -> tuple[ChunkRun, ...]:
    """The arena from its first chunk to its last."""
    runs = itertools.groupby(arena.owners())  # by identity: a name for each of many chunks would hold up a step
    return tuple(ChunkRun("free" if owner is None else owner.value, len(list(run))) for owner, run in runs)


def _compressed_tier(copies: CompressedCopies) -> TierReport:
    return TierReport("compressed", copies.used_bytes, copies.max_bytes, len(copies), 0.0)


def _tier(tier: TierStats, committed_bytes: int) -> TierReport:
    pressure = min(1.0, committed_bytes / tier.max_bytes)
    return TierReport(tier.tier.value, tier.used_bytes, tier.max_bytes, tier.num_adapters, pressure)
