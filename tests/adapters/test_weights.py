"""LoRAModel against peft: the same deltas and outputs, or a refusal that says why."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.tensors import ALIGNMENT
from loraplex.adapters.weights import DeltaCache, LoRALayerWeights, LoRAModel, header_nbytes
from loraplex.config import LoRAConfig
from loraplex.core import LoraTarget
from loraplex.errors import (
    AdapterBaseMismatchError,
    AdapterError,
    AdapterFileFormatError,
    AdapterPathNotFoundError,
    AdapterPermissionError,
    AdapterTooLargeError,
    AdapterTruncatedError,
    AdapterValidationError,
    AdapterWeightsMissingError,
)
from tests.adapters.peft_oracle import (
    LINEARS,
    PeftAdapter,
    edit_config,
    make_adapter,
    new_base,
    read_config,
    read_tensors,
    targets_of,
    write_tensors,
)

LIMITS = LoRAConfig()
ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


def load(path: Path, targets: tuple[LoraTarget, ...], lora_config: LoRAConfig = LIMITS) -> LoRAModel:
    return LoRAModel.from_local_checkpoint(path, PEFTHelper.from_local_dir(path), targets, lora_config)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> PeftAdapter:
    return make_adapter(tmp_path_factory.mktemp("saved") / "sql", target_modules=["q_proj", "v_proj", "down_proj"], r=4, lora_alpha=6)


@pytest.fixture
def adapter(saved: PeftAdapter, tmp_path: Path) -> PeftAdapter:
    """A copy that a test may damage."""
    shutil.copytree(saved.path, tmp_path / "sql")
    return PeftAdapter(tmp_path / "sql", saved.targets, saved.layers, saved.model)


# ------------------------------------------------------------------------------------------------------ parity with peft

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
GRID: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": "all-linear", "r": 3},
    {"target_modules": ATTENTION, "r": 5, "lora_alpha": 12, "use_rslora": True},
    {"target_modules": ATTENTION, "rank_pattern": {"q_proj": 2, r"layers\.1\..*": 3}, "alpha_pattern": {"v_proj": 3}},
    {"target_modules": list(LINEARS), "layers_to_transform": [0, 2], "exclude_modules": ["up_proj"]},
    {"target_modules": r".*layers\.(0|1)\..*(gate|down)_proj", "fan_in_fan_out": True},
    {"target_modules": ATTENTION, "lora_bias": True, "r": 4},
    {"target_modules": ["q_proj", "v_proj"], "bias": "all"},
    {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only", "lora_bias": True},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "llama_bias"])
@pytest.mark.parametrize("fields", GRID, ids=str)
def test_every_layer_is_what_peft_makes_of_it(family: str, fields: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    made = make_adapter(tmp_path / "a", family, dtype, **fields)
    model = load(made.path, made.targets)
    assert {layer.module_name for layer in model if layer.lora_a is not None} == made.layers.keys()
    for name, layer in made.layers.items():
        ours = model.get_lora(name)
        assert ours is not None
        assert (ours.rank, ours.lora_alpha, ours.scaling) == made.facts[name]
        assert torch.equal(model.compute_delta_weight(name), layer.get_delta_weight("default")), name
        assert torch.equal(ours.lora_a, layer.lora_A["default"].weight)
        assert (ours.lora_bias is not None) == fields.get("lora_bias", False)
    assert model.rank == max(rank for rank, _, _ in made.facts.values())
    assert model.nbytes == header_nbytes(made.path)


@pytest.mark.parametrize("family", ["llama", "qwen2", "llama_bias"])
@pytest.mark.parametrize("fields", GRID, ids=str)
def test_every_linear_of_the_model_answers_as_with_peft(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """y = x W^T + (the adapter's bias, else the base's) + scaling * (x A^T B^T + lora_bias), for targets and all other linears."""
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
                y = y + ours.scaling * (x @ ours.lora_a.T @ ours.lora_b.T + (0 if ours.lora_bias is None else ours.lora_bias))
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
        only_bias.compute_delta_weight()


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
    before = {layer.module_name: layer.compute_delta_weight() for layer in model}
    for layer in model:
        for tensor in layer.tensors.values():
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % ALIGNMENT == 0
    with (adapter.path / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(100)  # with a mapped file this would kill the process
    for layer in model:
        assert torch.equal(layer.compute_delta_weight(), before[layer.module_name])


def test_optimize_packs_and_keeps_scaling_apart() -> None:
    a, b, bias = torch.randn(8, 3).T, torch.randn(6, 5)[:, :3], torch.randn(6)
    layer = LoRALayerWeights("m", 3, 6, a, b, lora_bias=bias, scaling=2.0)
    packed = layer.optimize()
    assert not a.is_contiguous()
    for field, tensor in packed.tensors.items():
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGNMENT == 0
        assert torch.equal(tensor, layer.tensors[field])
    assert (packed.scaling, packed.bias) == (2.0, None)
    starts = sorted(tensor.data_ptr() for tensor in packed.tensors.values())
    assert starts[-1] - starts[0] < 512, "one block"
    assert torch.allclose(packed.compute_delta_weight(), 2.0 * b @ a)
    model = LoRAModel("d", 3, {"m": layer}).optimize()
    assert model.get_lora("m").lora_a.is_contiguous()


def test_deltas_are_cached_only_within_the_budget(saved: PeftAdapter) -> None:
    model = load(saved.path, saved.targets)
    first, second, wide = (model.get_lora(f"model.layers.{m}") for m in ("0.self_attn.q_proj", "1.self_attn.q_proj", "0.mlp.down_proj"))
    cache = DeltaCache(2 * 32 * 32 * 4)
    delta = first.compute_delta_weight(cache)
    assert first.compute_delta_weight(cache) is delta
    kept = second.compute_delta_weight(cache)
    assert cache.nbytes == cache.max_bytes
    wide.compute_delta_weight(cache)
    assert cache.nbytes <= cache.max_bytes
    assert second.compute_delta_weight(cache) is not kept or first.compute_delta_weight(cache) is not delta
    cache.clear()
    assert cache.nbytes == 0
    assert first.compute_delta_weight(cache) is not delta
    small = DeltaCache(100)
    first.compute_delta_weight(small)
    assert small.nbytes == 0


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


# ------------------------------------------------------------------------------------------------------- names and files

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
        assert torch.equal(model.compute_delta_weight(layer.module_name), layer.compute_delta_weight())


def test_old_names_of_biases(tmp_path: Path) -> None:
    made = make_adapter(tmp_path / "a", "qwen2", target_modules=["q_proj"], bias="all", lora_bias=True)
    plain = load(made.path, made.targets)
    tensors = read_tensors(made.path)
    assert any(name.endswith("q_proj.base_layer.bias") for name in tensors)
    renamed = {name.replace(".base_layer", "").replace("lora_B.bias", "lora_B.default.bias"): t for name, t in tensors.items()}
    write_tensors(made.path, renamed)
    assert load(made.path, made.targets).adapter_digest == plain.adapter_digest


def shard(path: Path, parts: int) -> None:
    tensors = read_tensors(path)
    weight_map = {}
    for index in range(parts):
        names = sorted(tensors)[index::parts]
        file = f"adapter_model-{index + 1:05}-of-{parts:05}.safetensors"
        save_file({name: tensors[name] for name in names}, path / file)
        weight_map.update(dict.fromkeys(names, file))
    (path / "adapter_model.safetensors").unlink()
    (path / "adapter_model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def to_bin(path: Path, change: Callable[[dict[str, Any]], Any] = lambda tensors: tensors) -> None:
    torch.save(change(read_tensors(path)), path / "adapter_model.bin")
    (path / "adapter_model.safetensors").unlink()


def test_shards_and_bin_are_the_same_adapter(adapter: PeftAdapter, tmp_path: Path) -> None:
    plain = load(adapter.path, adapter.targets)
    for name, convert in (("shards", lambda path: shard(path, 3)), ("bin", to_bin)):
        shutil.copytree(adapter.path, tmp_path / name)
        convert(tmp_path / name)
        model = load(tmp_path / name, adapter.targets)
        assert model.adapter_digest == plain.adapter_digest
        assert model.nbytes == plain.nbytes == header_nbytes(tmp_path / name)


def test_safetensors_comes_before_bin(adapter: PeftAdapter) -> None:
    (adapter.path / "adapter_model.bin").write_bytes(b"rubbish")
    load(adapter.path, adapter.targets)


# -------------------------------------------------------------------------------------------------------------- digest


def test_the_digest_is_of_content_and_mathematics(saved: PeftAdapter, adapter: PeftAdapter) -> None:
    digest = load(saved.path, saved.targets).adapter_digest
    assert len(digest) == 64
    for change in ({"peft_version": "9"}, {"base_model_name_or_path": "x"}, {"lora_dropout": 0.5}, {"inference_mode": False}):
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


def test_the_digest_is_stable_over_releases(adapter: PeftAdapter) -> None:
    """Digests are written to disk (registry, caches): changing the definition needs a new tag and a line in the changelog."""
    tensors = read_tensors(adapter.path)
    write_tensors(adapter.path, {name: torch.full_like(tensor, 0.5) for name, tensor in tensors.items()})
    assert load(adapter.path, adapter.targets).adapter_digest == DIGEST_OF_HALVES


DIGEST_OF_HALVES = "unset"


# ------------------------------------------------------------------------------------------------------------- refusals

Q = "base_model.model.model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


def refused(adapter: PeftAdapter, lora_config: LoRAConfig = LIMITS) -> tuple[str, ...]:
    with pytest.raises(AdapterValidationError) as caught:
        load(adapter.path, adapter.targets, lora_config)
    assert "'sql'" in caught.value.message
    return caught.value.reasons


def drop(*names: str) -> Callable[[Tensors], None]:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def put(name: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop(f"{Q}.lora_B.weight"), ["layers.0.self_attn.q_proj: the file has no lora_B.weight"]),
        (drop(f"{Q}.lora_A.weight"), ["layers.0.self_attn.q_proj: the file has no lora_A.weight"]),
        (drop(f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"), ["layers.0.self_attn.q_proj", "no tensors for it"]),
        (put(f"{Q}.lora_A.weight", torch.ones(5, 32)), ["[5, 32]", "[4, 32]"]),
        (put(f"{Q}.lora_A.weight", torch.ones(32, 4)), ["[32, 4]", "[4, 32]"]),
        (put(f"{Q}.lora_A.weight", torch.ones(4)), ["[4]", "[4, 32]"]),
        (put(f"{Q}.lora_A.weight", torch.ones(0)), ["[0]", "gathered"]),
        (put(f"{Q}.lora_B.weight", torch.ones(32, 0)), ["[32, 0]", "gathered"]),
        (put(f"{Q}.lora_A.weight", torch.full((4, 32), float("nan"))), [f"{Q}.lora_A.weight", "NaN"]),
        (put(f"{Q}.lora_B.weight", torch.full((32, 4), float("inf"))), [f"{Q}.lora_B.weight", "Inf"]),
        (put(f"{Q}.lora_B.weight", torch.full((32, 4), -float("inf")).half()), [f"{Q}.lora_B.weight", "Inf"]),
        (put(f"{Q}.lora_B.weight", torch.full((32, 4), float("nan")).bfloat16()), [f"{Q}.lora_B.weight", "NaN"]),
        (put(f"{Q}.lora_A.weight", torch.ones(4, 32).double()), ["dtype F64", "F32, F16, BF16"]),
        (put(f"{Q}.lora_A.weight", torch.ones(4, 32).to(torch.float8_e4m3fn)), ["float8 dtype F8_E4M3"]),
        (put(f"{Q}.lora_A.weight", torch.ones(4, 32, dtype=torch.int8)), ["dtype I8"]),
        (put(Q.replace("q_proj", "k_proj.lora_A.weight"), torch.ones(4, 32)), ["k_proj", "does not name"]),
        (put(Q.replace("q_proj", "x_proj.lora_A.weight"), torch.ones(4, 32)), ["x_proj", "no linear"]),
        (put("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 64)), ["embed_tokens", "embeddings"]),
        (put("base_model.model.model.embed_tokens.weight", torch.ones(64, 32)), ["embed_tokens", "save_embedding_layers"]),
        (put("base_model.model.lm_head.lora_A.weight", torch.ones(4, 32)), ["lm_head", "not supported yet"]),
        (put("base_model.model.lm_head.modules_to_save.weight", torch.ones(64, 32)), ["modules_to_save"]),
        (put(f"{Q}.lora_magnitude_vector", torch.ones(32)), ["DoRA"]),
        (put(f"{Q}.lora_velora_embed", torch.ones(32)), ["VeLoRA"]),
        (put(f"{Q}.lora_A.other.weight", torch.ones(4, 32)), ["lora_A.other.weight", "no part of a LoRA"]),
        (put(f"{Q}.lora_B.bias", torch.ones(32)), ["lora_B.bias", "lora_bias is not set"]),
        (put(f"{Q}.lora_A.bias", torch.ones(4)), ["lora_A.bias", "no part of a LoRA"]),
        (put(f"{Q}.base_layer.bias", torch.ones(32)), ["bias is 'none'"]),
        (put(f"{Q}.weight", torch.ones(32, 32)), ["no part of a LoRA"]),
        (put(f"{Q}.lora_A.default.weight", torch.ones(4, 32)), ["the same part"]),
        (put(Q.removeprefix("base_model.model.") + ".lora_A.weight", torch.ones(4, 32)), ["the same part"]),
        (lambda tensors: tensors.clear(), ["no tensors for it"]),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(adapter: PeftAdapter, change: Callable[[Tensors], None], words: list[str]) -> None:
    tensors = read_tensors(adapter.path)
    change(tensors)
    write_tensors(adapter.path, tensors)
    reasons = refused(adapter)
    assert any(all(word in reason for word in words) for reason in reasons), reasons


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"target_modules": ["nothing"]}, ["names no module of the base model"]),
        ({"target_modules": ["q_proj", "v_proj", "down_proj", "nothing"]}, ["'nothing' names no module"]),
        ({"target_modules": "nothing.*"}, ["names no module of the base model"]),
        ({"target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"]}, ["lm_head", "not supported yet"]),
        ({"target_modules": ["q_proj", "v_proj", "down_proj", "embed_tokens"]}, ["model.embed_tokens", "not supported yet"]),
        ({"target_modules": ["q_proj", "v_proj", "down_proj", "k_proj"]}, ["k_proj", "no tensors for it"]),
        ({"target_modules": ["q_proj"]}, ["v_proj", "does not name"]),
        ({"target_modules": "all-linear"}, ["o_proj", "no tensors for it"]),
        ({"layers_to_transform": [0, 1]}, ["layers.2.self_attn.q_proj", "does not name"]),
        ({"exclude_modules": ["down_proj"]}, ["down_proj", "does not name"]),
        ({"r": 8}, ["[4, 32]", "[8, 32]"]),
        ({"rank_pattern": {"down_proj": 2}}, ["down_proj", "[4, 48]", "[2, 48]"]),
        ({"lora_bias": True}, ["the file has no lora_B.bias"]),
    ],
)
def test_a_config_that_does_not_fit_the_file_is_refused(adapter: PeftAdapter, fields: dict[str, Any], words: list[str]) -> None:
    edit_config(adapter.path, **fields)
    reasons = refused(adapter)
    assert any(all(word in reason for word in words) for reason in reasons), reasons


def test_biases_must_be_there_and_have_a_place(tmp_path: Path) -> None:
    made = make_adapter(tmp_path / "sql", "qwen2", target_modules=["q_proj"], bias="all")
    tensors = read_tensors(made.path)
    k_bias = "base_model.model.model.layers.1.self_attn.k_proj.bias"
    write_tensors(made.path, {name: tensor for name, tensor in tensors.items() if name != k_bias})
    assert "layers.1.self_attn.k_proj: bias is 'all', but the file has no bias" in refused(made)[0]
    write_tensors(made.path, {**tensors, k_bias: torch.ones(15)})
    with pytest.raises(AdapterError, match=r"\[15\], expected \[16\]"):
        load(made.path, made.targets)
    write_tensors(made.path, {**tensors, "base_model.model.model.layers.1.self_attn.o_proj.bias": torch.ones(32)})
    assert "no linear 'model.layers.1.self_attn.o_proj' with a bias" in refused(made)[0]
    write_tensors(made.path, tensors)
    edit_config(made.path, bias="lora_only")
    assert any("bias is 'lora_only' and" in reason for reason in refused(made))
    assert "bias_enabled" in " ".join(refused(made, LoRAConfig(bias_enabled=False)))


def test_all_reasons_of_config_and_file_come_at_once(adapter: PeftAdapter) -> None:
    tensors = read_tensors(adapter.path)
    del tensors[f"{Q}.lora_B.weight"]
    tensors[f"{Q}.lora_A.weight"][0, 0] = float("nan")
    tensors["junk"] = torch.ones(1)
    write_tensors(adapter.path, tensors)
    edit_config(adapter.path, use_dora=True)
    reasons = "\n".join(refused(adapter, LoRAConfig(max_lora_rank=2)))
    for word in ("use_dora", "max_lora_rank 2", "lora_B.weight", "NaN", "junk"):
        assert word in reasons


def test_many_reasons_are_counted(adapter: PeftAdapter) -> None:
    tensors = read_tensors(adapter.path)
    tensors.update({f"junk.{index}": torch.ones(1) for index in range(500)})
    write_tensors(adapter.path, tensors)
    reasons = refused(adapter)
    assert len(reasons) == 21
    assert "480 more" in reasons[-1]


# --------------------------------------------------------------------------------------------------------- another base


def resize(tensors: Tensors, sizes: Mapping[int, int]) -> Tensors:
    return {name: torch.ones([sizes.get(size, size) for size in tensor.shape]) for name, tensor in tensors.items()}


def test_another_hidden_size_is_another_base(adapter: PeftAdapter) -> None:
    write_tensors(adapter.path, resize(read_tensors(adapter.path), {32: 4096, 48: 11008}))
    edit_config(adapter.path, base_model_name_or_path="org/llama-7b")
    with pytest.raises(AdapterBaseMismatchError) as caught:
        load(adapter.path, adapter.targets)
    for word in ("'sql'", "hidden size 4096 against 32", "intermediate size 11008 against 48", "org/llama-7b"):
        assert word in caught.value.message


def test_more_or_fewer_layers_are_another_base(adapter: PeftAdapter) -> None:
    tensors = read_tensors(adapter.path)
    deeper = {name.replace("layers.2", f"layers.{layer}"): tensor for layer in range(2, 6) for name, tensor in tensors.items()}
    write_tensors(adapter.path, deeper)
    with pytest.raises(AdapterBaseMismatchError, match="number of layers 6 against 3"):
        load(adapter.path, adapter.targets)
    write_tensors(adapter.path, {name: tensor for name, tensor in tensors.items() if "layers.2" not in name})
    with pytest.raises(AdapterBaseMismatchError, match="number of layers 2 against 3"):
        load(adapter.path, adapter.targets)


def test_one_odd_tensor_is_not_another_base(adapter: PeftAdapter) -> None:
    tensors = read_tensors(adapter.path)
    tensors[f"{Q}.lora_A.weight"] = torch.ones(4, 33)
    tensors[Q.replace("layers.0", "layers.1") + ".lora_A.weight"] = torch.ones(4, 34)
    write_tensors(adapter.path, tensors)
    assert len(refused(adapter)) == 2


# ------------------------------------------------------------------------------------------------------- damaged files


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], None], tail: bytes = b"") -> None:
    file = path / "adapter_model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :] + tail)


def test_every_truncation_is_refused_and_most_are_named_so(adapter: PeftAdapter) -> None:
    file = adapter.path / "adapter_model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    for size in (0, 1, 7, 8, 9, 8 + length - 1, 8 + length, 8 + length + 1, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(AdapterTruncatedError, match=r"adapter_model\.safetensors is truncated"):
            load(adapter.path, adapter.targets)


@pytest.mark.parametrize(
    ("content", "error", "word"),
    [
        (b"not a safetensors file at all", AdapterFileFormatError, "not safetensors"),
        (struct.pack("<Q", 2**63) + b"{}", AdapterFileFormatError, "header would have"),
        (struct.pack("<Q", 50_000_000) + b"{}", AdapterFileFormatError, "header would have"),
        (struct.pack("<Q", 1000) + b"{}", AdapterTruncatedError, "a header of 1000 bytes"),
        (struct.pack("<Q", 4) + b"[1] ", AdapterFileFormatError, "does not begin"),
        (struct.pack("<Q", 4) + b"{1} ", AdapterFileFormatError, "not JSON"),
        (struct.pack("<Q", 8) + b'{"\xff":1}', AdapterFileFormatError, "not JSON"),
        (struct.pack("<Q", 0), AdapterFileFormatError, "does not begin"),
        (struct.pack("<Q", 7) + b'{"a":1}', AdapterFileFormatError, "not dtype, shape and data_offsets"),
        (struct.pack("<Q", 13) + b'{"a":1,"a":1}', AdapterFileFormatError, "twice"),
    ],
)
def test_what_is_no_safetensors(adapter: PeftAdapter, content: bytes, error: type[AdapterError], word: str) -> None:
    (adapter.path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(error, match=word):
        load(adapter.path, adapter.targets)


def entry_of(header: dict[str, Any]) -> dict[str, Any]:
    return header[f"{Q}.lora_A.weight"]


@pytest.mark.parametrize(
    "change",
    [
        lambda header: entry_of(header).update(shape=[2**40, 2**40]),
        lambda header: entry_of(header).update(shape=[4, 31]),
        lambda header: entry_of(header).update(shape=[-4, 32]),
        lambda header: entry_of(header).update(shape=["4", 32]),
        lambda header: entry_of(header).update(shape=4),
        lambda header: entry_of(header).update(shape=[1] * 100),
        lambda header: entry_of(header).update(dtype="F16"),
        lambda header: entry_of(header).update(dtype=5),
        lambda header: entry_of(header).update(data_offsets=[0, 2**50]),
        lambda header: entry_of(header).update(data_offsets=[2**47, 2**47 + 512]),
        lambda header: entry_of(header).update(data_offsets=[0, 512, 1024]),
        lambda header: entry_of(header).update(data_offsets=[512, 0]),
        lambda header: entry_of(header).update(data_offsets=[0, True]),
        lambda header: entry_of(header).update(extra=1),
        lambda header: header.update(again=dict(entry_of(header))),
        lambda header: header.pop(f"{Q}.lora_A.weight"),
    ],
)
def test_a_header_that_lies_is_refused_without_allocating_what_it_claims(adapter: PeftAdapter, change: Any) -> None:
    rewrite_header(adapter.path, change)
    with pytest.raises((AdapterFileFormatError, AdapterTruncatedError)):
        load(adapter.path, adapter.targets)
    with pytest.raises(SafetensorError), safe_open(adapter.path / "adapter_model.safetensors", "pt") as file:
        file.keys()


def test_bytes_after_the_last_tensor_are_refused(adapter: PeftAdapter) -> None:
    rewrite_header(adapter.path, lambda header: None, tail=b"more")
    with pytest.raises(AdapterFileFormatError, match="4 bytes follow"):
        load(adapter.path, adapter.targets)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_an_adapter_error_or_harmless(adapter: PeftAdapter, saved: PeftAdapter, data: st.DataObject) -> None:
    """Flipped bytes and cuts: an error of ours, or a file that the safetensors library reads as the same numbers."""
    content = bytearray((saved.path / "adapter_model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(2500, len(content) - 1)))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    file = adapter.path / "adapter_model.safetensors"
    file.write_bytes(content)
    try:
        model = load(adapter.path, adapter.targets)
    except AdapterError as error:
        assert "'sql'" in error.message
        return
    with safe_open(file, "pt") as reference:
        for layer in model:
            expected = reference.get_tensor(f"base_model.model.{layer.module_name}.lora_A.weight")
            assert torch.equal(layer.lora_a, expected)


def test_no_weights_at_all(adapter: PeftAdapter) -> None:
    (adapter.path / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterWeightsMissingError, match=r"adapter_model\.safetensors"):
        load(adapter.path, adapter.targets)
    with pytest.raises(AdapterPathNotFoundError):
        header_nbytes(adapter.path / "nowhere")


def test_a_dangling_link_a_directory_and_a_fifo_are_no_weights(adapter: PeftAdapter, tmp_path: Path) -> None:
    file = adapter.path / "adapter_model.safetensors"
    file.unlink()
    file.symlink_to(tmp_path / "nowhere")
    with pytest.raises(AdapterWeightsMissingError, match="missing"):
        load(adapter.path, adapter.targets)
    file.unlink()
    file.mkdir()
    with pytest.raises(AdapterFileFormatError, match="not a regular file"):
        load(adapter.path, adapter.targets)
    file.rmdir()
    os.mkfifo(file)
    with pytest.raises(AdapterFileFormatError, match="not a regular file"):
        load(adapter.path, adapter.targets)


@pytest.mark.skipif(ROOT, reason="root may read anything")
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "."])
def test_permission_denied(adapter: PeftAdapter, name: str) -> None:
    (adapter.path / name).chmod(0)
    try:
        with pytest.raises(AdapterPermissionError):
            load(adapter.path, adapter.targets)
    finally:
        (adapter.path / name).chmod(0o755)


def test_permission_denied_for_root_too(adapter: PeftAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(AdapterPermissionError, match="may not be read"):
        PEFTHelper.from_local_dir(adapter.path)


def test_an_adapter_beyond_the_host_budget_is_refused_with_both_numbers(adapter: PeftAdapter) -> None:
    nbytes = header_nbytes(adapter.path)
    with pytest.raises(AdapterTooLargeError, match=rf"{nbytes} bytes.* {nbytes - 1} bytes"):
        load(adapter.path, adapter.targets, LoRAConfig(host_memory_bytes=nbytes - 1))
    load(adapter.path, adapter.targets, LoRAConfig(host_memory_bytes=nbytes))


# --------------------------------------------------------------------------------------------------------------- shards


def test_a_missing_or_wrong_shard_is_named(adapter: PeftAdapter) -> None:
    shard(adapter.path, 2)
    first = adapter.path / "adapter_model-00001-of-00002.safetensors"
    second = adapter.path / "adapter_model-00002-of-00002.safetensors"
    second.rename(adapter.path / "aside")
    with pytest.raises(AdapterWeightsMissingError, match="00002-of-00002"):
        load(adapter.path, adapter.targets)
    shutil.copy(first, second)
    with pytest.raises(AdapterFileFormatError, match="disagree about"):
        load(adapter.path, adapter.targets)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin", 5, None])
def test_an_index_names_files_beside_it_only(adapter: PeftAdapter, name: Any) -> None:
    shard(adapter.path, 2)
    (adapter.path / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(AdapterFileFormatError, match="names the shard"):
        load(adapter.path, adapter.targets)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_damaged_index(adapter: PeftAdapter, content: str) -> None:
    shard(adapter.path, 2)
    (adapter.path / "adapter_model.safetensors.index.json").write_text(content)
    with pytest.raises(AdapterFileFormatError, match=r"index\.json"):
        load(adapter.path, adapter.targets)


# ------------------------------------------------------------------------------------------------------------------ bin


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("must-not-be-made",))


def test_a_pickle_with_code_is_refused_and_not_run(adapter: PeftAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(adapter.path)
    to_bin(adapter.path, lambda tensors: {**tensors, "evil": Evil()})
    with pytest.raises(AdapterFileFormatError, match=r"adapter_model\.bin holds more than tensors"):
        load(adapter.path, adapter.targets)
    (adapter.path / "adapter_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(AdapterFileFormatError, match=r"not a file of torch\.save"):
        load(adapter.path, adapter.targets)
    assert not (adapter.path / "must-not-be-made").exists()


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (lambda tensors: list(tensors), "holds a list"),
        (lambda tensors: {"a": 1}, "'a' is not a plain tensor"),
        (lambda tensors: {1: torch.ones(1)}, "1 is not a plain tensor"),
        (lambda tensors: {"a": torch.ones(2).to_sparse()}, "'a' is not a plain tensor"),
        (lambda tensors: {"a": torch.ones(1).expand(10**12)}, "larger than the file"),
        (lambda tensors: {"a": torch.ones(1).expand(2**31, 2**31)}, "larger than the file"),
    ],
)
def test_a_bin_that_is_no_dict_of_tensors(adapter: PeftAdapter, content: Any, word: str) -> None:
    to_bin(adapter.path, content)
    with pytest.raises(AdapterFileFormatError, match=word):
        load(adapter.path, adapter.targets)


def test_a_bin_of_parameters_or_views_is_read(adapter: PeftAdapter) -> None:
    plain = load(adapter.path, adapter.targets)
    to_bin(adapter.path, lambda tensors: {name: torch.nn.Parameter(t.T.contiguous().T) for name, t in tensors.items()})
    assert load(adapter.path, adapter.targets).adapter_digest == plain.adapter_digest


def test_a_zip_bomb_is_refused_before_it_is_unpacked(adapter: PeftAdapter) -> None:
    to_bin(adapter.path)
    file = adapter.path / "adapter_model.bin"
    packed = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.namelist():
            new.writestr(member, old.read(member))
        new.writestr("archive/data/zeros", b"\0" * 50_000_000)
    file.write_bytes(packed.getvalue())
    with pytest.raises(AdapterFileFormatError, match="compressed zip"):
        load(adapter.path, adapter.targets)


def test_every_truncation_of_a_bin_is_refused(adapter: PeftAdapter) -> None:
    to_bin(adapter.path)
    file = adapter.path / "adapter_model.bin"
    data = file.read_bytes()
    for size in (0, 3, 10, len(data) // 2, len(data) - 30, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises((AdapterTruncatedError, AdapterFileFormatError)):
            load(adapter.path, adapter.targets)


def test_a_damaged_bin_is_an_adapter_error(adapter: PeftAdapter) -> None:
    to_bin(adapter.path)
    file = adapter.path / "adapter_model.bin"
    data = file.read_bytes()
    for position in range(0, 3000, 97):
        file.write_bytes(data[:position] + bytes(255 - byte for byte in data[position : position + 8]) + data[position + 8 :])
        try:
            load(adapter.path, adapter.targets)
        except AdapterError as error:
            assert "'sql'" in error.message


def test_the_config_can_be_read_back(saved: PeftAdapter) -> None:
    assert read_config(saved.path)["r"] == 4
    assert targets_of(new_base("llama")) == saved.targets
