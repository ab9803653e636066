"""Turns of threads are bounded, and one client's do not stand before another's."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest

from loraplex.processes import fair_turns
from loraplex.processes.fair_turns import ByteBudget, FairTurns, working_for


def until(condition: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(6000):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("it did not come to that")


def test_the_next_turn_is_for_the_client_that_has_fewest() -> None:
    turns, order, gates = FairTurns(2, 2), list[str](), dict[str, threading.Event]()

    def work(name: str) -> None:
        with turns.of(name[0]):
            order.append(name)
            assert gates[name].wait(60)

    threads = []
    for name in ("a1", "a2", "a3", "a4", "b1", "b2"):
        gates[name] = threading.Event()
        threads.append(threading.Thread(target=work, args=(name,)))
        threads[-1].start()
        until(lambda: len(order) + len(turns._waiting) == len(threads))
    assert order == ["a1", "a2"]
    for ends, next_one in (("a1", "b1"), ("a2", "a3"), ("b1", "b2"), ("b2", "a4")):
        gates[ends].set()
        until(lambda next_one=next_one: order[-1] == next_one)  # type: ignore[misc]
    for gate in gates.values():
        gate.set()
    for thread in threads:
        thread.join(60)
    assert len(order) == 6
    assert (turns._waiting, turns._running) == ([], [])


def test_a_turn_that_does_not_come_is_given_up() -> None:
    turns = FairTurns(2, 1)
    with turns.of("a"):
        with pytest.raises(TimeoutError), turns.of("a", timeout_s=0.01):
            raise AssertionError("a second one")
        with turns.of("b", timeout_s=60):
            assert len(turns._running) == 2
    assert (turns._waiting, turns._running) == ([], [])


def test_an_error_ends_its_turn() -> None:
    turns = FairTurns(1, 1)
    for _ in range(3):
        try:
            with turns.of("a"):
                raise ValueError
        except ValueError:
            continue
    assert not turns._running


def held(turns: FairTurns, client: str, release: threading.Event) -> threading.Thread:
    """A thread that has a turn until then."""
    began = threading.Event()

    def hold() -> None:
        with turns.of(client):
            began.set()
            assert release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert began.wait(60)
    return thread


def test_one_client_never_has_all_turns() -> None:
    """32 loads with a slow pattern held 8 threads, and another tenant's load took 35 s."""
    turns, release, done = FairTurns(2, 1), threading.Event(), list[str]()
    threads = [held(turns, "a", release)]
    threads += [threading.Thread(target=lambda: held(turns, "a", release).join(60)) for _ in range(3)]
    for thread in threads[1:]:
        thread.start()
    with turns.of("b"):
        done.append("b")
    assert done == ["b"]
    release.set()
    for thread in threads:
        thread.join(60)


def test_a_turn_that_hangs_is_counted_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, release = FairTurns(1, 1), threading.Event()
    thread = held(turns, "a", release)
    monkeypatch.setattr(fair_turns, "STUCK_S", 0.0)
    with turns.of("a"):
        assert thread.is_alive(), "the one that hangs has its turn still"
    release.set()
    thread.join(60)


def test_a_turn_that_computes_counts_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one beside it would make both slower."""
    turns = FairTurns(1, 1)
    monkeypatch.setattr(fair_turns, "STUCK_S", 0.0)
    with turns.of("a") as turn:
        turn.computes()
        with pytest.raises(TimeoutError), turns.of("b", timeout_s=0.01):
            pass
    with turns.of("b", timeout_s=60):
        pass


def test_a_reader_that_hangs_holds_its_bytes_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One directory on a dead disk whose files claimed all bytes, and no adapter of any tenant was read any more."""
    monkeypatch.setattr(fair_turns, "LOOK_S", 0.01)
    budget, hang, began = ByteBudget(100, small_bytes=5, stuck_s=0.05), threading.Event(), threading.Event()

    def read() -> None:
        with budget.hold(10_000):
            began.set()
            assert hang.wait(60)

    thread = threading.Thread(target=read)
    thread.start()
    assert began.wait(60)
    with budget.hold(5):
        pass
    with budget.hold(90):
        assert budget.held_bytes <= 90
    hang.set()
    thread.join(60)
    assert budget.held_bytes == 0


