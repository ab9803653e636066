"""What the memory counts, and what it tells of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from loraplex.core import Tier, WaitsFor


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
    vain in the last two scheduling passes, by what they wait for. fragmentation: of the pool that the device reads
    (pool.PoolStats); most_fragmentation: of that and of the host tier's, the larger one.
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
    most_fragmentation: float
    counters: MemoryCounters
