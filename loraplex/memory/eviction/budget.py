"""What a tier may hold, and holds: bytes and adapters, and once what several adapters share.

    of its own   an adapter's extents: taken with its place, given back when it leaves
    shared       the extent of its projections: taken by the first adapter that reads it, given back by the last

A load brings projections in an extent of its own. When it is done and the host has an equal one, byte for byte, that of
the load goes back at once (`HostCache.share`). So nothing is written where kernels read, a load never waits for another
one, and what is damaged or only claims to be equal is shared with no one. The shared extent does not move: several
records name it. Not thread-safe: the store calls it under its lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from loraplex.core import Tier
from loraplex.memory.eviction.policies import EvictionPolicy
from loraplex.memory.residency.records import Place, StoredWeights
from loraplex.memory.space.arena import Arena, Extent, Owner
from loraplex.memory.space.pool import LoRAMemoryPool
from loraplex.memory.weights.packing import PackedLayout


def most_bytes(arena: Arena) -> int:
    """All that adapters may ever have of an arena."""
    return arena.ceiling(Owner.ADAPTERS) * arena.chunk_bytes


def together_nbytes(contents: Iterable[StoredWeights]) -> int:
    """Of those that were ever loaded, beside each other: projections count once."""
    known = [each.layout for each in contents if each.layout is not None]
    shared = {each.projections.digest: each.shared_nbytes for each in known if each.projections is not None}
    return sum(each.own_nbytes for each in known) + sum(shared.values())


@dataclass(eq=False)
class Budget:
    """Bytes and adapters that a tier may hold, and holds; `policy` has the digests in it by their use.

    `setting` is what a user changes to have more. sharers: of each shared extent, how many adapters here read it.
    """

    tier: Tier
    setting: str
    max_bytes: int
    max_adapters: int | None
    policy: EvictionPolicy
    used_bytes: int = 0
    num_adapters: int = 0
    sharers: Counter[Extent] = field(default_factory=Counter)

    def allows(self, nbytes: int, used_bytes: int, num_adapters: int) -> bool:
        """Whether one more adapter of `nbytes` would fit beside `num_adapters` others of `used_bytes`."""
        has_place = self.max_adapters is None or num_adapters < self.max_adapters
        return has_place and used_bytes + nbytes <= self.max_bytes

    def fits(self, nbytes: int) -> bool:
        return self.allows(nbytes, self.used_bytes, self.num_adapters)

    def take(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        self.num_adapters += 1

    def give(self, nbytes: int) -> None:
        self.used_bytes -= nbytes
        self.num_adapters -= 1
        assert self.used_bytes >= 0 <= self.num_adapters, f"{self.tier} tier: more was returned than taken"

    def join(self, shared: Extent | None) -> None:
        """One more adapter reads it."""
        if shared is not None:
            self.used_bytes += 0 if self.sharers[shared] else shared.nbytes
            self.sharers[shared] += 1

    def part(self, shared: Extent | None) -> tuple[Extent, ...]:
        """One less; the extent when that was the last."""
        if shared is None:
            return ()
        self.sharers[shared] -= 1
        if self.sharers[shared]:
            return ()
        del self.sharers[shared]
        self.used_bytes -= shared.nbytes
        return (shared,)

    def freed_by(self, victim: StoredWeights, leaving: Counter[Extent | None]) -> int:
        """Bytes that come back when it leaves, too. leaving: how often those before it read which shared extent."""
        shared = victim.shared
        is_last = shared is not None and leaving[shared] + 1 == self.sharers[shared]
        return victim.own_nbytes + (shared.nbytes if shared is not None and is_last else 0)


class HostCache(Budget):
    """Packed weights at rest, in extents of `pool`; bounded in bytes and optionally in number."""

    def __init__(self, pool: LoRAMemoryPool, max_bytes: int, max_adapters: int | None, policy: EvictionPolicy) -> None:
        super().__init__(Tier.HOST, "host_memory_bytes", min(max_bytes, most_bytes(pool.arena)), max_adapters, policy)
        self.pool = pool
        self._by_content: dict[str, Extent] = {}

    def allocate(self, sizes: Sequence[int]) -> Place | None:
        """A place for an adapter, or None: over budget, or no such pieces of memory."""
        nbytes = sum(sizes)
        extents = self.pool.allocate_all(sizes) if self.fits(nbytes) else None
        if extents is None:
            return None
        self.take(nbytes)
        return Place(extents)

    def share(self, place: Place, layout: PackedLayout) -> Place:
        """The place of an adapter that was loaded into this one: its projections are where their equals are."""
        if layout.projections is None:
            return place
        *own, brought = place.extents
        shared = self._by_content.get(layout.projections.digest, brought)
        if shared is not brought and not torch.equal(self.pool.view(shared), self.pool.view(brought)):
            shared = brought
        self._by_content[layout.projections.digest] = shared
        self.used_bytes -= brought.nbytes
        self.join(shared)
        if shared is not brought:
            self.pool.free(brought)  # no kernel reads it
        return replace(place, extents=tuple(own), shared=shared)

    def shared_of(self, layout: PackedLayout) -> Extent | None:
        """Where an adapter that is loaded now would find its projections."""
        return None if layout.projections is None else self._by_content.get(layout.projections.digest)

    def part(self, shared: Extent | None) -> tuple[Extent, ...]:
        last = super().part(shared)
        self.disown(last)
        return last

    def disown(self, extents: Iterable[Extent]) -> None:
        """What is loaded from now on does not share these; they go with the adapters that read them."""
        gone = set(extents)
        for digest in [digest for digest, shared in self._by_content.items() if shared in gone]:
            del self._by_content[digest]
