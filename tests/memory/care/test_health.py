"""Damaged memory and wrong results: noticed, let go, restored; no other is disturbed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.core import Tier, WaitsFor
from loraplex.errors import AdapterFaultError
from loraplex.events import EventKind, EventLog
from loraplex.memory.care.damage import MAX_FAULTS_OF_A_CHUNK, holds_patterns
from loraplex.memory.care.health import BACKOFF_S
from loraplex.memory.residency.records import StoredWeights
from loraplex.memory.residency.tiers import Tiers
from loraplex.memory.space.arena import Extent
from loraplex.memory.weights.compression import CompressedCopies, CompressedCopy
from loraplex.memory.weights.copies import Arrival
from loraplex.memory.weights.disk_cache import DiskCache
from loraplex.memory.weights.packing import Packer
from tests.kernels.cases import BACKENDS
from tests.memory.fake_copies import FakeCopies
from tests.memory.rig import BASE, TARGETS, Rig, make_model


@pytest.fixture(params=[False, True], ids=["shared", "separate"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(num_device=2, num_host=3, is_separate=request.param, slack_bytes=16384)
    yield rig
    rig.manager.check_integrity()


def events_of(rig: Rig) -> EventLog:
    return rig.manager._residency.log.events


def kinds(rig: Rig) -> list[EventKind]:
    wanted = (EventKind.FAULT, EventKind.RECOVERY)
    return [event.kind for event in events_of(rig).take() if event.kind in wanted]


def flip(rig: Rig, adapter_id: int, tier: Tier = Tier.HOST) -> None:
    """One bit of an adapter's memory."""
    store = rig.manager._residency
    weights = store.adapters[adapter_id].weights
    place = weights.device if tier is Tier.DEVICE else weights.host
    pool = store.tiers.device.pool if tier is Tier.DEVICE else store.tiers.host.pool
    assert place is not None
    assert pool is not None
    pool.view(place.extents[1])[17] ^= 4
    weights.checked_s = -math.inf  # some time after it was read


def test_bytes_that_changed_on_the_host_are_noticed_at_promote_and_read_again(rig: Rig) -> None:
    rig.add(1, 2)
    flip(rig, 1)
    slot = rig.acquire(1)
    rig.check_output(slot, make_model("d1"))
    assert rig.source.opens["/p1"] == 2, "the source was read again"
    assert rig.source.opens["/p2"] == 1
    assert kinds(rig) == [EventKind.FAULT, EventKind.RECOVERY]
    assert rig.manager._log.counters.num_damaged == 1
    rig.manager.poll()
    assert rig.dropped == ["d1"], "what the damaged weights computed is not used"


