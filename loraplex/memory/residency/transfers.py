"""How weights come nearer: from the source or the disk to the host, from the host to the device.

`advance_locked` makes the one next move towards the device that needs no waiting and says what has to be waited for. A
load is begun with the lock held and run without it: files are read and blocks packed, and the result is taken over in a
short critical section by the thread that did the work, so that no poll is needed.

    first load (add)     in the thread that asked: how large the adapter is shows only when it is open
    first load (attach)  in a loader's thread; without room, the size that it learnt is kept, and a later load waits
    later loads          in the loader's threads: their room is reserved when they begin, so they never wait

    promote, one memory      rows only
    promote, synchronous     copied, rows written, checked on the host: on the device at once
    promote, asynchronous    copied beside the steps: arriving at once (copies.StepGate). Checked on the device when it
                             has arrived, since summing the host's bytes would take longer than the copy

Device memory that could not be written is fenced, and other places are tried; when requests run on what did not arrive,
they end first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from loraplex.core import Tier, WaitsFor
from loraplex.errors import AdapterError, AdapterUnavailableError, EngineShutdownError, LoraplexError
from loraplex.events import EventKind
from loraplex.memory.care.damage import DamageControl
from loraplex.memory.eviction.budget import Budget
from loraplex.memory.residency.records import Demand, LoadJob, Place, StoredAdapter, StoredWeights, WeightState
from loraplex.memory.residency.tiers import Tiers
from loraplex.memory.stats import MemoryLog
from loraplex.memory.weights.loading import (
    JobRun,
    LoadedWeights,
    Loader,
    Reader,
    as_adapter_error,
    errors_of,
    is_out_of_memory,
    raise_again,
)
from loraplex.memory.weights.packing import PackedLayout

REQUESTS_CAUSES = ("request", "prefetch")
"""Loads that a request causes: when it is to run, or when it arrives. (`prediction` comes before the request.)"""

MAX_FAILED_COPIES = 2
"""Places on the device that are tried after one that could not be written."""

FAILURE_TTL_S = 60.0
"""After this long no request waits any more for the error of a failed load: those that did have ended otherwise."""


class Transitions(Protocol):
    """What transfers see of the store (store.WeightStore)."""

    pass_id: int

    def held(self) -> AbstractContextManager[object]: ...
    def check_open_locked(self) -> None: ...
    def wait_locked(self) -> None: ...
    def wait_for_room_locked(
        self, cache: Budget, weights: StoredWeights, demand: Demand, name: str, nbytes: int
    ) -> None: ...
    def begin_load_locked(self, weights: StoredWeights, demand: Demand) -> LoadJob | None: ...
    def reserve(self, job: LoadJob, sizes: tuple[int, ...]) -> Place | None: ...
    def loaded_locked(
        self, job: LoadJob, layout: PackedLayout, checksums: tuple[int, ...], is_placed: bool
    ) -> None: ...
    def publish_shared_locked(self, weights: StoredWeights, demand: Demand) -> bool: ...
    def begin_copy_locked(self, weights: StoredWeights, demand: Demand) -> LoadJob | None: ...
    def landed_locked(self, job: LoadJob) -> None: ...
    def failed_locked(self, job: LoadJob, error: LoraplexError) -> None: ...


@dataclass(eq=False)
class Transfers:
    """Moves weights towards the device."""

    _store: Transitions
    _tiers: Tiers
    _reader: Reader
    _loader: Loader
    _damage: DamageControl
    _log: MemoryLog

    # ---------------------------------------------------------------------------------------------------------- demands

    def advance_locked(self, weights: StoredWeights, demand: Demand) -> WaitsFor | None:
        """One move towards the device; None when it is there, or arriving. LOAD: `weights.job` is under way.

        Raises AdapterNoRoomError when no room can come, EngineShutdownError after `close`.
        """
        self._store.check_open_locked()
        if weights.job is None and weights.state is WeightState.SOURCE:
            return self._load_locked(weights, demand)
        if weights.job is None and weights.state is WeightState.HOST:
            return self._promote_locked(weights, demand)
        return None if weights.is_on_device else WaitsFor.LOAD

    def ask_locked(self, adapter: StoredAdapter) -> WaitsFor | None:
        """`advance_locked` for a request. Raises the error of a failed load that it waited for."""
        weights = adapter.weights
        weights.is_prediction_off = False
        if weights.fault is not None or weights.job is not None or weights.failure is not None:
            self._raise_failure_locked(adapter)
        if weights.is_on_device:
            self._store.check_open_locked()
            waits_for = None
        else:
            waits_for = self.advance_locked(weights, Demand("request", is_for_request=True, adapter=adapter))
            weights.has_missed = True
            weights.is_cold |= waits_for is WaitsFor.LOAD
        weights.waits_for = waits_for
        if waits_for is not None:
            weights.wanted_in_pass = self._store.pass_id
            if weights.job is not None:
                weights.job.is_awaited = True
        self._tiers.touch(weights)
        return waits_for

    def prefetch_locked(self, adapter: StoredAdapter) -> None:
        """`advance_locked` for a request that is not admitted yet. A failed source waits for a request."""
        weights = adapter.weights
        weights.wanted_in_pass = self._store.pass_id
        weights.is_prediction_off = False
        is_near_enough = weights.host is not None and self._tiers.is_shared
        if not weights.is_prefetch_off and not is_near_enough:
            with suppress(AdapterError, EngineShutdownError):
                self.advance_locked(weights, Demand("prefetch", is_for_request=True, adapter=adapter))
        self._tiers.touch(weights)

    def bring_locked(self, adapter: StoredAdapter, demand: Demand) -> bool:
        """`advance_locked` until all is on the device, for a verb that may wait; whether anything had to be done."""
        weights = adapter.weights
        has_changed = not weights.is_on_device
        while self.advance_locked(weights, demand) is not None or weights.job is not None:
            if weights.job is not None:
                self.join_locked(weights.job, adapter)
            else:
                cache = self._tiers.host if weights.host is None else self._tiers.device
                self._store.wait_for_room_locked(cache, weights, demand, adapter.name, weights.nbytes)
            adapter.check_not_removed()
        self._tiers.touch(weights)
        return has_changed

    def join_locked(self, job: LoadJob, adapter: StoredAdapter) -> None:
        """Wait for a job; raises its error for `adapter` if it failed, also while requests run on what did not arrive.

        When it failed without having tried the adapter's source, nothing is raised: another job is to be begun.
        """
        while not job.is_done and job.error is None:
            self._store.wait_locked()
        error = job.error_of(adapter)
        if error is not None:
            raise_again(error)

    def _raise_failure_locked(self, adapter: StoredAdapter) -> None:
        """The error of a failed load, to its requests; of weights not to be used, to all until they are gone."""
        weights = adapter.weights
        if weights.fault is not None:
            raise_again(weights.fault)
        if weights.job is not None and weights.job.error is not None:
            raise_again(weights.job.error)
        failure = weights.failure
        if failure is None:
            return
        if failure.raised_in_pass is None and self._tiers.clock() - failure.failed_s <= FAILURE_TTL_S:
            failure.raised_in_pass = self._store.pass_id
        error = failure.error_of(adapter)
        if failure.raised_in_pass == self._store.pass_id and error is not None:
            raise_again(error)

    def let_damaged_go_locked(self, weights: StoredWeights) -> None:
        """No request runs on it: copies whose bytes have changed leave; a pinned adapter comes back at once."""
        self._damage.discard_damaged_locked(weights)
        if weights.num_pinned:
            try:
                self.advance_locked(weights, Demand("restore"))
            except AdapterError as error:
                self._log.tell(EventKind.FAULT, weights, f"is pinned and cannot come back: {error}")

    # ------------------------------------------------------------------------------------------------------------ loads

    def _load_locked(self, weights: StoredWeights, demand: Demand) -> WaitsFor:
        job = self._store.begin_load_locked(weights, demand)
        if job is None:
            return WaitsFor.ROOM
        self._submit(JobRun(self.run_load, job))
        return WaitsFor.LOAD

    def _submit(self, run: JobRun) -> None:
        self._loader.submit(run, run.job.sources[-1].spec.tenant)

    def run_load(self, job: LoadJob) -> None:
        """Read, pack, take over; in any thread. Errors go into the job; only what ends the process is raised."""
        try:
            loaded = self._reader.read(job, partial(self._store.reserve, job))
        except BaseException as error:
            if is_out_of_memory(error):
                self._log.alarm(f"the load of adapter {job.sources[-1].name!r} could not allocate memory: {error}")
            with self._store.held():
                job.errors = errors_of(error, job.sources)
                self._store.failed_locked(job, job.errors[job.sources[-1].adapter_id])
            if not isinstance(error, Exception):
                raise
        else:
            with self._store.held():
                self._take_over_locked(job, loaded)

    def _take_over_locked(self, job: LoadJob, loaded: LoadedWeights) -> None:
        weights, demand = job.weights, job.demand
        if loaded.is_placed:
            now_s = self._tiers.clock()
            weights.reload_s, nbytes = now_s - job.began_s, loaded.layout.nbytes
            weights.brought_from = loaded.origin if demand.cause in REQUESTS_CAUSES else None
            weights.checked_s = weights.last_used_s = now_s  # what was just loaded is not long idle
            self._tiers.host.policy.enter(weights.digest, nbytes, weights.reload_s)
            self._log.loaded(job, loaded.origin, nbytes, weights.reload_s)
        self._store.loaded_locked(job, loaded.layout, loaded.checksums, loaded.is_placed)
        is_for_request = demand.is_for_request and not self._tiers.is_shared
        if loaded.is_placed and (is_for_request or weights.num_pinned) and weights.adapters:
            with suppress(AdapterError, EngineShutdownError):
                self.advance_locked(weights, demand)
            if weights.job is not None:
                weights.job.is_awaited |= job.is_awaited

    # --------------------------------------------------------------------------------------------------------- promotes

    def _promote_locked(self, weights: StoredWeights, demand: Demand) -> WaitsFor | None:
        """None: it is on the device, or arriving there. Raises AdapterUnavailableError when no place can be written."""
        if not self._place_locked(weights, demand):
            return WaitsFor.ROOM
        if not self._tiers.copies.is_asynchronous:  # not before: what waits for room would be summed every second
            damaged = self._damage.find_unless_fresh(weights, Tier.HOST)
            if damaged and weights.num_running == 0:
                self._damage.discard_locked(weights, Tier.HOST, damaged)
                return self._load_locked(weights, demand)
        return None

    def _place_locked(self, weights: StoredWeights, demand: Demand) -> bool:
        """False: no room yet."""
        if self._tiers.is_shared:
            return self._store.publish_shared_locked(weights, demand)
        try:
            return self._send_locked(weights, demand)
        except LoraplexError:
            if weights.failure is not None:  # others who ask in this pass get it too, later ones try again
                weights.failure.raised_in_pass = self._store.pass_id
            raise

    def _send_locked(self, weights: StoredWeights, demand: Demand, error: Exception | None = None) -> bool:
        """Begin the copies, elsewhere when a place cannot be written. False: no room yet. Raises if all fail.

        error: of copies that were begun before and failed.
        """
        while error is None or self._may_try_elsewhere_locked(weights, error):
            try:
                job = self._store.begin_copy_locked(weights, demand)
            except (RuntimeError, OSError) as failure:
                error = failure
            except Exception as failure:
                if weights.job is not None:
                    self._store.failed_locked(weights.job, as_adapter_error(failure, weights.job.sources[-1].name))
                raise
            else:
                if job is None:
                    break
                if self._tiers.copies.is_asynchronous:
                    self._submit(JobRun(self._land, job))
                else:
                    self._landed_locked(job, is_damaged=False)
                return True
        job = weights.job
        if job is None:
            return False
        self._store.failed_locked(job, _not_copied(job, error))
        raise _not_copied(job, error)

    def _may_try_elsewhere_locked(self, weights: StoredWeights, error: Exception) -> bool:
        """The memory that could not be written is fenced."""
        job = weights.job
        if job is None:
            raise error
        self._damage.fence_locked(weights, error)
        job.num_failed_copies += 1
        return job.num_failed_copies <= MAX_FAILED_COPIES and self._damage.device_lost is None

    def _land(self, job: LoadJob) -> None:
        """Wait for the copies and compare what arrived, unless it was just read. In a loader's thread."""
        weights = job.weights
        assert job.arriving is not None
        try:
            job.arriving.arrival.join()
            is_damaged = bool(self._damage.find_unless_fresh(weights, Tier.DEVICE))
        except (RuntimeError, OSError) as error:
            with self._store.held():
                self._did_not_arrive_locked(job, error)
        else:
            with self._store.held():
                self._landed_locked(job, is_damaged)

    def _landed_locked(self, job: LoadJob, is_damaged: bool) -> None:
        weights, counters = job.weights, self._log.counters
        counters.num_copies += 1
        counters.copy_s += self._tiers.clock() - job.began_s
        if (job.num_failed_copies or weights.is_restoring) and not is_damaged:
            weights.is_restoring = False
            self._log.tell(EventKind.RECOVERY, weights, "was copied to the device again")
        self._store.landed_locked(job)
        if is_damaged and weights.adapters:
            text = f"{_named(job)} was found damaged when it came to the device and is read again; try again in 1 s"
            self._is_not_to_be_used_locked(job, AdapterUnavailableError(text))
            if not weights.num_running and weights.is_at_rest:
                self.let_damaged_go_locked(weights)

    def _did_not_arrive_locked(self, job: LoadJob, error: Exception) -> None:
        weights = job.weights
        self._damage.suspect_locked(weights)
        if weights.num_running:
            self._damage.fence_locked(weights, error)
            job.error = _not_copied(job, error)
            self._is_not_to_be_used_locked(job, job.error)
            return
        with suppress(LoraplexError):  # the threads that wait for the job get it
            self._send_locked(weights, job.demand, error)

    def _is_not_to_be_used_locked(self, job: LoadJob, error: LoraplexError) -> None:
        assert job.arriving is not None
        job.arriving.error = error
        if job.weights.num_running:
            self._damage.spoil_locked(job.weights, error)


def _not_copied(job: LoadJob, error: Exception | None) -> LoraplexError:
    return AdapterUnavailableError(f"{_named(job)} could not be copied to the device: {error}")


def _named(job: LoadJob) -> str:
    return f"adapter {job.sources[-1].name!r}"
