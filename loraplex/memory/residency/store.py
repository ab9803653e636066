"""Weights by content digest: what is in which tier, who uses it, and how it leaves: demote, evict, drop.

How weights come nearer is in transfers.py. Everything here is called with `lock` held, except where it says otherwise.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from loraplex.adapters.weights import LoRAModel
from loraplex.core import AdapterSpec, Tier, WaitsFor
from loraplex.errors import (
    AdapterConflictError,
    AdapterNoRoomError,
    AdapterNotFoundError,
    AdapterTooLargeError,
    DeviceLostError,
    EngineShutdownError,
    LoraplexError,
)
from loraplex.events import EventKind, EventLog
from loraplex.kernels.checksum import Checksums, checksums
from loraplex.memory.care.prediction import PrefetchLedger
from loraplex.memory.residency.records import Demand, StoredAdapter, StoredWeights, WeightState, tell
from loraplex.memory.residency.tiers import Budget, DeviceCache, HostCache, Place
from loraplex.memory.space.pool import RetiredMemory
from loraplex.memory.stats import MemoryCounters, MemoryStats
from loraplex.memory.weights.compression import CompressedCopies
from loraplex.memory.weights.copies import Arriving, CopyEngine, SynchronousCopies
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

    def stats(self, num_adapters: int) -> MemoryStats:
        everything, counters = list(self.weights.values()), self.counters
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
            fragmentation=self.host.pool.stats().fragmentation,
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


# ---------------------------------------------------------------------------------------------------------------- room


class Room:
    """Decisions over both tiers; it moves nothing. The caller holds the manager's lock."""

    def __init__(
        self, host: HostCache, device: DeviceCache, retired: RetiredMemory, weights: Mapping[str, StoredWeights]
    ) -> None:
        self._host = host
        self._device = device
        self._retired = retired
        self._weights = weights
        self._promises: dict[Tier, StoredWeights] = {}
        self.pass_id = 0

    # ------------------------------------------------------------------------------------------------------- promises

    def promise(self, cache: Budget, weights: StoredWeights) -> None:
        """The memory that is on its way back to `cache` is for `weights`: no request may take it before, as long as it is asked for."""
        if self.promised(cache) is None:
            self._promises[cache.tier] = weights

    def promised(self, cache: Budget) -> StoredWeights | None:
        """Whom the next free memory of `cache` is for."""
        weights = self._promises.get(cache.tier)
        is_due = weights is not None and weights.job is None and not _holds(cache, weights)
        if weights is not None and is_due and weights.wanted_in_pass >= self.pass_id - 1:
            return weights
        self._promises.pop(cache.tier, None)
        return None

    # ------------------------------------------------------------------------------------------------------ who may leave

    def candidates(self, cache: Budget, wanted: StoredWeights | None, demand: Demand) -> Iterator[StoredWeights]:
        """What may leave `cache` for `wanted`, first to go first. Evict nothing while iterating."""
        if not cache.policy.evicts:
            return
        for is_on_device in (True,) if cache is self._device else (False, True):
            for each in self._held(cache):
                if each.is_on_device == is_on_device and each is not wanted and self._may_leave(each, cache, demand):
                    yield each

    def fewest(self, cache: Budget, nbytes: int, candidates: Iterator[StoredWeights]) -> list[StoredWeights] | None:
        """The first of `candidates` that must leave before `nbytes` fit; None when all of them would not do."""
        leaving: list[StoredWeights] = []
        used_bytes, num_adapters = cache.used_bytes, cache.num_adapters
        while not cache.allows(nbytes, used_bytes, num_adapters):
            victim = next(candidates, None)
            if victim is None:
                return None
            leaving.append(victim)
            used_bytes -= victim.nbytes
            num_adapters -= 1
        return leaving

    def victims_for(self, wanted: StoredWeights, in_use: Sequence[StoredWeights]) -> list[StoredWeights]:
        """The first unpinned ones of `in_use` whose release would make room for `wanted`; [] if none would."""
        if wanted.job is not None or wanted.is_on_device or wanted.layout is None:
            return []
        caches: list[Budget] = [self._device] if wanted.host is not None else [self._host, self._device]
        victims: list[StoredWeights] = []
        for cache in caches:
            more = self._in_the_way(cache, wanted, in_use, victims)
            if more is None:
                return []
            victims += more
        return victims or self._holders_beside_kv(wanted, in_use)

    def _holders_beside_kv(self, wanted: StoredWeights, in_use: Sequence[StoredWeights]) -> list[StoredWeights]:
        """The budget has room and the KV cache has the memory: those whose end gives as much of either back."""
        cache = self._device if wanted.host is not None else self._host
        victims: list[StoredWeights] = []
        for each in in_use if self._is_kv_in_the_way(cache) else ():
            if (
                _holds(cache, each)
                and each is not wanted
                and _can_give_way(each)
                and sum(v.nbytes for v in victims) < wanted.nbytes
            ):
                victims.append(each)
        return victims

    def _is_kv_in_the_way(self, cache: Budget) -> bool:
        pool = self._device.pool if cache is self._device else self._host.pool
        return pool is not None and pool.is_kv_in_the_way

    def _in_the_way(
        self, cache: Budget, wanted: StoredWeights, in_use: Sequence[StoredWeights], leaving: list[StoredWeights]
    ) -> list[StoredWeights] | None:
        freely = list(self.candidates(cache, wanted, Demand("request")))
        gone = freely + [each for each in leaving if each not in freely and _holds(cache, each)]
        running = (each for each in in_use if each not in gone and _holds(cache, each) and _can_give_way(each))
        chosen = self.fewest(cache, wanted.nbytes, itertools.chain(gone, running))
        return None if chosen is None else [each for each in chosen if each not in gone]

    def _held(self, cache: Budget) -> Iterator[StoredWeights]:
        return (self._weights[digest] for digest in cache.policy.order(self._is_queued))

    def _is_queued(self, digest: str) -> bool:
        """Whether a request asked for it in vain in this scheduling pass or the last."""
        return self._weights[digest].wanted_in_pass >= max(0, self.pass_id - 1)

    def _may_leave(self, weights: StoredWeights, cache: Budget, demand: Demand) -> bool:
        is_spare_copy = cache is self._host and self._device.pool is not None and weights.is_on_device
        if is_spare_copy:
            return weights.is_at_rest
        is_wanted = demand.is_for_request and weights.wanted_in_pass == self.pass_id
        return weights.is_idle and not is_wanted

    # ---------------------------------------------------------------------------------------------------- what is refused

    def is_coming(self, wanted: StoredWeights) -> bool:
        """Whether waiting helps a verb: memory is on its way back, or a load that has its room will soon be done."""
        others = (each for each in self._weights.values() if each is not wanted)
        return self._retired.nbytes > 0 or any(_is_soon_at_rest(each) for each in others)

    def check_can_come(self, cache: Budget, wanted: StoredWeights, name: str, nbytes: int) -> None:
        """Raises AdapterNoRoomError when no end of running requests or loads makes room for `wanted` in `cache`."""
        if self._retired.nbytes or self.promised(cache) not in (None, wanted):
            return
        if self._is_kv_in_the_way(cache) and cache.fits(nbytes):
            return  # requests end, and the KV cache gives back
        pinned = [each for each in self._pinned(wanted) if _is_fixed_in(cache, each, self._device)]
        can_fit = cache.allows(nbytes, sum(each.nbytes for each in pinned), len(pinned))
        is_in_motion = any(each is not wanted and not _is_settled(each, self.pass_id) for each in self._held(cache))
        if not (cache.policy.evicts and can_fit and is_in_motion):
            raise self.no_room(cache, wanted, name, nbytes)

    def check_pinnable(self, weights: StoredWeights, name: str) -> None:
        """Raises AdapterNoRoomError when the pinned adapters and this one together exceed the device."""
        if weights.layout is None or weights.num_pinned:
            return
        pinned = self._pinned(weights)
        pinned_bytes = sum(each.nbytes for each in pinned)
        if not self._device.allows(weights.nbytes, pinned_bytes, len(pinned)):
            raise AdapterNoRoomError(
                f"adapter {name!r} cannot be pinned: it needs {weights.nbytes} bytes, and {pinned_bytes} of the "
                f"{self._device.max_bytes} bytes and {len(pinned)} of the {self._device.max_adapters} slots of the device "
                "are pinned already; unpin another adapter or raise adapter_memory_bytes"
            )

    def check_size(self, name: str, nbytes: int) -> None:
        """Raises AdapterTooLargeError when an empty tier would not hold the adapter."""
        for cache in (self._device, self._host):
            if nbytes > cache.max_bytes:
                raise AdapterTooLargeError(
                    f"adapter {name!r} needs {nbytes} bytes of {cache.tier.value} memory, all of it is {cache.max_bytes} "
                    f"bytes; raise {cache.setting} or use a lower rank"
                )

    def no_room(self, cache: Budget, wanted: StoredWeights, name: str, nbytes: int) -> AdapterNoRoomError:
        held = [each for each in self._held(cache) if each is not wanted]
        pinned = sum(each.nbytes for each in held if each.num_pinned)
        in_use = sum(each.nbytes for each in held if each.num_running and not each.num_pinned)
        bound = (
            "" if cache.max_adapters is None else f" ({cache.num_adapters} of at most {cache.max_adapters} adapters)"
        )
        rule = "" if cache.policy.evicts else "; eviction_policy is none, so nothing makes way by itself"
        if cache.fits(nbytes):
            has_kv = self._is_kv_in_the_way(cache)
            rule += "; the KV cache has the rest" if has_kv else "; what is free is in pieces that are too small"
        return AdapterNoRoomError(
            f"adapter {name!r} needs {nbytes} bytes of {cache.tier.value} memory and finds no room: {cache.used_bytes} of "
            f"{cache.max_bytes} bytes are taken{bound}, {pinned} bytes pinned and {in_use} in use{rule}; "
            f"unpin or evict another adapter, or raise {cache.setting}"
        )

    def _pinned(self, besides: StoredWeights) -> list[StoredWeights]:
        return [each for each in self._held(self._device) if each.num_pinned and each is not besides]

    def is_waiting(self, weights: StoredWeights, cause: WaitsFor) -> bool:
        """Whether a request asked for it in vain in this scheduling pass or the last, because of `cause`."""
        return weights.waits_for is cause and weights.wanted_in_pass >= self.pass_id - 1

    @property
    def pinned_bytes(self) -> int:
        return sum(each.nbytes for each in self._held(self._device) if each.num_pinned)


