"""Linears over 8 and 4 bits in Triton against their specification; the interpreter runs them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loraplex.kernels.ops import get_backend
from loraplex.kernels.quantized_linear import Fp8Rows, QuantizedWeight

pytest.importorskip("triton")

from loraplex.kernels.triton import linear
from loraplex.kernels.triton.backend import TritonBackend
from loraplex.kernels.triton.launch import A100, H100, GpuTarget, TritonLauncher
from loraplex.kernels.triton.linear import FEW_ROWS, _Tiles, dequantize, quantized_linear, round_rows, skinny_linear

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16)
TOLERANCE = {torch.float32: 2e-4, torch.float16: 3e-3}
REFERENCE = get_backend("reference", CPU)


@pytest.fixture
def launcher() -> TritonLauncher:
    return TritonLauncher(CPU)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert (got.double() - want.double()).abs().max() <= TOLERANCE[want.dtype] * want.double().abs().max()


@pytest.mark.interpreter
@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "out_features", "in_features", "has_bias"),
    [
        (1, 70, 200, True),  # no multiple of a tile
        (1, 128, 2048, False),  # the depth is split
        (5, 129, 1050, True),  # split, no multiple of it, with a bias
        (17, 40, 130, False),
        (33, 130, 256, True),
        (200, 70, 1100, True),  # several tiles of rows
        (FEW_ROWS, 64, 128, False),
        (FEW_ROWS + 1, 70, 200, True),  # many rows
    ],
)
def test_linear(
    launcher: TritonLauncher,
    quantization: str,
    dtype: torch.dtype,
    num_rows: int,
    out_features: int,
    in_features: int,
    has_bias: bool,
) -> None:
    if quantization == "fp8":
        num_rows = min(num_rows, 20)  # rounded one by one, multiplied by torch
    weight = draw(out_features, in_features, dtype=dtype)
    x = draw(num_rows, in_features + 7, dtype=dtype, seed=1)[:, :in_features]
    bias = draw(out_features, dtype=dtype, seed=2) if has_bias else None
    want = REFERENCE.linear(x, REFERENCE.prepare_linear(weight, quantization), bias)
    kept = QuantizedWeight.of(weight, quantization)
    got = quantized_linear(launcher, x, kept, bias)
    assert_close(got, want)
    assert torch.equal(got, quantized_linear(launcher, x, kept, bias))


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_no_rows(launcher: TritonLauncher, quantization: str) -> None:
    kept = QuantizedWeight.of(draw(70, 2048), quantization)
    assert quantized_linear(launcher, torch.empty(0, 2048), kept, None).shape == (0, 70)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_every_number_is_written_and_none_beside(launcher: TritonLauncher, quantization: str) -> None:
    """A weight's last row and last byte are the last of their memory; rows of NaN beside a batch do not show."""
    weight, rows = draw(65, 384), draw(9, 384, seed=1)
    rows[3:] = float("nan")
    got = skinny_linear(launcher, rows[:3], QuantizedWeight.of(weight, quantization), None)
    assert_close(got, REFERENCE.linear(rows[:3], REFERENCE.prepare_linear(weight, quantization)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_dequantized(launcher: TritonLauncher, quantization: str, dtype: torch.dtype) -> None:
    kept = QuantizedWeight.of(draw(37, 300, dtype=dtype), quantization)
    got, want = torch.full((2, 20, 384), float("nan"), dtype=dtype)
    dequantize(launcher, kept, 11, got)
    kept.dequantize(11, want)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_features", [1, 50, 1024])
def test_rows_are_rounded_as_by_stock_torch(launcher: TritonLauncher, dtype: torch.dtype, in_features: int) -> None:
    x = draw(40, in_features, dtype=dtype) * torch.logspace(-3, 1, 40)[:, None].to(dtype)
    x[3] = 0
    got, want = round_rows(launcher, x), Fp8Rows.of(x)
    assert torch.equal(got.scale, want.scale)
    differs = got.q.view(torch.uint8) != want.q.view(torch.uint8)
    assert differs.float().mean() <= 2e-3  # of quotients that lie in the middle
    assert ((got.q.float() - want.q.float()).abs() <= want.q.float().abs() / 7.9 + 2**-9).all()


@pytest.mark.parametrize("target", [A100, H100], ids=lambda t: f"sm_{t.capability[0]}{t.capability[1]}")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(("out_features", "in_features"), [(6144, 4096), (4096, 14336), (28672, 4096), (64, 64)])
def test_tiles(target: GpuTarget, quantization: str, out_features: int, in_features: int) -> None:
    """They cover the rows; splits leave no one without work; partial sums stay small beside the weight for few rows."""
    kept = QuantizedWeight.of(torch.zeros(2, in_features), quantization)
    kept = replace(kept, out_features=out_features)
    for num_rows in (*range(1, 66), 128, 129, 500, FEW_ROWS):
        tiles = _Tiles.of(num_rows, kept, 2, target)
        assert num_rows <= tiles.rows or tiles.rows == 128
        num_turns = -(-in_features // 128)
        assert tiles.num_splits == 1 or num_turns // tiles.num_splits >= linear.LEAST_TURNS
        turns = -(-num_turns // tiles.num_splits)
        assert (tiles.num_splits - 1) * turns < num_turns
        stage_bytes = tiles.columns * kept.q.shape[1] // num_turns + tiles.rows * 128 * 2
        assert 2 <= tiles.num_stages <= 4
        assert (tiles.num_stages - 1) * stage_bytes <= target.max_shared_bytes
        if num_rows <= 16:
            weight_bytes = out_features * kept.q.shape[1]
            assert (tiles.num_splits - 1) * num_rows * out_features * 4 <= weight_bytes / 4


def test_the_backend_has_what_its_gpu_can_run(launcher: TritonLauncher) -> None:
    assert TritonBackend(CPU).quantizations == ("fp8", "int8", "int4")
    launcher.target = A100
    assert TritonBackend(CPU, launcher).quantizations == ("int8", "int4")


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_a_prepared_weight_is_the_backends_linear(quantization: str) -> None:
    ops, weight, x = TritonBackend(CPU), draw(48, 128), draw(3, 128, seed=1)
    prepared = ops.prepare_linear(weight, quantization)
    want = REFERENCE.linear(x, REFERENCE.prepare_linear(weight, quantization))
    assert_close(ops.linear(x, prepared), want)
    restored = ops.restore_linear(ops.linear_tensors(prepared), (48, 128))
    assert torch.equal(ops.linear(x, restored), ops.linear(x, prepared))
    assert_close(ops.linear(x, ops.prepare_linear(weight)), REFERENCE.linear(x, weight))
    a, b = draw(4, 128, seed=2), draw(35, 4, seed=3)
    norms = REFERENCE.row_norms(REFERENCE.prepare_linear(weight, quantization), 5, 40, a, b, 0.5)
    torch.testing.assert_close(ops.row_norms(prepared, 5, 40, a, b, 0.5), norms)
    torch.testing.assert_close(
        ops.row_norms(ops.prepare_linear(weight), 5, 40, a, b, 0.5), (weight[5:40] + 0.5 * b @ a).norm(dim=1)
    )


def test_many_rows_are_not_left_to_the_kernel_of_few(launcher: TritonLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "skinny_linear", None)
    monkeypatch.setattr("loraplex.kernels.quantized_linear.DEQUANTIZED_AT_ONCE", 1)
    weight, x = draw(300, 128), draw(FEW_ROWS + 1, 128, seed=1)
    got = linear.quantized_linear(launcher, x, QuantizedWeight.of(weight, "int4"), None)
    assert_close(got, REFERENCE.linear(x, REFERENCE.prepare_linear(weight, "int4")))
