"""Integers and scales as a checkpoint has them: what is taken, how it is cut, and what a backend keeps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.kernels.ops import get_backend
from loraplex.kernels.quantized_linear import QuantizedWeight
from loraplex.kernels.quantized_weights import (
    GroupWeight,
    Int4Weight,
    Int8GroupWeight,
    Int8Weight,
    kv_head_dim,
    kv_width,
    read_int8_kv,
    write_int8_kv,
)

CPU = torch.device("cpu")


def draw(out: int, in_features: int, group_size: int, kind: type[GroupWeight] = Int4Weight) -> GroupWeight:
    generator = torch.Generator().manual_seed(0)
    least, largest = kind.LIMITS
    groups = out, -(-in_features // group_size)
    q = torch.randint(least, largest + 1, (out, in_features), generator=generator).to(kind.Q_DTYPE)
    zero = torch.randint(0, 16, groups, generator=generator)
    return kind.kept(q, torch.randn(*groups, generator=generator), zero, group_size)


@pytest.mark.parametrize("kind", [Int4Weight, Int8GroupWeight])
@pytest.mark.parametrize("group_size", [1, 7, 32, 128])
def test_numbers_are_those_of_the_formula(kind: type[GroupWeight], group_size: int) -> None:
    weight = draw(5, 40, group_size, kind)
    rows, x = weight.rows(0, 5), torch.randn(3, 40)
    assert weight.zero is not None
    for n, k in ((0, 0), (4, 39), (2, 33)):
        g = k // group_size
        assert rows[n, k] == (weight.q[n, k].float() - weight.zero[n, g]) * weight.scale[n, g]
    assert torch.equal(weight.rows(2, 4), rows[2:4])
    torch.testing.assert_close(weight.linear(x), x @ rows.T, rtol=1e-4, atol=1e-4)


def test_without_zero_points_there_is_one() -> None:
    q, scale = torch.tensor([[0, 15]], dtype=torch.uint8), torch.ones(1, 1)
    assert Int4Weight.kept(q, scale).rows(0, 1).tolist() == [[-8, 7]]
    assert Int8GroupWeight.kept(q.to(torch.int8), scale).rows(0, 1).tolist() == [[0, 15]]


def test_cuts_are_parts_of_the_numbers() -> None:
    weight = draw(20, 100, 32)
    whole = weight.rows(0, 20)
    assert torch.equal(weight.cut_rows(3, 9).rows(0, 6), whole[3:9])
    for first, last in ((0, 32), (32, 100), (64, 96), (0, 100)):
        assert torch.equal(weight.cut_inputs(first, last).rows(0, 20), whole[:, first:last])
    for first, last in ((16, 32), (0, 50), (96, 99)):
        with pytest.raises(ValueError, match=f"inputs {first}..{last} of 100 cut a group of 32; take a tensor_paral"):
            weight.cut_inputs(first, last)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 64)}, "integers must be torch.uint8"),
        ({"q": torch.zeros(4, 0, dtype=torch.uint8)}, r"got torch.uint8 \[4, 0\]"),
        ({"q": torch.full((4, 64), 16, dtype=torch.uint8)}, "integers must be in 0..15, got 16..16"),
        ({"scale": torch.ones(4, 3)}, r"must be floats \[4, 2\], got torch.float32 \[4, 3\]"),
        ({"scale": torch.ones(4, 2, dtype=torch.int32)}, "got torch.int32"),
        ({"zero": torch.ones(4, 2)}, "zero points must be integers"),
        ({"zero": torch.ones(2, 4, dtype=torch.int32)}, r"zero points must be integers \[4, 2\]"),
        ({"zero": torch.full((4, 2), 17)}, "zero points must be in 0..16, got 17..17"),
        ({"group_size": 0}, "got group_size 0"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    arguments = {"q": torch.zeros(4, 64, dtype=torch.uint8), "scale": torch.ones(4, 2), "zero": None, "group_size": 32}
    Int4Weight.kept(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        Int4Weight.kept(**(arguments | change))  # type: ignore[arg-type]


def test_activations_in_8_bits_are_rounded_group_by_group() -> None:
    q, scale = torch.full((1, 64), 9, dtype=torch.uint8), torch.ones(1, 2)
    x = torch.cat((torch.full((1, 32), 127.0), torch.full((1, 32), 0.001)), dim=1)
    x[0, :3] = torch.tensor([1.4, 1.6, -126.6])
    rounded = Int4Weight(q, scale, None, 32, activation_bits=8).linear(x)
    assert rounded.item() == pytest.approx(29 * 127 + 1 + 2 - 127 + 0.032, rel=1e-6)
    assert Int4Weight(q, scale, None, 32).linear(x).item() == pytest.approx(29 * 127 + 1.4 + 1.6 - 126.6 + 0.032)


def test_the_reference_keeps_all_and_stock_torch_none() -> None:
    weight = draw(20, 100, 32)
    assert get_backend("reference", CPU).keep_linear(weight) is weight
    assert get_backend("torch", CPU).keep_linear(weight) is None


def test_what_the_layout_of_a_gpu_keeps() -> None:
    """The numbers as they are, of the groups that it has."""
    plain = Int4Weight.kept(draw(20, 300, 128).q, torch.randn(20, 3, dtype=torch.float64).half())
    packed = QuantizedWeight.keeping(plain)
    assert packed is not None
    assert (packed.quantization, packed.scale.dtype) == ("int4", torch.float16)
    assert torch.equal(packed.rows(0, 20), plain.rows(0, 20))
    of_outputs = Int8Weight(torch.randint(-128, 128, (20, 300)).to(torch.int8), torch.rand(20))
    kept = QuantizedWeight.keeping(of_outputs)
    assert kept is not None
    assert torch.equal(kept.rows(0, 20), of_outputs.rows(0, 20))
    others = (
        draw(20, 300, 128),
        Int4Weight(plain.q, torch.ones(20, 10), None, 32),
        draw(20, 300, 128, Int8GroupWeight),
    )
    for other in (*others, Int4Weight(plain.q, plain.scale, None, 128, activation_bits=8)):
        assert QuantizedWeight.keeping(other) is None


# ---------------------------------------------------------------------------------------------------- keys and values


def written(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[2, T, KH, D] as a cache of int8 has them, in blocks of 8."""
    num_tokens, num_heads, head_dim = k.shape
    kv_layer = torch.zeros(-(-num_tokens // 8), 2, num_heads, 8, kv_width(head_dim, torch.int8), dtype=torch.int8)
    write_int8_kv(k, v, kv_layer, torch.arange(num_tokens))
    held = read_int8_kv(kv_layer.flatten(3), head_dim)
    return held.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :num_tokens]


TOKENS = st.lists(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=4, max_size=4), min_size=1, max_size=9)
"""Numbers whose quotient times the scale, which is rounded, is finite: the largest float32 comes back as Inf."""


