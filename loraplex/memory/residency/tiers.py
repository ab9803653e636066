"""The two tiers in memory, as budgets over extents.

    HostCache    packed weights at rest: extents of a pool, bounded in bytes and optionally in number
    DeviceCache  what kernels can reach: a lora_slot each, rows of the slot table, bounded in bytes and in slots

On a CPU both are the same memory: an extent of the host cache is "on the device" while rows of the slot table point at it, so the
device budget bounds those and the host budget both. On another device the device cache has a pool of its own and weights are copied.
Not thread-safe: the manager calls them under its lock.
"""

from __future__ import annotations

import heapq
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from loraplex.config import LoRAConfig
from loraplex.core import LoraTarget, Tier
from loraplex.errors import ConfigError
from loraplex.kernels.plan import SlotImage, SlotTable
from loraplex.memory.residency.eviction import EvictionPolicy, get_policy
from loraplex.memory.space.arena import Arena, Extent, Owner
from loraplex.memory.space.pool import LoRAMemoryPool
from loraplex.memory.stats import TierStats
from loraplex.memory.weights.compression import HOST_SHARE, CompressedCopies, get_compression
from loraplex.memory.weights.packing import PackedLayout, Packer

logger = logging.getLogger(__name__)

MIN_SLOTS = 64
MAX_SLOTS = 4096

MAX_IMAGES = 64
"""Images of layouts that are kept: one for each rank and set of targets that adapters come in."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an adapter is in a tier: its extents (none where the tier shares another's memory) and its lora_slot, if the tier has slots."""

    extents: tuple[Extent, ...] = ()
    lora_slot: int | None = None


@dataclass(frozen=True, slots=True)
class _Image:
    """What is the same for all adapters of one layout."""

    layout: PackedLayout
    rows: SlotImage
    piece_of_layer: Mapping[int, int]