def test_weights_that_wait_for_room_are_not_summed_and_are_before_they_are_used(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each adapter that waited was summed every second between two steps, before it was known that no room is there."""
    rig.add(1, 2, 3)
    for running in (1, 2):
        rig.acquire(running)
    summed, changed = [0], Tiers.changed

    def counted(tiers: Tiers, weights: StoredWeights, tier: Tier) -> list[Extent]:
        summed[0] += weights.nbytes
        return changed(tiers, weights, tier)

    monkeypatch.setattr(Tiers, "changed", counted)
    for _ in range(5):
        rig.clock.now_s += 1
        rig.manager.poll()
        assert rig.manager.try_acquire(3).waits_for is WaitsFor.ROOM
    assert summed == [0]
    flip(rig, 3)
    rig.manager.release(1)
    rig.check_output(rig.acquire(3), make_model("d3"))
    assert rig.source.opens["/p3"] == 2, "the source was read again"


def test_a_scrub_checks_everything_in_turn(rig: Rig) -> None:
    rig.add(1, 2, 3)
    size = rig.manager._residency.adapters[1].weights.nbytes
    flip(rig, 3)
    for _ in range(2):
        assert rig.manager.health.scrub(size) == {}
        assert rig.tier_of(3) == "host"
    rig.manager.health.scrub(size)
    assert rig.tier_of(3) == "source", "what is idle is let go at once"
    assert rig.manager._log.counters.scrubbed_bytes == 3 * size
    rig.check_output(rig.acquire(3), make_model("d3"))
    assert kinds(rig) == [EventKind.FAULT, EventKind.RECOVERY]


def test_a_scrub_of_large_weights_is_followed_by_a_pause(rig: Rig) -> None:
    """They are checked whole: one of gigabytes was, second after second, whatever the bytes in a second."""
    rig.add(1, 2)
    size, scrubbed = rig.manager._residency.adapters[1].weights.nbytes, []
    for _ in range(9):
        assert rig.manager.health.scrub(size // 4) == {}
        scrubbed.append(rig.manager._log.counters.scrubbed_bytes // size)
    assert scrubbed == [1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_a_running_adapter_is_named_and_restored_when_its_requests_have_ended(rig: Rig) -> None:
    rig.add(1, 2)
    slots = [rig.acquire(1), rig.acquire(2)]
    flip(rig, 1, Tier.DEVICE if rig.is_separate else Tier.HOST)
    assert rig.manager.health.scrub(1 << 20) == {1: "a1"}
    assert rig.tier_of(1) == "device", "it is not taken from under its requests"
    rig.check_output(slots[1], make_model("d2"))
    rig.manager.release(1)
    rig.manager.health.restore(1)
    rig.check_output(rig.acquire(1), make_model("d1"))
    expected_opens = 1 if rig.is_separate else 2  # the host's copy is good: it is copied once more
    assert rig.source.opens["/p1"] == expected_opens


def test_a_pinned_adapter_comes_back_by_itself(rig: Rig) -> None:
    rig.add(1)
    rig.pin(1)
    flip(rig, 1)
    rig.manager.health.scrub(1 << 20)
    rig.manager.check_integrity()
    assert rig.loader is not None
    rig.loader.run_all()
    assert rig.tier_of(1) == "device"
    rig.check_output(rig.acquire(1), make_model("d1"))


def test_memory_that_does_it_twice_is_fenced(rig: Rig) -> None:
    rig.add(1)
    for number in range(MAX_FAULTS_OF_A_CHUNK + 1):
        flip(rig, 1)
        rig.manager.health.scrub(1 << 20)
        fenced = [
            event.details["num_fenced_chunks"] for event in events_of(rig).take() if event.kind is EventKind.FAULT
        ]
        assert [int(number_fenced) > 0 for number_fenced in fenced] == [number >= MAX_FAULTS_OF_A_CHUNK]
        rig.check_output(rig.acquire(1), make_model("d1"))
        rig.manager.release(1)
        rig.manager.evict_adapter(1)


def test_patterns_find_memory_that_does_not_hold() -> None:
    assert holds_patterns(torch.zeros(64, dtype=torch.uint8))


def test_a_copy_that_fails_goes_to_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(num_device=2, num_host=3, is_separate=True, slack_bytes=4096)
    rig.add(1)
    failures, copy = iter((True, False)), rig.manager._residency.tiers.copies.copy

    def fail_once(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Arrival:
        if next(failures):
            raise RuntimeError("bad memory")
        return copy(sources, targets)

    monkeypatch.setattr(rig.manager._residency.tiers.copies, "copy", fail_once)
    rig.check_output(rig.acquire(1), make_model("d1"))
    assert kinds(rig) == [EventKind.FAULT, EventKind.RECOVERY]
    rig.manager.check_integrity()


# ------------------------------------------------------------------------------------------------------- wrong results


def test_a_quarantined_adapter_is_refused_and_its_twin_too(rig: Rig) -> None:
    rig.add(1)
    rig.manager.add_adapter(rig.spec(7, digest="d1"))
    assert rig.manager.health.refusal(1) is None
    assert rig.manager.health.quarantine(1, "its logits are not finite") == [1, 7]
    for adapter_id in (1, 7):
        refusal = rig.manager.health.refusal(adapter_id)
        assert isinstance(refusal, AdapterFaultError)
    assert set(rig.manager.health.quarantined()) == {1, 7}
    assert rig.manager.health.refusal(99) is None
    errors = {r.adapter_id: r.error for r in rig.manager.list_adapters()}
    assert "not finite" in (errors[1] or "")


def test_a_diagnosis_reads_the_weights_anew(rig: Rig) -> None:
    rig.add(1)
    rig.acquire(1)
    rig.manager.release(1)
    rig.manager.health.quarantine(1, "NaN")
    assert rig.manager.health.next_diagnosis() == 1
    assert rig.tier_of(1) == "source"
    assert rig.manager.health.next_diagnosis() is None
    rig.check_output(rig.acquire(1), make_model("d1"))
    rig.manager.release(1)
    rig.manager.health.still_ill(1, "NaN again")
    assert rig.manager.health.next_diagnosis() is None
    rig.clock.now_s += BACKOFF_S[0]
    assert rig.manager.health.next_diagnosis() == 1
    rig.manager.health.cleared(1)
    assert rig.manager.health.refusal(1) is None
    assert kinds(rig)[0] is EventKind.FAULT
    assert rig.manager._log.counters.num_recovered == 1


def test_a_case_whose_adapter_is_gone_is_closed(rig: Rig) -> None:
    rig.add(1)
    rig.manager.health.quarantine(1, "NaN")
    rig.manager.remove_adapter(1)
    assert rig.manager.health.next_diagnosis() is None
    rig.add(1)
    assert rig.manager.health.refusal(1) is None


def test_what_is_borrowed_stays_on_the_device_and_counts_as_no_use(rig: Rig) -> None:
    rig.add(1)
    rig.acquire(1)
    rig.manager.release(1)
    hits = rig.manager._log.counters.num_hits
    with rig.manager.health.borrowed(lambda digest: True) as borrowed:
        assert borrowed == ("d1", 0)
        evicted = ThreadPoolExecutor(1).submit(rig.manager.evict_adapter, 1)
        with pytest.raises(TimeoutError):
            evicted.result(0.05)
        assert rig.tier_of(1) == "device"
    assert evicted.result(10), "the loan is no request: the verb waited for its end"
    with rig.manager.health.borrowed(lambda digest: False) as borrowed:
        assert borrowed is None
    assert rig.manager._log.counters.num_hits == hits
    assert rig.manager.evict_adapter(1)


def test_long_idle_adapters_leave_a_few_at_a_time(rig: Rig) -> None:
    rig.clock.now_s = 1000.0
    rig.add(1, 2, 3)
    rig.clock.now_s = 1100.0
    rig.acquire(3)
    rig.manager.release(3)
    housekeeping = rig.manager.housekeeping
    rig.manager.poll(), rig.manager.poll(), rig.manager.poll()
    assert housekeeping.reclaim_idle("host", 101.0, 2) == 0
    assert housekeeping.reclaim_idle("host", 50.0, 2) == 1
    assert sorted(rig.tier_of(i) for i in (1, 2)) == ["host", "source"]
    assert rig.tier_of(3) == "device", "it was used lately"


def test_low_memory_lets_go_what_nobody_uses(rig: Rig) -> None:
    rig.add(1, 2, 3)
    rig.acquire(1)
    rig.acquire(2)
    rig.manager.release(2)
    for _ in range(3):
        rig.manager.poll()
    assert rig.manager.housekeeping.release_idle() > 0
    assert [rig.tier_of(i) for i in (1, 2)] == ["device", "host" if rig.is_separate else "source"]


def test_a_host_without_memory_lets_the_oldest_copies_go(rig: Rig) -> None:
    """What is on the device keeps its copy there. Where both are one memory, `release_idle` has done all of it."""
    rig.add(1, 2, 3)
    for adapter_id in (3, 1, 2):
        rig.clock.now_s += 10
        rig.acquire(adapter_id)
        rig.manager.release(adapter_id)
    rig.acquire(2)
    for _ in range(3):
        rig.manager.poll()
    unlocked: list[int] = []
    arena = rig.manager._tiers.host.pool.arena
    arena.unlock = lambda: unlocked.append(1)  # type: ignore[method-assign]
    housekeeping = rig.manager.housekeeping
    housekeeping.release_idle()
    released = housekeeping.release_host(is_machine_short=False)
    assert (released > 0) is rig.is_separate
    assert [rig.tier_of(i) for i in (3, 1, 2)] == ["source", "host" if rig.is_separate else "source", "device"]
    assert unlocked == []
    housekeeping.release_host(is_machine_short=True)
    assert unlocked == ([1] if rig.is_separate else [])
    assert [rig.tier_of(i) for i in (3, 1, 2)] == ["source", "source", "device"]
    if rig.is_separate:
        assert rig.manager.report().evictions["host_low_memory"] == 2
    rig.manager.check_integrity()


def test_the_younger_half_is_compressed_where_that_is_on() -> None:
    rig = Rig(num_device=2, num_host=16, is_separate=True, is_gated=False, host_compression="lossless")
    for adapter_id in (1, 2, 3, 4):
        rig.clock.now_s += 10
        rig.add(adapter_id)
    for _ in range(3):
        rig.manager.poll()
    assert rig.manager.housekeeping.release_host(is_machine_short=False) > 0
    for _ in range(200):  # a loader's thread compresses
        if rig.manager.report().tier("host").num_adapters == 0:
            break
        rig.manager.wait_for_change(0.05)
    assert rig.manager.report().tier("host").num_adapters == 0
    assert rig.manager.report().tier("compressed").num_adapters == 2
    assert [rig.tier_of(i) for i in (1, 2, 3, 4)] == ["source", "source", "host", "host"]
    rig.manager.check_integrity()
    rig.manager.close()


@pytest.mark.parametrize("error", [MemoryError("no memory"), RuntimeError("can't allocate memory")])
def test_a_copy_that_finds_no_memory_leaves_an_adapter_that_can_go(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was held as by a request, and never left."""

    def fail(*args: object) -> CompressedCopy:
        raise error

    monkeypatch.setattr(CompressedCopies, "compress", fail)
    rig = Rig(num_host=16, is_separate=True, host_compression="lossless")
    assert rig.loader is not None
    rig.add(1, 2)
    for _ in range(3):
        rig.manager.poll()
    assert rig.manager.housekeeping.reclaim_idle("host", -1.0, 1) == 2
    for adapter_id in (1, 2):
        with pytest.raises(type(error), match="memory"):
            rig.loader.run_one()
        assert rig.tier_of(adapter_id) == "host"
        rig.manager.remove_adapter(adapter_id)
    rig.check_empty()


def test_a_check_beside_the_steps_that_finds_no_memory_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tiers: Tiers, weights: object, tier: Tier) -> list[Extent]:
        raise MemoryError

    rig = Rig(copies=FakeCopies())
    assert rig.loader is not None
    rig.add(1, 2)
    flip(rig, 2)
    with monkeypatch.context() as without_memory:
        without_memory.setattr(Tiers, "changed", fail)
        rig.manager.health.scrub(1 << 20)
        rig.loader.run_all()
    assert [rig.tier_of(each) for each in (1, 2)] == ["host", "host"]
    rig.manager.health.scrub(1 << 20)
    rig.loader.run_all()
    assert [rig.tier_of(each) for each in (1, 2)] == ["host", "source"]
    rig.manager.remove_adapter(1), rig.manager.remove_adapter(2)
    rig.check_empty()


