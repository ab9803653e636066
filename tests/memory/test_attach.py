"""Adapters that are registered without a load: the first that needs them loads them, and no other notices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from loraplex.core import WaitsFor
from loraplex.errors import (
    AdapterConflictError,
    AdapterContentChangedError,
    AdapterNoRoomError,
    AdapterPathNotFoundError,
    AdapterTooLargeError,
    AdapterUnavailableError,
)
from tests.memory.rig import Rig, make_model


@pytest.fixture(params=[False, True], ids=["one memory", "two memories"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(is_separate=request.param)
    rig.manager.attach_adapters([rig.spec(adapter_id) for adapter_id in (1, 2, 3, 4)])
    yield rig
    rig.manager.check_integrity()
    rig.manager.close()


def ask(rig: Rig, adapter_id: int = 1) -> WaitsFor | None:
    rig.manager.poll()
    return rig.manager.try_acquire(adapter_id).waits_for


def load(rig: Rig) -> None:
    assert rig.loader is not None
    rig.loader.run_all()


def test_attaching_reads_nothing(rig: Rig) -> None:
    assert rig.source.opens == {}
    assert {each.tier for each in rig.manager.list_adapters()} == {"source"}
    assert rig.manager.report().tier("host").used_bytes == 0
    rig.manager.attach_adapters([rig.spec(1)])  # known already
    with pytest.raises(AdapterConflictError, match="another content"):
        rig.manager.attach_adapters([replace(rig.spec(1), adapter_digest="other")])
    assert not rig.manager.add_adapter(rig.spec(1)).is_new
    assert rig.source.opens == {}


def test_the_first_request_loads_in_the_background(rig: Rig) -> None:
    assert ask(rig) is WaitsFor.LOAD
    assert rig.source.opens == {}
    load(rig)
    assert ask(rig) is None
    rig.check_output(0, make_model("d1"))
    assert rig.source.opens == {"/p1": 1}
    assert rig.manager._log.counters.loads == {"request": 1}
    rig.manager.release(1)


def test_a_prefetch_and_every_verb_load_too(rig: Rig) -> None:
    rig.manager.prefetch(1)
    load(rig)
    assert rig.tier_of(1) in ("host", "device")
    assert rig.activate(2)
    assert rig.loader is not None
    assert not rig.manager.evict_adapter(3)
    with rig.loader.opened():
        assert rig.manager.pin_adapter(3)
    assert rig.tier_of(3) == "device"


def test_what_is_dropped_before_it_was_loaded_is_gone(rig: Rig) -> None:
    rig.manager.drop_adapter(1)
    ask(rig, 2)
    rig.manager.drop_adapter(2)
    load(rig)
    assert rig.manager.report().tier("host").used_bytes == 0
    assert [each.adapter_id for each in rig.manager.list_adapters()] == [3, 4]


def test_a_source_that_vanished_fails_its_own_requests_until_it_is_back(rig: Rig) -> None:
    rig.source.errors["/p1"] = AdapterPathNotFoundError("no such path")
    ask(rig)
    ask(rig, 2)
    load(rig)
    with pytest.raises(AdapterUnavailableError, match=r"'a1': no copy of it is in memory .* source cannot be read"):
        ask(rig)
    assert ask(rig, 2) is None
    rig.manager.release(2)
    rig.manager.check_integrity()
    del rig.source.errors["/p1"]
    assert ask(rig) is WaitsFor.LOAD
    load(rig)
    assert ask(rig) is None
    rig.manager.release(1)


def test_content_that_changed_meanwhile_is_not_served(rig: Rig) -> None:
    rig.source.put("/p1", make_model("another"))
    ask(rig)
    load(rig)
    with pytest.raises(AdapterContentChangedError, match="reload it"):
        ask(rig)


def test_a_failing_add_of_the_same_content_leaves_the_attached_one(rig: Rig) -> None:
    for path in ("/p1", "/p9"):
        rig.source.errors[path] = AdapterPathNotFoundError("no such path")
    with pytest.raises(AdapterPathNotFoundError):
        rig.manager.add_adapter(rig.spec(9, "d1"))
    assert [each.adapter_id for each in rig.manager.list_adapters()] == [1, 2, 3, 4]
    rig.source.errors.clear()
    rig.manager.add_adapter(rig.spec(9, "d1"))
    assert rig.tier_of(1) == "host"


def test_an_attached_adapter_that_is_too_large_says_so(rig: Rig) -> None:
    rig.manager.attach_adapters([rig.spec(8, rank=64)])
    ask(rig, 8)
    load(rig)
    with pytest.raises(AdapterTooLargeError):
        ask(rig, 8)


def test_without_room_the_first_load_waits_its_turn(rig: Rig) -> None:
    """The device is full of what runs: the request waits for room, as any other does, and gets it."""
    for adapter_id in (1, 2):
        ask(rig, adapter_id)
    load(rig)
    assert [ask(rig, adapter_id) for adapter_id in (1, 2)] == [None, None]
    seen = {ask(rig, 4)}
    for _ in range(3):
        load(rig)
        seen.add(ask(rig, 4))
    assert seen == {WaitsFor.LOAD, WaitsFor.ROOM}
    assert list(rig.manager.victims_for(4, [1, 2])) == [1]
    rig.manager.release(1)
    ask(rig, 4)
    load(rig)
    assert rig.tier_of(4) == "device"


def test_when_every_byte_of_the_host_is_in_use_the_first_load_learns_the_size_and_waits() -> None:
    rig = Rig(num_device=2, num_host=2)
    rig.manager.attach_adapters([rig.spec(adapter_id) for adapter_id in (1, 2, 3)])
    for adapter_id in (1, 2):
        ask(rig, adapter_id)
    load(rig)
    assert [ask(rig, adapter_id) for adapter_id in (1, 2)] == [None, None]
    assert ask(rig, 3) is WaitsFor.LOAD
    load(rig)
    rig.manager.check_integrity()
    assert [ask(rig, 3), ask(rig, 3)] == [WaitsFor.ROOM, WaitsFor.ROOM]
    assert rig.source.opens["/p3"] == 1
    assert list(rig.manager.victims_for(3, [1, 2])) == [1]
    with pytest.raises(AdapterNoRoomError, match="finds no room"):
        rig.manager.promote_adapter(3)
    rig.manager.release(1)
    assert ask(rig, 3) is WaitsFor.LOAD
    load(rig)
    assert ask(rig, 3) is None
    for adapter_id in (2, 3):
        rig.manager.release(adapter_id)
    rig.manager.check_integrity()
    rig.manager.close()


def test_ten_threads_that_promote_an_attached_adapter_read_it_once() -> None:
    rig = Rig(is_gated=False)
    rig.manager.attach_adapters([rig.spec(1)])
    start = threading.Barrier(10)

    def promote() -> None:
        start.wait(60)
        rig.manager.promote_adapter(1)

    threads = [threading.Thread(target=promote) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert rig.source.opens == {"/p1": 1}
    assert rig.tier_of(1) == "device"
    rig.manager.close()
