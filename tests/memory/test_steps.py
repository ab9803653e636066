"""Memory of a victim is handed on only when every step launched before it left is committed."""

from __future__ import annotations

import threading

import pytest

from loraplex.core import WaitsFor
from tests.memory.rig import Rig, make_model


@pytest.fixture(params=[False, True], ids=["one memory", "two memories"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(num_device=1, num_host=1, is_separate=request.param)


def test_a_victims_bytes_stay_as_they_are_until_the_step_is_committed(rig: Rig) -> None:
    rig.add(1)
    slot = rig.acquire(1)
    rows = rig.manager.table.views(rig.manager.table.first_row("model.layers.0.mlp.down_proj"), slot)
    assert rows is not None
    assert rows.lora_a is not None
    before = rows.lora_a.clone()
    rig.manager.step_launched(1)
    rig.manager.release(1)
    rig.manager.remove_adapter(1)
    assert rig.manager.report().retiring_bytes > 0
    assert rows.lora_a.equal(before)  # what the step reads
    rig.manager.check_integrity()
    rig.manager.step_committed(1)
    assert rows.lora_a.isnan().all()  # poisoned: it is free
    rig.check_empty()


def test_a_request_waits_for_room_that_is_on_its_way_and_gets_it_at_the_commit(rig: Rig) -> None:
    rig.add(1, 2)
    rig.acquire(1)
    rig.manager.step_launched(1)
    rig.manager.release(1)
    rig.manager.poll()
    assert rig.manager.try_acquire(2).waits_for in (WaitsFor.ROOM, WaitsFor.LOAD)
    rig.manager.step_committed(1)
    slot = rig.acquire(2)
    rig.check_output(slot, make_model("d2"))


def test_the_room_is_for_the_one_for_whom_it_was_made() -> None:
    """Two small ones that ask later would fit into what is left meanwhile, and with a step always in flight keep it."""
    rig = Rig(num_device=1, num_host=1)
    for adapter_id, rank in ((1, 4), (2, 4), (3, 1), (4, 1)):
        rig.manager.add_adapter(rig.spec(adapter_id, rank=rank))
    rig.manager.remove_adapter(1)
    rig.manager.step_launched(0)
    for step in range(1, 40):
        rig.manager.poll()
        first = rig.manager.try_acquire(2)
        if first.lora_slot is not None:
            break
        rig.manager.prefetch(3)
        rig.manager.prefetch(4)
        rig.manager.step_launched(step)
        rig.manager.step_committed(step - 1)
        assert rig.loader is not None
        rig.loader.run_all()
        rig.manager.check_integrity()
    assert first.lora_slot == 0
    assert step == 3  # made room, loaded, taken


def test_a_promise_ends_with_the_interest_in_it() -> None:
    rig = Rig(num_device=1, num_host=1)
    rig.add(1, 2, 3)
    rig.acquire(3)
    rig.manager.step_launched(1)
    rig.manager.release(3)
    rig.manager.poll()
    assert rig.manager.try_acquire(1).waits_for is WaitsFor.ROOM  # 3 is to leave for 1, which then gives up
    rig.manager.step_committed(1)
    assert rig.manager.try_acquire(2).waits_for is WaitsFor.ROOM
    rig.manager.poll()
    rig.manager.poll()
    assert rig.manager.try_acquire(2).waits_for is WaitsFor.LOAD


def test_an_add_waits_for_the_commit_in_its_own_thread(rig: Rig) -> None:
    rig = Rig(num_device=1, num_host=1)
    rig.add(1)
    rig.acquire(1)
    rig.manager.step_launched(1)
    rig.manager.release(1)
    thread = threading.Thread(target=rig.add, args=(2,))
    thread.start()
    while rig.manager.report().retiring_bytes == 0:
        rig.manager.wait_for_change(0.001)
    assert thread.is_alive()
    rig.manager.step_committed(1)
    thread.join(10)
    assert not thread.is_alive()
    assert rig.tier_of(2) == "host"
    rig.manager.check_integrity()


def test_closing_wakes_up_who_waits(rig: Rig) -> None:
    from loraplex.errors import EngineShutdownError

    rig = Rig(num_device=1, num_host=1)
    rig.add(1)
    rig.acquire(1)
    rig.manager.step_launched(1)
    rig.manager.release(1)
    errors: list[Exception] = []

    def add() -> None:
        try:
            rig.add(2)
        except EngineShutdownError as error:
            errors.append(error)

    thread = threading.Thread(target=add)
    thread.start()
    while rig.manager.report().retiring_bytes == 0:
        rig.manager.wait_for_change(0.001)
    rig.manager.close()
    thread.join(10)
    assert len(errors) == 1
    with pytest.raises(EngineShutdownError):
        rig.manager.try_acquire(1)
