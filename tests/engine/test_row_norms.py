"""Adapters whose packed bytes depend on the base's weights, in a whole engine: refused alone, on disk for one base."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex import LLM, LoRARequest, SamplingParams
from loraplex.adapters.weights import LoRALayerWeights, LoRAModel
from loraplex.config import LoRAConfig
from loraplex.core import LoraTarget
from loraplex.engine.build import open_disk_tier
from loraplex.errors import AdapterValidationError
from loraplex.kernels.checksum import checksum
from loraplex.layers.linear import ParallelLinear
from loraplex.memory.weights.disk_cache import DiskRead
from loraplex.memory.weights.packing import Packer
from tests.engine.driver import Driver
from tests.engine.rules_bench import Asked, Bench
from tests.fixtures import KIND_OPTIONS, ModelZoo
from tests.kernels.cases import BACKENDS
from tests.models.paged_runner import load_decoder


def dora_of(targets: tuple[LoraTarget, ...], lora_b: float = 0.1) -> LoRAModel:
    """Of rank 2 on every linear. lora_b: each number of B."""
    layers = {}
    for target in filter(lambda target: target.is_linear, targets):
        for s in target.slices:
            a, b = torch.ones(2, target.in_features), torch.full((s.out_features, 2), lora_b)
            magnitude = torch.linspace(1, 2, s.out_features)
            layers[s.module_name] = LoRALayerWeights(s.module_name, 2, 2.0, a, b, magnitude=magnitude)
    return LoRAModel("d0", 2, layers, adapter_id=77)


def test_one_that_does_not_fit_the_base_is_refused_beside_requests(driver: Driver, bench: Bench) -> None:
    asked = [Asked(driver, bench, name) for name in ("one", "two", None)]
    driver.step(3)
    manager = driver.engine.adapters
    with pytest.raises(AdapterValidationError, match=r"row norms of W \+ scaling B A, and for 64 of 64 outputs"):
        manager.add_adapter(dora_of(driver.engine.info.targets, 3e38))
    driver.finish()
    for each in asked:
        each.check()
    assert 77 not in {residency.adapter_id for residency in manager.list_adapters()}
    assert not manager.report().quarantined


def test_the_disk_tier_has_it_for_this_checkpoint_alone(bench: Bench, tmp_path: Path) -> None:
    """Any other adapter stays when the checkpoint is written again."""
    base = Path(shutil.copytree(bench.base, tmp_path / "base"))
    config = LoRAConfig(disk_cache_dir=str(tmp_path / "disk"), disk_memory_bytes=2**24)
    (tmp_path / "disk").mkdir(mode=0o700)

    def start() -> tuple[Packer, dict[str, LoRAModel]]:
        model = load_decoder(base, backend="reference")
        dora = dora_of(model.lora_targets())
        plain = {
            name: LoRALayerWeights(name, 2, 2.0, layer.lora_a, layer.lora_b) for name, layer in dora.layers.items()
        }
        packer = Packer(model.lora_targets(), BACKENDS[0], torch.float32, model)
        return packer, {"d0": dora, "d1": LoRAModel("d1", 2, plain)}

    packer, models = start()
    disk = open_disk_tier(config, packer)
    assert disk is not None
    for digest, model in models.items():
        layout = packer.lay_out(model)
        views = [torch.empty(size, dtype=torch.uint8) for size in layout.sizes]
        packer.write(model, layout, views)
        assert disk.write(digest, layout, views, [checksum(view) for view in views])
        again = open_disk_tier(config, start()[0])
        assert again is not None
        found = [torch.empty_like(view) for view in views]
        assert again.read_into(digest, found) is DiskRead.DONE
        assert all(torch.equal(a, b) for a, b in zip(found, views, strict=True))
    os.utime(base / "model.safetensors", (0, 0))
    other = open_disk_tier(config, start()[0])
    assert other is not None
    assert [other.has(digest) for digest in models] == [False, True]


def test_an_engine_that_starts_again_computes_no_norms(
    zoo: ModelZoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the packed bytes of the one before, and says the same."""
    from peft import LoraConfig

    base = zoo.base("llama")
    path = zoo.adapter(base, LoraConfig(**KIND_OPTIONS["DoRA"][1], task_type="CAUSAL_LM"))
    computed, row_norms = [], ParallelLinear.row_norms

    def counted(self: ParallelLinear, module_name: str, *arguments: Any) -> torch.Tensor:
        computed.append(module_name)
        return row_norms(self, module_name, *arguments)

    monkeypatch.setattr(ParallelLinear, "row_norms", counted)
    said, num_computed = [], []
    for _ in range(2):
        with LLM(str(base), max_model_len=64, disk_cache_dir=str(tmp_path / "disk")) as llm:
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            (output,) = llm.generate(
                [{"prompt_token_ids": [5, 6, 7]}], params, lora_request=LoRARequest("d", 1, str(path))
            )
            said.append(output.outputs[0].token_ids)
            num_computed.append(len(computed))
            disk = llm.engine.adapters._residency.tiers.disk
            assert disk is not None
            end_s = time.monotonic() + 30
            while disk.stats().num_files == 0 and time.monotonic() < end_s:
                time.sleep(0.01)
            assert disk.stats().num_files == 1
    assert num_computed == [len(set(computed))] * 2
    assert num_computed[0] > 0
    assert said[0] == said[1]
