"""The verbs of LoRAModelManager, one at a time: what each answers, changes and refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loraplex.core import Tier
from loraplex.errors import (
    AdapterConflictError,
    AdapterContentChangedError,
    AdapterNoRoomError,
    AdapterNotFoundError,
    AdapterPathNotFoundError,
    AdapterTooLargeError,
)
from tests.memory.rig import Rig, make_model


@pytest.fixture(params=[False, True], ids=["one memory", "two memories"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(is_separate=request.param)


# ---------------------------------------------------------------------------------------------------------- add, remove


def test_add_loads_into_host_memory_once(rig: Rig) -> None:
    assert rig.manager.add_adapter(rig.spec(1)).is_new
    assert rig.tier_of(1) == "host"
    again = rig.manager.add_adapter(rig.spec(1))
    assert not again
    assert not again.is_new
    assert rig.source.opens == {"/p1": 1}
    rig.manager.check_integrity()


def test_add_takes_a_model_as_it_is(rig: Rig) -> None:
    model = make_model("mine", adapter_id=5)
    assert rig.manager.add_adapter(model).is_new
    rig.manager.evict_adapter(5)
    assert rig.tier_of(5) == "source"
    rig.activate(5)
    rig.check_output(0, model)


def test_a_known_id_with_another_content_is_refused(rig: Rig) -> None:
    rig.add(1)
    other = replace(rig.spec(1), adapter_digest="other", adapter_name="thief")
    with pytest.raises(AdapterConflictError, match=r"'thief': id 1 belongs to adapter 'a1'"):
        rig.manager.add_adapter(other)
    rig.manager.check_integrity()


def test_an_adapter_larger_than_the_device_is_refused_with_both_numbers(rig: Rig) -> None:
    spec = rig.spec(1, rank=32)
    needed = rig.packed_nbytes(make_model("d1", 32))
    budget = rig.config.adapter_memory_bytes
    with pytest.raises(
        AdapterTooLargeError, match=f"'a1' needs {needed} bytes of device memory, all of it is {budget} bytes"
    ):
        rig.manager.add_adapter(spec)
    rig.check_empty()


def test_an_adapter_larger_than_the_host_is_refused_with_both_numbers() -> None:
    rig = Rig(num_device=8, num_host=2, is_separate=True)
    needed = rig.packed_nbytes(make_model("d1", 16))
    with pytest.raises(AdapterTooLargeError, match=f"needs {needed} bytes of host memory, all of it is"):
        rig.manager.add_adapter(rig.spec(1, rank=16))
    rig.check_empty()


def test_a_bad_source_leaves_nothing_behind(rig: Rig) -> None:
    spec = rig.spec(1)
    rig.source.errors["/p1"] = AdapterPathNotFoundError("adapter 'a1': no such path")
    with pytest.raises(AdapterPathNotFoundError, match="no such path"):
        rig.manager.add_adapter(spec)
    rig.check_empty()
    del rig.source.errors["/p1"]
    assert rig.manager.add_adapter(spec).is_new


def test_content_that_is_not_what_was_registered_is_refused(rig: Rig) -> None:
    spec = rig.spec(1)
    rig.source.put("/p1", make_model("something else"))
    with pytest.raises(AdapterContentChangedError, match=r"its source has changed .* \(digest d1\); reload it"):
        rig.manager.add_adapter(spec)
    rig.check_empty()


def test_remove_frees_every_tier_and_tells_the_kv_cache_at_the_next_poll(rig: Rig) -> None:
    rig.add(1, 2)
    rig.activate(1)
    assert rig.manager.remove_adapter(1)
    assert not rig.manager.remove_adapter(1)
    assert rig.dropped == []
    rig.manager.poll()
    assert rig.dropped == ["d1"]
    rig.manager.drop_adapter(2)
    with pytest.raises(AdapterNotFoundError, match="id 2 is unknown"):
        rig.manager.drop_adapter(2)
    rig.check_empty()


def test_a_digest_that_came_back_before_the_poll_is_not_dropped(rig: Rig) -> None:
    rig.add(1)
    rig.manager.remove_adapter(1)
    rig.add(1)
    rig.manager.poll()
    assert rig.dropped == []


def test_running_requests_finish_on_a_removed_adapter(rig: Rig) -> None:
    rig.add(1)
    slot = rig.acquire(1)
    assert rig.manager.remove_adapter(1)
    rig.check_output(slot, make_model("d1"))
    with pytest.raises(AdapterNotFoundError):
        rig.manager.try_acquire(1)
    with pytest.raises(AdapterConflictError, match="requests still run on the removed adapter 'a1'"):
        rig.manager.add_adapter(rig.spec(1))
    rig.manager.check_integrity()
    rig.manager.release(1)
    rig.check_empty()
    rig.add(1)


def test_a_pin_does_not_save_from_removal(rig: Rig) -> None:
    rig.add(1)
    rig.pin(1)
    rig.manager.remove_adapter(1)
    rig.check_empty()


# ------------------------------------------------------------------------------------------------------ shared contents


def test_two_ids_of_one_content_share_everything(rig: Rig) -> None:
    assert rig.manager.add_adapter(rig.spec(1, "same")).is_new
    assert rig.manager.add_adapter(rig.spec(2, "same")).is_new
    assert sum(rig.source.opens.values()) == 1
    slot = rig.acquire(1)
    assert rig.manager.try_acquire(2).lora_slot == slot
    assert rig.manager.report().tier("host").num_adapters == 1
    assert rig.slots() == [1, None]
    rig.manager.release(1)
    rig.manager.remove_adapter(1)
    assert rig.slots() == [2, None]
    assert rig.manager.poll() is None
    assert rig.dropped == []
    rig.check_output(slot, make_model("same"))
    rig.manager.release(2)
    rig.manager.remove_adapter(2)
    rig.check_empty()
    rig.manager.poll()
    assert rig.dropped == ["same"]


def test_what_one_name_pins_the_other_cannot_evict(rig: Rig) -> None:
    rig.manager.add_adapter(rig.spec(1, "same"))
    rig.manager.add_adapter(rig.spec(2, "same"))
    rig.pin(1)
    assert not rig.manager.evict_adapter(2)
    assert not rig.manager.deactivate_adapter(2)
    assert rig.slots() == [1, None]
    assert rig.manager.deactivate_adapter(1)
    assert rig.slots() == [None, None]


def test_any_source_of_a_content_will_do(rig: Rig) -> None:
    rig.manager.add_adapter(rig.spec(1, "same"))
    rig.manager.add_adapter(rig.spec(2, "same"))
    rig.manager.evict_adapter(1)
    rig.source.errors["/p2"] = AdapterPathNotFoundError("gone")
    rig.acquire(2)
    assert rig.source.opens == {"/p1": 2, "/p2": 1}


# --------------------------------------------------------------------------------------------------- nearer and farther


def test_verbs_say_whether_something_changed(rig: Rig) -> None:
    rig.add(1)
    assert rig.activate(1)
    assert not rig.activate(1)
    assert rig.pin(1)
    assert not rig.pin(1)
    assert rig.manager.unpin_adapter(1)
    assert not rig.manager.unpin_adapter(1)
    assert rig.manager.deactivate_adapter(1)
    assert not rig.manager.deactivate_adapter(1)
    assert rig.manager.evict_adapter(1)
    assert not rig.manager.evict_adapter(1)
    assert rig.tier_of(1) == "source"


@pytest.mark.parametrize(
    "verb", ["activate_adapter", "deactivate_adapter", "evict_adapter", "pin_adapter", "unpin_adapter"]
)
def test_verbs_do_not_know_the_unknown(rig: Rig, verb: str) -> None:
    with pytest.raises(AdapterNotFoundError, match="id 7 is unknown"):
        getattr(rig.manager, verb)(7)


def test_eviction_goes_one_tier_down_and_the_name_still_resolves(rig: Rig) -> None:
    rig.add(1)
    rig.activate(1)
    assert rig.manager.evict_adapter(1)
    assert rig.tier_of(1) == "host"
    assert rig.manager.evict_adapter(1)
    assert rig.tier_of(1) == "source"
    assert rig.manager.report().tier("host").used_bytes == 0
    rig.check_output(rig.acquire(1), make_model("d1"))


def test_what_is_in_use_or_pinned_stays(rig: Rig) -> None:
    rig.add(1, 2)
    rig.acquire(1)
    rig.pin(2)
    for adapter_id in (1, 2):
        assert not rig.manager.evict_adapter(adapter_id)
    assert not rig.manager.deactivate_adapter(1)
    assert rig.slots() == [1, 2]


def test_promotion_tells_whom_it_evicted(rig: Rig) -> None:
    rig.add(1, 2, 3)
    rig.activate(1)
    rig.activate(2)
    assert rig.loader is not None
    with rig.loader.opened():
        assert rig.manager.promote_adapter(3).evicted == ("a1",)


def test_adding_tells_whom_it_evicted() -> None:
    rig = Rig()
    rig.add(1, 2, 3)
    outcome = rig.manager.add_adapter(rig.spec(4))
    assert outcome.evicted == ("a1",)
    assert rig.tier_of(1) == "source"


def test_pins_beyond_the_device_are_refused_with_both_numbers(rig: Rig) -> None:
    rig.add(1, 2, 3)
    rig.pin(1)
    rig.pin(2)
    size = rig.config.adapter_memory_bytes // 2
    with pytest.raises(AdapterNoRoomError, match=f"it needs {size} bytes, and {2 * size} of the {2 * size} bytes"):
        rig.pin(3)
    assert rig.slots() == [1, 2]


def test_a_pin_survives_pressure(rig: Rig) -> None:
    rig.add(1, 2, 3)
    rig.pin(1)
    for adapter_id in (2, 3, 2, 3):
        rig.activate(adapter_id)
        assert rig.slots()[0] == 1


# ---------------------------------------------------------------------------------------------------------------- views


def test_the_list_tells_where_each_adapter_is(rig: Rig) -> None:
    rig.add(1, 2, 3)
    rig.clock.now_s = 5.0
    slot = rig.acquire(2)
    rig.pin(1)
    rig.manager.evict_adapter(3)
    one, two, three = rig.manager.list_adapters()
    assert (one.tier, one.is_pinned, one.num_running) == (Tier.DEVICE, True, 0)
    assert (two.tier, two.lora_slot, two.num_running, two.last_used_s) == (Tier.DEVICE, slot, 1, 5.0)
    assert (three.tier, three.lora_slot, three.is_loading, three.error) == (Tier.SOURCE, None, False, None)
    assert one.nbytes == two.nbytes == rig.config.adapter_memory_bytes // 2


def test_stats_count_what_happens(rig: Rig) -> None:
    rig.add(1, 2, 3)
    for adapter_id in (1, 1, 2, 3):
        rig.acquire(adapter_id)
        rig.manager.release(adapter_id)
    rig.manager.evict_adapter(3)
    rig.manager.remove_adapter(3)
    stats = rig.manager.report()
    counters = rig.manager._log.counters
    assert (counters.num_hits, counters.num_misses) == (1, 3)
    assert counters.loads == {"add": 3}
    assert counters.evictions == {"device_room": 1, "verb": 1}
    assert (counters.num_promotions, counters.num_drops, counters.num_load_failures) == (3, 1, 0)
    assert counters.num_copies == (3 if rig.is_separate else 0)
    assert (stats.tier("device").num_adapters, stats.tier("host").num_adapters, stats.num_adapters) == (1, 2, 2)
    assert stats.tier("device").used_bytes == stats.tier("device").max_bytes / 2
    assert stats.tier("device").pressure == 0, "all of it is idle"
    assert (stats.loads, stats.evictions) == (counters.loads, counters.evictions)
    counters.loads["add"] = 99
    assert stats.loads == {"add": 3}, "a snapshot"


def test_slots_are_bounded_by_bytes_unless_max_loras_says_otherwise() -> None:
    assert Rig().manager.table.capacity == 64
    assert Rig(is_bound_by_count=True).manager.table.capacity == 2