def _holds(cache: Budget, weights: StoredWeights) -> bool:
    return (weights.device if cache.tier is Tier.DEVICE else weights.host) is not None


def _is_fixed_in(cache: Budget, pinned: StoredWeights, device: DeviceCache) -> bool:
    """A pin holds the device's copy; the host's is spare where the device has its own memory."""
    return cache is device or device.pool is None


def _is_soon_at_rest(weights: StoredWeights) -> bool:
    """Not when requests still run on what did not arrive: they end in the engine's thread, which may be the one that asks."""
    job = weights.job
    return weights.num_readers > 0 or (job is not None and job.error is None and weights.host is not None)


def _can_give_way(weights: StoredWeights) -> bool:
    is_draining = any(adapter.is_removed for adapter in weights.adapters.values())
    return weights.num_running > 0 and weights.num_pinned == 0 and weights.is_at_rest and not is_draining


def _is_settled(weights: StoredWeights, pass_id: int) -> bool:
    """Nothing about it will change by itself: it is idle or pinned, and no request asked for it in this pass."""
    return (weights.is_idle and weights.wanted_in_pass != pass_id) or weights.num_pinned > 0


# ----------------------------------------------------------------------------------------------------- adapter records


class AdapterRecords:
    """Called with the store's lock held. open_weights: reads the source of a spec, in any thread."""

    def __init__(self, store: WeightStore, open_weights: Callable[[AdapterSpec], LoRAModel]) -> None:
        self._store = store
        self._open_weights = open_weights
        self.draining: dict[int, StoredAdapter] = {}

    def get(self, adapter_id: int) -> StoredAdapter:
        """One that resolves; raises AdapterNotFoundError."""
        adapter = self._store.adapters.get(adapter_id)
        if adapter is None:
            raise AdapterNotFoundError(f"adapter id {adapter_id} is unknown; add the adapter first")
        return adapter

    def in_use(self, adapter_id: int) -> StoredAdapter:
        """One that a request runs on, removed or not."""
        return self.draining.get(adapter_id) or self.get(adapter_id)

    def spec_of(self, adapter: AdapterSpec | LoRAModel) -> tuple[AdapterSpec, Callable[[], LoRAModel]]:
        """The spec, and what reads its weights."""
        if isinstance(adapter, AdapterSpec):
            return adapter, partial(self._open_weights, adapter)
        digest, name = adapter.adapter_digest, str(adapter.adapter_id)
        spec = AdapterSpec(adapter.adapter_id, name, 1, digest, "", adapter.nbytes, adapter.rank)
        return spec, lambda: adapter  # the caller's object is its source

    def known(self, spec: AdapterSpec) -> StoredAdapter | None:
        """The adapter of that id, if it is there with the same content; raises AdapterConflictError for another one."""
        draining = self.draining.get(spec.adapter_id)
        known = self._store.adapters.get(spec.adapter_id)
        if draining is not None:
            raise AdapterConflictError(
                f"adapter {spec.adapter_name!r}: requests still run on the removed adapter {draining.name!r} of the same id "
                f"{spec.adapter_id}; take another id or wait for them"
            )
        if known is not None and known.weights.digest != spec.adapter_digest:
            raise AdapterConflictError(
                f"adapter {spec.adapter_name!r}: id {spec.adapter_id} belongs to adapter {known.name!r} with another content; "
                "take another id or remove that one first"
            )
        return known

    def attach(self, spec: AdapterSpec, opener: Callable[[], LoRAModel]) -> StoredAdapter:
        """A new record over the weights of its content."""
        weights = self._store.weights_of(spec.adapter_digest)
        adapter = StoredAdapter(spec, opener, weights)
        weights.adapters[spec.adapter_id] = adapter
        self._store.adapters[spec.adapter_id] = adapter
        return adapter

    def attach_unread(self, specs: Sequence[AdapterSpec]) -> None:
        """Records of adapters that nobody has read; known ones are passed over."""
        for spec in specs:
            if self.known(spec) is None:
                self.attach(*self.spec_of(spec)).is_attached = True

    def remove(self, adapter: StoredAdapter) -> None:
        """It resolves no more; its weights go now, or with its last request."""
        del self._store.adapters[adapter.adapter_id]
        adapter.set_pinned(False)
        adapter.is_removed = True
        if adapter.num_running:
            self.draining[adapter.adapter_id] = adapter
        else:
            self._detach(adapter)

    def end_draining(self, adapter: StoredAdapter) -> None:
        """The last request of a removed adapter has ended."""
        del self.draining[adapter.adapter_id]
        self._detach(adapter)

    def _detach(self, adapter: StoredAdapter) -> None:
        weights: StoredWeights = adapter.weights
        del weights.adapters[adapter.adapter_id]
        if not weights.adapters:
            self._store.drop(weights)
