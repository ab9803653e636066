"""Loads and copies under way: one for each content, with one outcome for all who wait for it."""

from __future__ import annotations

from loraplex.errors import AdapterNoRoomError, LoraplexError
from loraplex.events import EventKind
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
from loraplex.memory.weights.loading import errors_of, is_out_of_memory, raise_again

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
