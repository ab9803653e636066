"""Loads in the background: one load for all who want it, errors for those who waited, nothing sticky."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from loraplex.core import AdapterSpec, WaitsFor
from loraplex.errors import (
    AdapterConfigMissingError,
    AdapterContentChangedError,
    AdapterError,
    AdapterLoadError,
    AdapterNoRoomError,
    AdapterPathNotFoundError,
    AdapterPermissionError,
    AdapterTruncatedError,
    AdapterUnavailableError,
    AdapterValidationError,
    AdapterWeightsMissingError,
    EngineShutdownError,
)
from loraplex.memory.residency.records import LoadJob, StoredAdapter
from loraplex.memory.residency.transfers import FAILURE_TTL_S, MAX_FAILED_COPIES
from loraplex.memory.weights import loading
from loraplex.memory.weights.copies import SynchronousCopies
from loraplex.processes.loader_threads import LoaderThreads
from tests.memory.gains import make_dora
from tests.memory.rig import Rig, make_model


@pytest.fixture
def rig() -> Rig:
    """Adapter 1 is registered, and evicted to its source."""
    rig = Rig()
    rig.add(1)
    rig.manager.evict_adapter(1)
    return rig


def ask(rig: Rig, adapter_id: int = 1) -> WaitsFor | None:
    """One request's question in one scheduling pass of its own."""
    rig.manager.poll()
    return rig.manager.try_acquire(adapter_id).waits_for


def load(rig: Rig) -> None:
    assert rig.loader is not None
    rig.loader.run_all()


def test_a_cold_adapter_is_loaded_beside_the_steps(rig: Rig) -> None:
    assert rig.loader is not None
    assert ask(rig) is WaitsFor.LOAD
    assert ask(rig) is WaitsFor.LOAD
    assert rig.loader.num_queued == 1
    assert rig.manager.list_adapters()[0].is_loading
    assert rig.manager.report().num_loading == 1
    assert rig.manager.report().num_waiting[WaitsFor.LOAD] == 1
    load(rig)
    assert ask(rig) is None
    rig.check_output(0, make_model("d1"))
    assert rig.source.opens["/p1"] == 2
    assert rig.manager._log.counters.loads == {"add": 1, "request": 1}


def test_a_prefetch_starts_the_load_that_the_request_then_finds(rig: Rig) -> None:
    rig.manager.prefetch(1)
    load(rig)
    assert ask(rig) is None
    assert rig.manager._log.counters.loads["prefetch"] == 1


def test_with_two_memories_a_prefetch_goes_all_the_way() -> None:
    rig = Rig(is_separate=True)
    rig.add(1)
    rig.manager.evict_adapter(1)
    rig.manager.prefetch(1)
    load(rig)
    assert rig.tier_of(1) == "device"
    rig.check_output(0, make_model("d1"))


def test_a_copy_that_is_done_at_once_needs_no_load() -> None:
    rig = Rig(is_separate=True)
    rig.add(1)
    assert ask(rig) is None
    residency = rig.manager.list_adapters()[0]
    assert (residency.tier.value, residency.is_loading, residency.lora_slot) == ("device", False, 0)
    assert rig.manager._log.counters.num_copies == 1


