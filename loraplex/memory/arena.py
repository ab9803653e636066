"""One flat piece of memory in chunks, lent to the KV cache and to adapters; the adapters' side hands out extents.

    Arena            chunks: who has which                        KV takes them from the front, adapters from the back
    LoRAMemoryPool   extents inside the adapters' chunks          best fit, true size, 64-byte aligned

An extent may lie across the border of adjacent chunks, so that nothing is lost to rounding; one that is larger than a chunk
takes adjacent ones. A chunk without extents goes back to the arena at once. What free memory holds is undefined: `poison()`
fills it with 0xFF (NaN in every float dtype), so that a test sees who reads or writes what it does not own.
"""

from __future__ import annotations

import enum
import math
import threading
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from loraplex.kernels.plan import ALIGNMENT

POISON = 0xFF
"""The byte of poisoned memory: all ones is NaN in float32, float16 and bfloat16."""


class Owner(enum.StrEnum):
    """Who a chunk is lent to."""

    KV = "kv"
    ADAPTERS = "adapters"


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [offset, offset + nbytes) of an arena; both are multiples of ALIGNMENT."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class Arena:
    """A flat uint8 tensor `memory` of `num_chunks` chunks of `chunk_bytes`; `num_bytes` is rounded up to whole chunks.

    Thread-safe. `is_pinned`: page-locked host memory, for copies to a GPU. The memory is not touched before it is written.
    """

    def __init__(
        self, num_bytes: int, chunk_bytes: int, device: torch.device | str, *, is_pinned: bool = False
    ) -> None:
        if num_bytes < 1 or chunk_bytes < 1 or chunk_bytes % ALIGNMENT:
            raise ValueError(
                f"an arena needs bytes and chunks of a multiple of {ALIGNMENT} bytes, got {num_bytes} and {chunk_bytes}"
            )
        self.chunk_bytes = chunk_bytes
        self.num_chunks = math.ceil(num_bytes / chunk_bytes)
        self.device = torch.device(device)
        self.memory = torch.empty(
            self.num_chunks * chunk_bytes, dtype=torch.uint8, device=self.device, pin_memory=is_pinned
        )
        assert self.memory.data_ptr() % ALIGNMENT == 0, "the allocator of this device aligns to less than 64 bytes"
        self._owners: list[Owner | None] = [None] * self.num_chunks
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self.num_chunks * self.chunk_bytes

    @property
    def num_free_chunks(self) -> int:
        return self._owners.count(None)

    def chunks_of(self, owner: Owner) -> list[int]:
        """The chunks lent to `owner`, ascending."""
        with self._lock:
            return [chunk for chunk, has in enumerate(self._owners) if has is owner]

    def owners(self) -> list[Owner | None]:
        """Who has which chunk, in order; None is free."""
        with self._lock:
            return self._owners.copy()

    def lend(self, owner: Owner, num_chunks: int = 1) -> range | None:
        """`num_chunks` adjacent free chunks, lent to `owner`; None when there are none. KV: the first ones, adapters: the last."""
        with self._lock:
            chunks = self._find(num_chunks, from_end=owner is Owner.ADAPTERS)
            if chunks is not None:
                self._set(chunks, owner)
            return chunks

    def give_back(self, owner: Owner, chunks: Iterable[int]) -> None:
        with self._lock:
            for chunk in chunks:
                assert self._owners[chunk] is owner, f"chunk {chunk} belongs to {self._owners[chunk]}, not to {owner}"
                self._owners[chunk] = None

    def bytes_of(self, chunks: range) -> torch.Tensor:
        """The memory of adjacent chunks, uint8."""
        return self.memory[chunks.start * self.chunk_bytes : chunks.stop * self.chunk_bytes]

    def view(self, extent: Extent) -> torch.Tensor:
        """The memory of an extent, uint8."""
        return self.memory[extent.offset : extent.end]

    def _find(self, num_chunks: int, from_end: bool) -> range | None:
        order = range(self.num_chunks - 1, -1, -1) if from_end else range(self.num_chunks)
        length = 0
        for chunk in order:
            length = length + 1 if self._owners[chunk] is None else 0
            if length == num_chunks:
                start = chunk if from_end else chunk - num_chunks + 1
                return range(start, start + num_chunks)
        return None

    def _set(self, chunks: range, owner: Owner) -> None:
        for chunk in chunks:
            self._owners[chunk] = owner


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


