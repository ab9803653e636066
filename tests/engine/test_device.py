"""The device of an engine by its name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from loraplex.engine.build import _device
from loraplex.errors import ConfigError


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.set_device takes no other than a numbered one."""
    chosen: list[int] = []
    monkeypatch.setattr(torch, "empty", lambda _size, device: SimpleNamespace(device=torch.device(device, 2)))
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    assert _device("cuda") == torch.device("cuda", 2)
    assert chosen == [2]


def test_a_cpu_is_itself() -> None:
    assert _device("cpu") == torch.device("cpu")


def test_what_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match="device 'toaster' cannot be used here"):
        _device("toaster")


def test_a_device_without_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match="'meta' holds no numbers"):
        _device("meta")
