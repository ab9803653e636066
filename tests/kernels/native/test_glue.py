"""Norms and SiLU of the native backend: the formula in float64, NaN and Inf as in the reference, and bits that never
change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.reference import ReferenceBackend
from tests.kernels.cases import assert_close, same_bits
from tests.kernels.native.machine import assert_same_on_every_isa, assert_same_on_threads

SIZES = (1, 3, 15, 16, 17, 63, 64, 65, 129, 576, 1000)
LARGE = (257, 1001)
"""Rows and columns that are worth threads."""

REFERENCE = ReferenceBackend()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rms_norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def all_ops(native: NativeBackend, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Every operator on the rows of x [T, 2 I]."""
    weight = draw(x.shape[1], seed=1)
    return (
        native.rms_norm(x, weight, 1e-5),
        *native.add_rms_norm(x.clone(), x.flip(1), weight, 1e-5),
        *native.add_rms_norm(x.clone(), x.flip(1), weight, 1e-5, 0.3),
        native.add_scaled(x, x.flip(1), 0.3),
        *(native.layer_norm(x, weight, bias, 1e-5) for bias in (None, weight.flip(0))),
        native.silu_mul(x),
        *(native.gelu(x, is_tanh, has_up) for is_tanh in (False, True) for has_up in (False, True)),
    )


# ------------------------------------------------------------------------------------------------------------- formulas


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 64])
def test_rms_norm(native: NativeBackend, num_tokens: int, size: int) -> None:
    wide, weight = 3 * draw(num_tokens, size + 5), draw(size, seed=1)
    for x in (wide[:, 3 : 3 + size], wide[:, 3 : 3 + size].contiguous(), wide[::2, :size]):
        before = x.clone()
        got = native.rms_norm(x, weight, 1e-5)
        assert got.shape == x.shape
        assert got.is_contiguous()
        assert_close(got, rms_norm64(x, weight, 1e-5), torch.float32)
        assert same_bits(x, before)


@pytest.mark.parametrize("shape", [(24,), (5, 24), (4, 3, 24), (2, 3, 4, 24)])
def test_any_leading_dimensions(native: NativeBackend, shape: tuple[int, ...]) -> None:
    x, weight = draw(*shape), draw(24, seed=1)
    got = native.rms_norm(x, weight, 1e-6)
    assert got.shape == shape
    assert same_bits(got.view(-1, 24), native.rms_norm(x.view(-1, 24), weight, 1e-6))


@pytest.mark.parametrize("head_dim", [16, 80, 37])
def test_heads_inside_a_fused_output(native: NativeBackend, head_dim: int) -> None:
    qkv, weight = draw(7, 5 * head_dim), draw(head_dim, seed=1)
    k = qkv[:, 2 * head_dim : 4 * head_dim].view(7, 2, head_dim)
    expected = native.rms_norm(k.contiguous().view(-1, head_dim), weight, 1e-6).view(7, 2, head_dim)
    assert same_bits(native.rms_norm(k, weight, 1e-6), expected)


def test_columns_need_not_be_dense(native: NativeBackend) -> None:
    x, weight = draw(40, 6).t(), draw(40, seed=1)
    assert x.stride(1) != 1
    assert same_bits(native.rms_norm(x, weight, 1e-5), native.rms_norm(x.contiguous(), weight, 1e-5))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 64])
def test_add_rms_norm(native: NativeBackend, num_tokens: int, size: int) -> None:
    """Both results are in the memory of the arguments, and nothing beside them is written."""
    around_x, around_residual = (torch.full((num_tokens + 2, size + 6), torch.nan) for _ in range(2))
    x, residual = around_x[1:-1, 3:-3], around_residual[1:-1, 2:-4]
    x.copy_(draw(num_tokens, size))
    residual.copy_(draw(num_tokens, size, seed=1))
    weight, total = draw(size, seed=2), x + residual
    normed, new_residual = native.add_rms_norm(x, residual, weight, 1e-5)
    assert (normed.data_ptr(), new_residual.data_ptr()) == (x.data_ptr(), residual.data_ptr())
    assert same_bits(new_residual, total)
    assert same_bits(normed, native.rms_norm(total, weight, 1e-5))
    for around, inner in ((around_x, x), (around_residual, residual)):
        assert int(around.isnan().sum()) == around.numel() - inner.numel()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 64])
def test_silu_mul(native: NativeBackend, num_tokens: int, size: int) -> None:
    wide = 5 * draw(num_tokens, 2 * size + 3)
    for gate_up in (wide[:, 1 : 1 + 2 * size], wide[:, : 2 * size].contiguous()):
        before, (gate, up) = gate_up.clone(), gate_up.double().chunk(2, dim=-1)
        got = native.silu_mul(gate_up)
        assert got.shape == (num_tokens, size)
        assert_close(got, gate * torch.sigmoid(gate) * up, torch.float32)
        assert same_bits(gate_up, before)


