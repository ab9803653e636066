"""Weights by content digest: what is in which tier, who uses it, and how it leaves: demote, evict, drop.

How weights come nearer is in transfers.py. Everything here is called with `lock` held, except where it says otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from loraplex.core import Tier, WaitsFor
from loraplex.errors import DeviceLostError, EngineShutdownError, LoraplexError
from loraplex.events import EventKind, EventLog
from loraplex.kernels.checksum import Checksums, checksums
from loraplex.memory.care.prediction import PrefetchLedger
from loraplex.memory.residency.arrivals import Arriving
from loraplex.memory.residency.compressed_copies import CompressedCopies
from loraplex.memory.residency.records import Demand, StoredAdapter, StoredWeights, WeightState, tell
from loraplex.memory.residency.room import Room
from loraplex.memory.residency.tiers import Budget, DeviceCache, HostCache, Place
from loraplex.memory.space.pool import LoRAMemoryPool
from loraplex.memory.space.retired import RetiredMemory
from loraplex.memory.stats import MemoryCounters, MemoryStats
from loraplex.memory.weights.copies import CopyEngine, SynchronousCopies
from loraplex.memory.weights.disk_cache import DiskCache


class WeightStore:
    """The residency of every digest. `lock` is a condition: it is notified when a load ends and when room comes back."""

    def __init__(
        self,
        host: HostCache,
        device: DeviceCache,
        clock: Callable[[], float],
        events: EventLog,
        disk: DiskCache | None = None,
        compressed: CompressedCopies | None = None,
        copies: CopyEngine | None = None,
        host_checksums: Checksums = checksums,
    ) -> None:
        self.lock = threading.Condition(threading.Lock())
        self.host = host
        self.device = device
        self.disk = disk
        self.compressed = compressed
        self.is_shared = device.pool is None  # both tiers are one memory
        self.copies = copies or SynchronousCopies()
        self.host_checksums = host_checksums
        self.arriving: dict[int, Arriving] = {}  # by lora_slot; the step's thread looks without the lock
        self.faults: dict[str, LoraplexError] = {}  # by digest: requests run on what is not to be used; they are to end
        self.retired = RetiredMemory(host.pool if device.pool is None else device.pool)
        self.adapters: dict[int, StoredAdapter] = {}  # those that resolve
        self.weights: dict[str, StoredWeights] = {}
        self.room = Room(host, device, self.retired, self.weights)
        self.counters = MemoryCounters()
        self.ledger = PrefetchLedger()
        self.dropped: list[str] = []  # contents that are gone: the KV cache is to be told
        self.suspect: list[str] = []  # contents that may have computed wrong KV
        self.alarm: Callable[[str], None] = lambda reason: None  # told when memory cannot be allocated
        self.is_closed = False
        self.device_lost: DeviceLostError | None = None
        self.events = events
        self.clock = clock

    def weights_of(self, digest: str) -> StoredWeights:
        return self.weights.setdefault(digest, StoredWeights(digest))

    def touch(self, weights: StoredWeights) -> None:
        """Looked at now. A request that gets the weights is a use (`acquire`): that happens once, this with every ask."""
        weights.last_used_s = self.clock()
        self.host.policy.touch(weights.digest)
        self.device.policy.touch(weights.digest)

    def acquire(self, adapter: StoredAdapter) -> None:
        """One more running request; its weights are on the device."""
        weights = adapter.weights
        adapter.count_running(1)
        self.host.policy.use(weights.digest)
        self.device.policy.use(weights.digest)
        self.counters.num_misses += weights.has_missed
        self.counters.num_hits += not weights.has_missed
        (self.ledger.missed if weights.is_cold else self.ledger.used)(weights.digest)
        self.counters.found[weights.brought_from or (Tier.HOST if weights.has_missed else Tier.DEVICE).value] += 1
        weights.has_missed = weights.is_cold = False
        weights.brought_from = None

    def release(self, adapter: StoredAdapter) -> None:
        adapter.count_running(-1)
        self.touch(adapter.weights)
        if adapter.weights.num_running == 0:
            self.lock.notify_all()

    @property
    def device_pool(self) -> LoRAMemoryPool:
        """Of the memory that kernels read: the host's where both tiers are one memory."""
        return self.device.pool or self.host.pool

    def stats(self, num_adapters: int) -> MemoryStats:
        everything, counters = list(self.weights.values()), self.counters
        fragmentation = self.device_pool.stats().fragmentation
        return MemoryStats(
            device=self.device.stats(),
            host=self.host.stats(),
            pinned_bytes=self.room.pinned_bytes,
            in_use_bytes=sum(each.nbytes for each in everything if each.num_running),
            committed_bytes=sum(each.nbytes for each in everything if each.num_running or each.num_pinned),
            loading_bytes=sum(each.nbytes for each in everything if each.job is not None and each.layout is not None),
            retiring_bytes=self.retired.nbytes,
            num_adapters=num_adapters,
            num_loading=sum(each.job is not None for each in everything),
            num_waiting={cause: sum(self.room.is_waiting(each, cause) for each in everything) for cause in WaitsFor},
            fragmentation=fragmentation,
            most_fragmentation=max(fragmentation, self.host.pool.stats().fragmentation),
            counters=replace(counters, loads=counters.loads.copy(), evictions=counters.evictions.copy()),
        )

    # ------------------------------------------------------------------------------------------------ away from the device

    def evict_to_source(self, weights: StoredWeights) -> None:
        """Out of memory; the source is read again by need."""
        if weights.device is not None:
            self.leave_device(weights)
        self.leave_host(weights)

    def resting_tier(self, weights: StoredWeights) -> Tier:
        """What has a content when no memory that kernels could read has it: the host (compressed), the disk, or its source."""
        if self.compressed is not None and self.compressed.get(weights.digest) is not None:
            return Tier.HOST
        return Tier.DISK if self.disk is not None and self.disk.has(weights.digest) else Tier.SOURCE

    def forget_copies(self, weights: StoredWeights) -> None:
        """Drop the compressed copy and the disk tier's."""
        if self.compressed is not None:
            self.compressed.drop(weights.digest)
        if self.disk is not None:
            self.disk.drop(weights.digest)

    def drop(self, weights: StoredWeights) -> None:
        """Nobody has this content any more: every tier is freed, and the KV cache is told. A job or reader does it at its end."""
        if not weights.is_at_rest:
            return
        self.evict_to_source(weights)
        self.forget_copies(weights)
        tell(self.events, EventKind.DROP, weights, "is gone from every tier")
        del self.weights[weights.digest]
        self.faults.pop(weights.digest, None)
        self.dropped.append(weights.digest)
        self.counters.num_drops += 1
        self.lock.notify_all()

    def take(
        self, cache: HostCache | DeviceCache, weights: StoredWeights, sizes: tuple[int, ...], demand: Demand
    ) -> Place | None:
        """A place in `cache`, for which as few others as needed leave; None, and nobody left, when that is not enough.

        While freed memory is retired, nobody leaves for lack of pieces: waiting for it may be enough. For a request it is then
        promised, or those who ask later in the pass would take it, and each would evict the other for ever.
        """
        nbytes = sum(sizes)
        if demand.is_for_request and self.room.promised(cache) not in (None, weights):
            return None
        leaving = self.room.fewest(cache, nbytes, self.room.candidates(cache, weights, demand))
        place = None
        while leaving is not None and place is None:
            for victim in leaving:
                self._make_way(victim, cache, demand)
            try:
                place = cache.allocate(sizes)
            except MemoryError as error:  # not for want of room: nobody leaves for it
                self.alarm(f"no memory for an adapter in the {cache.tier.value} tier: {error}")
                break
            is_stuck = place is None and self.retired.nbytes == 0
            victim_by_fragments = next(self.room.candidates(cache, weights, demand), None) if is_stuck else None
            leaving = None if victim_by_fragments is None else [victim_by_fragments]
        if place is not None:
            cache.policy.enter(weights.digest, nbytes, weights.reload_s if cache is self.host else None)
        elif demand.is_for_request and self.retired.nbytes and cache.fits(nbytes):
            weights.wanted_in_pass = self.room.pass_id
            self.room.promise(cache, weights)
        return place

    def _make_way(self, victim: StoredWeights, cache: Budget, demand: Demand) -> None:
        is_spare_copy = cache is self.host and victim.is_on_device and not self.is_shared
        cache.policy.evict(victim.digest)
        if not is_spare_copy:
            demand.evicted += [name for name in victim.names if name not in demand.evicted]
            self.counters.evictions[f"{cache.tier.value}_room"] += 1
        if cache is self.device:
            self.leave_device(victim)
        elif is_spare_copy:
            self.leave_host(victim)
        else:
            self.evict_to_source(victim)

    def wait_for_room(self, cache: Budget, weights: StoredWeights) -> WaitsFor:
        """ROOM; raises AdapterNoRoomError when no room can come."""
        name = next(iter(weights.adapters.values())).name
        self.room.check_can_come(cache, weights, name, weights.nbytes)
        return WaitsFor.ROOM

    def leave_device(self, weights: StoredWeights) -> None:
        """Device to host (to source when the host has no copy)."""
        place, weights.device = weights.device, None
        assert place is not None
        assert place.lora_slot is not None
        assert weights.layout is not None
        tell(self.events, EventKind.EVICT, weights, "left the device", tier="device", nbytes=weights.nbytes)
        self.arriving.pop(place.lora_slot, None)
        self.device.free_slot(place.lora_slot)
        self.device.give(weights.nbytes)
        self.device.policy.forget(weights.digest)
        self.retired.retire(place.extents)
        weights.state = WeightState.SOURCE if weights.host is None else WeightState.HOST

    def leave_host(self, weights: StoredWeights) -> None:
        place, weights.host = weights.host, None
        if place is not None:
            if weights.layout is not None:
                tell(self.events, EventKind.EVICT, weights, "left host memory", tier="host", nbytes=weights.nbytes)
            self.host.give(sum(extent.nbytes for extent in place.extents))
            self.host.policy.forget(weights.digest)
            self.ledger.evicted_unused(weights.digest)
            weights.brought_from = None
            if self.is_shared:
                self.retired.retire(place.extents)
            else:
                self.host.pool.free_all(place.extents)
        if weights.device is None:
            weights.state = WeightState.SOURCE

    # --------------------------------------------------------------------------------------------------------------- waiting

    def wait(self) -> None:
        """Until something changes. Raises EngineShutdownError after `close`."""
        self.lock.wait()
        self.check_open()

    def check_open(self) -> None:
        if self.is_closed:
            raise EngineShutdownError("the engine has shut down; its adapters are gone")

    def close(self) -> None:
        """Wake up everybody who waits; they get EngineShutdownError. Takes the lock."""
        with self.lock:
            self.is_closed = True
            self.lock.notify_all()
