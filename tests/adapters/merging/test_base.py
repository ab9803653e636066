"""An adapter merged into base weights, against peft's `merge_and_unload` in float32."""

from __future__ import annotations

import warnings
from pathlib import Path

import peft
import pytest
import torch

from loraplex.adapters.merging.base import MergedAdapter, fetched
from loraplex.errors import AdapterBaseMismatchError, AdapterContentChangedError, AdapterValidationError
from tests.adapters.peft_oracle import LINEARS, base_state, edit_config, make_adapter, new_base, save_kind, targets_of

TARGETS = {"target_modules": list(LINEARS)}
KINDS = {
    "lora": peft.LoraConfig(r=4, lora_alpha=6, rank_pattern={"down_proj": 2}, **TARGETS),
    "rslora": peft.LoraConfig(r=4, use_rslora=True, layers_to_transform=[1], **TARGETS),
    "dora": peft.LoraConfig(r=4, use_dora=True, **TARGETS),
    "lora_bias": peft.LoraConfig(r=2, lora_bias=True, **TARGETS),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": peft.LoHaConfig(r=2, alpha=3, **TARGETS),
    "lokr": peft.LoKrConfig(r=2, alpha=3, **TARGETS),
    "vera": peft.VeraConfig(r=4, **TARGETS),
    "adalora": peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, **TARGETS),
}


def merged_by_peft(path: Path, family: str) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(new_base(family), str(path))
        merged: dict[str, torch.Tensor] = model.merge_and_unload().state_dict()
    return merged


def check(path: Path, family: str) -> None:
    adapter = MergedAdapter.read(str(path), targets_of(new_base(family)))
    wanted, num_changed = merged_by_peft(path, family), 0
    for name, tensor in base_state(family).items():
        found = adapter.changed(name, tensor)
        torch.testing.assert_close(found, wanted[name], atol=1e-6, rtol=1e-5)
        num_changed += found is not tensor
        assert found is tensor or not torch.equal(found, tensor) or name.endswith("bias")
    assert num_changed >= len(adapter.layers)


@pytest.mark.parametrize("name", KINDS)
def test_weights_equal_pefts(tmp_path: Path, name: str) -> None:
    family = "llama_bias" if name in ("lora_bias", "ia3") else "qwen2"
    save_kind(tmp_path / "sql", KINDS[name], family=family)
    check(tmp_path / "sql", family)


def test_trained_biases_are_in_the_place_of_the_bases(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "sql", "qwen2", bias="all", r=2)
    merged = MergedAdapter.read(str(adapter.path), adapter.targets)
    name = "model.layers.1.self_attn.k_proj"
    trained = adapter.model.state_dict()[f"base_model.model.{name}.bias"]
    assert torch.equal(merged.changed(f"{name}.bias", base_state("qwen2")[f"{name}.bias"]), trained)


def test_bfloat16_weights_are_rounded_once(tmp_path: Path) -> None:
    save_kind(tmp_path / "sql", KINDS["lora"], dtype=torch.bfloat16)
    adapter = MergedAdapter.read(str(tmp_path / "sql"), targets_of(new_base("llama")))
    name = "model.layers.0.mlp.up_proj"
    weight, layer = base_state("llama")[f"{name}.weight"].bfloat16(), adapter.layers[name]
    assert layer.lora_a is not None
    assert layer.lora_b is not None
    exact = weight.double() + layer.scaling * layer.lora_b.double() @ layer.lora_a.double()
    merged = adapter.changed(f"{name}.weight", weight)
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged.double(), exact, atol=1e-6, rtol=1e-6)


def test_what_the_weights_cannot_express_is_refused_by_name(tmp_path: Path) -> None:
    save_kind(tmp_path / "sql", KINDS["lora_bias"])
    with pytest.raises(AdapterValidationError, match="lora_bias has no bias of the base"):
        MergedAdapter.read(str(tmp_path / "sql"), targets_of(new_base("llama")))


def test_an_alora_is_not_merged(tmp_path: Path) -> None:
    save_kind(tmp_path / "sql", KINDS["lora"])
    edit_config(tmp_path / "sql", alora_invocation_tokens=[3, 4])
    with pytest.raises(AdapterValidationError, match="alora_invocation_tokens: an aLoRA does not act on all rows"):
        MergedAdapter.read(str(tmp_path / "sql"), targets_of(new_base("llama")))


def test_a_longer_context_is_refused_by_name(tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "sql").path
    edit_config(path, context_length=256)
    with pytest.raises(
        AdapterValidationError, match="context_length: a longer context is not merged into base weights"
    ):
        MergedAdapter.read(str(path), targets_of(new_base("llama")))


def test_weights_beyond_their_dtype_are_refused(tmp_path: Path) -> None:
    save_kind(tmp_path / "sql", KINDS["lora"])
    edit_config(tmp_path / "sql", lora_alpha=1e7)
    adapter = MergedAdapter.read(str(tmp_path / "sql"), targets_of(new_base("llama")))
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(AdapterValidationError, match=r"up_proj\.weight: merged, it does not fit in torch\.float16"):
        adapter.changed(name, base_state("llama")[name].half())


def test_an_adapter_of_another_base_and_one_that_changed_are_refused(tmp_path: Path) -> None:
    make_adapter(tmp_path / "sql", r=2)
    directory, digest = fetched(str(tmp_path / "sql"))
    targets = targets_of(new_base("llama"))
    assert MergedAdapter.read(directory, targets, digest).digest == digest
    with pytest.raises(AdapterBaseMismatchError):
        MergedAdapter.read(directory, targets[: len(targets) // 3])
    edit_config(tmp_path / "sql", lora_alpha=77)
    with pytest.raises(AdapterContentChangedError, match="start it again"):
        MergedAdapter.read(directory, targets, digest)
