"""Linears on panels, in every format and on every instruction set: float64, a scalar loop, and bits that nothing around
a row changes."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.native.linear import PanelWeight
from loraplex.kernels.reference import ReferenceBackend
from tests.kernels.cases import BF16, FP16, FP32, assert_close, case_id, pairwise, same_bits
from tests.kernels.native.machine import assert_same_on_every_isa, assert_same_on_threads

INT8 = torch.int8
FORMATS = (FP32, FP16, BF16, INT8)
DIMENSIONS = {
    "dtype": FORMATS,
    "rows": (0, 1, 2, 3, 4, 6, 7, 12, 13, 25, 64, 130),
    "in_features": (1, 2, 3, 16, 17, 513, 576, 1025, 3100),
    "out_features": (1, 2, 15, 16, 17, 33, 100, 128, 193, 390),
    "layout": ("dense", "strided", "every other row"),
    "has_bias": (False, True),
}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def rows_of(layout: str, rows: int, in_features: int) -> torch.Tensor:
    if layout == "dense":
        return draw(rows, in_features)
    if layout == "strided":
        return draw(rows, in_features + 7)[:, 3 : 3 + in_features]
    return draw(2 * rows, in_features)[::2]


def pack(native: NativeBackend, weight: torch.Tensor, dtype: torch.dtype) -> PanelWeight:
    """`weight` float32, kept as `dtype`."""
    if dtype == INT8:
        packed: PanelWeight = native.prepare_linear(weight, "int8")
    else:
        packed = native.prepare_linear(weight.to(dtype))
    return packed


def largest_error(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far an element of x W^T may be from the exact one [T, out], weights of 16 bits being exact themselves.

    A chain of n fused multiply-adds has an error of at most n u sum |x w|, u = 2^-24. int8 adds half a step of each
    weight (its row's maximum / 127) and of each input (its row's maximum / 32767).
    """
    x, weight = x.double().abs(), weight.double().abs()
    bound: torch.Tensor = (x.shape[1] + 2) * 2**-24 * (x @ weight.T)
    if dtype == INT8 and x.shape[0] > 0:
        half_x, half_w = x.amax(-1, keepdim=True) / 32767 * 0.5001, weight.amax(-1) / 127 * 0.5001
        bound += x.sum(-1, keepdim=True) * half_w + half_x * weight.sum(-1) + x.shape[1] * half_x * half_w
    return bound


def exact_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight.double() if dtype == INT8 else weight.to(dtype).double()


# ---------------------------------------------------------------------------------------------------------- the product


@pytest.mark.parametrize("case", pairwise(DIMENSIONS), ids=case_id)
def test_linear_against_float64(native: NativeBackend, case: dict[str, Any]) -> None:
    dtype, rows, in_features, out_features = (case[name] for name in ("dtype", "rows", "in_features", "out_features"))
    x, weight = rows_of(case["layout"], rows, in_features), draw(out_features, in_features, seed=1)
    bias = draw(out_features, seed=2) if case["has_bias"] else None
    before = x.clone()
    got = native.linear(x, pack(native, weight, dtype), bias)
    assert (got.dtype, got.shape) == (FP32, (rows, out_features))
    product = x.double() @ exact_weight(weight, dtype).T
    expected = product if bias is None else product + bias.double()
    rounding = 2**-23 * expected.abs()
    assert bool(
        ((got.double() - expected).abs() <= largest_error(x, exact_weight(weight, dtype), dtype) + rounding).all()
    )
    assert same_bits(x, before)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_weight_stays_as_it_was(native: NativeBackend, dtype: torch.dtype) -> None:
    """An embedding may share it."""
    weight = draw(37, 53) if dtype == INT8 else draw(37, 53).to(dtype)
    before = weight.clone()
    native.prepare_linear(weight, "int8" if dtype == INT8 else None)
    assert same_bits(weight, before)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_bias_is_added_last(native: NativeBackend, dtype: torch.dtype) -> None:
    x, packed, bias = draw(9, 70), pack(native, draw(45, 70), dtype), draw(45)
    assert same_bits(native.linear(x, packed, bias), native.linear(x, packed) + bias)


