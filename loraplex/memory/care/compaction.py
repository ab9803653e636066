"""Extents moved out of sparse chunks, so that the chunks go back to the arena.

A move copies the bytes, writes the new place into the record of the weights and the rows of the slot table, and retires the old
extent (RetiredMemory): a step in flight still finds it. What is being loaded, copied or checked stays where it is, and while a step is
in flight so does what it may read. Moves within a GPU are enqueued in the order of the steps. The lock is held for the moves of one
chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from loraplex.core import Tier
from loraplex.events import EventKind, EventLog
from loraplex.memory.residency.records import StoredWeights
from loraplex.memory.residency.store import WeightStore
from loraplex.memory.residency.tiers import Place
from loraplex.memory.space.arena import Extent
from loraplex.memory.space.pool import LoRAMemoryPool, Move


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """num_chunks_freed: those that came back at once; while a step is in flight, they come back with its commit."""

    num_moved: int = 0
    moved_bytes: int = 0
    num_chunks_freed: int = 0

    def __add__(self, other: CompactionResult) -> CompactionResult:
        return CompactionResult(
            self.num_moved + other.num_moved,
            self.moved_bytes + other.moved_bytes,
            self.num_chunks_freed + other.num_chunks_freed,
        )


class Compactor:
    """Compacts the pools of both tiers: one where they share their memory."""

    def __init__(self, store: WeightStore, clock: Callable[[], float], events: EventLog) -> None:
        self._store = store
        self._clock = clock
        self._events = events

    def run(self, max_bytes: int, deadline_s: float) -> CompactionResult:
        """Until nothing more is to be had, `max_bytes` are moved, or the clock says `deadline_s`. Takes the lock again and again."""
        with self._store.lock:
            sides = self.sides()
        total = CompactionResult()
        for side in sides:
            is_moving = True
            while is_moving and self._clock() < deadline_s and total.moved_bytes < max_bytes:
                with self._store.lock:
                    done = side.empty_one(max_bytes - total.moved_bytes)
                    if done.num_chunks_freed:
                        self._store.lock.notify_all()
                total += done
                is_moving = done.num_moved > 0
        if total.num_chunks_freed:
            text = f"compaction gave {total.num_chunks_freed} chunks back"
            self._events.add(EventKind.COMPACTION, text, num_moved=total.num_moved, nbytes=total.moved_bytes)
        return total

    def sides(self) -> list[CompactionSide]:
        """The pool of the host tier and that of the device, if it has its own. Lock held."""
        pools = {Tier.HOST: self._store.host.pool, Tier.DEVICE: self._store.device.pool}
        return [CompactionSide(self._store, pool, tier) for tier, pool in pools.items() if pool is not None]


class CompactionSide:
    """One pool and who owns what in it now; made for one compaction. Lock held."""

    def __init__(self, store: WeightStore, pool: LoRAMemoryPool, tier: Tier) -> None:
        self._store = store
        self._pool = pool
        self._tier = tier
        self._owners = {  # what is retired is nobody's
            extent: (weights, index)
            for weights in store.weights.values()
            if (place := self._place_of(weights)) is not None
            for index, extent in enumerate(place.extents)
        }

    def empty_one(self, max_bytes: int) -> CompactionResult:
        """The moves of one chunk."""
        pool = self._pool
        lent_bytes = pool.lent_bytes
        moves = pool.compaction_moves(max_bytes, self._may_move)
        for move in moves:
            self._move(move)
        num_freed = (lent_bytes - pool.lent_bytes) // pool.arena.chunk_bytes
        return CompactionResult(len(moves), sum(move.source.nbytes for move in moves), num_freed)

    def _may_move(self, extent: Extent) -> bool:
        weights, index = self._owners.get(extent, (None, 0))
        place = None if weights is None else self._place_of(weights)
        if weights is None or place is None or extent not in place.extents[index : index + 1]:
            return False  # it came or went since the lock was released
        is_read = self._store.retired.is_waiting_for_steps and weights.num_running > 0
        return weights.is_at_rest and weights.layout is not None and not is_read

    def _move(self, move: Move) -> None:
        weights, index = self._owners.pop(move.source)
        place, layout = self._place_of(weights), weights.layout
        assert place is not None
        assert layout is not None
        source, target = self._pool.view(move.source), self._pool.view(move.target)
        if self._tier is Tier.DEVICE:
            self._store.copies.move(source, target)
        else:
            target.copy_(source)
        extents = (*place.extents[:index], move.target, *place.extents[index + 1 :])
        self._set_place(weights, replace(place, extents=extents))
        self._owners[move.target] = weights, index
        if self._tier is Tier.HOST and not self._store.is_shared:
            self._pool.free(move.source)  # no kernel reads it
            return
        if weights.is_on_device:
            assert weights.lora_slot is not None
            self._store.device.publish_extent(weights.lora_slot, layout, index, move.target)
        self._store.retired.retire((move.source,))

    def _place_of(self, weights: StoredWeights) -> Place | None:
        return weights.host if self._tier is Tier.HOST else weights.device

    def _set_place(self, weights: StoredWeights, place: Place) -> None:
        if self._tier is Tier.HOST:
            weights.host = place
        else:
            weights.device = place
