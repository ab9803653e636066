"""Turns of threads are bounded, and one client's do not stand before another's."""

from __future__ import annotations

import threading
from collections.abc import Callable

from loraplex.text.adapter_text import FairTurns


def until(condition: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(6000):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("it did not come to that")


def test_the_next_turn_is_for_the_client_that_has_fewest() -> None:
    turns, order, gates = FairTurns(2), list[str](), dict[str, threading.Event]()

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
    assert (turns._num_free, turns._waiting, dict(turns._running)) == (2, [], {})


def test_an_error_ends_its_turn() -> None:
    turns = FairTurns(1)
    for _ in range(3):
        try:
            with turns.of("a"):
                raise ValueError
        except ValueError:
            continue
    assert turns._num_free == 1
