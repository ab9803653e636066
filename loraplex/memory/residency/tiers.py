"""The two tiers in memory, as budgets over extents.

On a CPU both are the same memory: an extent of the host cache is "on the device" while rows of the slot table point at
it, so the device budget bounds those and the host budget both. On another device the device cache has a pool of its own
and weights are copied. Not thread-safe: the store calls them under its lock.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from loraplex.core import Tier
from loraplex.kernels.checksum import Checksums
from loraplex.kernels.plan import SlotTable
from loraplex.kernels.slices import SlotImage
from loraplex.memory.eviction.budget import Budget, HostCache
from loraplex.memory.eviction.policies import EvictionPolicy
from loraplex.memory.residency.records import Place, StoredWeights
from loraplex.memory.residency.slot_changes import BlockPlace, SlotChange, SlotChanges
from loraplex.memory.space.arena import Extent
from loraplex.memory.space.pool import LoRAMemoryPool
from loraplex.memory.weights.compression import CompressedCopies
from loraplex.memory.weights.copies import CopyEngine
from loraplex.memory.weights.disk_cache import DiskCache
from loraplex.memory.weights.packing import PackedLayout

MAX_IMAGES = 64
"""Images of layouts that are kept: one for each rank and set of targets that adapters come in."""


@dataclass(frozen=True, slots=True)
class _Image:
    """What is the same for all adapters of one layout."""

    layout: PackedLayout
    rows: SlotImage
    piece_of_layer: Mapping[int, int]


class DeviceCache(Budget):
    """What kernels can reach: a lora_slot each, bounded in bytes and slots. pool: None where the device reads the host
    cache's memory (a CPU). changes: for other ranks, each of which has a table of its own; None where there are none.
    """

    def __init__(
        self,
        table: SlotTable,
        pool: LoRAMemoryPool | None,
        max_bytes: int,
        policy: EvictionPolicy,
        changes: SlotChanges | None = None,
    ) -> None:
        super().__init__(Tier.DEVICE, "adapter_memory_bytes", max_bytes, table.capacity, policy)
        self.table = table
        self.pool = pool
        self._changes = changes
        self._images: OrderedDict[int, _Image] = OrderedDict()
        self._layer_of = {target.name: target.layer for target in table.targets}
        self._free_slots = list(range(table.capacity))  # a heap: the lowest free slot is taken first

    def allocate(self, sizes: Sequence[int]) -> Place | None:
        """A lora_slot, and extents where the tier has its own memory; None when either is lacking."""
        nbytes = sum(sizes)
        if not self.fits(nbytes):
            return None
        extents = () if self.pool is None else self.pool.allocate_all(sizes)
        if extents is None:
            return None
        self.take(nbytes)
        return Place(extents, heapq.heappop(self._free_slots))

    def free_slot(self, lora_slot: int) -> None:
        """Kernels launched from now on find nothing in `lora_slot`."""
        self.table.clear_slot(lora_slot)
        self._tell(SlotChange(lora_slot, is_new=True))
        heapq.heappush(self._free_slots, lora_slot)

    def publish(self, lora_slot: int, layout: PackedLayout, place: Place) -> None:
        """Write the rows of `lora_slot`: kernels launched from now on find the adapter in `place`."""
        offsets = [place.extents[block.extent_index].offset + block.offset for block in layout.blocks]
        shared = 0 if place.shared is None else place.shared.offset
        self.table.set_image(lora_slot, self._image_of(layout).rows, offsets, shared)
        if self._changes is not None:
            blocks = [
                BlockPlace(block.target_name, offset, layout.sizes[block.extent_index], block.layouts)
                for block, offset in zip(layout.blocks, offsets, strict=True)
            ]
            self._tell(SlotChange(lora_slot, True, blocks, layout.rope_factor, layout.vocab_size))

    def _tell(self, change: SlotChange) -> None:
        if self._changes is not None:
            self._changes.add(change)

    def piece_of_layer(self, layout: PackedLayout) -> Mapping[int, int]:
        """Decoder layer -> the number of its extent."""
        return self._image_of(layout).piece_of_layer

    def _image_of(self, layout: PackedLayout) -> _Image:
        """Adapters from the disk tier share their layouts: images are found by identity."""
        known = self._images.get(id(layout))
        if known is None or known.layout is not layout:
            blocks = [(block.target_name, block.layouts) for block in layout.blocks]
            rows = self.table.image(blocks, layout.vocab_size, layout.rope_factor, layout.projections)
            pieces = {self._layer_of[block.target_name]: block.extent_index for block in layout.blocks}
            if len(self._images) >= MAX_IMAGES:
                self._images.popitem(last=False)
            known = self._images[id(layout)] = _Image(layout, rows, pieces)
        return known

    def publish_extent(self, lora_slot: int, layout: PackedLayout, extent_index: int, extent: Extent) -> None:
        """The adapter's extent number `extent_index` has moved to `extent`."""
        for block in layout.blocks:
            if block.extent_index == extent_index:
                offset = extent.offset + block.offset
                self.table.set_block(block.target_name, lora_slot, offset, block.layouts)
                place = BlockPlace(block.target_name, offset, layout.sizes[extent_index], block.layouts)
                self._tell(SlotChange(lora_slot, False, (place,)))

    @property
    def free_slots(self) -> frozenset[int]:
        return frozenset(self._free_slots)