class LoRAMemoryPool:
    """Extents for adapters in chunks borrowed from an arena. Thread-safe.

    An extent takes the end of the smallest hole that holds it: what is left adjoins the next chunk to be borrowed.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._extents: dict[int, int] = {}  # offset -> nbytes
        self._holes = _Holes()
        self._chunks: set[int] = set()
        self._used_bytes = 0
        self._is_poisoned = False
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> Extent | None:
        """An extent of `nbytes` rounded up to ALIGNMENT; None when neither the holes nor the arena have room."""
        if nbytes < 1:
            raise ValueError(f"an extent needs at least one byte, got {nbytes}")
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            return self._allocate(size)

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
            assert self._extents.get(extent.offset) == extent.nbytes, f"{extent} is not lent by this pool"
            del self._extents[extent.offset]
            self._used_bytes -= extent.nbytes
            if self._is_poisoned:
                self.arena.view(extent).fill_(POISON)
            self._add_hole(extent.offset, extent.end)

    def free_all(self, extents: Iterable[Extent]) -> None:
        for extent in extents:
            self.free(extent)

    def view(self, extent: Extent) -> torch.Tensor:
        """The memory of an extent, uint8."""
        return self.arena.view(extent)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def stats(self) -> PoolStats:
        with self._lock:
            return PoolStats(
                lent_bytes=len(self._chunks) * self.arena.chunk_bytes,
                used_bytes=self._used_bytes,
                largest_hole_bytes=self._holes.largest,
                num_chunks=len(self._chunks),
                num_extents=len(self._extents),
                num_holes=len(self._holes),
            )

    def poison(self) -> None:
        """For tests: from now on everything that is free holds POISON, and `check_integrity` finds who wrote there."""
        with self._lock:
            self._is_poisoned = True
            for start, end in self._holes:
                self.arena.memory[start:end].fill_(POISON)

    def check_integrity(self) -> None:
        """Assert that extents and holes tile the lent chunks exactly, once, and that poisoned holes are untouched."""
        with self._lock:
            lent = self.arena.chunks_of(Owner.ADAPTERS)
            assert sorted(self._chunks) == lent, "pool and arena disagree on who has which chunk"
            self._holes.check_integrity()
            used = [(offset, offset + nbytes) for offset, nbytes in self._extents.items()]
            assert self._used_bytes == sum(end - start for start, end in used)
            self._check_tiling(sorted([*used, *self._holes]), lent)
            for start, end in self._holes:
                self._check_hole(start, end)

    def _check_tiling(self, pieces: Sequence[tuple[int, int]], lent: Sequence[int]) -> None:
        chunk_bytes = self.arena.chunk_bytes
        total = sum(end - start for start, end in pieces)
        assert total == len(lent) * chunk_bytes, "lent bytes are not all accounted for"
        last_end = 0
        for start, end in pieces:
            assert start % ALIGNMENT == 0 == end % ALIGNMENT, f"[{start}, {end}) is not aligned"
            assert last_end <= start < end, f"[{start}, {end}) overlaps what ends at {last_end}"
            under = range(start // chunk_bytes, (end - 1) // chunk_bytes + 1)
            assert self._chunks.issuperset(under), f"[{start}, {end}) is not lent"
            last_end = end

    def _check_hole(self, start: int, end: int) -> None:
        assert not _whole_chunks(start, end, self.arena.chunk_bytes), f"[{start}, {end}) has chunks to give back"
        if self._is_poisoned:
            is_clean = bool((self.arena.memory[start:end] == POISON).all())
            assert is_clean, f"somebody wrote into the free bytes [{start}, {end})"

    def _allocate(self, size: int) -> Extent | None:
        hole = self._holes.take_best(size)
        if hole is None and self._borrow(size):
            hole = self._holes.take_best(size)
        if hole is None:
            return None
        start, end = hole
        if start < end - size:
            self._add_hole(start, end - size)
        self._extents[end - size] = size
        self._used_bytes += size
        return Extent(end - size, size)

    def _borrow(self, size: int) -> bool:
        """Borrow chunks until a hole holds `size`: as many as hold it, or fewer beside a hole when the arena is nearly full."""
        chunk_bytes = self.arena.chunk_bytes
        for num_chunks in range(math.ceil(size / chunk_bytes), 0, -1):
            chunks = self.arena.lend(Owner.ADAPTERS, num_chunks)
            if chunks is None:
                continue
            self._chunks.update(chunks)
            if self._is_poisoned:
                self.arena.bytes_of(chunks).fill_(POISON)
            start, end = self._holes.merged(chunks.start * chunk_bytes, chunks.stop * chunk_bytes)
            if end - start >= size:
                self._holes.add(start, end)
                return True
            self._add_hole(start, end)  # gives the chunks back
        return False

    def _add_hole(self, start: int, end: int) -> None:
        """[start, end) is free: it joins its neighbours, and the chunks that are free as a whole go back to the arena."""
        start, end = self._holes.merged(start, end)
        chunk_bytes = self.arena.chunk_bytes
        whole = _whole_chunks(start, end, chunk_bytes)
        if not whole:
            self._holes.add(start, end)
            return
        self._chunks.difference_update(whole)
        self.arena.give_back(Owner.ADAPTERS, whole)
        for left, right in ((start, whole.start * chunk_bytes), (whole.stop * chunk_bytes, end)):
            if left < right:
                self._holes.add(left, right)


class _Holes:
    """Disjoint free ranges [start, end), found by size (best fit), by start and by end."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # (size, start), sorted
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._by_size)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._end_of.items())

    @property
    def largest(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    def add(self, start: int, end: int) -> None:
        insort(self._by_size, (end - start, start))
        self._end_of[start] = end
        self._start_of[end] = start

    def take_best(self, size: int) -> tuple[int, int] | None:
        """Remove and return the smallest range of at least `size`; among equals the first."""
        index = bisect_left(self._by_size, (size, 0))
        if index == len(self._by_size):
            return None
        start = self._by_size[index][1]
        return start, self._remove(start)

    def merged(self, start: int, end: int) -> tuple[int, int]:
        """[start, end) with the ranges that touch it, which are removed."""
        if start in self._start_of:
            start = self._start_of[start]
            self._remove(start)
        if end in self._end_of:
            end = self._remove(end)
        return start, end

    def _remove(self, start: int) -> int:
        end = self._end_of.pop(start)
        del self._start_of[end]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
        return end

    def check_integrity(self) -> None:
        assert self._by_size == sorted((end - start, start) for start, end in self._end_of.items())
        assert self._start_of == {end: start for start, end in self._end_of.items()}


def _whole_chunks(start: int, end: int, chunk_bytes: int) -> range:
    """The chunks that lie in [start, end) as a whole."""
    return range(-(-start // chunk_bytes), end // chunk_bytes)
