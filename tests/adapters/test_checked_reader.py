"""A reader that has seen the recipe before answers as one that has not: same adapters, same refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from loraplex.adapters import weights
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.tensors import digest_line
from loraplex.adapters.validation import TensorCheck
from loraplex.adapters.weights import CheckedReader, LoRAModel
from loraplex.config import LoRAConfig
from loraplex.errors import AdapterError, AdapterTooLargeError, AdapterValidationError
from tests.adapters.peft_oracle import (
    PeftAdapter,
    edit_config,
    load,
    make_adapter,
    read_tensors,
    shard,
    to_bin,
    write_tensors,
)

CONFIG = LoRAConfig()


def read(reader: CheckedReader, path: Path) -> LoRAModel:
    model = reader.read(path, PEFTHelper.from_local_dir(path))
    assert (model.nbytes, model.rank) == (sum(layer.nbytes for layer in model), max(layer.rank for layer in model))
    return model


def answer(reader: CheckedReader, path: Path) -> object:
    """All that a caller sees."""
    try:
        model = read(reader, path)
    except AdapterError as error:
        return type(error), error.message
    facts = [(layer.module_name, layer.rank, layer.lora_alpha, layer.scaling) for layer in model]
    tensors = [(f, t.dtype, t.tolist()) for layer in model for f, t in layer.tensors.items()]
    return model.adapter_digest, model.rank, model.nbytes, model.warnings, facts, tensors


@pytest.fixture
def num_checks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    calls: list[TensorCheck] = []
    check = TensorCheck.check
    monkeypatch.setattr(TensorCheck, "check", lambda self: (calls.append(self), check(self))[1])
    return lambda: len(calls)


def another(adapter: PeftAdapter, path: Path, seed: int = 5) -> Path:
    """The same recipe with other numbers."""
    shutil.copytree(adapter.path, path)
    generator = torch.Generator().manual_seed(seed)
    tensors = read_tensors(path)
    write_tensors(path, {name: torch.randn(t.shape, generator=generator).to(t.dtype) for name, t in tensors.items()})
    return path


def test_a_known_recipe_is_not_checked_again(
    adapter: PeftAdapter, tmp_path: Path, num_checks: Callable[[], int]
) -> None:
    write_tensors(adapter.path, read_tensors(adapter.path))  # peft's metadata are part of the header
    reader = CheckedReader(adapter.targets, CONFIG)
    first, second = read(reader, adapter.path), read(reader, another(adapter, tmp_path / "b"))
    edit_config(tmp_path / "b", target_modules=["v_proj", "down_proj", "q_proj"], lora_dropout=0.5)
    again = read(reader, tmp_path / "b")
    assert num_checks() == 1
    assert again.adapter_digest == second.adapter_digest != first.adapter_digest
    assert answer(reader, tmp_path / "b") == answer(CheckedReader(adapter.targets, CONFIG), tmp_path / "b")
    assert load(tmp_path / "b", adapter.targets).adapter_digest == second.adapter_digest


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_alpha": 7},
        {"use_rslora": True},
        {"r": 5},
        {"rank_pattern": {"v_proj": 3}},
        {"alpha_pattern": {"v_proj": 3, "self_attn.v_proj": 4}},
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "v_proj", "down_proj", "x_proj"]},
        {"target_modules": r".*(q|v)_proj"},
        {"exclude_modules": ["v_proj"]},
        {"layers_to_transform": [0, 1]},
        {"lora_bias": True},
        {"bias": "all"},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"fan_in_fan_out": True},
        {"nobody_knows_me": 1},
        {"r": "four"},
    ],
    ids=str,
)
def test_another_configuration_is_judged_as_by_a_new_reader(adapter: PeftAdapter, changes: dict[str, Any]) -> None:
    reader = CheckedReader(adapter.targets, CONFIG)
    before = answer(reader, adapter.path)
    edit_config(adapter.path, **changes)
    assert answer(reader, adapter.path) == answer(CheckedReader(adapter.targets, CONFIG), adapter.path) != before


def test_other_tensors_under_the_same_configuration_are_checked(adapter: PeftAdapter) -> None:
    reader = CheckedReader(adapter.targets, CONFIG)
    read(reader, adapter.path)
    tensors = read_tensors(adapter.path)
    name = sorted(tensors)[0]
    for damage in (tensors[name][:-1], tensors[name].double(), tensors[name].to(torch.int8)):
        write_tensors(adapter.path, {**tensors, name: damage})
        refusal = answer(reader, adapter.path)
        assert refusal == answer(CheckedReader(adapter.targets, CONFIG), adapter.path)
        assert refusal[0] is AdapterValidationError  # type: ignore[index]
    write_tensors(adapter.path, tensors)
    read(reader, adapter.path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_nan_under_a_known_recipe_is_refused(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    adapter = make_adapter(tmp_path / "a", "qwen2", dtype, target_modules=["q_proj"], r=3, bias="lora_only")
    reader = CheckedReader(adapter.targets, CONFIG)
    read(reader, adapter.path)
    tensors = read_tensors(adapter.path)
    for name in (min(tensors), max(tensors)):
        damaged = {key: tensor.clone() for key, tensor in tensors.items()}
        damaged[name].view(-1)[-1] = value
        write_tensors(adapter.path, damaged)
        with pytest.raises(AdapterValidationError, match=rf"tensor '{name}' has NaN or Inf") as caught:
            read(reader, adapter.path)
        assert len(caught.value.reasons) == 1
        assert answer(reader, adapter.path) == answer(CheckedReader(adapter.targets, CONFIG), adapter.path)


def test_a_file_that_is_longer_or_shorter_than_the_known_one(adapter: PeftAdapter) -> None:
    reader = CheckedReader(adapter.targets, CONFIG)
    read(reader, adapter.path)
    file = adapter.path / "adapter_model.safetensors"
    data = file.read_bytes()
    for other in (data[:-1], data + b"x", data[:-4096], data[:100]):
        file.write_bytes(other)
        answered = answer(reader, adapter.path)
        assert answered == answer(CheckedReader(adapter.targets, CONFIG), adapter.path)
        assert isinstance(answered[0], type)  # type: ignore[index]


@pytest.mark.parametrize("convert", [lambda path: shard(path, 3), to_bin])
def test_shards_and_bin(adapter: PeftAdapter, tmp_path: Path, convert: Callable[[Path], None]) -> None:
    reader = CheckedReader(adapter.targets, CONFIG)
    plain, other = read(reader, adapter.path), read(reader, another(adapter, tmp_path / "b"))
    for path, model in ((adapter.path, plain), (tmp_path / "b", other)):
        convert(path)
        assert read(reader, path).adapter_digest == read(reader, path).adapter_digest == model.adapter_digest


def test_tensors_in_any_order_and_of_mixed_dtypes(adapter: PeftAdapter) -> None:
    """A file whose order is not the canonical one is read in its own order, to the same places."""
    reader = CheckedReader(adapter.targets, CONFIG)
    plain, tensors = read(reader, adapter.path), read_tensors(adapter.path)
    renamed = {name.removeprefix("base_model.model.") if "v_proj" in name else name: t for name, t in tensors.items()}
    save_file(renamed, adapter.path / "adapter_model.safetensors")
    assert read(reader, adapter.path).adapter_digest == plain.adapter_digest
    mixed = {name: tensor.bfloat16() if "lora_B" in name else tensor for name, tensor in tensors.items()}
    write_tensors(adapter.path, mixed)
    for layer in read(reader, adapter.path):
        stem = f"base_model.model.{layer.module_name}"
        assert torch.equal(layer.lora_a, mixed[f"{stem}.lora_A.weight"])
        assert torch.equal(layer.lora_b, mixed[f"{stem}.lora_B.weight"])


def test_the_size_is_checked_with_both_numbers(adapter: PeftAdapter) -> None:
    nbytes = load(adapter.path, adapter.targets).nbytes
    reader = CheckedReader(adapter.targets, LoRAConfig(host_memory_bytes=nbytes - 1))
    for _ in range(2):
        with pytest.raises(AdapterTooLargeError, match=rf"{nbytes} bytes.* {nbytes - 1} bytes"):
            read(reader, adapter.path)


@given(name=st.text(), shape=st.lists(st.integers(0, 2**47), max_size=8))
def test_a_line_of_the_digest_is_json(name: str, shape: list[int]) -> None:
    line = digest_line(name, "F32", tuple(shape))
    assert json.dumps([name, "F32", shape], separators=(",", ":")).encode() == line[8:]
    assert int.from_bytes(line[:8], "little") == len(line) - 8


def test_what_is_remembered_has_a_bound(
    adapter: PeftAdapter, num_checks: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MAX_BLUEPRINTS", 2)
    reader = CheckedReader(adapter.targets, CONFIG)
    for alpha in (1, 2, 1, 3, 1, 2):  # 3 pushes 2 out, which was used longest ago
        edit_config(adapter.path, lora_alpha=alpha)
        read(reader, adapter.path)
    assert num_checks() == 4
    monkeypatch.setattr(weights, "MAX_KNOWN_HEADER_BYTES", 10)
    for _ in range(2):
        read(reader, adapter.path)
    assert num_checks() == 6
