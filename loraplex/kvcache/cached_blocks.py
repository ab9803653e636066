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

    The owner that has most is found by a heap whose entries may be out of date: one that says too much is put right
    when it comes to the top, and `note` adds one where an owner has more than before.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._free_of: dict[str, OrderedDict[int, None]] = {}
        self._owner_of: dict[int, str] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._owner_of)

    def __contains__(self, kv_block: object) -> bool:
        return kv_block in self._owner_of

    def __iter__(self) -> Iterator[int]:
        """Owners that have most first, and of each what was freed first."""
        owners = sorted(self._free_of, key=self._entry_of)
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
                del self._free_of[owner]

    def note(self, owner: str) -> None:
        """It may have more cached blocks than before."""
        if owner in self._free_of:
            heapq.heappush(self._heap, self._entry_of(owner))
            if len(self._heap) > 64 + 4 * len(self._free_of):
                self._heap = [self._entry_of(each) for each in self._free_of]
                heapq.heapify(self._heap)

    def next(self) -> int:
        """The one to be lent; it stays until it is discarded."""
        while True:
            found = self._heap[0]
            if found[1] not in self._free_of:
                heapq.heappop(self._heap)
            elif found != (now := self._entry_of(found[1])):
                heapq.heapreplace(self._heap, now)
            else:
                return next(iter(self._free_of[found[1]]))

    def _entry_of(self, owner: str) -> tuple[float, str]:
        return -self._cache.share_of(owner), owner

    def check_integrity(self) -> None:
        """Assert that the maps say the same, and that the heap has an entry for each owner that says enough."""
        assert {kv_block: owner for owner, free in self._free_of.items() for kv_block in free} == self._owner_of
        most = dict[str, float]()
        for minus_share, owner in self._heap:
            most[owner] = max(-minus_share, most.get(owner, 0.0))
        for owner, free in self._free_of.items():
            assert free, f"tenant {owner!r} is listed without a free block"
            assert most.get(owner, -1.0) >= self._cache.share_of(owner), f"the heap says too little of tenant {owner!r}"
        for kv_block, owner in self._owner_of.items():
            assert self._cache.owner_of(kv_block) == owner
