"""The GPU's time of a decode step by kernel, as torch's profiler has it, and how much of the step the GPU is busy."""

from __future__ import annotations

import itertools
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.engine_loads import Driver, Sizes
from benchmarks.gpu.place import Place
from loraplex.core import LoRARequest
from loraplex.frontend.llm import LLM

NUM_STEPS = 10
SHOWN = 15
LONGEST_NAME = 60

Span = tuple[str, float, float]
"""A kernel's name, and its begin and end in microseconds."""


@dataclass(frozen=True)
class KernelTime:
    """Of one step: microseconds, and how many ran."""

    name: str
    us: float
    count: float


@dataclass(frozen=True)
class Profile:
    """Microseconds of one step. wall_us: with the profiler on; busy_us: while anything ran on the GPU. The longest
    kernels come first."""

    steps: int
    wall_us: float
    busy_us: float
    kernels: Sequence[KernelTime]

    @classmethod
    def read(cls, figures: Mapping[str, Any]) -> Profile:
        """Of JSON."""
        return cls(**{**figures, "kernels": [KernelTime(**one) for one in figures["kernels"]]})

    @property
    def num_launched(self) -> float:
        return sum(one.count for one in self.kernels)

    def lines(self) -> list[str]:
        """The longest kernels, for the log."""
        shown = [f"{one.us:9.1f} us {one.count:7.1f} x  {one.name}" for one in self.kernels[:SHOWN]]
        others = self.kernels[SHOWN:]
        rest = (
            f"{sum(one.us for one in others):9.1f} us {sum(one.count for one in others):7.1f} x  {len(others)} others"
        )
        return [*shown, *([rest] if others else [])]


def profile_decode(llm: LLM, adapters: Sequence[LoRARequest | None], sizes: Sizes, place: Place) -> Profile:
    """One request for each entry, all of them decoding. On a CPU its operators."""
    driver = Driver(llm)
    num_steps = min(NUM_STEPS, sizes.steps)
    requests = [driver.submit(adapter, sizes.prompt, 3 * num_steps + 16) for adapter in adapters]
    while not all(driver.times[request_id] for request_id in requests):
        driver.step()
    _profiled(driver, num_steps, place)  # what the profiler makes at its first time
    spans, seconds = _profiled(driver, num_steps, place)
    driver.end()
    return profile_of(spans, num_steps, seconds)


def _profiled(driver: Driver, num_steps: int, place: Place) -> tuple[list[Span], float]:
    """(what ran, seconds) of so many steps."""
    activity = ProfilerActivity.CPU if place.is_interpreted else ProfilerActivity.CUDA
    device_type = DeviceType.CPU if place.is_interpreted else DeviceType.CUDA
    place.synchronize()
    with profile(activities=[activity]) as profiler:
        began = time.perf_counter()
        driver.run(num_steps)
        place.synchronize()
        took = time.perf_counter() - began
    events = profiler.events() or ()
    spans = [(e.name, e.time_range.start, e.time_range.end) for e in events if e.device_type == device_type]
    return spans, took


def profile_of(spans: Sequence[Span], num_steps: int, seconds: float) -> Profile:
    """Of what ran in so many steps."""
    taken: dict[str, list[float]] = defaultdict(list)
    for name, start, end in spans:
        taken[short_name(name)].append(end - start)
    kernels = [KernelTime(name, sum(times) / num_steps, len(times) / num_steps) for name, times in taken.items()]
    kernels.sort(key=lambda one: -one.us)
    busy_us = _covered((start, end) for _, start, end in spans)
    return Profile(num_steps, 1e6 * seconds / num_steps, busy_us / num_steps, kernels)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Of a line, by any of them."""
    in_order = sorted(spans)
    ends = itertools.accumulate((end for _, end in in_order), max, initial=float("-inf"))
    return sum(max(0.0, end - max(start, before)) for (start, end), before in zip(in_order, ends, strict=False))


def short_name(name: str) -> str:
    """Without namespaces, template arguments and parameters; of torch's elementwise kernels, with what they compute."""
    plain = re.sub(r"\(anonymous namespace\)::|\bat::native::|^void ", "", name)
    base = re.split(r"[<(]", plain, maxsplit=1)[0]
    what = re.search(r"\w*Functor\w*|\w+_kernel_cuda|\w+_kernel_impl", plain[len(base) :])
    return f"{(base or plain).strip()}{f'({what[0]})' if what else ''}"[:LONGEST_NAME]
