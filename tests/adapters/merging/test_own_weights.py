"""Adapters that change more than linears of decoder layers are refused by name: nothing is left out in silence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from loraplex.adapters.merging.base import MergedAdapter
from loraplex.adapters.merging.export import export_directory
from loraplex.errors import AdapterValidationError
from tests.fixtures import OWN_OPTIONS, ModelZoo
from tests.models.paged_runner import load_decoder


@pytest.mark.parametrize("name", list(OWN_OPTIONS))
def test_what_no_merge_can_say_is_refused(zoo: ModelZoo, tmp_path: Path, name: str) -> None:
    base = zoo.base("llama")
    path = zoo.own_adapter(base, name)
    targets = load_decoder(base, enable_lora=True).lora_targets()
    with pytest.raises(AdapterValidationError, match="serve the adapter unmerged"):
        MergedAdapter.read(str(path), targets)
    with pytest.raises(AdapterValidationError, match="serve it as it is"):
        export_directory(str(path), tmp_path / "copy", 2**30)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("name", ["LoRA of the embedding", "LoRA of the head"])
def test_a_lora_of_an_end_alone_is_not_merged(zoo: ModelZoo, tmp_path: Path, name: str) -> None:
    """Saved without the base's weights, as with save_embedding_layers=False: a tied head has no weight to change."""
    base = zoo.base("llama")
    path = Path(shutil.copytree(zoo.own_adapter(base, name), tmp_path / "adapter"))
    file = path / "adapter_model.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if "lora_" in key}, file, {"format": "pt"})
    with pytest.raises(AdapterValidationError, match="only linears of decoder layers are merged"):
        MergedAdapter.read(str(path), load_decoder(base, enable_lora=True).lora_targets())
