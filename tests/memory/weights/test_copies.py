"""Copies beside the steps: what waits for what on a GPU's streams, and adapters that arrive layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from loraplex.compat.vllm import WorkerLoRAManager
from loraplex.core import Tier
from loraplex.errors import AdapterUnavailableError, DeviceLostError
from loraplex.events import EventKind
from loraplex.kernels.checksum import checksum
from loraplex.memory.residency.records import StoredWeights, WeightState
from loraplex.memory.residency.transfers import MAX_FAILED_COPIES
from loraplex.memory.weights.copies import CudaCopies, SynchronousCopies, copies_for
from tests.memory.fake_copies import FakeArrival, FakeCopies
from tests.memory.rig import TARGETS, Rig, make_model

CPU = torch.device("cpu")


# -------------------------------------------------------------------------------------------------------------- streams


class FakeCuda:
    """torch.cuda, as far as copies go: writes down what is enqueued where. `log` has (stream, what)."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.num_streams = 0
        self.current = self.Stream("cpu", name="steps", cuda=self)
        self.steps = self.current

    def current_stream(self, _device: torch.device) -> FakeCuda.Stream:
        return self.current

    class Stream:
        def __init__(self, _device: object, name: str, cuda: FakeCuda) -> None:
            self.name, self.cuda = name, cuda

        def wait_stream(self, other: FakeCuda.Stream) -> None:
            self.cuda.log.append((self.name, f"waits for {other.name}"))

        def record_event(self, event: FakeCuda.Event) -> FakeCuda.Event:
            event.number = sum(what.startswith("event") for _, what in self.cuda.log)
            self.cuda.log.append((self.name, f"event {event.number}"))
            return event

        def wait_event(self, event: FakeCuda.Event) -> None:
            self.cuda.log.append((self.name, f"waits for event {event.number}"))

        def synchronize(self) -> None:
            self.cuda.log.append((self.name, "the host waits"))

    class Event:
        number = -1

        def __init__(self, blocking: bool, cuda: FakeCuda) -> None:
            assert blocking, "a waiting thread must not spin"
            self.cuda = cuda

        def synchronize(self) -> None:
            self.cuda.log.append(("host", f"waits for event {self.number}"))

    @contextmanager
    def stream(self, stream: FakeCuda.Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class FakeModule:
    """What CudaCopies takes for the module."""

    def __init__(self) -> None:
        self.cuda = FakeCuda()
        self.current_stream, self.stream = self.cuda.current_stream, self.cuda.stream

    def Stream(self, device: torch.device) -> FakeCuda.Stream:
        self.cuda.num_streams += 1
        return FakeCuda.Stream(device, ("copies", "checks")[self.cuda.num_streams - 1], self.cuda)

    def Event(self, blocking: bool) -> FakeCuda.Event:
        return FakeCuda.Event(blocking, self.cuda)


def pieces(count: int = 3) -> list[torch.Tensor]:
    return [torch.full((64,), index, dtype=torch.uint8) for index in range(count)]


def test_a_copy_waits_for_the_steps_and_a_step_for_its_piece() -> None:
    module = FakeModule()
    copies, targets = CudaCopies(torch.device("cuda"), module), [torch.zeros(64, dtype=torch.uint8) for _ in range(3)]
    arrival = copies.copy(pieces(), targets)
    assert module.cuda.log == [
        ("copies", "waits for steps"),  # whatever they have queued may still touch the targets
        ("copies", "event 0"),
        ("copies", "event 1"),
        ("copies", "event 2"),
    ]
    assert all(target.equal(piece) for target, piece in zip(targets, pieces(), strict=True))
    module.cuda.log.clear()
    arrival.hold_steps(1)
    assert module.cuda.log == [("steps", "waits for event 1")], "not the host, and for no later piece"
    module.cuda.log.clear()
    arrival.join()
    assert module.cuda.log == [("host", "waits for event 2")]


def test_a_copy_that_cannot_be_begun_leaves_nothing_under_way() -> None:
    module = FakeModule()
    copies = CudaCopies(torch.device("cuda"), module)
    with pytest.raises(RuntimeError):
        copies.copy(pieces(), [torch.zeros(64, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8), *pieces(1)])
    assert module.cuda.log[-1] == ("copies", "the host waits")


def test_moves_are_in_the_order_of_the_steps_and_checks_beside_the_copies() -> None:
    module = FakeModule()
    copies = CudaCopies(torch.device("cuda"), module)
    source, target = pieces(2)
    copies.move(source, target)
    assert module.cuda.log == []
    assert target.equal(source)
    assert copies.checksums(pieces()) == tuple(map(checksum, pieces()))
    assert module.cuda.log == [("checks", "waits for steps")]


def test_other_devices_copy_at_once() -> None:
    copies = copies_for(CPU)
    assert isinstance(copies, SynchronousCopies)
    targets = [torch.zeros(64, dtype=torch.uint8) for _ in range(3)]
    arrival = copies.copy(pieces(), targets)
    arrival.hold_steps(2)
    arrival.join()
    assert all(target.equal(piece) for target, piece in zip(targets, pieces(), strict=True))
    copies.move(targets[1], targets[2])
    assert targets[2].equal(targets[1])
    assert copies.checksums(targets) == tuple(map(checksum, targets))


# ---------------------------------------------------------------------------------------------------- arriving adapters


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(num_device=2, num_host=3, copies=FakeCopies(), slack_bytes=1 << 14)
    yield rig
    rig.manager.check_integrity()


def arrivals(rig: Rig) -> list[FakeArrival]:
    assert rig.copies is not None
    return rig.copies.arrivals


def acquire(rig: Rig, adapter_id: int) -> int:
    """As a request does whose adapter is in host memory: it waits for nothing."""
    result = rig.manager.try_acquire(adapter_id)
    assert result.lora_slot is not None
    rig.manager.check_integrity()
    return result.lora_slot


def weights_of(rig: Rig, adapter_id: int) -> StoredWeights:
    return rig.manager._residency.adapters[adapter_id].weights


def land(rig: Rig) -> None:
    assert rig.loader is not None
    rig.loader.run_all()


def test_it_is_usable_at_once_and_each_layer_is_right_when_its_gate_opens(rig: Rig) -> None:
    rig.add(1)
    slot = acquire(rig, 1)
    gate = rig.manager.prepare_step([slot])
    assert gate is not None
    table, model = rig.manager.table, make_model("d1")
    for layer in range(2):
        rows = [table.views(table.first_row(t.name), slot) for t in TARGETS if t.layer == layer]
        assert all(row is not None and row.lora_a is not None and row.lora_a.isnan().all() for row in rows)
        gate.wait_for_layer(layer)
        for target, row in zip([t for t in TARGETS if t.layer == layer], rows, strict=True):
            expected = model.layers[target.slices[0].module_name].lora_a
            assert row is not None
            assert row.lora_a is not None
            assert expected is not None
            assert row.lora_a.equal(expected)
        assert arrivals(rig)[0].num_done == layer + 1, "no layer is waited for before it is used"
    land(rig)
    assert rig.manager.prepare_step([slot]) is None
    assert gate.errors() == {}
    rig.check_output(slot, model)


def test_a_step_that_is_replayed_waits_for_all_of_it(rig: Rig) -> None:
    rig.add(1, 2)
    slots = [acquire(rig, 1), acquire(rig, 2)]
    gate = rig.manager.prepare_step(slots)
    assert gate is not None
    gate.wait_for_all()
    assert all(arrival.is_done for arrival in arrivals(rig))


def test_a_layer_without_weights_is_not_waited_for() -> None:
    rig = Rig(copies=FakeCopies())
    model = make_model("d1")
    for name in [name for name in model.layers if ".0." in name]:
        del model.layers[name]
    rig.source.put("/p1", model)
    rig.add(1)
    gate = rig.manager.prepare_step([acquire(rig, 1)])
    assert gate is not None
    gate.wait_for_layer(0)
    assert arrivals(rig)[0].num_done == 0
    gate.wait_for_layer(1)
    assert arrivals(rig)[0].is_done


def test_a_step_without_it_waits_for_nothing(rig: Rig) -> None:
    rig.add(1, 2)
    first = rig.acquire(1)
    land(rig)
    acquire(rig, 2)
    assert rig.manager.prepare_step([first]) is None
    assert rig.manager.prepare_step([]) is None


def test_what_is_told_of_it(rig: Rig) -> None:
    rig.add(1)
    slot = acquire(rig, 1)
    (residency,) = rig.manager.list_adapters()
    assert (residency.tier, residency.lora_slot, residency.is_loading) == (Tier.DEVICE, slot, True)
    assert weights_of(rig, 1).state is WeightState.ARRIVING
    assert rig.manager.report().num_loading == 1
    land(rig)
    (residency,) = rig.manager.list_adapters()
    assert (residency.tier, residency.lora_slot, residency.is_loading) == (Tier.DEVICE, slot, False)
    assert rig.manager._log.counters.num_copies == 1


def test_neither_copy_goes_or_moves_while_it_arrives(rig: Rig) -> None:
    """The host's is being read; FakeArrival looks whether it changed."""
    rig.add(1, 2, 3)
    acquire(rig, 1)
    rig.manager.release(1)
    places = weights_of(rig, 1).host, weights_of(rig, 1).device
    assert not rig.manager.evict_adapter(1)
    assert not rig.manager.deactivate_adapter(1)
    rig.manager.remove_adapter(2)
    rig.manager.compact(1 << 20, math.inf)
    assert rig.manager.health.scrub(1 << 20) == {}
    assert rig.manager.health.next_diagnosis() is None
    with rig.manager.health.borrowed(lambda digest: True) as borrowed:
        assert borrowed is None
    rig.manager.poll()
    rig.manager.poll()
    rig.manager.poll()
    assert rig.manager.housekeeping.release_idle() == 0
    assert rig.manager.reclaim_chunks(1) == 0
    assert (weights_of(rig, 1).host, weights_of(rig, 1).device) == places
    rig.manager.check_integrity()
    land(rig)
    assert rig.manager.evict_adapter(1)


def test_the_hosts_copy_may_go_when_it_has_arrived() -> None:
    rig = Rig(num_device=2, num_host=1, copies=FakeCopies())
    rig.add(1)
    acquire(rig, 1)
    land(rig)
    rig.manager.add_adapter(rig.spec(2))
    assert weights_of(rig, 1).host is None
    rig.check_output(0, make_model("d1"))


def test_verbs_wait_until_all_of_it_is_there(rig: Rig) -> None:
    rig.add(1, 2)
    acquire(rig, 1)
    rig.manager.release(1)
    assert not rig.activate(1)
    assert arrivals(rig)[0].is_done
    assert rig.pin(2)
    assert arrivals(rig)[1].is_done
    assert rig.loader is not None
    rig.add(3)
    assert rig.manager.deactivate_adapter(1)
    with rig.loader.opened():
        assert rig.manager.activate_adapter(3)
    assert (rig.tier_of(1), rig.tier_of(3)) == ("host", "device")


def test_one_that_is_removed_while_it_arrives_goes_when_it_has(rig: Rig) -> None:
    rig.add(1)
    acquire(rig, 1)
    rig.manager.release(1)
    rig.manager.remove_adapter(1)
    assert not any(WorkerLoRAManager(rig.manager).lora_index_to_id)
    rig.manager.check_integrity()
    land(rig)
    rig.check_empty()


def test_one_that_is_removed_under_its_request_goes_with_it(rig: Rig) -> None:
    rig.add(1)
    slot = acquire(rig, 1)
    rig.manager.remove_adapter(1)
    land(rig)
    rig.check_output(slot, make_model("d1"))
    rig.manager.release(1)
    rig.check_empty()


def test_memory_that_a_step_reads_is_no_target() -> None:
    rig = Rig(num_device=1, num_host=2, copies=FakeCopies())
    rig.add(1, 2)
    rig.acquire(1)
    land(rig)
    rig.manager.step_launched(1)
    rig.manager.release(1)
    rig.manager.poll()
    assert rig.manager.try_acquire(2).lora_slot is None
    assert len(arrivals(rig)) == 1, "nothing is copied before the commit"
    rig.manager.step_committed(1)
    rig.manager.poll()
    rig.check_output(acquire(rig, 2), make_model("d2"))


# --------------------------------------------------------------------------------------------------------------- faults


def test_copies_that_cannot_be_begun_try_other_places_and_fail(rig: Rig) -> None:
    assert rig.copies is not None
    rig.add(1)
    rig.copies.error = RuntimeError("bad memory")
    with pytest.raises(AdapterUnavailableError, match="bad memory"):
        rig.manager.try_acquire(1)
    faults = [e for e in rig.manager._residency.log.events.take() if e.kind is EventKind.FAULT]
    assert len(faults) == 1 + MAX_FAILED_COPIES
    rig.copies.error = None
    rig.manager.poll()
    rig.check_output(acquire(rig, 1), make_model("d1"))


def test_one_that_does_not_arrive_with_nobody_on_it_goes_elsewhere(rig: Rig) -> None:
    rig.add(1)
    rig.manager.prefetch(1)
    arrivals(rig)[0].fail(RuntimeError("bad memory"))
    land(rig)
    assert len(arrivals(rig)) == 2
    rig.check_output(acquire(rig, 1), make_model("d1"))
    kinds = [
        e.kind for e in rig.manager._residency.log.events.take() if e.kind in (EventKind.FAULT, EventKind.RECOVERY)
    ]
    assert kinds == [EventKind.FAULT, EventKind.RECOVERY]


def test_requests_on_what_does_not_arrive_end_and_then_it_goes(rig: Rig) -> None:
    rig.add(1)
    slot = acquire(rig, 1)
    gate = rig.manager.prepare_step([slot])
    arrivals(rig)[0].fail(RuntimeError("bad memory"))
    land(rig)
    rig.manager.check_integrity()
    assert gate is not None
    assert isinstance(gate.errors()[slot], AdapterUnavailableError), "what the step computed with it is dropped"
    with pytest.raises(AdapterUnavailableError):
        rig.manager.try_acquire(1)
    with pytest.raises(AdapterUnavailableError):
        rig.activate(1)
    rig.manager.add_adapter(rig.spec(7, "d1"))  # its content is in host memory, whatever became of the copy
    assert list(rig.manager.health.take_faults()) == [1, 7]
    rig.manager.release(1)  # as the engine ends it
    rig.manager.health.restore(1)
    assert rig.tier_of(1) == "host"
    rig.manager.check_integrity()
    rig.manager.poll()
    rig.check_output(acquire(rig, 1), make_model("d1"))


def test_a_device_that_is_lost_is_the_engines_matter(rig: Rig) -> None:
    rig.add(1)
    acquire(rig, 1)
    arrivals(rig)[0].fail(RuntimeError("CUDA error: an illegal memory access was encountered"))
    land(rig)
    with pytest.raises(DeviceLostError):
        rig.manager.poll()


@pytest.mark.parametrize("is_running", [False, True])
def test_damaged_bytes_are_noticed_when_they_have_arrived(rig: Rig, is_running: bool) -> None:
    rig.add(1)
    weights = weights_of(rig, 1)
    assert weights.host is not None
    rig.manager._residency.tiers.host.pool.view(weights.host.extents[1])[17] ^= 4
    weights.checked_s = -math.inf
    slot = acquire(rig, 1)
    gate = rig.manager.prepare_step([slot])
    if not is_running:
        rig.manager.release(1)
    land(rig)
    if is_running:
        assert gate is not None
        assert list(gate.errors()) == [slot]
        assert list(rig.manager.health.take_faults()) == [1]
        rig.manager.release(1)
        rig.manager.health.restore(1)
    assert rig.manager.health.take_faults() == {}
    assert rig.tier_of(1) == "source", "the host's copy is damaged too"
    rig.check_output(rig.acquire(1), make_model("d1"))
    assert rig.source.opens["/p1"] == 2


def test_what_was_just_read_is_not_checked_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.add(1)
    monkeypatch.setattr(rig.copies, "checksums", None)
    rig.check_output(acquire(rig, 1), make_model("d1"))
    land(rig)


def test_a_scrub_runs_beside_the_steps(rig: Rig) -> None:
    rig.add(1, 2)
    slots = [acquire(rig, 1), acquire(rig, 2)]
    land(rig)
    rig.manager.release(2)
    store = rig.manager._residency
    for adapter_id in (1, 2):
        place = weights_of(rig, adapter_id).device
        assert place is not None
        assert store.tiers.device.pool is not None
        store.tiers.device.pool.view(place.extents[0])[3] ^= 1
    assert rig.manager.health.scrub(1 << 20) == {}
    assert rig.manager.health.scrub(1 << 20) == {}, "one at a time"
    assert not rig.manager.evict_adapter(2), "it is being read"
    rig.manager.check_integrity()
    land(rig)
    assert rig.tier_of(2) == "host", "what is idle is let go at once"
    assert list(rig.manager.health.take_faults()) == [1]
    rig.manager.release(1)
    rig.manager.health.restore(1)
    assert rig.tier_of(1) == "host"
    assert [acquire(rig, 1), acquire(rig, 2)] == slots
    assert store.log.counters.scrubbed_bytes == weights_of(rig, 1).nbytes + weights_of(rig, 2).nbytes


def test_one_that_is_removed_while_it_is_scrubbed_goes_afterwards(rig: Rig) -> None:
    rig.add(1)
    assert rig.manager.health.scrub(1 << 20) == {}
    rig.manager.remove_adapter(1)
    rig.manager.check_integrity()
    land(rig)
    rig.check_empty()
