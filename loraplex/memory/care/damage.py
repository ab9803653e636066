"""Weights whose bytes are not what was loaded: noticed by their checksums, let go, and read again; memory that does it twice is fenced.

checked   host bytes at each promote, everything in turn by `scrub` (health.py), files of the disk tier as they are read
restored  a device copy from the host, a host copy from the disk tier, else from the source
fenced    a chunk that does not hold a pattern, or whose contents were found damaged for the second time
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from loraplex.core import Tier
from loraplex.errors import AdapterFaultError
from loraplex.events import EventKind
from loraplex.memory.residency.records import StoredWeights, tell
from loraplex.memory.residency.store import WeightStore
from loraplex.memory.residency.tiers import Place
from loraplex.memory.space.arena import Arena, Extent
from loraplex.memory.space.pool import LoRAMemoryPool

MAX_FAULTS_OF_A_CHUNK = 1
FRESH_S = 1.0
PATTERNS = (0x55, 0xAA)


class DamageControl:
    """Called with the store's lock held; `find` and `find_unless_fresh` also without it, for weights that are not at rest: they stay
    where they are.
    """

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._faults: Counter[tuple[Tier, int]] = Counter()

    def find_unless_fresh(self, weights: StoredWeights, tier: Tier) -> list[Extent]:
        """`find`; [] for what was read or checked less than FRESH_S ago."""
        now_s = self._store.clock()
        if now_s - weights.checked_s < FRESH_S:
            return []
        weights.checked_s = now_s
        return self.find(weights, tier)

    def find(self, weights: StoredWeights, tier: Tier) -> list[Extent]:
        """The extents of one tier that have changed since the load. [] where the weights are not."""
        place = self._place(weights, tier)
        if place is None or not weights.checksums:
            return []
        views = [self._pool(tier).view(extent) for extent in place.extents]
        store = self._store
        found = store.copies.checksums(views) if tier is Tier.DEVICE else store.host_checksums(views)
        triples = zip(place.extents, found, weights.checksums, strict=True)
        return [extent for extent, number, expected in triples if number != expected]

    def discard_damaged(self, weights: StoredWeights) -> bool:
        """Look at every tier and let go what has changed; whether anything had. Nobody may be running on it."""
        has_changed = False
        for tier in self.tiers:
            damaged = self.find(weights, tier)
            if damaged:
                self.discard(weights, tier, damaged)
                has_changed = True
        return has_changed

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Those in memory, the nearest first."""
        return (Tier.HOST,) if self._store.is_shared else (Tier.DEVICE, Tier.HOST)

    def discard(self, weights: StoredWeights, tier: Tier, damaged: Sequence[Extent]) -> None:
        """Let the copies of `tier` and nearer go; nobody may be running on them. The next demand restores them."""
        assert weights.num_running == 0, f"requests run on {weights.names}"
        assert weights.is_at_rest, f"{weights.names} are on their way"
        store = self._store
        store.counters.num_damaged += 1
        store.suspect.append(weights.digest)
        fenced = self._fence_bad_chunks(tier, damaged, weights)
        text = f"has {len(damaged)} damaged pieces in {tier.value} memory and is read again"
        tell(store.events, EventKind.FAULT, weights, text, tier=tier.value, num_fenced_chunks=fenced)
        weights.is_restoring = True
        if tier is Tier.DEVICE and not store.is_shared:
            store.leave_device(weights)
        else:
            store.evict_to_source(weights)

    def fence(self, weights: StoredWeights, tier: Tier, extents: Sequence[Extent]) -> None:
        """Memory that could not be written or read: its chunks are lent to nobody any more."""
        chunks = {chunk for extent in extents for chunk in _chunks(self._pool(tier).arena, extent)}
        self._fence_chunks(tier, chunks, weights)
        text = f"met {tier.value} memory that fails; {len(chunks)} chunks are fenced"
        tell(self._store.events, EventKind.FAULT, weights, text, tier=tier.value, num_fenced_chunks=len(chunks))

    def _place(self, weights: StoredWeights, tier: Tier) -> Place | None:
        return weights.device if tier is Tier.DEVICE and not self._store.is_shared else weights.host

    def _pool(self, tier: Tier) -> LoRAMemoryPool:
        pool = self._store.device.pool if tier is Tier.DEVICE else None
        return self._store.host.pool if pool is None else pool

    def _fence_bad_chunks(self, tier: Tier, damaged: Sequence[Extent], owner: StoredWeights) -> int:
        arena = self._pool(tier).arena
        bad = set()
        for extent in damaged:
            holds = holds_patterns(arena.view(extent))
            for chunk in _chunks(arena, extent):
                self._faults[tier, chunk] += 1
                if not holds or self._faults[tier, chunk] > MAX_FAULTS_OF_A_CHUNK:
                    bad.add(chunk)
        self._fence_chunks(tier, bad, owner)
        return len(bad)

    def _fence_chunks(self, tier: Tier, chunks: set[int], besides: StoredWeights) -> None:
        """They take nothing new, and what is idle in them leaves; what is in use leaves them when it moves or is evicted."""
        store, pool = self._store, self._pool(tier)
        lying_there = {extent for chunk in chunks for extent in pool.fence(chunk)}
        for each in list(store.weights.values()):
            place = self._place(each, tier)
            if each is besides or not each.is_idle or place is None or lying_there.isdisjoint(place.extents):
                continue
            if tier is Tier.DEVICE and not store.is_shared:
                store.leave_device(each)
            else:
                store.evict_to_source(each)


def _chunks(arena: Arena, extent: Extent) -> range:
    """Those that an extent touches."""
    return range(extent.offset // arena.chunk_bytes, (extent.end - 1) // arena.chunk_bytes + 1)


def holds_patterns(memory: torch.Tensor) -> bool:
    """Whether memory gives back what is written to it; overwrites it."""
    return all(bool((memory.fill_(pattern) == pattern).all()) for pattern in PATTERNS)


def damage_error(name: str) -> AdapterFaultError:
    """For requests that run on damaged weights."""
    text = f"adapter {name!r}: its weights in memory were found damaged and are being restored; try again in 1 s"
    return AdapterFaultError(text)
