"""Searches in rows of logits, in every backend, against slow numpy versions, with many ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.sampler import token_logprobs
from loraplex.errors import ConfigError
from loraplex.kernels.ops import KernelBackend, get_backend
from loraplex.kernels.token_ranking import WeightRule, block_sums, keep_prefix, sort_descending

SIZES = (1, 2, 3, 31, 127, 128, 129, 255, 256, 300, 1000)


@pytest.fixture(scope="module", params=["reference", "torch", "native"])
def ops(request: pytest.FixtureRequest) -> KernelBackend:
    try:
        return get_backend(request.param, torch.device("cpu"))
    except ConfigError as error:
        pytest.skip(str(error))


def tied_rows(seed: int, num_rows: int, vocab_size: int, num_values: int = 7) -> torch.Tensor:
    """Logits with few distinct values, some of them -inf, so that nearly everything is a tie."""
    generator = np.random.default_rng(seed)
    values = np.concatenate([[-np.inf], generator.normal(size=num_values)]).astype(np.float32)
    x = values[generator.integers(0, len(values), size=(num_rows, vocab_size))]
    x[:, generator.integers(vocab_size)] = 0.0
    return torch.from_numpy(x)


def in_order(row: np.ndarray) -> np.ndarray:
    """Ids by (value, descending; id, ascending)."""
    return np.lexsort((np.arange(len(row)), -row.astype(np.float64)))


@pytest.mark.parametrize("vocab_size", SIZES)
def test_row_argmax_is_the_first_of_the_largest(ops: KernelBackend, vocab_size: int) -> None:
    x = tied_rows(vocab_size, 5, vocab_size)
    ids, values = ops.row_argmax(x)
    assert ids.tolist() == [int(in_order(row.numpy())[0]) for row in x]
    assert torch.equal(values, x.amax(-1))


def test_row_argmax_finds_nan(ops: KernelBackend) -> None:
    x = torch.zeros(3, 1000)
    x[1, 700] = torch.nan
    _, values = ops.row_argmax(x)
    assert values.isnan().tolist() == [False, True, False]


@given(seed=st.integers(0, 2**32), vocab_size=st.sampled_from(SIZES), k=st.integers(1, 1100))
@settings(max_examples=60, deadline=None)
def test_ordered_top_k_under_ties(ops: KernelBackend, seed: int, vocab_size: int, k: int) -> None:
    x = tied_rows(seed, 3, vocab_size)
    values, ids = ops.ordered_top_k(x, min(k, vocab_size))
    for row, row_values, row_ids in zip(x, values, ids, strict=True):
        expected = in_order(row.numpy())[:k]
        assert row_ids.tolist() == expected.tolist()
        assert row_values.tolist() == row[expected].tolist()


@pytest.mark.parametrize("k", [1, 20, 50, 63, 64, 128, 200])
@pytest.mark.parametrize("is_tied", [False, True])
def test_ordered_top_k_by_blocks(ops: KernelBackend, k: int, is_tied: bool) -> None:
    """The vocabulary is large enough for the search among the best blocks (and no multiple of a block)."""
    generator = np.random.default_rng(k)
    x = generator.normal(size=(2, 70_001)).astype(np.float32)
    if is_tied:
        x = np.round(x, 1)
    x[0, -3:] = 9, 10, 9
    _, ids = ops.ordered_top_k(torch.from_numpy(x), k)
    assert ids.tolist() == [in_order(row)[:k].tolist() for row in x]


def test_ordered_top_k_does_not_depend_on_k(ops: KernelBackend) -> None:
    x = tied_rows(3, 4, 900)
    longest = ops.ordered_top_k(x, 900)[1]
    for k in (1, 2, 30, 128, 899):
        assert torch.equal(ops.ordered_top_k(x, k)[1], longest[:, :k])


@pytest.mark.parametrize("vocab_size", SIZES)
def test_block_sums_add_up(vocab_size: int) -> None:
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 2**30, size=(3, vocab_size)).astype(np.float32))
    sums = block_sums(x)
    assert sums.dtype == torch.float64
    assert sums.shape == (3, math.ceil(vocab_size / 128))
    assert sums.sum(-1).tolist() == x.double().sum(-1).tolist()


@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from(SIZES),
    u=st.sampled_from([0.0, 2**-53, 0.25, 0.5, 0.999, 1 - 2**-53]),
)
@settings(max_examples=60, deadline=None)
def test_invert_cdf_is_exact(ops: KernelBackend, seed: int, vocab_size: int, u: float) -> None:
    generator = np.random.default_rng(seed)
    weights = generator.integers(0, 5, size=(4, vocab_size)) * (generator.random((4, vocab_size)) < 0.2)
    weights[:, generator.integers(vocab_size)] += 1
    ids = ops.invert_cdf(torch.from_numpy(weights.astype(np.float32)), None, torch.full((4, 1), u, dtype=torch.float64))
    for row, token_id in zip(weights, ids.tolist(), strict=True):
        target = min(math.floor(u * row.sum()), row.sum() - 1)
        assert token_id == int(np.searchsorted(row.cumsum(), target, side="right"))
        assert row[token_id] > 0


def test_rows_need_not_be_contiguous(ops: KernelBackend) -> None:
    x = tied_rows(5, 300, 4).T
    assert not x.is_contiguous()
    assert ops.row_argmax(x)[0].tolist() == x.argmax(-1).tolist()
    chosen = torch.zeros(4, dtype=torch.int64)
    assert token_logprobs(ops, x, chosen, [3] * 4) == token_logprobs(ops, x.contiguous(), chosen, [3] * 4)


def test_sort_descending() -> None:
    x = tied_rows(1, 3, 500)
    assert torch.equal(sort_descending(x), x.sort(dim=-1, descending=True).values)


@given(seed=st.integers(0, 2**32), vocab_size=st.sampled_from(SIZES), size=st.integers(1, 1100))
@settings(max_examples=60, deadline=None)
def test_keep_prefix_keeps_the_first_of_the_order(seed: int, vocab_size: int, size: int) -> None:
    size = min(size, vocab_size)
    x = tied_rows(seed, 2, vocab_size)
    orders = [in_order(row.numpy()) for row in x]
    last = torch.stack([row[order[size - 1]] for row, order in zip(x, orders, strict=True)])[:, None]
    num_last = size - (x > last).sum(-1, keepdim=True)
    kept = keep_prefix(x, torch.ones_like(x), last, num_last)
    for row, order in zip(kept, orders, strict=True):
        assert sorted(row.nonzero()[:, 0].tolist()) == sorted(order[:size].tolist())


@given(
    seed=st.integers(0, 2**32), vocab_size=st.sampled_from(SIZES), top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999])
)
@settings(max_examples=60, deadline=None)
def test_keep_nucleus_keeps_the_shortest_prefix_of_the_mass(
    ops: KernelBackend, seed: int, vocab_size: int, top_p: float
) -> None:
    x = tied_rows(seed, 3, vocab_size)
    rule = WeightRule(x.amax(-1, keepdim=True), torch.tensor([[0.5], [1.0], [2.0]]), 2.0**30)
    weights, total = ops.token_weights(x, rule)
    assert torch.equal(weights, rule.of(x))
    assert total[:, 0].tolist() == weights.double().sum(-1).tolist()
    kept = ops.keep_nucleus(x, weights.clone(), top_p * total, rule)
    for row, before, after, mass in zip(x, weights, kept, total[:, 0].tolist(), strict=True):
        order = in_order(row.numpy())
        cumulative = before.double().numpy()[order].cumsum()
        size = int((cumulative < top_p * mass).sum()) + 1
        assert torch.equal(after[order[:size].copy()], before[order[:size].copy()])
        assert not after[order[size:].copy()].any()


@pytest.mark.parametrize("least", [0.0, 2.0, 4.0])
def test_weights_below_the_least_are_never_drawn(ops: KernelBackend, least: float) -> None:
    weights = torch.from_numpy(np.random.default_rng(1).integers(0, 5, size=(2, 1000)).astype(np.float32))
    uniform = torch.linspace(0, 1 - 2**-53, 40, dtype=torch.float64)
    for u in uniform:
        column = u.expand(2)[:, None]
        ids = ops.invert_cdf(weights.clone(), torch.full((2, 1), least), column)
        expected = ops.invert_cdf(weights * (weights >= least), None, column)
        assert torch.equal(ids, expected)


@given(seed=st.integers(0, 2**32), vocab_size=st.sampled_from(SIZES), data=st.data())
@settings(max_examples=40, deadline=None)
def test_token_logprobs_against_float64(ops: KernelBackend, seed: int, vocab_size: int, data: st.DataObject) -> None:
    x = tied_rows(seed, 3, vocab_size)
    chosen = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=3, max_size=3))
    num_best = data.draw(st.lists(st.integers(0, 20), min_size=3, max_size=3))
    for row, token_id, count, entries in zip(
        x.numpy().astype(np.float64),
        chosen,
        num_best,
        token_logprobs(ops, x, torch.tensor(chosen), num_best),
        strict=True,
    ):
        order = in_order(row).tolist()
        logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        expected = list(dict.fromkeys([*order[:count], token_id]))
        assert list(entries) == expected
        for i, entry in entries.items():
            assert entry.rank == order.index(i) + 1
            assert entry.logprob == pytest.approx(logprobs[i], abs=1e-6)
            assert entry.decoded_token is None
