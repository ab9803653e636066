"""What lies where in the chunks that a pool has borrowed: extents, holes, and chunks that take no new extents.

hole            free bytes between extents, over the borders of chunks
closed chunk    fenced, or being emptied: what is free in it is no hole, and it goes back when its last extent is freed
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence

from loraplex.kernels.slices import ALIGNMENT
from loraplex.memory.space.arena import POISON, Arena, Extent, Owner

Range = tuple[int, int]
"""Bytes [start, end) of the arena."""


class Space:
    """Extents and free ranges tile the chunks lent to the adapters. Not thread-safe: the pool calls it under its lock.

    chunks: those it has, with the bytes of extents in each. A chunk without extents goes back to the arena at once.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.chunks: dict[int, int] = {}
        self.holes = Holes()
        self.used_bytes = 0
        self._size_of: dict[int, int] = {}  # offset of an extent -> its bytes
        self._offsets: list[int] = []  # of the extents, sorted
        self._closed: dict[int, list[Range]] = {}  # chunk -> its free ranges
        self._is_poisoned = False

    @property
    def num_extents(self) -> int:
        return len(self._offsets)

    def is_closed(self, chunk: int) -> bool:
        return chunk in self._closed

    # ---------------------------------------------------------------------------------------------------------- extents

    def place(self, size: int) -> Extent | None:
        """An extent at the end of the smallest hole that holds it; None when no hole does."""
        return next(iter(self.place_row((size,))), None)

    def place_row(self, sizes: Sequence[int]) -> tuple[Extent, ...]:
        """Side by side, in the smallest hole for all of `sizes`, or as many as the largest hole holds; else ()."""
        largest = self.holes.largest
        if not sizes or sizes[0] > largest:
            return ()
        return self.place_in(*self.holes.take_best(min(sum(sizes), largest)), sizes)

    def place_in(self, start: int, end: int, sizes: Sequence[int]) -> tuple[Extent, ...]:
        """As many of `sizes` as fit, at least one, at the end of a range that was taken out; the rest is a hole."""
        ends = list(itertools.accumulate(sizes))
        num_extents = bisect_right(ends, end - start)
        assert num_extents, f"[{start}, {end}) does not hold {sizes[0]} bytes"
        first = end - ends[num_extents - 1]
        if start < first:
            self.add_hole(start, first)
        offsets = [first, *(first + nbytes for nbytes in ends[: num_extents - 1])]
        extents = tuple(map(Extent, offsets, sizes))
        self._size_of.update(zip(offsets, sizes, strict=False))
        index = bisect_left(self._offsets, first)
        self._offsets[index:index] = offsets
        self._count(Extent(first, end - first), 1)
        return extents

    def free_all(self, extents: Iterable[Extent]) -> None:
        """In runs of extents that lie side by side: those of one adapter mostly do."""
        run: list[Extent] = []
        for extent in sorted(extents, key=lambda extent: extent.offset):
            if run and run[-1].end != extent.offset:
                self._free_run(run)
                run = []
            run.append(extent)
        if run:
            self._free_run(run)

    def _free_run(self, run: Sequence[Extent]) -> None:
        for extent in run:
            assert self._size_of.get(extent.offset) == extent.nbytes, f"{extent} is not lent by this pool"
            del self._size_of[extent.offset]
        start, end = run[0].offset, run[-1].end
        index = bisect_left(self._offsets, start)
        del self._offsets[index : index + len(run)]
        freed = Extent(start, end - start)
        self._count(freed, -1)
        if self._is_poisoned:
            self.arena.view(freed).fill_(POISON)
        if not self._closed:
            self.add_hole(start, end)
            return
        for chunk, nbytes in self.shares(freed):
            self._add_free(chunk, start, start + nbytes)
            start += nbytes

    def touching(self, chunk: int) -> Iterator[Extent]:
        """The extents that have bytes in `chunk`."""
        start, end = chunk * self.arena.chunk_bytes, (chunk + 1) * self.arena.chunk_bytes
        index = max(0, bisect_right(self._offsets, start) - 1)
        for offset in self._offsets[index : bisect_left(self._offsets, end)]:
            if offset + self._size_of[offset] > start:
                yield Extent(offset, self._size_of[offset])

    def beside(self, start: int, end: int) -> Iterator[Extent]:
        """The extents that end at `start` and begin at `end`."""
        index = bisect_left(self._offsets, start) - 1
        if index >= 0 and (before := self._offsets[index]) + self._size_of[before] == start:
            yield Extent(before, self._size_of[before])
        if end in self._size_of:
            yield Extent(end, self._size_of[end])

    def shares(self, extent: Extent) -> Iterator[tuple[int, int]]:
        """The chunks under an extent, and how many of its bytes lie in each."""
        chunk_bytes, start = self.arena.chunk_bytes, extent.offset
        while start < extent.end:
            chunk = start // chunk_bytes
            stop = min(extent.end, (chunk + 1) * chunk_bytes)
            yield chunk, stop - start
            start = stop

    def _count(self, extent: Extent, sign: int) -> None:
        self.used_bytes += sign * extent.nbytes
        for chunk, nbytes in self.shares(extent):
            self.chunks[chunk] += sign * nbytes

    # ----------------------------------------------------------------------------------------------------------- chunks

    def take_over(self, chunks: range) -> Range:
        """Chunks from the arena with the holes beside them: no hole yet (`place_in`, `add_hole`)."""
        self.chunks.update(dict.fromkeys(chunks, 0))
        if self._is_poisoned:
            self.arena.bytes_of(chunks).fill_(POISON)
        return self.holes.merged(chunks.start * self.arena.chunk_bytes, chunks.stop * self.arena.chunk_bytes)

    def close(self, chunk: int) -> None:
        if chunk not in self._closed:
            chunk_bytes = self.arena.chunk_bytes
            self._closed[chunk] = self.holes.cut(chunk * chunk_bytes, (chunk + 1) * chunk_bytes)

    def open(self, chunk: int) -> None:
        for start, end in self._closed.pop(chunk):
            self.add_hole(start, end)

    def _add_free(self, chunk: int, start: int, end: int) -> None:
        if chunk not in self._closed:
            self.add_hole(start, end)
            return
        self._closed[chunk].append((start, end))
        if self.chunks[chunk] == 0:
            del self._closed[chunk]
            self._give_back([chunk])

    def add_hole(self, start: int, end: int) -> None:
        """A free range joins its neighbours, and the chunks that are free as a whole go back to the arena."""
        start, end = self.holes.merged(start, end)
        chunk_bytes = self.arena.chunk_bytes
        whole = _whole_chunks(start, end, chunk_bytes)
        if not whole:
            self.holes.add(start, end)
            return
        self._give_back(whole)
        for left, right in ((start, whole.start * chunk_bytes), (whole.stop * chunk_bytes, end)):
            if left < right:
                self.holes.add(left, right)

    def _give_back(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            assert self.chunks.pop(chunk) == 0, f"chunk {chunk} has extents"
            self.arena.give_back(Owner.ADAPTERS, [chunk])

    # ------------------------------------------------------------------------------------------------------------ tests

    def poison(self) -> None:
        self._is_poisoned = True
        for start, end in self._free_ranges():
            self.arena.memory[start:end].fill_(POISON)

    def _free_ranges(self) -> list[Range]:
        return [*self.holes, *(piece for pieces in self._closed.values() for piece in pieces)]

    def check_integrity(self) -> None:
        """Assert that extents and free ranges tile the lent chunks exactly, and poisoned ranges are untouched."""
        lent = self.arena.chunks_of(Owner.ADAPTERS)
        assert sorted(self.chunks) == lent, "pool and arena disagree on who has which chunk"
        self.holes.check_integrity()
        assert self._offsets == sorted(self._size_of)
        used = [(offset, offset + nbytes) for offset, nbytes in self._size_of.items()]
        assert self.used_bytes == sum(end - start for start, end in used) == sum(self.chunks.values())
        assert all(self.chunks[chunk] for chunk in self._closed), "an empty closed chunk did not go back"
        self._check_tiling(sorted([*used, *self._free_ranges()]), lent)
        for start, end in self.holes:
            whole = _whole_chunks(start, end, self.arena.chunk_bytes)
            assert not whole, f"[{start}, {end}) has chunks to give back"
            chunks = {start // self.arena.chunk_bytes, (end - 1) // self.arena.chunk_bytes}
            assert self._closed.keys().isdisjoint(chunks), f"[{start}, {end}) is a hole of a closed chunk"
        for start, end in self._free_ranges() if self._is_poisoned else ():
            is_clean = bool((self.arena.memory[start:end] == POISON).all())
            assert is_clean, f"something wrote into the free bytes [{start}, {end})"

    def _check_tiling(self, pieces: Sequence[Range], lent: Sequence[int]) -> None:
        total = sum(end - start for start, end in pieces)
        assert total == len(lent) * self.arena.chunk_bytes, "lent bytes are not all accounted for"
        last_end = 0
        for start, end in pieces:
            assert start % ALIGNMENT == 0 == end % ALIGNMENT, f"[{start}, {end}) is not aligned"
            assert last_end <= start < end, f"[{start}, {end}) overlaps what ends at {last_end}"
            under = {chunk for chunk, _ in self.shares(Extent(start, end - start))}
            assert self.chunks.keys() >= under, f"[{start}, {end}) is not lent"
            last_end = end


def _whole_chunks(start: int, end: int, chunk_bytes: int) -> range:
    """The chunks that lie in [start, end) as a whole."""
    return range(-(-start // chunk_bytes), end // chunk_bytes)


# --------------------------------------------------------------------------------------------------------------- holes


class Holes:
    """Disjoint free ranges [start, end) that do not touch. Not thread-safe."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # (size, start), sorted
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._by_size)

    def __iter__(self) -> Iterator[Range]:
        return iter(self._end_of.items())

    @property
    def largest(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    def add(self, start: int, end: int) -> None:
        """[start, end) is free; it touches no other range (`merged` sees to that)."""
        insort(self._by_size, (end - start, start))
        self._end_of[start] = end
        self._start_of[end] = start

    def take_best(self, size: int) -> Range:
        """Remove and return the smallest range of at least `size` (at most `largest`), the first of equals."""
        start = self._by_size[bisect_left(self._by_size, (size, 0))][1]
        return start, self._remove(start)

    def merged(self, start: int, end: int) -> tuple[int, int]:
        """[start, end) with the ranges that touch it, which are removed."""
        if start in self._start_of:
            start = self._start_of[start]
            self._remove(start)
        if end in self._end_of:
            end = self._remove(end)
        return start, end

    def cut(self, start: int, end: int) -> list[Range]:
        """Remove what is free inside [start, end), and return it; the rest of the ranges stays."""
        touched = [hole for hole in sorted(self) if hole[0] < end and start < hole[1]]
        for hole_start, hole_end in touched:
            self._remove(hole_start)
            if hole_start < start:
                self.add(hole_start, start)
            if end < hole_end:
                self.add(end, hole_end)
        return [(max(hole_start, start), min(hole_end, end)) for hole_start, hole_end in touched]

    def beside(self, start: int, end: int) -> tuple[int, int]:
        """The sizes of the ranges that end at `start` and begin at `end`; 0 for none."""
        before = start - self._start_of.get(start, start)
        return before, self._end_of.get(end, end) - end

    def check_integrity(self) -> None:
        assert self._by_size == sorted((end - start, start) for start, end in self._end_of.items())
        assert self._start_of == {end: start for start, end in self._end_of.items()}

    def _remove(self, start: int) -> int:
        end = self._end_of.pop(start)
        del self._start_of[end]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
        return end
