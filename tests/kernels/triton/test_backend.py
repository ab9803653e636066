"""Where Triton's kernels run, and what is said where they cannot."""

from __future__ import annotations

import inspect
import logging
import sys

import pytest
import torch
import triton

from loraplex.errors import ConfigError
from loraplex.kernels.fallbacks import TRITON_OPERATORS
from loraplex.kernels.ops import get_backend
from loraplex.kernels.torch_ops import TorchBackend
from loraplex.kernels.triton.backend import TritonBackend
from loraplex.kernels.triton.launch import A100, H100, GpuTarget, TritonLauncher
from loraplex.metrics import KernelFallback
from tests.kernels.cases import same_bits

CPU = torch.device("cpu")


def test_on_a_cpu_it_runs_in_the_interpreter_when_asked_for() -> None:
    backend = get_backend("triton", CPU)
    assert isinstance(backend, TritonBackend)
    assert "interpreter" in backend.description
    assert get_backend("auto", CPU).name != "triton"


def test_without_the_interpreter_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ConfigError, match="CUDA device"):
        get_backend("triton", CPU)


def test_where_triton_is_not_installed_it_is_refused_by_name_and_replaced_otherwise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "loraplex.kernels.triton.backend", None)
    with pytest.raises(ConfigError, match="not installed"):
        get_backend("triton", CPU)
    with caplog.at_level(logging.WARNING):
        backend = get_backend("auto", torch.device("cuda"))
    assert isinstance(backend, TorchBackend)
    assert "Triton is not installed" in backend.description
    assert caplog.text.count("Triton is not installed") == 1


def test_what_stock_torch_runs_for_a_missing_triton_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "loraplex.kernels.triton.backend", None)
    backend = get_backend("auto", torch.device("cuda"))
    assert backend.fallbacks() == ()
    x, weight = torch.randn(3, 8), torch.ones(8)
    assert same_bits(backend.rms_norm(x, weight, 1e-5), TorchBackend().rms_norm(x, weight, 1e-5))
    for _ in range(2):
        backend.add_rms_norm(x.clone(), x, weight, 1e-5)  # which norms by rms_norm
    backend.linear(x, torch.eye(8))  # a product that Triton leaves to cuBLAS
    counts = {each.op: each.calls for each in backend.fallbacks() if each.reason.startswith("Triton is not installed")}
    assert counts == {"rms_norm": 1, "add_rms_norm": 2}
    assert caplog.text.count("Triton") == 1


@pytest.mark.parametrize(("name", "device"), [("torch", "cuda"), ("auto", "meta"), ("torch", "cpu")])
def test_stock_torch_that_stands_for_nothing_counts_nothing(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "loraplex.kernels.triton.backend", None)
    backend = get_backend(name, torch.device(device))
    assert type(backend) is TorchBackend
    backend.silu_mul(torch.zeros(1, 2))
    assert backend.fallbacks() == ()


def test_every_operator_with_kernels_is_counted_without_them() -> None:
    """Those that the Triton backend may leave to stock torch."""
    own = {name: f for name, f in vars(TritonBackend).items() if inspect.isfunction(f)}
    assert {name for name, f in own.items() if "_fall_back" in f.__code__.co_names} == set(TRITON_OPERATORS)


def test_a_fallback_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    backend = TritonBackend(CPU)
    assert not backend.fallbacks()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            backend._fall_back("paged_attention", "head size 512")
    assert backend.fallbacks() == (KernelFallback("paged_attention", "triton", "head size 512", 3),)
    assert caplog.text.count("head size 512") == 1


def test_bfloat16_is_not_interpreted() -> None:
    """Triton's interpreter computes it wrong without a word."""
    with pytest.raises(AssertionError, match="bfloat16"):
        TritonLauncher(CPU).launch(None, (1,), torch.zeros(1, dtype=torch.bfloat16))


def test_block_sizes_in_the_interpreter_are_an_h100s() -> None:
    assert GpuTarget.of(CPU) is H100
    assert A100.max_shared_bytes < H100.max_shared_bytes


def test_a_model_in_bfloat16_is_refused_there() -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        TritonBackend(CPU).activation_dtype(torch.bfloat16)
    assert TritonBackend(CPU).activation_dtype(torch.float16) == torch.float16