class Budget:
    """Bytes and adapters that a tier may hold, and holds; `policy` has the digests in it by their use.

    `setting` is what a user changes to have more.
    """

    def __init__(
        self, tier: Tier, setting: str, max_bytes: int, max_adapters: int | None, policy: EvictionPolicy
    ) -> None:
        self.tier = tier
        self.setting = setting
        self.policy = policy
        self.max_bytes = max_bytes
        self.max_adapters = max_adapters
        self.used_bytes = 0
        self.num_adapters = 0

    def allows(self, nbytes: int, used_bytes: int, num_adapters: int) -> bool:
        """Whether one more adapter of `nbytes` would fit beside `num_adapters` others of `used_bytes`."""
        has_place = self.max_adapters is None or num_adapters < self.max_adapters
        return has_place and used_bytes + nbytes <= self.max_bytes

    def fits(self, nbytes: int) -> bool:
        return self.allows(nbytes, self.used_bytes, self.num_adapters)

    def stats(self) -> TierStats:
        return TierStats(self.tier, self.used_bytes, self.max_bytes, self.num_adapters, self.max_adapters)

    def take(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        self.num_adapters += 1

    def give(self, nbytes: int) -> None:
        self.used_bytes -= nbytes
        self.num_adapters -= 1
        assert self.used_bytes >= 0 <= self.num_adapters, f"{self.tier} tier: more was returned than taken"


class HostCache(Budget):
    """Packed weights at rest, in extents of `pool`."""

    def __init__(self, pool: LoRAMemoryPool, max_bytes: int, max_adapters: int | None, policy: EvictionPolicy) -> None:
        super().__init__(Tier.HOST, "host_memory_bytes", min(max_bytes, _most_bytes(pool.arena)), max_adapters, policy)
        self.pool = pool

    def allocate(self, sizes: Sequence[int]) -> Place | None:
        """A place for an adapter, or None: over budget, or no such pieces of memory."""
        nbytes = sum(sizes)
        extents = self.pool.allocate_all(sizes) if self.fits(nbytes) else None
        if extents is None:
            return None
        self.take(nbytes)
        return Place(extents)


class DeviceCache(Budget):
    """What kernels can reach. `pool` is None where the device reads the host cache's memory (a CPU)."""

    def __init__(self, table: SlotTable, pool: LoRAMemoryPool | None, max_bytes: int, policy: EvictionPolicy) -> None:
        super().__init__(Tier.DEVICE, "adapter_memory_bytes", max_bytes, table.capacity, policy)
        self.table = table
        self.pool = pool
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
        heapq.heappush(self._free_slots, lora_slot)

    def publish(self, lora_slot: int, layout: PackedLayout, extents: Sequence[Extent]) -> None:
        """Write the rows of `lora_slot`: kernels launched from now on find the adapter in `extents`."""
        offsets = [extents[block.extent_index].offset + block.offset for block in layout.blocks]
        self.table.set_image(lora_slot, self._image_of(layout).rows, offsets)

    def piece_of_layer(self, layout: PackedLayout) -> Mapping[int, int]:
        """Decoder layer -> the number of its extent."""
        return self._image_of(layout).piece_of_layer

    def _image_of(self, layout: PackedLayout) -> _Image:
        """Adapters from the disk tier share their layouts: images are found by identity."""
        known = self._images.get(id(layout))
        if known is None or known.layout is not layout:
            rows = self.table.image([(block.target_name, block.layouts) for block in layout.blocks])
            pieces = {self._layer_of[block.target_name]: block.extent_index for block in layout.blocks}
            if len(self._images) >= MAX_IMAGES:
                self._images.popitem(last=False)
            known = self._images[id(layout)] = _Image(layout, rows, pieces)
        return known

    def publish_extent(self, lora_slot: int, layout: PackedLayout, extent_index: int, extent: Extent) -> None:
        """The adapter's extent number `extent_index` has moved to `extent`."""
        for block in layout.blocks:
            if block.extent_index == extent_index:
                self.table.set_block(block.target_name, lora_slot, extent.offset + block.offset, block.layouts)

    @property
    def free_slots(self) -> frozenset[int]:
        return frozenset(self._free_slots)


def build_tiers(
    lora_config: LoRAConfig,
    targets: Sequence[LoraTarget],
    packer: Packer,
    arena: Arena,
    host_arena: Arena | None,
    clock: Callable[[], float],
) -> tuple[HostCache, DeviceCache]:
    """The two tiers over one memory (no `host_arena`: a CPU), or over two. The slot table's capacity is fixed here."""
    pool = LoRAMemoryPool(arena)
    host_pool = pool if host_arena is None else LoRAMemoryPool(host_arena)
    name = lora_config.eviction_policy
    host_bytes = lora_config.host_memory_bytes - compressed_bytes(lora_config)
    host = HostCache(host_pool, host_bytes, lora_config.max_cpu_loras, get_policy(name, clock))
    most = host.max_bytes if host_arena is None else _most_bytes(arena)
    table = SlotTable(targets, lora_config.max_loras or num_slots(lora_config, packer), arena.memory)
    device_pool = None if host_arena is None else pool
    max_bytes = min(lora_config.adapter_memory_bytes, most)
    device = DeviceCache(table, device_pool, max_bytes, get_policy(name, clock))
    is_device_tighter = lora_config.adapter_memory_bytes <= lora_config.host_memory_bytes  # the host's may follow it
    _check_budgets((device, host) if is_device_tighter else (host, device), lora_config, packer)
    return host, device


def _check_budgets(caches: Sequence[Budget], lora_config: LoRAConfig, packer: Packer) -> None:
    """Raises ConfigError for a budget that refuses every adapter; one that refuses all but tiny ones is said in the log."""
    least, usual = packer.least_nbytes(lora_config.lora_dtype), packer.smallest_nbytes()
    for cache in caches:
        size = f"{cache.setting} leaves {cache.max_bytes} bytes of {cache.tier.value} memory for adapters"
        if cache.max_bytes < least:
            raise ConfigError(
                f"{size}, and the smallest that this model can have (rank 1 on one module) takes {least}: every load would be refused; "
                f"raise {cache.setting}, or turn LoRA off"
            )
        if cache.max_bytes < usual:
            logger.warning("%s, and one of rank 1 on all layers takes %d: raise %s", size, usual, cache.setting)


def compressed_bytes(lora_config: LoRAConfig) -> int:
    """The part of the host's budget that is for compressed copies."""
    return 0 if lora_config.host_compression == "none" else lora_config.host_memory_bytes // HOST_SHARE


def compressed_copies(lora_config: LoRAConfig, packer: Packer) -> CompressedCopies | None:
    compression = get_compression(lora_config.host_compression, packer)
    return None if compression is None else CompressedCopies(compression, compressed_bytes(lora_config))


def _most_bytes(arena: Arena) -> int:
    return arena.ceiling(Owner.ADAPTERS) * arena.chunk_bytes


def num_slots(lora_config: LoRAConfig, packer: Packer) -> int:
    """So many that bytes run out first, within MIN_SLOTS..MAX_SLOTS: an eighth of an adapter of rank 1 on every target is what one of
    16 bits on a few targets has.
    """
    return min(MAX_SLOTS, max(MIN_SLOTS, 8 * lora_config.adapter_memory_bytes // max(1, packer.smallest_nbytes())))
