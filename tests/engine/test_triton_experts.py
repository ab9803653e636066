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


def paths_of(zoo: ModelZoo, family: str) -> dict[str, Path]:
    import peft

    base = zoo.base(family)
    return {
        name: zoo.adapter(base, peft.LoraConfig(**options, task_type="CAUSAL_LM"), seed=50 + number)
        for number, (name, options) in enumerate(ADAPTERS.items())
    }


@pytest.mark.parametrize(("family", "num_tokens"), [("qwen3_moe", 4), ("qwen2_moe", 2)])
def test_replays_equal_eager_steps_and_the_oracle(
    zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, family: str, num_tokens: int
) -> None:
    """One prompt step of three, then graphs of four rows, one of them padding. qwen2_moe has a shared expert, and a
    layer without experts."""
    device, cpu = TapeDevice(), torch.device("cpu")
    backend = TritonBackend(cpu, TapeLauncher(cpu, device))
    monkeypatch.setattr(build_module, "get_backend", lambda *_: backend)
    monkeypatch.setattr(decode_graphs, "graph_device_for", lambda *_: device)
    monkeypatch.setattr(decode_graphs, "graph_sizes", lambda *_: (4,))
    base, paths = zoo.base(family), paths_of(zoo, family)
    cases = {name: zoo.fit_case(base, path, length=9) for name, path in {None: None, **paths}.items()}
    driver = Driver(base, LoRAConfig(), max_num_seqs=4, **SETTINGS)
    for name, path in paths.items():
        driver.registry.load(name, str(path))
    graphs = driver.engine.graphs
    assert graphs is not None
    assert graphs.num_graphs == 2
    asked = {name: driver.submit(case.prompt_token_ids, name, max_tokens=num_tokens) for name, case in cases.items()}
    with graphs.compared() as counts:
        driver.finish()
    for name, request_id in asked.items():
        assert driver.tokens(request_id) == cases[name].output_token_ids[:num_tokens], name
    assert counts["different"] == 0
    assert counts["equal"] >= num_tokens - 1
    assert driver.stats.graph_steps["lora"] >= num_tokens - 1
    assert not backend.fallbacks()
    driver.check_idle()
    driver.close()


@pytest.mark.parametrize(
    "settings",
    [{}, {"enforce_eager": True}, {"quantization": "int8"}, {"quantization": "int4"}, {"quantization": "fp8"}]
    + [{"lora_dtype": "int8"}],
    ids=str,
)
def test_no_step_waits_for_the_device(zoo: ModelZoo, settings: dict[str, Any]) -> None:
    """Which experts a row has is known on the device alone."""
    settings = dict(settings)
    lora = {name: settings.pop(name) for name in ("lora_dtype",) if name in settings}
    config = LoRAConfig(host_memory_bytes=1 << 24, scrub_bytes_per_s=0, **lora)
    base, paths = zoo.base("qwen2_moe"), paths_of(zoo, "qwen2_moe")
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
