"""The native sampler's operators against stock torch, bit for bit, and the same tokens for the same seeds."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.engine.sampler import Sampler, SamplingRow
from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.reference import ReferenceBackend
from loraplex.kernels.token_ranking import WeightRule
from loraplex.kernels.torch_ops import TorchBackend
from tests.engine.test_sampler import normal_logits, params_strategy, row
from tests.kernels.cases import same_bits
from tests.kernels.native.machine import assert_same_on_every_isa, assert_same_on_threads

TORCH = TorchBackend()
SIZES = (1, 2, 15, 16, 17, 100, 511, 1024, 1025, 5003, 70_001)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_p": 0.99},
    {"top_k": 50},
    {"top_k": 300, "top_p": 0.8},
    {"min_p": 0.05},
    {"min_p": 0.001, "top_p": 0.95, "temperature": 1.5},
)


def values_of(kind: str, num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Logits, normal ones or such with hard places."""
    x = normal_logits(num_rows, vocab_size, seed)
    if kind == "tied":
        x = x.round()
    elif kind == "flat":
        x = torch.ones_like(x)
    elif kind == "zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    elif kind == "masked":
        x[x < 1] = -torch.inf
        x[:, 0] = 1
    elif kind == "extreme":
        x *= 2e37
        x[:, vocab_size // 2 + 1 :] = -torch.inf
    return x


KINDS = ("normal", "tied", "flat", "zeros", "masked", "extreme")


def rule_of(x: torch.Tensor, temperature: float = 0.8) -> WeightRule:
    scale = 2.0 ** (53 - int(x.shape[1]).bit_length())
    return WeightRule(x.amax(-1, keepdim=True), torch.full((len(x), 1), temperature), scale)


def uniforms_of(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random((num_rows, 1)))


def all_ops(ops: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Every operator on the rows of x."""
    weights, total = ops.token_weights(x, rule_of(x))
    nucleus = ops.keep_nucleus(x, weights.clone(), 0.9 * total, rule_of(x))
    drawn = ops.invert_cdf(weights.clone(), torch.full((len(x), 1), 3.0), uniforms_of(len(x)))
    ids, top = ops.row_argmax(x)
    ranks = ops.token_ranks(x, ids // 2)
    return weights, total, nucleus, drawn, ids, top, ranks, *ops.ordered_top_k(x, min(40, x.shape[1]))


@pytest.mark.parametrize("num_words", [1, 3, 40])
@pytest.mark.parametrize("vocab_size", SIZES)
def test_a_mask_is_that_of_its_definition(native: NativeBackend, vocab_size: int, num_words: int) -> None:
    x = values_of("normal", 4, vocab_size)
    x[1, 0], x[1, -1], x[3, 0] = torch.nan, torch.inf, -0.0
    bits = np.random.default_rng(vocab_size).integers(-(2**31), 2**31, (2, num_words))
    rows, bitmask = torch.tensor([3, 1]), torch.from_numpy(bits.astype(np.int32))
    expected = x.clone()
    ReferenceBackend().mask_logits(expected, rows, bitmask)
    assert same_bits(expected[[0, 2]], x[[0, 2]]), "no mask"
    for ops in (native, TORCH):
        got = x.clone()
        ops.mask_logits(got, rows, bitmask)
        assert torch.equal(got.isnan(), expected.isnan())
        assert same_bits(got.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


# ---------------------------------------------------------------------------------------------- as stock torch does it


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_operator_is_that_of_torch(native: NativeBackend, kind: str, vocab_size: int) -> None:
    x = values_of(kind, 3, vocab_size)
    for got, expected in zip(all_ops(native, x), all_ops(TORCH, x), strict=True):
        assert same_bits(got, expected.to(got.dtype)) or torch.equal(got, expected)  # the sign of a zero is free
    torch.testing.assert_close(native.log_sum_exp(x), TORCH.log_sum_exp(x), rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-5, 0.3, 1.0, 2.0, 1e30])
def test_weights_have_the_bits_of_torch(native: NativeBackend, temperature: float) -> None:
    x = normal_logits(4, 20_011)
    weights, total = native.token_weights(x, rule_of(x, temperature))
    expected, expected_total = TORCH.token_weights(x, rule_of(x, temperature))
    assert same_bits(weights, expected)
    assert same_bits(total, expected_total)


@pytest.mark.parametrize("place", [0, 40, 63, 64, 699])
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_argmax_of_nan_and_infinity(native: NativeBackend, place: int, value: float) -> None:
    x = normal_logits(3, 700)
    x[1, place] = value
    (ids, top), (expected_ids, expected_top) = native.row_argmax(x), TORCH.row_argmax(x)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(top, expected_top, equal_nan=True, rtol=0, atol=0)


def test_argmax_of_nothing_finite(native: NativeBackend) -> None:
    x = torch.full((2, 100), -torch.inf)
    x[1, 7:] = torch.nan
    ids, top = native.row_argmax(x)
    assert ids.tolist() == [0, 7]
    assert top[0] == -torch.inf
    assert top[1].isnan()


@pytest.mark.parametrize("k", [1, 2, 63, 128, 500, 2000, 5003])
@pytest.mark.parametrize("kind", KINDS)
def test_top_k(native: NativeBackend, kind: str, k: int) -> None:
    x = values_of(kind, 2, 5003)
    for got, expected in zip(native.ordered_top_k(x, k), TORCH.ordered_top_k(x, k), strict=True):
        assert torch.equal(got, expected)


def test_top_k_of_nan_is_some_tokens(native: NativeBackend) -> None:
    x = normal_logits(2, 3000)
    x[0, 10:200] = torch.nan
    x[1] = torch.nan
    values, ids = native.ordered_top_k(x, 20)
    assert values[0].isnan().all()
    assert ids.tolist() == [list(range(10, 30)), list(range(20))]


@pytest.mark.parametrize("top_p", [1e-12, 0.01, 0.3, 0.9, 0.9999, 1 - 2**-53])
@pytest.mark.parametrize("kind", KINDS)
def test_nucleus(native: NativeBackend, kind: str, top_p: float) -> None:
    x = values_of(kind, 3, 3001, seed=4)
    weights, total = TORCH.token_weights(x, rule_of(x, 1.5))
    wanted = top_p * total
    got = native.keep_nucleus(x, weights.clone(), wanted, rule_of(x))
    assert same_bits(got, TORCH.keep_nucleus(x, weights.clone(), wanted, rule_of(x, 1.5)))


# ------------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("vocab_size", [17, 5003])
def test_a_row_does_not_depend_on_its_neighbours(native: NativeBackend, vocab_size: int) -> None:
    x = normal_logits(6, vocab_size)
    together = native.token_weights(x, rule_of(x)), native.log_sum_exp(x), native.ordered_top_k(x, 9)
    for i in range(6):
        one = x[i : i + 1]
        alone = native.token_weights(one, rule_of(one)), native.log_sum_exp(one), native.ordered_top_k(one, 9)
        assert same_bits(alone[0][0][0], together[0][0][i])
        assert same_bits(alone[1][0], together[1][i])
        assert same_bits(alone[2][1][0], together[2][1][i])


def test_threads_change_no_bit(native: NativeBackend) -> None:
    x = normal_logits(7, 40_011)
    assert_same_on_threads(native, lambda ops: (*all_ops(ops, x), ops.log_sum_exp(x)))


@pytest.mark.parametrize("kind", KINDS)
def test_instruction_sets_agree(kind: str) -> None:
    for vocab_size in (5, 1000, 20_011):
        x = values_of(kind, 3, vocab_size)
        assert_same_on_every_isa(lambda ops, x=x: (*all_ops(ops, x), ops.log_sum_exp(x)))  # type: ignore[misc]


def test_strided_rows(native: NativeBackend) -> None:
    wide = normal_logits(4, 3000)
    for x in (wide[:, 7:2007], wide[::2, :1001], wide.t()[:, :2]):
        for got, expected in zip(all_ops(native, x), all_ops(native, x.contiguous()), strict=True):
            assert same_bits(got, expected)


# ------------------------------------------------------------------------------------------------------------- tokens


def assert_same_tokens(native: NativeBackend, logits: torch.Tensor, rows: list[SamplingRow]) -> None:
    vocab_size = logits.shape[1]
    got = Sampler(vocab_size, native).sample(logits.clone(), rows)
    expected = Sampler(vocab_size, TORCH).sample(logits.clone(), rows)
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    assert got.failed_rows == expected.failed_rows
    for ours, theirs in zip(got.logprobs, expected.logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is None or theirs is None:
            continue
        assert {i: entry.rank for i, entry in ours.items()} == {i: entry.rank for i, entry in theirs.items()}
        for i, entry in ours.items():
            assert entry.logprob == pytest.approx(theirs[i].logprob, abs=2e-6)


@given(seed=st.integers(0, 2**32), options=st.lists(params_strategy(700), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_same_tokens_for_any_parameters(native: NativeBackend, seed: int, options: list[dict[str, Any]]) -> None:
    assert_same_tokens(native, normal_logits(len(options), 700, seed), [row(**one) for one in options])


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 10.0])
def test_same_tokens_over_a_large_vocabulary(native: NativeBackend, scale: float) -> None:
    rows = [row(position, seed, logprobs=3, **one) for position in range(3) for seed, one in enumerate(OPTIONS)]
    assert_same_tokens(native, normal_logits(len(rows), 49_152, seed=9, scale=scale), rows)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_fail_are_those_of_torch(native: NativeBackend, bad: float) -> None:
    rows = [row(i, seed=i, **one) for i, one in enumerate(OPTIONS)]
    logits = normal_logits(len(rows), 1001)
    logits[2, 500] = bad
    logits[5] = bad
    assert_same_tokens(native, logits, rows)


def test_prompt_logprobs(native: NativeBackend) -> None:
    logits, next_ids = normal_logits(40, 3001), list(range(0, 3000, 75))
    got, expected = (Sampler(3001, ops).prompt_logprobs(logits, next_ids, 5) for ops in (native, TORCH))
    for ours, theirs in zip(got, expected, strict=True):
        assert list(ours) == list(theirs)
        for i, entry in ours.items():
            assert entry.logprob == pytest.approx(theirs[i].logprob, abs=2e-6)
            assert dataclasses.replace(entry, logprob=0.0) == dataclasses.replace(theirs[i], logprob=0.0)