# ------------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    "error",
    [
        AdapterPathNotFoundError("no such path"),
        AdapterConfigMissingError("no config"),
        AdapterWeightsMissingError("no weights"),
        AdapterPermissionError("not allowed"),
        OSError("stale file handle"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_vanished_source_is_unavailable(rig: Rig, error: Exception) -> None:
    rig.source.errors["/p1"] = error
    ask(rig)
    load(rig)
    with pytest.raises(AdapterUnavailableError, match=rf"'a1': no copy .* source cannot be read \({error}\)"):
        ask(rig)
    rig.manager.check_integrity()


def test_a_vanished_source_does_not_matter_while_a_copy_is_left(rig: Rig) -> None:
    rig.acquire(1)
    rig.source.errors["/p1"] = AdapterPathNotFoundError("gone")
    rig.manager.release(1)
    rig.manager.evict_adapter(1)
    assert rig.tier_of(1) == "host"
    assert rig.acquire(1) == 0


@pytest.mark.parametrize(
    "error", [AdapterTruncatedError("short"), AdapterValidationError("bad", ("r is 0",))], ids=["truncated", "refused"]
)
def test_a_source_that_is_no_longer_what_it_was_has_changed(rig: Rig, error: Exception) -> None:
    rig.source.errors["/p1"] = error
    ask(rig)
    load(rig)
    with pytest.raises(AdapterContentChangedError, match=r"has changed since it was loaded.*; reload it") as refusal:
        ask(rig)
    assert str(error) not in str(refusal.value), "the source may be another file now: what it has is not told"


def test_changed_content_is_never_served(rig: Rig) -> None:
    rig.source.put("/p1", make_model("new content"))
    ask(rig)
    load(rig)
    with pytest.raises(AdapterContentChangedError, match="reload it"):
        ask(rig)
    assert rig.slots() == [None, None]


def test_what_is_not_an_adapter_error_is_explained(rig: Rig) -> None:
    rig.source.errors["/p1"] = RuntimeError("out of file handles")
    ask(rig)
    load(rig)
    with pytest.raises(AdapterLoadError, match="'a1' could not be loaded: RuntimeError: out of file handles"):
        ask(rig)


def test_adapters_of_one_content_are_told_of_their_own_source(rig: Rig) -> None:
    """They may be two tenants': neither hears of the other's name or path, in an error or on its card."""
    rig.manager.attach_adapters([rig.spec(2, "d1")])
    rig.source.put("/p1", make_model("new content"))
    rig.source.errors["/p2"] = AdapterPathNotFoundError("gone")
    assert (ask(rig, 1), ask(rig, 2)) == (WaitsFor.LOAD, WaitsFor.LOAD)
    rig.manager.attach_adapters([rig.spec(3, "d1")])
    load(rig)
    rig.manager.poll()
    with pytest.raises(AdapterContentChangedError, match=r"^adapter 'a1': the content of its source has changed"):
        rig.manager.try_acquire(1)
    with pytest.raises(AdapterUnavailableError, match=r"^adapter 'a2': .* source cannot be read"):
        rig.manager.try_acquire(2)
    errors = [each.error or "" for each in rig.manager.list_adapters()]
    assert ["'a1'" in errors[0], "'a2'" in errors[1], errors[2]] == [True, True, ""]
    assert not any(
        other in errors[mine] for mine, others in enumerate((("a2", "p2"), ("a1", "p1"))) for other in others
    )
    assert rig.manager.try_acquire(3).waits_for is WaitsFor.LOAD  # its source was not tried, and has the content
    load(rig)
    assert [ask(rig, adapter_id) for adapter_id in (1, 2, 3)] == [None] * 3
    rig.check_output(0, make_model("d1"))


def test_verbs_on_adapters_of_one_content_hear_of_their_own_source(rig: Rig) -> None:
    rig.manager.attach_adapters([rig.spec(2, "d1")])
    rig.source.errors |= {"/p1": AdapterPathNotFoundError("gone"), "/p2": RuntimeError("out of file handles")}
    with pytest.raises(AdapterUnavailableError, match=r"'a1'.*its source cannot be read"):
        rig.activate(1)
    with pytest.raises(AdapterLoadError, match="'a2' could not be loaded: RuntimeError: out of file handles"):
        rig.activate(2)


def test_every_request_of_the_pass_gets_the_error_and_the_next_pass_tries_afresh(rig: Rig) -> None:
    rig.source.errors["/p1"] = AdapterPathNotFoundError("gone")
    assert ask(rig) is WaitsFor.LOAD
    load(rig)
    rig.manager.poll()
    for _ in range(3):
        with pytest.raises(AdapterUnavailableError):
            rig.manager.try_acquire(1)
    assert rig.manager.list_adapters()[0].error is not None
    del rig.source.errors["/p1"]
    assert ask(rig) is WaitsFor.LOAD
    load(rig)
    assert ask(rig) is None
    assert rig.manager.list_adapters()[0].error is None
    assert rig.manager._log.counters.num_load_failures == 1


def test_the_error_keeps_for_a_request_that_is_not_asked_for_every_step(rig: Rig) -> None:
    rig.source.errors["/p1"] = AdapterPathNotFoundError("gone")
    ask(rig)
    load(rig)
    for _ in range(50):  # the batch was full: no request asked for it
        rig.manager.poll()
    with pytest.raises(AdapterUnavailableError):
        rig.manager.try_acquire(1)


def test_the_error_does_not_outlive_those_who_waited(rig: Rig) -> None:
    rig.source.errors["/p1"] = AdapterPathNotFoundError("gone")
    ask(rig)
    load(rig)
    rig.clock.now_s += FAILURE_TTL_S + 1
    del rig.source.errors["/p1"]
    assert ask(rig) is WaitsFor.LOAD


def test_a_failed_prefetch_is_nobodys_error_and_is_not_repeated_by_itself(rig: Rig) -> None:
    rig.source.errors["/p1"] = AdapterPathNotFoundError("gone")
    for _ in range(5):
        rig.manager.poll()
        rig.manager.prefetch(1)
        load(rig)
    assert rig.source.opens["/p1"] == 2
    del rig.source.errors["/p1"]
    assert ask(rig) is WaitsFor.LOAD
    load(rig)
    assert ask(rig) is None


def test_a_verb_tries_afresh_at_once_and_frees_the_waiting_from_the_error(rig: Rig) -> None:
    rig.source.errors["/p1"] = AdapterPathNotFoundError("gone")
    ask(rig)
    load(rig)
    with pytest.raises(AdapterUnavailableError):
        rig.activate(1)
    del rig.source.errors["/p1"]
    assert rig.activate(1)
    assert ask(rig) is None


def test_a_failed_copy_leaves_the_host_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are tried until tries run out; the memory that failed is fenced, so there has to be more."""
    rig = Rig(is_separate=True, slack_bytes=1 << 16)
    rig.add(1)

    num_tried = 0

    def fail(*args: object) -> None:
        nonlocal num_tried
        num_tried += 1
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(SynchronousCopies, "copy", fail)
        for _ in range(2):  # each request that asks in this pass
            with pytest.raises(AdapterUnavailableError, match="device lost"):
                rig.manager.try_acquire(1)
        assert num_tried == 1 + MAX_FAILED_COPIES
    rig.manager.check_integrity()
    assert rig.tier_of(1) == "host"
    rig.check_output(rig.acquire(1), make_model("d1"))


def test_a_packer_that_fails_gives_its_room_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("bad kernel")

    with monkeypatch.context() as patch:
        patch.setattr("loraplex.memory.weights.packing.Packer.write", fail)
        ask(rig)
        load(rig)
        with pytest.raises(AdapterLoadError, match="bad kernel"):
            rig.add(2)
    assert rig.manager.report().tier("host").used_bytes == 0
    rig.manager.check_integrity()


def test_an_adapter_that_does_not_fit_the_base_is_refused_alone(rig: Rig) -> None:
    """By verbs and to requests, under its own name; its room comes back, and no other adapter notices."""
    rig.add(2)
    slot = rig.acquire(2)
    dora = make_dora("dora")
    name, layer = next(iter(dora.layers.items()))
    assert layer.lora_b is not None
    broken = replace(layer, lora_b=torch.full_like(layer.lora_b, 3e38))  # found when it is packed, not before
    rig.source.put("/p3", replace(dora, layers={**dora.layers, name: broken}))
    used_bytes = rig.manager.report().tier("host").used_bytes
    reason = f"^adapter 'a3' is refused:\n  - {name}: DoRA"
    with pytest.raises(AdapterValidationError, match=reason) as refused:
        rig.manager.add_adapter(rig.spec(3, "dora"))
    assert len(refused.value.reasons) == 1
    rig.manager.attach_adapters([rig.spec(3, "dora")])
    assert ask(rig, 3) is WaitsFor.LOAD
    load(rig)
    with pytest.raises(AdapterValidationError, match=reason):
        ask(rig, 3)
    report = rig.manager.report()
    assert (report.tier("host").used_bytes, dict(report.quarantined)) == (used_bytes, {})
    rig.manager.check_integrity()
    rig.check_output(slot, make_model("d2"))
    rig.check_output(rig.acquire(1), make_model("d1"))


def test_an_interrupt_in_an_add_leaves_nothing_behind() -> None:
    rig = Rig()
    spec = rig.spec(1)
    rig.source.open = None  # type: ignore[assignment]

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    rig.manager._open_weights = interrupt  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        rig.manager.add_adapter(spec)
    rig.check_empty()


def test_an_adapter_whose_first_load_failed_is_unknown_at_that_very_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when its `add_adapter` has raised: another thread's add in between must not find it there."""
    rig = Rig()
    spec = rig.spec(1)
    rig.source.errors["/p1"] = AdapterTruncatedError("short file")
    store = rig.manager._transfers
    run_load, seen = store.run_load, []

    def run_and_look(job: LoadJob) -> None:
        run_load(job)
        seen.append(rig.manager.list_adapters())

    monkeypatch.setattr(store, "run_load", run_and_look)
    with pytest.raises(AdapterTruncatedError):
        rig.manager.add_adapter(spec)
    assert seen == [[]]


def test_fifty_bad_loads_disturb_nobody() -> None:
    rig = Rig(num_device=2, num_host=4)
    rig.add(1, 2)
    slots = [rig.acquire(1), rig.acquire(2)]
    for i in range(50):
        spec = rig.spec(100 + i)
        rig.source.errors[spec.path] = (
            AdapterPathNotFoundError("missing") if i % 2 else AdapterTruncatedError("corrupt")
        )
        with pytest.raises(AdapterLoadError, match="missing" if i % 2 else "corrupt"):
            rig.manager.add_adapter(spec)
        for slot, digest in zip(slots, ("d1", "d2"), strict=True):
            rig.check_output(slot, make_model(digest))
    rig.manager.check_integrity()
    rig.add(3)
    assert len(rig.manager.list_adapters()) == 3


def test_removal_while_it_loads(rig: Rig) -> None:
    ask(rig)
    rig.manager.remove_adapter(1)
    rig.manager.check_integrity()
    load(rig)
    rig.check_empty()
    rig.manager.poll()
    assert rig.dropped == ["d1"]


def test_a_load_that_lost_its_adapter_serves_the_next_one_of_the_same_content(rig: Rig) -> None:
    ask(rig)
    rig.manager.remove_adapter(1)
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(rig.manager.add_adapter, rig.spec(2, "d1"))
        while not rig.manager.list_adapters():
            rig.manager.wait_for_change(0.001)
        load(rig)
        assert outcome.result(10).is_new
    rig.check_output(rig.acquire(2), make_model("d1"))
    assert rig.source.opens == {"/p1": 2}


# -------------------------------------------------------------------------------------------------------------- threads


@pytest.fixture
def threaded() -> Iterator[Rig]:
    rig = Rig(num_device=4, num_host=8, is_gated=False)
    yield rig
    rig.manager.close()


def test_ten_threads_that_add_one_adapter_read_it_once(threaded: Rig) -> None:
    spec = threaded.spec(1)
    gate = threaded.source.gates["/p1"] = threading.Event()
    with ThreadPoolExecutor(10) as pool:
        outcomes = [pool.submit(threaded.manager.add_adapter, spec) for _ in range(10)]
        threaded.source.entered.acquire()
        assert not any(outcome.done() for outcome in outcomes)
        gate.set()
        assert sorted(outcome.result(10).is_new for outcome in outcomes) == [False] * 9 + [True]
    assert threaded.source.opens == {"/p1": 1}


def test_ten_threads_that_add_ten_names_of_one_content_read_it_once(threaded: Rig) -> None:
    specs = [threaded.spec(i, "same") for i in range(1, 11)]
    for spec in specs:
        threaded.source.gates[spec.path] = gate = threaded.source.gates.get(specs[0].path, threading.Event())
    with ThreadPoolExecutor(10) as pool:
        outcomes = [pool.submit(threaded.manager.add_adapter, spec) for spec in specs]
        threaded.source.entered.acquire()
        while len(threaded.manager.list_adapters()) < 10:
            threaded.manager.wait_for_change(0.001)
        gate.set()
        assert all(outcome.result(10).is_new for outcome in outcomes)
    assert sum(threaded.source.opens.values()) == 1
    threaded.manager.check_integrity()


def test_ten_threads_that_wait_for_one_failing_load_all_get_its_error(threaded: Rig) -> None:
    spec = threaded.spec(1)
    gate = threaded.source.gates["/p1"] = threading.Event()
    threaded.source.errors["/p1"] = AdapterTruncatedError("short file")
    with ThreadPoolExecutor(10) as pool:
        outcomes = [pool.submit(threaded.manager.add_adapter, spec) for _ in range(10)]
        threaded.source.entered.acquire()
        gate.set()
        errors = [outcome.exception(10) for outcome in outcomes]
    assert all(isinstance(error, AdapterError) for error in errors)
    assert len({id(error) for error in errors}) == 10
    threaded.check_empty()


def test_ten_threads_that_promote_one_cold_adapter_read_it_once(threaded: Rig) -> None:
    threaded.add(1)
    threaded.manager.evict_adapter(1)
    with ThreadPoolExecutor(10) as pool:
        outcomes = [pool.submit(threaded.manager.promote_adapter, 1) for _ in range(10)]
        assert all(outcome.result(10).evicted == () for outcome in outcomes)
    assert threaded.source.opens == {"/p1": 2}
    assert threaded.slots()[0] == 1


def test_a_slow_source_holds_up_nobody_else(threaded: Rig) -> None:
    threaded.add(1, 2)
    for adapter_id in (1, 2):
        threaded.manager.evict_adapter(adapter_id)
    gate = threaded.source.gates["/p1"] = threading.Event()
    while threaded.source.entered.acquire(blocking=False):
        pass
    threaded.manager.poll()
    assert threaded.manager.try_acquire(1).waits_for is WaitsFor.LOAD
    threaded.source.entered.acquire()
    threaded.add(3)  # another thread's verb, a third adapter
    assert threaded.manager.promote_adapter(2).is_new
    assert threaded.manager.try_acquire(3).lora_slot is not None
    assert threaded.manager.try_acquire(1).waits_for is WaitsFor.LOAD
    gate.set()
    while threaded.manager.list_adapters()[0].is_loading:
        threaded.manager.wait_for_change(0.01)
    assert threaded.manager.try_acquire(1).lora_slot is not None


def test_an_add_whose_adapter_is_removed_meanwhile_says_so(threaded: Rig) -> None:
    from loraplex.errors import AdapterNotFoundError

    gate = threaded.source.gates["/p1"] = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(threaded.manager.add_adapter, threaded.spec(1))
        threaded.source.entered.acquire()
        threaded.manager.remove_adapter(1)
        gate.set()
        with pytest.raises(AdapterNotFoundError, match="removed meanwhile"):
            outcome.result(10)
    threaded.check_empty()


def test_an_add_that_came_during_a_failing_first_load_reads_its_own_source(threaded: Rig) -> None:
    """The same content under two names: the first's source is damaged while it is read, the second's is good."""
    gate = threaded.source.gates["/p1"] = threading.Event()
    threaded.source.errors["/p1"] = AdapterTruncatedError("short file")
    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(threaded.manager.add_adapter, threaded.spec(1, "same"))
        threaded.source.entered.acquire()
        good = pool.submit(threaded.manager.add_adapter, threaded.spec(2, "same"))
        while len(threaded.manager.list_adapters()) < 2:
            threaded.manager.wait_for_change(0.001)
        gate.set()
        assert isinstance(bad.exception(10), AdapterTruncatedError)
        assert good.result(10).is_new
    assert threaded.source.opens == {"/p1": 1, "/p2": 1}
    assert [each.adapter_id for each in threaded.manager.list_adapters()] == [2]
    assert threaded.tier_of(2) == "host"
    threaded.manager.check_integrity()


def test_an_add_between_two_failing_first_loads_gets_the_error_of_the_second(
    threaded: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load that it joined fails without its source; before it goes on, another add's load has tried that, too."""
    gate = threaded.source.gates["/p1"] = threading.Event()
    for path in ("/p1", "/p2", "/p3"):
        threaded.source.errors[path] = AdapterTruncatedError(f"short file {path}")
    transfers, second_failed = threaded.manager._transfers, threading.Event()
    join = transfers.join_locked

    def late_for_the_third(job: LoadJob, adapter: StoredAdapter) -> None:
        join(job, adapter)
        if adapter.adapter_id == 3 and not second_failed.is_set():
            while 2 in threaded.manager._residency.known_locked():
                threaded.manager._residency.wait_locked()  # lets the second's load run, and fail
            second_failed.set()

    monkeypatch.setattr(transfers, "join_locked", late_for_the_third)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(threaded.manager.add_adapter, threaded.spec(1, "same"))
        threaded.source.entered.acquire()
        others = [pool.submit(threaded.manager.add_adapter, threaded.spec(i, "same")) for i in (2, 3)]
        while len(threaded.manager.list_adapters()) < 3:
            threaded.manager.wait_for_change(0.001)
        gate.set()
        for number, outcome in enumerate((first, *others), 1):
            error = outcome.exception(10)
            assert isinstance(error, AdapterTruncatedError), error
            assert f"/p{number}" in str(error)
    assert second_failed.is_set()
    threaded.check_empty()


def test_requests_do_not_fail_with_the_lack_of_room_of_an_add() -> None:
    """All memory is in use. An add of the same content under another name finds no room, an error; requests wait."""
    rig = Rig(num_device=3, num_host=3, is_gated=False)
    rig.add(1)
    rig.manager.evict_adapter(1)
    rig.add(2, 3, 4)
    for adapter_id in (2, 3, 4):
        rig.manager.promote_adapter(adapter_id)
        assert rig.manager.try_acquire(adapter_id).lora_slot is not None
    while rig.source.entered.acquire(blocking=False):
        pass
    gate = rig.source.gates["/p5"] = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(rig.manager.add_adapter, rig.spec(5, "d1"))
        rig.source.entered.acquire()
        rig.manager.poll()
        assert rig.manager.try_acquire(1).waits_for is WaitsFor.LOAD
        gate.set()
        assert isinstance(adding.exception(10), AdapterNoRoomError)
    rig.manager.poll()
    assert rig.manager.try_acquire(1).waits_for is WaitsFor.ROOM
    rig.manager.release(2)
    rig.manager.poll()
    assert rig.manager.try_acquire(1).waits_for is WaitsFor.LOAD
    rig.manager.close()


@pytest.mark.parametrize("is_separate", [False, True], ids=["one memory", "two memories"])
def test_verbs_and_requests_from_many_threads_at_once(is_separate: bool) -> None:
    """Eight threads of verbs beside an engine thread that steps: every output is the adapter's own, the books are
    even."""
    rig = Rig(num_device=3, num_host=5, is_separate=is_separate, is_gated=False)
    rig.add(*range(1, 9))
    is_over = threading.Event()
    failures: list[BaseException] = []

    def verbs(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        names = ("activate_adapter", "deactivate_adapter", "evict_adapter", "pin_adapter", "unpin_adapter", "again")
        for _ in range(60):
            index, adapter_id = (int(torch.randint(n, (1,), generator=generator)) for n in (len(names), 8))
            try:
                if names[index] == "again":
                    rig.manager.remove_adapter(adapter_id + 1)
                    rig.manager.add_adapter(rig.spec(adapter_id + 1))
                else:
                    getattr(rig.manager, names[index])(adapter_id + 1)
            except AdapterError:
                pass
            except BaseException as error:
                failures.append(error)
                raise

    def engine() -> None:
        step = 0
        while not is_over.is_set():
            step += 1
            rig.manager.poll()
            held = []
            for adapter_id in range(1, 9):
                try:
                    result = rig.manager.try_acquire(adapter_id)
                except AdapterError:
                    continue
                if result.lora_slot is not None:
                    held.append((adapter_id, result.lora_slot))
            rig.manager.step_launched(step)
            for adapter_id, slot in held:
                rig.check_output(slot, make_model(f"d{adapter_id}"))
            rig.manager.step_committed(step)
            for adapter_id, _ in held:
                rig.manager.release(adapter_id)
            rig.manager.check_integrity()

    with ThreadPoolExecutor(5) as pool:
        stepping = pool.submit(engine)
        for done in [pool.submit(verbs, seed) for seed in range(4)]:
            done.result(120)
        is_over.set()
        stepping.result(60)
    assert not failures
    while rig.manager.report().num_loading:
        rig.manager.wait_for_change(0.01)
    for adapter_id in range(1, 9):
        rig.manager.remove_adapter(adapter_id)
    rig.check_empty()
    rig.manager.close()


def test_closing_ends_the_loaders_threads(threaded: Rig) -> None:
    """Its own: those of managers that other tests made in this process are none of its business."""
    assert isinstance(threaded.manager._loader, LoaderThreads)
    threaded.add(1)
    threaded.manager.promote_adapter(1)
    threads = set(threaded.manager._loader._threads)
    threaded.manager.close()
    for thread in threads:  # `close` gives up on one after some seconds, which a loaded machine may take
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(EngineShutdownError):
        threaded.add(2)


def of_tenants(rig: Rig) -> list[AdapterSpec]:
    """Three adapters of one content, attached: beta's is the oldest, acme's two are newer and their sources hang."""
    names = {1: "beta/a", 2: "acme/a", 3: "acme/b"}
    specs = [replace(rig.spec(adapter_id, "same"), adapter_name=name) for adapter_id, name in names.items()]
    rig.manager.attach_adapters(specs)
    for spec in specs[1:]:
        rig.source.gates[spec.path] = threading.Event()
    return specs


def let_go(rig: Rig) -> None:
    for gate in rig.source.gates.values():
        gate.set()


def test_an_adapters_own_source_is_read_first(threaded: Rig) -> None:
    """Another tenant's copies of the content hung, and each of this one's loads with them."""
    of_tenants(threaded)
    threaded.manager.promote_adapter(1)
    assert threaded.source.opens == {"/p1": 1}
    let_go(threaded)


def test_who_joins_a_load_from_a_source_that_hangs_gets_it_from_another(
    threaded: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "HEDGE_S", 0.01)
    of_tenants(threaded)
    with ThreadPoolExecutor(2) as pool:
        hung = pool.submit(threaded.manager.promote_adapter, 3)
        assert threaded.source.entered.acquire(timeout=30)
        threaded.manager.promote_adapter(1)
        assert hung.result(30).is_new
    assert threaded.source.opens == {"/p3": 1, "/p1": 1}, "one of each tenant before a second one of any"
    let_go(threaded)


def test_where_the_system_has_no_thread_a_source_is_read_in_the_loads_own(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load failed, though the source was there."""
    start = threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == "loraplex-source":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    rig.manager.attach_adapters([replace(rig.spec(each, "same"), adapter_name=f"t{each}/a") for each in (2, 3)])
    rig.source.errors["/p3"] = AdapterPathNotFoundError("gone")
    assert ask(rig, 3) is WaitsFor.LOAD
    load(rig)
    assert ask(rig, 3) is None
    assert rig.source.opens["/p2"] == 1, "the other tenant's source"


def test_few_sources_are_read_at_a_time(threaded: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "HEDGE_S", 0.001)
    specs = [threaded.spec(adapter_id, "same") for adapter_id in range(1, 10)]
    threaded.manager.attach_adapters(specs)
    for spec in specs:
        threaded.source.gates[spec.path] = threading.Event()
    threaded.source.errors["/p9"] = AdapterPathNotFoundError("gone")
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(threaded.manager.promote_adapter, 9)
        for _ in range(loading.MAX_HEDGED):
            assert threaded.source.entered.acquire(timeout=30)
        assert not threaded.source.entered.acquire(timeout=0.05)
        threaded.source.gates["/p9"].set()
        assert threaded.source.entered.acquire(timeout=30), "the next one, for the one that failed"
        threaded.source.gates["/p1"].set()
        threaded.source.gates["/p8"].set()
        assert outcome.result(30).is_new
    let_go(threaded)


def test_an_adapter_whose_source_is_gone_does_not_wait_for_others_that_hang(
    threaded: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "HEDGE_S", 0.01)
    monkeypatch.setattr(loading, "STUCK_S", 0.02)
    of_tenants(threaded)
    threaded.source.errors["/p1"] = AdapterPathNotFoundError("gone")
    with pytest.raises(AdapterUnavailableError, match="beta/a"):
        threaded.manager.promote_adapter(1)
    let_go(threaded)
