"""What an engine does about wrong results and damaged memory: only the requests of the adapter at fault notice."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.core import AcquireResult, WaitsFor
from loraplex.engine.maintenance import RECORD_IDLE_S
from loraplex.errors import AdapterFaultError, BaseModelFaultError, EngineError
from loraplex.events import EventKind
from loraplex.memory.care.health import BACKOFF_S
from loraplex.metrics import MemoryMode
from tests.engine.driver import Driver
from tests.engine.rules_bench import Asked, Bench, OpenDriver, loaded

NAN_BYTE = 0xFF


def poison(driver: Driver, name: str) -> None:
    """NaN in the memory of an adapter, with checksums that call it good: as if it had been loaded so."""
    from loraplex.kernels.checksum import checksum

    store = driver.engine.adapters._residency
    weights = store.weights[driver.registry.resolve(name).adapter_digest]
    assert weights.host is not None
    views = [store.tiers.host.pool.view(extent) for extent in weights.host.extents]
    for view in views:
        view.fill_(NAN_BYTE)
    weights.checksums = tuple(checksum(view) for view in views)


def flip(driver: Driver, name: str) -> None:
    store = driver.engine.adapters._residency
    weights = store.weights[driver.registry.resolve(name).adapter_digest]
    assert weights.host is not None
    store.tiers.host.pool.view(weights.host.extents[0])[3] ^= 1
    weights.checked_s = -math.inf  # some time after it was read


def kinds(driver: Driver) -> list[EventKind]:
    return [event.kind for event in driver.engine.take_events() if event.kind in (EventKind.FAULT, EventKind.RECOVERY)]


def settle(driver: Driver, is_settled: Callable[[], bool]) -> None:
    """Steps of an idle engine, until a diagnosis has ended."""
    for _ in range(200):
        driver.step()
        if is_settled():
            return
        driver.engine.adapters.wait_for_change(0.05)
    raise AssertionError("it does not settle")


def is_well(driver: Driver, name: str) -> bool:
    return driver.engine.adapters.health.refusal(driver.registry.resolve(name).adapter_id) is None


def test_nan_suspends_one_adapter_whose_weights_are_read_anew(driver: Driver, bench: Bench) -> None:
    asked = [Asked(driver, bench, name, which) for name in (None, "one", "two") for which in range(2)]
    driver.step(3)
    poison(driver, "one")
    driver.finish()
    for each in asked:
        if asked.index(each) in (2, 3):
            with pytest.raises((AdapterFaultError, EngineError)) as caught:
                each.check()
            assert "not finite" in str(caught.value) or "NaN" in str(caught.value)
        else:
            each.check()
    settle(driver, lambda: is_well(driver, "one"))
    assert set(kinds(driver)) == {EventKind.FAULT, EventKind.RECOVERY}
    again = Asked(driver, bench, "one")
    driver.finish()
    again.check()


def test_a_diagnosis_that_finds_no_room_keeps_no_other_adapter_waiting(
    driver: Driver, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant at its limit in memory whose requests never end had the diagnoses of all others wait."""
    monkeypatch.setattr("loraplex.engine.maintenance.MAX_WAIT_FOR_ROOM_S", 0.0)
    monkeypatch.setattr("loraplex.memory.care.health.DOUBT_INTERVAL_S", 0.0)
    adapters, adapter_id = driver.engine.adapters, driver.registry.resolve("one").adapter_id
    acquire, is_full = adapters.try_acquire, [True]

    def acquire_unless_full(wanted: int) -> AcquireResult:
        return AcquireResult(None, WaitsFor.ROOM) if is_full and wanted == adapter_id else acquire(wanted)

    for name in ("one", "two"):
        Asked(driver, bench, name)
    driver.step(3)
    for name in ("one", "two"):
        poison(driver, name)
    driver.finish()
    monkeypatch.setattr(adapters, "try_acquire", acquire_unless_full)
    settle(driver, lambda: is_well(driver, "two"))
    assert not is_well(driver, "one")
    is_full.clear()
    settle(driver, lambda: is_well(driver, "one"))


