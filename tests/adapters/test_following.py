"""What other servers loaded and this one cannot fetch: it is tried again, more and more seldom."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest

from loraplex.adapters.registry import NameChange, NameRecord, NameUsage, VersionRecord, following, start_thread
from loraplex.adapters.registry.following import Following, Locate, found_where_it_was
from loraplex.errors import AdapterFetchError, LoraplexError
from loraplex.events import EventKind
from tests.adapters.fake_store import Bench

WAIT_S = 30


class Timers:
    """In place of threading: `fire` runs what is due next, at once, and says how long it was to wait."""

    def __init__(self) -> None:
        self.started: queue.Queue[SimpleNamespace] = queue.Queue()

    def Timer(self, interval: float, function: Callable[..., None], args: tuple[int, ...] = ()) -> SimpleNamespace:
        timer = SimpleNamespace(interval=interval, run=lambda: function(*args))
        timer.start = lambda: self.started.put(timer)
        return timer

    def fire(self) -> float:
        timer = self.started.get(timeout=WAIT_S)
        timer.run()
        return float(timer.interval)


def following_of(bench: Bench, locate: Locate = found_where_it_was) -> Following:
    followed = bench.registry._following
    followed.begin((), mock.Mock())
    followed._locate = locate
    return followed


def refuse_a_thread(patch: pytest.MonkeyPatch, kind: type[threading.Thread] = threading.Thread) -> None:
    """The next start of one is refused, as where the system has no more."""
    start, refusals = threading.Thread.start, [RuntimeError("can't start new thread")]

    def refuse_once(thread: threading.Thread) -> None:
        if refusals and isinstance(thread, kind):
            raise refusals.pop()
        start(thread)

    patch.setattr(threading.Thread, "start", refuse_once)


def until_ready(bench: Bench, num_versions: int) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while sum(each.is_ready for each in bench.registry._table.versions()) < num_versions:
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_a_fetch_that_fails_again_waits_longer_and_an_engine_that_starts_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every name of a store that was away was asked for every 5 s, some of them twice."""
    bench, timers, fetches = Bench(), Timers(), list[str]()
    monkeypatch.setattr(following, "threading", timers)
    is_away = True

    def locate(record: VersionRecord, may_fetch: bool) -> str | None:
        if not may_fetch:
            return None
        fetches.append(record.lora_path)
        if is_away:
            raise AdapterFetchError("the store cannot be reached")
        return "/here"

    followed = following_of(bench, locate)
    version = VersionRecord(1, 1, "0" * 64, "/there", "s3://bucket/a", "", 1, 8, False, 1.0)
    record = NameRecord(1, None, 1, (version,), NameUsage("a", 1))
    followed.apply([NameChange("a", record)])
    assert [timers.fire() for _ in range(5)] == [5.0, 10.0, 20.0, 40.0, 40.0]
    timer = timers.started.get(timeout=WAIT_S)
    assert (len(fetches), timers.started.empty()) == (6, True)
    is_away = False
    bench.store.faults.errors["attach"] = LoraplexError("the engine starts again")
    timer.run()
    assert timers.fire() == 5.0
    until_ready(bench, 1)
    followed._fetchers.close()
    followed._lookers.close()
    bench.registry.release(bench.registry.hold("a"))
    bench.check_idle()


def record_of(name: str, adapter_id: int, path: str = "/there") -> NameChange:
    version = VersionRecord(adapter_id, 1, "0" * 64, path, f"s3://bucket/{name}", "", 1, 8, False, 1.0)
    return NameChange(name, NameRecord(adapter_id, None, 1, (version,), NameUsage(name, 1)))


def test_what_is_found_to_be_fetched_after_the_patience_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "LOOK_PATIENCE_S", 0.0)
    bench, go_on, looks = Bench(), threading.Event(), list[bool]()

    def locate(record: VersionRecord, may_fetch: bool) -> str | None:
        looks.append(may_fetch)
        assert go_on.wait(WAIT_S)
        return "/here" if may_fetch else None

    followed = following_of(bench, locate)
    followed.apply([record_of("a", 1)])
    go_on.set()
    until_ready(bench, 1)
    assert looks == [False, True]
    assert [spec.path for spec in bench.registry.specs()] == ["/here"]
    followed._fetchers.close()
    followed._lookers.close()
    bench.check_idle()


