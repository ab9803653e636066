"""Decode steps as graphs, captured and replayed on a device that is not there (graph_tape.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from loraplex import LoRAConfig
from loraplex.config import EngineConfig
from loraplex.engine import decode_graphs
from loraplex.engine import engine as engine_module
from loraplex.engine.decode_graphs import DecodeGraphs, graph_bytes, graph_sizes
from loraplex.engine.engine import build_engine
from loraplex.engine.step_buffers import StagedBuffers
from loraplex.errors import ConfigError
from loraplex.kernels.torch_ops import TorchBackend
from loraplex.models.config import ModelConfig
from tests.engine.driver import Driver
from tests.engine.graph_tape import MaskedBackend, TapeDevice
from tests.engine.rules_bench import MAX_MODEL_LEN, Asked, Bench, loaded

MakeDriver = Callable[..., Driver]


@pytest.fixture
def make(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeDriver]:
    """Engines with graphs on a tape; each replay is compared with the same step run kernel by kernel."""
    drivers: list[Driver] = []

    def make(
        device: TapeDevice | None = None, backend: TorchBackend | None = None, is_lora_on: bool = True, **settings: Any
    ) -> Driver:
        device = device or TapeDevice()
        monkeypatch.setattr(engine_module, "get_backend", lambda *_: backend or MaskedBackend())
        monkeypatch.setattr(decode_graphs, "graph_device_for", lambda *_: device)
        settings = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 6, "kv_cache_memory_bytes": 1 << 20, **settings}
        driver = Driver(bench.base, LoRAConfig(max_loras=8), is_lora_on=is_lora_on, **settings)
        drivers.append(driver)
        device.poisoned += staged(driver).host_blocks
        return loaded(driver, bench) if is_lora_on else driver

    yield make
    for driver in drivers:
        driver.check_idle()
        driver.close()


def staged(driver: Driver) -> StagedBuffers:
    buffers = driver.engine._runner._builder._buffers
    assert isinstance(buffers, StagedBuffers)
    return buffers


def graphs_of(driver: Driver) -> DecodeGraphs:
    assert driver.engine.graphs is not None
    return driver.engine.graphs


class TestSizes:
    def test_they_grow_by_eight_and_end_with_the_largest_batch(self) -> None:
        assert graph_sizes(EngineConfig(model="m")) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
        assert graph_sizes(EngineConfig(model="m", max_num_seqs=20)) == (1, 2, 4, 8, 16, 20)
        assert graph_sizes(EngineConfig(model="m", max_num_seqs=3)) == (1, 2, 3)
        assert graph_sizes(EngineConfig(model="m", max_num_seqs=1)) == (1,)
        assert graph_sizes(EngineConfig(model="m", max_num_seqs=300))[-5:] == (248, 256, 272, 288, 300)

    def test_as_asked(self) -> None:
        cuda: dict[str, Any] = {"model": "m", "device": "cuda"}
        assert graph_sizes(EngineConfig(**cuda, cuda_graph_sizes=(16,))) == (1, 2, 4, 8, 16)
        assert graph_sizes(EngineConfig(**cuda, cuda_graph_sizes=(32, 8, 8))) == (8, 32)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"cuda_graph_sizes": (8,)}, "need a CUDA device, not 'cpu'"),
            ({"cuda_graph_sizes": (8,), "device": "cuda:1", "enforce_eager": True}, "no enforce_eager"),
            ({"cuda_graph_sizes": (0, 8), "device": "cuda"}, r"1\.\.max_num_seqs \(64\), got \(0, 8\)"),
            ({"cuda_graph_sizes": (65,), "device": "cuda"}, r"1\.\.max_num_seqs \(64\)"),
        ],
    )
    def test_what_cannot_be_is_refused(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            EngineConfig(model="m", **settings)

    def test_their_memory_grows_with_the_largest_batch_and_the_number_of_graphs(self, bench: Bench) -> None:
        model = ModelConfig.from_dir(bench.base)
        few, more = (graph_bytes(EngineConfig(model="m", max_num_seqs=n), model, 2) for n in (64, 128))
        assert more - few > 64 * model.vocab_size * 4
        assert graph_bytes(EngineConfig(model="m", lora=None), model, 2) < few


class TestCapture:
    def test_the_largest_first_with_adapters_and_without_and_progress_is_told(self, bench: Bench, make: MakeDriver) -> None:
        device = TapeDevice()
        driver = make(device)
        assert device.log == ["warm-up", "capture"] * 8  # 6, 4, 2, 1
        told: list[tuple[str, int, int]] = []
        build_engine(
            EngineConfig(model=str(bench.base), max_model_len=32, max_num_seqs=2, kv_cache_memory_bytes=1 << 20),
            lambda *step: told.append(step),
        ).close()
        assert [step for step in told if step[0] == "graphs"] == [("graphs", done, 4) for done in (1, 2, 3, 4)]
        assert [key.size for key in graphs_of(driver)._graphs] == [6, 6, 4, 4, 2, 2, 1, 1]

    def test_an_engine_without_lora_has_half_as_many(self, make: MakeDriver) -> None:
        assert graphs_of(make(is_lora_on=False)).num_graphs == 4

    def test_kernels_of_the_host_are_not_captured(self, make: MakeDriver, bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
        """Stock torch reads lengths on the host: there are none in a capture."""
        with caplog.at_level(logging.WARNING, logger="loraplex.engine.decode_graphs"):
            driver = make(backend=TorchBackend())
        assert graphs_of(driver).num_graphs == 0
        assert "no CUDA graphs, steps run kernel by kernel" in caplog.text
        asked = Asked(driver, bench, "one")
        driver.finish()
        asked.check()

    @pytest.mark.parametrize("fails_at", [0, 5])
    def test_out_of_memory_leaves_an_engine_without_graphs(
        self, make: MakeDriver, bench: Bench, fails_at: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        device = TapeDevice(fails_at)
        driver = make(device)
        assert device.log[-1] == "release"
        assert "OutOfMemoryError: CUDA out of memory" in caplog.text
        asked = Asked(driver, bench, "one")
        driver.finish()
        asked.check()
        assert driver.stats.graph_steps == {}
        assert driver.stats.eager_steps == {"not_captured": 16}

    def test_without_cuda_or_with_enforce_eager_there_are_none(self) -> None:
        def device(name: str, backend: TorchBackend, **settings: Any) -> object:
            config = EngineConfig(model="m", **settings)
            return decode_graphs.graph_device_for(config, backend, torch.device(name))

        assert device("cpu", MaskedBackend()) is None
        assert device("cuda", MaskedBackend(), enforce_eager=True) is None
        assert device("cuda", TorchBackend()) is None


class TestReplay:
    @pytest.mark.parametrize("names", [(None,), (None, None, None), ("one",), ("two", None, "one", "two", None)])
    def test_tokens_are_the_models(self, make: MakeDriver, bench: Bench, names: tuple[str | None, ...]) -> None:
        """What transformers + peft say, through graphs padded from 3 to 4 and from 5 to 6."""
        driver = make()
        asked = [Asked(driver, bench, name, which % 2) for which, name in enumerate(names)]
        with graphs_of(driver).compared() as counts:
            driver.finish()
        for each in asked:
            each.check()
        kind = "base" if set(names) == {None} else "lora"
        assert driver.stats.graph_steps == {kind: 15}
        assert driver.stats.eager_steps == {"prefill": 1}
        assert counts == {"equal": 15}
