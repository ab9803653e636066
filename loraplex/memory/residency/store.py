"""The residency of weights by content digest: the state machine, and the only lock.

    begin_load      SOURCE -> LOADING                    its host room is taken: here, or by `reserve`, its size known
    loaded          LOADING -> HOST or SOURCE            SOURCE: there was no room, so that only the layout was learnt
    publish_shared  HOST -> DEVICE                       one memory (a CPU): rows of the slot table, nothing is copied
    begin_copy      HOST, ARRIVING -> ARRIVING           room taken, copies under way, rows written; again: elsewhere
    landed          ARRIVING -> DEVICE
    leave_device    ARRIVING, DEVICE -> HOST or SOURCE   SOURCE: the host has no copy
    leave_host      LOADING, HOST -> SOURCE              DEVICE stays: the device has a copy of its own

Each is a method, with `_locked` behind its name. They write `StoredWeights.state`, `host`, `device`, `job`, `layout`
and `failure`; no other file does. How weights come nearer is in transfers.py, which of them leave for others in
eviction/room.py. The lock is a condition: it is notified when a load ends and when room comes back. Public methods take
it; `_locked` in a name means that it is held.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from loraplex.adapter_store import MemoryQuota
from loraplex.adapters.weights import LoRAModel
from loraplex.core import AdapterSpec, Tier
from loraplex.errors import AdapterNoRoomError, AdapterNotFoundError, EngineShutdownError, LoraplexError
from loraplex.events import EventKind
from loraplex.memory.care.integrity import check_integrity
from loraplex.memory.eviction.budget import Budget, HostCache
from loraplex.memory.eviction.room import Room
from loraplex.memory.residency.records import Demand, LoadJob, Place, StoredAdapter, StoredWeights, WeightState
from loraplex.memory.residency.tiers import DeviceCache, Tiers
from loraplex.memory.space.arena import Extent
from loraplex.memory.space.pool import RetiredMemory
from loraplex.memory.stats import MemoryLog
from loraplex.memory.weights.copies import Arriving, StepGate
from loraplex.memory.weights.packing import PackedLayout
from loraplex.metrics import MemoryReport


class WeightStore:
    """The records of all weights, under one lock."""

    def __init__(self, tiers: Tiers, log: MemoryLog) -> None:
        self._lock = threading.Condition(threading.Lock())
        self.tiers = tiers
        self.log = log
        self.retired = RetiredMemory(tiers.pool_of(Tier.DEVICE))
        self.adapters: dict[int, StoredAdapter] = {}  # those that resolve
        self.draining: dict[int, StoredAdapter] = {}  # removed ones on which requests still run
        self.weights: dict[str, StoredWeights] = {}
        self.tenants: dict[str, int] = {}  # how many adapters each has
        self.room = Room(tiers, self.retired, self.weights, self.tenants)
        self.arriving: dict[int, Arriving] = {}  # by lora_slot; the step's thread looks without the lock
        self._dropped: list[str] = []  # contents that are gone: the KV cache is to be told
        self._suspect: list[str] = []  # contents that may have computed wrong KV
        self.pass_id = 0  # of the scheduling pass
        self._is_closed = False

    # --------------------------------------------------------------------------------------------------------- the lock

    def held(self) -> AbstractContextManager[object]:
        """The lock, for what takes several steps: with it, methods with `_locked` in their names may be called."""
        return self._lock

    def wait_for_change(self, timeout_s: float) -> None:
        """Sleep until a load ends or room comes back, for a thread that has nothing else to do."""
        with self._lock:
            self._lock.wait(timeout_s)

    def wait_locked(self) -> None:
        """Until something changes. Raises EngineShutdownError after `close`."""
        self._lock.wait()
        self.check_open_locked()

    def check_open_locked(self) -> None:
        if self._is_closed:
            raise EngineShutdownError("the engine has shut down; its adapters are gone")

    def close(self) -> None:
        """Wake up all threads that wait; they get EngineShutdownError."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()

    # ----------------------------------------------------------------------------------------------- the engine's steps

    def begin_pass(self) -> list[str]:
        """A new scheduling pass; the contents that the KV cache is to forget."""
        with self._lock:
            self.pass_id = self.room.pass_id = self.room.pass_id + 1
            forgotten = [digest for digest in self._dropped if digest not in self.weights] + self._suspect
            self._dropped.clear()
            self._suspect.clear()
        return forgotten

    def step_launched(self, step_id: int) -> None:
        """Kernels of this step may read what is on the device now, until it is committed. Ids grow."""
        with self._lock:
            self.retired.launched(step_id)

    def step_committed(self, step_id: int) -> None:
        """The step's kernels are done, also if it failed."""
        with self._lock:
            if self.retired.committed(step_id):
                self._lock.notify_all()

    def prepare(self, lora_slots: Iterable[int]) -> StepGate | None:
        """Make the slot table right on the device; the gate of those that are arriving, None when all are there.

        Called by the thread that launches steps, where it launches them. lora_slots: held by the step's requests.
        """
        slots, table = list(lora_slots), self.tiers.device.table
        if slots and table.has_changes:
            with self._lock:
                table.flush()
        known = self.arriving
        arriving = {slot: each for slot in slots if (each := known.get(slot)) is not None} if known else {}
        return StepGate(arriving) if arriving else None

    # --------------------------------------------------------------------------------------------------- adapters by id

    def adapter_locked(self, adapter_id: int) -> StoredAdapter:
        """One that resolves; raises AdapterNotFoundError."""
        adapter = self.adapters.get(adapter_id)
        if adapter is None:
            raise AdapterNotFoundError(f"adapter id {adapter_id} is unknown; add the adapter first")
        return adapter

    def known_locked(self) -> Mapping[int, StoredAdapter]:
        """Those that resolve, in the order in which they were added."""
        return self.adapters

    def find_in_use_locked(self, adapter_id: int) -> StoredAdapter | None:
        """One that a request runs on, removed or not, or that resolves."""
        return self.draining.get(adapter_id) or self.adapters.get(adapter_id)

    def in_use_locked(self, adapter_id: int) -> StoredAdapter:
        """The same; raises AdapterNotFoundError."""
        return self.find_in_use_locked(adapter_id) or self.adapter_locked(adapter_id)

    def contents_locked(self) -> Mapping[str, StoredWeights]:
        """By digest."""
        return self.weights

    def attach_locked(self, spec: AdapterSpec, open_weights: Callable[[], LoRAModel]) -> StoredAdapter:
        """A new adapter over the weights of its content."""
        weights = self.weights.setdefault(spec.adapter_digest, StoredWeights(spec.adapter_digest))
        adapter = StoredAdapter(spec, open_weights, weights)
        weights.adapters[spec.adapter_id] = self.adapters[spec.adapter_id] = adapter
        self.tenants[spec.tenant] = self.tenants.get(spec.tenant, 0) + 1
        self.room.count(weights)
        return adapter

    def remove_locked(self, adapter: StoredAdapter) -> None:
        """It resolves no more; its weights go now, or with its last request."""
        del self.adapters[adapter.adapter_id]
        adapter.set_pinned(False)
        adapter.is_removed = True
        if adapter.num_running:
            self.draining[adapter.adapter_id] = adapter
        else:
            self._detach_locked(adapter)

    def _detach_locked(self, adapter: StoredAdapter) -> None:
        self._forget_locked(adapter)
        if not adapter.weights.adapters:
            self.drop_locked(adapter.weights)

    def _forget_locked(self, adapter: StoredAdapter) -> None:
        tenant = adapter.spec.tenant
        del adapter.weights.adapters[adapter.adapter_id]
        self.tenants[tenant] -= 1
        if not self.tenants[tenant]:
            del self.tenants[tenant]
        self.room.count(adapter.weights)

    def acquire_locked(self, adapter: StoredAdapter) -> int | None:
        """One more running request; its weights are on the device, in this lora_slot."""
        weights = adapter.weights
        adapter.count_running(1)
        self.tiers.host.policy.use(weights.digest)
        self.tiers.device.policy.use(weights.digest)
        self.log.acquired(weights)
        return weights.lora_slot

    def release_locked(self, adapter: StoredAdapter) -> None:
        """One request less, with all that follows from the last one."""
        weights = adapter.weights
        adapter.count_running(-1)
        self.tiers.touch(weights)
        if adapter.num_running == 0 and adapter.is_removed:
            del self.draining[adapter.adapter_id]
            self._detach_locked(adapter)
        if weights.num_running <= 1:  # 1: a loan that is over (`await_loan_locked`)
            self._lock.notify_all()
        job = weights.job
        if weights.num_running == 0 and job is not None and job.error is not None:  # what did not arrive can go
            job.is_awaited = False  # they have its error
            self.failed_locked(job, job.error)

    # ---------------------------------------------------------------------------------------------- transitions: nearer

    def begin_load_locked(self, weights: StoredWeights, demand: Demand, may_wait: bool = False) -> LoadJob | None:
        """None: it waits for room. Raises AdapterNoRoomError when none can come.

        may_wait: for room that `reserve` takes, in the thread that runs the load.
        """
        assert weights.state is WeightState.SOURCE
        assert weights.job is None
        if weights.layout is not None and not may_wait:
            weights.host = self._take_locked(self.tiers.host, weights, weights.layout.sizes, demand)
            if weights.host is None:
                self.room.check_can_come(self.tiers.host, weights, demand)
                return None
            self.room.count(weights)
        weights.state = WeightState.LOADING
        return self._begin_job_locked(weights, demand, may_wait)

    def reserve(self, job: LoadJob, sizes: tuple[int, ...]) -> Place | None:
        """The host room of a load; a first load takes it here. None for one that has no room and may not wait."""
        weights, name, host = job.weights, job.sources[-1].name, self.tiers.host
        with self._lock:
            if weights.host is None:
                self.room.check_size(weights, job.demand, name, sum(sizes))
            while weights.host is None:
                weights.host = self._take_locked(host, weights, sizes, job.demand)
                if weights.host is None and not job.may_wait:
                    return None
                if weights.host is None:
                    self.wait_for_room_locked(host, weights, job.demand, name, sum(sizes))
            self.room.count(weights)
            assert sum(sizes) == sum(extent.nbytes for extent in weights.host.extents), "equal content, unequal size"
            return weights.host

    def loaded_locked(self, job: LoadJob, layout: PackedLayout, checksums: tuple[int, ...], is_placed: bool) -> None:
        weights = job.weights
        weights.layout, weights.checksums = layout, checksums
        if is_placed and weights.host is not None:
            weights.host = self.tiers.host.share(weights.host, layout)
        weights.state = WeightState.HOST if is_placed else WeightState.SOURCE
        self.room.count(weights)
        self._end_job_locked(job)

    def publish_shared_locked(self, weights: StoredWeights, demand: Demand) -> bool:
        """False: it waits for room. Raises AdapterNoRoomError when none can come."""
        assert weights.state is WeightState.HOST
        assert weights.host is not None
        assert weights.layout is not None
        device = self.tiers.device
        device.join(weights.host.shared)  # before others leave: they may read the same
        place = self._take_locked(device, weights, weights.layout.own_sizes, demand)
        if place is None:
            device.part(weights.host.shared)
            self.room.check_can_come(device, weights, demand)
            return False
        weights.device, weights.state = place, WeightState.DEVICE
        self.room.count(weights)
        self._publish_locked(place, weights.layout, weights.host)
        return True

    def begin_copy_locked(self, weights: StoredWeights, demand: Demand) -> LoadJob | None:
        """None: it waits for room. Raises AdapterNoRoomError when none can come, and what the copy raises when it
        cannot be begun: then the job is `weights.job`, to be begun again, at another place, or `failed`.
        """
        assert weights.host is not None
        assert weights.layout is not None
        if weights.state is WeightState.ARRIVING:
            self.leave_device_locked(weights)
        assert weights.state is WeightState.HOST
        device, job = self.tiers.device, weights.job
        weights.device = self._take_locked(device, weights, weights.layout.sizes, demand)
        if weights.device is None:
            if job is None:
                self.room.check_can_come(device, weights, demand)
            return None
        weights.state = WeightState.ARRIVING
        self.room.count(weights)
        if job is None:
            job = self._begin_job_locked(weights, demand)
            job.is_awaited = demand.is_for_request
        pool = self.tiers.pool_of(Tier.DEVICE)
        sources = [self.tiers.host.pool.view(extent) for extent in weights.host.extents]
        arrival = self.tiers.copies.copy(sources, [pool.view(extent) for extent in weights.device.extents])
        self._publish_locked(weights.device, weights.layout, weights.device)
        job.arriving = Arriving(arrival, device.piece_of_layer(weights.layout))
        if self.tiers.copies.is_asynchronous:
            assert weights.lora_slot is not None
            self.arriving[weights.lora_slot] = job.arriving
        return job

    def landed_locked(self, job: LoadJob) -> None:
        weights = job.weights
        assert weights.lora_slot is not None
        weights.state = WeightState.DEVICE
        self.arriving.pop(weights.lora_slot, None)
        self._end_job_locked(job)

    def _publish_locked(self, place: Place, layout: PackedLayout, memory: Place) -> None:
        assert place.lora_slot is not None
        self.tiers.device.publish(place.lora_slot, layout, memory)
        self.log.counters.num_promotions += 1

    def _begin_job_locked(self, weights: StoredWeights, demand: Demand, may_wait: bool = False) -> LoadJob:
        weights.failure = None
        weights.is_prefetch_off = False
        sources = sorted(weights.adapters.values(), key=lambda each: each is demand.adapter)
        weights.job = LoadJob(weights, demand, tuple(sources), self.tiers.clock(), may_wait=may_wait)
        return weights.job

    def _end_job_locked(self, job: LoadJob) -> None:
        weights = job.weights
        weights.job, weights.failed_job, job.is_done = None, job if job.error is not None else None, True
        if not weights.adapters:
            self.drop_locked(weights)
        self._lock.notify_all()

    def failed_locked(self, job: LoadJob, error: LoraplexError) -> None:
        """What was under way leaves; the threads and requests that wait get the error."""
        weights = job.weights
        job.error = error
        if weights.state is WeightState.ARRIVING:
            self.leave_device_locked(weights)
        elif weights.state is WeightState.LOADING:
            self._leave_host_locked(weights)
        if job.is_awaited and not isinstance(error, AdapterNoRoomError):  # of an add: requests wait for room
            weights.failure, job.failed_s = job, self.tiers.clock()
        weights.is_prefetch_off = True
        self.log.counters.num_load_failures += 1
        text = f"could not be loaded: {error}"
        self.log.tell(EventKind.LOAD_FAILED, weights, text, cause=job.demand.cause)
        if weights.layout is None:
            self._forget_sources_locked(job)
        self._end_job_locked(job)

    def _forget_sources_locked(self, job: LoadJob) -> None:
        """The first load failed: its adapters were never there, but for attached ones. Their `add_adapter` raises;
        those that came later, or have no error of it, load for themselves.
        """
        for adapter in [each for each in job.sources if job.error_of(each) is not None]:
            if job.weights.adapters.get(adapter.adapter_id) is adapter and not adapter.is_attached:
                adapter.is_removed, adapter.load_error = True, job.error_of(adapter)
                del self.adapters[adapter.adapter_id]
                self._forget_locked(adapter)

    # --------------------------------------------------------------------------------------------- transitions: farther

    def leave_device_locked(self, weights: StoredWeights) -> None:
        place, weights.device = weights.device, None
        assert place is not None
        assert place.lora_slot is not None
        device = self.tiers.device
        self.log.tell(EventKind.EVICT, weights, "left the device", tier="device", nbytes=weights.own_nbytes)
        self.arriving.pop(place.lora_slot, None)
        device.free_slot(place.lora_slot)
        device.give(weights.own_nbytes)
        device.part(None if weights.host is None else weights.host.shared)
        device.policy.forget(weights.digest)
        self.retired.retire(place.extents)
        weights.state = WeightState.SOURCE if weights.host is None else WeightState.HOST
        self.room.count(weights)
        self._lock.notify_all()

    def _leave_host_locked(self, weights: StoredWeights) -> None:
        place, weights.host = weights.host, None
        if place is not None:
            host = self.tiers.host
            if weights.layout is not None:
                self.log.tell(EventKind.EVICT, weights, "left host memory", tier="host", nbytes=weights.own_nbytes)
            host.give(sum(extent.nbytes for extent in place.extents))
            leaving = (*place.extents, *host.part(place.shared))
            host.policy.forget(weights.digest)
            self.log.ledger.evicted_unused(weights.digest)
            weights.brought_from = None
            if self.tiers.is_shared:
                self.retired.retire(leaving)
            else:
                host.pool.free_all(leaving)
        if weights.device is None:
            weights.state = WeightState.SOURCE
        self.room.count(weights)
        self._lock.notify_all()

    def leave_locked(self, weights: StoredWeights, tier: Tier) -> None:
        """Out of `tier` and all that is nearer: HOST is out of memory, DISK out of compressed copies and disk too."""
        if weights.device is not None:
            self.leave_device_locked(weights)
        if tier is not Tier.DEVICE:
            self._leave_host_locked(weights)
        if tier is Tier.DISK and self.tiers.compressed is not None:
            self.tiers.compressed.drop(weights.digest)
        if tier is Tier.DISK and self.tiers.disk is not None:
            self.tiers.disk.drop(weights.digest)

    def drop_locked(self, weights: StoredWeights) -> None:
        """No adapter has this content: every tier is freed, the KV cache told. A job or reader does it at its end."""
        if not weights.is_at_rest:
            return
        self.leave_locked(weights, Tier.DISK)
        self.log.tell(EventKind.DROP, weights, "is gone from every tier")
        del self.weights[weights.digest]
        self._dropped.append(weights.digest)
        self.log.counters.num_drops += 1

    def end_reading_locked(self, weights: StoredWeights) -> None:
        """A thread beside the engine's has read its memory (`num_readers`)."""
        weights.num_readers -= 1
        if not weights.adapters:
            self.drop_locked(weights)
        self._lock.notify_all()

    def demote_locked(self, weights: StoredWeights) -> bool:
        """By name, not for room; False when it may not leave the device or is not there, or several tenants have it."""
        if not (weights.is_on_device and weights.is_idle) or len(weights.tenants) > 1:
            return False
        self.log.counters.evictions["verb"] += 1
        self.leave_device_locked(weights)
        return True

    def await_loan_locked(self, weights: StoredWeights) -> None:
        """Until no diagnosis runs on it: a verb of another thread does not take that for a request."""
        while weights.is_lent and weights.num_running == 1:
            self.wait_locked()

    def move_locked(self, weights: StoredWeights, tier: Tier, index: int, target: Extent) -> None:
        """Its extent number `index` lies in `target` from now on, the bytes too; the old place comes free."""
        place, layout, pool = self.tiers.place_of(weights, tier), weights.layout, self.tiers.pool_of(tier)
        assert place is not None
        assert layout is not None
        source = place.extents[index]
        if tier is Tier.DEVICE:
            self.tiers.copies.move(pool.view(source), pool.view(target))
        else:
            pool.view(target).copy_(pool.view(source))
        place = replace(place, extents=(*place.extents[:index], target, *place.extents[index + 1 :]))
        if tier is Tier.DEVICE:
            weights.device = place
        else:
            weights.host = place
        if tier is Tier.HOST and not self.tiers.is_shared:
            pool.free(source)  # no kernel reads it
        else:
            if weights.is_on_device:
                assert weights.lora_slot is not None
                self.tiers.device.publish_extent(weights.lora_slot, layout, index, target)
            self.retired.retire((source,))
        self._lock.notify_all()

    def may_move_locked(self, weights: StoredWeights) -> bool:
        """What is being loaded, copied or checked stays where it is, and what a step in flight may read."""
        is_read = self.retired.is_waiting_for_steps and weights.num_running > 0
        return weights.is_at_rest and weights.layout is not None and not is_read

    # ------------------------------------------------------------------------------------------------------------- room

    def _take_locked(
        self, cache: HostCache | DeviceCache, weights: StoredWeights, sizes: tuple[int, ...], demand: Demand
    ) -> Place | None:
        """A place in `cache`, for which as few others as needed leave; None, and none left, when that is not enough.

        While freed memory is retired, none leaves for lack of pieces: waiting for it may be enough. For a request it is
        then promised, or those who ask later in the pass would take it, and each would evict the other again and again.
        """
        nbytes, room = sum(sizes), self.room
        if demand.is_for_request and room.promised(cache) not in (None, weights):
            return None
        leaving = room.leaving_for(cache, weights, demand, nbytes)
        may_come, place = leaving is not None, None
        while leaving is not None and place is None:
            for victim in leaving:
                self._make_way_locked(victim, cache, demand)
            try:
                place = cache.allocate(sizes)
            except MemoryError as error:  # not for want of room: none leaves for it
                self.log.alarm(f"no memory for an adapter in the {cache.tier.value} tier: {error}")
                break
            is_stuck = place is None and self.retired.nbytes == 0
            others = room.candidates(cache, weights, demand, nbytes) if is_stuck else iter(())
            leaving = list(itertools.islice(others, 1)) or None  # for lack of a piece that is large enough
        if place is not None:
            cache.policy.enter(weights.digest, nbytes, weights.reload_s if cache is self.tiers.host else None)
        elif may_come and demand.is_for_request and self.retired.nbytes and cache.fits(nbytes):
            weights.wanted_in_pass = room.pass_id
            room.promise(cache, weights)
        return place

    def _make_way_locked(self, victim: StoredWeights, cache: Budget, demand: Demand) -> None:
        is_spare_copy = cache is self.tiers.host and victim.is_on_device and not self.tiers.is_shared
        cache.policy.evict(victim.digest)
        if is_spare_copy:
            self._leave_host_locked(victim)
            return
        demand.evicted += [name for name in victim.names if name not in demand.evicted]
        self.log.counters.evictions[f"{cache.tier.value}_room"] += 1
        if cache is self.tiers.device:
            self.leave_device_locked(victim)
        else:
            self.leave_locked(victim, Tier.HOST)

    def check_pinnable_locked(self, adapter: StoredAdapter) -> None:
        """Raises what `Room.check_pinnable` raises."""
        self.room.check_pinnable(adapter.weights, adapter.name)

    def check_pins_locked(self, tenant: str, wanted: StoredWeights | None) -> None:
        """Raises what `Room.check_share_of_pins` raises."""
        self.room.check_share_of_pins(tenant, wanted)

    def wait_for_room_locked(
        self, cache: Budget, weights: StoredWeights, demand: Demand, name: str, nbytes: int
    ) -> None:
        """Until something changes, for a verb; raises AdapterNoRoomError when nothing will."""
        self.room.check_is_coming(cache, weights, demand, name, nbytes)
        self.wait_locked()

    def limit_tenants(self, quotas: Mapping[str, MemoryQuota]) -> None:
        """From now on, instead of all limits before."""
        with self._lock:
            self.room.quotas.set(quotas)
        self.reclaim_beyond_quotas()

    def reclaim_beyond_quotas(self) -> None:
        """What is idle of tenants that have more than their limits leaves."""
        with self._lock:
            for cache in (self.tiers.device, self.tiers.host) if self.room.quotas else ():
                for leaving in self.room.beyond_quotas(cache):
                    for each in leaving:
                        self._make_way_locked(each, cache, Demand("quota"))

    def want_locked(self, weights: StoredWeights) -> None:
        """It is asked for in this scheduling pass; that is no use."""
        weights.wanted_in_pass = self.room.pass_id
        self.tiers.rank_as_touched(weights)

    def idle_locked(self, tier: Tier, num_passes: int) -> list[StoredWeights]:
        """What may leave a tier, first to go first: no request asked for it in the last `num_passes` passes."""
        cache = self.tiers.cache(tier)
        leaving = self.room.candidates(cache, None, Demand("idle"))
        return [each for each in leaving if self.is_unwanted_locked(each, num_passes)]

    def is_unwanted_locked(self, weights: StoredWeights, num_passes: int) -> bool:
        """It is idle, and no request asked for it in the last `num_passes` scheduling passes."""
        return weights.is_idle and weights.wanted_in_pass <= self.room.pass_id - num_passes

    def victims_for(self, adapter_id: int, in_use: Sequence[int]) -> list[int]:
        """As core.ResidencyView says; none for an unknown adapter."""
        with self._lock:
            wanted = self.adapters.get(adapter_id)
            order = list(dict.fromkeys(self.in_use_locked(each).weights for each in in_use))
            victims = [] if wanted is None else self.room.victims_for(wanted, order)
            return [each.adapter_id for each in victims]

    def victims_for_mix(self, adapter_ids: Sequence[int], in_use: Sequence[int]) -> list[int]:
        """As core.ResidencyView says; none for an unknown adapter."""
        with self._lock:
            adapters = [adapter for each in adapter_ids if (adapter := self.adapters.get(each)) is not None]
            mix = [each.weights for each in adapters]
            order = dict.fromkeys(self.in_use_locked(each).weights for each in in_use)
            others = [each for each in order if each not in mix]
            with self.room.together(mix):
                found = (self.room.victims_for(each, others) for each in adapters)
                return [each.adapter_id for each in next(filter(None, found), [])]

    def check_mix_locked(self, adapters: Sequence[StoredAdapter], factors: Sequence[float]) -> None:
        """Raises AdapterMixError, AdapterTooLargeError for adapters that cannot run together."""
        self.room.check_mix(adapters, factors)

    def together_locked(self, adapters: Sequence[StoredAdapter]) -> AbstractContextManager[None]:
        """Within the block none of them leaves for another one."""
        return self.room.together([adapter.weights for adapter in adapters])

    # ------------------------------------------------------------------------------------------------------------ views

    def suspect_locked(self, weights: StoredWeights) -> None:
        """What was computed with it may be wrong: the KV cache forgets it."""
        self._suspect.append(weights.digest)
        self._lock.notify_all()

    def resting_tier_locked(self, weights: StoredWeights) -> Tier:
        """What has a content that no kernel could read: the host (compressed), the disk, or its source."""
        compressed, disk = self.tiers.compressed, self.tiers.disk
        if compressed is not None and compressed.get(weights.digest) is not None:
            return Tier.HOST
        return Tier.DISK if disk is not None and disk.lists(weights.digest) else Tier.SOURCE

    def report(self) -> MemoryReport:
        with self._lock:
            contents = list(self.weights.values())
            return self.log.report(self.tiers, self.room, self.retired.nbytes, contents, len(self.adapters))

    def check_integrity(self) -> None:
        """Raises AssertionError unless bytes, extents, references, slots and the slot table agree."""
        with self._lock:
            adapters = [*self.adapters.values(), *self.draining.values()]
            check_integrity(self.tiers, self.retired, self.weights, adapters, self.arriving)
            assert self.tenants == Counter(adapter.spec.tenant for adapter in adapters)
            self.room.uses[Tier.HOST].check_integrity((each, each.host) for each in self.weights.values())
            self.room.uses[Tier.DEVICE].check_integrity((each, each.device) for each in self.weights.values())
