"""The injectors do what they say, no more, and undo what they should."""

from __future__ import annotations

import threading
from pathlib import Path
from random import Random

import pytest
import torch

from loraplex.core import WaitsFor
from loraplex.errors import AdapterError, AdapterNoRoomError
from loraplex.memory.space.arena import Owner
from tests.faults.injectors import (
    failing_allocations,
    failing_copies,
    failing_lends,
    failing_reads,
    flip_device_bytes,
    flip_file_bytes,
    flip_host_bytes,
    hanging_reads,
    poison_with_nan,
    truncate_file,
)
from tests.memory.rig import NUM_LAYERS, Rig


@pytest.fixture(params=[False, True], ids=["one memory", "two memories"])
def rig(request: pytest.FixtureRequest) -> Rig:
    rig = Rig(is_separate=request.param, is_gated=False, num_device=2, num_host=3)
    rig.add(1, 2)
    rig.activate(1)
    return rig


def memory(rig: Rig) -> list[torch.Tensor]:
    store = rig.manager._residency
    pools = [store.tiers.host.pool] + ([] if store.tiers.device.pool is None else [store.tiers.device.pool])
    return [pool.arena.memory.clone() for pool in pools]


def num_changed(before: list[torch.Tensor], after: list[torch.Tensor]) -> list[int]:
    return [int((old != new).sum()) for old, new in zip(before, after, strict=True)]


def test_one_bit_of_each_chosen_host_byte_flips(rig: Rig) -> None:
    before = memory(rig)
    offsets = flip_host_bytes(rig.manager, 1, Random(0), num_bytes=3)
    host_before, host_after = before[0], memory(rig)[0]
    assert torch.nonzero(host_before != host_after).flatten().tolist() == offsets
    assert 1 <= len(offsets) <= 3
    for offset in offsets:
        assert (int(host_before[offset]) ^ int(host_after[offset])).bit_count() == 1
    extents = rig.manager._residency.adapters[1].weights.host.extents  # type: ignore[union-attr]
    assert all(any(extent.offset <= offset < extent.end for extent in extents) for offset in offsets)
    rig.manager.check_integrity()


def test_device_bytes_are_those_that_kernels_read(rig: Rig) -> None:
    before = memory(rig)
    assert flip_device_bytes(rig.manager, 1, Random(0))
    assert num_changed(before, memory(rig)) == ([0, 1] if rig.is_separate else [1])
    assert flip_device_bytes(rig.manager, 2, Random(0)) == [], "it is not on the device"
    assert flip_host_bytes(rig.manager, 99, Random(0)) == [], "no adapter has that id"


def test_the_same_seed_flips_the_same_bytes() -> None:
    first, second = (Rig(is_gated=False) for _ in range(2))
    for rig in (first, second):
        rig.add(1)
    assert flip_host_bytes(first.manager, 1, Random(7), 5) == flip_host_bytes(second.manager, 1, Random(7), 5)


def test_poisoned_weights_give_nan(rig: Rig) -> None:
    assert not poison_with_nan(rig.manager, 2)
    assert poison_with_nan(rig.manager, 1)
    store, weights = rig.manager._residency, rig.manager._residency.adapters[1].weights
    place, pool = (
        (weights.device, store.tiers.device.pool) if rig.is_separate else (weights.host, store.tiers.host.pool)
    )
    assert place is not None
    assert pool is not None
    assert len(place.extents) == NUM_LAYERS
    assert all(pool.view(extent).view(torch.float32).isnan().all() for extent in place.extents)
    rig.manager.check_integrity()


def test_a_file_is_changed_in_place(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    content = bytes(range(256))
    file.write_bytes(content)
    inode = file.stat().st_ino
    offsets = flip_file_bytes(file, Random(1), num_bytes=4)
    assert [at for at in range(256) if file.read_bytes()[at] != content[at]] == offsets
    left = truncate_file(file, Random(2))
    assert file.stat().st_size == left < 256
    assert file.stat().st_ino == inode
    file.write_bytes(b"")
    assert flip_file_bytes(file, Random(1)) == []


@pytest.mark.parametrize("error", [None, MemoryError("no memory left")])
def test_allocations_fail_for_a_while(rig: Rig, error: MemoryError | None) -> None:
    with failing_allocations(rig.manager, error), pytest.raises(AdapterError) as raised:
        rig.add(3)
    assert isinstance(raised.value, AdapterNoRoomError), "what may be tried again is told as such"
    rig.manager.check_integrity()
    rig.add(3)
    assert rig.tier_of(3) == "host"


def test_the_arena_lends_nothing_to_one_owner(rig: Rig) -> None:
    arena = rig.manager._residency.tiers.host.pool.arena
    with failing_lends(arena, Owner.KV):
        assert arena.lend(Owner.KV) is None
    chunks = arena.lend(Owner.KV)
    assert chunks is not None
    with failing_lends(arena, Owner.ADAPTERS):
        arena.give_back(Owner.KV, chunks)
        assert arena.lend(Owner.ADAPTERS) is None


def test_copies_fail_for_a_while() -> None:
    rig = Rig(is_separate=True, is_gated=False, slack_bytes=1 << 16)  # the memory that failed is fenced
    rig.add(1)
    with failing_copies(RuntimeError("a broken bus")), pytest.raises(AdapterError, match="a broken bus"):
        rig.activate(1)
    rig.manager.check_integrity()
    assert rig.activate(1)


def test_loads_are_killed_for_a_while(rig: Rig) -> None:
    with failing_reads(OSError("the disk is gone")), pytest.raises(AdapterError, match="the disk is gone"):
        rig.add(3)
    rig.manager.check_integrity()
    rig.add(3)


def test_loads_hang_until_they_may_go_on(rig: Rig) -> None:
    with hanging_reads() as may_go_on:
        loading = threading.Thread(target=rig.add, args=(3,))
        loading.start()
        while 3 not in rig.manager._residency.adapters:
            loading.join(0.001)
        assert rig.manager.try_acquire(3).waits_for is WaitsFor.LOAD
        assert flip_host_bytes(rig.manager, 3, Random(0)) == [], "nothing is there yet"
        may_go_on.set()
        loading.join()
    assert rig.tier_of(3) == "host"
