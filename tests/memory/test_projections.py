"""Projections that adapters share: stored once, counted once, gone with the last, and never under a running adapter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loraplex.core import Tier
from loraplex.errors import AdapterNoRoomError
from loraplex.memory.residency.records import StoredWeights
from tests.memory.rig import Rig, make_model, make_shared

SHARED_BYTES = 1472 + 960
"""Of A [12, 30] and B [20, 12] in float32, each rounded up to 64 bytes."""
OWN_BYTES = Rig.packed_nbytes(make_shared("own")) - SHARED_BYTES


def weights_of(rig: Rig, adapter_id: int) -> StoredWeights:
    return rig.manager._residency.adapters[adapter_id].weights


def put_shared(rig: Rig, *adapter_ids: int, pair: str = "pair") -> None:
    """Sources of adapters over one pair."""
    for adapter_id in adapter_ids:
        rig.source.put(f"/p{adapter_id}", make_shared(f"d{adapter_id}", pair))


@pytest.fixture(params=["reference", "torch", "native"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(num_device=16, num_host=16, backend=request.param)


def used(rig: Rig) -> tuple[int, int, int]:
    """Bytes of the device's budget, the host's, and of the pool."""
    report = rig.manager.report()
    host = rig.manager._residency.tiers.host
    return report.tier("device").used_bytes, report.tier("host").used_bytes, host.pool.used_bytes


def test_bytes_are_counted_once_and_freed_with_the_last(rig: Rig) -> None:
    put_shared(rig, 1, 2, 3)
    rig.add(1)
    one = weights_of(rig, 1)
    assert one.layout is not None
    own, shared = one.layout.own_nbytes, one.layout.shared_nbytes
    assert shared >= 4 * (12 * 30 + 20 * 12)
    assert used(rig) == (0, own + shared, own + shared)
    rig.add(2, 3)
    assert used(rig) == (0, 3 * own + shared, 3 * own + shared)
    assert len({weights_of(rig, each).shared for each in (1, 2, 3)}) == 1
    for count, adapter_id in enumerate((1, 2, 3), 1):
        rig.check_output(rig.acquire(adapter_id), make_shared(f"d{adapter_id}"))
        assert used(rig)[0] == count * own + shared
    assert rig.manager.report().in_use_bytes == 3 * own + shared
    for adapter_id, left in ((2, 2), (1, 1), (3, 0)):
        rig.manager.release(adapter_id)
        assert rig.manager.evict_adapter(adapter_id)
        assert used(rig)[0] == left * own + (shared if left else 0)
        assert rig.manager.evict_adapter(adapter_id)
        rest = left * own + (shared if left else 0)
        assert used(rig) == (rest, rest, rest)
        rig.manager.check_integrity()
    for adapter_id in (1, 2, 3):
        rig.check_output(rig.acquire(adapter_id), make_shared(f"d{adapter_id}"))
        rig.manager.release(adapter_id)
        rig.manager.remove_adapter(adapter_id)
    rig.manager.poll()
    rig.check_empty()


def test_only_equal_ones_are_shared(rig: Rig) -> None:
    put_shared(rig, 1)
    put_shared(rig, 2, pair="another")
    rig.add(1, 2)
    assert weights_of(rig, 1).shared != weights_of(rig, 2).shared
    for adapter_id, pair in ((1, "pair"), (2, "another")):
        rig.check_output(rig.acquire(adapter_id), make_shared(f"d{adapter_id}", pair))
    rig.manager.check_integrity()


def test_one_that_only_claims_to_be_equal_keeps_its_own(rig: Rig) -> None:
    """Under another pair's digest, as a damaged file may have it."""
    put_shared(rig, 1)
    honest, other = make_shared("d1").projections, make_shared("d2", "other")
    assert honest is not None
    assert other.projections is not None
    odd = replace(other, projections=replace(other.projections, digest=honest.digest))
    rig.source.put("/p2", odd)
    rig.add(1, 2)
    rig.check_output(rig.acquire(1), make_shared("d1"))
    rig.check_output(rig.acquire(2), odd)
    put_shared(rig, 3)
    rig.add(3)
    rig.check_output(rig.acquire(3), make_shared("d3"))
    rig.manager.check_integrity()


def test_they_stay_under_a_running_adapter_and_serve_the_old_step(rig: Rig) -> None:
    put_shared(rig, 1, 2)
    rig.add(1, 2)
    slot = rig.acquire(1)
    rig.acquire(2)
    rig.manager.step_launched(1)
    rig.manager.release(2)
    assert rig.manager.evict_adapter(2)
    assert rig.manager.evict_adapter(2)
    rig.manager.step_committed(1)
    rig.check_output(slot, make_shared("d1"))
    rig.manager.step_launched(2)
    rig.manager.release(1)
    rig.manager.remove_adapter(1)
    own, shared = weights_of(rig, 2).own_nbytes, weights_of(rig, 2).nbytes - weights_of(rig, 2).own_nbytes
    assert rig.manager.report().retiring_bytes == own + shared, "the step may read both"
    rig.manager.step_committed(2)
    rig.manager.remove_adapter(2)
    rig.manager.poll()
    rig.check_empty()