def test_an_unprepared_weight_is_prepared(native: NativeBackend) -> None:
    x, weight = draw(5, 40), draw(33, 40)
    assert same_bits(native.linear(x, weight), native.linear(x, native.prepare_linear(weight)))


def test_int8_is_the_reference(native: NativeBackend) -> None:
    """The same integers, but for an input that lies between two of them; the last multiplications are in float32
    here."""
    reference = ReferenceBackend()
    x, weight, bias = draw(9, 700), draw(45, 700), draw(45)
    expected = reference.linear(x, reference.prepare_linear(weight, "int8"), bias)
    got = native.linear(x, native.prepare_linear(weight, "int8"), bias)
    assert_close(got, expected)


def test_int8_of_the_largest_numbers_does_not_overflow(native: NativeBackend) -> None:
    """Every product is the largest there is, over several chunks of k."""
    for x_sign, w_sign in ((1, 1), (-1, 1), (-1, -1)):
        got = native.linear(
            torch.full((7, 3000), 2.0 * x_sign), native.prepare_linear(torch.full((20, 3000), 0.5 * w_sign), "int8")
        )
        torch.testing.assert_close(got, torch.full((7, 20), 3000.0 * x_sign * w_sign), rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_weights_of_zeros(native: NativeBackend, dtype: torch.dtype) -> None:
    weight = draw(20, 33)
    weight[4] = 0
    got = native.linear(torch.cat((draw(3, 33), torch.zeros(1, 33))), pack(native, weight, dtype))
    assert not got[3].any()
    assert not got[:, 4].any()


# ---------------------------------------------------------------------------------------------------- one chain of FMAs


def fmaf() -> Callable[[float, float, float], float]:
    """C's fused multiply-add of floats: one rounding."""
    name = ctypes.util.find_library("m")
    if name is None:
        pytest.skip("there is no C library of mathematics to compare with")
    function = ctypes.CDLL(name).fmaf
    function.argtypes, function.restype = [ctypes.c_float] * 3, ctypes.c_float
    return function  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_an_element_is_one_chain_of_fused_multiply_adds(native: NativeBackend, dtype: torch.dtype) -> None:
    """acc = fma(x[k], w[k], acc) over k in order from 0; then the bias. Two chunks of k, rows of every tile."""
    if native.library.isa == "portable":
        pytest.skip("where the portable library's target has no fused multiply-add it rounds twice")
    fma, in_features = fmaf(), 1030
    x, weight, bias = draw(13, in_features), draw(17, in_features, seed=1).to(dtype), draw(17, seed=2)
    got = native.linear(x, native.prepare_linear(weight))
    for row, column in ((0, 0), (6, 3), (12, 16)):
        chain = 0.0
        for a, b in zip(x[row].tolist(), weight[column].float().tolist(), strict=True):
            chain = fma(a, b, chain)
        assert got[row, column].item() == chain
    assert same_bits(native.linear(x, native.prepare_linear(weight), bias), got + bias)


def test_small_whole_numbers_are_exact(native: NativeBackend) -> None:
    """Where no product and no sum is rounded, every instruction set and format gives the one right result."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (13, 1100), generator=generator).float()
    weight = torch.randint(-8, 9, (50, 1100), generator=generator).float()
    for dtype in (FP32, FP16, BF16):
        assert torch.equal(native.linear(x, pack(native, weight, dtype)), x @ weight.T)


# ------------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), [(37, 20), (576, 200), (2100, 131)])
def test_a_row_does_not_depend_on_its_batch(
    native: NativeBackend, dtype: torch.dtype, in_features: int, out_features: int
) -> None:
    """Any part of a batch, at any place in another one, gives the rows of the whole."""
    x, packed, bias = (
        draw(140, in_features),
        pack(native, draw(out_features, in_features, seed=1), dtype),
        draw(out_features),
    )
    whole = native.linear(x, packed, bias)
    for rows in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 17, 25, 64, 139):
        for start in (0, 140 - rows):
            assert same_bits(native.linear(x[start : start + rows], packed, bias), whole[start : start + rows])
    order = torch.randperm(140, generator=torch.Generator().manual_seed(0))
    assert same_bits(native.linear(x[order], packed, bias), whole[order])


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 16, 100])
def test_threads_change_no_bit(native: NativeBackend, dtype: torch.dtype, rows: int) -> None:
    x, packed, bias = draw(rows, 1100), pack(native, draw(170, 1100, seed=1), dtype), draw(170)
    assert_same_on_threads(native, lambda ops: (ops.linear(x, packed, bias),))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_packing_on_threads_changes_no_byte(native: NativeBackend, dtype: torch.dtype) -> None:
    def packed(ops: NativeBackend) -> tuple[torch.Tensor, ...]:
        return tuple(ops.linear_tensors(pack(ops, draw(170, 77), dtype)).values())

    assert_same_on_threads(native, packed)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (33, 40), (1025, 193), (3100, 70)])
def test_instruction_sets_agree(dtype: torch.dtype, in_features: int, out_features: int) -> None:
    """Panels of one are those of the other, too: a cache on disk has no instruction set."""
    x, weight, bias = draw(29, in_features), draw(out_features, in_features, seed=1), draw(out_features)

    def run(ops: NativeBackend) -> tuple[torch.Tensor, ...]:
        packed = pack(ops, weight, dtype)
        outputs = [ops.linear(x[:rows], packed, bias) for rows in (1, 2, 4, 7, 12, 13, 29)]
        norms = ops.row_norms(packed, 0, out_features, draw(5, in_features), draw(out_features, 5), 0.7)
        return (*ops.linear_tensors(packed).values(), *outputs, norms)

    assert_same_on_every_isa(run)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_restored_panels_are_the_weight(native: NativeBackend, dtype: torch.dtype) -> None:
    x, packed = draw(5, 66), pack(native, draw(51, 66), dtype)
    restored = native.restore_linear(native.linear_tensors(packed), (51, 66))
    assert same_bits(native.linear(x, restored), native.linear(x, packed))


# ---------------------------------------------------------------------------------------------------------- NaN and Inf


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", [1, 4, 13])
def test_a_bad_row_poisons_itself_only(native: NativeBackend, dtype: torch.dtype, bad: float, rows: int) -> None:
    x, weight = draw(rows, 100), draw(45, 100, seed=1)
    weight[7, 99] = 0  # infinity times 0
    packed = pack(native, weight, dtype)
    clean = native.linear(x, packed)
    row = rows // 2
    x[row, 99] = bad
    got = native.linear(x, packed)
    others = [i for i in range(rows) if i != row]
    assert same_bits(got[others], clean[others])
    if dtype == INT8 or math.isnan(bad):
        assert got[row].isnan().all()
    else:
        exact = x[row].double() @ exact_weight(weight, dtype).T
        torch.testing.assert_close(got[row].double(), exact, equal_nan=True)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_a_bad_weight_poisons_its_column_only(native: NativeBackend, dtype: torch.dtype) -> None:
    x, weight = draw(6, 100), draw(45, 100, seed=1)
    clean = native.linear(x, pack(native, weight, dtype))
    weight[7, 3], weight[20, 0] = torch.nan, torch.inf
    got = native.linear(x, pack(native, weight, dtype))
    others = [i for i in range(45) if i not in (7, 20)]
    assert same_bits(got[:, others], clean[:, others])
    assert got[:, 7].isnan().all()
    assert got[:, 20].isinf().all()


# ---------------------------------------------------------------------------------------------------------- concurrency


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_calls_from_several_threads(native: NativeBackend, dtype: torch.dtype) -> None:
    """Different sizes at once, each call with a team of its own; scratch memory is not shared."""
    ops = NativeBackend(native.library, 2)
    weights = [pack(native, draw(40 + 30 * i, 200 + 70 * i, seed=1), dtype) for i in range(4)]
    inputs = [draw(3 + 5 * i, 200 + 70 * i) for i in range(4)]
    expected = [native.linear(x, packed) for x, packed in zip(inputs, weights, strict=True)]

    def call(i: int) -> bool:
        return same_bits(ops.linear(inputs[i % 4], weights[i % 4]), expected[i % 4])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(80)))


def test_wrong_inputs_are_an_invariant(native: NativeBackend) -> None:
    packed = native.prepare_linear(draw(20, 30))
    for x in (draw(2, 31), draw(2, 30).half(), draw(30, 2).t()):
        with pytest.raises(AssertionError):
            native.linear(x, packed)
