"""Quantised base weights: what the packing keeps, the products that stock torch computes, and the same numbers in
torch's own kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.kernels import quantized_linear
from loraplex.kernels.ops import get_backend
from loraplex.kernels.quantized_linear import (
    Fp8Rows,
    QuantizedWeight,
    fp8_linear,
    linear_of_many_rows,
    quantizations_of,
)
from loraplex.kernels.quantized_weights import INT4_GROUP, Fp8Weight, Int4Weight, Int8Weight

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
REFERENCE = get_backend("reference", CPU)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def specified(weight: torch.Tensor, quantization: str) -> torch.Tensor:
    """The weight [out, in] that the specification's numbers stand for, float32."""
    kept = REFERENCE.prepare_linear(weight, quantization)
    if isinstance(kept, Int4Weight):
        scale = kept.scale.float().repeat_interleave(INT4_GROUP, dim=1)[:, : weight.shape[1]]
        return (kept.q.float() - 8) * scale
    assert isinstance(kept, Int8Weight | Fp8Weight)
    return kept.q.float() * kept.scale[:, None]


def dequantized(weight: QuantizedWeight) -> torch.Tensor:
    """All rows, with what was added to each to round its length up."""
    depth = -(-weight.in_features // INT4_GROUP) * INT4_GROUP
    out = torch.full((weight.out_features, depth), float("nan"))
    weight.dequantize(0, out)
    return out


@settings(max_examples=60, deadline=None)
@given(
    out_features=st.integers(1, 40),
    in_features=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    quantization=st.sampled_from(["int8", "int4"]),
)
def test_packing_keeps_the_numbers_of_the_specification(
    out_features: int, in_features: int, dtype: torch.dtype, quantization: str
) -> None:
    weight = draw(out_features, in_features, dtype=dtype, seed=in_features)
    got = dequantized(QuantizedWeight.of(weight, quantization))
    assert torch.equal(got[:, :in_features], specified(weight, quantization))
    assert not got[:, in_features:].any()


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_features", [1, 128, 200])
def test_rows_are_those_of_the_specification(quantization: str, dtype: torch.dtype, in_features: int) -> None:
    weight = draw(37, in_features, dtype=dtype)
    packed, want = QuantizedWeight.of(weight, quantization), specified(weight, quantization)
    for first, last in ((0, 37), (5, 6), (9, 30)):
        assert torch.equal(packed.rows(first, last), want[first:last])


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_that_is_quantised_in_pieces_is_the_same(
    quantization: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = draw(37, 200, dtype=dtype)
    whole = QuantizedWeight.of(weight, quantization)
    monkeypatch.setattr(quantized_linear, "QUANTIZED_AT_ONCE", 2000)
    pieces = QuantizedWeight.of(weight, quantization)
    assert torch.equal(whole.q.view(torch.uint8), pieces.q.view(torch.uint8))
    assert torch.equal(whole.scale, pieces.scale)
    assert whole.quantization == pieces.quantization == quantization


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_bytes_of_a_llamas_linear(quantization: str) -> None:
    """What a decode step reads: half and a quarter of 16 bits, scales included."""
    weight = QuantizedWeight.of(torch.zeros(256, 4096, dtype=torch.bfloat16), quantization)
    nbytes = weight.q.nbytes + weight.scale.nbytes
    allowed = {"fp8": 1.001, "int8": 1.001, "int4": 0.516}[quantization]
    assert nbytes <= allowed * 256 * 4096
    assert not weight.scale.isnan().any()  # a row of zeros has a scale


@settings(max_examples=40, deadline=None)
@given(in_features=st.integers(1, 300), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1000))
def test_rounding_errs_by_no_more_than_its_step(in_features: int, dtype: torch.dtype, seed: int) -> None:
    weight = draw(8, in_features, dtype=dtype, seed=seed) * 3
    row = weight.float().abs().amax(-1, keepdim=True)
    error = {q: (specified(weight, q) - weight.float()).abs() for q in ("fp8", "int8", "int4")}
    assert (error["int8"] <= 0.51 * row / 127).all()
    assert (error["fp8"] <= torch.maximum(weight.float().abs() / 15.9, row / 448 / 2**9)).all()
    kept = Int4Weight.of(weight)
    step = kept.scale.float().abs().repeat_interleave(INT4_GROUP, dim=1)[:, :in_features]
    is_clipped = kept.q == 15  # the side away from the furthest number reaches to 7 steps
    assert (error["int4"] <= torch.where(is_clipped, 1.01, 0.51) * step + 1e-9).all()


def test_torchs_int4_kernel_reads_the_same_numbers() -> None:
    """An independent product of the same q and scale: tinygemm's formula is (q - 8) * scale + zero."""
    weight, x = draw(48, 512), draw(5, 512, seed=1)
    kept = Int4Weight.of(weight)
    scale_and_zero = torch.stack((kept.scale.t(), torch.zeros_like(kept.scale.t())), dim=-1).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(kept.q.int(), 2)
    got = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, INT4_GROUP, scale_and_zero)
    torch.testing.assert_close(got, REFERENCE.linear(x, kept), rtol=1e-4, atol=1e-4)


