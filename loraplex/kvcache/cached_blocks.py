"""Free KV blocks that still hold a cached prefix, and which of them is lent next: shares of tenants in what is kept.

    victim = argmax over tenants with free cached blocks of  (blocks cached, free or in use) / weight

and of that tenant's blocks the one that was freed first. So a tenant keeps what it has up to its share of the KV cache,
however many prompts others send; with one tenant this is least recently used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from loraplex.bounds.largest import Largest
from loraplex.kvcache.prefix_cache import PrefixCache


class CachedBlocks:
    """Ordered as said above. The cache knows each block of it, and is asked how much its owner has."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._free_of: dict[str, OrderedDict[int, None]] = {}
        self._owner_of: dict[int, str] = {}
        self._largest = Largest(cache.share_of)

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
                del self._free_of[owner]
                self._largest.forget(owner)

    def note(self, owner: str) -> None:
        """It may have more cached blocks than before."""
        if owner in self._free_of:
            self._largest.note(owner)

    def next(self) -> int:
        """The one to be lent; it stays until it is discarded."""
        return next(iter(self._free_of[self._largest.owner()]))

    def check_integrity(self) -> None:
        """Assert that the maps say the same."""
        assert {kv_block: owner for owner, free in self._free_of.items() for kv_block in free} == self._owner_of
        assert all(self._free_of.values()), "a tenant is listed without a free block"
        self._largest.check_integrity(self._free_of)
        for kv_block, owner in self._owner_of.items():
            assert self._cache.owner_of(kv_block) == owner