class Readers:
    """Of a budget, a thread each: `begin` gives the event that one has its bytes."""

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self.order: list[str] = []
        self._ends: dict[str, tuple[threading.Thread, threading.Event]] = {}

    def begin(self, name: str, nbytes: int, client: str = "") -> threading.Event:
        began, may_end = threading.Event(), threading.Event()

        def read() -> None:
            with working_for(client), self.budget.hold(nbytes):
                self.order.append(name)
                began.set()
                assert may_end.wait(60)

        thread = threading.Thread(target=read, daemon=True)
        self._ends[name] = thread, may_end
        thread.start()
        return began

    def begin_waiting(self, name: str, nbytes: int, client: str = "") -> threading.Event:
        waiters = self.budget._changed._waiters  # type: ignore[attr-defined]
        num, began = len(waiters), self.begin(name, nbytes, client)
        while len(waiters) == num and not began.is_set():
            began.wait(0.001)
        return began

    def end(self, *names: str) -> None:
        for name in names:
            thread, may_end = self._ends[name]
            may_end.set()
            thread.join(60)


def test_a_large_read_has_its_turn_though_others_come_all_the_time() -> None:
    """It needs all bytes, and there was no moment without a smaller one that had come later."""
    readers = Readers(ByteBudget(100, stuck_s=math.inf))
    assert readers.begin("first", 40).wait(60)
    large = readers.begin_waiting("large", 1000)
    last = readers.begin_waiting("last", 40)
    readers.end("first")
    assert large.wait(10)
    assert not last.is_set()
    readers.end("large", "last")
    assert readers.order == ["first", "large", "last"]
    assert readers.budget.held_bytes == 0


def test_small_reads_keep_no_large_one_waiting_nor_wait_for_it() -> None:
    readers = Readers(ByteBudget(100, small_bytes=5, stuck_s=math.inf))
    assert readers.begin("small", 5).wait(60)
    assert readers.begin("large", 1000).wait(10)
    assert readers.begin("another", 5).wait(60)
    readers.end("small", "large", "another")
    assert readers.budget.held_bytes == 0


def test_large_reads_of_a_client_keep_no_other_one_waiting() -> None:
    """Those of a tenant whose root hangs: each had its bytes for ten seconds, and others waited for four of them."""
    readers = Readers(ByteBudget(1024, small_bytes=128, stuck_s=math.inf))
    assert readers.begin("hangs", 600, "acme").wait(60)
    own = [readers.begin_waiting(name, 600, "acme") for name in ("second", "third")]
    assert readers.begin("other", 200, "beta").wait(10)
    assert not any(began.is_set() for began in own)
    late = readers.begin_waiting("late", 600, "gamma")
    readers.end("hangs")
    assert late.wait(10), "it has had none yet"
    readers.end("late", "other", "second", "third")
    assert readers.order == ["hangs", "other", "late", "second", "third"]
    assert readers.budget.held_bytes == 0


def test_each_client_passes_a_large_read_once() -> None:
    """One whose client has another read in hand, which may hang, comes after those of clients that had none."""
    readers = Readers(ByteBudget(100, stuck_s=math.inf))
    assert readers.begin("own", 20, "acme").wait(60)
    large = readers.begin_waiting("large", 1000, "acme")
    for client in ("beta", "gamma"):
        assert readers.begin(f"{client} 1", 20, client).wait(10)
        readers.end(f"{client} 1")
    late = [readers.begin_waiting(f"{client} 2", 20, client) for client in ("beta", "gamma")]
    assert not any(began.is_set() for began in late)
    readers.end("own")
    assert large.wait(10)
    assert not any(began.is_set() for began in late)
    readers.end("large", "beta 2", "gamma 2")
    assert readers.budget.held_bytes == 0


def test_clients_that_a_budget_was_read_for_are_forgotten() -> None:
    budget = ByteBudget(100)
    for number in range(3):
        with working_for(f"tenant {number}"), budget.hold(10):
            assert len(budget._last_s) == 1
