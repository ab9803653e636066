"""rotary_write_kv and paged_attention of every backend: a float64 loop over a KV cache, NaN elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.kernels import torch_attention
from loraplex.kernels.ops import KernelBackend
from loraplex.kernels.quantized_weights import Int8Weight, kv_width
from loraplex.kernels.step_batch import AttentionPlan
from tests.kernels.cases import (
    BACKENDS,
    BF16,
    FP16,
    FP32,
    INT8,
    POISON,
    assert_close,
    case_id,
    kv_places,
    kv_scale_places,
    pairwise,
    same_bits,
)

NUM_LAYERS, LAYER = 3, 1
UNUSED_BLOCK = 10**6
"""What stands in a block table past its context: reading it would fail."""


def make_plan(query_lens: list[int], context_lens: list[int], block_size: int, seed: int) -> tuple[AttentionPlan, int]:
    """(a plan whose sequences own blocks in random order, the number of blocks)"""
    counts = [-(-n // block_size) for n in context_lens]
    num_blocks = sum(counts) + 3
    free = iter(np.random.default_rng(seed).permutation(num_blocks).tolist())
    tables = np.full((len(counts), max(counts) + 1), UNUSED_BLOCK, dtype=np.int32)
    for row, count in zip(tables, counts, strict=True):
        row[:count] = [next(free) for _ in range(count)]
    positions = [range(c - q, c) for q, c in zip(query_lens, context_lens, strict=True)]
    kv_slots = [
        int(row[p // block_size]) * block_size + p % block_size
        for row, ps in zip(tables, positions, strict=True)
        for p in ps
    ]
    plan = AttentionPlan(
        q_indptr=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=torch.from_numpy(tables),
        kv_slot_mapping=torch.tensor(kv_slots, dtype=torch.int64),
        query_lens=tuple(query_lens),
        context_lens_host=tuple(context_lens),
        block_size=block_size,
    )
    return plan, num_blocks


def poisoned_kv(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    shape = (num_blocks, NUM_LAYERS, 2, num_kv_heads, block_size, kv_width(head_dim, dtype))
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.full((nbytes,), POISON, dtype=torch.uint8).view(dtype).view(shape)


def fill(
    backend: KernelBackend, kv: torch.Tensor, plan: AttentionPlan, context: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Let the backend put keys and values [C, KH, D] of each sequence where its table says, without a rotation."""
    for row, (keys, values) in zip(plan.block_tables, context, strict=True):
        positions = torch.arange(len(keys))
        slots = row[positions // plan.block_size].long() * plan.block_size + positions % plan.block_size
        k, v = (t.to(backend.activation_dtype(t.dtype)) for t in (keys, values))
        ones, zeros = torch.ones_like(k[:, 0]), torch.zeros_like(k[:, 0])
        backend.rotary_write_kv(torch.zeros_like(k), k, v, ones, zeros, kv[:, LAYER], slots)


def expected_attention(
    q: torch.Tensor,
    plan: AttentionPlan,
    context: list[tuple[torch.Tensor, torch.Tensor]],
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Query by query and head by head in float64. sinks [H]: one more number in the sum of each head's softmax."""
    out, row = torch.zeros(q.shape, dtype=torch.float64), 0
    group = q.shape[1] // context[0][0].shape[1]
    for query_len, (keys, values) in zip(plan.query_lens, context, strict=True):
        for i in range(query_len):
            position = len(keys) - query_len + i
            first = 0 if window is None else max(0, position - window + 1)
            seen_keys = keys[first : position + 1].double().repeat_interleave(group, dim=1)
            seen_values = values[first : position + 1].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,chd->hc", q[row].double(), seen_keys).mul(scale)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum(-1) + (0.0 if sinks is None else sinks.double().exp())
            out[row] = torch.einsum("hc,chd->hd", weights / total[:, None], seen_values)
            row += 1
    return out


def stored(
    context: list[tuple[torch.Tensor, torch.Tensor]], kv_dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values as a cache of this dtype has them."""

    def one(x: torch.Tensor) -> torch.Tensor:
        if kv_dtype is not INT8:
            return x.to(kv_dtype)
        kept = Int8Weight.of(x.flatten(0, 1))
        return (kept.q.double() * kept.scale.double()[:, None]).view(x.shape)

    return [(one(keys), one(values)) for keys, values in context]


def draw(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


BATCHES: dict[str, tuple[list[int], list[int]]] = {
    "one": ([1], [1]),
    "decode": ([1] * 5, [1, 16, 17, 33, 100]),
    "decode_whole_blocks": ([1] * 3, [16, 48, 32]),
    "decode_equal": ([1] * 16, [40] * 16),
    "decode_uneven": ([1] * 5, [3, 1300, 9, 20, 1400]),
    "prefill": ([7, 20, 33], [7, 20, 33]),
    "chunked": ([5, 16, 8], [21, 48, 25]),
    "mixed": ([1, 9, 1, 4, 1], [30, 9, 5, 40, 64]),
}
DIMENSIONS: dict[str, list[Any]] = {
    "batch": list(BATCHES),
    "heads": [(9, 3), (4, 4), (8, 1), (14, 2)],
    "head_dim": [16, 24, 64, 80, 128],
    "block_size": [8, 16, 32],
    "window": [None, 1, 5, 16, 33, 1000],
    "dtype": [FP32, FP16, BF16],
    "kv_dtype": [None, FP32, FP16, BF16, INT8],
}
CASES = pairwise(DIMENSIONS)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equals_float64_loop(case: dict[str, Any]) -> None:
    check(**case)


@pytest.mark.grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("heads", DIMENSIONS["heads"], ids=str)
@pytest.mark.parametrize("dtype", DIMENSIONS["dtype"], ids=str)
def test_full_product(batch: str, heads: tuple[int, int], dtype: torch.dtype) -> None:
    for head_dim in DIMENSIONS["head_dim"]:
        for block_size in DIMENSIONS["block_size"]:
            for window in DIMENSIONS["window"]:
                for kv_dtype in DIMENSIONS["kv_dtype"]:
                    check(batch, heads, head_dim, block_size, window, dtype, kv_dtype)


def check(
    batch: str,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    backends: Sequence[KernelBackend] = BACKENDS,
) -> None:
    generator = torch.Generator().manual_seed(0)
    plan, num_blocks = make_plan(*BATCHES[batch], block_size, seed=0)
    num_heads, num_kv_heads = heads
    context = [
        (draw(generator, dtype, n, num_kv_heads, head_dim), draw(generator, dtype, n, num_kv_heads, head_dim))
        for n in plan.context_lens_host
    ]
    kv_dtype = kv_dtype or dtype
    # q as attention gets it: a slice of a fused projection
    q = draw(generator, dtype, sum(plan.query_lens), num_heads + 2, head_dim)[:, 1:-1]
    scale = head_dim**-0.5
    expected = expected_attention(q, plan, stored(context, kv_dtype), scale, window)
    for backend in backends:
        kv = poisoned_kv(num_blocks, num_kv_heads, block_size, head_dim, kv_dtype)
        fill(backend, kv, plan, context)
        before, own_q = kv.clone(), q.to(backend.activation_dtype(dtype))
        got = backend.paged_attention(own_q, kv[:, LAYER], plan, scale, window)
        assert got.shape == q.shape
        assert got.dtype == own_q.dtype
        assert_close(got, expected, dtype)
        assert same_bits(kv, before)


def test_cases_are_few() -> None:
    assert len(CASES) <= 400


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_one_plan_serves_layers_with_and_without_a_window(backend: KernelBackend) -> None:
    generator = torch.Generator().manual_seed(1)
    plan, num_blocks = make_plan([1, 3, 1], [40, 20, 7], 16, seed=1)
    context = [(draw(generator, FP32, n, 2, 16), draw(generator, FP32, n, 2, 16)) for n in plan.context_lens_host]
    kv = poisoned_kv(num_blocks, 2, 16, 16, FP32)
    fill(backend, kv, plan, context)
    q = draw(generator, FP32, 5, 4, 16)
    for window in (None, 6, None, 6):
        expected = expected_attention(q, plan, context, 0.25, window)
        assert_close(backend.paged_attention(q, kv[:, LAYER], plan, 0.25, window), expected)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("kv_dtype", [FP32, INT8], ids=str)
@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize("window", [None, 6])
def test_soft_caps(backend: KernelBackend, kv_dtype: torch.dtype, softcap: float, window: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    plan, num_blocks = make_plan([1, 3, 1, 20], [70, 20, 7, 20], 16, seed=1)
    context = [(draw(generator, FP32, n, 2, 16), draw(generator, FP32, n, 2, 16)) for n in plan.context_lens_host]
    kv = poisoned_kv(num_blocks, 2, 16, 16, kv_dtype)
    fill(backend, kv, plan, context)
    q = draw(generator, FP32, 25, 4, 16)
    expected = expected_attention(q, plan, stored(context, kv_dtype), 0.5, window, softcap)
    assert_close(backend.paged_attention(q, kv[:, LAYER], plan, 0.5, window, softcap), expected)


SINKS = torch.tensor([-2.0, 0.5, 3.0, 12.0])
"""Of four heads: next to nothing, about as much as the keys, nearly all."""


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(FP32, FP32), (BF16, BF16), (FP32, INT8)], ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (6, None), (None, 2.0)])
@pytest.mark.parametrize("lengths", [([1, 3, 1, 20], [70, 20, 7, 20]), ([1, 1], [40, 40]), ([1, 1, 1], [3, 300, 9])])
def test_sinks(
    backend: KernelBackend,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    lengths: tuple[list[int], list[int]],
) -> None:
    generator = torch.Generator().manual_seed(1)
    plan, num_blocks = make_plan(*lengths, 16, seed=1)
    context = [(draw(generator, dtype, n, 2, 16), draw(generator, dtype, n, 2, 16)) for n in plan.context_lens_host]
    kv = poisoned_kv(num_blocks, 2, 16, 16, kv_dtype)
    fill(backend, kv, plan, context)
    q = draw(generator, backend.activation_dtype(dtype), sum(lengths[0]), 4, 16)
    got = backend.paged_attention(q, kv[:, LAYER], plan, 0.5, window, softcap, SINKS)
    expected = expected_attention(q, plan, stored(context, kv_dtype), 0.5, window, softcap, SINKS)
    assert_close(got, expected, q.dtype)
    without = backend.paged_attention(q, kv[:, LAYER], plan, 0.5, window, softcap)
    assert (got[:, 3].float().norm(dim=-1) < 0.2 * without[:, 3].float().norm(dim=-1)).any()


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_chunked_prefill_equals_whole(backend: KernelBackend) -> None:
    generator = torch.Generator().manual_seed(2)
    keys, values, q = (draw(generator, FP32, 37, heads, 32) for heads in (2, 2, 4))
    whole = None
    for chunks in ([37], [16, 16, 5], [1, 30, 6], [10] * 3 + [1] * 7):
        outputs, end = [], 0
        for chunk in chunks:
            start, end = end, end + chunk
            plan, num_blocks = make_plan([chunk], [end], 16, seed=2)
            kv = poisoned_kv(num_blocks, 2, 16, 32, FP32)
            fill(backend, kv, plan, [(keys[:end], values[:end])])
            outputs.append(backend.paged_attention(q[start:end], kv[:, LAYER], plan, 0.2, None))
        whole = torch.cat(outputs) if whole is None else whole
        assert_close(torch.cat(outputs), whole)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("kv_dtype", [FP32, FP16, BF16, INT8], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 50])
@pytest.mark.parametrize(
    ("num_kv_heads", "block_size", "head_dim"), [(3, 16, 64), (1, 8, 80), (2, 32, 16), (2, 16, 24)]
)
def test_write_kv(
    backend: KernelBackend,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_tokens: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
) -> None:
    """Without an angle: k and v, rounded to the dtype of the cache, go to their places and nothing else is written."""
    generator = torch.Generator().manual_seed(3)
    fused = draw(generator, dtype, num_tokens, 2 * num_kv_heads, head_dim).to(backend.activation_dtype(dtype))
    k, v = fused.chunk(2, dim=1)
    kv = poisoned_kv(9, num_kv_heads, block_size, head_dim, kv_dtype)
    kv_slots = torch.randperm(9 * block_size, generator=generator)[:num_tokens]
    expected = kv.clone()
    heads = expected.view(9, NUM_LAYERS, 2, num_kv_heads, -1)
    key_places, value_places = kv_places(backend, kv[:, LAYER])
    for t, kv_slot in enumerate(kv_slots.tolist()):
        block, offset = divmod(kv_slot, block_size)
        for i, (x, places) in enumerate(((k[t], key_places[offset]), (v[t], value_places[offset]))):
            kept = Int8Weight.of(x)
            heads[block, LAYER, i, :, places] = kept.q if kv_dtype is INT8 else x.to(kv_dtype)
            if kv_dtype is INT8:
                scale_places = kv_scale_places(backend, kv[:, LAYER])
                heads[block, LAYER, i, :, scale_places[offset]] = kept.scale[:, None].view(INT8)
    ones, zeros = torch.ones_like(k[:, 0]), torch.zeros_like(k[:, 0])
    q = draw(generator, dtype, num_tokens, 2 * num_kv_heads, head_dim).to(fused.dtype)
    assert same_bits(backend.rotary_write_kv(q.clone(), k, v, ones, zeros, kv[:, LAYER], kv_slots), q)
    assert same_bits(kv, expected)


@given(lengths=st.lists(st.integers(1, 9000), max_size=40))
def test_groups_hold_each_sequence_once_and_bound_the_padding(lengths: list[int]) -> None:
    array = np.array(lengths, dtype=np.int64)
    groups = torch_attention._group_by_length(np.arange(len(lengths)) + 100, array)
    assert sorted(i for group in groups for i in group.tolist()) == [i + 100 for i in range(len(lengths))]
    for group in groups:
        held = array[group - 100]
        padding = len(held) * held.max() - held.sum()
        assert padding <= max(torch_attention.MIN_PADDING, held.sum())
        assert (np.diff(group) > 0).all()
