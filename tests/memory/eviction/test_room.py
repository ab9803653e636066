"""Requests that want more than fits: which wait, which are paused, which are refused."""

from __future__ import annotations

import pytest

from loraplex.core import WaitsFor
from loraplex.errors import AdapterNoRoomError
from tests.memory.rig import Rig, make_model


@pytest.fixture(params=[False, True], ids=["one memory", "two memories"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(is_separate=request.param)


def test_a_request_waits_when_everything_is_in_use(rig: Rig) -> None:
    rig.add(1, 2, 3)
    rig.acquire(1)
    rig.acquire(2)
    for _ in range(3):
        rig.manager.poll()
        assert rig.manager.try_acquire(3).waits_for is WaitsFor.ROOM
    assert rig.slots() == [1, 2]
    assert rig.manager.report().num_waiting == {WaitsFor.ROOM: 1, WaitsFor.LOAD: 0}
    assert list(rig.manager.victims_for(3, [1, 2])) == [1]
    assert list(rig.manager.victims_for(3, [2, 1])) == [2]
    assert list(rig.manager.victims_for(99, [1, 2])) == []
    rig.manager.release(1)
    assert rig.acquire(3) == 0
    assert rig.manager.report().num_waiting[WaitsFor.ROOM] == 0
    rig.manager.check_integrity()


def test_nobody_is_evicted_for_nothing(rig: Rig) -> None:
    """Two small idle ones would not make room beside a large one in use: they stay."""
    rig = Rig(num_device=4, num_host=8, is_separate=rig.is_separate)
    rig.add(1, 2)
    rig.manager.add_adapter(rig.spec(3, rank=10))  # a bit more than twice the others
    rig.manager.add_adapter(rig.spec(4, rank=10))
    for adapter_id in (1, 2):
        rig.activate(adapter_id)
    rig.acquire(3)
    before = rig.slots()
    rig.manager.poll()
    assert rig.manager.try_acquire(4).waits_for is WaitsFor.ROOM
    assert rig.slots() == before


def test_no_more_leave_than_must(rig: Rig) -> None:
    rig = Rig(num_device=3, num_host=6, is_separate=rig.is_separate)
    rig.add(1, 2, 3, 4)
    for adapter_id in (1, 2, 3):
        rig.activate(adapter_id)
    rig.activate(4)
    assert rig.slots() == [4, 2, 3]


def test_the_least_recently_used_leaves_and_running_counts_as_use(rig: Rig) -> None:
    rig.add(1, 2, 3)
    rig.acquire(1)
    rig.acquire(2)
    rig.manager.release(2)
    rig.manager.release(1)  # 2 was released first
    rig.acquire(3)
    assert rig.slots() == [1, 3]


def test_pinned_room_is_no_room_for_anyone(rig: Rig) -> None:
    rig.add(1, 2, 3)
    rig.pin(1)
    rig.pin(2)
    rig.manager.poll()
    size = rig.config.adapter_memory_bytes // 2
    with pytest.raises(AdapterNoRoomError, match=rf"'a3' needs {size} bytes .* {2 * size} bytes pinned and 0 in use"):
        rig.manager.try_acquire(3)
    assert list(rig.manager.victims_for(3, [])) == []
    rig.manager.unpin_adapter(2)
    assert rig.acquire(3) == 1


def test_without_eviction_a_full_device_refuses() -> None:
    rig = Rig(policy="none")
    rig.add(1, 2, 3)
    rig.activate(1)
    rig.activate(2)
    with pytest.raises(AdapterNoRoomError, match="eviction_policy is none"):
        rig.manager.try_acquire(3)
    with pytest.raises(AdapterNoRoomError, match="eviction_policy is none"):
        rig.activate(3)
    assert list(rig.manager.victims_for(3, [])) == []
    with pytest.raises(AdapterNoRoomError, match="bytes of host memory"):
        rig.manager.add_adapter(rig.spec(4))
    rig.manager.evict_adapter(1)
    assert rig.acquire(3) == 0


def test_a_full_host_evicts_what_is_only_there_before_what_is_on_the_device() -> None:
    rig = Rig(num_device=2, num_host=3)
    rig.add(1, 2)
    rig.activate(1)
    rig.add(3, 4)
    assert [rig.tier_of(i) for i in (1, 2, 3, 4)] == ["device", "source", "host", "host"]
    rig.manager.evict_adapter(3)
    rig.activate(4)
    rig.add(5)
    rig.add(6)
    assert [rig.tier_of(i) for i in (1, 4, 5, 6)] == ["device", "device", "source", "host"]


def test_with_two_memories_the_host_gives_up_spare_copies() -> None:
    rig = Rig(num_device=3, num_host=1, is_separate=True)
    for adapter_id in (1, 2, 3):
        rig.add(adapter_id)
        rig.acquire(adapter_id)
    assert [rig.tier_of(i) for i in (1, 2, 3)] == ["device"] * 3
    assert rig.manager.report().tier("host").num_adapters == 1
    rig.manager.release(1)
    assert rig.manager.evict_adapter(1)
    assert rig.tier_of(1) == "source"  # no copy was left
    rig.check_output(rig.acquire(1), make_model("d1"))


def test_an_add_is_refused_when_the_host_is_all_in_use() -> None:
    rig = Rig(num_device=3, num_host=3)
    rig.add(1, 2, 3)
    for adapter_id in (1, 2, 3):
        rig.acquire(adapter_id)
    size = rig.config.host_memory_bytes // 3
    with pytest.raises(
        AdapterNoRoomError, match=f"{3 * size} of {3 * size} bytes are taken, 0 bytes pinned and {3 * size} in use"
    ):
        rig.manager.add_adapter(rig.spec(4))
    rig.manager.check_integrity()


def test_a_refusal_says_how_much_memory_is_fenced() -> None:
    rig = Rig(num_device=2, num_host=2)
    pool = rig.manager._residency.tiers.host.pool
    for chunk in range(pool.arena.num_chunks):
        pool.fence(chunk)
    failed = f"too small, and {pool.arena.num_bytes} bytes are fenced, since they failed"
    with pytest.raises(AdapterNoRoomError, match=failed):
        rig.manager.add_adapter(rig.spec(1))
    rig.manager.check_integrity()


def test_a_promotion_by_name_does_not_wait_for_requests_to_end(rig: Rig) -> None:
    rig.add(1, 2, 3)
    rig.acquire(1)
    rig.acquire(2)
    for verb in (rig.activate, rig.pin):
        with pytest.raises(AdapterNoRoomError, match="and finds no room"):
            verb(3)
    rig.manager.check_integrity()


# ---------------------------------------------------------------------------------------------------------- victims_for


def test_victims_are_the_fewest_in_use_in_the_order_asked_for(rig: Rig) -> None:
    rig = Rig(num_device=4, num_host=8, is_separate=rig.is_separate)
    rig.add(1, 2, 3, 4, 5)
    rig.manager.add_adapter(rig.spec(6, rank=8))  # nearly twice the others
    for adapter_id in (1, 2, 3, 4):
        rig.acquire(adapter_id)
    rig.manager.release(3)
    assert list(rig.manager.victims_for(5, [4, 1, 2])) == []  # 3 is idle: no victim is needed
    assert list(rig.manager.victims_for(6, [4, 1, 2])) == [4]  # 3 goes by itself, and one more must
    rig.acquire(3)
    assert list(rig.manager.victims_for(6, [4, 1, 2, 3])) == [4, 1]
    rig.pin(1)
    assert list(rig.manager.victims_for(6, [1, 2, 4, 3])) == [2, 4]


def test_victims_cover_host_room_too_where_it_is_the_same_memory() -> None:
    rig = Rig(num_device=2, num_host=2)
    rig.add(1, 2, 3)
    rig.acquire(1)
    rig.manager.add_adapter(rig.spec(2))
    rig.acquire(2)
    assert rig.tier_of(3) == "source"
    assert rig.manager.try_acquire(3).waits_for is WaitsFor.ROOM
    assert list(rig.manager.victims_for(3, [1, 2])) == [1]
    rig.manager.release(1)
    assert rig.acquire(3) == 0
    assert rig.tier_of(1) == "source"


def test_victims_of_a_shared_content_are_all_its_running_ids() -> None:
    rig = Rig(num_device=1)
    rig.manager.add_adapter(rig.spec(1, "same"))
    rig.manager.add_adapter(rig.spec(2, "same"))
    rig.manager.add_adapter(rig.spec(3, "same"))
    rig.add(4)
    rig.acquire(1)
    rig.acquire(3)
    assert list(rig.manager.victims_for(4, [1, 3])) == [1, 3]


# --------------------------------------------------------------------------------------------------------- taking turns


def test_in_one_pass_the_first_to_ask_is_not_evicted_for_the_next() -> None:
    """Host room for one more than what runs: requests for three cold adapters take turns and do not evict each
    other."""
    rig = Rig(num_device=1, num_host=2)
    rig.add(1, 2, 3, 4)
    running = rig.acquire(1)
    assert rig.loader is not None
    for _ in range(3):
        rig.manager.poll()
        for adapter_id in (2, 3, 4):
            rig.manager.try_acquire(adapter_id)
        rig.loader.run_all()
    assert [rig.tier_of(i) for i in (2, 3, 4)] == ["host", "source", "source"]
    assert rig.source.opens["/p2"] + rig.source.opens["/p3"] + rig.source.opens["/p4"] <= 4
    rig.manager.release(1)
    assert rig.acquire(2) == running


def test_who_asks_first_in_the_next_pass_goes_first() -> None:
    rig = Rig(num_device=2, num_host=2)
    rig.add(1, 2, 3)
    rig.acquire(1)
    rig.manager.poll()
    rig.manager.prefetch(3)  # in host memory, wanted, but not taken
    rig.manager.poll()
    assert rig.manager.try_acquire(2).waits_for is WaitsFor.LOAD
    rig.manager.prefetch(3)
    assert rig.tier_of(3) == "source"
    assert rig.acquire(2) is not None


def test_a_prefetch_takes_no_room_from_those_before_it(rig: Rig) -> None:
    rig.add(1, 2, 3)
    rig.acquire(1)
    rig.acquire(2)
    rig.manager.poll()
    rig.manager.try_acquire(3)
    rig.manager.prefetch(3)
    rig.manager.prefetch(99)
    assert rig.slots() == [1, 2]


def test_many_adapters_through_little_room_in_turn(rig: Rig) -> None:
    """Twelve adapters, room for two, each held for three passes; first come, first served: all of them get in."""
    rig.add(*range(1, 13))
    waiting, running, served = list(range(1, 13)), [], []
    assert rig.loader is not None
    for step in range(200):
        rig.manager.poll()
        rig.manager.step_launched(step)
        for adapter_id in list(waiting):
            slot = rig.manager.try_acquire(adapter_id).lora_slot
            if slot is not None:
                waiting.remove(adapter_id)
                running.append((adapter_id, slot, step))
        for adapter_id in waiting:
            rig.manager.prefetch(adapter_id)
        rig.loader.run_all()
        for adapter_id, slot, since in list(running):
            rig.check_output(slot, make_model(f"d{adapter_id}"))
            if step - since >= 3:
                running.remove((adapter_id, slot, since))
                served.append(adapter_id)
                rig.manager.release(adapter_id)
        rig.manager.step_committed(step)
        rig.manager.check_integrity()
    cold = [adapter_id for adapter_id in served if adapter_id <= 9]  # the last three added were in host memory already
    assert cold == list(range(1, 10))
    assert sorted(served) == list(range(1, 13))
    assert sum(rig.source.opens.values()) <= 2 * 12  # one read to add, and at most one to come back: no read is wasted