def test_an_adapter_that_is_removed_in_the_middle_of_its_diagnosis_takes_nobody_along(
    driver: Driver, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verb's thread may drop it between any two calls: an engine process ended so, eight minutes into a soak."""
    adapters, adapter_id = driver.engine.adapters, driver.registry.resolve("one").adapter_id
    acquire, removed = adapters.try_acquire, []

    def acquire_and_remove(wanted: int) -> AcquireResult:
        result = acquire(wanted)
        if wanted == adapter_id and result.lora_slot is not None:
            adapters.remove_adapter(adapter_id)
            removed.append(adapter_id)
        return result

    Asked(driver, bench, "one")
    driver.step(3)
    poison(driver, "one")
    driver.finish()
    monkeypatch.setattr(adapters, "try_acquire", acquire_and_remove)
    settle(driver, lambda: bool(removed))
    driver.step(3)
    other = Asked(driver, bench, "two")
    driver.finish()
    other.check()


def test_while_it_is_quarantined_its_requests_are_refused_at_once_and_told_when_to_try_again(
    driver: Driver, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    health = driver.engine.adapters.health
    monkeypatch.setattr(health._recovery, "_clock", lambda: clock[0])
    adapter_id = driver.registry.resolve("one").adapter_id
    diagnosis = driver.engine._caretaker._diagnosis
    monkeypatch.setattr(diagnosis, "what_is_wrong", lambda digest, slot: "it is odd")
    for name in ("one", "two"):
        Asked(driver, bench, name)
    driver.step(2)
    poison(driver, "one")
    driver.finish()
    settle(driver, lambda: "odd" in (health.quarantined().get(adapter_id) or ""))
    refusal = health.refusal(adapter_id)
    assert refusal is not None
    assert refusal.retry_after_s == BACKOFF_S[0]
    assert "odd" in (driver.registry.describe("one").error or "")
    for wait_s in BACKOFF_S[1:]:
        clock[0] += health.refusal(adapter_id).retry_after_s  # type: ignore[union-attr]
        settle(driver, lambda wait_s=wait_s: health.refusal(adapter_id).retry_after_s == wait_s)  # type: ignore[misc]
    monkeypatch.undo()
    monkeypatch.setattr(health._recovery, "_clock", lambda: clock[0] + BACKOFF_S[-1])
    settle(driver, lambda: is_well(driver, "one"))


def test_a_base_that_answers_otherwise_ends_the_engine(driver: Driver, bench: Bench) -> None:
    diagnosis = driver.engine._caretaker._diagnosis
    assert diagnosis.is_base_well()
    asked = Asked(driver, bench, "one")
    driver.step(2)
    poison(driver, "one")
    diagnosis._base = (1, 2, 3)
    with pytest.raises(BaseModelFaultError, match="diagnostic prompt"):
        settle(driver, lambda: False)
    driver.engine._caretaker._in_diagnosis = None
    diagnosis._base = None
    driver.finish()
    with pytest.raises((AdapterFaultError, EngineError)):
        asked.check()


def test_answers_are_recorded_when_the_engine_has_been_idle(driver: Driver, bench: Bench) -> None:
    """Not at once: the next client, which often asks for the next adapter, would wait for it."""
    caretaker = driver.engine._caretaker
    now = caretaker._clock()
    caretaker._clock = lambda: now
    asked = [Asked(driver, bench, name) for name in ("one", "two")]
    driver.finish()
    diagnosis = caretaker._diagnosis
    digests = [driver.registry.resolve(name).adapter_digest for name in ("one", "two")]
    before = driver.stats
    driver.step(2)
    assert not any(diagnosis.has(digest) for digest in digests)
    now += RECORD_IDLE_S
    driver.step(2)
    assert all(diagnosis.has(digest) for digest in digests)
    after = driver.stats
    assert after.num_generated_tokens == before.num_generated_tokens
    assert after.memory.counters["hits"] == before.memory.counters["hits"]
    for each in asked:
        each.check()


def test_damage_under_a_running_request_ends_it_and_is_restored(driver: Driver, bench: Bench) -> None:
    asked = [Asked(driver, bench, name) for name in (None, "one", "two")]
    driver.step(3)
    flip(driver, "one")
    caretaker = driver.engine._caretaker
    caretaker._last_scrub_s -= 60
    driver.finish()
    asked[0].check()
    asked[2].check()
    with pytest.raises(AdapterFaultError, match="damaged"):
        asked[1].check()
    again = Asked(driver, bench, "one")
    driver.finish()
    again.check()
    assert kinds(driver) == [EventKind.FAULT, EventKind.RECOVERY]


def test_damage_at_rest_is_restored_from_the_disk_tier(open_driver: OpenDriver, bench: Bench, tmp_path: Path) -> None:
    driver = loaded(open_driver(lora={"disk_cache_dir": str(tmp_path)}), bench)
    flip(driver, "one")
    asked = Asked(driver, bench, "one")
    driver.finish()
    asked.check()
    loads = [event for event in driver.engine.take_events() if event.kind is EventKind.LOAD]
    assert loads[-1].details["origin"] == "disk"


def test_a_damaged_file_of_the_disk_tier_is_told_and_made_again(
    open_driver: OpenDriver, bench: Bench, tmp_path: Path
) -> None:
    driver = loaded(open_driver(lora={"disk_cache_dir": str(tmp_path)}), bench)
    digest = driver.registry.resolve("one").adapter_digest
    (file,) = tmp_path.rglob(f"{digest}.lora")
    data = bytearray(file.read_bytes())
    data[-200] ^= 16
    file.write_bytes(data)
    assert driver.registry.evict("one")
    asked = Asked(driver, bench, "one")
    driver.finish()
    asked.check()
    assert kinds(driver) == [EventKind.FAULT, EventKind.RECOVERY]
    assert file.read_bytes() != bytes(data)


def test_a_vanished_source_is_served_from_the_disk_tier(open_driver: OpenDriver, bench: Bench, tmp_path: Path) -> None:
    import shutil

    copy = shutil.copytree(bench.adapters["one"], tmp_path / "copy")
    driver = loaded(open_driver(lora={"disk_cache_dir": str(tmp_path / "disk")}), bench)
    driver.registry.load("mine", str(copy))
    driver.registry.unload("one")
    shutil.rmtree(copy)
    driver.registry.evict("mine")
    driver.registry.evict("mine")
    assert driver.registry.describe("mine").tier == "disk"
    request_id = driver.submit(bench.cases[bench.adapters["one"]][0].prompt_token_ids, "mine", max_tokens=8)
    driver.finish()
    assert driver.tokens(request_id) == bench.cases[bench.adapters["one"]][0].output_token_ids[:8]
    assert driver.engine.stats().adapters_found == {"disk": 1}
    driver.registry.unload("mine")
    assert not list((tmp_path / "disk").rglob("*.lora")) or len(list((tmp_path / "disk").rglob("*.lora"))) == 3


def test_a_step_without_memory_runs_again_in_low_memory_mode(
    driver: Driver, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [Asked(driver, bench, name) for name in (None, "one")]
    driver.step(2)
    runner, failures = driver.engine._runner, [MemoryError("no memory")]
    launch = runner.launch

    def failing(plan: object) -> object:
        if failures:
            raise failures.pop()
        return launch(plan)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "launch", failing)
    driver.finish()
    for each in asked:
        each.check()
    report = driver.engine.memory_report()
    assert report.mode is MemoryMode.LOW_MEMORY
    assert report.counters["mode_changes"] == 1
    assert report.history[-1].mode is MemoryMode.LOW_MEMORY


def test_in_low_memory_mode_base_and_adapters_still_answer_and_it_ends(driver: Driver, bench: Bench) -> None:
    monitor = driver.engine._caretaker.monitor
    clock = [0.0]
    monitor._clock = lambda: clock[0]
    monitor._memory._system_pressure = lambda: 0.99  # type: ignore[attr-defined]
    clock[0] = 1e9
    asked = [Asked(driver, bench, name) for name in (None, "one", "two")]
    driver.finish()
    for each in asked:
        each.check()
    assert monitor.mode is MemoryMode.LOW_MEMORY
    monitor._memory._system_pressure = lambda: 0.1  # type: ignore[attr-defined]
    for _ in range(4):
        clock[0] += 10
        driver.step()
    assert monitor.mode is MemoryMode.NORMAL
