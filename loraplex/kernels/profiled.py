"""A backend that measures another one: each operator's time goes to its part of the profile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from loraplex.kernels.ops import KernelBackend
from loraplex.kernels.step_batch import LayersForward
from loraplex.performance.profiler import Profiler

PART_OF = {
    "linear": "gemm",
    "add_lora": "lora",
    "scale_input": "lora",
    "paged_attention": "attention",
    "rms_norm": "glue",
    "add_rms_norm": "glue",
    "embedding": "glue",
    "rotary_write_kv": "glue",
    "silu_mul": "glue",
    "layer_norm": "glue",
    "add_scaled": "glue",
    "gelu": "glue",
    "experts": "gemm",
    "add_gated": "glue",
    "sum_ranks": "glue",
    "rms_norm_ranks": "glue",
}
"""Operator of a step -> part of the profile (loraplex/performance/profiler.py)."""


def profiled(backend: KernelBackend, profiler: Profiler) -> KernelBackend:
    """`backend`, measured. On a GPU a kernel is only launched when its call returns, so the times mean little there."""
    return cast(KernelBackend, _Profiled(backend, profiler))


class _Profiled:
    """Every attribute is the backend's; the operators are wrapped."""

    is_capturable = False  # a replay calls none of them

    def __init__(self, backend: KernelBackend, profiler: Profiler) -> None:
        self._backend = backend
        self._profiler = profiler
        for operator, part in PART_OF.items():
            if hasattr(backend, operator):
                setattr(self, operator, _timed(getattr(backend, operator), profiler, part))

    def captured(self, forward: LayersForward, on_seconds: Callable[[str, float], None] | None = None) -> LayersForward:
        """`on_seconds` is not needed: everything is measured already, and told to the profiler."""

        def add(operator: str, seconds: float) -> None:
            self._profiler.add(PART_OF[operator], seconds)

        return self._backend.captured(forward, add)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def _timed(operator: Callable[..., Any], profiler: Profiler, part: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = operator(*args, **kwargs)
        profiler.add(part, time.perf_counter() - began)
        return result

    return call
