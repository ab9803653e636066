"""How weights come nearer: from the source or the disk to the host, from the host to the device.

`advance` makes the one next move towards the device that needs no waiting and says what has to be waited for. A load is begun under
the store's lock and run outside it: files are read and blocks packed with no lock held, and the result is taken over in a short
critical section by the thread that did the work, so nobody's poll is needed. A promote (Promoter) only enqueues its copies.

    first load (add)     in the thread that asked: how large the adapter is shows only when it is open
    first load (attach)  in a loader's thread; when it finds no room, what it learnt of the size is kept, and later loads wait for room
    later loads          in the loader's threads: their room is reserved when they begin, so they never wait

Everything here is called with the lock held, except where it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from loraplex.core import Tier, WaitsFor
from loraplex.errors import (
    AdapterError,
    AdapterNoRoomError,
    AdapterUnavailableError,
    DeviceLostError,
    EngineShutdownError,
    LoraplexError,
)
from loraplex.events import EventKind
from loraplex.memory.care.damage import DamageControl
from loraplex.memory.residency.records import (
    Demand,
    LoadFailure,
    LoadJob,
    StoredAdapter,
    StoredWeights,
    WeightState,
    tell,
)
from loraplex.memory.residency.store import WeightStore
from loraplex.memory.residency.tiers import Place
from loraplex.memory.space.arena import Extent
from loraplex.memory.weights.copies import Arrival, Arriving
from loraplex.memory.weights.loading import (
    LoadedWeights,
    Loader,
    WeightReader,
    as_adapter_error,
    errors_of,
    is_device_lost,
    is_out_of_memory,
    raise_again,
)

REQUESTS_CAUSES = ("request", "prefetch")
"""Loads that a request causes: when it is to run, or when it arrives. (`prediction` comes before the request.)"""


class Transfers:
    """Moves the weights of a store towards the device."""

    def __init__(
        self, store: WeightStore, jobs: LoadJobs, reader: WeightReader, loader: Loader, damage: DamageControl
    ) -> None:
        self._store = store
        self._damage = damage
        self._reader = reader
        self._loader = loader
        self._jobs = jobs
        self._promoter = Promoter(store, jobs, loader, damage, self.let_damaged_go)

    def advance(self, weights: StoredWeights, demand: Demand) -> WaitsFor | None:
        """One move towards the device; None when it is there, or arriving. LOAD: `weights.job` is under way.

        Raises AdapterNoRoomError when no room can come, EngineShutdownError after `close`.
        """
        self._store.check_open()
        if weights.job is None and weights.state is WeightState.SOURCE:
            return self._start_load(weights, demand)
        if weights.job is None and weights.state is WeightState.HOST:
            return self._promote(weights, demand)
        return None if weights.is_on_device else WaitsFor.LOAD

    def ask(self, adapter: StoredAdapter) -> WaitsFor | None:
        """`advance` for a request. Raises the error of a failed load to those who waited for it (`LoadFailure`)."""
        weights = adapter.weights
        if weights.digest in self._store.faults:
            raise_again(self._store.faults[weights.digest])
        self._jobs.raise_failure(adapter)
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
        """`advance` until the weights are on the device, all of them, for a verb that may wait; whether anything had to be done."""
        weights = adapter.weights
        has_changed = not weights.is_on_device
        while self.advance(weights, demand) is not None or weights.job is not None:
            if weights.job is not None:
                self._jobs.join(weights.job, adapter)
            elif self._store.room.is_coming(weights):
                self._store.wait()
            else:
                cache = self._store.host if weights.host is None else self._store.device
                raise self._store.room.no_room(cache, weights, adapter.name, weights.nbytes)
            adapter.check_not_removed()
        self._store.touch(weights)
        return has_changed

    def _promote(self, weights: StoredWeights, demand: Demand) -> WaitsFor | None:
        if not self._store.copies.is_asynchronous:
            damaged = self._damage.find_unless_fresh(weights, Tier.HOST)
            if damaged and weights.num_running == 0:
                self._damage.discard(weights, Tier.HOST, damaged)
                return self._start_load(weights, demand)
        return self._promoter.promote(weights, demand)

    def released(self, weights: StoredWeights) -> None:
        """The last request on it has ended."""
        self._promoter.released(weights)

    def let_damaged_go(self, weights: StoredWeights) -> None:
        """Nobody runs on it: copies whose bytes have changed leave. A pinned adapter is not left outside until somebody asks."""
        self._damage.discard_damaged(weights)
        if weights.num_pinned:
            try:
                self.advance(weights, Demand("restore"))
            except AdapterError as error:
                tell(self._store.events, EventKind.FAULT, weights, f"is pinned and cannot come back: {error}")

    # -------------------------------------------------------------------------------------------------------- loads

    def begin_first_load(self, weights: StoredWeights, demand: Demand) -> LoadJob:
        """The caller runs it with `run_load`, with the lock released."""
        self._store.check_open()
        weights.state = WeightState.LOADING
        job = self._jobs.begin(weights, demand)
        job.may_wait = True
        return job

    def run_load(self, job: LoadJob) -> None:
        """Read, pack, take over. Without the lock, in any thread. Errors go into the job; only what ends the process is raised."""
        try:
            loaded = self._reader.read(job, partial(self._reserve, job))
        except BaseException as error:
            self._jobs.fail(job, error)
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
        job = self._jobs.begin(weights, demand)
        self._loader.submit(partial(self.run_load, job))
        return WaitsFor.LOAD

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
                self._jobs.end(job)
                return
            self._count_load(job, loaded)
            self._jobs.end(job)
            is_for_request = job.demand.is_for_request and not self._store.is_shared
            if (is_for_request or weights.num_pinned) and weights.adapters and not self._store.is_closed:
                with suppress(AdapterError):
                    self.advance(weights, job.demand)
                if weights.job is not None:
                    weights.job.is_awaited |= job.is_awaited

    def _count_load(self, job: LoadJob, loaded: LoadedWeights) -> None:
        store, weights, cause = self._store, job.weights, job.demand.cause
        seconds, nbytes, origin = store.clock() - job.began_s, loaded.layout.nbytes, loaded.origin
        store.counters.loads[cause] += 1
        store.counters.loads_from[origin] += 1
        store.counters.load_s += seconds
        weights.brought_from = origin if cause in REQUESTS_CAUSES else None
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


# ------------------------------------------------------------------------------------------------------------- promote


MAX_FAILED_COPIES = 2
"""Places on the device that are tried after one that could not be written."""


class Promoter:
    """on_damaged: told of weights that are on the device, with no request on them, and whose bytes in some tier have changed."""

    def __init__(
        self,
        store: WeightStore,
        jobs: LoadJobs,
        loader: Loader,
        damage: DamageControl,
        on_damaged: Callable[[StoredWeights], None],
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._loader = loader
        self._damage = damage
        self._on_damaged = on_damaged

    def promote(self, weights: StoredWeights, demand: Demand) -> WaitsFor | None:
        """None: it is on the device, or arriving there. ROOM: it has to wait.

        Raises AdapterNoRoomError when no room can come, AdapterUnavailableError when no place can be written.
        """
        assert weights.layout is not None
        assert weights.host is not None
        weights.device = self._store.take(self._store.device, weights, weights.layout.sizes, demand)
        if weights.device is None:
            return self._store.wait_for_room(self._store.device, weights)
        if self._store.is_shared:
            self._publish(weights, weights.host.extents)
            weights.state = WeightState.DEVICE
            return None
        job = self._jobs.begin(weights, demand)
        job.is_awaited = demand.is_for_request
        try:
            self._send(job)
        except LoraplexError:
            if weights.failure is not None:  # others who ask in this pass get it too, later ones try again
                weights.failure.raised_in_pass = self._store.room.pass_id
            raise
        return None

    def released(self, weights: StoredWeights) -> None:
        """The last request on it has ended: what did not arrive can go."""
        job = weights.job
        if job is not None and job.error is not None:
            job.is_awaited = False  # they have it
            self._jobs.end_failed(job, job.error)

    def _publish(self, weights: StoredWeights, extents: tuple[Extent, ...]) -> None:
        assert weights.layout is not None
        assert weights.lora_slot is not None
        self._store.device.publish(weights.lora_slot, weights.layout, extents)
        self._store.counters.num_promotions += 1

    def _send(self, job: LoadJob) -> None:
        """Begin the copies to `weights.device`, or to another place when that one cannot be written. Raises the job's error if all fail."""
        weights = job.weights
        error: Exception | None = None
        while weights.device is not None:
            weights.state = WeightState.ARRIVING
            try:
                self._set_out(job, self._copy(weights))
            except (RuntimeError, OSError) as failure:
                error = failure
                self._try_elsewhere(job, failure)
            except Exception as failure:
                self._jobs.end_failed(job, as_adapter_error(failure, job.sources[-1].name))
                raise
            else:
                return
        self._jobs.end_failed(job, _not_copied(job, error))
        raise_again(_not_copied(job, error))

    def _copy(self, weights: StoredWeights) -> Arrival:
        assert weights.host is not None
        assert weights.device is not None
        assert self._store.device.pool is not None
        sources = [self._store.host.pool.view(extent) for extent in weights.host.extents]
        targets = [self._store.device.pool.view(extent) for extent in weights.device.extents]
        return self._store.copies.copy(sources, targets)

    def _set_out(self, job: LoadJob, arrival: Arrival) -> None:
        weights = job.weights
        assert weights.layout is not None
        assert weights.device is not None
        assert weights.lora_slot is not None
        self._publish(weights, weights.device.extents)
        job.arriving = Arriving(arrival, self._store.device.piece_of_layer(weights.layout))
        if self._store.copies.is_asynchronous:
            self._store.arriving[weights.lora_slot] = job.arriving
            self._loader.submit(partial(self._land, job))
        else:
            self._landed(job, is_damaged=False)

    def _try_elsewhere(self, job: LoadJob, error: Exception) -> None:
        """The memory that could not be written is fenced. `weights.device` is another place; None: there is none, or the device is lost."""
        weights = job.weights
        assert weights.layout is not None
        assert weights.device is not None
        if is_device_lost(error):
            self._store.device_lost = DeviceLostError(f"the device does not answer any more: {error}")
        self._damage.fence(weights, Tier.DEVICE, weights.device.extents)
        self._store.leave_device(weights)
        job.num_failed_copies += 1
        if job.num_failed_copies <= MAX_FAILED_COPIES and self._store.device_lost is None:
            weights.device = self._store.take(self._store.device, weights, weights.layout.sizes, job.demand)

    # ------------------------------------------------------------------------------------------------------ when it is done

    def _land(self, job: LoadJob) -> None:
        """Wait for the copies and compare what arrived, unless it was just read. Without the lock, in a loader's thread."""
        weights = job.weights
        assert job.arriving is not None
        try:
            job.arriving.arrival.join()
            is_damaged = bool(self._damage.find_unless_fresh(weights, Tier.DEVICE))
        except (RuntimeError, OSError) as error:
            with self._store.lock:
                self._did_not_arrive(job, error)
        else:
            with self._store.lock:
                self._landed(job, is_damaged)

    def _landed(self, job: LoadJob, is_damaged: bool) -> None:
        store, weights = self._store, job.weights
        assert weights.lora_slot is not None
        weights.state = WeightState.DEVICE
        store.arriving.pop(weights.lora_slot, None)
        store.counters.num_copies += 1
        store.counters.copy_s += store.clock() - job.began_s
        if (job.num_failed_copies or weights.is_restoring) and not is_damaged:
            weights.is_restoring = False
            tell(store.events, EventKind.RECOVERY, weights, "was copied to the device again")
        self._jobs.end(job)
        if is_damaged and weights.adapters:
            text = f"{_named(job)} was found damaged when it came to the device and is read again; try again in 1 s"
            self._is_not_to_be_used(job, AdapterUnavailableError(text))
            if not weights.num_running and weights.is_at_rest:
                self._on_damaged(weights)

    def _did_not_arrive(self, job: LoadJob, error: Exception) -> None:
        weights = job.weights
        self._store.suspect.append(weights.digest)
        if weights.num_running:
            if is_device_lost(error):
                self._store.device_lost = DeviceLostError(f"the device does not answer any more: {error}")
            assert weights.device is not None
            self._damage.fence(weights, Tier.DEVICE, weights.device.extents)
            job.error = _not_copied(job, error)
            self._is_not_to_be_used(job, job.error)
            self._store.lock.notify_all()
            return
        self._try_elsewhere(job, error)
        with suppress(LoraplexError):  # who waits for the job gets it
            self._send(job)

    def _is_not_to_be_used(self, job: LoadJob, error: LoraplexError) -> None:
        assert job.arriving is not None
        job.arriving.error = error
        if job.weights.num_running:
            self._store.faults[job.weights.digest] = error


