"""From the host to the device: copies enqueued, rows written, and what follows when the copies are done or fail.

    one memory       rows only
    synchronous      checked on the host, copied, rows written; on the device when `promote` returns
    asynchronous     copied beside the steps: on the device, and arriving, when `promote` returns (arrivals.py). Checked on the device
                     when it has arrived, since summing the host's bytes would take longer than the copy

Memory that could not be written is fenced, and other places are tried; when requests run on what did not arrive, they end first.
Everything here is called with the store's lock held, except where it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from loraplex.core import Tier, WaitsFor
from loraplex.errors import AdapterUnavailableError, DeviceLostError, LoraplexError
from loraplex.events import EventKind
from loraplex.memory.care.damage import DamageControl
from loraplex.memory.residency.arrivals import Arriving
from loraplex.memory.residency.jobs import LoadJobs
from loraplex.memory.residency.records import Demand, LoadJob, StoredWeights, WeightState, tell
from loraplex.memory.residency.store import WeightStore
from loraplex.memory.space.arena import Extent
from loraplex.memory.weights.copies import Arrival
from loraplex.memory.weights.loading import Loader, as_adapter_error, is_device_lost, raise_again

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
