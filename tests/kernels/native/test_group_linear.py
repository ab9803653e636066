"""Linears whose weights have a scale and a zero point for each group, on every instruction set: the reference's
numbers, and bits that nothing around a row changes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.native.choice import open_library
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.native.linear import round_int4
from loraplex.kernels.quantized_weights import GROUP_SIZES, GroupWeight, Int4Weight, Int8GroupWeight, Int8Weight
from tests.kernels.cases import BF16, FP16, FP32, case_id, pairwise, same_bits
from tests.kernels.native.machine import assert_same_on_every_isa, assert_same_on_threads

FORMS: dict[str, tuple[type[GroupWeight], int]] = {
    "int4": (Int4Weight, 16),
    "int4, activations in 8": (Int4Weight, 8),
    "int8": (Int8GroupWeight, 16),
}
DIMENSIONS = {
    "form": tuple(FORMS),
    "group_size": GROUP_SIZES,
    "has_zeros": (False, True),
    "scale": (FP32, FP16, BF16),
    "rows": (0, 1, 2, 5, 6, 7, 12, 13, 33, 130),
    "in_features": (1, 8, 17, 31, 64, 100, 576, 1025, 2100),
    "out_features": (1, 15, 16, 17, 33, 100, 193),
    "layout": ("dense", "strided"),
    "has_bias": (False, True),
}
each_form = pytest.mark.parametrize("form", FORMS)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def weight_of(
    form: str, out: int, in_features: int, group_size: int = 64, has_zeros: bool = True, scale: torch.dtype = FP16
) -> GroupWeight:
    kind, activation_bits = FORMS[form]
    generator = torch.Generator().manual_seed(out + in_features)

    def integers(limits: tuple[int, int], *shape: int) -> torch.Tensor:
        return torch.randint(limits[0], limits[1] + 1, shape, generator=generator)

    groups = out, -(-in_features // group_size)
    q = integers(kind.LIMITS, out, in_features).to(kind.Q_DTYPE)
    zero = integers(kind.ZERO_LIMITS, *groups) if has_zeros else None
    return replace(kind.kept(q, (draw(*groups) / 50).to(scale), zero, group_size), activation_bits=activation_bits)


def kept(native: NativeBackend, weight: GroupWeight) -> Any:
    packed = native.keep_linear(weight)
    assert packed is not None
    return packed


@pytest.mark.parametrize("case", pairwise(DIMENSIONS), ids=case_id)
def test_linear_is_the_references(native: NativeBackend, case: dict[str, Any]) -> None:
    rows, in_features, out = (case[name] for name in ("rows", "in_features", "out_features"))
    weight = weight_of(case["form"], out, in_features, case["group_size"], case["has_zeros"], case["scale"])
    x = draw(rows, in_features) if case["layout"] == "dense" else draw(rows, in_features + 7)[:, 3 : 3 + in_features]
    bias = draw(out, seed=2) if case["has_bias"] else None
    got = native.linear(x, kept(native, weight), bias)
    assert (got.dtype, got.shape) == (FP32, (rows, out))
    numbers = weight.rows(0, out).double()
    exact = x.double() @ numbers.T + (0 if bias is None else bias.double())
    assert ((got - exact).abs() <= largest_error(x, weight) + 2**-23 * exact.abs()).all()
    if rows and weight.activation_bits == 8:  # a number between two integers may fall to the other one
        specified = weight.linear(x.double()) + (0 if bias is None else bias.double())
        assert (got - specified).norm() <= 2e-3 * specified.norm()


def largest_error(x: torch.Tensor, weight: GroupWeight) -> torch.Tensor:
    """[T, out]: half a step of each number of x, its group's largest being 127 or 32767, and roundings of sums."""
    rows, size = weight.rows(0, len(weight.q)).double().abs(), weight.group_size
    bound: torch.Tensor = 2**-20 * (x.double().abs() @ rows.T)
    for k in range(0, x.shape[1], size):
        step = x[:, k : k + size].double().abs().amax(-1) / (127 if weight.activation_bits == 8 else 32767)
        bound += 0.5001 * step[:, None] * rows[:, k : k + size].sum(-1)
    return bound


@each_form
@pytest.mark.parametrize(("in_features", "out_features"), [(37, 20), (576, 200), (2100, 131)])
def test_a_row_does_not_depend_on_its_batch(
    native: NativeBackend, form: str, in_features: int, out_features: int
) -> None:
    x, bias = draw(140, in_features), draw(out_features)
    for has_zeros in (False, True):
        packed = kept(native, weight_of(form, out_features, in_features, 32, has_zeros))
        whole = native.linear(x, packed, bias)
        for rows in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 17, 25, 64, 139):
            for start in (0, 140 - rows):
                assert same_bits(native.linear(x[start : start + rows], packed, bias), whole[start : start + rows])


