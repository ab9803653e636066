"""The device of an engine by its name."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraplex.config import EngineConfig
from loraplex.engine.build import _device, build_engine, with_device
from loraplex.errors import ConfigError
from tests.fixtures import ModelZoo


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


# ----------------------------------------------------------------------------------------------------------------- auto


class Cuda:
    """What `auto` asks of torch. capability None: there is no GPU."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, built_for: str | None = "13.0"
    ) -> None:
        self.chosen: list[int] = []
        monkeypatch.setattr(torch.version, "cuda", built_for)
        for name, value in {
            "is_available": capability is not None,
            "get_device_capability": capability,
            "get_device_name": "Some GPU",
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        monkeypatch.setattr(torch, "empty", self._empty)
        monkeypatch.setattr(torch._C, "_cuda_setDevice", self.chosen.append, raising=False)

    def _empty(self, _size: int, device: str) -> Any:
        return SimpleNamespace(device=torch.device(device, 2) if device == "cuda" else torch.device(device))


def test_auto_is_the_default() -> None:
    assert EngineConfig(model="m").device == "auto"


@pytest.mark.parametrize(
    ("capability", "built_for", "backend", "device", "reason"),
    [
        ((9, 0), "13.0", "auto", "cuda:2", "Some GPU, of compute capability 9.0"),
        ((8, 0), "13.0", "triton", "cuda:2", "Some GPU, of compute capability 8.0"),
        ((8, 0), "13.0", "native", "cpu", "lora_backend native runs on a CPU"),
        ((7, 5), "13.0", "auto", "cpu", "Some GPU has compute capability 7.5, and the kernels need 8.0"),
        (None, "13.0", "auto", "cpu", "torch finds no GPU"),
        (None, None, "auto", "cpu", "this torch is built without CUDA"),
    ],
)
def test_auto_takes_a_gpu_that_the_kernels_can_use(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int] | None,
    built_for: str | None,
    backend: str,
    device: str,
    reason: str,
) -> None:
    cuda = Cuda(monkeypatch, capability, built_for)
    with caplog.at_level(logging.INFO, "loraplex"):
        config, found, choice = with_device(EngineConfig(model="m", lora_backend=backend))
    assert (config.device, str(found)) == (device, device)
    assert [record.getMessage() for record in caplog.records] == [choice] == [f"device: {device} ({reason})"]
    assert cuda.chosen == ([2] if device == "cuda:2" else [])


def test_a_driver_that_fails_is_no_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def failing() -> tuple[int, int]:
        raise RuntimeError("CUDA driver initialization failed\nmore")

    Cuda(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", failing)
    with caplog.at_level(logging.INFO, "loraplex"):
        assert with_device(EngineConfig(model="m"))[0].device == "cpu"
    assert "the GPU cannot be used: CUDA driver initialization failed)" in caplog.text


@pytest.mark.parametrize("settings", [{"cuda_graph_sizes": (8,)}, {"gpu_memory_utilization": 0.5}])
def test_a_setting_of_gpus_is_refused_where_auto_finds_none(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    config = EngineConfig(model="m", **settings)
    with monkeypatch.context() as patched:
        Cuda(patched, (9, 0))
        assert with_device(config)[0].device == "cuda:2"
    Cuda(monkeypatch, None)
    with pytest.raises(ConfigError, match=r"a CUDA device, not 'cpu'"):
        with_device(config)


def test_a_device_that_is_named_is_taken_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "loraplex"):
        assert with_device(EngineConfig(model="m", device="cpu"))[1] == torch.device("cpu")
    assert caplog.text == ""


def test_an_engine_says_which_device_auto_was(
    zoo: ModelZoo, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO, "loraplex"):
        engine = build_engine(EngineConfig(model=str(zoo.base("llama")), lora=None, kv_cache_memory_bytes=1 << 20))
    assert engine.info.device == "cpu"
    (choice,) = [each for each in engine.info.choices if each.startswith("device: cpu (")]
    assert choice in caplog.text
