"""Where the time of a step goes: seconds by part, added up where the part runs.

The parts of a step are always measured, a few clock readings each. The kernels inside `forward` are measured while a
profile runs: on a running server by `Decoder.measure_operators`, for the command `loraplex profile MODEL` by
kernels/profiled.py.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

STEP_PARTS = ("schedule", "build", "forward", "sample", "wait", "commit")
"""What a step is made of, in order. wait: for a device beside the host; `forward` and `sample` then only launch."""

DEVICE_PART = "device"
"""A step's time on a device that runs beside the host, from its first kernel to its last, while a profile runs. The
other parts are the host's: this one is beside them."""

KERNEL_PARTS = ("gemm", "lora", "attention", "glue")
"""What `forward` is made of, beside the Python between the kernels. glue: norms, rotary with the KV write, SiLU, sums
over ranks and waiting for them."""


class Profiler:
    """Seconds by part. One thread writes; anyone may read."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the block to a part."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - began

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds

    @property
    def seconds(self) -> Mapping[str, float]:
        """So far, by part."""
        return dict(self._seconds)
