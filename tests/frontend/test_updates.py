"""`update_adapter_tensors` of the offline LLM: what a trainer gives it is what a directory of it would be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from loraplex import LLM, LoRARequest, RequestOutput, SamplingParams
from loraplex.errors import (
    AdapterConflictError,
    AdapterError,
    AdapterNotFoundError,
    AdapterValidationError,
    InvalidRequestError,
    LoraDisabledError,
)
from tests.fixtures import TARGET_MODULES

TEXT = "def step(self, plan):"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def llm(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """No request, no reference and no file is left behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with LLM(str(base), max_model_len=160, enable_prediction=False) as llm:
        yield llm
        assert not llm.engine.has_unfinished
        assert llm._front.registry_or_refuse().num_references == 0
        assert {spec.path for spec in llm._front.registry_or_refuse().specs()} >= set(map(str, kept(tmp_path)))
        llm.check_integrity()
    assert not list(tmp_path.iterdir())


def kept(folder: Path) -> list[Path]:
    return [path for path in folder.glob(".making-uploads-*/*") if path.is_dir()]


def tensors_of(request: LoRARequest) -> Tensors:
    return load_file(Path(request.lora_path) / "adapter_model.safetensors")


def config_of(request: LoRARequest) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(request.lora_path) / "adapter_config.json").read_text())
    return config


def answer(llm: LLM, request: LoRARequest | None, params: SamplingParams = GREEDY) -> tuple[int, ...]:
    return tuple(llm.generate(TEXT, params, lora_request=request)[0].outputs[0].token_ids)


def test_tensors_are_what_their_directory_is(llm: LLM, one: LoRARequest, two: LoRARequest) -> None:
    expected = [answer(llm, each) for each in (one, two)]
    assert expected[0] != expected[1]
    result = llm.update_adapter_tensors("adapter1", tensors_of(two))
    assert (result.status, result.ref.adapter_version, result.ref.lora_int_id) == ("reloaded", 2, 1)
    assert answer(llm, one) == expected[1]  # no cached prefix of the version before, and the path is not read again
    digests = {info.ref.adapter_name: info.ref.adapter_digest for info in llm.adapters()}
    assert digests["adapter1"] == digests["adapter2"]
    assert llm.update_adapter_tensors("adapter1", save(tensors_of(two))).status == "already_loaded"
    assert llm.rollback_lora(1).ref.adapter_version == 1
    assert answer(llm, one) == expected[0]


def test_a_request_in_flight_keeps_its_version(llm: LLM, one: LoRARequest, two: LoRARequest) -> None:
    before, after = (answer(llm, each, LONG) for each in (one, two))
    llm.remove_lora(2)
    request_id = llm.submit(TEXT, LONG, lora_request=one)
    llm.step()
    llm.update_adapter_tensors("adapter1", tensors_of(two))
    later_id = llm.submit(TEXT, LONG, lora_request=one)
    last: dict[str, RequestOutput] = {}
    while llm.has_unfinished:
        last |= {output.request_id: output for output in llm.step()}
    assert tuple(last[request_id].outputs[0].token_ids) == before
    assert tuple(last[later_id].outputs[0].token_ids) == after


def test_many_updates_leave_as_many_files_as_versions(llm: LLM, one: LoRARequest, tmp_path: Path) -> None:
    llm.add_lora(one)
    answers = set()
    for step in range(5):
        result = llm.update_adapter_tensors("adapter1", {k: v * (step + 2) for k, v in tensors_of(one).items()})
        assert result.ref.adapter_version == step + 2
        answers.add(answer(llm, one))
    assert len(answers) == 5
    assert len(kept(tmp_path)) == 2  # max_versions_kept
    assert llm.stats().memory.num_adapters == 2
    llm.remove_lora(1)
    assert kept(tmp_path) == []


