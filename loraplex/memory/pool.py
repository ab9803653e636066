"""The adapters' side of an arena: extents of true size in borrowed chunks.

    LoRAMemoryPool   extents inside the adapters' chunks          best fit, 64-byte aligned

An extent may lie across the border of adjacent chunks, so that nothing is lost to rounding; one that is larger than a chunk
takes adjacent ones. A chunk without extents goes back to the arena at once. A chunk that is closed (fenced, or being emptied by
compaction) takes no new extents and goes back when its last one is freed.
"""

from __future__ import annotations

import heapq
import math
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from loraplex.kernels.plan import ALIGNMENT, align
from loraplex.memory.arena import POISON, Arena, Extent, Owner
from loraplex.memory.holes import Holes

MAX_EMPTYING_TRIES = 16
NUM_SPARSEST = 64
"""`compaction_moves` looks at this many of the sparsest chunks and tries to empty the cheapest of them: in a full pool none may go."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Bytes of a pool. lent = used + free; `free_bytes` lie in holes of lent chunks, the largest of `largest_hole_bytes`.

    fragmentation := free / lent, the share of the lent memory that only compaction can give back (0 when nothing is lent).
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
        return self.free_bytes / self.lent_bytes if self.lent_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Move:
    """An extent and its new place, which is lent already; who moves the bytes frees `source`, or `target` if it does not."""

    source: Extent
    target: Extent


class LoRAMemoryPool:
    """Extents for adapters in chunks borrowed from an arena. Thread-safe.

    An extent takes the end of the smallest hole that holds it: what is left adjoins the next chunk to be borrowed.
    ask_kv(num_chunks): asks the KV cache for chunks when the arena has none; returns how many came. It is called with this pool's
    lock held and may take the locks of the KV cache and of the arena.
    """

    def __init__(self, arena: Arena, ask_kv: Callable[[int], int] | None = None) -> None:
        self.arena = arena
        self.ask_kv = ask_kv
        self._extents: dict[int, int] = {}  # offset -> nbytes
        self._offsets: list[int] = []  # of the extents, sorted
        self._holes = Holes()
        self._chunks: dict[int, int] = {}  # chunk -> bytes of extents in it
        self._closed: dict[int, list[tuple[int, int]]] = {}  # chunk -> its free ranges, which are no holes
        self._used_bytes = 0
        self._is_poisoned = False
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> Extent | None:
        """An extent of `nbytes` rounded up to ALIGNMENT; None when neither the holes, nor the arena, nor the KV cache have room."""
        if nbytes < 1:
            raise ValueError(f"an extent needs at least one byte, got {nbytes}")
        with self._lock:
            size = align(nbytes)
            extent = self._place(size)
            return self._place(size) if extent is None and self._borrow(size) else extent

    def allocate_all(self, sizes: Sequence[int]) -> tuple[Extent, ...] | None:
        """One extent for each size, or None and nothing changed."""
        extents: list[Extent] = []
        for nbytes in sizes:
            extent = self.allocate(nbytes)
            if extent is None:
                self.free_all(extents)
                return None
            extents.append(extent)
        return tuple(extents)

    def free(self, extent: Extent) -> None:
        """Return an extent. Nothing may read it any more: what was launched before must be done (quarantine.py)."""
        with self._lock:
            self._free(extent)

    def free_all(self, extents: Iterable[Extent]) -> None:
        for extent in extents:
            self.free(extent)

    def view(self, extent: Extent) -> torch.Tensor:
        """The memory of an extent, uint8."""
        return self.arena.view(extent)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def lent_bytes(self) -> int:
        return len(self._chunks) * self.arena.chunk_bytes

    @property
    def is_kv_in_the_way(self) -> bool:
        """Whether the KV cache has chunks that this pool may have, once requests end."""
        arena = self.arena
        is_above_floor = arena.num_lent(Owner.KV) > arena.limits(Owner.KV).floor
        return (
            self.ask_kv is not None
            and is_above_floor
            and arena.num_lent(Owner.ADAPTERS) < arena.ceiling(Owner.ADAPTERS)
        )

    def stats(self) -> PoolStats:
        with self._lock:
            return PoolStats(
                lent_bytes=self.lent_bytes,
                used_bytes=self._used_bytes,
                largest_hole_bytes=self._holes.largest,
                num_chunks=len(self._chunks),
                num_extents=len(self._extents),
                num_holes=len(self._holes),
            )

    # ------------------------------------------------------------------------------------------------ closed chunks, moves

    def fence(self, chunk: int) -> list[Extent]:
        """Never lend the chunk again; returns the extents in it: it is gone from the arena when they are freed."""
        with self._lock:
            if self.arena.fence(chunk) is not Owner.ADAPTERS:
                return []
            self._close(chunk)
            return list(self._touching(chunk))

    def compaction_moves(self, max_bytes: int, may_move: Callable[[Extent], bool]) -> list[Move]:
        """The moves that empty the sparsest chunk that can be emptied, or else one that makes a larger hole.

        Targets are holes of other lent chunks, nothing is borrowed. At most `max_bytes` are to be moved. may_move is called with this
        pool's lock held. [] when nothing is to be had: not even with perfect packing would a chunk come free, or no extent fits
        elsewhere. Call it again after the moves: each call looks for one chunk.
        """
        with self._lock:
            if self._num_freeable() < 1:
                return []
            sparsest = heapq.nsmallest(NUM_SPARSEST, self._chunks, key=lambda each: (self._chunks[each], each))
            open_chunks = [chunk for chunk in sparsest if chunk not in self._closed]
            for chunk in sorted(open_chunks, key=self._cost_of_emptying)[:MAX_EMPTYING_TRIES]:
                if moves := self._empty(chunk, max_bytes, may_move):
                    return moves
            return self._enlarge_hole(max_bytes, may_move)

    def poison(self) -> None:
        """For tests: from now on everything that is free holds POISON, and `check_integrity` finds who wrote there."""
        with self._lock:
            self._is_poisoned = True
            for start, end in self._free_ranges():
                self.arena.memory[start:end].fill_(POISON)

    def check_integrity(self) -> None:
        """Assert that extents and holes tile the lent chunks exactly, once, and that poisoned holes are untouched."""
        with self._lock:
            lent = self.arena.chunks_of(Owner.ADAPTERS)
            assert sorted(self._chunks) == lent, "pool and arena disagree on who has which chunk"
            self._holes.check_integrity()
            assert self._offsets == sorted(self._extents)
            used = [(offset, offset + nbytes) for offset, nbytes in self._extents.items()]
            assert self._used_bytes == sum(end - start for start, end in used) == sum(self._chunks.values())
            self._check_tiling(sorted([*used, *self._free_ranges()]), lent)
            for start, end in self._holes:
                whole = whole_chunks(start, end, self.arena.chunk_bytes)
                assert not whole, f"[{start}, {end}) has chunks to give back"
                chunks = {self.arena.chunk_at(start), self.arena.chunk_at(end - 1)}
                assert self._closed.keys().isdisjoint(chunks), f"[{start}, {end}) is a hole of a closed chunk"
            for start, end in self._free_ranges() if self._is_poisoned else ():
                is_clean = bool((self.arena.memory[start:end] == POISON).all())
                assert is_clean, f"somebody wrote into the free bytes [{start}, {end})"

    def _check_tiling(self, pieces: Sequence[tuple[int, int]], lent: Sequence[int]) -> None:
        total = sum(end - start for start, end in pieces)
        assert total == len(lent) * self.arena.chunk_bytes, "lent bytes are not all accounted for"
        last_end = 0
        for start, end in pieces:
            assert start % ALIGNMENT == 0 == end % ALIGNMENT, f"[{start}, {end}) is not aligned"
            assert last_end <= start < end, f"[{start}, {end}) overlaps what ends at {last_end}"
            assert self._chunks.keys() >= {chunk for chunk, _ in self._shares(start, end)}, (
                f"[{start}, {end}) is not lent"
            )
            last_end = end

    # -------------------------------------------------------------------------------------------------- under the lock

    def _free_ranges(self) -> list[tuple[int, int]]:
        return [*self._holes, *(piece for pieces in self._closed.values() for piece in pieces)]

    def _place(self, size: int) -> Extent | None:
        hole = self._holes.take_best(size)
        if hole is None:
            return None
        start, end = hole
        if start < end - size:
            self._add_hole(start, end - size)
        extent = Extent(end - size, size)
        self._extents[extent.offset] = size
        insort(self._offsets, extent.offset)
        self._count(extent, 1)
        return extent

    def _free(self, extent: Extent) -> None:
        assert self._extents.get(extent.offset) == extent.nbytes, f"{extent} is not lent by this pool"
        del self._extents[extent.offset]
        del self._offsets[bisect_left(self._offsets, extent.offset)]
        self._count(extent, -1)
        if self._is_poisoned:
            self.arena.view(extent).fill_(POISON)
        self._add_free(extent.offset, extent.end)

    def _count(self, extent: Extent, sign: int) -> None:
        self._used_bytes += sign * extent.nbytes
        for chunk, nbytes in self._shares(extent.offset, extent.end):
            self._chunks[chunk] += sign * nbytes

    def _shares(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The chunks under [start, end), and how many of its bytes lie in each."""
        chunk_bytes = self.arena.chunk_bytes
        while start < end:
            chunk = start // chunk_bytes
            stop = min(end, (chunk + 1) * chunk_bytes)
            yield chunk, stop - start
            start = stop

    def _borrow(self, size: int) -> bool:
        """Borrow chunks until a hole holds `size`; the KV cache is asked for some when the arena has none."""
        num_chunks = math.ceil(size / self.arena.chunk_bytes)
        while not self._borrow_free(size):
            held = self.arena.num_lent(Owner.ADAPTERS)
            can_have_more = held + num_chunks <= self.arena.ceiling(Owner.ADAPTERS)
            if self.ask_kv is None or not can_have_more or not self.ask_kv(num_chunks):
                return False
        return True

    def _borrow_free(self, size: int) -> bool:
        """Free chunks of the arena: as many as hold `size`, or fewer beside a hole when the arena is nearly full."""
        chunk_bytes = self.arena.chunk_bytes
        for num_chunks in range(math.ceil(size / chunk_bytes), 0, -1):
            chunks = self.arena.lend(Owner.ADAPTERS, num_chunks)
            if chunks is None:
                continue
            self._chunks.update(dict.fromkeys(chunks, 0))
            if self._is_poisoned:
                self.arena.bytes_of(chunks).fill_(POISON)
            start, end = self._holes.merged(chunks.start * chunk_bytes, chunks.stop * chunk_bytes)
            if end - start >= size:
                self._holes.add(start, end)
                return True
            self._add_hole(start, end)  # gives the chunks back
        return False

    def _add_free(self, start: int, end: int) -> None:
        """[start, end) is free: a hole, but for what lies in closed chunks."""
        if not self._closed:
            self._add_hole(start, end)
            return
        for chunk, nbytes in self._shares(start, end):
            if chunk in self._closed:
                self._closed[chunk].append((start, start + nbytes))
                self._give_back_if_empty(chunk)
            else:
                self._add_hole(start, start + nbytes)
            start += nbytes

    def _add_hole(self, start: int, end: int) -> None:
        """It joins its neighbours, and the chunks that are free as a whole go back to the arena."""
        start, end = self._holes.merged(start, end)
        chunk_bytes = self.arena.chunk_bytes
        whole = whole_chunks(start, end, chunk_bytes)
        if not whole:
            self._holes.add(start, end)
            return
        self._give_back(whole)
        for left, right in ((start, whole.start * chunk_bytes), (whole.stop * chunk_bytes, end)):
            if left < right:
                self._holes.add(left, right)

    def _give_back(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            assert self._chunks.pop(chunk) == 0, f"chunk {chunk} has extents"
            self.arena.give_back(Owner.ADAPTERS, [chunk])

    def _close(self, chunk: int) -> None:
        if chunk not in self._closed:
            chunk_bytes = self.arena.chunk_bytes
            self._closed[chunk] = self._holes.cut(chunk * chunk_bytes, (chunk + 1) * chunk_bytes)
            self._give_back_if_empty(chunk)

    def _open(self, chunk: int) -> None:
        for start, end in self._closed.pop(chunk):
            self._add_hole(start, end)

    def _give_back_if_empty(self, chunk: int) -> None:
        if self._chunks[chunk] == 0:
            del self._closed[chunk]
            self._give_back([chunk])

    # ------------------------------------------------------------------------------------------------------- compaction

    def _num_freeable(self) -> int:
        """Chunks that perfect packing would give back, but for those that are on their way."""
        open_chunks = [nbytes for chunk, nbytes in self._chunks.items() if chunk not in self._closed]
        return len(open_chunks) - math.ceil(sum(open_chunks) / self.arena.chunk_bytes)

    def _touching(self, chunk: int) -> Iterator[Extent]:
        """The extents that have bytes in `chunk`."""
        start, end = chunk * self.arena.chunk_bytes, (chunk + 1) * self.arena.chunk_bytes
        index = max(0, bisect_right(self._offsets, start) - 1)
        for offset in self._offsets[index : bisect_left(self._offsets, end)]:
            if offset + self._extents[offset] > start:
                yield Extent(offset, self._extents[offset])

    def _cost_of_emptying(self, chunk: int) -> tuple[float, int]:
        """Bytes to move; a chunk at the border of a run is cheaper, for inside one it would leave two short ends."""
        borders = (chunk - 1 not in self._chunks) + (chunk + 1 not in self._chunks)
        num_bytes = sum(extent.nbytes for extent in self._touching(chunk))
        return num_bytes - borders * self.arena.chunk_bytes / 2, chunk

    def _empty(self, chunk: int, max_bytes: int, may_move: Callable[[Extent], bool]) -> list[Move]:
        """Places elsewhere for all that touches `chunk`, the largest first; [] and nothing changed when not all fit."""
        extents = sorted(self._touching(chunk), key=lambda extent: -extent.nbytes)
        if sum(extent.nbytes for extent in extents) > max_bytes or extents[0].nbytes > self._holes.largest:
            return []
        if not all(map(may_move, extents)):
            return []
        self._close(chunk)
        moves: list[Move] = []
        for extent in extents:
            target = self._place(extent.nbytes)
            if target is None:
                for move in moves:
                    self._free(move.target)
                self._open(chunk)
                return []
            moves.append(Move(extent, target))
        return moves

    def _enlarge_hole(self, max_bytes: int, may_move: Callable[[Extent], bool]) -> list[Move]:
        """The move that gains most: sum(hole bytes ** 2) grows, so that in the end a chunk can be emptied; [] when none does."""
        best: tuple[float, Extent] | None = None
        sizes = sorted(end - start for start, end in self._holes)
        for start, end in self._holes:
            for extent in self._neighbours(start, end):
                index = bisect_left(sizes, extent.nbytes)
                beside = self._holes.beside(extent.offset, extent.end)
                if index == len(sizes) or sizes[index] in beside or extent.nbytes > max_bytes:
                    continue
                gain = _gain(extent.nbytes, *beside, sizes[index]) / extent.nbytes
                if gain > (best[0] if best else 0) and may_move(extent):
                    best = gain, extent
        if best is None:
            return []
        extent = best[1]
        target = self._place(extent.nbytes)
        assert target is not None
        return [Move(extent, target)]

    def _neighbours(self, start: int, end: int) -> Iterator[Extent]:
        """The extents on either side of a hole."""
        index = bisect_left(self._offsets, start) - 1
        if index >= 0 and (before := self._offsets[index]) + self._extents[before] == start:
            yield Extent(before, self._extents[before])
        if end in self._extents:
            yield Extent(end, self._extents[end])


def whole_chunks(start: int, end: int, chunk_bytes: int) -> range:
    """The chunks that lie in [start, end) as a whole."""
    return range(-(-start // chunk_bytes), end // chunk_bytes)


def _gain(size: int, before: int, after: int, target: int) -> int:
    """How much sum(hole bytes ** 2) grows when an extent between holes goes to the end of another hole."""
    merged, rest = before + size + after, target - size
    return merged * merged + rest * rest - before * before - after * after - target * target