def test_room_is_what_leaves_with_the_last() -> None:
    """Two adapters and their projections leave for one that needs all of it; one alone would leave the projections."""
    both = 2 * OWN_BYTES + SHARED_BYTES
    rig = Rig(num_device=1, num_host=1, slack_bytes=1 << 14)
    for cache in (rig.manager._residency.tiers.host, rig.manager._residency.tiers.device):
        cache.max_bytes = both
    put_shared(rig, 1, 2)
    rig.add(1)
    assert rig.manager.report().tier("host").used_bytes == OWN_BYTES + SHARED_BYTES
    rank = 4
    while Rig.packed_nbytes(make_model("d3", rank + 1)) <= both:
        rank += 1
    assert Rig.packed_nbytes(make_model("d3", rank)) > 2 * OWN_BYTES
    rig.source.put("/p3", make_model("d3", rank))
    rig.add(3)
    assert rig.manager.report().tier("host").used_bytes == Rig.packed_nbytes(make_model("d3", rank))
    rig.check_output(rig.acquire(3), make_model("d3", rank))
    rig.manager.check_integrity()


def test_the_pinned_count_them_once() -> None:
    rig = Rig(num_device=16, num_host=16)
    device = rig.manager._residency.tiers.device
    device.max_bytes = 3 * OWN_BYTES + SHARED_BYTES
    put_shared(rig, 1, 2, 3, 4)
    rig.add(1, 2, 3, 4)
    assert all(rig.pin(adapter_id) for adapter_id in (1, 2, 3))
    assert rig.manager.report().pinned_bytes == device.used_bytes == device.max_bytes
    with pytest.raises(AdapterNoRoomError, match=f"needs {OWN_BYTES} bytes, and {device.max_bytes} of"):
        rig.pin(4)


def test_damage_is_read_again_and_shared_with_no_one_who_loads_then(rig: Rig) -> None:
    put_shared(rig, 1, 2, 3)
    rig.add(1, 2)
    slot = rig.acquire(2)
    before = weights_of(rig, 1).shared
    assert before is not None
    pool = rig.manager._residency.tiers.host.pool
    kept = pool.view(before).clone()
    pool.view(before)[17] ^= 4
    weights_of(rig, 1).checked_s = -10.0
    rig.check_output(rig.acquire(1), make_shared("d1"))
    assert weights_of(rig, 1).shared not in (before, None)
    assert bool((pool.view(before) != kept).sum() == 1), "no pattern was written where a running adapter reads"
    rig.add(3)
    assert weights_of(rig, 3).shared == weights_of(rig, 1).shared
    assert list(rig.manager.health.scrub(1 << 20)) == [2], "its requests are to end"
    rig.manager.release(2)
    rig.manager.health.restore(2)
    slot = rig.acquire(2)
    rig.check_output(slot, make_shared("d2"))
    assert len({weights_of(rig, each).shared for each in (1, 2, 3)}) == 1
    rig.manager.check_integrity()


def test_a_fenced_chunk_is_shared_no_more(rig: Rig) -> None:
    put_shared(rig, 1, 2)
    rig.add(1)
    rig.acquire(1)
    tiers = rig.manager._residency.tiers
    extent = weights_of(rig, 1).shared
    assert extent is not None
    tiers.host.disown([extent])
    rig.add(2)
    assert weights_of(rig, 2).shared != extent
    rig.check_output(rig.acquire(2), make_shared("d2"))
    rig.manager.check_integrity()


def test_long_idle_ones_are_not_compressed() -> None:
    rig = Rig(num_device=8, num_host=32, host_compression="lossless")
    put_shared(rig, 1, 2)
    rig.source.put("/p3", make_model("d3"))
    rig.add(1, 2, 3)
    rig.clock.now_s += 1000.0
    for _ in range(3):
        rig.manager.poll()
    rig.manager.housekeeping.reclaim_idle("host", 1.0, 1)
    assert rig.loader is not None
    rig.loader.run_all()
    compressed = rig.manager._residency.tiers.compressed
    assert compressed is not None
    assert len(compressed) == 1, "the plain one"
    for adapter_id in (1, 2):
        assert rig.tier_of(adapter_id) == Tier.SOURCE.value
        rig.check_output(rig.acquire(adapter_id), make_shared(f"d{adapter_id}"))
    rig.manager.check_integrity()


def test_moves_leave_them_where_they_are(rig: Rig) -> None:
    """Others move around them; outputs stay."""
    put_shared(rig, *range(1, 9))
    rig.add(*range(1, 9))
    shared = weights_of(rig, 1).shared
    for adapter_id in (2, 3, 5, 6, 7):
        rig.manager.remove_adapter(adapter_id)
    rig.manager.compact(1 << 20, deadline_s=float("inf"))
    rig.manager.check_integrity()
    for adapter_id in (1, 4, 8):
        assert weights_of(rig, adapter_id).shared == shared
        rig.check_output(rig.acquire(adapter_id), make_shared(f"d{adapter_id}"))


def test_sixteen_of_one_pair_in_one_batch_with_other_kinds() -> None:
    rig = Rig(num_device=40, num_host=40)
    put_shared(rig, *range(1, 17))
    rig.source.put("/p17", make_model("d17"))
    rig.add(*range(1, 18))
    slots = {adapter_id: rig.acquire(adapter_id) for adapter_id in range(1, 18)}
    assert rig.manager.report().tier("device").num_adapters == 17
    for adapter_id, slot in slots.items():
        rig.check_output(slot, make_model("d17") if adapter_id == 17 else make_shared(f"d{adapter_id}"))
    addresses = {tuple(rig.manager.table.addresses(0, slot)[:2]) for slot in slots.values()}
    assert len(addresses) == 2, "one A and B for the sixteen, one for the plain one"
    assert torch.equal(rig.manager.table.a_addr[0, [slots[1]]], rig.manager.table.a_addr[1, [slots[16]]])
