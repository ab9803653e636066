"""Adapters by id over weights by digest: references, pins, and the verbs that the field knows.

The engine's thread calls `try_acquire`, `release`, `prefetch`, `victims_for`, `poll`, `step_launched`, `step_committed`; none
of them waits. Verbs may be called from any thread; `add_adapter`, `promote_adapter`, `activate_adapter`, `pin_adapter`,
`set_active_adapters` and `switch_lora` wait for loads. They need no poll to make progress, so an engine that is idle may call
them from its own thread; while a step is in flight, other threads must (retired room comes back when the step is committed).

A load that fails is not sticky. Verbs that wait for it raise its error. Requests that were told to wait for it get it from `try_acquire`:
every one that asks in the scheduling pass in which the first of them does. After that pass, or when nobody asked for a
minute, the next `try_acquire` reads the source afresh; so does any verb at any time. `prefetch` alone never tries again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from loraplex.adapters.weights import LoRAModel
from loraplex.config import LoRAConfig
from loraplex.core import AcquireResult, AdapterResidency, AdapterSpec, AddOutcome, LoraTarget
from loraplex.events import EventLog
from loraplex.kernels.ops import KernelBackend
from loraplex.memory.care.compaction import CompactionResult, Compactor
from loraplex.memory.care.damage import DamageControl
from loraplex.memory.care.health import AdapterHealth
from loraplex.memory.care.housekeeping import Housekeeping, reclaim_chunks
from loraplex.memory.care.integrity import check_integrity
from loraplex.memory.report import memory_report
from loraplex.memory.residency.records import Demand, LoadJob, StoredAdapter, StoredWeights
from loraplex.memory.residency.store import AdapterRecords, WeightStore
from loraplex.memory.residency.tiers import build_tiers, compressed_copies
from loraplex.memory.residency.transfers import LoadJobs, Transfers
from loraplex.memory.space.arena import Arena
from loraplex.memory.stats import MemoryStats
from loraplex.memory.steps import StepPreparation
from loraplex.memory.weights.copies import CopyEngine
from loraplex.memory.weights.disk_cache import DiskCache
from loraplex.memory.weights.loading import Loader, LoaderThreads, WeightReader
from loraplex.memory.weights.packing import BaseBias, Packer
from loraplex.metrics import MemoryReport


@dataclass(frozen=True, slots=True)
class SwitchOutcome:
    """Result of `switch_lora`. was_active: `old` was on the device. is_draining: `old` leaves when its last request ends.

    load_s: until `new` was in host memory; promote_s: from there to the device; evicted: who made way, `old` included.
    """

    was_active: bool
    is_draining: bool
    load_s: float
    promote_s: float
    evicted: tuple[str, ...]


class LoRAModelManager:
    """The residency of adapters: core.ResidencyView for the scheduler, and core.AdapterStore but for `abort_adapter` (the engine's).

    arena: what kernels read; on a CPU it also holds the host tier. host_arena: host memory of another device's engine (pinned for a
    GPU); then weights are copied to `arena` by `copies`. open_weights: reads the source of a spec, in any thread. base_bias: this
    shard's slice of a module's base bias. on_digest_dropped: called by `poll` when the last adapter of a content is gone. ask_kv: asks
    the KV cache for chunks of `arena` (LoRAMemoryPool).
    """

    def __init__(
        self,
        lora_config: LoRAConfig,
        targets: Sequence[LoraTarget],
        backend: KernelBackend,
        compute_dtype: torch.dtype,
        arena: Arena,
        open_weights: Callable[[AdapterSpec], LoRAModel],
        base_bias: BaseBias,
        clock: Callable[[], float] = time.monotonic,
        *,
        host_arena: Arena | None = None,
        copies: CopyEngine | None = None,
        loader: Loader | None = None,
        on_digest_dropped: Callable[[str], None] | None = None,
        ask_kv: Callable[[int], int] | None = None,
        events: EventLog | None = None,
        disk_tier: Callable[[Packer], DiskCache | None] = lambda packer: None,
    ) -> None:
        self.on_digest_dropped = on_digest_dropped
        self._clock = clock
        packer = Packer(targets, backend, compute_dtype, base_bias)
        disk = disk_tier(packer)
        host, device = build_tiers(lora_config, targets, packer, arena, host_arena, clock)
        (device.pool or host.pool).ask_kv = ask_kv
        self.table = device.table
        self._loader = loader or LoaderThreads(lora_config.num_loader_threads)
        compressed = compressed_copies(lora_config, packer)
        events = events or EventLog()
        self._store = WeightStore(host, device, clock, events, disk, compressed, copies, packer.checksums)
        self._compactor = Compactor(self._store, clock, events)
        reader = WeightReader(packer, host, disk, compressed, lora_config.num_loader_threads)
        damage = DamageControl(self._store)
        self._jobs = LoadJobs(self._store)
        self._transfers = Transfers(self._store, self._jobs, reader, self._loader, damage)
        self.steps = StepPreparation(self._store)
        self.health = AdapterHealth(self._store, self._transfers, damage, self._loader, self._release)
        self.housekeeping = Housekeeping(self._store, self._transfers, self._loader, self._release)
        self._lock = self._store.lock
        self._adapters = self._store.adapters
        self._records = AdapterRecords(self._store, open_weights)
        self._mapping: AdapterMapping | None = None

    # ------------------------------------------------------------------------------------- core.ResidencyView: never waits

    def try_acquire(self, adapter_id: int) -> AcquireResult:
        """A reference for one running request, or what it waits for. Raises AdapterError as core.ResidencyView says."""
        with self._lock:
            adapter = self._records.get(adapter_id)
            waits_for = self._transfers.ask(adapter)
            if waits_for is not None:
                return AcquireResult(None, waits_for)
            self._store.acquire(adapter)
            return AcquireResult(adapter.weights.lora_slot)

    def release(self, adapter_id: int) -> None:
        """Return a reference, once no launched step reads the adapter any more. The last one of a removed adapter frees it."""
        with self._lock:
            self._release(self._records.in_use(adapter_id))

    def prefetch(self, adapter_id: int) -> None:
        """Bring the adapter nearer, if that costs nobody anything who asked before; an unknown one is ignored."""
        with self._lock:
            adapter = self._adapters.get(adapter_id)
            if adapter is not None:
                self._transfers.prefetch(adapter.weights)

    def victims_for(self, adapter_id: int, in_use: Sequence[int]) -> Sequence[int]:
        """As core.ResidencyView says; none for an unknown adapter."""
        with self._lock:
            order = list(dict.fromkeys(self._records.in_use(each).weights for each in in_use))
            wanted = self._adapters.get(adapter_id)
            victims = [] if wanted is None else self._store.room.victims_for(wanted.weights, order)
            return [a.adapter_id for each in victims for a in each.adapters.values() if a.num_running]

    # -------------------------------------------------------------------------------------------- the engine's steps

    def poll(self) -> None:
        """Once a step, before scheduling: a new scheduling pass begins; dropped digests are told to the KV cache."""
        with self._lock:
            if self._store.device_lost is not None:
                raise self._store.device_lost
            self._store.room.pass_id += 1
            dropped = [digest for digest in self._store.dropped if digest not in self._store.weights]
            dropped += self._store.suspect
            self._store.dropped.clear()
            self._store.suspect.clear()
        if self.on_digest_dropped is not None:
            for digest in dropped:
                self.on_digest_dropped(digest)

    def step_launched(self, step_id: int) -> None:
        """Kernels of this step may read what is on the device now, until it is committed. Ids grow."""
        with self._lock:
            self._store.retired.launched(step_id)

    def step_committed(self, step_id: int) -> None:
        """The step's kernels are done, also if it failed."""
        with self._lock:
            if self._store.retired.committed(step_id):
                self._lock.notify_all()

    def wait_for_change(self, timeout_s: float) -> None:
        """Sleep until a load ends or room comes back, for a thread that has nothing else to do."""
        with self._lock:
            self._lock.wait(timeout_s)

    def reclaim_chunks(self, num_chunks: int) -> int:
        """Evict idle adapters nobody waits for, until that many chunks of the arena came free; returns how many did.

        Fewer when the rest is in use, pinned or within the adapters' floor. What a step in flight reads comes back with its commit.
        """
        with self._lock:
            return reclaim_chunks(self._store, self._compactor, num_chunks)

    def compact(self, max_bytes: int, deadline_s: float) -> CompactionResult:
        """Move extents out of sparse chunks, at most `max_bytes` and until the manager's clock says `deadline_s`; from any thread."""
        return self._compactor.run(max_bytes, deadline_s)

    # ---------------------------------------------------------------------------- add and remove (core.AdapterStore)

    def add_adapter(self, adapter: AdapterSpec | LoRAModel) -> AddOutcome:
        """Load into host memory, in this thread; nothing is read when the content is there already or on its way.

        `is_new` is False for a known id with the same content. Raises AdapterConflictError for another content, AdapterTooLargeError,
        AdapterNoRoomError, what `open_weights` raises, and AdapterContentChangedError when that gives another digest; the
        adapter is unknown then. A load that began without this adapter's source and fails is followed by one with it.
        """
        spec, opener = self._records.spec_of(adapter)
        with self._lock:
            known = self._records.known(spec)
            self.health.forgive(spec.adapter_digest)
            stored = known or self._records.attach(spec, opener)
            job, is_mine = self._load_of(stored, is_new=known is None)
        try:
            while job is not None and not self._has_loaded(job, is_mine, stored):
                with self._lock:
                    stored.check_not_removed()
                    job, is_mine = self._load_of(stored, is_new=known is None)
            with self._lock:
                stored.check_not_removed()
        except BaseException:
            with self._lock:
                if known is None and not stored.is_removed:
                    self._records.remove(stored)
            raise
        return AddOutcome(known is None, () if job is None else tuple(job.demand.evicted))

    def attach_adapters(self, specs: Sequence[AdapterSpec]) -> None:
        """Know adapters without reading them: what needs their weights first loads them, and gets the error if that fails.

        Known ids with the same content are passed over. Raises AdapterConflictError for another content.
        """
        with self._lock:
            self._records.attach_unread(specs)

    def _has_loaded(self, job: LoadJob, is_mine: bool, adapter: StoredAdapter) -> bool:
        """Run or await a load; False when it failed without having tried the source of `adapter`. Raises its error otherwise."""
        if is_mine:
            self._transfers.run_load(job)
        with self._lock:
            self._jobs.join(job, adapter)
        return job.error is None

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forget the adapter, pinned or not; False when it is unknown. Running requests finish on it, then its memory is freed."""
        with self._lock:
            adapter = self._adapters.get(adapter_id)
            if adapter is not None:
                self._records.remove(adapter)
            return adapter is not None

    def drop_adapter(self, adapter_id: int) -> None:
        """`remove_adapter`; raises AdapterNotFoundError for an unknown id."""
        with self._lock:
            self._records.remove(self._records.get(adapter_id))

    # ------------------------------------------------------------------------------------------------ nearer and farther

    def promote_adapter(self, adapter_id: int) -> AddOutcome:
        """Bring the adapter to the device; waits for loads. Raises AdapterNoRoomError when all that is there is pinned or in use."""
        with self._lock:
            demand = Demand("promote")
            is_new = self._transfers.bring(self._records.get(adapter_id), demand)
            return AddOutcome(is_new, tuple(demand.evicted))

    def activate_adapter(self, adapter_id: int) -> bool:
        """vLLM's name for `promote_adapter`; whether something changed."""
        return self.promote_adapter(adapter_id).is_new

    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Drop the pin and leave the device, unless requests run on it or another adapter of the same content is pinned."""
        with self._lock:
            adapter = self._records.get(adapter_id)
            was_pinned = adapter.set_pinned(False)
            return self._demote(adapter.weights) or was_pinned

    def evict_adapter(self, adapter_id: int) -> bool:
        """One tier down: device to host, or host to source. False when it is in use, pinned, loading, or in no tier."""
        with self._lock:
            weights = self._records.get(adapter_id).weights
            if self._demote(weights):
                return True
            if weights.host is None or not weights.is_idle:
                return False
            self._store.counters.evictions["verb"] += 1
            self._store.evict_to_source(weights)
            self._lock.notify_all()
            return True

    def pin_adapter(self, adapter_id: int) -> bool:
        """Promote, and keep there. Raises AdapterNoRoomError, with both numbers, when the pinned ones would exceed the device."""
        with self._lock:
            adapter = self._records.get(adapter_id)
            if adapter.is_pinned:
                return False
            self._store.room.check_pinnable(adapter.weights, adapter.name)
            self._transfers.bring(adapter, Demand("pin"))
            self._store.room.check_pinnable(adapter.weights, adapter.name)
            return adapter.set_pinned(True)

    def unpin_adapter(self, adapter_id: int) -> bool:
        with self._lock:
            return self._records.get(adapter_id).set_pinned(False)

    def switch_lora(self, old: int, new: int | AdapterSpec | LoRAModel) -> SwitchOutcome:
        """Load `new` if it is unknown, bring it to the device, and let `old` leave it: now, or when its last request ends.

        An idle `old` makes room first, so it has left (and lost its pin) also when `new` cannot come and this raises. `old` need
        not be active, nor known. Requests are sent to `new` by who knows names (adapters/registry/); until then they queue.
        """
        began_s = self._clock()
        loaded = AddOutcome(False) if isinstance(new, int) else self.add_adapter(new)
        loaded_s = self._clock()
        demand = Demand("promote", evicted=list(loaded.evicted))
        with self._lock:
            coming = self._records.get(new if isinstance(new, int) else new.adapter_id)
            going = self._adapters.get(old)
            was_active = going is not None and going.weights.is_on_device
            is_apart = going is not None and going.weights is not coming.weights
            if going is not None and is_apart:
                going.set_pinned(False)
                self._demote(going.weights, demand)
            self._transfers.bring(coming, demand)
            is_draining = going is not None and is_apart and self._see_off(going, demand)
        return SwitchOutcome(
            was_active, is_draining, loaded_s - began_s, self._clock() - loaded_s, tuple(demand.evicted)
        )

    # ----------------------------------------------------------------------------------------------- vLLM's batch verbs

    def set_active_adapters(self, requests: Iterable[HasAdapterId], mapping: AdapterMapping | None = None) -> None:
        """Bring all adapters that `requests` name to the device, together, then take over the mapping.

        Raises AdapterNoRoomError when they do not fit together; those that came in stay.
        """
        held: list[StoredAdapter] = []
        with self._lock:
            try:
                for adapter_id in dict.fromkeys(request.adapter_id for request in requests):
                    adapter = self._records.get(adapter_id)
                    self._transfers.bring(adapter, Demand("promote"))
                    adapter.count_running(1)  # so that the next one does not push it out
                    held.append(adapter)
            finally:
                for adapter in held:
                    self._release(adapter)
        if mapping is not None:
            self.set_adapter_mapping(mapping)

    def set_adapter_mapping(self, mapping: AdapterMapping) -> bool:
        """Check a batch's mapping against what is on the device; whether it is another one than before. The engine's own
        steps carry their plan as an argument and do not come here.
        """
        num_tokens, num_prompts = len(mapping.index_mapping), len(mapping.prompt_mapping)
        with self._lock:
            mapping.validate(num_tokens, num_prompts, self.table.capacity, lambda slot: not self.table.is_clear(slot))
            has_changed = mapping is not self._mapping
            self._mapping = mapping
            return has_changed

    # ----------------------------------------------------------------------------------------------------------------- views

    @property
    def lora_index_to_id(self) -> list[int | None]:
        """The adapter in each lora_slot (the first one of a shared content), None for a free slot."""
        index_to_id: list[int | None] = [None] * self.table.capacity
        with self._lock:
            for each in self._store.weights.values():
                if each.is_on_device and each.lora_slot is not None:
                    index_to_id[each.lora_slot] = next(iter(each.adapters), None)
        return index_to_id

    def digest_of(self, adapter_id: int) -> str:
        """Of an adapter that resolves, or that somebody still has a reference to."""
        with self._lock:
            return self._records.in_use(adapter_id).weights.digest

    @property
    def is_shared(self) -> bool:
        """Whether host and device are one memory."""
        return self._store.is_shared

    def alarm_with(self, alarm: Callable[[str], None]) -> None:
        """Have `alarm` called, from any thread, when a load cannot allocate memory."""
        self._store.alarm = alarm

    def release_pages(self) -> int:
        """Give the pages of free memory back to the system; returns the bytes."""
        return self._store.host.pool.arena.release_pages()

    def list_adapters(self) -> list[AdapterResidency]:
        """All adapters that resolve, in the order in which they were added."""
        with self._lock:
            return [
                adapter.residency(
                    self._store.resting_tier(adapter.weights), self.health.state_of(adapter.weights.digest)
                )
                for adapter in self._adapters.values()
            ]

    def stats(self) -> MemoryStats:
        with self._lock:
            return self._store.stats(len(self._adapters))

    def report(self) -> MemoryReport:
        """What `GET /v1/memory` shows of the adapters' memory; the engine adds the KV cache's part."""
        return memory_report(self._store, self.stats(), self.health.quarantined())

    def check_integrity(self) -> None:
        """Raises AssertionError unless bytes, extents, references, slots and the slot table agree."""
        with self._lock:
            check_integrity(self._store, self._adapters, self._records.draining)

    def close(self) -> None:
        """Stop the loader's threads. Whoever waits gets EngineShutdownError."""
        self._store.close()
        self._loader.close()

    # -------------------------------------------------------------------------------------------------- under the lock

    def _load_of(self, adapter: StoredAdapter, is_new: bool) -> tuple[LoadJob | None, bool]:
        """The load that `add_adapter` waits for, and whether it has to run it itself."""
        weights = adapter.weights
        is_first = weights.layout is None
        if weights.job is not None and not weights.is_on_device:
            return (weights.job if is_new or is_first else None), False
        if not is_new or weights.host is not None or weights.device is not None:
            return None, False
        return self._transfers.begin_first_load(weights, Demand("add")), True

    def _release(self, adapter: StoredAdapter) -> None:
        self._store.release(adapter)
        if adapter.num_running == 0 and adapter.is_removed:
            self._records.end_draining(adapter)
        elif adapter.num_running == 0 and adapter.is_evicted_when_idle:
            adapter.is_evicted_when_idle = False
            self._demote(adapter.weights)
        if adapter.weights.num_running == 0:
            self._transfers.released(adapter.weights)

    def _see_off(self, adapter: StoredAdapter, demand: Demand) -> bool:
        """Let it leave the device now or, if it is in use, at its last release; whether that is still to come."""
        self._demote(adapter.weights, demand)
        adapter.is_evicted_when_idle = adapter.num_running > 0 and not adapter.is_removed
        return adapter.num_running > 0

    def _demote(self, weights: StoredWeights, demand: Demand | None = None) -> bool:
        """By name, not for room; False when it may not leave the device or is not there."""
        if not (weights.is_on_device and weights.is_idle):
            return False
        if demand is not None:
            demand.evicted += weights.names
        self._store.counters.evictions["verb"] += 1
        self._store.leave_device(weights)
        self._lock.notify_all()
        return True


# ----------------------------------------------------------------------------------------------------------- protocols


class HasAdapterId(Protocol):
    """A LoRARequest, an AdapterSpec, a LoRAModel: anything that names one adapter."""

    @property
    def adapter_id(self) -> int: ...


class AdapterMapping(Protocol):
    """What the manager needs of engine.batch.LoRAMapping: lora_slot per token and per prompt, -1 the base model."""

    @property
    def index_mapping(self) -> Any: ...

    @property
    def prompt_mapping(self) -> Any: ...

    def validate(
        self, num_tokens: int, num_prompts: int, num_slots: int, is_resident: Callable[[int], bool] | None = None
    ) -> None: ...
