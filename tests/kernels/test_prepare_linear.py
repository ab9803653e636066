"""A prepared weight gives the same linear, for any number of rows, with a bias and without, from strided inputs too."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.ops import get_backend

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
