"""What `loraplex adapter inspect` says of bytes against those of a load, for each kind of adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.inspect import inspect_adapter
from loraplex.adapters.weights import CheckedReader
from loraplex.config import LoRAConfig
from loraplex.core import LoraTarget
from loraplex.kernels.ops import get_backend
from loraplex.memory.weights.packing import Packer
from loraplex.memory.weights.weighing import weigher_of
from tests.adapters.peft_oracle import all_targets_of
from tests.adapters.test_kind_files import CONFIGS, Saved, saved, saved_kinds
from tests.fixtures import OWN_OPTIONS, ModelZoo
from tests.memory.rig import FakeBase

__all__ = ["saved", "saved_kinds"]  # fixtures

FP32 = torch.float32
BACKEND = get_backend("auto", torch.device("cpu"))
LINES = {
    "dora": ("A of linears of 6", "B of linears of 6", "gains of DoRA, made at a load"),
    "ia3": ("gains of outputs of 3", "gains of inputs of 3"),
    "adalora": ("A of linears of 6 modules", "B of linears of 6 modules"),
    "loha": ("A of linears of 6 modules", "B of linears of 6 modules", "before alignment"),
    "lokr": ("A of linears of 6 modules", "B of linears of 6 modules", "before alignment"),
    "vera": ("lambdas of 6 modules", "projections, kept once", "are kept once", "kind: VERA, served as it is"),
}


def loaded_nbytes(path: Path, targets: tuple[LoraTarget, ...], base: FakeBase) -> int:
    """Of what is really packed."""
    model = CheckedReader(targets, LoRAConfig(), None, keeps_projections=BACKEND.shares_projections).read(
        path, PEFTHelper.from_local_dir(path)
    )
    packer = Packer(targets, BACKEND, FP32, base)
    layout = packer.lay_out(model)
    packer.write(model, layout, [torch.empty(size, dtype=torch.uint8) for size in layout.sizes])
    return layout.nbytes


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_and_steps_of_each_kind(name: str, saved: Saved) -> None:
    path = saved.copy(name)
    base = FakeBase(
        {}, {s.module_name: torch.ones(s.out_features, t.in_features) for t in saved.targets for s in t.slices}
    )
    report = inspect_adapter(path, saved.targets, weigher=weigher_of(saved.targets, BACKEND, FP32))
    packed, nbytes = report.packed, loaded_nbytes(path, saved.targets, base)
    assert packed is not None
    assert (packed.nbytes, packed.is_most) == (nbytes, False)
    assert sum(part.nbytes for part in packed.parts) == nbytes
    text = report.describe()
    assert f"in memory: {nbytes} bytes in all on a CPU" in text
    for line in LINES[name]:
        assert line in text
    if name == "vera":
        assert "served as a LoRA" not in text


@pytest.mark.parametrize("name", OWN_OPTIONS)
def test_bytes_of_what_an_adapter_has_of_its_own(name: str, zoo: ModelZoo) -> None:
    folder = zoo.base("qwen2", options={"tie_word_embeddings": True})
    model = zoo.oracle(folder).model
    targets, path = all_targets_of(model), zoo.own_adapter(folder, name)
    named = dict(model.named_modules())
    weights = {
        name: module.weight.detach() for name, module in named.items() if getattr(module, "weight", None) is not None
    }
    biases = {name: module.bias.detach() for name, module in named.items() if getattr(module, "bias", None) is not None}
    report = inspect_adapter(path, targets, weigher=weigher_of(targets, BACKEND, FP32))
    assert report.reasons == ()
    packed, nbytes = report.packed, loaded_nbytes(path, targets, FakeBase(biases, weights))
    assert packed is not None
    assert sum(part.nbytes for part in packed.parts) == packed.nbytes
    if packed.is_most:
        assert packed.nbytes >= nbytes
        assert any(part.is_most for part in packed.parts)
        assert f"in memory: at most {packed.nbytes} bytes in all" in report.describe()
    else:
        assert packed.nbytes == nbytes


def test_slices_that_have_their_a_in_one_place_each_count(zoo: ModelZoo) -> None:
    import peft

    folder = zoo.base("qwen2")
    targets = all_targets_of(zoo.oracle(folder).model)
    path = zoo.adapter(folder, peft.LoHaConfig(r=3, target_modules=["q_proj", "k_proj"]))
    text = inspect_adapter(path, targets, weigher=weigher_of(targets, BACKEND, FP32)).describe()
    assert "A of linears of 4 modules" in text
    assert f"a step reads all, and computes {4 * 9 * 64} products for a row" in text


def test_the_product_of_an_input_that_several_share_is_made_once_more(zoo: ModelZoo) -> None:
    import peft

    folder = zoo.base("qwen2")
    targets = all_targets_of(zoo.oracle(folder).model)
    config = peft.IA3Config(target_modules=["q_proj", "o_proj"], feedforward_modules=["q_proj", "o_proj"])
    report = inspect_adapter(zoo.adapter(folder, config), targets, weigher=weigher_of(targets, BACKEND, FP32))
    text = report.describe()
    num_products = 2 * (64 + 64 * 64)
    assert f"a step reads all, the base's weight once more, and computes {num_products} products for a row" in text
    assert "gains of inputs of 2 modules" in text
