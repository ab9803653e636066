"""How weights come nearer: from the source or the disk to the host, from the host to the device.

`advance` makes the one next move towards the device that needs no waiting and says what has to be waited for. A load is begun under
the store's lock and run outside it: files are read, blocks packed and bytes copied with no lock held, and the result is
taken over in a short critical section by the thread that did the work, so nobody's poll is needed.

    first load (add)     in the thread that asked: how large the adapter is shows only when it is open
    first load (attach)  in a loader's thread; when it finds no room, what it learnt of the size is kept, and later loads wait for room
    later loads, copies  in the loader's threads: their room is reserved when they begin, so they never wait

Everything here is called with the lock held, except where it says otherwise.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from loraplex.core import Tier, WaitsFor
from loraplex.errors import (
    AdapterError,
    AdapterNoRoomError,
    AdapterUnavailableError,
    DeviceLostError,
    EngineShutdownError,
)
from loraplex.events import EventKind
from loraplex.memory.damage import DamageControl
from loraplex.memory.loading import (
    Loader,
    as_adapter_error,
    copy_extents,
    is_device_lost,
    is_out_of_memory,
    raise_again,
)
from loraplex.memory.packing import PackedLayout
from loraplex.memory.stored import Demand, LoadFailure, LoadJob, StoredAdapter, StoredWeights, WeightState, tell
from loraplex.memory.tiers import Place
from loraplex.memory.weight_reader import LoadedWeights, WeightReader
from loraplex.memory.weight_store import WeightStore

MAX_FAILED_COPIES = 2
"""Places on the device that are tried after one that could not be written."""

FAILURE_TTL_S = 60.0
"""After this long nobody waits any more for the error of a failed load: the requests that did have ended otherwise."""


class Transfers:
    """Moves the weights of a store towards the device."""

    def __init__(self, store: WeightStore, reader: WeightReader, loader: Loader, damage: DamageControl) -> None:
        self._store = store
        self._damage = damage
        self._reader = reader
        self._loader = loader

    def advance(self, weights: StoredWeights, demand: Demand) -> WaitsFor | None:
        """One move towards the device; None when it is there. LOAD: `weights.job` is under way.

        Raises AdapterNoRoomError when no room can come, EngineShutdownError after `close`.
        """
        self._store.check_open()
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
        weights.is_cold |= waits_for is WaitsFor.LOAD
        weights.waits_for = waits_for
        if waits_for is not None:
            weights.wanted_in_pass = self._store.room.pass_id
            if weights.job is not None:
                weights.job.is_awaited = True
        self._store.touch(weights)
        return waits_for

    def prefetch(self, weights: StoredWeights) -> None:
        """`advance` for a request that is not admitted yet. A source that failed is not read again before somebody really asks."""
        weights.wanted_in_pass = self._store.room.pass_id
        is_near_enough = weights.host is not None and self._store.is_shared
        if not weights.is_prefetch_off and not is_near_enough:
            with suppress(AdapterError, EngineShutdownError):
                self.advance(weights, Demand("prefetch", is_for_request=True))
        self._store.touch(weights)

    def bring(self, adapter: StoredAdapter, demand: Demand) -> bool:
        """`advance` until the weights are on the device, for a verb that may wait; whether anything had to be done."""
        weights = adapter.weights
        has_changed = not weights.is_on_device
        while (waits_for := self.advance(weights, demand)) is not None:
            if waits_for is WaitsFor.LOAD:
                assert weights.job is not None
                self.join(weights.job)
            elif self._store.room.is_coming(weights):
                self._store.wait()
            else:
                cache = self._store.host if weights.host is None else self._store.device
                raise self._store.room.no_room(cache, weights, adapter.name, weights.nbytes)
            adapter.check_not_removed()
        self._store.touch(weights)
        return has_changed

    def _promote(self, weights: StoredWeights, demand: Demand) -> WaitsFor | None:
        assert weights.layout is not None
        assert weights.host is not None
        damaged = self._damage.find_unless_fresh(weights)
        if damaged and weights.num_running == 0:
            self._damage.discard(weights, Tier.HOST, damaged)
            return self._start_load(weights, demand)
        weights.device = self._store.take(self._store.device, weights, weights.layout.sizes, demand)
        if weights.device is None:
            return self._store.wait_for_room(self._store.device, weights)
        if self._store.is_shared:
            self._publish(weights, weights.layout, weights.host)
            return None
        weights.state = WeightState.COPYING
        job = self._begin(weights, demand)
        self._loader.submit(partial(self._run_copy, job))
        return WaitsFor.LOAD

    def _publish(self, weights: StoredWeights, layout: PackedLayout, place: Place) -> None:
        assert weights.lora_slot is not None
        self._store.device.publish(weights.lora_slot, layout, place.extents)
        weights.state = WeightState.DEVICE
        self._store.counters.num_promotions += 1

    # -------------------------------------------------------------------------------------------------------- loads

    def begin_first_load(self, weights: StoredWeights, demand: Demand) -> LoadJob:
        """The caller runs it with `run_load`, with the lock released."""
        self._store.check_open()
        weights.state = WeightState.LOADING
        job = self._begin(weights, demand)
        job.may_wait = True
        return job

    def join(self, job: LoadJob, is_error_raised: bool = True) -> None:
        """Wait for a job; raises its error if it failed."""
        while not job.is_done:
            self._store.wait()
        if job.error is not None and is_error_raised:
            raise_again(job.error)

    def run_load(self, job: LoadJob) -> None:
        """Read, pack, take over. Without the lock, in any thread. Errors go into the job; only what ends the process is raised."""
        try:
            loaded = self._reader.read(job, partial(self._reserve, job))
        except BaseException as error:
            self._fail(job, error)
            if not isinstance(error, Exception):
                raise
        else:
            self._finish_load(job, loaded)

    def _start_load(self, weights: StoredWeights, demand: Demand) -> WaitsFor:
        if weights.layout is not None:
            weights.host = self._store.take(self._store.host, weights, weights.layout.sizes, demand)
            if weights.host is None:
                return self._store.wait_for_room(self._store.host, weights)
        weights.state = WeightState.LOADING
        job = self._begin(weights, demand)
        self._loader.submit(partial(self.run_load, job))
        return WaitsFor.LOAD

    def _begin(self, weights: StoredWeights, demand: Demand) -> LoadJob:
        weights.failure = None
        weights.is_prefetch_off = False
        weights.job = LoadJob(weights, demand, tuple(weights.adapters.values()), self._store.clock())
        return weights.job

    def _reserve(self, job: LoadJob, sizes: tuple[int, ...]) -> Place | None:
        """The host room of a load; a first load takes it here. Takes the lock. None for one that has no room and may not wait."""
        weights, name = job.weights, job.sources[-1].name
        with self._store.lock:
            if weights.host is None:
                self._store.room.check_size(name, sum(sizes))
            while weights.host is None:
                weights.host = self._store.take(self._store.host, weights, sizes, job.demand)
                if weights.host is None and not job.may_wait:
                    return None
                if weights.host is None and not self._store.room.is_coming(weights):
                    raise self._store.room.no_room(self._store.host, weights, name, sum(sizes))
                if weights.host is None:
                    self._store.wait()
            assert sum(sizes) == sum(extent.nbytes for extent in weights.host.extents), "equal content, unequal size"
            return weights.host

    def _finish_load(self, job: LoadJob, loaded: LoadedWeights) -> None:
        with self._store.lock:
            weights = job.weights
            weights.layout, weights.checksums = loaded.layout, loaded.checksums
            weights.state = WeightState.HOST if loaded.is_placed else WeightState.SOURCE
            if not loaded.is_placed:
                self._end(job)
                return
            self._count_load(job, loaded)
            self._end(job)
            is_for_request = job.demand.is_for_request and not self._store.is_shared
            if (is_for_request or weights.num_pinned) and weights.adapters and not self._store.is_closed:
                with suppress(AdapterError):
                    self.advance(weights, job.demand)
                if weights.job is not None:
                    weights.job.is_awaited = job.is_awaited

    def _count_load(self, job: LoadJob, loaded: LoadedWeights) -> None:
        store, weights, cause = self._store, job.weights, job.demand.cause
        seconds, nbytes, origin = store.clock() - job.began_s, loaded.layout.nbytes, loaded.origin
        store.counters.loads[cause] += 1
        store.counters.loads_from[origin] += 1
        store.counters.load_s += seconds
        weights.reload_s = seconds
        weights.checked_s = store.clock()
        weights.last_used_s = store.clock()  # what was just loaded is not long idle
        store.host.policy.enter(weights.digest, nbytes, seconds)
        text = f"came to host memory from the {origin}"
        tell(store.events, EventKind.LOAD, weights, text, cause=cause, seconds=seconds, nbytes=nbytes, origin=origin)
        for damaged in job.damaged_copies:
            store.counters.num_damaged += 1
            tell(store.events, EventKind.FAULT, weights, f"had a damaged copy ({damaged})", tier=damaged)
        if weights.is_restoring or job.damaged_copies:
            weights.is_restoring = False
            tell(store.events, EventKind.RECOVERY, weights, f"was restored from the {origin}", nbytes=nbytes)

    def _run_copy(self, job: LoadJob) -> None:
        """Copy host memory to the device and publish it. Without the lock, in a loader thread."""
        weights = job.weights
        assert weights.host is not None
        assert weights.device is not None
        assert self._store.device.pool is not None
        try:
            sources = [self._store.host.pool.view(extent) for extent in weights.host.extents]
            targets = [self._store.device.pool.view(extent) for extent in weights.device.extents]
            copy_extents(sources, targets)
        except (RuntimeError, OSError) as error:
            self._copy_failed(job, error)
        except Exception as error:
            self._fail(job, error)
        else:
            self._finish_copy(job)

    def _copy_failed(self, job: LoadJob, error: Exception) -> None:
        """The memory that could not be written is fenced, and another place is tried; a device that is lost is the engine's matter."""
        with self._store.lock:
            if is_device_lost(error):
                self._store.device_lost = DeviceLostError(f"the device does not answer any more: {error}")
            weights = job.weights
            assert weights.device is not None
            self._damage.fence(weights, Tier.DEVICE, weights.device.extents)
            job.num_failed_copies += 1
            sizes = tuple(extent.nbytes for extent in weights.device.extents)
            if job.num_failed_copies <= MAX_FAILED_COPIES and self._store.device_lost is None:
                self._store.leave_device(weights)
                weights.device = self._store.take(self._store.device, weights, sizes, job.demand)
                if weights.device is not None:
                    weights.state = WeightState.COPYING
                    self._loader.submit(partial(self._run_copy, job))
                    return
        name = job.sources[-1].name
        self._fail(job, AdapterUnavailableError(f"adapter {name!r} could not be copied to the device: {error}"))

    def _finish_copy(self, job: LoadJob) -> None:
        with self._store.lock:
            weights = job.weights
            assert weights.layout is not None
            assert weights.device is not None
            self._publish(weights, weights.layout, weights.device)
            if job.num_failed_copies or weights.is_restoring:
                weights.is_restoring = False
                tell(self._store.events, EventKind.RECOVERY, weights, "was copied to the device again")
            self._store.counters.num_copies += 1
            self._store.counters.copy_s += self._store.clock() - job.began_s
            self._end(job)

    def _fail(self, job: LoadJob, error: BaseException) -> None:
        if is_out_of_memory(error):
            self._store.alarm(f"the load of adapter {job.sources[-1].name!r} could not allocate memory: {error}")
        with self._store.lock:
            weights = job.weights
            job.error = as_adapter_error(error, job.sources[-1].name)
            if weights.state is WeightState.COPYING:
                self._store.leave_device(weights)
            elif weights.state is WeightState.LOADING:
                self._store.leave_host(weights)
            if job.is_awaited and not isinstance(job.error, AdapterNoRoomError):  # of an add: requests wait for room
                weights.failure = LoadFailure(job.error, self._store.clock())
            weights.is_prefetch_off = True
            self._store.counters.num_load_failures += 1
            tell(
                self._store.events,
                EventKind.LOAD_FAILED,
                weights,
                f"could not be loaded: {job.error}",
                cause=job.demand.cause,
            )
            if weights.layout is None:
                self._forget_sources(job)
            self._end(job)

    def _forget_sources(self, job: LoadJob) -> None:
        """The first load failed: its adapters were never there, but for attached ones. Their `add_adapter` raises; those that came later
        load for themselves.
        """
        for adapter in job.sources:
            if job.weights.adapters.get(adapter.adapter_id) is adapter and not adapter.is_attached:
                adapter.is_removed = True
                del job.weights.adapters[adapter.adapter_id], self._store.adapters[adapter.adapter_id]

    def _end(self, job: LoadJob) -> None:
        weights = job.weights
        weights.job, weights.last_error, job.is_done = None, job.error, True
        if not weights.adapters:
            self._store.drop(weights)
        self._store.lock.notify_all()

    def _raise_failure(self, weights: StoredWeights) -> None:
        failure = weights.failure
        if failure is None:
            return
        if failure.raised_in_pass is None and self._store.clock() - failure.failed_s <= FAILURE_TTL_S:
            failure.raised_in_pass = self._store.room.pass_id
        if failure.raised_in_pass == self._store.room.pass_id:
            raise_again(failure.error)
