"""Mixtures of experts on the Triton backend, with adapters on attention, routers and experts: whole steps in the
interpreter, decode steps as graphs on the tape, and a GPU that is not there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex import LoRAConfig
from loraplex.engine import build as build_module
from loraplex.engine import decode_graphs
from loraplex.kernels.triton.backend import TritonBackend
from tests.engine.driver import Driver
from tests.engine.fake_gpu import fake_gpu
from tests.engine.graph_tape import TapeDevice
from tests.engine.rules_bench import MAX_MODEL_LEN
from tests.engine.test_engine_beside_gpu import check_waits
from tests.engine.test_triton_graphs import TapeLauncher
from tests.fixtures import ModelZoo

pytestmark = pytest.mark.interpreter

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "experts": {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj"], "target_parameters": EXPERTS},
    "all": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight", *EXPERTS]},
}
SETTINGS: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "kv_cache_memory_bytes": 1 << 20}


def paths_of(zoo: ModelZoo, base: Path) -> dict[str, Path]:
    import peft

    return {
        name: zoo.adapter(base, peft.LoraConfig(**options, task_type="CAUSAL_LM"), seed=50 + number)
        for number, (name, options) in enumerate(ADAPTERS.items())
    }


@pytest.mark.timeout(1200)  # the interpreter takes seconds for a layer
def test_replays_equal_eager_steps_and_stock_torch(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt step, then graphs of three rows, one of them padding at the end. One layer: tests/kernels has the rest,
    and stock torch's tokens are those of transformers (test_moe_parity.py)."""
    base = zoo.base("qwen3_moe", options={"num_hidden_layers": 1, "num_experts": 3, "moe_intermediate_size": 24})
    paths = paths_of(zoo, base)

    def tokens(driver: Driver) -> list[tuple[int, ...]]:
        for name, path in paths.items():
            driver.registry.load(name, str(path))
        asked = [
            driver.submit(range(40 + 7 * i, 45 + 7 * i), name, max_tokens=3 - (name == "experts"))
            for i, name in enumerate((None, *paths))
        ]
        driver.finish()
        return [driver.tokens(each) for each in asked]

    plain = Driver(base, LoRAConfig(), max_num_seqs=3, lora_backend="torch", **SETTINGS)
    expected = tokens(plain)
    plain.close()
    assert len(set(expected)) == 3
    device, cpu = TapeDevice(), torch.device("cpu")
    backend = TritonBackend(cpu, TapeLauncher(cpu, device))
    monkeypatch.setattr(build_module, "get_backend", lambda *_: backend)
    monkeypatch.setattr(decode_graphs, "graph_device_for", lambda *_: device)
    monkeypatch.setattr(decode_graphs, "graph_sizes", lambda *_: (3,))
    driver = Driver(base, LoRAConfig(), max_num_seqs=3, **SETTINGS)
    graphs = driver.engine.graphs
    assert graphs is not None
    assert graphs.num_graphs == 2
    with graphs.compared() as counts:
        assert tokens(driver) == expected
    assert counts == {"equal": 2}
    assert driver.stats.graph_steps == {"lora": 2}
    assert not backend.fallbacks()
    driver.check_idle()
    driver.close()


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"enforce_eager": True}, {"lora_dtype": "int8"}),
        *({"quantization": "int8"}, {"quantization": "int4"}, {"quantization": "fp8"}),
    ],
    ids=str,
)
def test_no_step_waits_for_the_device(zoo: ModelZoo, settings: dict[str, Any]) -> None:
    """Which experts a row has is known on the device alone."""
    settings = dict(settings)
    lora = {name: settings.pop(name) for name in ("lora_dtype",) if name in settings}
    config = LoRAConfig(host_memory_bytes=1 << 24, scrub_bytes_per_s=0, **lora)
    base = zoo.base("qwen2_moe")
    paths = paths_of(zoo, base)
    with fake_gpu() as gpu:
        usual = {"device": "cuda", "dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 4}
        driver = Driver(base, config, **usual, **settings)
        for name, path in paths.items():
            driver.registry.load(name, str(path))
        for _ in range(2):
            gpu.host.waits.clear()
            for name in (None, *ADAPTERS):
                driver.submit(list(range(5, 25)), name, max_tokens=5)
            for _ in range(200):
                driver.advance()
                gpu.loader.run()
                if not driver.engine.has_unfinished:
                    break
            assert driver.errors == {}
            check_waits(gpu)
        assert driver.stats.kernel_fallbacks == {}
        if not settings.get("enforce_eager"):
            assert driver.stats.graph_steps["lora"] > 4
        driver.close()
