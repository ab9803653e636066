"""Grammars are compiled in turns of clients, and few wait for a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from weakref import ref

import pytest

from loraplex.structured.turns import MAX_AHEAD, NUM_COMPILE_THREADS, Ahead, CompileTurns
from tests.tenants.conftest import until


@pytest.fixture
def turns() -> Iterator[CompileTurns]:
    with closing(CompileTurns()) as turns:
        yield turns


def add(
    turns: CompileTurns, client: str, num: int, is_there: Callable[[], bool] = lambda: False
) -> list[Future[Ahead]]:
    def make() -> Ahead:
        ahead = Ahead()
        turns.note(client, ahead)
        return ahead

    return [turns.add(client, is_there, make) for _ in range(num)]


def settle(turns: CompileTurns) -> None:
    until(lambda: not turns._compiling)


def num_made(futures: list[Future[Ahead]]) -> int:
    return sum(future.done() for future in futures)


def use(futures: list[Future[Ahead]]) -> None:
    """The requests have a mask, or have ended."""
    futures[:] = [future for future in futures if not future.done()]


def test_a_client_has_few_that_wait(turns: CompileTurns) -> None:
    futures = add(turns, "a", 100)
    most = MAX_AHEAD // 2 + NUM_COMPILE_THREADS
    num_rounds = 0
    while futures:
        settle(turns)
        assert 0 < num_made(futures) <= most
        assert turns.is_busy == (num_made(futures) < len(futures))
        use(futures)
        turns.poll()
        num_rounds += 1
    assert num_rounds >= 100 // most
    assert not turns.is_busy


def test_a_full_client_delays_no_other(turns: CompileTurns) -> None:
    full = add(turns, "a", 100)
    settle(turns)
    before = num_made(full)
    others = [add(turns, f"b{number}", 1)[0] for number in range(8)]
    for other in others:
        other.result(timeout=30)
    settle(turns)
    assert num_made(full) == before


def test_slow_forms_of_a_client_delay_no_other(turns: CompileTurns) -> None:
    """They were in both threads, one after another, and another client's short form waited for seconds."""
    release = threading.Event()
    slow = [turns.add("a", lambda: False, partial(release.wait, 60)) for _ in range(20)]
    try:
        assert turns.add("b", lambda: False, lambda: True).result(timeout=30)
        assert sum(future.running() for future in slow) == 1
    finally:
        release.set()


def test_requests_without_a_client_take_all_threads(turns: CompileTurns) -> None:
    """They may be of many."""
    together = threading.Barrier(NUM_COMPILE_THREADS)
    futures = [turns.add("", lambda: False, partial(together.wait, 60)) for _ in range(NUM_COMPILE_THREADS)]
    assert sorted(future.result(timeout=60) for future in futures) == list(range(NUM_COMPILE_THREADS))


def test_equal_forms_wait_for_none(turns: CompileTurns) -> None:
    different = add(turns, "a", 100)
    settle(turns)
    is_there = False
    equal = add(turns, "b", 50, lambda: is_there)
    settle(turns)
    assert num_made(equal) < 50
    is_there = True
    turns.poll()
    until(lambda: num_made(equal) == 50)
    assert num_made(different) < 100


def test_all_clients_together_are_bounded(turns: CompileTurns) -> None:
    futures = [future for number in range(500) for future in add(turns, f"client-{number}", 2)]
    settle(turns)
    assert MAX_AHEAD < num_made(futures) <= 2 * MAX_AHEAD + NUM_COMPILE_THREADS
    for _ in range(2000):
        settle(turns)
        assert num_made(futures) <= 2 * MAX_AHEAD + NUM_COMPILE_THREADS
        use(futures)
        if not futures:
            break
        turns.poll()
    assert not futures


def test_what_is_cancelled_leaves(turns: CompileTurns) -> None:
    futures = add(turns, "a", 100)
    settle(turns)
    waiting = [future for future in futures if not future.done()]
    for future in waiting:
        assert future.cancel()
    turns.poll()
    assert not turns.is_busy
    assert not turns._queues


def test_what_is_cancelled_holds_nothing_behind_one_that_waits(turns: CompileTurns) -> None:
    """A client that asked and left, again and again, filled the memory with what it had asked."""
    ahead = add(turns, "a", 100)  # more than may be ahead: one of them is the first that waits
    settle(turns)

    def asked() -> ref[Ahead]:
        form = Ahead()
        assert turns.add("a", lambda: False, lambda: form).cancel()
        return ref(form)

    assert [each() for each in [asked() for _ in range(20)]] == [None] * 20
    assert 0 < num_made(ahead) < 100, "the first of those before them waits"