def test_silu_is_accurate_everywhere(native: NativeBackend) -> None:
    gate = torch.linspace(-110, 110, 44_001)
    got = native.silu_mul(torch.cat((gate, torch.ones_like(gate)))[None])[0].double()
    expected = gate.double() * torch.sigmoid(gate.double())
    torch.testing.assert_close(got, expected, rtol=5e-7, atol=1e-36)


# ---------------------------------------------------------------------------------------------------------- NaN and Inf


@pytest.mark.parametrize("is_tanh", [False, True])
def test_gelu_is_accurate_everywhere(native: NativeBackend, is_tanh: bool) -> None:
    x = torch.cat([torch.linspace(-30, 30, 100_001), torch.tensor([0.0, -0.0, 1e-30, 3e38, -3e38])])[None]
    expected = F.gelu(x.double(), approximate="tanh" if is_tanh else "none")
    got = native.gelu(x, is_tanh, has_up=False).double()
    assert ((got - expected).abs() <= 4e-7 * x.double().abs().clamp(1e-30, 8)).all()
    assert native.gelu(torch.tensor([[torch.nan]]), is_tanh, has_up=False).isnan().all()


@pytest.mark.parametrize("size", SIZES)
def test_layer_norm(native: NativeBackend, size: int) -> None:
    x, weight, bias = 3 * draw(5, size + 3)[:, 2 : 2 + size] + 2, draw(size, seed=1), draw(size, seed=2)
    for own in (None, bias):
        expected = F.layer_norm(x.double(), (size,), weight.double(), None if own is None else own.double(), 1e-5)
        assert_close(native.layer_norm(x, weight, own, 1e-5), expected, torch.float32)


def test_rms_norm_of_extremes_is_the_reference(native: NativeBackend) -> None:
    x = draw(8, 37)
    x[1, 5], x[2, 30], x[3, 36], x[4, 0] = torch.nan, torch.inf, -torch.inf, 3e38
    x[5], x[6] = 0, 1e-30
    weight = draw(37, seed=1)
    expected = REFERENCE.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(native.rms_norm(x, weight, 1e-5), expected, equal_nan=True)
    normed, total = native.add_rms_norm(x.clone(), torch.zeros_like(x), weight, 1e-5)
    torch.testing.assert_close(normed, expected, equal_nan=True)
    assert torch.equal(total.nan_to_num(), x.nan_to_num())


@pytest.mark.parametrize("size", [1, 5, 16, 37])
def test_silu_mul_of_extremes_is_the_reference(native: NativeBackend, size: int) -> None:
    values = torch.tensor(
        [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, -1.0, 3e38, -3e38, 1e-40, -90.0, -87.5, 200.0]
    )
    for gate in values:
        for up in values:
            gate_up = torch.cat((gate.expand(size), up.expand(size)))[None]
            expected = REFERENCE.silu_mul(gate_up)
            torch.testing.assert_close(native.silu_mul(gate_up), expected, equal_nan=True, atol=1e-30, rtol=2e-6)


# ------------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("size", [2, 30, 128, 1152])
def test_a_row_does_not_depend_on_its_neighbours(native: NativeBackend, size: int) -> None:
    x = draw(33, size)
    together = all_ops(native, x)
    neighbours = torch.full_like(x, torch.nan)
    for i in (0, 13, 32):
        neighbours[i] = x[i]
        for alone, poisoned, row in zip(
            all_ops(native, x[i : i + 1]), all_ops(native, neighbours), together, strict=True
        ):
            assert same_bits(alone[0], row[i])
            assert same_bits(poisoned[i], row[i])
        neighbours[i] = torch.nan


def test_threads_change_no_bit(native: NativeBackend) -> None:
    rows, columns = LARGE
    assert_same_on_threads(native, lambda ops: all_ops(ops, draw(rows, 2 * columns)))


@pytest.mark.parametrize("size", SIZES)
def test_instruction_sets_agree(size: int) -> None:
    assert_same_on_every_isa(lambda ops: all_ops(ops, 4 * draw(5, 2 * size)))


def test_other_dtypes_are_an_invariant(native: NativeBackend) -> None:
    x = draw(2, 32)
    calls: tuple[Callable[[], object], ...] = (
        lambda: native.rms_norm(x.half(), x[0], 1e-5),
        lambda: native.add_rms_norm(x, x.bfloat16(), x[0], 1e-5),
        lambda: native.silu_mul(x.double()),
    )
    for call in calls:
        with pytest.raises(AssertionError):
            call()


def test_silu_mul_is_the_activation_of_hugging_face(native: NativeBackend) -> None:
    gate_up = draw(9, 2 * 77)
    assert_close(native.silu_mul(gate_up), F.silu(gate_up[:, :77]) * gate_up[:, 77:])
