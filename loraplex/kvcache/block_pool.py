"""KV blocks with reference counts, in chunks of memory that come and go. A block whose count is zero is free; it keeps
its content until it is lent again.

Chunk c is blocks [c * blocks_per_chunk, (c + 1) * blocks_per_chunk): a block's number says where it is, for any owner
of its chunk.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from loraplex.kvcache.cached_blocks import CachedBlocks
from loraplex.kvcache.prefix_cache import PrefixCache


class ChunkLender(Protocol):
    """The arena as the KV cache sees it. Thread-safe; it keeps to floors and ceilings."""

    @property
    def floor(self) -> int:
        """Chunks that the KV cache never gives back."""
        ...

    @property
    def ceiling(self) -> int:
        """The most chunks that it can have."""
        ...

    def lend(self) -> int | None:
        """A free chunk; None when there is none for the KV cache."""
        ...

    def lend_lower(self, chunk: int) -> int | None:
        """The first free chunk before `chunk`, to which it moves: it is given back next. None when it is in front of
        all free ones."""
        ...

    def give_back(self, chunk: int) -> None: ...

    def fence(self, chunk: int) -> bool:
        """Never lend the chunk again; whether the KV cache has it, and must give it back."""
        ...


class FixedChunks:
    """`num_chunks` chunks for the KV cache alone."""

    def __init__(self, num_chunks: int) -> None:
        self.floor = self.ceiling = num_chunks
        self._free = list(range(num_chunks))
        heapq.heapify(self._free)
        self._fenced: set[int] = set()

    def lend(self) -> int | None:
        return heapq.heappop(self._free) if self._free else None

    def lend_lower(self, chunk: int) -> int | None:
        return self.lend() if self._free and self._free[0] < chunk else None

    def give_back(self, chunk: int) -> None:
        if chunk not in self._fenced:
            heapq.heappush(self._free, chunk)

    def fence(self, chunk: int) -> bool:
        self._fenced.add(chunk)
        is_lent = chunk not in self._free
        if not is_lent:
            self._free.remove(chunk)
            heapq.heapify(self._free)
        return is_lent


class BlockPool:
    """Blocks of the chunks that a lender has lent. The floor is taken at once, more by need.

    Lent first: free blocks without cached content (the last freed first: memory that was touched is touched again),
    then those of another chunk, then free blocks that `cache` knows, in the order of `CachedBlocks`. Not thread-safe.
    Pure bookkeeping: the memory itself belongs to the arena.
    """

    def __init__(self, chunks: ChunkLender, blocks_per_chunk: int, cache: PrefixCache | None = None) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self._lender = chunks
        self._cache = cache
        self._num_refs: dict[int, int] = {}  # of the blocks of the chunks that it has
        self._num_used: dict[int, int] = {}  # chunk -> blocks with references
        self._closed: set[int] = set()  # fenced chunks: their free blocks have no user
        self._worthless: OrderedDict[int, None] = OrderedDict()  # free, without cached content
        self._cached = CachedBlocks(PrefixCache() if cache is None else cache)  # free, with cached content
        while len(self._num_used) < chunks.floor and self._grow():
            pass

    @property
    def num_blocks(self) -> int:
        """At the ceiling."""
        return self._lender.ceiling * self.blocks_per_chunk

    @property
    def num_used_blocks(self) -> int:
        return len(self._num_refs) - len(self._worthless) - len(self._cached)

    @property
    def num_chunks(self) -> int:
        """Chunks that it has now."""
        return len(self._num_used)

    @property
    def num_above_floor(self) -> int:
        """Chunks that may be given back once they are unused."""
        return max(0, len(self._num_used) - len(self._closed) - self._lender.floor)

    def num_refs(self, kv_block: int) -> int:
        return self._num_refs[kv_block]

    def blocks(self) -> Collection[int]:
        """All blocks of the chunks that it has."""
        return self._num_refs.keys()

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing lent) when fewer can be had."""
        while len(self._worthless) < count and self._grow():
            pass
        if count > len(self._worthless) + len(self._cached):
            return None
        return [self._lend() for _ in range(count)]

    def share(self, kv_block: int) -> None:
        """One more reference; a free block that still has its content comes back into use."""
        if self._num_refs[kv_block] == 0:
            self._take_out(kv_block)
            self._num_used[self._chunk_of(kv_block)] += 1
        self._num_refs[kv_block] += 1

    def release(self, kv_blocks: Iterable[int]) -> None:
        """One reference less for each; give the last block of a sequence first, so that prefixes live longest."""
        worthless: list[int] = []
        for kv_block in kv_blocks:
            num_left = self._num_refs[kv_block] - 1
            assert num_left >= 0, f"KV block {kv_block} is released more often than acquired"
            self._num_refs[kv_block] = num_left
            if num_left:
                continue
            chunk = self._chunk_of(kv_block)
            self._num_used[chunk] -= 1
            if chunk in self._closed:
                self._free_closed(kv_block)
            elif self._cache is not None and self._cache.has(kv_block):
                self._cached.add(kv_block)
            else:
                worthless.append(kv_block)
        for kv_block in reversed(worthless):
            self._worthless[kv_block] = None
            self._worthless.move_to_end(kv_block, last=False)

    def reuse_first(self, kv_block: int) -> None:
        """The cache has forgotten the content of a block: if it is free, it is lent before the others."""
        if kv_block in self._cached:
            self._cached.discard(kv_block)
            self._worthless[kv_block] = None
            self._worthless.move_to_end(kv_block, last=False)

    # ----------------------------------------------------------------------------------------------------------- chunks

    def give_back(self, num_chunks: int) -> int:
        """Return chunks without references, those with least cached content first; never below the floor.

        If those are too few, others are exchanged for chunks in front, so that what is free behind is adjacent. Returns
        how many came free.
        """
        idle = [chunk for chunk, used in self._num_used.items() if used == 0]
        most = min(num_chunks, self.num_above_floor)
        leaving = heapq.nsmallest(most, idle, key=lambda chunk: (self._num_cached(chunk), -chunk))
        for chunk in leaving:
            self._return(chunk)
        num_exchanged = 0
        for chunk in sorted(set(idle) - set(leaving), reverse=True)[: num_chunks - len(leaving)]:
            if self.move_to_front(chunk) is not None:
                self._return(chunk)
                num_exchanged += 1
        return len(leaving) + num_exchanged

    def move_to_front(self, chunk: int) -> Sequence[int] | None:
        """The blocks of a chunk nearer to the front, which is taken in place of this one; None when there is none."""
        lower = self._lender.lend_lower(chunk)
        if lower is None:
            return None
        self._add(lower)
        return self._blocks_of(lower)

    def farthest(self, num_chunks: int) -> list[int]:
        """The last chunks, the last one first."""
        return heapq.nlargest(num_chunks, self._num_used.keys() - self._closed)

    def give_back_chunk(self, chunk: int) -> bool:
        """Return this one, whose blocks were moved; False when it went to be fenced, and has no next owner."""
        if chunk not in self._num_used:
            return False
        self._return(chunk)
        return True

    def num_chunks_lacking(self, count: int) -> int:
        """How many chunks more it takes to allocate `count` blocks; 0 when the ceiling does not allow them."""
        lacking = count - len(self._worthless) - len(self._cached)
        num_chunks = -(-lacking // self.blocks_per_chunk)
        return num_chunks if 0 < num_chunks <= self._lender.ceiling - self.num_chunks else 0

    def has_more(self, owner: str) -> None:
        """The cache knows more blocks of this owner than before."""
        self._cached.note(owner)

    def is_usable(self, kv_block: int) -> bool:
        """Whether its content may be shared: its chunk is not fenced."""
        return self._chunk_of(kv_block) not in self._closed

    def fence(self, chunk: int) -> None:
        """Never use the chunk again: its free blocks go now, the others when they are released. No further request
        shares what is in it."""
        if chunk in self._closed or not self._lender.fence(chunk):
            return
        self._closed.add(chunk)
        for kv_block in self._blocks_of(chunk):
            self._forget(kv_block)
            if self._num_refs[kv_block] == 0:
                self._free_closed(kv_block)

    def sparsest(self, num_chunks: int) -> list[int]:
        """Chunks to be vacated: fenced ones, and as many others as the floor allows, fewest references first."""
        fenced = [chunk for chunk in self._closed if self._num_used[chunk]]
        most = min(num_chunks, self.num_above_floor)
        others = [chunk for chunk in self._num_used if chunk not in self._closed]
        return fenced + heapq.nsmallest(most, others, key=lambda chunk: (self._num_used[chunk], -chunk))

    def used_blocks_of(self, chunk: int) -> list[int]:
        return [kv_block for kv_block in self._blocks_of(chunk) if self._num_refs.get(kv_block)]

    def free_blocks(self, besides: Collection[int]) -> deque[int]:
        """Of chunks that are not `besides`, in the order in which they are lent."""
        order, others = (*self._worthless, *self._cached), set(besides)
        return deque(kv_block for kv_block in order if self._chunk_of(kv_block) not in others)

    def free_blocks_of(self, chunk: int) -> list[int]:
        return [kv_block for kv_block in self._blocks_of(chunk) if self._num_refs.get(kv_block) == 0]

    def take(self, kv_blocks: Sequence[int]) -> Sequence[int]:
        """These free blocks, with one reference each."""
        for kv_block in kv_blocks:
            self.share(kv_block)
            self._forget(kv_block)
        return kv_blocks

    def hand_over(self, source: int, target: int) -> None:
        """`target`, which was taken for it, has the content, the references and the cache's place of `source` now."""
        assert self._num_refs[target] == 1, f"KV block {target} is shared"
        self._num_refs[target] = self._num_refs[source]
        if self._cache is not None:
            self._cache.rename(source, target)
        self._num_refs[source] = 1
        self.release([source])

    # ------------------------------------------------------------------------------------------------------- inner part

    def _grow(self) -> bool:
        chunk = self._lender.lend()
        if chunk is not None:
            self._add(chunk)
        return chunk is not None

    def _add(self, chunk: int) -> None:
        self._num_used[chunk] = 0
        for kv_block in self._blocks_of(chunk):
            self._num_refs[kv_block] = 0
            self._worthless[kv_block] = None

    def _lend(self) -> int:
        kv_block = next(iter(self._worthless)) if self._worthless else self._cached.next()
        self._take_out(kv_block)
        self._forget(kv_block)
        self._num_refs[kv_block] = 1
        self._num_used[self._chunk_of(kv_block)] += 1
        return kv_block

    def _return(self, chunk: int) -> None:
        for kv_block in self._blocks_of(chunk):
            self._forget(kv_block)
            del self._num_refs[kv_block]
            self._take_out(kv_block)
        del self._num_used[chunk]
        self._lender.give_back(chunk)

    def _free_closed(self, kv_block: int) -> None:
        chunk = self._chunk_of(kv_block)
        del self._num_refs[kv_block]
        self._take_out(kv_block)
        if not any(each in self._num_refs for each in self._blocks_of(chunk)):
            self._closed.discard(chunk)
            del self._num_used[chunk]
            self._lender.give_back(chunk)

    def _take_out(self, kv_block: int) -> None:
        """Of the free ones, if it is one."""
        self._worthless.pop(kv_block, None)
        self._cached.discard(kv_block)

    def _forget(self, kv_block: int) -> None:
        if self._cache is not None:
            self._cache.forget(kv_block)

    def _num_cached(self, chunk: int) -> int:
        return sum(kv_block in self._cached for kv_block in self._blocks_of(chunk))

    def _chunk_of(self, kv_block: int) -> int:
        return kv_block // self.blocks_per_chunk

    def _blocks_of(self, chunk: int) -> Sequence[int]:
        return range(chunk * self.blocks_per_chunk, (chunk + 1) * self.blocks_per_chunk)

    def check_integrity(self) -> None:
        """Assert that a block is free exactly when it has no reference, in the right list, and that chunks add up."""
        assert self._worthless.keys().isdisjoint(self._cached)
        self._cached.check_integrity()
        for kv_block, refs in self._num_refs.items():
            assert refs >= 0, f"KV block {kv_block} has {refs} references"
            is_cached = self._cache is not None and self._cache.has(kv_block)
            assert (refs == 0) == (kv_block in self._worthless or kv_block in self._cached), (
                f"KV block {kv_block}: {refs} references, free list disagrees"
            )
            assert refs > 0 or is_cached == (kv_block in self._cached), f"KV block {kv_block} is in the wrong free list"
        assert self._closed <= self._num_used.keys()
        for chunk, used in self._num_used.items():
            refs_of = [self._num_refs.get(kv_block) for kv_block in self._blocks_of(chunk)]
            assert used == sum(bool(refs) for refs in refs_of), f"chunk {chunk} has not {used} used blocks"
            is_closed = chunk in self._closed
            assert used > 0 if is_closed else None not in refs_of, f"chunk {chunk} lacks blocks, or should have gone"
        num_gone = sum(kv_block not in self._num_refs for chunk in self._closed for kv_block in self._blocks_of(chunk))
        assert len(self._num_refs) + num_gone == len(self._num_used) * self.blocks_per_chunk
