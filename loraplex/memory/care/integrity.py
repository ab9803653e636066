"""What must be true of the memory at any moment; tests and the idle engine call it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from loraplex.memory.eviction.budget import Budget
from loraplex.memory.residency.records import StoredAdapter, StoredWeights, WeightState
from loraplex.memory.residency.tiers import DeviceCache, Tiers
from loraplex.memory.space.arena import Extent
from loraplex.memory.space.pool import RetiredMemory
from loraplex.memory.weights.copies import Arriving
from loraplex.memory.weights.packing import PackedBlock


def check_integrity(
    tiers: Tiers,
    retired: RetiredMemory,
    weights: Mapping[str, StoredWeights],
    adapters: Sequence[StoredAdapter],
    arriving: Mapping[int, Arriving],
) -> None:
    """Raises AssertionError unless bytes, extents, references, slots and the slot table's rows agree. The lock is held.

    weights: by digest. adapters: those that resolve, and removed ones on which requests run. arriving: by lora_slot.
    """
    _check_references(weights, adapters)
    holders = weights.values()
    for each in holders:
        _check_state(each, tiers.is_shared)
    _check_pools(tiers, retired, holders)
    _check_budget(tiers.host, [each for each in holders if each.host is not None])
    _check_budget(tiers.device, [each for each in holders if each.device is not None])
    _check_slots(tiers, holders)
    _check_arrivals(holders, arriving)


def _check_references(weights: Mapping[str, StoredWeights], adapters: Sequence[StoredAdapter]) -> None:
    assert sum(len(each.adapters) for each in weights.values()) == len(adapters)
    for adapter in adapters:
        assert adapter.weights.adapters[adapter.adapter_id] is adapter, f"{adapter.name} is not among its digest's"
        assert weights[adapter.weights.digest] is adapter.weights
        assert adapter.num_running >= 0
        assert not adapter.is_removed or (adapter.num_running > 0 and not adapter.is_pinned)
    for each in weights.values():
        assert each.num_running == sum(adapter.num_running for adapter in each.adapters.values())
        assert each.num_pinned == sum(adapter.is_pinned for adapter in each.adapters.values())
        assert each.adapters or not each.is_at_rest, f"digest {each.digest} belongs to no adapter"


def _check_state(weights: StoredWeights, is_shared: bool) -> None:
    state, has_host, has_device = weights.state, weights.host is not None, weights.device is not None
    is_in_motion = state in (WeightState.LOADING, WeightState.ARRIVING)
    assert is_in_motion == (weights.job is not None), f"{weights.digest} is {state} with job {weights.job}"
    assert has_device == weights.is_on_device, f"{weights.digest} is {state}"
    if state in (WeightState.HOST, WeightState.ARRIVING) or (is_shared and has_device):
        assert has_host, f"{weights.digest} is {state} without host memory"
    if weights.num_running or (weights.num_pinned and not weights.is_restoring):
        assert weights.is_on_device, f"{weights.digest} is in use or pinned, and {state}"


def _check_pools(tiers: Tiers, retired: RetiredMemory, holders: Iterable[StoredWeights]) -> None:
    host = [extent for each in holders if each.host for extent in each.host.extents] + list(tiers.host.sharers)
    device = [extent for each in holders if each.device for extent in each.device.extents]
    retired.check_integrity()
    if tiers.device.pool is None:
        assert not device, "a tier without memory of its own has extents"
        host += retired.extents()
    else:
        _check_extents(device + retired.extents(), tiers.device.pool.used_bytes)
        tiers.device.pool.check_integrity()
    _check_extents(host, tiers.host.pool.used_bytes)
    tiers.host.pool.check_integrity()


def _check_extents(extents: list[Extent], used_bytes: int) -> None:
    assert len({extent.offset for extent in extents}) == len(extents), "two owners of one extent"
    assert sum(extent.nbytes for extent in extents) == used_bytes, "bytes are lent that no extent has"


def _check_budget(cache: Budget, held: list[StoredWeights]) -> None:
    places = [each.host if cache.tier.value == "host" else each.device for each in held]
    own = [sum(extent.nbytes for extent in place.extents) for place in places if place is not None]
    sharers = Counter(each.host.shared for each in held if each.host is not None and each.host.shared is not None)
    assert cache.sharers == sharers, f"{cache.tier} tier counts other adapters that share than there are"
    used_bytes = sum(own) if any(own) else sum(each.own_nbytes for each in held)
    used_bytes += sum(extent.nbytes for extent in sharers)
    assert cache.used_bytes == used_bytes, f"{cache.tier} tier counts {cache.used_bytes} bytes, holds {used_bytes}"
    assert cache.num_adapters == len(held)
    assert cache.used_bytes <= cache.max_bytes
    assert cache.max_adapters is None or len(held) <= cache.max_adapters
    assert sorted(cache.policy.order()) == sorted(each.digest for each in held), f"{cache.tier} policy tracks others"


def _check_arrivals(holders: Iterable[StoredWeights], known: Mapping[int, Arriving]) -> None:
    """What is arriving is known to the steps, has its host copy, and only its job may end that."""
    arriving = [each for each in holders if each.state is WeightState.ARRIVING]
    assert known.keys() == {each.lora_slot for each in arriving}, "steps wait for other adapters than arrive"
    for each in arriving:
        assert each.job is not None
        assert each.job.arriving is known[each.lora_slot or 0]
        assert not each.job.is_done
        assert each.job.error is None or each.num_running, f"{each.names} did not arrive, and no request runs on it"


def _check_slots(tiers: Tiers, holders: Iterable[StoredWeights]) -> None:
    tiers.device.table.check_integrity()
    by_slot = {each.lora_slot: each for each in holders if each.device is not None}
    free_slots = tiers.device.free_slots
    assert len(by_slot) + len(free_slots) == tiers.device.table.capacity
    assert free_slots.isdisjoint(by_slot), "a lora_slot is free and taken"
    for lora_slot in range(tiers.device.table.capacity):
        weights = by_slot.get(lora_slot)
        if weights is None or not weights.is_on_device:
            assert tiers.device.table.is_clear(lora_slot), f"lora_slot {lora_slot} still points somewhere"
        else:
            _check_rows(tiers.device, weights, tiers.is_shared)


def _check_rows(device: DeviceCache, weights: StoredWeights, is_shared: bool) -> None:
    assert weights.layout is not None
    assert weights.lora_slot is not None
    place = weights.host if is_shared else weights.device
    assert place is not None
    assert device.table.rope_factors.get(weights.lora_slot) == weights.layout.rope_factor
    blocks = {block.target_name: block for block in weights.layout.blocks}
    for target in device.table.targets:
        block = blocks.get(target.name)
        start = 0 if block is None else place.extents[block.extent_index].offset + block.offset
        buffer = device.table.buffer
        expected = [_addresses(buffer, start, block, index) for index in range(len(target.slices))]
        if block is not None and place.shared is not None and (shared := weights.layout.projections) is not None:
            offsets = place.shared.offset, place.shared.offset + shared.b_offset
            for part, row in zip(block.layouts, expected, strict=True):
                if part is not None and part.is_shared:
                    row[:2] = (buffer.data_ptr() + offset for offset in offsets)
                    row.append(buffer.data_ptr() + start + part.scales_offset)
        first = device.table.first_row(target.name)
        rows = [device.table.addresses(first + index, weights.lora_slot) for index in range(len(expected))]
        assert rows == expected, (
            f"the slot table's rows of {target.name} do not point at the extents of {weights.names}"
        )


def _addresses(buffer: torch.Tensor, start: int, block: PackedBlock | None, index: int) -> list[int]:
    layout = None if block is None else block.layouts[index]
    if layout is None:
        return [0] * 5
    return [0 if offset < 0 else buffer.data_ptr() + start + offset for offset in layout.offsets]
