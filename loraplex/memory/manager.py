"""Adapters by id over weights by digest: references, pins, and the verbs that the field knows.

The engine's thread calls `try_acquire`, `release`, `prefetch`, `victims_for`, `poll`, `step_launched`,
`step_committed`; none of them waits. Verbs may be called from any thread; `add_adapter`, `promote_adapter`,
`activate_adapter` and `pin_adapter` wait for loads. They need no poll to make progress, so an engine that is idle may
call them from its own thread; while a step is in flight, other threads must (retired room comes back when the step is
committed).

A load that fails is not sticky. Verbs that wait for it raise its error. Requests that were told to wait for it get it
from `try_acquire`: every one that asks in the scheduling pass in which the first of them does. After that pass, or when
no request asked for a minute, the next `try_acquire` reads the source afresh; so does any verb at any time. `prefetch`
alone never tries again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from loraplex.adapter_store import AdapterContent, AddOutcome, MemoryQuota
from loraplex.adapters.weights import LoRAModel
from loraplex.config import LoRAConfig
from loraplex.core import AcquireResult, AdapterResidency, AdapterSpec, LoraTarget, MixPart, Tier, WaitsFor
from loraplex.errors import AdapterConflictError, AdapterLoadError, AdapterNotFoundError, ConfigError
from loraplex.events import Detail, EventKind, EventLog
from loraplex.kernels.ops import KernelBackend
from loraplex.kernels.plan import SlotTable
from loraplex.memory.care.compaction import Compactor
from loraplex.memory.care.damage import DamageControl
from loraplex.memory.care.health import AdapterHealth, Recovery
from loraplex.memory.care.housekeeping import Housekeeping
from loraplex.memory.eviction.budget import Budget, HostCache, most_bytes
from loraplex.memory.eviction.custom import MakePolicy, policy_maker
from loraplex.memory.eviction.policies import EvictionPolicy
from loraplex.memory.residency.records import Demand, LoadJob, StoredAdapter, StoredWeights
from loraplex.memory.residency.slot_changes import SlotChanges
from loraplex.memory.residency.store import WeightStore
from loraplex.memory.residency.tiers import DeviceCache, Tiers
from loraplex.memory.residency.transfers import Transfers
from loraplex.memory.space.arena import Arena
from loraplex.memory.space.pool import LoRAMemoryPool
from loraplex.memory.stats import MemoryLog, chunk_runs, residency_of, resting_tiers
from loraplex.memory.weights.compression import HOST_SHARE, CompressedCopies, get_compression
from loraplex.memory.weights.copies import CopyEngine, SynchronousCopies
from loraplex.memory.weights.disk_cache import DiskCache
from loraplex.memory.weights.loading import Loader, Reader, WeightReader, read_weights
from loraplex.memory.weights.packing import BaseWeights, Packer
from loraplex.memory.weights.rank_packing import RankPacker
from loraplex.memory.weights.vocabulary import Ends
from loraplex.metrics import MemoryReport
from loraplex.processes.loader_threads import LoaderThreads

logger = logging.getLogger(__name__)

MIN_SLOTS = 64
MAX_SLOTS = 4096


def _no_files(path: str, adapter_name: str, tenant: str, roots: tuple[str, ...]) -> AdapterContent:
    raise AdapterLoadError(f"adapter {adapter_name!r}: this engine reads no files")


class LoRAModelManager:
    """The residency of adapters: core.ResidencyView for the scheduler, core.AdapterStore but for `abort_adapter`.

    arena: what kernels read; on a CPU it also holds the host tier. host_arena: host memory of another device's engine
    (pinned for a GPU); then weights are copied to `arena` by `copies`. open_weights: reads the source of a spec, in any
    thread. base: the model's own weights. on_digest_dropped: called by `poll` when the last adapter of a content is
    gone. ask_kv: asks the KV cache for chunks of `arena` (LoRAMemoryPool). make_policy: of the
    tiers' eviction, if not the one that the config names. other_ranks: their targets, by rank from 1 on; they are told
    `slot_changes`. make_reader: of what brings weights to the host. open_adapter: the verb of core.AdapterStore.
    """

    def __init__(
        self,
        lora_config: LoRAConfig,
        targets: Sequence[LoraTarget],
        backend: KernelBackend,
        compute_dtype: torch.dtype,
        arena: Arena,
        open_weights: Callable[[AdapterSpec], LoRAModel],
        base: BaseWeights,
        clock: Callable[[], float] = time.monotonic,
        *,
        host_arena: Arena | None = None,
        copies: CopyEngine | None = None,
        loader: Loader | None = None,
        on_digest_dropped: Callable[[str], None] | None = None,
        ask_kv: Callable[[int], int] | None = None,
        events: EventLog | None = None,
        disk_tier: Callable[[Packer], DiskCache | None] = lambda packer: None,
        make_policy: MakePolicy | None = None,
        other_ranks: Sequence[Sequence[LoraTarget]] = (),
        make_reader: Callable[[Packer, Tiers, int, Callable[[], bool]], Reader] = WeightReader,
        open_adapter: Callable[[str, str, str, tuple[str, ...]], AdapterContent] = _no_files,
    ) -> None:
        self.on_digest_dropped, self._clock = on_digest_dropped, clock
        self._open_weights, self.open_adapter = open_weights, open_adapter
        packer = Packer(targets, backend, compute_dtype, base, is_one_memory=host_arena is None)
        changes = None
        if other_ranks:
            packer, changes = RankPacker(targets, backend, compute_dtype, base, other_ranks), SlotChanges()
        self._ends = Ends.of(targets)
        new_policy = partial(make_policy or policy_maker(lora_config.eviction_policy), clock)
        self._tiers = tiers = build_tiers(
            lora_config, targets, packer, arena, host_arena, copies or SynchronousCopies(), new_policy, clock, changes
        )
        tiers.disk = disk_tier(packer)
        tiers.pool_of(Tier.DEVICE).ask_kv = ask_kv
        self.table, self.slot_changes = tiers.device.table, changes  # where kernels find adapters
        self.is_shared = tiers.is_shared
        self._loader = loader = loader or LoaderThreads(lora_config.num_loader_threads)
        self._log = log = MemoryLog(events or EventLog())
        self._residency = residency = WeightStore(tiers, log)
        self._damage = damage = DamageControl(residency, tiers, log)
        reader = make_reader(packer, tiers, lora_config.num_loader_threads, lambda: len(residency.tenants) > 1)
        # what a part does whole is that part's own
        self.prepare_step = residency.prepare
        self.victims_for, self.victims_for_mix = residency.victims_for, residency.victims_for_mix
        self.step_launched, self.step_committed = residency.step_launched, residency.step_committed
        self.wait_for_change, self.check_integrity = residency.wait_for_change, residency.check_integrity
        self._transfers = transfers = Transfers(residency, tiers, reader, loader, damage, log)
        self.compact = Compactor(residency, tiers, log.events).run
        self._recovery = recovery = Recovery(clock)
        self.health = AdapterHealth(residency, tiers, damage, loader, log, recovery, transfers.let_damaged_go_locked)
        self.housekeeping = Housekeeping(residency, tiers, loader, log, transfers.advance_locked)
        self.reclaim_chunks = self.housekeeping.reclaim_chunks
        self.release_pages = tiers.host.pool.arena.release_pages

    # ---------------------------------------------------------------------------------- core.ResidencyView: never waits

    def try_acquire(self, adapter_id: int) -> AcquireResult:
        """A reference for one running request, or what it waits for. Raises AdapterError as core.ResidencyView says."""
        residency = self._residency
        with residency.held():
            adapter = residency.adapter_locked(adapter_id)
            waits_for = self._transfers.ask_locked(adapter)
            if waits_for is not None:
                return AcquireResult(None, waits_for)
            lora_slot = residency.acquire_locked(adapter)
            return AcquireResult(lora_slot, vocab_size=self._vocab_size_of(adapter))

    def _vocab_size_of(self, adapter: StoredAdapter) -> int | None:
        layout = adapter.weights.layout
        return None if layout is None or self._ends is None else layout.vocab_size or self._ends.vocab_size

    def tenant_of(self, adapter_id: int) -> str:
        """Of an unknown adapter: empty."""
        with self._residency.held():
            adapter = self._residency.known_locked().get(adapter_id)
            return "" if adapter is None else adapter.spec.tenant

    def vocab_size(self, adapter_id: int) -> int | None:
        """Where the adapter's vocabulary ends; None before its first load, and for an unknown one."""
        with self._residency.held():
            adapter = self._residency.known_locked().get(adapter_id)
            return None if adapter is None else self._vocab_size_of(adapter)

    def try_acquire_mix(self, mix: Sequence[MixPart]) -> AcquireResult:
        """A reference to each, or to none. What is there waits for the others: no later request of this pass evicts
        it, so that mixes that want more than fits are served in turn."""
        residency = self._residency
        with residency.held():
            adapters = [residency.adapter_locked(part.adapter_id) for part in mix]
            residency.check_mix_locked(adapters, [part.weight for part in mix])
            with residency.together_locked(adapters):
                causes = {self._transfers.ask_locked(adapter) for adapter in adapters} - {None}
            if causes:
                for adapter in adapters:
                    residency.want_locked(adapter.weights)
                return AcquireResult(None, WaitsFor.LOAD if WaitsFor.LOAD in causes else WaitsFor.ROOM)
            slots = [slot for each in adapters if (slot := residency.acquire_locked(each)) is not None]
        assert len(slots) == len(mix), "an adapter that waits for nothing is on the device"
        return AcquireResult(slots[0], mix_slots=tuple(slots))

    def release(self, adapter_id: int) -> None:
        """Return a reference, once no launched step reads the adapter. The last one of a removed adapter frees it."""
        with self._residency.held():
            self._residency.release_locked(self._residency.in_use_locked(adapter_id))

    def prefetch(self, adapter_id: int) -> None:
        """Bring the adapter nearer, if that costs no request that asked before; an unknown one is ignored."""
        with self._residency.held():
            adapter = self._residency.known_locked().get(adapter_id)
            if adapter is not None:
                self._transfers.prefetch_locked(adapter)

    # -------------------------------------------------------------------------------------------- the engine's steps

    def poll(self) -> None:
        """Once a step, before scheduling: a new scheduling pass begins; dropped digests are told to the KV cache."""
        if self._damage.device_lost is not None:
            raise self._damage.device_lost
        forgotten = self._residency.begin_pass()
        if self.on_digest_dropped is not None:
            for digest in forgotten:
                self.on_digest_dropped(digest)

    # ---------------------------------------------------------------------------- add and remove (core.AdapterStore)

    def add_adapter(self, adapter: AdapterSpec | LoRAModel) -> AddOutcome:
        """Load into host memory, in this thread; nothing is read when the content is there already or on its way.

        `is_new` is False for a known id with the same content. Raises AdapterConflictError for another content,
        AdapterTooLargeError, AdapterNoRoomError, what `open_weights` raises, and AdapterContentChangedError when that
        gives another digest; the adapter is unknown then. A load that began without this adapter's source and fails is
        followed by one with it.
        """
        spec, opener = self._spec_of(adapter)
        with self._residency.held():
            known = self._known_locked(spec)
            self._recovery.forgive(spec.adapter_digest)
            stored = known or self._residency.attach_locked(spec, opener)
            job, is_mine = self._load_of_locked(stored, is_new=known is None)
        try:
            while job is not None and not self._has_loaded(job, is_mine, stored):
                with self._residency.held():
                    stored.check_not_removed()
                    job, is_mine = self._load_of_locked(stored, is_new=known is None)
            with self._residency.held():
                stored.check_not_removed()
        except BaseException:
            with self._residency.held():
                if known is None and not stored.is_removed:
                    self._residency.remove_locked(stored)
            raise
        return AddOutcome(known is None, () if job is None else tuple(job.demand.evicted))

    def attach_adapters(self, specs: Sequence[AdapterSpec]) -> None:
        """Know adapters without reading them: what needs their weights first loads them, and gets its error.

        Known ids with the same content are passed over. Raises AdapterConflictError for another content.
        """
        with self._residency.held():
            for spec in specs:
                if self._known_locked(spec) is None:
                    self._residency.attach_locked(*self._spec_of(spec)).is_attached = True

    def _spec_of(self, adapter: AdapterSpec | LoRAModel) -> tuple[AdapterSpec, Callable[[], LoRAModel]]:
        """The spec, and what reads its weights."""
        if isinstance(adapter, AdapterSpec):
            return adapter, partial(self._open_weights, adapter)
        digest, name = adapter.adapter_digest, str(adapter.adapter_id)
        spec = AdapterSpec(adapter.adapter_id, name, 1, digest, "", adapter.nbytes, adapter.rank)
        return spec, lambda: adapter  # the caller's object is its source

    def _known_locked(self, spec: AdapterSpec) -> StoredAdapter | None:
        """The adapter of that id, if it is there with the same content; raises AdapterConflictError for another one."""
        known = self._residency.find_in_use_locked(spec.adapter_id)
        if known is not None and known.is_removed:
            raise AdapterConflictError(
                f"adapter {spec.adapter_name!r}: requests still run on the removed adapter {known.name!r} of the same "
                f"id {spec.adapter_id}; take another id or wait for them"
            )
        if known is not None and known.weights.digest != spec.adapter_digest:
            raise AdapterConflictError(
                f"adapter {spec.adapter_name!r}: id {spec.adapter_id} belongs to adapter {known.name!r} with another "
                "content; take another id or remove that one first"
            )
        return known

    def _load_of_locked(self, adapter: StoredAdapter, is_new: bool) -> tuple[LoadJob | None, bool]:
        """The load that `add_adapter` waits for, and whether it has to run it itself."""
        weights = adapter.weights
        is_first = weights.layout is None
        if weights.job is not None and not weights.is_on_device:
            return (weights.job if is_new or is_first else None), False
        if not is_new or weights.host is not None or weights.device is not None:
            return None, False
        self._residency.check_open_locked()
        return self._residency.begin_load_locked(weights, Demand("add", adapter=adapter), may_wait=True), True

    def _has_loaded(self, job: LoadJob, is_mine: bool, adapter: StoredAdapter) -> bool:
        """Run or await a load; False when it failed without the source of `adapter`. Raises its error otherwise."""
        if is_mine:
            self._transfers.run_load(job)
        with self._residency.held():
            self._transfers.join_locked(job, adapter)
        return job.error is None

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forget the adapter, pinned or not; False: it is unknown. Its memory is freed after its running requests."""
        with self._residency.held():
            adapter = self._residency.known_locked().get(adapter_id)
            if adapter is not None:
                self._residency.remove_locked(adapter)
            return adapter is not None

    def drop_adapter(self, adapter_id: int) -> None:
        """`remove_adapter`; raises AdapterNotFoundError for an unknown id."""
        with self._residency.held():
            self._residency.remove_locked(self._residency.adapter_locked(adapter_id))

    # ----------------------------------------------------------------------------------------------- nearer and farther

    def promote_adapter(self, adapter_id: int) -> AddOutcome:
        """Bring it to the device; waits for loads. AdapterNoRoomError when all there is pinned or in use."""
        with self._residency.held():
            adapter = self._residency.adapter_locked(adapter_id)
            demand = Demand("promote", adapter=adapter)
            is_new = self._transfers.bring_locked(adapter, demand)
            return AddOutcome(is_new, tuple(demand.evicted))

    def activate_adapter(self, adapter_id: int) -> bool:
        """vLLM's name for `promote_adapter`; whether something changed."""
        return self.promote_adapter(adapter_id).is_new

    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Drop the pin and leave the device, unless requests run on it or another of its content is pinned."""
        with self._residency.held():
            adapter = self._residency.adapter_locked(adapter_id)
            was_pinned = adapter.set_pinned(False)
            self._residency.await_loan_locked(adapter.weights)
            return self._residency.demote_locked(adapter.weights) or was_pinned

    def evict_adapter(self, adapter_id: int) -> bool:
        """One tier down: device to host, or host to source. False when it is in use, pinned, loading, in no tier, or of
        another tenant as well.

        Out of memory it stays until it is asked for: no prediction brings it back.
        """
        with self._residency.held():
            weights = self._residency.adapter_locked(adapter_id).weights
            self._residency.await_loan_locked(weights)
            if self._residency.demote_locked(weights):
                return True
            if len(weights.tenants) > 1:
                return False
            weights.is_prediction_off = weights.num_running == 0
            if weights.host is None or not weights.is_idle:
                return False
            self._log.counters.evictions["verb"] += 1
            self._residency.leave_locked(weights, Tier.HOST)
            return True

    def set_quotas(self, quotas: Mapping[str, MemoryQuota]) -> None:
        """As core.AdapterStore says. What is idle beyond them leaves now."""
        self._residency.limit_tenants(quotas)

    def reclaim_beyond_quotas(self) -> None:
        """What has become idle of tenants that are beyond their limits leaves."""
        self._residency.reclaim_beyond_quotas()

    def check_pins(self, tenant: str, adapter_id: int | None) -> None:
        """As core.AdapterStore says; of an adapter that is unknown, as without one. It is the tenant's own verbs that
        are bound: what is pinned stays pinned when there are more tenants, and when its content changes."""
        with self._residency.held():
            adapter = None if adapter_id is None else self._residency.known_locked().get(adapter_id)
            self._residency.check_pins_locked(tenant, None if adapter is None else adapter.weights)

    def pin_adapter(self, adapter_id: int) -> bool:
        """Promote, and keep there. AdapterNoRoomError, with both numbers: the pinned ones would exceed the device."""
        with self._residency.held():
            adapter = self._residency.adapter_locked(adapter_id)
            if adapter.is_pinned:
                return False
            self._residency.check_pinnable_locked(adapter)
            self._transfers.bring_locked(adapter, Demand("pin", adapter=adapter))
            self._residency.check_pinnable_locked(adapter)
            return adapter.set_pinned(True)

    def unpin_adapter(self, adapter_id: int) -> bool:
        with self._residency.held():
            return self._residency.adapter_locked(adapter_id).set_pinned(False)

    # ------------------------------------------------------------------------------------------------------------ views

    def digest_of(self, adapter_id: int) -> str:
        """Of an adapter that resolves, or that still has a reference."""
        with self._residency.held():
            return self._residency.in_use_locked(adapter_id).weights.digest

    def ids_of(self, digest: str) -> tuple[int, ...]:
        """The adapters with this content, those that resolve."""
        with self._residency.held():
            weights = self._residency.contents_locked().get(digest)
            return (
                () if weights is None else tuple(key for key, each in weights.adapters.items() if not each.is_removed)
            )

    def read_content(self, digest: str) -> LoRAModel:
        """The weights of a content once more, from the first source that still has it; in any thread.

        Raises AdapterNotFoundError for an unknown one, SourcesFailedError.
        """
        with self._residency.held():
            weights = self._residency.contents_locked().get(digest)
            adapters = () if weights is None else tuple(weights.adapters.values())
        if weights is None or not adapters:
            raise AdapterNotFoundError(f"no adapter has the content {digest}")
        return read_weights(weights, adapters)

    def tell(self, kind: EventKind, digest: str, text: str, **details: Detail) -> None:
        """An event of a content."""
        with self._residency.held():
            weights = self._residency.contents_locked().get(digest)
            self._log.tell(kind, weights or StoredWeights(digest), text, **details)

    def alarm_with(self, alarm: Callable[[str], None]) -> None:
        """Have `alarm` called, from any thread, when a load cannot allocate memory."""
        self._log.alarm = alarm

    def list_adapters(self, adapter_ids: Sequence[int] | None = None) -> list[AdapterResidency]:
        """Of these adapters those that resolve; by default all, in the order in which they were added."""
        with self._residency.held():
            known = self._residency.known_locked()
            asked = known if adapter_ids is None else adapter_ids

            def resting_tier_locked(weights: StoredWeights) -> Tier:
                return self._residency.resting_tier_locked(weights)

            return [
                residency_of(each, resting_tier_locked, self._recovery.state_of(each.weights.digest))
                for each in filter(None, map(known.get, asked))
            ]

    def report(self) -> MemoryReport:
        """What `GET /v1/memory` shows of the adapters' memory; the engine adds the KV cache's part."""
        report, compressed = self._residency.report(), self._tiers.compressed
        return replace(
            report,
            tiers=(*report.tiers, *resting_tiers(compressed, self._tiers.disk)),
            chunks=chunk_runs(self._tiers.pool_of(Tier.DEVICE).arena),
            quarantined=self.health.quarantined(),
            counters={**report.counters, "compression_max_error": 0.0 if compressed is None else compressed.max_error},
        )

    def close(self) -> None:
        """Stop the loader's threads. Threads that wait get EngineShutdownError."""
        self._residency.close()
        self._loader.close()