def _not_copied(job: LoadJob, error: Exception | None) -> LoraplexError:
    return AdapterUnavailableError(f"{_named(job)} could not be copied to the device: {error}")


def _named(job: LoadJob) -> str:
    return f"adapter {job.sources[-1].name!r}"


# ---------------------------------------------------------------------------------------------------------------- jobs


FAILURE_TTL_S = 60.0
"""After this long nobody waits any more for the error of a failed load: the requests that did have ended otherwise."""


class LoadJobs:
    """Called with the store's lock held, except where it says otherwise."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    def begin(self, weights: StoredWeights, demand: Demand) -> LoadJob:
        weights.failure = None
        weights.is_prefetch_off = False
        weights.job = LoadJob(weights, demand, tuple(weights.adapters.values()), self._store.clock())
        return weights.job

    def join(self, job: LoadJob, adapter: StoredAdapter) -> None:
        """Wait for a job; raises its error for `adapter` if it failed, also while requests still run on what did not arrive.

        When it failed without having tried the adapter's source, nothing is raised: another job is to be begun.
        """
        while not job.is_done and job.error is None:
            self._store.wait()
        error = job.error_of(adapter)
        if error is not None:
            raise_again(error)

    def end(self, job: LoadJob) -> None:
        weights = job.weights
        weights.job, weights.failed_job, job.is_done = None, job if job.error is not None else None, True
        if not weights.adapters:
            self._store.drop(weights)
        self._store.lock.notify_all()

    def fail(self, job: LoadJob, error: BaseException) -> None:
        """What was under way leaves; those who wait get the error. Takes the lock."""
        if is_out_of_memory(error):
            self._store.alarm(f"the load of adapter {job.sources[-1].name!r} could not allocate memory: {error}")
        with self._store.lock:
            job.errors = errors_of(error, job.sources)
            self.end_failed(job, job.errors[job.sources[-1].adapter_id])

    def end_failed(self, job: LoadJob, error: LoraplexError) -> None:
        """`fail` with the lock held."""
        weights = job.weights
        job.error = error
        if weights.state is WeightState.ARRIVING:
            self._store.leave_device(weights)
        elif weights.state is WeightState.LOADING:
            self._store.leave_host(weights)
        if job.is_awaited and not isinstance(error, AdapterNoRoomError):  # of an add: requests wait for room
            weights.failure = LoadFailure(job, self._store.clock())
        weights.is_prefetch_off = True
        self._store.counters.num_load_failures += 1
        text = f"could not be loaded: {error}"
        tell(self._store.events, EventKind.LOAD_FAILED, weights, text, cause=job.demand.cause)
        if weights.layout is None:
            self._forget_sources(job)
        self.end(job)

    def _forget_sources(self, job: LoadJob) -> None:
        """The first load failed: its adapters were never there, but for attached ones. Their `add_adapter` raises; those that came later
        load for themselves.
        """
        for adapter in job.sources:
            if job.weights.adapters.get(adapter.adapter_id) is adapter and not adapter.is_attached:
                adapter.is_removed = True
                del job.weights.adapters[adapter.adapter_id], self._store.adapters[adapter.adapter_id]

    def raise_failure(self, adapter: StoredAdapter) -> None:
        """The error of a failed load, to those who waited for it; of an arrival that failed, to everybody until it is gone."""
        weights = adapter.weights
        if weights.job is not None and weights.job.error is not None:
            raise_again(weights.job.error)
        failure = weights.failure
        if failure is None:
            return
        if failure.raised_in_pass is None and self._store.clock() - failure.failed_s <= FAILURE_TTL_S:
            failure.raised_in_pass = self._store.room.pass_id
        error = failure.job.error_of(adapter)
        if failure.raised_in_pass == self._store.room.pass_id and error is not None:
            raise_again(error)
