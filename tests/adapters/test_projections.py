"""VeRA with A and B as they are: what is read, what is equal, and that it is the LoRA that it would be made into."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.weights import CheckedReader, LoRAModel
from loraplex.errors import AdapterValidationError
from tests.adapters.test_kind_files import (
    LIMITS,
    Q,
    Saved,
    edit_config,
    read_tensors,
    saved,
    saved_kinds,
    write_tensors,
)

__all__ = ["saved", "saved_kinds"]  # fixtures


def read(path: Path, saved: Saved, keeps: bool = True, **limits: Any) -> LoRAModel:
    reader = CheckedReader(saved.targets, replace(LIMITS, **limits), keeps_projections=keeps)
    return reader.read(path, PEFTHelper.from_local_dir(path))


def test_the_delta_is_that_of_the_lora(saved: Saved) -> None:
    path = saved.copy("vera")
    kept, made = read(path, saved), read(path, saved, keeps=False)
    shared = kept.projections
    assert shared is not None
    assert made.projections is None
    assert (kept.adapter_digest, kept.rank, list(kept.layers)) == (made.adapter_digest, made.rank, list(made.layers))
    assert kept.nbytes < made.nbytes
    for layer in kept:
        other = made.layers[layer.module_name]
        assert layer.lora_a is None
        assert layer.rank_scale is not None
        assert layer.out_scale is not None
        assert other.lora_a is not None
        assert other.lora_b is not None
        width = other.lora_a.shape[1]
        torch.testing.assert_close(layer.rank_scale[:, None] * shared.lora_a[:, :width], other.lora_a)
        torch.testing.assert_close(layer.out_scale[:, None] * shared.lora_b[: len(other.lora_b)], other.lora_b)


def test_the_digest_is_of_the_numbers_alone(saved: Saved) -> None:
    path = saved.copy("vera")
    first = read(path, saved).projections
    tensors = read_tensors(path)
    write_tensors(path, {key: tensor * 2 if "lambda" in key else tensor for key, tensor in tensors.items()})
    second = read(path, saved).projections
    tensors["base_model.vera_B"][3, 1] += 1e-3
    write_tensors(path, tensors)
    third = read(path, saved).projections
    write_tensors(path, {key: tensor.half() for key, tensor in tensors.items()})
    half = read(path, saved).projections
    assert first is not None
    assert second is not None
    assert third is not None
    assert half is not None
    assert half.lora_a.dtype == torch.float16
    assert first.digest == second.digest
    assert len({first.digest, third.digest, half.digest}) == 3


def test_lora_dtype_is_of_projections_and_vectors_stay_float32(saved: Saved) -> None:
    model = read(saved.copy("vera"), saved, lora_dtype="bfloat16")
    assert model.projections is not None
    assert model.projections.lora_a.dtype == model.projections.lora_b.dtype == torch.bfloat16
    assert {tensor.dtype for layer in model for tensor in layer.tensors.values()} == {torch.float32}


@pytest.mark.parametrize("part", ["vera_lambda_d", "vera_lambda_b"])
def test_what_does_not_fit_multiplied_out_is_refused_in_either_form(part: str, saved: Saved) -> None:
    path = saved.copy("vera")
    tensors = read_tensors(path)
    other = "base_model.vera_A" if part.endswith("d") else "base_model.vera_B"
    tensors[f"{Q}.{part}"] = torch.full_like(tensors[f"{Q}.{part}"], 1e30)
    tensors[other] = torch.full_like(tensors[other], 1e20)
    write_tensors(path, tensors)
    reasons = []
    for keeps in (False, True):
        with pytest.raises(AdapterValidationError, match="float32 once it is multiplied out") as caught:
            read(path, saved, keeps)
        reasons.append(caught.value.reasons)
    assert reasons[0] == reasons[1]


def test_projections_that_do_not_fit_lora_dtype_are_refused(saved: Saved) -> None:
    path = saved.copy("vera")
    tensors = read_tensors(path)
    write_tensors(path, {key: tensor * 1e6 if "vera_A" in key else tensor for key, tensor in tensors.items()})
    with pytest.raises(AdapterValidationError, match="vera_A and vera_B do not fit in lora_dtype='float16'"):
        read(path, saved, lora_dtype="float16")


def test_other_kinds_are_read_as_ever(saved: Saved) -> None:
    path = saved.copy("loha")
    kept, made = read(path, saved), read(path, saved, keeps=False)
    assert kept.projections is None
    assert [layer.tensors.keys() for layer in kept] == [layer.tensors.keys() for layer in made]


def test_a_file_without_projections_is_refused_as_ever(saved: Saved) -> None:
    path = saved.copy("vera")
    edit_config(path, save_projection=False)
    with pytest.raises(AdapterValidationError, match="save_projection must be true"):
        read(path, saved)