def build_tiers(
    lora_config: LoRAConfig,
    targets: Sequence[LoraTarget],
    packer: Packer,
    arena: Arena,
    host_arena: Arena | None,
    copies: CopyEngine,
    new_policy: Callable[[], EvictionPolicy],
    clock: Callable[[], float],
    changes: SlotChanges | None = None,
) -> Tiers:
    """The two tiers over one memory (no `host_arena`: a CPU), or over two. The slot table's capacity is fixed here."""
    pool = LoRAMemoryPool(arena)
    host_pool = pool if host_arena is None else LoRAMemoryPool(host_arena)
    compressed = compressed_copies(lora_config, packer)
    host_bytes = lora_config.host_memory_bytes - (0 if compressed is None else compressed.max_bytes)
    host = HostCache(host_pool, host_bytes, lora_config.max_cpu_loras, new_policy())
    most = host.max_bytes if host_arena is None else most_bytes(arena)
    table = SlotTable(targets, lora_config.max_loras or num_slots(lora_config, packer), arena.memory)
    device_pool = None if host_arena is None else pool
    max_bytes = min(lora_config.adapter_memory_bytes, most)
    device = DeviceCache(table, device_pool, max_bytes, new_policy(), changes)
    is_device_tighter = lora_config.adapter_memory_bytes <= lora_config.host_memory_bytes  # the host's may follow it
    _check_budgets((device, host) if is_device_tighter else (host, device), lora_config, packer)
    return Tiers(host, device, copies, packer.checksums, clock, compressed)


