"""What the monitor and the KV cache do to the adapters' memory.

The long idle leave, what can be read again is let go, what will be asked for comes; and adapters leave for the KV cache
(`LoRAMemoryPool.ask_kv` is the other side of that).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from loraplex.core import Tier, WaitsFor
from loraplex.errors import AdapterError, EngineShutdownError
from loraplex.memory.care.compaction import CompactionSide
from loraplex.memory.care.damage import Residents
from loraplex.memory.residency.records import Demand, StoredAdapter, StoredWeights
from loraplex.memory.residency.tiers import Tiers
from loraplex.memory.space.arena import Extent, Owner
from loraplex.memory.stats import MemoryLog
from loraplex.memory.weights.compression import CompressedCopies
from loraplex.memory.weights.loading import Loader

NUM_WAITING_PASSES = 2
"""What a request asked for in so many scheduling passes is waited for."""


@dataclass(eq=False)
class Housekeeping:
    """Thread-safe. advance_locked: brings weights nearer (Transfers.advance_locked)."""

    _residents: Residents
    _tiers: Tiers
    _loader: Loader
    _log: MemoryLog
    _advance_locked: Callable[[StoredWeights, Demand], WaitsFor | None]

    def reclaim_idle(self, tier: str, idle_s: float, share: int) -> int:
        """One in `share` (at least one) of those not used for `idle_s` leaves a tier, longest idle first; how many.

        What the policy `none` keeps, stays.
        """
        left, compressed = Tier(tier), self._tiers.compressed
        with self._residents.held():
            oldest_s = self._tiers.clock() - idle_s
            idle = [
                each for each in self._residents.idle_locked(left, NUM_WAITING_PASSES) if each.last_used_s <= oldest_s
            ]
            leaving = sorted(idle, key=lambda each: each.last_used_s)[: -(-len(idle) // share)]
            for each in leaving:
                if compressed is not None and left is Tier.HOST and _is_compressible(each):
                    self._compress_soon(each, compressed)
                else:
                    self._let_go_locked(each, left, "idle")
            return len(leaving)

    def _compress_soon(self, weights: StoredWeights, copies: CompressedCopies) -> None:
        """Held as by a request until a loader's thread has compressed it; then it leaves, unless wanted."""
        adapter = next(iter(weights.adapters.values()))
        adapter.count_running(1)
        self._loader.submit(partial(self._compress, adapter, copies))

    def _compress(self, adapter: StoredAdapter, copies: CompressedCopies) -> None:
        weights = adapter.weights
        assert weights.layout is not None
        assert weights.host is not None
        try:
            views = [self._tiers.host.pool.view(extent) for extent in weights.host.extents]
            kept = copies.compress(weights.layout, views, weights.checksums)
        except Exception:  # there may be no memory for a copy
            with self._residents.held():
                self._residents.release_locked(adapter)
            raise
        with self._residents.held():
            self._residents.release_locked(adapter)
            is_unwanted = self._residents.is_unwanted_locked(weights, NUM_WAITING_PASSES)
            if is_unwanted and weights.adapters and copies.put(weights.digest, kept):
                self._log.counters.num_compressed += 1
                self._let_go_locked(weights, Tier.HOST, "compressed")

    def release_idle(self) -> int:
        """All idle adapters leave the device and, where that is the same memory, the host; returns the bytes."""
        tier, compressed = self._tiers.in_memory[0], self._tiers.compressed
        with self._residents.held():
            released = 0 if compressed is None else compressed.clear()
            had_bytes = self._tiers.cache(tier).used_bytes
            for each in self._residents.idle_locked(tier, NUM_WAITING_PASSES):
                self._let_go_locked(each, tier, "low_memory")
            return released + had_bytes - self._tiers.cache(tier).used_bytes

    def release_host(self, is_machine_short: bool) -> int:
        """Of idle adapters in a host tier beside the device, the half that was used longest ago leaves, then the rest
        is compressed where that is on; returns the bytes that left.

        is_machine_short: the tier is no longer page-locked then, since locked pages do not go back to the system.
        Copies of what is on the device stay.
        """
        if self._tiers.is_shared:
            return 0  # release_idle has done it
        with self._residents.held():
            idle = [
                each for each in self._residents.idle_locked(Tier.HOST, NUM_WAITING_PASSES) if not each.is_on_device
            ]
            oldest_first = sorted(idle, key=lambda each: each.last_used_s)
            num_leaving = -(-len(idle) // 2)
            for each in oldest_first[:num_leaving]:
                self._let_go_locked(each, Tier.HOST, "low_memory")
            if (compressed := self._tiers.compressed) is not None:
                for each in oldest_first[num_leaving:]:
                    self._compress_soon(each, compressed)
            if is_machine_short:
                self._tiers.host.pool.arena.unlock()
            return sum(each.own_nbytes for each in oldest_first[:num_leaving])

    def prefetch(self, adapter_ids: Sequence[int]) -> int:
        """Bring adapters nearer that are expected, the likeliest first; none leaves for another. Returns how many."""
        with self._residents.held():
            known = self._residents.known_locked()
            found = [known[each].weights for each in adapter_ids if each in known]
            expected = [weights for weights in found if not weights.is_prediction_off]
            for weights in expected:
                self._residents.want_locked(weights)
            return sum(self._begin_locked(weights) for weights in expected)

    def _begin_locked(self, weights: StoredWeights) -> bool:
        is_near = weights.host is not None and (self._tiers.is_shared or weights.device is not None)
        if is_near or weights.job is not None or weights.is_prefetch_off:
            return False
        is_begun = False
        with suppress(AdapterError, EngineShutdownError):
            is_begun = self._advance_locked(weights, Demand("prediction", is_for_request=True)) is not WaitsFor.ROOM
        if is_begun:
            nbytes = next(iter(weights.adapters.values())).spec.nbytes
            self._log.ledger.prefetched(weights.digest, nbytes)
        return is_begun

    def reclaim_chunks(self, num_chunks: int) -> int:
        """Evict, in the policy's order, as little as frees `num_chunks` chunks of the device's arena; returns how many.

        None leaves when all that may leave is not enough: it would come back for nothing. An eviction leaves holes in
        several chunks: once they add up, compaction makes chunks of them. Adapters keep their floor. What a step in
        flight reads comes back with its commit.
        """
        tier = self._tiers.in_memory[0]
        pool = self._tiers.pool_of(tier)
        with self._residents.held():
            had_bytes, wanted_bytes = pool.lent_bytes, num_chunks * pool.arena.chunk_bytes
            victims = self._victims_locked(tier, wanted_bytes - (had_bytes - pool.used_bytes))
            if victims is None:
                return 0
            for victim in victims:
                self._log.counters.evictions["kv_pressure"] += 1
                self._residents.leave_locked(victim, tier)
            side = CompactionSide(self._residents, self._tiers, tier)
            while had_bytes - pool.lent_bytes < wanted_bytes and side.empty_one_locked(4 * wanted_bytes).num_moved:
                pass
            return max(0, had_bytes - pool.lent_bytes) // pool.arena.chunk_bytes

    def _victims_locked(self, tier: Tier, nbytes: int) -> list[StoredWeights] | None:
        """The first to go that have `nbytes` together and were not asked for in this pass; None when all have less."""
        cache, arena = self._tiers.cache(tier), self._tiers.pool_of(tier).arena
        spare_bytes = cache.used_bytes - arena.limits(Owner.ADAPTERS).floor * arena.chunk_bytes
        victims: list[StoredWeights] = []
        found_bytes, shared = 0, Counter[Extent | None]()
        for each in self._residents.idle_locked(tier, 1):
            if found_bytes >= nbytes:
                break
            if found_bytes + (more_bytes := cache.freed_by(each, shared)) <= spare_bytes:
                victims.append(each)
                found_bytes += more_bytes
                shared[each.shared] += 1
        return victims if found_bytes >= nbytes else None

    def _let_go_locked(self, weights: StoredWeights, tier: Tier, cause: str) -> None:
        self._log.counters.evictions[f"{tier.value}_{cause}"] += 1
        self._tiers.cache(tier).policy.evict(weights.digest)
        self._residents.leave_locked(weights, tier)


def _is_compressible(weights: StoredWeights) -> bool:
    """Not what shares: each copy would hold the projections again. It is small without them, and leaves as it is."""
    return weights.layout is not None and weights.layout.projections is None
