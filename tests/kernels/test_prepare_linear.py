"""A prepared weight gives the same linear, for any number of rows, with a bias and without, from strided inputs too;
and its rows."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.ops import KernelBackend, get_backend
from tests.kernels.cases import BACKENDS

CPU = torch.device("cpu")


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 3, 16, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_prepared_is_the_same_linear(backend: str, dtype: torch.dtype, num_rows: int, has_bias: bool) -> None:
    ops = get_backend(backend, CPU)
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(37, 53, generator=generator).to(dtype)
    bias = torch.randn(37, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(num_rows, 60, generator=generator).to(dtype)[:, :53]
    kept = weight.clone()
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    got = ops.linear(x, ops.prepare_linear(weight), bias)
    assert got.dtype == dtype
    assert got.shape == (num_rows, 37)
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    assert (got.double() - exact).abs().max() <= tolerance * exact.abs().max()
    assert torch.equal(weight, kept)  # an embedding may share it


RANGES = [(0, 37), (0, 16), (16, 32), (5, 6), (9, 35), (36, 37), (4, 4)]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_features", [1, 16, 53])
def test_rows_of_a_prepared_weight_are_the_weights(
    backend: KernelBackend, dtype: torch.dtype, in_features: int
) -> None:
    """Bit for bit, and a copy: what is written over them changes no weight."""
    weight = torch.randn(37, in_features, generator=torch.Generator().manual_seed(in_features)).to(dtype)
    for each in (backend.prepare_linear(weight), weight):
        for first, last in RANGES:
            got = backend.weight_rows(each, first, last)
            assert got.dtype == torch.float32
            assert torch.equal(got, weight[first:last].float())
            got.fill_(7)
        assert torch.equal(backend.weight_rows(each, 0, 37), weight.float())


QUANTIZED = [
    pytest.param(backend, name, id=f"{backend.name}-{name}") for backend in BACKENDS for name in backend.quantizations
]


@pytest.mark.parametrize(("backend", "quantization"), QUANTIZED)
@pytest.mark.parametrize("in_features", [1, 53, 300])
def test_rows_of_a_quantised_weight_are_what_its_numbers_stand_for(
    backend: KernelBackend, quantization: str, in_features: int
) -> None:
    weight = torch.randn(37, in_features, generator=torch.Generator().manual_seed(in_features))
    prepared = backend.prepare_linear(weight, quantization)
    whole = backend.weight_rows(prepared, 0, 37)
    error = {"int8": 1 / 253, "int4": 1 / 7, "fp8": 2**-4}[quantization]  # of the row's largest number
    assert ((whole - weight).abs() <= error * weight.abs().amax(-1, keepdim=True)).all()
    if quantization != "fp8":  # there inputs are rounded, too
        x = torch.eye(in_features)
        torch.testing.assert_close(backend.linear(x, prepared).T, whole, rtol=1e-4, atol=1e-4)
    for first, last in RANGES:
        assert torch.equal(backend.weight_rows(prepared, first, last), whole[first:last])
    backend.weight_rows(prepared, 0, 37).fill_(7)
    assert torch.equal(backend.weight_rows(prepared, 0, 37), whole)