@given(tokens=TOKENS)
def test_a_number_of_a_key_moves_by_half_a_step_at_most(tokens: list[list[float]]) -> None:
    k = torch.tensor(tokens)[:, None]
    keys, values = written(k, k.flip(-1))
    step = k.double().abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    for got, expected in ((keys, k), (values, k.flip(-1))):
        assert ((got.double() - expected.double()).abs() <= step * (0.5 + 1e-4)).all()  # of quotients near 127


@given(tokens=TOKENS)
def test_a_tokens_scale_is_of_that_token_alone(tokens: list[list[float]]) -> None:
    k = torch.tensor(tokens)[:, None]
    together = written(k, -k)
    for t in range(len(tokens)):
        assert torch.equal(written(k[t : t + 1], -k[t : t + 1])[:, 0], together[:, t])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_makes_its_token_none_and_no_other(bad: float) -> None:
    k = torch.tensor([[[1.0, bad]], [[1.0, 2.0]]])
    keys, values = written(k, torch.ones(2, 1, 2))
    assert not keys[0].isfinite().any()
    assert keys[1].isfinite().all()
    assert values.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8], ids=str)
def test_a_layer_says_what_its_heads_are(dtype: torch.dtype) -> None:
    kv_layer = torch.zeros(3, 2, 1, 16, kv_width(24, dtype), dtype=dtype)
    assert kv_head_dim(kv_layer) == 24
    assert kv_layer.nbytes == 3 * 2 * 16 * (24 * dtype.itemsize + (4 if dtype is torch.int8 else 0))
