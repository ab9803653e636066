"""A prepared weight gives the same linear, for any number of rows, with a bias and without, from strided inputs too;
and the norms of its rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from loraplex.kernels import reference
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
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


def draw_lora(rank: int, in_features: int, out_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    a = torch.randn(rank, in_features, generator=generator) / in_features**0.5
    return a, torch.randn(out_features, rank, generator=generator)


def assert_norms(backend: KernelBackend, weight: Any, numbers: torch.Tensor, rank: int) -> None:
    """Of each range of rows of `weight`, which stands for `numbers`."""
    a, b = draw_lora(rank, numbers.shape[1], len(numbers))
    want = (numbers.double() + 1.5 * b.double() @ a.double()).norm(dim=1)
    for first, last in RANGES:
        got = backend.row_norms(weight, first, last, a, b[first:last], 1.5)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want[first:last], rtol=1e-5, atol=0)


@pytest.fixture(params=[1, 200, reference.NORMED_AT_ONCE], ids=["row by row", "in blocks", "at once"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "NORMED_AT_ONCE", request.param)


@pytest.mark.usefixtures("at_once")
@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("in_features", "rank"), [(1, 1), (2, 16), (16, 3), (53, 16), (53, 70)])
def test_norms_of_rows(backend: KernelBackend, dtype: torch.dtype, in_features: int, rank: int) -> None:
    """Of a weight that is prepared, and of one that is not; neither is changed."""
    weight = torch.randn(37, in_features, generator=torch.Generator().manual_seed(in_features)).to(dtype)
    kept = weight.clone()
    prepared = backend.prepare_linear(weight)
    before = backend.linear(torch.eye(in_features, dtype=dtype).to(backend.activation_dtype(dtype)), prepared)
    for each in (prepared, weight):
        assert_norms(backend, each, kept, rank)
    assert torch.equal(weight, kept)
    assert torch.equal(backend.linear(torch.eye(in_features).to(before.dtype), prepared), before)


QUANTIZED = [
    pytest.param(backend, name, id=f"{backend.name}-{name}") for backend in BACKENDS for name in backend.quantizations
]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("backend", "quantization"), QUANTIZED)
@pytest.mark.parametrize("in_features", [1, 53, 300])
def test_norms_of_quantised_rows_are_of_what_their_numbers_stand_for(
    backend: KernelBackend, quantization: str, in_features: int
) -> None:
    weight = torch.randn(37, in_features, generator=torch.Generator().manual_seed(in_features))
    prepared = backend.prepare_linear(weight, quantization)
    numbers = backend.linear(torch.eye(in_features), prepared).T  # ones and zeros are exact in any rounding
    assert in_features == 1 or not torch.equal(numbers, weight)
    assert_norms(backend, prepared, numbers, 16)


@each_backend
def test_norms_are_zero_or_not_finite_where_the_rows_are(backend: KernelBackend) -> None:
    weight = torch.ones(37, 53)
    a, b = torch.ones(1, 53), torch.zeros(37, 1)
    b[3], b[5], b[20] = -1, 3e38, float("nan")
    norms = backend.row_norms(backend.prepare_linear(weight), 0, 37, a, b, 1.0)
    assert norms[3] == 0
    assert norms[5] == float("inf")
    assert norms[20].isnan()
    others = [n for n in range(37) if n not in (3, 5, 20)]
    torch.testing.assert_close(norms[others], torch.full((34,), 53**0.5))


@each_backend
def test_norms_beside_products_change_neither(backend: KernelBackend) -> None:
    weight, x = torch.randn(300, 200), torch.randn(5, 200)
    prepared, (a, b) = backend.prepare_linear(weight), draw_lora(16, 200, 300)

    def norms(_: int = 0) -> torch.Tensor:
        return backend.row_norms(prepared, 0, 300, a, b, 1.0)

    want, product = norms(), backend.linear(x, prepared)
    with ThreadPoolExecutor(3) as threads:
        found = threads.map(norms, range(60))
        assert all(torch.equal(backend.linear(x, prepared), product) for _ in range(60))
        assert all(torch.equal(each, want) for each in found)