def test_torchs_int8_kernel_reads_the_same_numbers() -> None:
    weight, x = draw(48, 512), draw(5, 512, seed=1)
    kept = QuantizedWeight.of(weight, "int8")
    got = torch.ops.aten._weight_int8pack_mm(x, kept.q, kept.scale)
    torch.testing.assert_close(got, REFERENCE.linear(x, Int8Weight.of(weight)), rtol=1e-3, atol=5e-3)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("at_once", [1, 1 << 26])
def test_many_rows(
    quantization: str, dtype: torch.dtype, has_bias: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_linear, "DEQUANTIZED_AT_ONCE", at_once)
    weight, x = draw(600, 200, dtype=dtype), draw(70, 200, dtype=dtype, seed=1)
    bias = draw(600, dtype=dtype, seed=2) if has_bias else None
    want = REFERENCE.linear(x, REFERENCE.prepare_linear(weight, quantization), bias)
    got = linear_of_many_rows(x, QuantizedWeight.of(weight, quantization), bias, QuantizedWeight.dequantize)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert (got.double() - want.double()).abs().max() <= max(TOLERANCE[dtype], 1e-4) * want.double().abs().max()


@pytest.mark.parametrize("shape", [(64, 64), (48, 37), (37, 64), (1, 1)])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 33])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "is_row_scaled"), [(torch.bfloat16, True), *((dtype, False) for dtype in DTYPES)], ids=str
)
def test_fp8_products(
    shape: tuple[int, int], num_rows: int, has_bias: bool, dtype: torch.dtype, is_row_scaled: bool
) -> None:
    """`torch._scaled_mm` on a CPU, with the arguments that it gets on a GPU."""
    weight, x = draw(*shape, dtype=dtype), draw(num_rows, shape[1], dtype=dtype, seed=1)
    bias = draw(shape[0], dtype=dtype, seed=2) if has_bias else None
    want = REFERENCE.linear(x, REFERENCE.prepare_linear(weight, "fp8"), bias)
    kept = QuantizedWeight.of(weight, "fp8")
    assert kept.q.shape[0] % 16 == kept.q.shape[1] % 16 == 0
    got = fp8_linear(Fp8Rows.of(x), kept, bias, dtype, is_row_scaled)
    assert got.dtype == dtype
    assert got.shape == want.shape
    assert got.is_contiguous()
    if num_rows:
        assert (got.double() - want.double()).abs().max() <= TOLERANCE[dtype] * want.double().abs().max()


def test_a_rows_scale_is_its_own() -> None:
    """A row of NaN, or a very large one, is no neighbour's trouble."""
    x = draw(4, 64)
    alone = Fp8Rows.of(x[:2])
    x[2], x[3] = float("nan"), 1e30
    together = Fp8Rows.of(x)
    assert torch.equal(together.q[:2].view(torch.uint8), alone.q.view(torch.uint8))
    assert torch.equal(together.scale[:2], alone.scale)


def test_what_a_gpu_can_run_is_by_its_capability() -> None:
    assert quantizations_of((8, 0)) == quantizations_of((8, 6)) == ("int8", "int4")
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        assert quantizations_of(capability) == ("fp8", "int8", "int4")
