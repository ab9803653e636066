"""Where Triton's kernels run, and what is said where they cannot."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
import triton

from loraplex.errors import ConfigError
from loraplex.kernels.ops import get_backend
from loraplex.kernels.torch_ops import TorchBackend
from loraplex.kernels.triton.backend import TritonBackend
from loraplex.kernels.triton.launch import A100, H100, GpuTarget, TritonLauncher

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
    assert type(backend) is TorchBackend
    assert "not installed" in backend.description
    assert "Triton" in caplog.text


def test_a_fallback_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    backend = TritonBackend(CPU)
    assert not backend.fallbacks
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            backend._fall_back("paged_attention", "head size 512")
    assert backend.fallbacks == {"paged_attention: head size 512": 3}
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