def test_many_fetches_of_a_tenant_hold_up_none_of_others() -> None:
    """Four threads took them in the order in which they came."""
    bench, go_on, others = Bench(), threading.Event(), queue.Queue[str]()

    def locate(record: VersionRecord, may_fetch: bool) -> str | None:
        if may_fetch and "acme" in record.lora_path:
            go_on.wait(WAIT_S)
        elif may_fetch:
            others.put(record.lora_path)
        return "/here" if may_fetch else None

    followed = following_of(bench, locate)
    acme = [record_of(f"acme/{number}", number) for number in range(1, 20)]
    followed.apply([*acme, record_of("beta/a", 20), record_of("a", 21)])
    try:
        assert {others.get(timeout=WAIT_S) for _ in range(2)} == {"s3://bucket/beta/a", "s3://bucket/a"}
    finally:
        go_on.set()
    until_ready(bench, 21)
    followed._fetchers.close()
    followed._lookers.close()
    bench.check_idle()


def test_what_is_looked_for_is_fetched_once_and_is_there_as_soon_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, timers, go_on, fetches = Bench(), Timers(), threading.Event(), list[int]()
    monkeypatch.setattr(following, "threading", timers)

    def locate(record: VersionRecord, may_fetch: bool) -> str | None:
        if not may_fetch:
            return None
        fetches.append(record.adapter_id)
        if record.adapter_id == 8 and fetches.count(8) == 1:
            raise AdapterFetchError("the store cannot be reached")
        assert record.adapter_id == 1 or go_on.wait(WAIT_S)
        return "/here"

    followed = following_of(bench, locate)
    changes = [record_of(f"a{number}", number) for number in range(1, 9)]
    followed.expect(changes, 0.0)
    followed.apply(changes)
    try:
        until_ready(bench, 1)
    finally:
        go_on.set()
    until_ready(bench, 7)
    assert timers.fire() == following.RETRY_S
    until_ready(bench, 8)
    assert sorted(fetches) == [*range(1, 9), 8], "again after a failure alone"
    followed._fetchers.close()
    followed._lookers.close()
    bench.check_idle()


def test_what_follows_a_change_is_done_though_the_system_has_no_thread_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error left `apply`: all names of the batch, whoever's they were, counted as damaged."""
    bench = Bench()
    followed = following_of(bench)
    followed._run_later = start_thread
    followed.apply([record_of("a", 1)])
    until_ready(bench, 1)
    refuse_a_thread(monkeypatch)
    assert not followed.apply([NameChange("a", None)])
    deadline_s = time.monotonic() + WAIT_S
    while bench.store.adapters:
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    assert [kind for kind, *_ in bench.told] == [EventKind.UNLOAD]
    followed._fetchers.close()
    followed._lookers.close()
    bench.check_idle()


def test_a_change_is_applied_though_no_thread_can_look_for_its_files() -> None:
    """The threads for that were made when the first change came."""
    bench = Bench()
    followed = following_of(bench)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
        assert not followed.apply([record_of("a", 1)])
    followed.apply([record_of("b", 2)])
    until_ready(bench, 2)
    followed._fetchers.close()
    followed._lookers.close()
    bench.check_idle()


def test_a_fetch_that_failed_is_tried_again_though_no_timer_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as one that had: no version whose fetch failed was ever tried again."""
    monkeypatch.setattr(following, "RETRY_S", 0.01)
    bench, failures = Bench(), [AdapterFetchError("the store cannot be reached") for _ in range(2)]

    def locate(record: VersionRecord, may_fetch: bool) -> str | None:
        if may_fetch and failures:
            raise failures.pop()
        return "/here" if may_fetch else None

    followed = following_of(bench, locate)
    refuse_a_thread(monkeypatch, threading.Timer)
    followed.apply([record_of("a", 1)])
    until_ready(bench, 1)
    assert not failures
    followed._fetchers.close()
    followed._lookers.close()
    bench.check_idle()
