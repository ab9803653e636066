"""The operators for a device beside the host, on CPU tensors: the host's results, bit for bit, with many ties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.kernels import device_ranking, token_ranking
from tests.kernels.test_token_ranking import SIZES, tied_rows


@pytest.mark.parametrize("vocab_size", [*SIZES, 70_001])
def test_row_argmax(vocab_size: int) -> None:
    x = tied_rows(vocab_size, 9, vocab_size)
    for own, other in zip(device_ranking.row_argmax(x), token_ranking.row_argmax(x), strict=True):
        assert torch.equal(own, other)


def test_row_argmax_finds_nan() -> None:
    x = torch.zeros(3, 1000)
    x[1, 700] = torch.nan
    assert device_ranking.row_argmax(x)[1].isnan().tolist() == [False, True, False]


@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([*SIZES, 5003, 20_001]),
    k=st.sampled_from([1, 2, 20, 64, 65, 128, 256, 257, 1100]),
    num_values=st.sampled_from([1, 7, 5000]),
)
@settings(max_examples=80, deadline=None)
def test_ordered_top_k(seed: int, vocab_size: int, k: int, num_values: int) -> None:
    x = tied_rows(seed, 4, vocab_size, num_values)
    for own, other in zip(device_ranking.ordered_top_k(x, k), token_ranking.ordered_top_k(x, k), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("vocab_size", [300, 70_001])
def test_zeros_of_both_signs_are_equal_and_infinities_have_their_place(vocab_size: int) -> None:
    x = torch.zeros(3, vocab_size)
    x[0, ::2] = -0.0
    x[1, 7::9], x[1, 8::9] = torch.inf, -torch.inf
    x[2] = -torch.inf
    for k in (5, 60):
        values, ids = device_ranking.ordered_top_k(x, k)
        expected_values, expected_ids = torch.sort(x, dim=-1, descending=True, stable=True)
        assert torch.equal(ids, expected_ids[:, :k])
        assert torch.equal(values, expected_values[:, :k])


@pytest.mark.parametrize("k", [3, 200])
def test_rows_with_nan_give_ids_of_the_vocabulary(k: int) -> None:
    x = tied_rows(1, 3, 70_001)
    x[1, 5], x[2] = torch.nan, torch.nan
    ids = device_ranking.ordered_top_k(x, k)[1]
    assert ids.min() >= 0
    assert ids.max() < 70_001
    assert torch.equal(ids[0], token_ranking.ordered_top_k(x[:1], k)[1][0])


@given(seed=st.integers(0, 2**32), vocab_size=st.sampled_from(SIZES), num_last=st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_keep_prefix(seed: int, vocab_size: int, num_last: int) -> None:
    x = tied_rows(seed, 3, vocab_size)
    last = x[:, seed % vocab_size].clone()[:, None]
    weights, counts = torch.rand(3, vocab_size), torch.full((3, 1), num_last)
    expected = token_ranking.keep_prefix(x, weights.clone(), last, counts)
    assert torch.equal(device_ranking.keep_prefix(x, weights.clone(), last, counts), expected)