def _check_budgets(caches: Sequence[Budget], lora_config: LoRAConfig, packer: Packer) -> None:
    """Raises ConfigError for a budget that refuses every adapter; one that refuses all but tiny ones is logged."""
    least, usual = packer.least_nbytes(lora_config.lora_dtype), packer.smallest_nbytes()
    for cache in caches:
        size = f"{cache.setting} leaves {cache.max_bytes} bytes of {cache.tier.value} memory for adapters"
        if cache.max_bytes < least:
            raise ConfigError(
                f"{size}, and the smallest that this model can have (one gain, or rank 1 on one module) takes "
                f"{least}: every load would be refused; raise {cache.setting}, or turn LoRA off"
            )
        if cache.max_bytes < usual:
            logger.warning("%s, and one of rank 1 on all layers takes %d: raise %s", size, usual, cache.setting)


def compressed_copies(lora_config: LoRAConfig, packer: Packer) -> CompressedCopies | None:
    compression = get_compression(lora_config.host_compression, packer)
    return None if compression is None else CompressedCopies(compression, lora_config.host_memory_bytes // HOST_SHARE)


def num_slots(lora_config: LoRAConfig, packer: Packer) -> int:
    """So many that bytes run out first, within MIN_SLOTS..MAX_SLOTS: an eighth of an adapter of rank 1 on every target
    is what one of 16 bits on a few targets has.
    """
    return min(MAX_SLOTS, max(MIN_SLOTS, 8 * lora_config.adapter_memory_bytes // max(1, packer.smallest_nbytes())))
