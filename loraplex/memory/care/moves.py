"""Which extents compaction moves, and where to. The next of these that is to be had:

1. empty the cheapest chunk: all that touches it fits into holes of other chunks
2. trade: an extent with chunks of its own moves to a hole and fewer free chunks beside it (what extents larger than a chunk need),
   or as many, when that makes one hole of two
3. enlarge a hole: sum(hole bytes ** 2) grows by the move, so that in the end a chunk can be emptied

Each lowers (chunks, -sum(hole bytes ** 2)), so moving ends. None is made when perfect packing would free no chunk.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from loraplex.memory.space.arena import Extent, Owner
from loraplex.memory.space.space import Range, Space

NUM_SPARSEST = 64
MAX_EMPTYING_TRIES = 16
"""It looks at this many of the sparsest chunks and tries to empty the cheapest of them: in a full pool none may go."""


@dataclass(frozen=True, slots=True)
class Move:
    """An extent and its new place, which is lent already; who moves the bytes frees `source`, or `target` if it does not."""

    source: Extent
    target: Extent


class MoveFinder:
    """Finds the moves of one chunk in a space, at most `max_bytes` of them. Targets are lent, sources are still to be freed."""

    def __init__(self, space: Space, max_bytes: int, may_move: Callable[[Extent], bool]) -> None:
        self._space = space
        self._chunk_bytes = space.arena.chunk_bytes
        self._max_bytes = max_bytes
        self._may_move = may_move

    def find(self) -> list[Move]:
        open_chunks = {c: nbytes for c, nbytes in self._space.chunks.items() if not self._space.is_closed(c)}
        if len(open_chunks) <= math.ceil(sum(open_chunks.values()) / self._chunk_bytes):
            return []
        sparsest = heapq.nsmallest(NUM_SPARSEST, open_chunks, key=lambda chunk: (open_chunks[chunk], chunk))
        for chunk in sorted(sparsest, key=self._cost_of_emptying)[:MAX_EMPTYING_TRIES]:
            if moves := self._empty(chunk):
                return moves
        return self._trade() or self._enlarge_hole()

    def _is_allowed(self, extent: Extent) -> bool:
        return extent.nbytes <= self._max_bytes and self._may_move(extent)

    # ------------------------------------------------------------------------------------------------------------ 1. empty

    def _cost_of_emptying(self, chunk: int) -> tuple[float, int]:
        """Bytes to move; a chunk at the border of a run is cheaper, for inside one it would leave two short ends."""
        borders = (chunk - 1 not in self._space.chunks) + (chunk + 1 not in self._space.chunks)
        num_bytes = sum(extent.nbytes for extent in self._space.touching(chunk))
        return num_bytes - borders * self._chunk_bytes / 2, chunk

    def _empty(self, chunk: int) -> list[Move]:
        """Places elsewhere for all that touches `chunk`, the largest first; [] and nothing changed when not all fit."""
        extents = sorted(self._space.touching(chunk), key=lambda extent: -extent.nbytes)
        num_bytes = sum(extent.nbytes for extent in extents)
        if num_bytes > self._max_bytes or extents[0].nbytes > self._space.holes.largest:
            return []
        if not all(map(self._may_move, extents)):
            return []
        self._space.close(chunk)
        moves: list[Move] = []
        for extent in extents:
            target = self._space.place(extent.nbytes)
            if target is None:
                for move in moves:
                    self._space.free_all((move.target,))
                self._space.open(chunk)
                return []
            moves.append(Move(extent, target))
        return moves

    # ------------------------------------------------------------------------------------------------------------ 2. trade

    def _trade(self) -> list[Move]:
        holes = sorted(((end - start, start, end) for start, end in self._space.holes), reverse=True)
        for extent, own in self._loners():
            if not self._is_allowed(extent):
                continue
            for size, start, end in [*holes, (0, 0, 0)]:
                num_chunks = -(-(extent.nbytes - size) // self._chunk_bytes)
                if num_chunks > len(own):
                    break  # the other holes are smaller
                if num_chunks < 1 or (size and not self._is_apart(extent, start, end)):
                    continue
                if num_chunks == len(own) and (not size or self._gain_of_even_trade(extent, own, size) <= 0):
                    continue
                place = self._borrow_beside(start, end, num_chunks)
                if place is not None:
                    target = self._space.place_in(*place, (extent.nbytes,))[0]
                    for chunk in own:
                        self._space.close(chunk)
                    return [Move(extent, target)]
        return []

    def _loners(self) -> list[tuple[Extent, list[int]]]:
        """Extents with chunks in which nobody else is, and those chunks; the most first."""
        own: dict[Extent, list[int]] = {}
        for chunk in self._space.chunks:
            if not self._space.is_closed(chunk):
                extents = list(itertools.islice(self._space.touching(chunk), 2))
                if len(extents) == 1:
                    own.setdefault(extents[0], []).append(chunk)
        return sorted(own.items(), key=lambda each: (-len(each[1]), each[0].offset))

    def _is_apart(self, extent: Extent, start: int, end: int) -> bool:
        """The hole is not in the chunks of the extent, nor in those beside them: it would shrink when they go."""
        near = range(extent.offset // self._chunk_bytes - 1, -(-extent.end // self._chunk_bytes) + 1)
        return start // self._chunk_bytes not in near and (end - 1) // self._chunk_bytes not in near

    def _gain_of_even_trade(self, extent: Extent, own: list[int], size: int) -> int:
        """How much sum(hole bytes ** 2) grows when it leaves its chunks for as many beside a hole of `size`; 0 when it has others too."""
        start, end = min(own) * self._chunk_bytes, (max(own) + 1) * self._chunk_bytes
        if extent.offset < start or extent.end > end:
            return 0
        before, after = self._space.holes.beside(extent.offset, extent.end)
        rest = size + len(own) * self._chunk_bytes - extent.nbytes
        outside = before - (extent.offset - start), after - (end - extent.end)
        return rest**2 + outside[0] ** 2 + outside[1] ** 2 - size**2 - before**2 - after**2

    def _borrow_beside(self, start: int, end: int, num_chunks: int) -> Range | None:
        """The hole [start, end) with `num_chunks` borrowed chunks before or after it, no hole any more; any chunks for no hole."""
        arena = self._space.arena
        if start == end:
            chunks = arena.lend(Owner.ADAPTERS, num_chunks)
        else:
            after, before = end // self._chunk_bytes, start // self._chunk_bytes
            places = [range(after, after + num_chunks)] if end % self._chunk_bytes == 0 else []
            places += [range(before - num_chunks, before)] if start % self._chunk_bytes == 0 else []
            chunks = next((place for place in places if arena.lend_at(Owner.ADAPTERS, place)), None)
        return None if chunks is None else self._space.take_over(chunks)

    # ------------------------------------------------------------------------------------------------------------ 3. enlarge

    def _enlarge_hole(self) -> list[Move]:
        """The move with most gain for its bytes."""
        holes = self._space.holes
        sizes = sorted(end - start for start, end in holes)
        best: tuple[float, Extent] | None = None
        for start, end in holes:
            for extent in self._space.beside(start, end):
                index, beside = bisect_left(sizes, extent.nbytes), holes.beside(extent.offset, extent.end)
                if index == len(sizes) or sizes[index] in beside:
                    continue
                gain = _gain(extent.nbytes, *beside, sizes[index]) / extent.nbytes
                if gain > (best[0] if best else 0) and self._is_allowed(extent):
                    best = gain, extent
        target = None if best is None else self._space.place(best[1].nbytes)
        return [] if best is None or target is None else [Move(best[1], target)]


def _gain(size: int, before: int, after: int, target: int) -> int:
    """How much sum(hole bytes ** 2) grows when an extent between holes goes to the end of another hole."""
    merged, rest = before + size + after, target - size
    return merged * merged + rest * rest - before * before - after * after - target * target