def drop_before(disk: DiskCache, verb: str) -> None:
    """Another process deletes the file for room, after it was seen."""
    reading = getattr(disk, verb)

    def read(digest: str, *args: Any) -> Any:
        disk.drop(digest)
        return reading(digest, *args)

    setattr(disk, verb, read)


def flip_on_disk(disk: DiskCache, at: int) -> None:
    (file,) = disk._own_folder.glob("*.lora")
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "is_damaged"),
    [
        (partial(drop_before, verb="read_layout"), False),
        (partial(drop_before, verb="read_into"), False),
        (partial(flip_on_disk, at=9), True),
        (partial(flip_on_disk, at=-9), True),
    ],
    ids=["gone", "gone after its header", "damaged header", "damaged extent"],
)
def test_a_copy_on_disk_that_went_for_room_was_not_damaged(
    tmp_path: Path, spoil: Callable[[DiskCache], None], is_damaged: bool
) -> None:
    """A full disk tier told of 20 damaged copies of sound adapters in 15 s."""
    for is_restarted in (False, True):
        rig = Rig(num_device=4, num_host=4)
        packer = Packer(TARGETS, BACKENDS[0], torch.float32, BASE)
        disk = rig.manager._tiers.disk = DiskCache(tmp_path, 1 << 20, packer.form("auto"), packer.check_layout)
        rig.source.put("/p1", make_model("ab1"))
        rig.manager.attach_adapters([rig.spec(1, "ab1")])
        if is_restarted:
            spoil(disk)
        rig.check_output(rig.acquire(1), make_model("ab1"))
        assert rig.source.opens["/p1"] == 1
        log = rig.manager._residency.log
        kinds = [each.kind for each in log.events.take() if each.kind in (EventKind.FAULT, EventKind.RECOVERY)]
        is_found = is_damaged and is_restarted
        assert kinds == [EventKind.FAULT, EventKind.RECOVERY] * is_found
        assert log.counters.num_damaged == is_found
        rig.manager.check_integrity()
