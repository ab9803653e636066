"""Each kernel beside stock torch on the same inputs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from loraplex.kernels.fallbacks import NATIVE_OPERATORS, TRITON_OPERATORS
from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.ops import get_backend
from loraplex.kernels.protocols import KernelBackend
from loraplex.metrics import KernelSpeedup
from loraplex.models.speedup import OF_EXPERTS, KernelShapes, measure_speedups
from tests.kernels.cases import BF16, FP32, NATIVE

MEASURED = [op for op in NATIVE_OPERATORS if op not in OF_EXPERTS]

CPU = torch.device("cpu")
SHAPES = KernelShapes(32, 48, 4, 2, 16, 100, FP32, CPU, num_rows=5, num_adapters=3, rank=4, context_len=20)
needs_native = pytest.mark.skipif(not isinstance(NATIVE, NativeLibrary), reason="no native kernels are built")


def measure(backend: KernelBackend, shapes: KernelShapes = SHAPES) -> tuple[KernelSpeedup, ...]:
    """With a clock on which each reading is a second after the last one."""
    return measure_speedups(backend, shapes, clock=map(float, itertools.count()).__next__)


def native() -> NativeBackend:
    assert isinstance(NATIVE, NativeLibrary)
    return NativeBackend(NATIVE, 1)


@needs_native
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_each_native_kernel_is_measured(dtype: torch.dtype) -> None:
    backend = native()
    found = measure(backend, replace(SHAPES, dtype=dtype))
    assert [each.op for each in found] == list(MEASURED)
    assert {(each.backend, each.fallback, each.kernel_s, each.speedup) for each in found} == {
        ("native", "torch", 1.0, 1.0)
    }
    assert found[0].shape == "5 rows, 3 adapters of rank 4, 32 to 48"
    assert not backend.fallbacks()


@needs_native
def test_what_falls_back_on_these_shapes_is_left_out() -> None:
    found = measure(native(), replace(SHAPES, head_dim=24))
    assert set(MEASURED) - {each.op for each in found} == {"rotary_write_kv", "paged_attention"}


@needs_native
def test_a_large_linear_is_cut() -> None:
    found = measure(native(), replace(SHAPES, hidden_size=4096, intermediate_size=8192))
    assert next(each.shape for each in found if each.op == "linear") == "5 rows, 4096 to 1024"


@needs_native
def test_time_ends_it() -> None:
    """A median of several samples while there is time, and of one when there is none."""
    ticks = itertools.count()
    found = measure_speedups(native(), SHAPES, 1e6, lambda: float(next(ticks)))
    assert len(found) == len(MEASURED)
    assert next(ticks) > 100 * len(found)


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_stock_torch_has_no_kernels(name: str) -> None:
    assert measure(get_backend(name, CPU)) == ()


def test_triton_kernels_are_measured() -> None:
    triton_backend = pytest.importorskip("loraplex.kernels.triton.backend")
    backend = triton_backend.TritonBackend(CPU)
    if not backend.launcher.is_interpreted:
        pytest.skip("runs in Triton's interpreter")
    found = measure(backend, replace(SHAPES, num_rows=2, num_adapters=2, context_len=8))
    assert [each.op for each in found] == [op for op in TRITON_OPERATORS if op not in OF_EXPERTS]
