"""The adapters' side of an arena: extents of true size in borrowed chunks.

    LoRAMemoryPool   extents inside the adapters' chunks          best fit, 64-byte aligned

An extent may lie across the border of adjacent chunks, so that nothing is lost to rounding; one that is larger than a chunk
takes adjacent ones. A chunk without extents goes back to the arena at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from loraplex.kernels.plan import align
from loraplex.memory.care.moves import Move, MoveFinder
from loraplex.memory.space.arena import Arena, Extent, Owner
from loraplex.memory.space.space import Space


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Bytes of a pool. lent = used + free; `free_bytes` lie in holes of lent chunks, the largest of `largest_hole_bytes`.

    fragmentation := 1 - ceil(used / chunk) / chunks, the share of the lent chunks that perfect packing would give
    back (0 when nothing is lent). The rest of the last chunk is no fragmentation: it is there however well the extents are packed.
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
    ask_kv(num_chunks): asks the KV cache for chunks when the arena has none; returns how many came. It is called with this pool's
    lock held and may take the locks of the KV cache and of the arena.
    """

    def __init__(self, arena: Arena, ask_kv: Callable[[int], int] | None = None) -> None:
        self.arena = arena
        self.ask_kv = ask_kv
        self._space = Space(arena)
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> Extent | None:
        """An extent of `nbytes` rounded up to ALIGNMENT; None when neither the holes, nor the arena, nor the KV cache have room."""
        extents = self.allocate_all((nbytes,))
        return None if extents is None else extents[0]

    def allocate_all(self, sizes: Sequence[int]) -> tuple[Extent, ...] | None:
        """One extent for each size, side by side as far as there are such holes; or None and nothing changed."""
        aligned = [_aligned(nbytes) for nbytes in sizes]
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
        """Return an extent. Nothing may read it any more: what was launched before must be done (retired.py)."""
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
    def is_kv_in_the_way(self) -> bool:
        """Whether the KV cache has chunks that this pool may have, once requests end, or has them where adjacent ones are needed."""
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

    def is_closed(self, chunk: int) -> bool:
        """Whether the chunk takes no new extents: it is fenced, or compaction empties it."""
        return self._space.is_closed(chunk)

    def compaction_moves(self, max_bytes: int, may_move: Callable[[Extent], bool]) -> list[Move]:
        """The moves to make next, of one chunk or of one extent (moves.py); at most `max_bytes`. [] when nothing is to be had.

        Targets are lent; free the sources when nobody reads them any more. may_move is called with this pool's lock held.
        """
        with self._lock:
            return MoveFinder(self._space, max_bytes, may_move).find()

    def poison(self) -> None:
        """For tests: from now on everything that is free holds POISON, and `check_integrity` finds who wrote there."""
        with self._lock:
            self._space.poison()

    def check_integrity(self) -> None:
        """Assert that extents and free ranges tile the lent chunks exactly, once, and that poisoned ranges are untouched."""
        with self._lock:
            self._space.check_integrity()

    def _borrow(self, sizes: Sequence[int]) -> tuple[Extent, ...]:
        """Extents for the first of `sizes`, at least one, in chunks that are borrowed for it; () when there are none.

        The KV cache is asked for some as long as that helps.
        """
        num_chunks = math.ceil(sizes[0] / self.arena.chunk_bytes)
        extents = self._borrow_free(sizes)
        while not extents:
            is_allowed = self.arena.num_lent(Owner.ADAPTERS) + num_chunks <= self.arena.ceiling(Owner.ADAPTERS)
            if self.ask_kv is None or not is_allowed or not self.ask_kv(num_chunks):
                break
            extents = self._borrow_free(sizes)
        return extents

    def _borrow_free(self, sizes: Sequence[int]) -> tuple[Extent, ...]:
        """In free chunks of the arena: as many as hold the first size, or fewer beside a hole when the arena is nearly full."""
        for num_chunks in range(math.ceil(sizes[0] / self.arena.chunk_bytes), 0, -1):
            chunks = self.arena.lend(Owner.ADAPTERS, num_chunks)
            if chunks is None:
                continue
            start, end = self._space.take_over(chunks)
            if end - start >= sizes[0]:
                return self._space.place_in(start, end, sizes)
            self._space.give_up(start, end)
        return ()


def _aligned(nbytes: int) -> int:
    if nbytes < 1:
        raise ValueError(f"an extent needs at least one byte, got {nbytes}")
    return align(nbytes)
