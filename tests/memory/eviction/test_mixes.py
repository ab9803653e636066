"""Adapters of one mix come to the device together, or wait together, and hold up no other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core import AcquireResult, MixPart, WaitsFor
from loraplex.errors import AdapterMixError, AdapterNoRoomError, AdapterNotFoundError, AdapterTooLargeError
from tests.memory.rig import Rig, make_model


@pytest.fixture(params=[False, True], ids=["one memory", "two memories"])
def is_separate(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def room_for(num_device: int, num_adapters: int, is_separate: bool, num_host: int | None = None) -> Rig:
    """Adapters 1 .. num_adapters without biases, none of them read yet."""
    host = num_host or max(num_device, num_adapters)
    rig = Rig(num_device=num_device, num_host=host, is_bound_by_count=True, is_separate=is_separate)
    for adapter_id in range(1, num_adapters + 1):
        spec = rig.spec(adapter_id)
        rig.source.put(spec.path, make_model(spec.adapter_digest, modules=("v_proj",)))
        rig.manager.attach_adapters([spec])
    return rig


def mix_of(*adapter_ids: int, weight: float = 0.5) -> list[MixPart]:
    return [MixPart(each, f"d{each}", weight) for each in adapter_ids]


def ask(rig: Rig, *adapter_ids: int) -> AcquireResult:
    return rig.manager.try_acquire_mix(mix_of(*adapter_ids))


def acquire(rig: Rig, *adapter_ids: int, num_passes: int = 6) -> tuple[int, ...]:
    """Pass after pass, the loader in between."""
    for _ in range(num_passes):
        rig.manager.poll()
        result = ask(rig, *adapter_ids)
        if result.waits_for is None:
            return result.mix_slots
        assert rig.loader is not None
        rig.loader.run_all()
    raise AssertionError(f"the mix {adapter_ids} does not come: {result}")


def release(rig: Rig, *adapter_ids: int) -> None:
    for adapter_id in adapter_ids:
        rig.manager.release(adapter_id)
    rig.manager.check_integrity()


def num_running(rig: Rig) -> list[int]:
    return [each.num_running for each in rig.manager.list_adapters()]


def test_references_are_taken_to_all_or_to_none(is_separate: bool) -> None:
    rig = room_for(3, 3, is_separate)
    rig.manager.poll()
    assert ask(rig, 1, 2) == AcquireResult(None, WaitsFor.LOAD)
    assert num_running(rig) == [0, 0, 0]
    slots = acquire(rig, 2, 1)
    assert num_running(rig) == [1, 1, 0]
    for slot, adapter_id in zip(slots, (2, 1), strict=True):
        rig.check_output(slot, make_model(f"d{adapter_id}", modules=("v_proj",)))
    with pytest.raises(AdapterNotFoundError):
        ask(rig, 1, 77)
    assert num_running(rig) == [1, 1, 0]
    release(rig, 1, 2)


def test_no_part_leaves_for_another_part(is_separate: bool) -> None:
    rig = room_for(2, 4, is_separate)
    for pair in ((1, 2), (3, 4), (2, 3)):
        assert len(set(acquire(rig, *pair))) == 2
        release(rig, *pair)
    assert acquire(rig, 4, 1)
    rig.manager.poll()
    assert ask(rig, 4, 2).waits_for is WaitsFor.ROOM
    assert num_running(rig) == [1, 0, 0, 1]


def test_what_waits_for_the_others_stays_for_a_later_request_of_the_pass(is_separate: bool) -> None:
    rig = room_for(2, 3, is_separate)
    acquire(rig, 1)
    release(rig, 1)
    acquire(rig, 3)
    rig.manager.poll()
    assert ask(rig, 1, 2).waits_for is not None
    assert rig.manager.try_acquire(2).waits_for is not None
    assert rig.tier_of(1) == "device", "it would have made room for adapter 2 alone"


def test_mixes_that_want_more_than_fits_are_served_in_turn(is_separate: bool) -> None:
    """Whoever comes first gets all of its own, also when each pass asks for both."""
    rig = room_for(3, 4, is_separate, num_host=3)
    served: list[tuple[int, ...]] = []
    queue = [(1, 2), (3, 4)]
    for _ in range(20):
        rig.manager.poll()
        for mix in list(queue):
            if ask(rig, *mix).waits_for is None:
                served.append(mix)
                queue.remove(mix)
                release(rig, *mix)
        assert rig.loader is not None
        rig.loader.run_all()
    assert served == [(1, 2), (3, 4)]


def test_whose_pause_makes_room_for_a_mix(is_separate: bool) -> None:
    rig = room_for(3, 5, is_separate)
    acquire(rig, 1, 2)
    acquire(rig, 2)
    acquire(rig, 3)
    for adapter_id in (4, 5):  # they are in host memory
        rig.manager.poll()
        ask(rig, adapter_id)
        assert rig.loader is not None
        rig.loader.run_all()
    rig.manager.poll()
    assert ask(rig, 2, 4).waits_for is WaitsFor.ROOM
    assert list(rig.manager.victims_for_mix([2, 4], [2, 1, 3])) == [1], "its own part is no victim"
    assert list(rig.manager.victims_for_mix([2, 4], [2])) == []
    assert list(rig.manager.victims_for_mix([2, 77], [1, 3])) == []
    release(rig, 3)
    rig.manager.poll()
    assert ask(rig, 4, 5).waits_for is WaitsFor.ROOM, "4 has the room of 3, and 5 has none"
    assert list(rig.manager.victims_for_mix([4, 5], [1, 2])) == [1], "4 does not count as room for 5"


def test_what_an_empty_device_does_not_hold_is_refused(is_separate: bool) -> None:
    rig = room_for(2, 3, is_separate)
    with pytest.raises(AdapterTooLargeError, match="a mix of 3 adapters needs"):
        acquire(rig, 1, 2, 3)
    assert num_running(rig) == [0, 0, 0]
    rig.manager.check_integrity()


def test_what_pins_leave_no_room_for_is_refused(is_separate: bool) -> None:
    rig = room_for(2, 3, is_separate)
    rig.pin(3)
    with pytest.raises(AdapterNoRoomError):
        acquire(rig, 1, 2)
    assert num_running(rig) == [0, 0, 0]
    assert acquire(rig, 1)
    with pytest.raises(AdapterNoRoomError):
        acquire(rig, 1, 2)  # the end of the request on 1 would not help
    rig.manager.unpin_adapter(3)
    assert acquire(rig, 1, 2)


def test_one_content_under_two_ids_is_there_once(is_separate: bool) -> None:
    rig = room_for(1, 1, is_separate)
    rig.source.put("/p2", make_model("d1", modules=("v_proj",)))
    rig.manager.attach_adapters([rig.spec(2, "d1")])
    slots = acquire(rig, 1, 2)
    assert slots[0] == slots[1]
    release(rig, 1, 2)


def test_a_failed_part_fails_the_mix_and_no_other(is_separate: bool) -> None:
    rig = room_for(3, 3, is_separate)
    rig.source.models.pop("/p2")
    with pytest.raises(Exception, match="'a2'"):
        acquire(rig, 1, 2)
    assert num_running(rig) == [0, 0, 0]
    assert acquire(rig, 1, 3)


def test_biases_of_two_adapters_are_no_mix() -> None:
    rig = Rig(num_device=3, num_host=3)
    rig.add(1, 2)
    with pytest.raises(AdapterMixError, match="'a1' has biases: its weight in a mix is 1"):
        ask(rig, 1)
    with pytest.raises(AdapterMixError, match="'a1' has biases, and so has another"):
        rig.manager.try_acquire_mix(mix_of(1, 2, weight=1.0))
    assert len(rig.manager.try_acquire_mix(mix_of(1, weight=1.0)).mix_slots) == 1


MIXES = st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True)


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(MIXES, min_size=1, max_size=8),
    lengths=st.lists(st.integers(1, 4), min_size=8, max_size=8),
    is_separate=st.booleans(),
    num_host=st.sampled_from((3, 5)),
)
def test_every_mix_is_served(
    asked: Sequence[Sequence[int]], lengths: Sequence[int], is_separate: bool, num_host: int
) -> None:
    """In a queue that is asked in order, pass after pass, with room for three adapters."""
    rig = room_for(3, 5, is_separate, num_host)
    waiting, running = list(enumerate(asked)), dict[int, int]()
    for _ in range(200):
        rig.manager.poll()
        for index, mix in list(waiting):
            if ask(rig, *mix).waits_for is None:
                waiting.remove((index, mix))
                running[index] = lengths[index]
        assert rig.loader is not None
        rig.loader.run_all()
        running = {index: left - 1 for index, left in running.items()}
        for index in [index for index, left in running.items() if left <= 0]:
            release(rig, *asked[index])
            del running[index]
        if not waiting and not running:
            break
    assert not waiting
    assert not any(num_running(rig))
