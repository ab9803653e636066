"""How the GPU scripts time: calls captured in a CUDA graph, replays between events, the median; and both ceilings.

Calls that are timed together read different memory, more than twice the L2 holds, so that each finds it cold.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.place import BF16, Place

Call = Callable[[], object]

MIN_CALLS = 24
"""Of a graph: the time from one replay to the next is shared by so many."""

MAX_COPIES = 1200
MIN_REPLAYS, MAX_REPLAYS = 7, 200


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of replays, and the range of their middle half. is_captured: false where calls
    could not be."""

    seconds: float
    spread: float
    is_captured: bool


@dataclass(frozen=True)
class Ceilings:
    """bandwidth: bytes/s read and written by a large copy; matrix_rate: bf16 operations/s of a large random product."""

    bandwidth: float
    matrix_rate: float

    def floor_s(self, num_bytes: float, operations: float) -> float:
        """No version runs much faster."""
        return max(num_bytes / self.bandwidth, operations / self.matrix_rate)


def copies_for(num_bytes: float, place: Place) -> int:
    """How many copies of what a call reads are more than twice the L2."""
    if place.is_interpreted:
        return 1
    l2 = torch.cuda.get_device_properties(place.device).L2_cache_size
    return max(1, min(MAX_COPIES, math.ceil(2.5 * l2 / max(1.0, num_bytes))))


def time_calls(calls: Sequence[Call], place: Place, seconds: float = 0.2) -> Timing:
    """One call of several that read different memory; as many replays as fit in `seconds`."""
    if place.is_interpreted:
        return _time_once(calls[0])
    for call in calls:
        call()  # compiles, and makes the libraries' handles
    torch.cuda.synchronize()
    rounds = max(1, math.ceil(MIN_CALLS / len(calls)))
    replay, is_captured = _captured([*itertools.chain.from_iterable([calls] * rounds)])
    taken = _replays(replay, seconds)
    low, middle, high = statistics.quantiles(taken, n=4)
    num_calls = rounds * len(calls)
    return Timing(middle / num_calls, (high - low) / middle, is_captured)


def _time_once(call: Call) -> Timing:
    began = time.perf_counter()
    call()
    return Timing(time.perf_counter() - began, 0.0, False)


def _captured(calls: Sequence[Call]) -> tuple[Call, bool]:
    """(what runs them all, whether it is a graph)"""

    def all_of_them() -> None:
        for call in calls:
            call()

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            all_of_them()
    except RuntimeError:  # a peer that looks at its data on the host
        torch.cuda.synchronize()
        return all_of_them, False
    return graph.replay, True


def _replays(replay: Call, seconds: float) -> list[float]:
    """Seconds of each."""
    replay()
    first = _between_events(replay)
    count = max(MIN_REPLAYS, min(MAX_REPLAYS, int(seconds / max(first, 1e-6))))
    return [_between_events(replay) for _ in range(count)]


def _between_events(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure_ceilings(place: Place) -> Ceilings:
    """In a second or two; in the interpreter a made-up GPU's."""
    if place.is_interpreted:
        return Ceilings(4e12, 8e14)
    return Ceilings(_copy_bandwidth(place), _matrix_rate(place))


def _copy_bandwidth(place: Place) -> float:
    source = torch.empty(2**29, dtype=BF16, device=place.device).normal_()
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / time_calls([lambda: target.copy_(source)], place).seconds


def _matrix_rate(place: Place) -> float:
    a, b = (torch.randn(8192, 8192, dtype=BF16, device=place.device) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * 8192**3 / time_calls([lambda: torch.mm(a, b, out=out)], place).seconds
