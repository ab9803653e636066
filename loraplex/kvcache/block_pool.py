"""KV blocks with reference counts. A block whose count is zero is free; it keeps its content until it is lent again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """`num_blocks` equal blocks, lent by number. Free blocks are reused least recently freed first.

    `on_reuse(kv_block)` is called when a free block is lent anew, so that a cache that remembers its content forgets it.
    Pure bookkeeping: the memory itself belongs to the arena.
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[int], None] | None = None) -> None:
        assert num_blocks > 0, f"a pool of {num_blocks} blocks"
        self.num_blocks = num_blocks
        self._on_reuse = on_reuse
        self._num_refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def num_refs(self, kv_block: int) -> int:
        return self._num_refs[kv_block]

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing changed) when fewer are free."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for kv_block in blocks:
            self._num_refs[kv_block] = 1
            if self._on_reuse is not None:
                self._on_reuse(kv_block)
        return blocks

    def share(self, kv_block: int) -> None:
        """One more reference; a free block that still has its content comes back into use."""
        if self._num_refs[kv_block] == 0:
            del self._free[kv_block]
        self._num_refs[kv_block] += 1

    def release(self, kv_blocks: Iterable[int]) -> None:
        """One reference less for each; give the last block of a sequence first, so that prefixes live longest."""
        for kv_block in kv_blocks:
            assert self._num_refs[kv_block] > 0, f"KV block {kv_block} is released more often than acquired"
            self._num_refs[kv_block] -= 1
            if self._num_refs[kv_block] == 0:
                self._free[kv_block] = None

    def reuse_first(self, kv_block: int) -> None:
        """A free block whose content is worthless is lent before the others."""
        if kv_block in self._free:
            self._free.move_to_end(kv_block, last=False)

    def check_integrity(self) -> None:
        """Assert that a block is free exactly when nobody refers to it."""
        for kv_block, refs in enumerate(self._num_refs):
            assert refs >= 0, f"KV block {kv_block} has {refs} references"
            assert (refs == 0) == (kv_block in self._free), (
                f"KV block {kv_block}: {refs} references, free list disagrees"
            )
