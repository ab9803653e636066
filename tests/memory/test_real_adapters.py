"""The whole way of real files: PEFT directory, LoRAModel, packed blocks, slot table, kernel."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.source_reader import read_adapter, read_spec
from loraplex.adapters.weights import CheckedReader, LoRAModel
from loraplex.compat.vllm import WorkerLoRAManager
from loraplex.config import LoRAConfig
from loraplex.core import AdapterSpec
from loraplex.errors import AdapterContentChangedError, AdapterUnavailableError
from loraplex.kernels.ops import KernelBackend, get_backend
from loraplex.kernels.plan import LoraPlan, LoraSegment
from loraplex.memory.manager import LoRAModelManager
from loraplex.memory.space.arena import Arena
from tests.memory.rig import BASE, CPU, TARGETS, expected_delta

CONFIG = LoRAConfig(adapter_memory_bytes=1 << 18, host_memory_bytes=1 << 19)
SOURCE = AdapterSource()
READER = CheckedReader(TARGETS, CONFIG)


def write_adapter(path: Path, rank: int, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """A PEFT directory with all modules of TARGETS."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for target in TARGETS:
        for s in target.slices:
            prefix = f"base_model.model.{s.module_name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, target.in_features, generator=generator).to(dtype)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(s.out_features, rank, generator=generator).to(dtype)
    modules = sorted({s.module_name.rsplit(".", 1)[-1] for t in TARGETS for s in t.slices})
    path.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": modules, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def spec_of(adapter_id: int, path: Path) -> AdapterSpec:
    model = read_adapter(str(path), f"a{adapter_id}", SOURCE, READER)
    return AdapterSpec(adapter_id, f"a{adapter_id}", 1, model.adapter_digest, str(path), model.nbytes, model.rank)


@dataclass
class Served:
    """A manager with its backend."""

    manager: LoRAModelManager
    backend: KernelBackend

    def acquire(self, adapter_id: int) -> int:
        while True:
            self.manager.poll()
            result = self.manager.try_acquire(adapter_id)
            if result.lora_slot is not None:
                return result.lora_slot
            self.manager.wait_for_change(1.0)

    def check(self, slots: dict[int, LoRAModel]) -> None:
        """One mixed batch over all adapters and base rows, against the deltas by the formula."""
        segments = [
            LoraSegment(3 * i, 3 * i + 2, slot) for i, slot in enumerate(slots)
        ]  # every third row is the base's
        table = self.manager.table
        for target in TARGETS:
            x = torch.randn(3 * len(slots), target.in_features, generator=torch.Generator().manual_seed(5))
            y = torch.zeros(len(x), sum(s.out_features for s in target.slices))
            plan = LoraPlan.build(segments, len(x), 16)
            self.backend.add_lora(y, x, plan, table, table.first_row(target.name), target.slices)
            expected = torch.zeros_like(y, dtype=torch.float64)
            for segment, model in zip(segments, slots.values(), strict=True):
                rows = slice(segment.start, segment.end)
                expected[rows] = expected_delta(model, target, x[rows])
            torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(params=["torch", "reference"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    backend = get_backend(request.param, CPU)
    arena = Arena(CONFIG.host_memory_bytes, 4096, CPU)
    open_weights = partial(read_spec, source=SOURCE, reader=READER)
    manager = LoRAModelManager(CONFIG, TARGETS, backend, torch.float32, arena, open_weights, BASE)
    yield Served(manager, backend)
    manager.close()


def test_a_mixed_batch_of_real_adapters_of_all_dtypes(served: Served, tmp_path: Path) -> None:
    kinds = [(8, torch.float32), (64, torch.bfloat16), (1, torch.float16), (5, torch.bfloat16)]
    slots = {}
    for adapter_id, (rank, dtype) in enumerate(kinds, 1):
        path = write_adapter(tmp_path / str(adapter_id), rank, adapter_id, dtype)
        spec = spec_of(adapter_id, path)
        assert served.manager.add_adapter(spec).is_new
        slots[served.acquire(adapter_id)] = read_spec(spec, SOURCE, READER)
    assert sorted(slots) == [0, 1, 2, 3]
    served.check(slots)
    served.manager.check_integrity()


def test_a_directory_that_vanished_matters_only_when_the_last_copy_is_gone(served: Served, tmp_path: Path) -> None:
    spec = spec_of(1, write_adapter(tmp_path / "a", 8, 1))
    model = read_spec(spec, SOURCE, READER)
    served.manager.add_adapter(spec)
    shutil.rmtree(tmp_path / "a")
    served.check({served.acquire(1): model})
    served.manager.release(1)
    served.manager.evict_adapter(1)
    served.check({served.acquire(1): model})
    served.manager.release(1)
    served.manager.evict_adapter(1)
    served.manager.evict_adapter(1)
    with pytest.raises(AdapterUnavailableError, match="'a1': no copy of it is in memory"):
        served.acquire(1)
    served.manager.check_integrity()


def test_files_that_changed_are_noticed_and_the_old_content_is_taken_back(served: Served, tmp_path: Path) -> None:
    spec = spec_of(1, write_adapter(tmp_path / "a", 8, 1))
    model = read_spec(spec, SOURCE, READER)
    served.manager.add_adapter(spec)
    served.manager.evict_adapter(1)
    write_adapter(tmp_path / "a", 8, 2)
    with pytest.raises(AdapterContentChangedError, match="reload it"):
        served.acquire(1)
    with pytest.raises(AdapterContentChangedError):
        served.manager.promote_adapter(1)
    write_adapter(tmp_path / "a", 8, 1)
    served.manager.poll()
    served.check({served.acquire(1): model})


def test_vllms_way_of_adding_a_model(served: Served, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", 8, 1)
    helper = PEFTHelper.from_local_dir(str(path))
    model = LoRAModel.from_local_checkpoint(path, helper, TARGETS, CONFIG).clone(3)
    assert served.manager.add_adapter(model).is_new
    assert served.manager.activate_adapter(3)
    assert WorkerLoRAManager(served.manager).lora_index_to_id[0] == 3
    served.check({0: model})