@each_form
def test_threads_and_instruction_sets_change_no_bit(form: str) -> None:
    weight = weight_of(form, 170, 1100)

    def run(ops: NativeBackend) -> tuple[torch.Tensor, ...]:
        packed = kept(ops, weight)
        outputs = [ops.linear(draw(rows, 1100), packed, draw(170)) for rows in (1, 5, 16, 100)]
        norms = ops.row_norms(packed, 3, 165, draw(5, 1100), draw(162, 5), 0.7)
        return (*ops.linear_tensors(packed).values(), *outputs, norms)

    assert_same_on_every_isa(run)
    library = open_library()
    assert isinstance(library, NativeLibrary)
    assert_same_on_threads(NativeBackend(library, 1), run)


@each_form
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("in_features", [1, 33, 64, 65, 130, 1536])
def test_restored_panels_are_the_weight(native: NativeBackend, form: str, group_size: int, in_features: int) -> None:
    """Of its size of groups and of its activations, too."""
    for has_zeros in (False, True):
        packed = kept(native, weight_of(form, 51, in_features, group_size, has_zeros))
        restored = native.restore_linear(native.linear_tensors(packed), (51, in_features))
        assert restored.format == packed.format
        assert same_bits(native.linear(draw(5, in_features), restored), native.linear(draw(5, in_features), packed))


@each_form
@pytest.mark.parametrize("has_zeros", [False, True])
def test_parts_and_rows_of_a_weight(native: NativeBackend, form: str, has_zeros: bool) -> None:
    weight, x = weight_of(form, 100, 130, 32, has_zeros), draw(7, 130)
    packed = kept(native, weight)
    whole = native.linear(x, packed)
    for first, last in ((0, 16), (16, 100), (48, 51)):
        assert same_bits(native.linear(x, native.linear_rows(packed, first, last)), whole[:, first:last])
    assert native.linear_rows(packed, 8, 100) is None
    ids = torch.tensor([99, 0, 17, 17])
    assert torch.equal(native.embedding(ids, packed), weight.rows(0, 100)[ids])
    a, b = draw(3, 130), draw(90, 3)
    want = (weight.rows(5, 95).double() + 0.5 * b.double() @ a.double()).norm(dim=1)
    torch.testing.assert_close(native.row_norms(packed, 5, 95, a, b, 0.5).double(), want, rtol=1e-5, atol=0)


@each_form
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_row_poisons_itself_only(native: NativeBackend, form: str, bad: float) -> None:
    packed, x = kept(native, weight_of(form, 45, 100, 32)), draw(13, 100)
    clean = native.linear(x, packed)
    x[6, 99] = bad
    got = native.linear(x, packed)
    others = [i for i in range(13) if i != 6]
    assert same_bits(got[others], clean[others])
    assert got[6].isnan().all()


