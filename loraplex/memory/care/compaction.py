"""Extents moved out of sparse chunks, so that the chunks go back to the arena.

A move copies the bytes, writes the new place into the record of the weights and the rows of the slot table, and retires
the old extent (RetiredMemory): a step in flight still finds it. What is being loaded, copied or checked stays where it
is, and while a step is in flight so does what it may read. Moves within a GPU are enqueued in the order of the steps.
The lock is held for the moves of one chunk at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from loraplex.core import Tier
from loraplex.events import EventKind, EventLog
from loraplex.memory.care.damage import Residents
from loraplex.memory.residency.records import StoredWeights
from loraplex.memory.residency.tiers import Tiers
from loraplex.memory.space.arena import Extent


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


@dataclass(eq=False)
class Compactor:
    """Compacts the pools of both tiers: one where they share their memory."""

    _residents: Residents
    _tiers: Tiers
    _events: EventLog
    _sides: dict[Tier, CompactionSide] = field(default_factory=dict)

    def run(self, max_bytes: int, deadline_s: float) -> CompactionResult:
        """Until nothing more is to be had, `max_bytes` are moved, or it is `deadline_s`. Takes the lock repeatedly.

        A call that moves nothing ends a compaction: the next one looks at what is there then. The engine's thread only.
        """
        total = CompactionResult()
        for tier in reversed(self._tiers.in_memory):
            side = self._sides.setdefault(tier, CompactionSide(self._residents, self._tiers, tier))
            is_moving = True
            while is_moving and self._tiers.clock() < deadline_s and total.moved_bytes < max_bytes:
                with self._residents.held():
                    done = side.empty_one_locked(max_bytes - total.moved_bytes)
                total += done
                is_moving = done.num_moved > 0
        if not total.num_moved:
            self._sides.clear()
        if total.num_chunks_freed:
            text = f"compaction gave {total.num_chunks_freed} chunks back"
            self._events.add(EventKind.COMPACTION, text, num_moved=total.num_moved, nbytes=total.moved_bytes)
        return total


@dataclass(eq=False)
class CompactionSide:
    """One tier's pool and what owns which extent in it, looked up at the first moves; made for one compaction.

    What comes after that stays where it is, and is moved by the next compaction.
    """

    _residents: Residents
    _tiers: Tiers
    _tier: Tier
    _owners: dict[Extent, tuple[StoredWeights, int]] | None = None

    def empty_one_locked(self, max_bytes: int) -> CompactionResult:
        """The moves of one chunk."""
        pool = self._tiers.pool_of(self._tier)
        if self._owners is None:
            self._owners = self._owners_locked()
        owners = self._owners
        lent_bytes = pool.lent_bytes
        moves = pool.compaction_moves(max_bytes, lambda extent: self._may_move_locked(owners.get(extent), extent))
        for move in moves:
            weights, index = owners[move.target] = owners.pop(move.source)
            self._residents.move_locked(weights, self._tier, index, move.target)
        num_freed = (lent_bytes - pool.lent_bytes) // pool.arena.chunk_bytes
        return CompactionResult(len(moves), sum(move.source.nbytes for move in moves), num_freed)

    def _owners_locked(self) -> dict[Extent, tuple[StoredWeights, int]]:
        """What is retired has no owner."""
        return {
            extent: (weights, index)
            for weights in self._residents.contents_locked().values()
            if (place := self._tiers.place_of(weights, self._tier)) is not None
            for index, extent in enumerate(place.extents)
        }

    def _may_move_locked(self, owner: tuple[StoredWeights, int] | None, extent: Extent) -> bool:
        place = None if owner is None else self._tiers.place_of(owner[0], self._tier)
        if owner is None or place is None or extent not in place.extents[owner[1] : owner[1] + 1]:
            return False  # it came or went since the lock was released
        return self._residents.may_move_locked(owner[0])
