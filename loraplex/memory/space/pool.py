"""The adapters' side of an arena: extents of true size in borrowed chunks.

An extent may lie across the border of adjacent chunks, so that nothing is lost to rounding; one that is larger than a
chunk takes adjacent ones. A chunk without extents goes back to the arena at once.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from loraplex.kernels.slices import align
from loraplex.memory.space.arena import Arena, Extent, Owner
from loraplex.memory.space.space import Range, Space


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Bytes of a pool. lent = used + free; `free_bytes`: in holes of lent chunks, the largest of `largest_hole_bytes`.

    fragmentation := 1 - ceil(used / chunk) / chunks, the share of the lent chunks that perfect packing would give
    back (0 when nothing is lent). The rest of the last chunk is no fragmentation: it is there however well the extents
    are packed.
    """

    lent_bytes: int
    used_bytes: int
    largest_hole_bytes: int
    num_chunks: int
    num_extents: int
    num_holes: int

    @property
    def free_bytes(self) -> int:
        return self.lent_bytes - self.used_bytes

    @property
    def fragmentation(self) -> float:
        if not self.num_chunks:
            return 0.0
        return 1 - -(-self.used_bytes * self.num_chunks // self.lent_bytes) / self.num_chunks


class LoRAMemoryPool:
    """Extents for adapters in chunks borrowed from an arena. Thread-safe.

    An extent takes the end of the smallest hole that holds it: what is left adjoins the next chunk to be borrowed.
    ask_kv(num_chunks): asks the KV cache for chunks when the arena has none; returns how many came. It is called with
    this pool's lock held and may take the locks of the KV cache and of the arena.
    """

    def __init__(self, arena: Arena, ask_kv: Callable[[int], int] | None = None) -> None:
        self.arena = arena
        self.ask_kv = ask_kv
        self._space = Space(arena)
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> Extent | None:
        """An extent of `nbytes` rounded up to ALIGNMENT; None: no room in holes, the arena or the KV cache."""
        extents = self.allocate_all((nbytes,))
        return None if extents is None else extents[0]

    def allocate_all(self, sizes: Sequence[int]) -> tuple[Extent, ...] | None:
        """One extent for each size, side by side as far as there are such holes; or None and nothing changed."""
        if min(sizes, default=1) < 1:
            raise ValueError(f"an extent needs at least one byte, got {min(sizes)}")
        aligned = [align(nbytes) for nbytes in sizes]
        extents: list[Extent] = []
        with self._lock:
            try:
                while left := aligned[len(extents) :]:
                    row = self._space.place_row(left) or self._borrow(left)
                    if not row:
                        break
                    extents += row
            finally:  # also when an allocation raises
                if len(extents) < len(sizes):
                    self._space.free_all(extents)
        return tuple(extents) if len(extents) == len(sizes) else None

    def free(self, extent: Extent) -> None:
        """Return an extent. Nothing may read it any more: what was launched before must be done (RetiredMemory)."""
        self.free_all((extent,))

    def free_all(self, extents: Iterable[Extent]) -> None:
        with self._lock:
            self._space.free_all(extents)

    def view(self, extent: Extent) -> torch.Tensor:
        """The memory of an extent, uint8."""
        return self.arena.view(extent)

    @property
    def used_bytes(self) -> int:
        return self._space.used_bytes

    @property
    def lent_bytes(self) -> int:
        return len(self._space.chunks) * self.arena.chunk_bytes

    @property
    def fenced_bytes(self) -> int:
        """Of chunks that are bad and are lent to nothing any more."""
        return self.arena.num_lent(Owner.FENCED) * self.arena.chunk_bytes

    @property
    def is_kv_in_the_way(self) -> bool:
        """Whether the KV cache has chunks that this pool may have when requests end, or has adjacent ones apart."""
        arena = self.arena
        if self.ask_kv is None or arena.num_lent(Owner.ADAPTERS) >= arena.ceiling(Owner.ADAPTERS):
            return False
        return arena.num_lent(Owner.KV) > arena.limits(Owner.KV).floor or arena.is_kv_scattered

    def stats(self) -> PoolStats:
        with self._lock:
            return PoolStats(
                lent_bytes=self.lent_bytes,
                used_bytes=self._space.used_bytes,
                largest_hole_bytes=self._space.holes.largest,
                num_chunks=len(self._space.chunks),
                num_extents=self._space.num_extents,
                num_holes=len(self._space.holes),
            )

    def fence(self, chunk: int) -> list[Extent]:
        """Never lend the chunk again; returns the extents in it: it is gone from the arena when they are freed."""
        with self._lock:
            if self.arena.fence(chunk) is not Owner.ADAPTERS:
                return []
            self._space.close(chunk)
            return list(self._space.touching(chunk))

    def compaction_moves(self, max_bytes: int, may_move: Callable[[Extent], bool]) -> list[Move]:
        """The next moves, of one chunk or one extent (MoveFinder), at most `max_bytes`; [] when none gains.

        Targets are lent; free the sources when they are no longer read. may_move is called with this pool's lock held.
        """
        with self._lock:
            return MoveFinder(self._space, max_bytes, may_move).find()

    def poison(self) -> None:
        """For tests: from now on everything that is free holds POISON, and `check_integrity` finds who wrote there."""
        with self._lock:
            self._space.poison()

    def check_integrity(self) -> None:
        """Assert that extents and free ranges tile the lent chunks exactly, and poisoned ranges are untouched."""
        with self._lock:
            self._space.check_integrity()

    def _borrow(self, sizes: Sequence[int]) -> tuple[Extent, ...]:
        """Extents for the first of `sizes`, at least one, in chunks that are borrowed for it; () when there are none.

        The KV cache is asked for some as long as that helps.
        """
        num_chunks = math.ceil(sizes[0] / self.arena.chunk_bytes)
        while not (extents := self._borrow_free(sizes)):
            is_allowed = self.arena.num_lent(Owner.ADAPTERS) + num_chunks <= self.arena.ceiling(Owner.ADAPTERS)
            if self.ask_kv is None or not is_allowed or not self.ask_kv(num_chunks):
                break
        return extents

    def _borrow_free(self, sizes: Sequence[int]) -> tuple[Extent, ...]:
        """In free chunks of the arena: as many as hold the first size, or fewer beside a hole when few are left."""
        for num_chunks in range(math.ceil(sizes[0] / self.arena.chunk_bytes), 0, -1):
            chunks = self.arena.lend(Owner.ADAPTERS, num_chunks)
            if chunks is None:
                continue
            start, end = self._space.take_over(chunks)
            if end - start >= sizes[0]:
                return self._space.place_in(start, end, sizes)
            self._space.add_hole(start, end)
        return ()


# --------------------------------------------------------------------------------------------------------------- moves


NUM_SPARSEST = 64
MAX_EMPTYING_TRIES = 16
"""It looks at this many of the sparsest chunks and tries to empty the cheapest of them: in a full pool none may go."""


@dataclass(frozen=True, slots=True)
class Move:
    """An extent and its new place, already lent; the mover of the bytes frees `source`, else `target`."""

    source: Extent
    target: Extent


class MoveFinder:
    """Finds the moves of one chunk in a space, at most `max_bytes` of them. Targets are lent, sources not yet freed.

    The next of these that is to be had:

    1. empty the cheapest chunk: all that touches it fits into holes of other chunks
    2. trade: an extent with chunks of its own moves to a hole and fewer free chunks beside it (what extents larger than
       a chunk need), or as many, when that makes one hole of two
    3. enlarge a hole: sum(hole bytes ** 2) grows by the move, so that in the end a chunk can be emptied

    Each lowers (chunks, -sum(hole bytes ** 2)), so moving ends. None is made when perfect packing would free no chunk.
    """

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

    # --------------------------------------------------------------------------------------------------------- 1. empty

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

    # --------------------------------------------------------------------------------------------------------- 2. trade

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
        """Extents with chunks in which no other extent is, and those chunks; the most first."""
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
        """As `_gain`, for as many chunks beside a hole of `size` as it leaves; 0 when it has other chunks too."""
        start, end = min(own) * self._chunk_bytes, (max(own) + 1) * self._chunk_bytes
        if extent.offset < start or extent.end > end:
            return 0
        before, after = self._space.holes.beside(extent.offset, extent.end)
        rest = size + len(own) * self._chunk_bytes - extent.nbytes
        outside = before - (extent.offset - start), after - (end - extent.end)
        return rest**2 + outside[0] ** 2 + outside[1] ** 2 - size**2 - before**2 - after**2

    def _borrow_beside(self, start: int, end: int, num_chunks: int) -> Range | None:
        """The hole [start, end) with `num_chunks` borrowed chunks before or after it, taken out; any chunks for no
        hole."""
        arena = self._space.arena
        if start == end:
            chunks = arena.lend(Owner.ADAPTERS, num_chunks)
        else:
            after, before = end // self._chunk_bytes, start // self._chunk_bytes
            places = [range(after, after + num_chunks)] if end % self._chunk_bytes == 0 else []
            places += [range(before - num_chunks, before)] if start % self._chunk_bytes == 0 else []
            chunks = next((place for place in places if arena.lend_at(Owner.ADAPTERS, place)), None)
        return None if chunks is None else self._space.take_over(chunks)

    # ------------------------------------------------------------------------------------------------------- 3. enlarge

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


# ------------------------------------------------------------------------------------------------------------- retired


class RetiredMemory:
    """Extents on their way back to `pool`. Not thread-safe: the residency calls it under its lock.

    retire(extents) at a time when steps S are launched and not committed  ->  free at the commit of the last of S
    Step ids grow by launch; every launched step is committed in the end, also one that failed.
    """

    def __init__(self, pool: LoRAMemoryPool) -> None:
        self._pool = pool
        self._in_flight: set[int] = set()
        self._last_launched = -1
        self._retired: deque[tuple[int, tuple[Extent, ...]]] = deque()  # (last step that may read them, extents)
        self.nbytes = 0

    def launched(self, step_id: int) -> None:
        assert step_id > self._last_launched, f"step {step_id} is launched after step {self._last_launched}"
        self._in_flight.add(step_id)
        self._last_launched = step_id

    def committed(self, step_id: int) -> bool:
        """Returns whether memory became free."""
        self._in_flight.discard(step_id)
        oldest = min(self._in_flight, default=self._last_launched + 1)
        had_bytes = self.nbytes
        while self._retired and self._retired[0][0] < oldest:
            self._free(self._retired.popleft()[1])
        return self.nbytes < had_bytes

    @property
    def is_waiting_for_steps(self) -> bool:
        """Whether a step is in flight: what is retired now comes back later."""
        return bool(self._in_flight)

    def retire(self, extents: Sequence[Extent]) -> None:
        """Free the extents as soon as the steps in flight are done; now, when there are none."""
        self.nbytes += sum(extent.nbytes for extent in extents)
        if self._in_flight:
            self._retired.append((self._last_launched, tuple(extents)))
        else:
            self._free(extents)

    def extents(self) -> list[Extent]:
        return [extent for _, extents in self._retired for extent in extents]

    def _free(self, extents: Sequence[Extent]) -> None:
        self._pool.free_all(extents)
        self.nbytes -= sum(extent.nbytes for extent in extents)

    def check_integrity(self) -> None:
        assert self.nbytes == sum(extent.nbytes for extent in self.extents())
        assert self._in_flight or not self._retired, "memory waits for steps that are committed"