@each_form
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_the_largest_numbers_do_not_overflow(native: NativeBackend, form: str, group_size: int) -> None:
    """Every product of a group is the largest there is, with the zero point at the other end."""
    kind, activation_bits = FORMS[form]
    least, largest = kind.LIMITS
    for q, zero in ((largest, kind.ZERO_LIMITS[0]), (least, kind.ZERO_LIMITS[1])):
        weight = kind(
            torch.full((20, 2048), q, dtype=kind.Q_DTYPE),
            torch.ones(20, 2048 // group_size),
            torch.full((20, 2048 // group_size), zero),
            group_size,
            activation_bits,
        )
        for sign in (1, -1):
            got = native.linear(torch.full((7, 2048), 3.0 * sign), kept(native, weight))
            torch.testing.assert_close(got, torch.full((7, 20), 2048 * 3.0 * sign * (q - zero)), rtol=1e-5, atol=0)


@each_form
def test_an_outlier_is_its_groups_alone(native: NativeBackend, form: str) -> None:
    """A scale for each group of a row: a number 10,000 times the others takes no bits from those of other groups."""
    weight = weight_of(form, 64, 512, 32, False)
    weight = replace(weight, q=weight.q.clone())
    weight.q[:, 5] = weight.ZERO
    x = draw(4, 512)
    x[:, 5] = 1e4
    exact = x.double() @ weight.rows(0, 64).double().T
    error = (native.linear(x, kept(native, weight)) - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error <= (0.04 if weight.activation_bits == 16 else 0.3)  # of 16 groups that one is lost with 8 bits


@each_form
def test_calls_from_several_threads(native: NativeBackend, form: str) -> None:
    ops = NativeBackend(native.library, 2)
    weights = [kept(native, weight_of(form, 40 + 30 * i, 200 + 70 * i)) for i in range(4)]
    inputs = [draw(3 + 5 * i, 200 + 70 * i) for i in range(4)]
    expected = [native.linear(x, packed) for x, packed in zip(inputs, weights, strict=True)]

    def call(i: int) -> bool:
        return same_bits(ops.linear(inputs[i % 4], weights[i % 4]), expected[i % 4])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(80)))


def test_int8_with_a_scale_per_output_is_kept(native: NativeBackend) -> None:
    """A checkpoint's integers, that rounding again would change."""
    for out, in_features in ((33, 37), (16, 64), (1, 1)):
        q = torch.randint(-128, 128, (out, in_features), generator=torch.Generator().manual_seed(0)).to(torch.int8)
        weight, x = Int8Weight(q, draw(out).abs()), draw(5, in_features)
        want = weight.linear(x.double())
        torch.testing.assert_close(native.linear(x, native.keep_linear(weight)).double(), want, rtol=1e-4, atol=1e-3)


def test_groups_of_another_size_are_not_kept(native: NativeBackend) -> None:
    assert native.keep_linear(weight_of("int4", 20, 100, 16)) is None
    assert native.keep_linear(replace(weight_of("int8", 20, 100, 32), activation_bits=8)) is None


# ------------------------------------------------------------------------------------------------------------ rounding


@settings(max_examples=60, deadline=None)
@given(
    out=st.integers(1, 20),
    in_features=st.integers(1, 200),
    group_size=st.sampled_from(GROUP_SIZES),
    magnitude=st.sampled_from([1e-9, 1e-4, 1.0, 1e4, 1e7]),
    seed=st.integers(0, 99),
)
def test_rounding_errs_no_more_than_the_largest_number_over_minus_8(
    out: int, in_features: int, group_size: int, magnitude: float, seed: int
) -> None:
    library = open_library()
    if not isinstance(library, NativeLibrary):
        pytest.skip(library.reason)
    weight = draw(out, in_features, seed=seed) * magnitude
    rounded = round_int4(library, weight, group_size, 8, 1)
    assert int(rounded.q.max()) <= 15
    assert NativeBackend(library, 1).keep_linear(rounded) is not None
    plain = Int4Weight.of(weight, group_size)

    def squared(each: Int4Weight) -> float:
        return float((each.rows(0, out) - weight).double().square().sum())

    in_f16 = replace(plain, scale=plain.scale.half().float()) if 1e-3 < magnitude < 1e5 else plain
    assert squared(rounded) <= 1.001 * squared(in_f16) + 1e-12 * float(weight.double().square().sum())


def test_rounding_less_than_plainly(native: NativeBackend) -> None:
    weight = draw(64, 1024)
    error = [
        float((each.rows(0, 64) - weight).square().mean().sqrt())
        for each in (round_int4(native.library, weight, 64, 8, 1), Int4Weight.of(weight, 64))
    ]
    assert error[0] < 0.96 * error[1]
    assert error[0] < 0.092


def test_rounding_on_threads_and_instruction_sets_changes_no_byte() -> None:
    weight = draw(170, 300)

    def run(ops: NativeBackend) -> tuple[torch.Tensor, ...]:
        rounded = round_int4(ops.library, weight, 64, 8, ops.num_threads)
        return rounded.q, rounded.scale

    assert_same_on_every_isa(run)
    library = open_library()
    assert isinstance(library, NativeLibrary)
    assert_same_on_threads(NativeBackend(library, 1), run)


def test_zeros_and_numbers_that_are_none(native: NativeBackend) -> None:
    weight = draw(20, 130)
    weight[3], weight[4, :64] = 0, 0
    weight[7, 5], weight[8, 70] = torch.nan, torch.inf
    rounded = round_int4(native.library, weight, 64, 8, 1)
    rows = rounded.rows(0, 20)
    assert not rows[3].any()
    assert not rows[4, :64].any()
    assert not rows[7, :64].isfinite().any()
    assert not rows[8, 64:128].isfinite().any()
    others = [n for n in range(20) if n not in (7, 8)]
    assert rows[others].isfinite().all()
    assert native.linear(draw(2, 130), native.prepare_linear(weight, "int4"))[:, 7].isnan().all()


@pytest.mark.parametrize(("magnitude", "dtype"), [(1.0, FP16), (1e-9, FP32), (1e7, FP32)])
def test_a_scale_that_float16_has_not_is_in_float32(
    native: NativeBackend, magnitude: float, dtype: torch.dtype
) -> None:
    weight, x = draw(40, 200) * magnitude, draw(3, 200)
    packed = native.prepare_linear(weight, "int4-a16")
    assert packed.scale.dtype == dtype
    exact = x @ weight.T
    assert (native.linear(x, packed) - exact).norm() <= 0.12 * exact.norm()
