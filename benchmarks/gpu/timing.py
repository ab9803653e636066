"""How the GPU scripts time: calls captured in a CUDA graph, replays between events, the median; and both ceilings.

Calls that are timed together read different memory, twice what the L2 holds, so that each finds it cold. Of tiny
inputs there are fewer: no more than MAX_COPIES calls.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.place import BF16, Place
from loraplex.engine.decode_graphs import abandon_capture

Call = Callable[[], object]

MIN_CALLS = 24
"""Of a graph: the time from one replay to the next is shared by so many, or by what takes LONG_S."""

LONG_S = 1e-3
MAX_COPIES = 200
MIN_REPLAYS, MAX_REPLAYS = 5, 200


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of replays, and the range of their middle half. is_captured: false where calls
    ran without a graph, so that the time of launches is in it."""

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
    """How many copies of what a call reads are twice the L2; no more than MAX_COPIES, which is less of tiny ones."""
    if place.is_interpreted:
        return 1
    l2 = torch.cuda.get_device_properties(place.device).L2_cache_size
    return max(1, min(MAX_COPIES, math.ceil(2.0 * l2 / max(1.0, num_bytes)) + 1))


def time_calls(calls: Sequence[Call], place: Place, seconds: float = 0.2, may_capture: bool = True) -> Timing:
    """One call of several that read different memory; as many replays as fit in `seconds`.

    may_capture: false for calls that look at their data on the host.
    """
    if place.is_interpreted:
        return _time_once(calls[0])
    stream = _stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (calls[0], calls[-1]):
            call()  # compiles, and makes the libraries' handles
        torch.cuda.synchronize()
        rounds = math.ceil(min(MIN_CALLS, LONG_S / _between_events(calls[0])) / len(calls))
        in_turn = [*itertools.chain.from_iterable([calls] * rounds)]
        replay = _captured(in_turn) if may_capture else None
        taken = _replays(replay or (lambda: _all_of(in_turn)), seconds)
    low, middle, high = statistics.quantiles(taken, n=4)
    return Timing(middle / len(in_turn), (high - low) / middle, replay is not None)


@functools.cache
def _stream() -> torch.cuda.Stream:
    """One for all captures and what warms up for them: cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _time_once(call: Call) -> Timing:
    began = time.perf_counter()
    call()
    return Timing(time.perf_counter() - began, 0.0, False)


def _all_of(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _captured(calls: Sequence[Call]) -> Call | None:
    """Runs them all as a graph of the current stream. None: they cannot be captured."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        _all_of(calls)
        graph.capture_end()
    except BaseException as error:
        abandon_capture(graph, torch.cuda.current_device(), pool)
        torch.cuda.synchronize()
        if not isinstance(error, RuntimeError):
            raise
        return None
    return graph.replay


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
    return 2.0 * source.nbytes / time_calls([lambda: torch.neg(source, out=target)], place).seconds


def _matrix_rate(place: Place) -> float:
    a, b = (torch.randn(8192, 8192, dtype=BF16, device=place.device) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * 8192**3 / time_calls([lambda: torch.mm(a, b, out=out)], place).seconds
