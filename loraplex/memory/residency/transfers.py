"""How weights come nearer: from the source or the disk to the host, from the host to the device.

`advance` makes the one next move towards the device that needs no waiting and says what has to be waited for. A load is begun under
the store's lock and run outside it: files are read and blocks packed with no lock held, and the result is taken over in a short
critical section by the thread that did the work, so nobody's poll is needed. A promote (promote.py) only enqueues its copies.

    first load (add)     in the thread that asked: how large the adapter is shows only when it is open
    first load (attach)  in a loader's thread; when it finds no room, what it learnt of the size is kept, and later loads wait for room
    later loads          in the loader's threads: their room is reserved when they begin, so they never wait

Everything here is called with the lock held, except where it says otherwise.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from loraplex.core import Tier, WaitsFor
from loraplex.errors import AdapterError, EngineShutdownError
from loraplex.events import EventKind
from loraplex.memory.care.damage import DamageControl
from loraplex.memory.residency.jobs import LoadJobs
from loraplex.memory.residency.promote import Promoter
from loraplex.memory.residency.records import Demand, LoadJob, StoredAdapter, StoredWeights, WeightState, tell
from loraplex.memory.residency.store import WeightStore
from loraplex.memory.residency.tiers import Place
from loraplex.memory.weights.loading import Loader, raise_again
from loraplex.memory.weights.weight_reader import LoadedWeights, WeightReader

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
