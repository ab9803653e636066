"""Weights whose bytes are not what was loaded: noticed by their checksums, let go, and read again; memory that does it
twice is fenced.

checked   at each promote, unless read or checked within a second: host bytes, or where copies run beside the steps the
          device's; everything in turn by `scrub` (health.py); files of the disk tier as they are read
restored  a device copy from the host, a host copy from the disk tier, else from the source
fenced    a chunk that does not hold a pattern, or whose contents were found damaged for the second time
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from loraplex.core import Tier
from loraplex.errors import AdapterFaultError, DeviceLostError, LoraplexError
from loraplex.events import EventKind
from loraplex.memory.residency.records import StoredAdapter, StoredWeights
from loraplex.memory.residency.tiers import Tiers
from loraplex.memory.space.arena import Arena, Extent
from loraplex.memory.stats import MemoryLog
from loraplex.memory.weights.loading import is_device_lost

MAX_FAULTS_OF_A_CHUNK = 1
FRESH_S = 1.0
PATTERNS = (0x55, 0xAA)


class Residents(Protocol):
    """All that care sees of the residency (store.WeightStore). `_locked` methods are called inside `with held()`."""

    def held(self) -> AbstractContextManager[object]: ...
    def known_locked(self) -> Mapping[int, StoredAdapter]: ...
    def contents_locked(self) -> Mapping[str, StoredWeights]: ...
    def is_unwanted_locked(self, weights: StoredWeights, num_passes: int) -> bool: ...
    def want_locked(self, weights: StoredWeights) -> None: ...
    def idle_locked(self, tier: Tier, num_passes: int) -> list[StoredWeights]: ...
    def leave_locked(self, weights: StoredWeights, tier: Tier) -> None: ...
    def end_reading_locked(self, weights: StoredWeights) -> None: ...
    def release_locked(self, adapter: StoredAdapter) -> None: ...
    def may_move_locked(self, weights: StoredWeights) -> bool: ...
    def move_locked(self, weights: StoredWeights, tier: Tier, index: int, target: Extent) -> None: ...
    def suspect_locked(self, weights: StoredWeights) -> None: ...


@dataclass(eq=False)
class DamageControl:
    """device_lost: why the device cannot be used any more."""

    _residents: Residents
    _tiers: Tiers
    _log: MemoryLog
    _num_faults: Counter[tuple[Tier, int]] = field(default_factory=Counter)
    _spoilt: list[StoredWeights] = field(default_factory=list)
    device_lost: DeviceLostError | None = None

    def find_unless_fresh(self, weights: StoredWeights, tier: Tier) -> list[Extent]:
        """`Tiers.changed`; [] for what was read or checked less than FRESH_S ago."""
        now_s = self._tiers.clock()
        if now_s - weights.checked_s < FRESH_S:
            return []
        weights.checked_s = now_s
        return self._tiers.changed(weights, tier)

    def discard_damaged_locked(self, weights: StoredWeights) -> None:
        """Look at every tier and let go what has changed. No request may be running on it."""
        for tier in self._tiers.in_memory:
            damaged = self._tiers.changed(weights, tier)
            if damaged:
                self.discard_locked(weights, tier, damaged)

    def discard_locked(self, weights: StoredWeights, tier: Tier, damaged: Sequence[Extent]) -> None:
        """Let the copies of `tier` and nearer go; no request may be running on them. The next demand restores them."""
        assert weights.num_running == 0, f"requests run on {weights.names}"
        assert weights.is_at_rest, f"{weights.names} are on their way"
        self._log.counters.num_damaged += 1
        self._residents.suspect_locked(weights)
        fenced = self._fence_bad_chunks_locked(tier, damaged, weights)
        text = f"has {len(damaged)} damaged pieces in {tier.value} memory and is read again"
        self._log.tell(EventKind.FAULT, weights, text, tier=tier.value, num_fenced_chunks=fenced)
        weights.is_restoring = True
        self._residents.leave_locked(weights, tier)

    def fence_locked(self, weights: StoredWeights, error: Exception) -> None:
        """Device memory that could not be written: its chunks are lent to no tier any more."""
        self.look_for_loss(error)
        place = self._tiers.place_of(weights, Tier.DEVICE)
        assert place is not None
        arena = self._tiers.pool_of(Tier.DEVICE).arena
        chunks = {chunk for extent in place.extents for chunk in _chunks(arena, extent)}
        self._fence_chunks_locked(Tier.DEVICE, chunks, weights)
        text = f"met device memory that fails; {len(chunks)} chunks are fenced"
        self._log.tell(EventKind.FAULT, weights, text, tier="device", num_fenced_chunks=len(chunks))

    def look_for_loss(self, error: Exception) -> None:
        """Remember when an error means that the device cannot be used any more."""
        if is_device_lost(error):
            self.device_lost = DeviceLostError(f"the device does not answer any more: {error}")

    def suspect_locked(self, weights: StoredWeights) -> None:
        """What was computed with it may be wrong."""
        self._residents.suspect_locked(weights)

    def spoil_locked(self, weights: StoredWeights, error: LoraplexError) -> None:
        """Requests run on what is not to be used: `take_faults` tells it; requests until then get the error."""
        if weights.fault is None:
            self._spoilt.append(weights)
        weights.fault = error

    def take_faults(self) -> dict[int, LoraplexError]:
        """Adapters whose requests must end, since they run on weights that are damaged or did not arrive."""
        if not self._spoilt:
            return {}
        faults: dict[int, LoraplexError] = {}
        with self._residents.held():
            spoilt, self._spoilt = self._spoilt, []
            for weights in spoilt:
                assert weights.fault is not None
                self._residents.suspect_locked(weights)
                faults |= dict.fromkeys(weights.adapters, weights.fault)
                weights.fault = None
        return faults

    def _fence_bad_chunks_locked(self, tier: Tier, damaged: Sequence[Extent], owner: StoredWeights) -> int:
        arena = self._tiers.pool_of(tier).arena
        bad = set()
        for extent in damaged:
            is_read_by_others = self._tiers.host.sharers[extent] > 1
            holds = is_read_by_others or holds_patterns(arena.view(extent))
            for chunk in _chunks(arena, extent):
                self._num_faults[tier, chunk] += 1
                if not holds or self._num_faults[tier, chunk] > MAX_FAULTS_OF_A_CHUNK:
                    bad.add(chunk)
        self._fence_chunks_locked(tier, bad, owner)
        return len(bad)

    def _fence_chunks_locked(self, tier: Tier, chunks: set[int], besides: StoredWeights) -> None:
        """They take nothing new, what is idle in them leaves, what is in use when it moves or is evicted."""
        pool = self._tiers.pool_of(tier)
        lying_there = {extent for chunk in chunks for extent in pool.fence(chunk)}
        self._tiers.host.disown(lying_there)
        for each in list(self._residents.contents_locked().values()):
            place = self._tiers.place_of(each, tier)
            if each is not besides and each.is_idle and place and not lying_there.isdisjoint(place.all_extents):
                self._residents.leave_locked(each, tier)


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
