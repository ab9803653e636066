"""What the memory counts, and what it tells of itself."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from loraplex.core import AdapterResidency, Tier, WaitsFor
from loraplex.events import Detail, EventKind, EventLog
from loraplex.memory.care.prediction import PrefetchLedger
from loraplex.memory.eviction.budget import Budget, together_nbytes
from loraplex.memory.eviction.room import Room
from loraplex.memory.residency.records import LoadJob, StoredAdapter, StoredWeights, WeightState
from loraplex.memory.residency.tiers import Tiers
from loraplex.memory.space.arena import Arena
from loraplex.memory.weights.compression import CompressedCopies
from loraplex.memory.weights.disk_cache import DiskCache
from loraplex.metrics import ChunkRun, MemoryReport, TierReport


@dataclass(slots=True)
class MemoryCounters:
    """Running totals.

    loads: finished ones, by what asked for them (add, request, prefetch, promote, pin, restore); loads_from: by what
    was read. evictions: by tier and reason: `device_room`, `host_room` (others needed the room), `kv_pressure` (the KV
    cache did), `verb` (by name), `device_idle`, `host_idle`, `host_compressed` (unused for long), `..._low_memory`.
    misses: references that had to wait. found: references by where the first request for them found the adapter:
    `device`, `host`, or what its load read (`compressed`, `disk`, `source`).
    damaged: copies whose bytes had changed; quarantined, recovered: contents that gave wrong results, and then right
    ones again.
    """

    loads: Counter[str] = field(default_factory=Counter)
    loads_from: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)
    num_load_failures: int = 0
    load_s: float = 0.0
    num_promotions: int = 0
    num_copies: int = 0
    copy_s: float = 0.0
    num_drops: int = 0
    num_hits: int = 0
    num_misses: int = 0
    found: Counter[str] = field(default_factory=Counter)
    num_compressed: int = 0
    num_damaged: int = 0
    num_quarantined: int = 0
    num_recovered: int = 0
    scrubbed_bytes: int = 0


class MemoryLog:
    """Counts and tells what happens to weights; `ledger` counts what came of prefetches. The residency lock is held."""

    def __init__(self, events: EventLog) -> None:
        self.events = events
        self.counters = MemoryCounters()
        self.ledger = PrefetchLedger()
        self.alarm: Callable[[str], None] = lambda reason: None  # told when memory cannot be allocated

    def tell(self, kind: EventKind, weights: StoredWeights, text: str, **details: Detail) -> None:
        """An event of the newest adapter of a content."""
        adapter = next(reversed(weights.adapters.values()), None)
        name = f"digest {weights.digest[:12]}" if adapter is None else f"adapter {adapter.name!r}"
        adapter_id, adapter_name = (None, None) if adapter is None else (adapter.adapter_id, adapter.name)
        self.events.add(kind, f"{name} {text}", adapter_id=adapter_id, adapter_name=adapter_name, **details)

    def loaded(self, job: LoadJob, origin: str, nbytes: int, seconds: float) -> None:
        """A load ends well. origin: what was read."""
        weights, cause, damaged = job.weights, job.demand.cause, job.damaged_copies
        self.counters.loads[cause] += 1
        self.counters.loads_from[origin] += 1
        self.counters.load_s += seconds
        text = f"came to host memory from the {origin}"
        self.tell(EventKind.LOAD, weights, text, cause=cause, seconds=seconds, nbytes=nbytes, origin=origin)
        for tier in damaged:
            self.counters.num_damaged += 1
            self.tell(EventKind.FAULT, weights, f"had a damaged copy ({tier})", tier=tier)
        if weights.is_restoring or damaged:
            weights.is_restoring = False
            self.tell(EventKind.RECOVERY, weights, f"was restored from the {origin}", nbytes=nbytes)

    def acquired(self, weights: StoredWeights) -> None:
        """A request got the weights."""
        self.counters.num_misses += weights.has_missed
        self.counters.num_hits += not weights.has_missed
        (self.ledger.missed if weights.is_cold else self.ledger.used)(weights.digest)
        self.counters.found[weights.brought_from or (Tier.HOST if weights.has_missed else Tier.DEVICE).value] += 1
        weights.has_missed = weights.is_cold = False
        weights.brought_from = None

    def report(
        self, tiers: Tiers, room: Room, retiring_bytes: int, contents: Sequence[StoredWeights], num_adapters: int
    ) -> MemoryReport:
        """One consistent look at the two tiers in memory. Bytes are packed bytes; equal contents count once.

        What is in use or pinned cannot leave the device or, where they are one memory, the host; of another host's
        memory, what is under way to it.
        """
        counters, ledger, pool = self.counters, self.ledger, tiers.pool_of(Tier.DEVICE)
        fragmentation = pool.stats().fragmentation
        committed_bytes = together_nbytes(each for each in contents if each.num_running or each.num_pinned)
        loading_bytes = sum(each.nbytes for each in contents if each.job is not None and each.layout is not None)
        return MemoryReport(
            tiers=(
                _tier(tiers.device, committed_bytes),
                _tier(tiers.host, committed_bytes if tiers.is_shared else loading_bytes),
            ),
            pinned_bytes=room.pinned_bytes,
            in_use_bytes=together_nbytes(each for each in contents if each.num_running),
            retiring_bytes=retiring_bytes,
            num_adapters=num_adapters,
            num_loading=sum(each.job is not None for each in contents),
            num_waiting={cause: sum(room.is_waiting(each, cause) for each in contents) for cause in WaitsFor},
            chunk_bytes=pool.arena.chunk_bytes,
            fragmentation=fragmentation,
            most_fragmentation=max(fragmentation, tiers.host.pool.stats().fragmentation),
            found=dict(counters.found),
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


# ---------------------------------------------------------------------------------------------------- parts of a report


_TIERS = {
    WeightState.SOURCE: Tier.SOURCE,
    WeightState.LOADING: Tier.SOURCE,
    WeightState.HOST: Tier.HOST,
    WeightState.ARRIVING: Tier.DEVICE,
    WeightState.DEVICE: Tier.DEVICE,
}


def residency_of(
    adapter: StoredAdapter, resting_tier: Callable[[StoredWeights], Tier], fault: str | None
) -> AdapterResidency:
    """resting_tier: what has a content that no kernel could read. fault: why it is quarantined."""
    weights = adapter.weights
    error = None if weights.failed_job is None else weights.failed_job.error_of(adapter)
    is_out = weights.state in (WeightState.SOURCE, WeightState.LOADING)
    return AdapterResidency(
        adapter_id=adapter.adapter_id,
        tier=resting_tier(weights) if is_out else _TIERS[weights.state],
        lora_slot=weights.lora_slot if weights.is_on_device else None,
        nbytes=adapter.spec.nbytes if weights.layout is None else weights.nbytes,
        num_running=adapter.num_running,
        is_pinned=adapter.is_pinned,
        is_loading=weights.job is not None,
        last_used_s=weights.last_used_s,
        error=fault or (None if error is None else error.message),
    )


def resting_tiers(compressed: CompressedCopies | None, disk: DiskCache | None) -> Iterator[TierReport]:
    """Where weights rest outside the memory that kernels read."""
    if compressed is not None:
        yield TierReport("compressed", compressed.used_bytes, compressed.max_bytes, len(compressed), 0.0)
    if disk is not None:
        stats = disk.stats()
        yield TierReport("disk", stats.used_bytes, stats.max_bytes, stats.num_files, 0.0)


def chunk_runs(arena: Arena) -> tuple[ChunkRun, ...]:
    """The arena from its first chunk to its last."""
    runs = itertools.groupby(arena.owners())  # by identity: a name for each of many chunks would hold up a step
    return tuple(ChunkRun("free" if owner is None else owner.value, len(list(run))) for owner, run in runs)


def _tier(cache: Budget, fixed_bytes: int) -> TierReport:
    pressure = min(1.0, fixed_bytes / cache.max_bytes)
    return TierReport(
        cache.tier.value, cache.used_bytes, cache.max_bytes, cache.num_adapters, pressure, cache.max_adapters
    )