@dataclass(eq=False)
class Tiers:
    """Where weights may be, and how bytes get from the host to the device.

    host_checksums: of extents in the host's memory. compressed, disk: where weights rest outside the memory that
    kernels read, None for a tier that is off.
    """

    host: HostCache
    device: DeviceCache
    copies: CopyEngine
    host_checksums: Checksums
    clock: Callable[[], float]
    compressed: CompressedCopies | None = None
    disk: DiskCache | None = None

    @property
    def is_shared(self) -> bool:
        """Whether host and device are one memory."""
        return self.device.pool is None

    @property
    def in_memory(self) -> tuple[Tier, ...]:
        """The tiers with a memory of their own, the nearest first."""
        return (Tier.HOST,) if self.is_shared else (Tier.DEVICE, Tier.HOST)

    def cache(self, tier: Tier) -> HostCache | DeviceCache:
        return self.device if tier is Tier.DEVICE else self.host

    def pool_of(self, tier: Tier) -> LoRAMemoryPool:
        """The memory that `tier` reads."""
        device = self.device.pool if tier is Tier.DEVICE else None
        return self.host.pool if device is None else device

    def place_of(self, weights: StoredWeights, tier: Tier) -> Place | None:
        """Where in `pool_of(tier)` the weights are."""
        return weights.device if tier is Tier.DEVICE and not self.is_shared else weights.host

    def touch(self, weights: StoredWeights) -> None:
        """Looked at now. A request that gets the weights is a use: that happens once, this with every ask."""
        weights.last_used_s = self.clock()
        self.rank_as_touched(weights)

    def rank_as_touched(self, weights: StoredWeights) -> None:
        """Is expected soon: that moves it in the order of eviction, and is no use."""
        self.host.policy.touch(weights.digest)
        self.device.policy.touch(weights.digest)

    def changed(self, weights: StoredWeights, tier: Tier) -> list[Extent]:
        """The extents of one tier whose bytes are not what was loaded; [] where the weights are not.

        With the lock held, or for weights that are not at rest: they stay where they are.
        """
        place = self.place_of(weights, tier)
        if place is None or not weights.checksums:
            return []
        views = [self.pool_of(tier).view(extent) for extent in place.all_extents]
        found = self.copies.checksums(views) if tier is Tier.DEVICE else self.host_checksums(views)
        triples = zip(place.all_extents, found, weights.checksums, strict=True)
        return [extent for extent, number, expected in triples if number != expected]
