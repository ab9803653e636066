"""What the memory counts, and what it tells of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from loraplex.core import AdapterResidency, Tier, WaitsFor
from loraplex.events import Detail, EventKind, EventLog
from loraplex.memory.care.prediction import PrefetchLedger
from loraplex.memory.eviction.room import Room
from loraplex.memory.residency.records import LoadJob, StoredAdapter, StoredWeights, WeightState
from loraplex.memory.residency.tiers import Budget, Tiers


@dataclass(slots=True)
class MemoryCounters:
    """Running totals.

    loads: finished ones, by what asked for them (add, request, prefetch, promote, pin, restore); loads_from: by what was read.
    evictions: by tier and reason: `device_room`, `host_room` (somebody else needed the room), `kv_pressure` (the KV cache did), `verb`
    (by name), `device_idle`, `host_idle`, `host_compressed` (unused for long), `..._low_memory`. misses: references that had to wait.
    found: references by where the first request for them found the adapter: `device`, `host`, or what its load read (`compressed`, `disk`,
    `source`).
    damaged: copies whose bytes had changed; quarantined, recovered: contents that gave wrong results, and then right ones again.
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
    """Counts and tells what happens to weights; `ledger` counts what came of prefetches. Called with the residency's lock held."""

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


# ------------------------------------------------------------------------------------------------------------- snapshots


_TIERS = {
    WeightState.SOURCE: Tier.SOURCE,
    WeightState.LOADING: Tier.SOURCE,
    WeightState.HOST: Tier.HOST,
    WeightState.ARRIVING: Tier.DEVICE,
    WeightState.DEVICE: Tier.DEVICE,
}


def residency_of(adapter: StoredAdapter, resting_tier: Tier, fault: str | None) -> AdapterResidency:
    """resting_tier: what has its content when no memory that kernels could read has it. fault: why it is quarantined."""
    weights = adapter.weights
    error = None if weights.failed_job is None else weights.failed_job.error_of(adapter)
    is_out = weights.state in (WeightState.SOURCE, WeightState.LOADING)
    return AdapterResidency(
        adapter_id=adapter.adapter_id,
        tier=resting_tier if is_out else _TIERS[weights.state],
        lora_slot=weights.lora_slot if weights.is_on_device else None,
        nbytes=adapter.spec.nbytes if weights.layout is None else weights.nbytes,
        num_running=adapter.num_running,
        is_pinned=adapter.is_pinned,
        is_loading=weights.job is not None,
        last_used_s=weights.last_used_s,
        error=fault or (None if error is None else error.message),
    )


@dataclass(frozen=True, slots=True)
class TierStats:
    """Bytes and adapters (contents) of one tier against its bounds; pressure := used / max."""

    tier: Tier
    used_bytes: int
    max_bytes: int
    num_adapters: int
    max_adapters: int | None

    @property
    def pressure(self) -> float:
        return self.used_bytes / self.max_bytes


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """One consistent look at the memory. Bytes are packed bytes; equal contents count once.

    committed_bytes: of contents in use or pinned, each once: what cannot leave the device or, on a CPU, the host.
    loading_bytes: of the host, for loads under way.
    retiring_bytes: freed, but steps that were launched before may still read them. num_waiting: contents that requests asked for in
    vain in the last two scheduling passes, by what they wait for. fragmentation: of the pool that holds the host tier (pool.PoolStats).
    """

    device: TierStats
    host: TierStats
    pinned_bytes: int
    in_use_bytes: int
    committed_bytes: int
    loading_bytes: int
    retiring_bytes: int
    num_adapters: int
    num_loading: int
    num_waiting: Mapping[WaitsFor, int]
    fragmentation: float
    counters: MemoryCounters


def memory_stats(
    counters: MemoryCounters,
    tiers: Tiers,
    room: Room,
    retiring_bytes: int,
    contents: Sequence[StoredWeights],
    num_adapters: int,
) -> MemoryStats:
    """Called with the lock held."""
    return MemoryStats(
        device=_tier_stats(tiers.device),
        host=_tier_stats(tiers.host),
        pinned_bytes=room.pinned_bytes,
        in_use_bytes=sum(each.nbytes for each in contents if each.num_running),
        committed_bytes=sum(each.nbytes for each in contents if each.num_running or each.num_pinned),
        loading_bytes=sum(each.nbytes for each in contents if each.job is not None and each.layout is not None),
        retiring_bytes=retiring_bytes,
        num_adapters=num_adapters,
        num_loading=sum(each.job is not None for each in contents),
        num_waiting={cause: sum(room.is_waiting(each, cause) for each in contents) for cause in WaitsFor},
        fragmentation=tiers.host.pool.stats().fragmentation,
        counters=replace(counters, loads=counters.loads.copy(), evictions=counters.evictions.copy()),
    )


def _tier_stats(cache: Budget) -> TierStats:
    return TierStats(cache.tier, cache.used_bytes, cache.max_bytes, cache.num_adapters, cache.max_adapters)
