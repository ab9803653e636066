"""LoRAModel against peft: the same deltas and outputs, from every kind of file; its verbs; its digest."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.tensors import ALIGNMENT
from loraplex.compat.deltas import compute_delta_weight
from loraplex.config import LoRAConfig
from loraplex.errors import (
    AdapterValidationError,
)
from tests.adapters.peft_oracle import (
    LINEARS,
    PeftAdapter,
    edit_config,
    header_nbytes,
    load,
    make_adapter,
    new_base,
    read_tensors,
    refused,
    shard,
    to_bin,
    write_tensors,
)

# ----------------------------------------------------------------------------------------------------- parity with peft

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
GRID: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": "all-linear", "r": 3},
    {"target_modules": ATTENTION, "r": 5, "lora_alpha": 12, "use_rslora": True},
    {"target_modules": ATTENTION, "rank_pattern": {r"layers\.1\..*": 3, "q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    {"target_modules": list(LINEARS), "layers_to_transform": [0, 2], "exclude_modules": ["up_proj"]},
    {"target_modules": r".*layers\.(0|1)\..*(gate|down)_proj", "fan_in_fan_out": True},
    {"target_modules": ATTENTION, "lora_bias": True, "r": 4},
    {"target_modules": ["q_proj", "v_proj"], "bias": "all"},
    {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only", "lora_bias": True},
]


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.float32), ("qwen2", torch.bfloat16), ("llama_bias", torch.float16)], ids=str
)
@pytest.mark.parametrize("fields", GRID, ids=str)
def test_every_layer_is_what_peft_makes_of_it(
    family: str, fields: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    made = make_adapter(tmp_path / "a", family, dtype, **fields)
    model = load(made.path, made.targets)
    assert {layer.module_name for layer in model if layer.lora_a is not None} == made.layers.keys()
    for name, layer in made.layers.items():
        ours = model.get_lora(name)
        assert ours is not None
        assert (ours.rank, ours.lora_alpha, ours.scaling) == made.facts[name]
        assert torch.equal(compute_delta_weight(ours), layer.get_delta_weight("default")), name
        assert torch.equal(ours.lora_a, layer.lora_A["default"].weight)
        assert (ours.lora_bias is not None) == fields.get("lora_bias", False)
    assert model.rank == max(rank for rank, _, _ in made.facts.values())
    assert model.nbytes == header_nbytes(made.path)


@pytest.mark.parametrize("family", ["llama", "qwen2", "llama_bias"])
@pytest.mark.parametrize("fields", GRID, ids=str)
def test_every_linear_of_the_model_answers_as_with_peft(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """y = x W^T + (the adapter's bias, else the base's) + scaling * (x A^T B^T + lora_bias), for every linear."""
    made = make_adapter(tmp_path / "a", family, **fields)
    model, base = load(made.path, made.targets), new_base(family)
    assert (family == "llama" or fields.get("bias", "none") == "none") or any(layer.bias is not None for layer in model)
    for target in made.targets:
        x = torch.randn(5, target.in_features)
        for part in target.slices:
            linear, ours = base.get_submodule(part.module_name), model.get_lora(part.module_name)
            bias = linear.bias if ours is None or ours.bias is None else ours.bias
            y = torch.nn.functional.linear(x, linear.weight, bias)
            if ours is not None and ours.lora_a is not None:
                y = y + ours.scaling * (
                    x @ ours.lora_a.T @ ours.lora_b.T + (0 if ours.lora_bias is None else ours.lora_bias)
                )
            expected = made.model.get_submodule(f"base_model.model.{part.module_name}")(x)
            assert torch.allclose(y, expected, atol=1e-4), part.module_name


def test_a_bias_that_is_replaced_where_there_is_no_lora(tmp_path: Path) -> None:
    made = make_adapter(tmp_path / "a", "qwen2", target_modules=["q_proj"], bias="all")
    model = load(made.path, made.targets)
    only_bias = model.get_lora("model.layers.0.self_attn.k_proj")
    assert only_bias is not None
    assert (only_bias.rank, only_bias.lora_a, only_bias.lora_b) == (0, None, None)
    assert only_bias.bias is not None
    assert not torch.equal(only_bias.bias, new_base("qwen2").get_submodule("model.layers.0.self_attn.k_proj").bias)
    with pytest.raises(ValueError, match="only replaces the bias"):
        compute_delta_weight(only_bias)


def test_keys_that_saving_reorders_are_named(tmp_path: Path) -> None:
    """peft takes the first key in the order of the file, and sorts the keys when it saves: a trap of peft itself."""
    pattern = {"q_proj": 3, r"layers\.1\..*": 9}
    made = make_adapter(tmp_path / "a", alpha_pattern=pattern)
    model = load(made.path, made.targets)
    assert any(
        "alpha_pattern: several keys name 'model.layers.1.self_attn.q_proj'" in warning for warning in model.warnings
    )
    assert model.get_lora("model.layers.1.self_attn.q_proj").lora_alpha == 9, "what peft makes of the file, too"
    made = make_adapter(tmp_path / "sql", rank_pattern=pattern)
    assert "has shape [3, 32], expected [9, 32]" in refused(made)[0]


# ------------------------------------------------------------------------------------------------------------ the nouns


def test_the_verbs_of_a_model(saved: PeftAdapter) -> None:
    model = load(saved.path, saved.targets)
    name = "model.layers.1.self_attn.q_proj"
    assert model.check_lora_name(name)
    assert not model.check_lora_name("model.layers.1.self_attn.k_proj")
    assert model.get_lora("nowhere") is None
    twin = model.clone(7)
    assert (twin.id, twin.adapter_id, model.id) == (7, 7, 0)
    assert twin.get_lora(name).lora_a.data_ptr() == model.get_lora(name).lora_a.data_ptr()
    assert twin.adapter_digest == model.adapter_digest
    assert len(list(model)) == 9
    assert model.nbytes == sum(tensor.nbytes for tensor in read_tensors(saved.path).values())


def test_loaded_tensors_are_contiguous_aligned_and_their_own(adapter: PeftAdapter) -> None:
    model = load(adapter.path, adapter.targets)
    before = {layer.module_name: compute_delta_weight(layer) for layer in model}
    for layer in model:
        for tensor in layer.tensors.values():
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % ALIGNMENT == 0
    with (adapter.path / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(100)  # with a mapped file this would kill the process
    for layer in model:
        assert torch.equal(compute_delta_weight(layer), before[layer.module_name])


@pytest.mark.parametrize("lora_dtype", ["float16", "bfloat16", "float32"])
def test_lora_dtype_converts_and_keeps_the_digest(saved: PeftAdapter, lora_dtype: str) -> None:
    plain = load(saved.path, saved.targets)
    model = load(saved.path, saved.targets, LoRAConfig(lora_dtype=lora_dtype))
    assert {tensor.dtype for layer in model for tensor in layer.tensors.values()} == {getattr(torch, lora_dtype)}
    assert model.adapter_digest == plain.adapter_digest


def test_a_value_that_does_not_fit_in_lora_dtype_is_refused(adapter: PeftAdapter) -> None:
    tensors = read_tensors(adapter.path)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    tensors[name][0, 0] = 1e6
    write_tensors(adapter.path, tensors)
    load(adapter.path, adapter.targets, LoRAConfig(lora_dtype="bfloat16"))
    with pytest.raises(AdapterValidationError, match=r"q_proj: lora_b does not fit in lora_dtype='float16'"):
        load(adapter.path, adapter.targets, LoRAConfig(lora_dtype="float16"))


# ------------------------------------------------------------------------------------------------------ names and files

Rename = Callable[[str], str]


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("base_model.model."),
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: name.removeprefix("base_model.model.").replace(".weight", ".default.weight"),
    ],
    ids=["without prefix", "with default", "both"],
)
def test_names_with_and_without_prefix_and_default_are_one_adapter(adapter: PeftAdapter, rename: Rename) -> None:
    plain = load(adapter.path, adapter.targets)
    write_tensors(adapter.path, {rename(name): tensor for name, tensor in read_tensors(adapter.path).items()})
    model = load(adapter.path, adapter.targets)
    assert model.adapter_digest == plain.adapter_digest
    for layer in plain:
        same = model.layers[layer.module_name]
        assert torch.equal(compute_delta_weight(same), compute_delta_weight(layer))


def test_old_names_of_biases(tmp_path: Path) -> None:
    made = make_adapter(tmp_path / "a", "qwen2", target_modules=["q_proj"], bias="all", lora_bias=True)
    plain = load(made.path, made.targets)
    tensors = read_tensors(made.path)
    assert any(name.endswith("q_proj.base_layer.bias") for name in tensors)
    renamed = {
        name.replace(".base_layer", "").replace("lora_B.bias", "lora_B.default.bias"): t for name, t in tensors.items()
    }
    write_tensors(made.path, renamed)
    assert load(made.path, made.targets).adapter_digest == plain.adapter_digest


def test_shards_and_bin_are_the_same_adapter(adapter: PeftAdapter, tmp_path: Path) -> None:
    plain = load(adapter.path, adapter.targets)
    for name, convert in (("shards", lambda path: shard(path, 3)), ("bin", to_bin)):
        shutil.copytree(adapter.path, tmp_path / name)
        convert(tmp_path / name)
        model = load(tmp_path / name, adapter.targets)
        assert model.adapter_digest == plain.adapter_digest
        assert model.nbytes == plain.nbytes == header_nbytes(tmp_path / name)


def test_safetensors_comes_before_bin(adapter: PeftAdapter) -> None:
    alone = load(adapter.path, adapter.targets)
    (adapter.path / "adapter_model.bin").write_bytes(b"rubbish")
    assert load(adapter.path, adapter.targets).adapter_digest == alone.adapter_digest


# --------------------------------------------------------------------------------------------------------------- digest


def test_the_digest_is_of_content_and_mathematics(saved: PeftAdapter, adapter: PeftAdapter) -> None:
    digest = load(saved.path, saved.targets).adapter_digest
    assert len(digest) == 64
    for change in (
        {"peft_version": "9"},
        {"base_model_name_or_path": "x"},
        {"lora_dropout": 0.5},
        {"inference_mode": False},
    ):
        edit_config(adapter.path, **change)
        assert load(adapter.path, adapter.targets).adapter_digest == digest
    edit_config(adapter.path, lora_alpha=7)
    assert load(adapter.path, adapter.targets).adapter_digest != digest
    edit_config(adapter.path, lora_alpha=6)
    tensors = read_tensors(adapter.path)
    name = sorted(tensors)[0]
    tensors[name][0, 0] = torch.nextafter(tensors[name][0, 0], torch.tensor(9.0))
    write_tensors(adapter.path, tensors)
    assert load(adapter.path, adapter.targets).adapter_digest != digest


def test_the_digest_is_what_the_documentation_says(saved: PeftAdapter) -> None:
    def sized(data: bytes) -> bytes:
        return len(data).to_bytes(8, "little") + data

    content = b"loraplex-adapter-1" + sized(PEFTHelper.from_local_dir(saved.path).canonical())
    for name, tensor in sorted(
        (name.removeprefix("base_model.model."), t) for name, t in read_tensors(saved.path).items()
    ):
        line = json.dumps([name, "F32", list(tensor.shape)], separators=(",", ":"))
        content += sized(line.encode()) + tensor.numpy().tobytes()
    assert load(saved.path, saved.targets).adapter_digest == hashlib.blake2b(content, digest_size=32).hexdigest()


def test_the_digest_is_stable_over_releases(adapter: PeftAdapter) -> None:
    """Digests are written to disk (registry, caches): another definition needs a new tag and a changelog."""
    tensors = read_tensors(adapter.path)
    write_tensors(adapter.path, {name: torch.full_like(tensor, 0.5) for name, tensor in tensors.items()})
    assert load(adapter.path, adapter.targets).adapter_digest == DIGEST_OF_HALVES


DIGEST_OF_HALVES = "88260b2234e97c1a605f9dbbda9041983ed51d372d07dc5a809caac15a36fa94"
