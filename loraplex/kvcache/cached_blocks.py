"""Free KV blocks that still hold a cached prefix, and which of them is lent next: shares of tenants in what is kept.

    victim = argmax over tenants with free cached blocks of  (blocks cached, free or in use) / weight

and of that tenant's blocks the one that was freed first. So a tenant keeps what it has up to its share of the KV cache,
however many prompts others send; with one tenant this is least recently used.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from loraplex.kvcache.prefix_cache import PrefixCache


class CachedBlocks:
    """Ordered as said above. The cache knows each block of it, and is asked how much its owner has.

    The owner that has most is found by a heap with an entry for each owner in `_said`, which says as much as it has or
    more: one that says more is put right when it comes to the top. Entries that `_said` does not confirm are dropped
    there, so that each costs once.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._free_of: dict[str, OrderedDict[int, None]] = {}
        self._owner_of: dict[int, str] = {}
        self._heap: list[tuple[float, str]] = []
        self._said: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._owner_of)

    def __contains__(self, kv_block: object) -> bool:
        return kv_block in self._owner_of

    def __iter__(self) -> Iterator[int]:
        """Owners that have most first, and of each what was freed first."""
        owners = sorted(self._free_of, key=self._cache.share_of, reverse=True)
        return (kv_block for owner in owners for kv_block in self._free_of[owner])

    def add(self, kv_block: int) -> None:
        owner = self._owner_of[kv_block] = self._cache.owner_of(kv_block)
        if owner not in self._free_of:
            self._free_of[owner] = OrderedDict()
            self.note(owner)
        self._free_of[owner][kv_block] = None

    def discard(self, kv_block: int) -> None:
        owner = self._owner_of.pop(kv_block, None)
        if owner is not None:
            del self._free_of[owner][kv_block]
            if not self._free_of[owner]:
                del self._free_of[owner], self._said[owner]

    def note(self, owner: str) -> None:
        """It may have more cached blocks than before."""
        if owner not in self._free_of:
            return
        share = self._cache.share_of(owner)
        if share > self._said.get(owner, -1.0):
            self._said[owner] = share
            heapq.heappush(self._heap, (-share, owner))
            if len(self._heap) > 64 + 4 * len(self._said):
                self._heap = [(-said, each) for each, said in self._said.items()]
                heapq.heapify(self._heap)

    def next(self) -> int:
        """The one to be lent; it stays until it is discarded."""
        while True:
            minus_said, owner = self._heap[0]
            if self._said.get(owner) != -minus_said:
                heapq.heappop(self._heap)
            elif (share := self._cache.share_of(owner)) < -minus_said:
                self._said[owner] = share
                heapq.heapreplace(self._heap, (-share, owner))
            else:
                return next(iter(self._free_of[owner]))

    def check_integrity(self) -> None:
        """Assert that the maps say the same, and that the heap says enough of each owner."""
        assert {kv_block: owner for owner, free in self._free_of.items() for kv_block in free} == self._owner_of
        assert self._said.keys() == self._free_of.keys()
        for owner, free in self._free_of.items():
            assert free, f"tenant {owner!r} is listed without a free block"
            assert (-self._said[owner], owner) in self._heap
            assert self._said[owner] >= self._cache.share_of(owner), f"the heap says too little of tenant {owner!r}"
        for kv_block, owner in self._owner_of.items():
            assert self._cache.owner_of(kv_block) == owner
