"""Adapters leave for the KV cache: the other side of `LoRAMemoryPool.ask_kv`."""

from __future__ import annotations

from loraplex.memory.care.compaction import Compactor
from loraplex.memory.residency.records import Demand, StoredWeights
from loraplex.memory.residency.store import WeightStore
from loraplex.memory.space.arena import Owner


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
