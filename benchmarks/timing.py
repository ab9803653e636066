"""How the micro-benchmarks time: calls take turns, and the best round of each counts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

Call = Callable[[], object]

SHORTEST_S = 2e-4
"""A round of a call takes at least this: calls of microseconds are repeated inside it."""

MIN_ROUNDS = 3
MAX_REPEATS = 1000


def best_of(
    calls: Mapping[str, Call], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds of one call of each: the best round of as many as fit in `seconds`, at least MIN_ROUNDS.

    Calls take turns, so that a slow moment of the machine meets them all, and the best round is the one that it missed.
    """
    repeats = {name: _repeats(call, clock) for name, call in calls.items()}
    best = dict.fromkeys(calls, float("inf"))
    began, num_rounds = clock(), 0
    while num_rounds < MIN_ROUNDS or clock() - began < seconds:
        for name, call in calls.items():
            best[name] = min(best[name], _time(call, repeats[name], clock))
        num_rounds += 1
    return best


def in_turn(calls: Sequence[Call]) -> Call:
    """One call that is the next of `calls` each time: what one reads is out of the caches when its turn comes."""
    following = itertools.cycle(calls)

    def call() -> object:
        return next(following)()

    return call


def _repeats(call: Call, clock: Callable[[], float]) -> int:
    call()  # first touches
    took = _time(call, 1, clock)
    return max(1, min(MAX_REPEATS, int(SHORTEST_S / max(took, 1e-9))))


def _time(call: Call, repeats: int, clock: Callable[[], float]) -> float:
    began = clock()
    for _ in range(repeats):
        call()
    return (clock() - began) / repeats