def test_a_new_adapter_needs_no_file(llm: LLM, one: LoRARequest) -> None:
    expected = answer(llm, one)
    llm.remove_lora(1)
    with pytest.raises(AdapterNotFoundError, match="'policy' is not loaded; load it first, or send its configuration"):
        llm.update_adapter_tensors("policy", tensors_of(one))
    config = {**config_of(one), "target_modules": set(TARGET_MODULES)}  # as peft's to_dict has them
    assert llm.update_adapter_tensors("policy", tensors_of(one), config).status == "loaded"
    assert answer(llm, LoRARequest("policy", 7, "any path")) == expected
    assert llm.list_loras() == {7}


def test_a_configuration_of_its_own_counts(llm: LLM, one: LoRARequest) -> None:
    before = answer(llm, one, LONG)
    llm.update_adapter_tensors("adapter1", tensors_of(one), {**config_of(one), "lora_alpha": 32})
    assert answer(llm, one, LONG) != before
    llm.update_adapter_tensors("adapter1", {k: v / 2 for k, v in tensors_of(one).items()})
    registry = llm._front.registry_or_refuse()
    path = registry.spec_of(registry.resolve("adapter1")).path
    assert config_of(replace(one, lora_path=path))["lora_alpha"] == 32  # what was sent last stays


def first(tensors: Tensors, part: str) -> str:
    return next(name for name in tensors if part in name)


def broken(tensors: Tensors, how: str) -> Tensors:
    name = first(tensors, "lora_A")
    made = dict(tensors)
    if how == "nan":
        made[name] = made[name].clone()
        made[name][0, 0] = float("nan")
    elif how == "shape":
        made[name] = made[name][:, :-1].contiguous()
    elif how == "rank":
        made = {k: torch.cat([v, v], 0) if "lora_A" in k else torch.cat([v, v], 1) for k, v in made.items()}
    elif how == "name":
        made["base_model.model.model.layers.0.nothing.lora_A.weight"] = made.pop(name)
    elif how == "half":
        del made[name]
    elif how == "dtype":
        made[name] = made[name].to(torch.int8)
    elif how == "empty":
        made = {}
    return made


@pytest.mark.parametrize("how", ["nan", "shape", "rank", "name", "half", "dtype", "empty"])
def test_bad_tensors_change_nothing(llm: LLM, one: LoRARequest, tmp_path: Path, how: str) -> None:
    before = answer(llm, one)
    with pytest.raises(AdapterError, match="adapter1"):
        llm.update_adapter_tensors("adapter1", broken(tensors_of(one), how))
    assert kept(tmp_path) == []
    assert answer(llm, one) == before


def test_a_bad_configuration_changes_nothing(llm: LLM, one: LoRARequest, tmp_path: Path) -> None:
    llm.add_lora(one)
    with pytest.raises(AdapterValidationError, match="lora_alpha"):
        llm.update_adapter_tensors("adapter1", tensors_of(one), {**config_of(one), "lora_alpha": -1})
    with pytest.raises(InvalidRequestError, match="no JSON"):
        llm.update_adapter_tensors("adapter1", tensors_of(one), {"r": object()})
    with pytest.raises(InvalidRequestError, match="no safetensors file"):
        llm.update_adapter_tensors("adapter1", {"lora_A": "a path"})  # type: ignore[dict-item]
    with pytest.raises(InvalidRequestError, match="leave it out"):
        llm.update_adapter_tensors("adapter1", save(tensors_of(one)), config_of(one))
    assert kept(tmp_path) == []


def test_a_version_may_be_expected(llm: LLM, one: LoRARequest, two: LoRARequest, tmp_path: Path) -> None:
    llm.add_lora(one)
    assert llm.update_adapter_tensors("adapter1", tensors_of(two), expected_version=1).ref.adapter_version == 2
    with pytest.raises(AdapterConflictError, match="has version 2, and 1 was expected"):
        llm.update_adapter_tensors("adapter1", tensors_of(one), expected_version=1)
    with pytest.raises(AdapterConflictError, match="is not loaded, and 1 was expected"):
        llm.update_adapter_tensors("other", tensors_of(one), expected_version=1)
    assert len(kept(tmp_path)) == 1


def test_without_lora_it_is_refused(base: Path) -> None:
    with LLM(str(base), max_model_len=160, enable_lora=False) as llm, pytest.raises(LoraDisabledError):
        llm.update_adapter_tensors("adapter1", b"")
