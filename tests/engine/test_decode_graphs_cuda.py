"""CUDA graphs on a GPU: each replay against the same step by kernels, bit for bit. Needs TRITON_INTERPRET=0."""

from __future__ import annotations

import os
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch

from loraplex import LoRAConfig
from loraplex.engine.decode_graphs import CudaGraphDevice
from tests.engine.driver import Driver
from tests.engine.rules_bench import MAX_MODEL_LEN, NAMES, Bench, loaded
from tests.fixtures import VOCAB_SIZE

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET", "0") != "0",
    reason="needs a CUDA device and TRITON_INTERPRET=0",
)


@pytest.fixture
def driver(bench: Bench, request: pytest.FixtureRequest) -> Iterator[Driver]:
    settings: dict[str, Any] = {"device": "cuda", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 12}
    driver = Driver(bench.base, LoRAConfig(), dtype=request.param, **settings)
    yield loaded(driver, bench)
    driver.check_idle()
    driver.close()


@pytest.mark.parametrize("driver", ["float32", "float16", "bfloat16"], indirect=True)
def test_replays_equal_eager_steps(driver: Driver) -> None:
    """Requests of the base and of adapters that come and go at random, so that every size is padded to."""
    graphs = driver.engine.graphs
    assert graphs is not None
    assert graphs.num_graphs == 2 * 5  # 1, 2, 4, 8, 12
    rng = Random(0)
    with graphs.compared() as counts:
        for _ in range(40):
            for _ in range(rng.randint(0, 3)):
                prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
                driver.submit(prompt, rng.choice([None, *NAMES]), max_tokens=rng.randint(1, 30))
            driver.step(rng.randint(1, 5))
        driver.finish()
    assert counts["different"] == 0
    assert driver.stats.graph_steps["lora"] > 40
    assert counts["equal"] == sum(driver.stats.graph_steps.values())


class TestTheDevice:
    device = torch.device("cuda")

    def test_a_replay_reads_static_tensors_as_they_are_now(self) -> None:
        x, y = torch.zeros(1000, device=self.device), torch.zeros(1000, device=self.device)
        graph = CudaGraphDevice(self.device).capture(lambda: y.copy_(x * 2 + 1))
        x.fill_(3)
        graph.replay()
        assert y.eq(7).all()

    def test_a_capture_that_fails_leaves_the_device_as_it_was(self) -> None:
        device, x = CudaGraphDevice(self.device), torch.ones(10, device=self.device)
        stream = torch.cuda.current_stream()

        def waits() -> None:
            (x * 2).sum().item()

        with pytest.raises(RuntimeError, match="captur"):
            device.capture(waits)
        assert torch.cuda.current_stream() == stream
        assert not torch.cuda.is_current_stream_capturing()
        device.release()
        y = torch.zeros(10, device=self.device)
        graph = device.capture(lambda: y.copy_(x + 1))
        graph.replay()
        assert y.eq(2).all()
