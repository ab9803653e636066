"""Decode steps of Triton kernels as graphs: in the interpreter, on the tape (graph_tape.py) with launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from loraplex import LoRAConfig
from loraplex.core import AdapterMix
from loraplex.engine import build as build_module
from loraplex.engine import decode_graphs
from loraplex.engine.schedule_plan import SchedulePlan
from loraplex.kernels.triton.backend import TritonBackend
from loraplex.kernels.triton.launch import TritonLauncher
from tests.engine.driver import Driver
from tests.engine.graph_tape import TapeDevice
from tests.engine.rules_bench import MAX_MODEL_LEN, Asked, Bench, loaded

pytestmark = pytest.mark.interpreter


class Launch:
    """One launch of a kernel. What it wrote to, torch made."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run

    def poison(self) -> None:
        pass


class TapeLauncher(TritonLauncher):
    """Runs kernels in Triton's interpreter, and writes launches down while `device` captures."""

    def __init__(self, where: torch.device, device: TapeDevice) -> None:
        super().__init__(where)
        self._device = device

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        def run() -> None:
            with _disable_current_modes():  # the interpreter is written in torch, too
                super(TapeLauncher, self).launch(kernel, grid, *args, **constants)

        run()
        if self._device.tape is not None:
            self._device.tape.calls.append(Launch(run))


def test_replays_equal_eager_steps(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens of the oracle, through graphs of two rows; nothing that the host knew of a step is in them."""
    device, cpu = TapeDevice(), torch.device("cpu")
    backend = TritonBackend(cpu, TapeLauncher(cpu, device))
    monkeypatch.setattr(build_module, "get_backend", lambda *_: backend)
    monkeypatch.setattr(decode_graphs, "graph_device_for", lambda *_: device)
    monkeypatch.setattr(decode_graphs, "graph_sizes", lambda *_: (2,))
    settings: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 2, "kv_cache_memory_bytes": 1 << 20}
    driver = loaded(Driver(bench.base, LoRAConfig(), **settings), bench)
    graphs = driver.engine.graphs
    assert graphs is not None
    assert graphs.num_graphs == 2
    asked = [Asked(driver, bench, name, num_tokens=count) for name, count in (("one", 3), (None, 4))]
    with graphs.compared() as counts:
        driver.finish()
    for each in asked:
        each.check()
    assert counts == {"equal": 3}
    assert driver.stats.graph_steps == {"lora": 2, "base": 1}
    assert not backend.fallbacks()
    driver.check_idle()
    driver.close()


def test_a_mix_takes_a_graph_with_as_many_rows_as_tiles(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows with three tiles run in a graph of four rows; more tiles than the largest graph has rows, in none."""
    device, cpu = TapeDevice(), torch.device("cpu")
    settings: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 20}
    small, large = AdapterMix((("one", 0.5), ("two", 0.25))), AdapterMix((("four", 0.5), ("one", -1.0), ("three", 1.0)))
    prompt = bench.cases[None][0].prompt_token_ids

    def tokens(driver: Driver) -> list[tuple[int, ...]]:
        """Of steps with tiles: 3, 3, then 2 + 3 + 1, then 3 + 1."""
        ids = [driver.submit(prompt, small, max_tokens=4), driver.submit(prompt, "one", max_tokens=6)]
        driver.step(3)
        ids.append(driver.submit(prompt, large, max_tokens=3))
        driver.finish()
        return [driver.tokens(each) for each in ids]

    plain = loaded(Driver(bench.base, LoRAConfig(), **settings), bench)
    expected = tokens(plain)
    plain.close()
    backend = TritonBackend(cpu, TapeLauncher(cpu, device))
    monkeypatch.setattr(build_module, "get_backend", lambda *_: backend)
    monkeypatch.setattr(decode_graphs, "graph_device_for", lambda *_: device)
    monkeypatch.setattr(decode_graphs, "graph_sizes", lambda *_: (2, 4))
    driver = loaded(Driver(bench.base, LoRAConfig(), **settings), bench)
    graphs = driver.engine.graphs
    assert graphs is not None
    sizes: list[int | None] = []
    padded_size = graphs.padded_size

    def noting(plan: SchedulePlan) -> int | None:
        sizes.append(padded_size(plan))
        return sizes[-1]

    monkeypatch.setattr(graphs, "padded_size", noting)
    with graphs.compared() as counts:
        assert tokens(driver) == expected
    assert "different" not in counts
    assert sizes[:3] == [None, 4, 4]
    assert 4 in sizes[4:], "one row of three tiles and another"
    assert not backend.fallbacks()
    driver.check_idle()
    driver.close()


def test_more_tiles_than_the_largest_graph_has_rows_run_kernel_by_kernel(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, cpu = TapeDevice(), torch.device("cpu")
    backend = TritonBackend(cpu, TapeLauncher(cpu, device))
    monkeypatch.setattr(build_module, "get_backend", lambda *_: backend)
    monkeypatch.setattr(decode_graphs, "graph_device_for", lambda *_: device)
    monkeypatch.setattr(decode_graphs, "graph_sizes", lambda *_: (2,))
    settings: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 2, "kv_cache_memory_bytes": 1 << 20}
    driver = loaded(Driver(bench.base, LoRAConfig(), **settings), bench)
    mix = AdapterMix((("one", 0.5), ("two", 0.25), ("three", 1.0)))
    driver.submit(bench.cases[None][0].prompt_token_ids, mix, max_tokens=3)
    driver.finish()
    assert driver.stats.eager_steps == {"prefill": 1, "batch_size": 2}
    driver.check_idle()
    driver.close()
