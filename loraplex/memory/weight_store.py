"""Weights by content digest, and how they move: load, promote, evict, drop.

`advance` makes the one next move towards the device that needs no waiting and says what has to be waited for. A load is begun under
the lock and run outside it: files are read, blocks packed and bytes copied with no lock held, and the result is
taken over in a short critical section by the thread that did the work, so nobody's poll is needed.

    first load (add)     in the thread that asked: how large the adapter is shows only when it is open
    later loads, copies  in the loader's threads: their room is reserved when they begin, so they never wait

Everything here is called with `lock` held, except where it says otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from loraplex.core import WaitsFor
from loraplex.errors import AdapterError, AdapterNoRoomError, EngineShutdownError
from loraplex.events import EventKind, EventLog
from loraplex.memory.loading import Loader, as_adapter_error, copy_extents, raise_again, read_weights
from loraplex.memory.packing import PackedLayout, Packer
from loraplex.memory.quarantine import Quarantine
from loraplex.memory.room import Room
from loraplex.memory.stats import MemoryCounters, MemoryStats
from loraplex.memory.stored import Demand, LoadFailure, LoadJob, StoredAdapter, StoredWeights, WeightState, tell
from loraplex.memory.tiers import Budget, DeviceCache, HostCache, Place

FAILURE_TTL_S = 60.0
"""After this long nobody waits any more for the error of a failed load: the requests that did have ended otherwise."""


class WeightStore:
    """The residency of every digest. `lock` is a condition: it is notified when a load ends and when room comes back."""

    def __init__(
        self,
        host: HostCache,
        device: DeviceCache,
        packer: Packer,
        loader: Loader,
        clock: Callable[[], float],
        max_concurrent_loads: int,
        events: EventLog,
    ) -> None:
        self.lock = threading.Condition(threading.Lock())
        self.host = host
        self.device = device
        self.is_shared = device.pool is None  # both tiers are one memory
        self.quarantine = Quarantine(host.pool if device.pool is None else device.pool)
        self.adapters: dict[int, StoredAdapter] = {}  # those that resolve
        self.weights: dict[str, StoredWeights] = {}
        self.room = Room(host, device, self.quarantine, self.weights)
        self.counters = MemoryCounters()
        self.dropped: list[str] = []
        self.is_closed = False
        self._events = events
        self._packer = packer
        self._loader = loader
        self._clock = clock
        self._busy = threading.BoundedSemaphore(max_concurrent_loads)

    def weights_of(self, digest: str) -> StoredWeights:
        return self.weights.setdefault(digest, StoredWeights(digest))

    def touch(self, weights: StoredWeights) -> None:
        """Used now: the last to be evicted from the tiers that it is in."""
        weights.last_used_s = self._clock()
        if weights.host is not None:
            self.host.policy.touch(weights.digest)
        if weights.device is not None:
            self.device.policy.touch(weights.digest)

    # ------------------------------------------------------------------------------------------- towards the device

    def advance(self, weights: StoredWeights, demand: Demand) -> WaitsFor | None:
        """One move towards the device; None when it is there. LOAD: `weights.job` is under way.

        Raises AdapterNoRoomError when no room can come, EngineShutdownError after `close`.
        """
        self._check_open()
        if weights.job is None and weights.state is WeightState.SOURCE:
            return self._start_load(weights, demand)
        if weights.job is None and weights.state is WeightState.HOST:
            return self._promote(weights, demand)
        return None if weights.is_on_device else WaitsFor.LOAD

    def ask(self, weights: StoredWeights) -> WaitsFor | None:
        """`advance` for a request. Raises the error of a failed load to those who waited for it (`LoadFailure`)."""
        self._raise_failure(weights)
        was_on_device = weights.is_on_device
        waits_for = self.advance(weights, Demand("request", is_for_request=True))
        weights.has_missed |= not was_on_device
        weights.waits_for = waits_for
        if waits_for is not None:
            weights.wanted_in_pass = self.room.pass_id
            if weights.job is not None:
                weights.job.is_awaited = True
        self.touch(weights)
        return waits_for

    def prefetch(self, weights: StoredWeights) -> None:
        """`advance` for a request that is not admitted yet. A source that failed is not read again before somebody really asks."""
        weights.wanted_in_pass = self.room.pass_id
        is_near_enough = weights.host is not None and self.is_shared
        if not weights.is_prefetch_off and not is_near_enough:
            with suppress(AdapterError, EngineShutdownError):
                self.advance(weights, Demand("prefetch", is_for_request=True))
        self.touch(weights)

    def bring(self, adapter: StoredAdapter, demand: Demand) -> bool:
        """`advance` until the weights are on the device, for a verb that may wait; whether anything had to be done."""
        weights = adapter.weights
        has_changed = not weights.is_on_device
        while (waits_for := self.advance(weights, demand)) is not None:
            if waits_for is WaitsFor.LOAD:
                assert weights.job is not None
                self.join(weights.job)
            elif self.room.is_coming(weights):
                self._wait()
            else:
                cache = self.host if weights.host is None else self.device
                raise self.room.no_room(cache, weights, adapter.name, weights.nbytes)
            adapter.check_not_removed()
        self.touch(weights)
        return has_changed

    def acquire(self, adapter: StoredAdapter) -> None:
        """One more running request; its weights are on the device."""
        weights = adapter.weights
        adapter.count_running(1)
        self.counters.num_misses += weights.has_missed
        self.counters.num_hits += not weights.has_missed
        weights.has_missed = False

    def release(self, adapter: StoredAdapter) -> None:
        adapter.count_running(-1)
        self.touch(adapter.weights)
        if adapter.weights.num_running == 0:
            self.lock.notify_all()

    def _promote(self, weights: StoredWeights, demand: Demand) -> WaitsFor | None:
        assert weights.layout is not None
        assert weights.host is not None
        weights.device = self._take(self.device, weights, weights.layout.sizes, demand)
        if weights.device is None:
            return self._wait_for_room(self.device, weights)
        if self.is_shared:
            self._publish(weights, weights.layout, weights.host)
            return None
        weights.state = WeightState.COPYING
        job = self._begin(weights, demand)
        self._loader.submit(partial(self._run_copy, job))
        return WaitsFor.LOAD

    def _publish(self, weights: StoredWeights, layout: PackedLayout, place: Place) -> None:
        assert weights.lora_slot is not None
        self.device.publish(weights.lora_slot, layout, place.extents)
        weights.state = WeightState.DEVICE
        self.counters.num_promotions += 1

    # -------------------------------------------------------------------------------------------------------- loads

    def begin_first_load(self, weights: StoredWeights, demand: Demand) -> LoadJob:
        """The caller runs it with `run_load`, with the lock released."""
        self._check_open()
        weights.state = WeightState.LOADING
        return self._begin(weights, demand)

    def join(self, job: LoadJob, is_error_raised: bool = True) -> None:
        """Wait for a job; raises its error if it failed."""
        while not job.is_done:
            self._wait()
        if job.error is not None and is_error_raised:
            raise_again(job.error)

    def run_load(self, job: LoadJob) -> None:
        """Read, pack, take over. Without the lock, in any thread. Errors go into the job; only what ends the process is raised."""
        weights = job.weights
        try:
            with self._busy:
                plan = self._packer.plan(read_weights(weights, job.sources))
            extents = self._reserve(job, plan.sizes).extents
            with self._busy:
                layout = plan.write([self.host.pool.view(extent) for extent in extents])
        except BaseException as error:
            self._fail(job, error)
            if not isinstance(error, Exception):
                raise
        else:
            self._finish_load(job, layout)

    def stats(self, num_adapters: int) -> MemoryStats:
        everything, counters = list(self.weights.values()), self.counters
        return MemoryStats(
            device=self.device.stats(),
            host=self.host.stats(),
            pinned_bytes=self.room.pinned_bytes,
            in_use_bytes=sum(each.nbytes for each in everything if each.num_running),
            committed_bytes=sum(each.nbytes for each in everything if each.num_running or each.num_pinned),
            retiring_bytes=self.quarantine.nbytes,
            num_adapters=num_adapters,
            num_loading=sum(each.job is not None for each in everything),
            num_waiting={cause: sum(self.room.is_waiting(each, cause) for each in everything) for cause in WaitsFor},
            fragmentation=self.host.pool.stats().fragmentation,
            counters=replace(counters, loads=counters.loads.copy(), evictions=counters.evictions.copy()),
        )

    def _start_load(self, weights: StoredWeights, demand: Demand) -> WaitsFor:
        assert weights.layout is not None, "the first load is begun by `begin_first_load`"
        weights.host = self._take(self.host, weights, weights.layout.sizes, demand)
        if weights.host is None:
            return self._wait_for_room(self.host, weights)
        weights.state = WeightState.LOADING
        job = self._begin(weights, demand)
        self._loader.submit(partial(self.run_load, job))
        return WaitsFor.LOAD

    def _begin(self, weights: StoredWeights, demand: Demand) -> LoadJob:
        weights.failure = None
        weights.is_prefetch_off = False
        weights.job = LoadJob(weights, demand, tuple(weights.adapters.values()), self._clock())
        return weights.job

    def _reserve(self, job: LoadJob, sizes: tuple[int, ...]) -> Place:
        """The host room of a load; a first load takes it here and may wait for memory that is on its way back. Takes the lock."""
        weights, name = job.weights, job.sources[-1].name
        with self.lock:
            if weights.host is None:
                self.room.check_size(name, sum(sizes))
            while weights.host is None:
                weights.host = self._take(self.host, weights, sizes, job.demand)
                if weights.host is None and not self.room.is_coming(weights):
                    raise self.room.no_room(self.host, weights, name, sum(sizes))
                if weights.host is None:
                    self._wait()
            assert sum(sizes) == sum(extent.nbytes for extent in weights.host.extents), "equal content, unequal size"
            return weights.host

    def _finish_load(self, job: LoadJob, layout: PackedLayout) -> None:
        with self.lock:
            weights = job.weights
            weights.layout, weights.state = layout, WeightState.HOST
            self.counters.loads[job.demand.cause] += 1
            load_s = self._clock() - job.began_s
            self.counters.load_s += load_s
            tell(
                self._events,
                EventKind.LOAD,
                weights,
                "is in host memory",
                cause=job.demand.cause,
                seconds=load_s,
                nbytes=layout.nbytes,
            )
            self._end(job)
            is_for_device = job.demand.is_for_request and not self.is_shared
            if is_for_device and weights.adapters and not self.is_closed:
                with suppress(AdapterError):
                    self.advance(weights, job.demand)
                if weights.job is not None:
                    weights.job.is_awaited = job.is_awaited

    def _run_copy(self, job: LoadJob) -> None:
        """Copy host memory to the device and publish it. Without the lock, in a loader thread."""
        weights = job.weights
        assert weights.host is not None
        assert weights.device is not None
        assert self.device.pool is not None
        try:
            sources = [self.host.pool.view(extent) for extent in weights.host.extents]
            targets = [self.device.pool.view(extent) for extent in weights.device.extents]
            copy_extents(sources, targets)
        except Exception as error:
            self._fail(job, error)
        else:
            self._finish_copy(job)

    def _finish_copy(self, job: LoadJob) -> None:
        with self.lock:
            weights = job.weights
            assert weights.layout is not None
            assert weights.device is not None
            self._publish(weights, weights.layout, weights.device)
            self.counters.num_copies += 1
            self.counters.copy_s += self._clock() - job.began_s
            self._end(job)

    def _fail(self, job: LoadJob, error: BaseException) -> None:
        with self.lock:
            weights = job.weights
            job.error = as_adapter_error(error, job.sources[-1].name)
            if weights.state is WeightState.COPYING:
                self._leave_device(weights)
            else:
                self._leave_host(weights)
            if job.is_awaited and not isinstance(job.error, AdapterNoRoomError):  # of an add: requests wait for room
                weights.failure = LoadFailure(job.error, self._clock())
            weights.is_prefetch_off = True
            self.counters.num_load_failures += 1
            tell(
                self._events,
                EventKind.LOAD_FAILED,
                weights,
                f"could not be loaded: {job.error}",
                cause=job.demand.cause,
            )
            if weights.layout is None:
                self._forget_sources(job)
            self._end(job)

    def _forget_sources(self, job: LoadJob) -> None:
        """The first load failed: its adapters were never there. Their `add_adapter` raises; those that came later load for themselves."""
        for adapter in job.sources:
            if job.weights.adapters.get(adapter.adapter_id) is adapter:
                adapter.is_removed = True
                del job.weights.adapters[adapter.adapter_id], self.adapters[adapter.adapter_id]

    def _end(self, job: LoadJob) -> None:
        weights = job.weights
        weights.job, weights.last_error, job.is_done = None, job.error, True
        if not weights.adapters:
            self.drop(weights)
        self.lock.notify_all()

    def _raise_failure(self, weights: StoredWeights) -> None:
        failure = weights.failure
        if failure is None:
            return
        if failure.raised_in_pass is None and self._clock() - failure.failed_s <= FAILURE_TTL_S:
            failure.raised_in_pass = self.room.pass_id
        if failure.raised_in_pass == self.room.pass_id:
            raise_again(failure.error)

    # ------------------------------------------------------------------------------------------------ away from the device

    def demote(self, weights: StoredWeights) -> None:
        """Device to host (to source when the host has no copy)."""
        self._leave_device(weights)

    def evict_to_source(self, weights: StoredWeights) -> None:
        """Out of memory; the source is read again by need."""
        if weights.device is not None:
            self._leave_device(weights)
        self._leave_host(weights)

    def drop(self, weights: StoredWeights) -> None:
        """Nobody has this content any more: every tier is freed, and the KV cache is told. A job under way does it at its end."""
        if weights.job is not None:
            return
        self.evict_to_source(weights)
        tell(self._events, EventKind.DROP, weights, "is gone from every tier")
        del self.weights[weights.digest]
        self.dropped.append(weights.digest)
        self.counters.num_drops += 1
        self.lock.notify_all()

    def _take(
        self, cache: HostCache | DeviceCache, weights: StoredWeights, sizes: tuple[int, ...], demand: Demand
    ) -> Place | None:
        """A place in `cache`, for which as few others as needed leave; None, and nobody left, when that is not enough.

        While freed memory is in quarantine, nobody leaves for lack of pieces: waiting for it may be enough. For a request it is then
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
            place = cache.allocate(sizes)
            is_stuck = place is None and self.quarantine.nbytes == 0
            victim_by_fragments = next(self.room.candidates(cache, weights, demand), None) if is_stuck else None
            leaving = None if victim_by_fragments is None else [victim_by_fragments]
        if place is not None:
            cache.policy.touch(weights.digest)
        elif demand.is_for_request and self.quarantine.nbytes and cache.fits(nbytes):
            weights.wanted_in_pass = self.room.pass_id
            self.room.promise(cache, weights)
        return place

    def _make_way(self, victim: StoredWeights, cache: Budget, demand: Demand) -> None:
        is_spare_copy = cache is self.host and victim.is_on_device and not self.is_shared
        if not is_spare_copy:
            demand.evicted += [name for name in victim.names if name not in demand.evicted]
            self.counters.evictions[f"{cache.tier.value}_room"] += 1
        if cache is self.device:
            self._leave_device(victim)
        elif is_spare_copy:
            self._leave_host(victim)
        else:
            self.evict_to_source(victim)

    def _wait_for_room(self, cache: Budget, weights: StoredWeights) -> WaitsFor:
        name = next(iter(weights.adapters.values())).name
        self.room.check_can_come(cache, weights, name, weights.nbytes)
        return WaitsFor.ROOM

    def _leave_device(self, weights: StoredWeights) -> None:
        place, weights.device = weights.device, None
        assert place is not None
        assert place.lora_slot is not None
        assert weights.layout is not None
        tell(self._events, EventKind.EVICT, weights, "left the device", tier="device", nbytes=weights.nbytes)
        self.device.free_slot(place.lora_slot)
        self.device.give(weights.nbytes)
        self.device.policy.forget(weights.digest)
        self.quarantine.retire(place.extents)
        weights.state = WeightState.SOURCE if weights.host is None else WeightState.HOST

    def _leave_host(self, weights: StoredWeights) -> None:
        place, weights.host = weights.host, None
        if place is not None:
            if weights.layout is not None:
                tell(self._events, EventKind.EVICT, weights, "left host memory", tier="host", nbytes=weights.nbytes)
            self.host.give(sum(extent.nbytes for extent in place.extents))
            self.host.policy.forget(weights.digest)
            if self.is_shared:
                self.quarantine.retire(place.extents)
            else:
                self.host.pool.free_all(place.extents)
        if weights.device is None:
            weights.state = WeightState.SOURCE

    # --------------------------------------------------------------------------------------------------------------- waiting

    def _wait(self) -> None:
        self.lock.wait()
        self._check_open()

    def _check_open(self) -> None:
        if self.is_closed:
            raise EngineShutdownError("the engine has shut down; its adapters are gone")

    def close(self) -> None:
        """Wake up everybody who waits; they get EngineShutdownError. Takes the lock."""
        with self.lock:
            self.is_closed = True
            self.lock.notify_all()
        self._loader.close()
