"""What the monitor and the KV cache do to the adapters' memory.

The long idle leave, what can be read again is let go, what will be asked for comes; and adapters leave for the KV cache
(`LoRAMemoryPool.ask_kv` is the other side of that).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from loraplex.core import Tier, WaitsFor
from loraplex.errors import AdapterError, EngineShutdownError
from loraplex.memory.care.compaction import Compactor
from loraplex.memory.residency.records import Demand, StoredAdapter, StoredWeights
from loraplex.memory.residency.store import WeightStore
from loraplex.memory.residency.tiers import Budget
from loraplex.memory.residency.transfers import Transfers
from loraplex.memory.space.arena import Owner
from loraplex.memory.weights.compression import CompressedCopies
from loraplex.memory.weights.loading import Loader


class Housekeeping:
    """Thread-safe: takes the store's lock. release: returns a reference to an adapter, with all that follows from the last one."""

    def __init__(
        self,
        store: WeightStore,
        transfers: Transfers,
        loader: Loader,
        release: Callable[[StoredAdapter], None],
    ) -> None:
        self._store = store
        self._transfers = transfers
        self._loader = loader
        self._release = release

    def reclaim_idle(self, tier: str, idle_s: float, share: int) -> int:
        """One in `share` (at least one) of the adapters that nobody used for `idle_s` leaves a tier, longest idle first; how many.

        What the policy `none` keeps, stays.
        """
        store = self._store
        with store.lock:
            cache: Budget = store.device if tier == Tier.DEVICE.value else store.host
            if not cache.policy.evicts:
                return 0
            oldest_s = store.clock() - idle_s
            idle = [each for each in self._idle(cache) if each.last_used_s <= oldest_s]
            leaving = sorted(idle, key=lambda each: each.last_used_s)[: -(-len(idle) // share)]
            for each in leaving:
                if store.compressed is not None and cache is store.host:
                    self._compress_soon(each, store.compressed)
                else:
                    self._let_go(each, cache, "idle")
            return len(leaving)

    def _compress_soon(self, weights: StoredWeights, copies: CompressedCopies) -> None:
        """Held as by a request until a loader thread has compressed it; then it leaves, unless somebody wants it meanwhile."""
        adapter = next(iter(weights.adapters.values()))
        adapter.count_running(1)
        self._loader.submit(partial(self._compress, adapter, copies))

    def _compress(self, adapter: StoredAdapter, copies: CompressedCopies) -> None:
        store, weights = self._store, adapter.weights
        assert weights.layout is not None
        assert weights.host is not None
        views = [store.host.pool.view(extent) for extent in weights.host.extents]
        kept = copies.compress(weights.layout, views, weights.checksums)
        with store.lock:
            self._release(adapter)
            is_unwanted = weights.is_idle and weights.wanted_in_pass < store.room.pass_id - 1
            if is_unwanted and weights.digest in store.weights and copies.put(weights.digest, kept):
                store.counters.num_compressed += 1
                self._let_go(weights, store.host, "compressed")

    def release_idle(self) -> int:
        """All that nobody uses leaves the device and, where that is the same memory, the host; returns the bytes."""
        store = self._store
        with store.lock:
            cache: Budget = store.host if store.is_shared else store.device
            released = 0
            for each in self._idle(cache) if cache.policy.evicts else []:
                released += each.nbytes
                self._let_go(each, cache, "low_memory")
            return released + (0 if store.compressed is None else store.compressed.clear())

    def prefetch(self, adapter_ids: Sequence[int]) -> int:
        """Bring adapters nearer that are expected, the likeliest first; none of them makes way for another. How many were begun."""
        store = self._store
        with store.lock:
            if store.is_closed:
                return 0
            expected = [store.adapters[each].weights for each in adapter_ids if each in store.adapters]
            for weights in expected:
                weights.wanted_in_pass = store.room.pass_id
                store.host.policy.touch(weights.digest)
                store.device.policy.touch(weights.digest)
            return sum(self._begin(weights) for weights in expected)

    def _begin(self, weights: StoredWeights) -> bool:
        store = self._store
        is_near = weights.host is not None and (store.is_shared or weights.device is not None)
        if is_near or weights.job is not None or weights.is_prefetch_off:
            return False
        is_begun = False
        with suppress(AdapterError, EngineShutdownError):
            waits_for = self._transfers.advance(weights, Demand("prediction", is_for_request=True))
            is_begun = waits_for is not WaitsFor.ROOM
        if is_begun:
            nbytes = next(iter(weights.adapters.values())).spec.nbytes
            store.ledger.prefetched(weights.digest, nbytes)
        return is_begun

    def _idle(self, cache: Budget) -> list[StoredWeights]:
        """What may leave `cache`; not what a request waits for."""
        store = self._store
        held = [store.weights[digest] for digest in cache.policy.order()]
        return [each for each in held if each.is_idle and each.wanted_in_pass < store.room.pass_id - 1]

    def _let_go(self, weights: StoredWeights, cache: Budget, cause: str) -> None:
        self._store.counters.evictions[f"{cache.tier.value}_{cause}"] += 1
        cache.policy.evict(weights.digest)
        if cache is self._store.device:
            self._store.leave_device(weights)
        else:
            self._store.evict_to_source(weights)
        self._store.lock.notify_all()


# ------------------------------------------------------------------------------------------------------------ pressure


def reclaim_chunks(store: WeightStore, compactor: Compactor, num_chunks: int) -> int:
    """Evict, in the policy's order, as little as gives `num_chunks` chunks of the device's arena back; returns how many came. Lock held.

    Nobody leaves when all that may leave is not enough: it would come back for nothing. An eviction leaves holes in several chunks: once
    they add up, compaction makes chunks of them. Adapters keep their floor.
    """
    pool = store.device.pool or store.host.pool
    had_bytes, wanted_bytes = pool.lent_bytes, num_chunks * pool.arena.chunk_bytes
    victims = _victims(store, wanted_bytes - (had_bytes - pool.used_bytes))
    if victims is None:
        return 0
    for victim in victims:
        store.counters.evictions["kv_pressure"] += 1
        if store.is_shared:
            store.evict_to_source(victim)
        else:
            store.leave_device(victim)
    if had_bytes - pool.lent_bytes < wanted_bytes:
        side = compactor.sides()[-1]  # of the device's pool
        while had_bytes - pool.lent_bytes < wanted_bytes and side.empty_one(4 * wanted_bytes).num_moved:
            pass
    store.lock.notify_all()
    return max(0, had_bytes - pool.lent_bytes) // pool.arena.chunk_bytes


def _victims(store: WeightStore, nbytes: int) -> list[StoredWeights] | None:
    """The first to go that have `nbytes` together and that nobody asked for in this pass; None when all of them have less."""
    cache = store.host if store.is_shared else store.device
    arena = (store.device.pool or store.host.pool).arena
    spare_bytes = cache.used_bytes - arena.limits(Owner.ADAPTERS).floor * arena.chunk_bytes
    victims: list[StoredWeights] = []
    found_bytes = 0
    for each in store.room.candidates(cache, None, Demand("kv_pressure", is_for_request=True)):
        if found_bytes >= nbytes:
            break
        if found_bytes + each.nbytes <= spare_bytes:
            victims.append(each)
            found_bytes += each.nbytes
    return victims if found_bytes >= nbytes else None
