"""The products of a layer's experts over blocks of rows of one expert, with the deltas of the rows' adapters.

    shrink    s[row of s, slice, :rank] = weight * scale * x[t] A^T    for each group in the block
    product   first linear    h[place] = silu(gate) * up of x[t] W^T + bias + s B^T, in float32
              second linear   out[place] = h[place] W^T + bias + s B^T
    combine   y[t] = sum over the row's experts, ascending, of factor * out[place]

A weight is the left operand of its product, as in linear.py: y^T = W x^T. A program holds one block's COLUMNS columns
(of gate and of up); where a block has rows of several adapters, it goes through those that it has, one masked product
each: an adapter's B is read once a block. What a row gets of its adapter is chosen, not multiplied by 0, so another
adapter's NaN does not reach it. Sums have a fixed order, and there are no atomics.

Weights have the dtype of x; int8 with a scale for each column; int4 with one for each 128 numbers of a column; or
float8, with x rounded to it row by row (both are exact in float16).
"""

from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.plan import ENTRY_WORDS
from loraplex.kernels.triton.linear import _widened_byte, _widened_nibble

WORDS = tl.constexpr(ENTRY_WORDS)
WEIGHT_OF, SCALE_OF, BIAS_OF, FIRST_ROW_OF = (tl.constexpr(i) for i in range(4))
"""Rows of a linear's table, int64 [4, experts]."""

LINEAR_FIELDS = 4


@triton.jit
def _activated(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """silu(gate) * up; with a LIMIT > 0 that of `kernels.experts.ClampedGate`. NaN stays NaN."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
    decay = tl.exp(-tl.abs(ALPHA * gate))  # at most 1
    return gate * tl.where(gate < 0, decay, 1.0) / (1.0 + decay) * up


@triton.jit
def _column_sums(
    acc,
    x_low,
    x_high,
    q_rows,
    scale_at,
    turn,
    is_column,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    WEIGHT: tl.constexpr,
    DOT: tl.constexpr,
):
    """acc[n, t] += sum over DEPTH numbers of the weight's row n. x_high: for int4, of the numbers in high halves."""
    if tl.uint8 == WEIGHT:
        byte = turn * (DEPTH // 2) + tl.arange(0, DEPTH // 2)
        q = tl.load(q_rows[:, None] + byte[None, :], mask=is_column[:, None], other=0)
        group = tl.dot(_widened_nibble(q & 15, DOT), x_low, input_precision="ieee")
        group = tl.dot(_widened_nibble(q >> 4, DOT), x_high, group, input_precision="ieee")
        scale = tl.load(scale_at + turn * OUT, mask=is_column, other=0.0)
        acc += group * scale.to(tl.float32)[:, None]
    else:
        k = turn * DEPTH + tl.arange(0, DEPTH)
        seen = is_column[:, None]
        if IN % DEPTH != 0:
            seen = seen & (k < IN)[None, :]
        q = tl.load(q_rows[:, None] + k[None, :], mask=seen, other=0.0 if WEIGHT.is_floating() else 0)
        w = _widened_byte(q, DOT) if tl.int8 == WEIGHT else q.to(DOT)
        acc = tl.dot(w, x_low, acc, input_precision="ieee")
    return acc


@triton.jit
def _scaled(acc, scale_at, x_scale, is_column, WEIGHT: tl.constexpr):
    """By what the columns, and for float8 the rows of x, were divided by."""
    if tl.int8 == WEIGHT or tl.float8e4nv == WEIGHT:
        acc *= tl.load(scale_at, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if tl.float8e4nv == WEIGHT:
        acc *= x_scale[None, :]
    return acc


@triton.jit
def _dot_ranks(
    delta,
    s_at,
    s_stride,
    b_at,
    in_group,
    is_column,
    rank,
    DOT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """delta[n, t] += sum over ranks of B[n, r] s[t, r], s the sum of its splits. b_at: of column n, s_at: of row t."""
    r = tl.arange(0, BLOCK_R)
    for r0 in range(0, rank, BLOCK_R):
        in_rank = r0 + r < rank
        s_mask = in_rank[:, None] & in_group[None, :]
        s_rows = s_at[None, :] + (r0 + r)[:, None]
        s = tl.load(s_rows, mask=s_mask, other=0.0)
        for split in tl.static_range(1, SPLITS):
            s += tl.load(s_rows + split * s_stride, mask=s_mask, other=0.0)
        b = tl.load(b_at[:, None] + (r0 + r)[None, :], mask=is_column[:, None] & in_rank[None, :], other=0)
        delta = tl.dot(b.to(DOT), s.to(DOT), delta, input_precision="ieee")
    return delta


@triton.jit
def _with_deltas(
    acc,
    index,
    expert,
    first,
    count,
    place,
    n,
    is_column,
    shrunk,
    s_stride,
    groups,
    num_groups,
    linears,
    b_addr,
    bias_addr,
    ranks,
    table_rows,
    NUM_EXPERTS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    CAPACITY: tl.constexpr,
    RANK_CAPACITY: tl.constexpr,
    ADAPTER: tl.constexpr,
    BIAS: tl.constexpr,
    DOT: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """acc [COLUMNS, ROWS] of slice `index` with the deltas of the groups that reach into the block."""
    row = tl.load(linears + FIRST_ROW_OF * NUM_EXPERTS + expert) + index
    for group in range(tl.load(num_groups + expert)):
        at = groups + expert * CAPACITY + group
        begin, end = tl.load(at), tl.load(at + NUM_EXPERTS * CAPACITY)
        if (begin < first + count) & (end > first):
            slot = tl.load(at + 2 * NUM_EXPERTS * CAPACITY)
            entry = (slot * table_rows + row) * WORDS
            rank = tl.minimum(tl.load(ranks + 2 * entry), RANK_CAPACITY)
            in_group = (place >= begin) & (place < end)
            if rank > 0:
                s_row = tl.load(at + 4 * NUM_EXPERTS * CAPACITY) + place - begin
                s_at = shrunk + (s_row.to(tl.int64) * NUM_SLICES + index) * RANK_CAPACITY
                b = tl.multiple_of(tl.load(b_addr + entry).to(tl.pointer_type(ADAPTER)), 16)
                delta = tl.zeros((COLUMNS, ROWS), tl.float32)
                # With a rank of whole vectors, the compiler knows that rows of B are loaded in vectors.
                if rank % 8 == 0:
                    rank8 = rank // 8 * 8
                    delta = _dot_ranks(
                        delta, s_at, s_stride, b + n * rank8, in_group, is_column, rank8, DOT, SPLITS, BLOCK_R
                    )
                else:
                    delta = _dot_ranks(delta, s_at, s_stride, b + n * rank, in_group, is_column, rank, DOT, SPLITS, 16)
                acc = tl.where(in_group[None, :], acc + delta, acc)
            bias_address = tl.load(bias_addr + entry)
            if bias_address != 0:
                weight = tl.load(at + 3 * NUM_EXPERTS * CAPACITY).to(tl.float32, bitcast=True)
                bias = tl.multiple_of(bias_address.to(tl.pointer_type(BIAS)), 16)
                added = weight * tl.load(bias + n, mask=is_column, other=0).to(tl.float32)
                acc = tl.where(in_group[None, :], acc + added[:, None], acc)
    return acc


@triton.jit
def _rows_of(x, x_stride, order, place, is_row, IS_FIRST: tl.constexpr, TOP_K: tl.constexpr):
    """(the rows of x that a block reads, where they begin): for the first linear tokens, for the second places."""
    row = place
    if IS_FIRST:
        row = tl.load(order + place, mask=is_row, other=0) // TOP_K
    return row, x + row.to(tl.int64) * x_stride


@triton.jit(
    do_not_specialize=["num_blocks", "table_rows", "s_stride"],
    do_not_specialize_on_alignment=["a_addr", "ranks", "scales"],
)
def shrink_kernel(
    x,
    x_stride,
    order,
    blocks,
    num_blocks,
    groups,
    num_groups,
    shrunk,
    s_stride,
    linears,
    a_addr,
    ranks,
    scales,
    table_rows,
    IN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_FIRST: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    CAPACITY: tl.constexpr,
    RANK_CAPACITY: tl.constexpr,
    ADAPTER: tl.constexpr,
    DOT: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (blocks, slices x splits of IN). s_stride: from split to split."""
    block = tl.program_id(0)
    expert = tl.load(blocks + block)
    if expert >= 0:
        index, split = tl.program_id(1) // SPLITS, tl.program_id(1) % SPLITS
        first, count = tl.load(blocks + num_blocks + block), tl.load(blocks + 2 * num_blocks + block)
        place = first + tl.arange(0, ROWS)
        is_row = place < first + count
        _, x_rows = _rows_of(x, x_stride, order, place, is_row, IS_FIRST, TOP_K)
        row = tl.load(linears + FIRST_ROW_OF * NUM_EXPERTS + expert) + index
        turns: tl.constexpr = (IN + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
        for group in range(tl.load(num_groups + expert)):
            at = groups + expert * CAPACITY + group
            begin, end = tl.load(at), tl.load(at + NUM_EXPERTS * CAPACITY)
            if (begin < first + count) & (end > first):
                entry = (tl.load(at + 2 * NUM_EXPERTS * CAPACITY) * table_rows + row) * WORDS
                rank = tl.minimum(tl.load(ranks + 2 * entry), RANK_CAPACITY)
                address = tl.load(a_addr + entry)
                a = tl.multiple_of(address.to(tl.pointer_type(ADAPTER)), 16)
                weight = tl.load(at + 3 * NUM_EXPERTS * CAPACITY).to(tl.float32, bitcast=True)
                factor = weight * tl.load(scales + 2 * entry)
                s_row = tl.load(at + 4 * NUM_EXPERTS * CAPACITY) + place - begin
                out = shrunk + split * s_stride + (s_row.to(tl.int64) * NUM_SLICES + index) * RANK_CAPACITY
                in_group = is_row & (place >= begin) & (place < end)
                for r0 in range(0, rank, BLOCK_R):
                    r = r0 + tl.arange(0, BLOCK_R)
                    a_rows = a + r * IN
                    acc = tl.zeros((BLOCK_R, ROWS), tl.float32)
                    for turn in range(turns):
                        k = (split * turns + turn) * BLOCK_K + tl.arange(0, BLOCK_K)
                        a_mask, x_mask = (r < rank)[:, None], is_row[None, :]
                        if IN % (BLOCK_K * SPLITS) != 0:
                            a_mask, x_mask = a_mask & (k < IN)[None, :], x_mask & (k < IN)[:, None]
                        a_block = tl.load(a_rows[:, None] + k[None, :], mask=a_mask, other=0)
                        x_block = tl.load(x_rows[None, :] + k[:, None], mask=x_mask, other=0.0)
                        acc = tl.dot(a_block.to(DOT), x_block.to(DOT), acc, input_precision="ieee")
                    factors = tl.zeros((BLOCK_R,), tl.float32) + factor
                    if tl.int8 == ADAPTER:
                        scale_at = address + (rank.to(tl.int64) * IN + 63) // 64 * 64
                        factors *= tl.load(scale_at.to(tl.pointer_type(tl.float32)) + r, mask=r < rank, other=0)
                    mask = (r < rank)[:, None] & in_group[None, :]
                    tl.store(out[None, :] + r[:, None], acc * factors[:, None], mask=mask)


@triton.jit(
    do_not_specialize=["num_blocks", "table_rows", "s_stride"],
    do_not_specialize_on_alignment=["b_addr", "bias_addr", "ranks"],
)
def product_kernel(
    x,
    x_stride,
    x_scales,
    out,
    order,
    blocks,
    num_blocks,
    linears,
    groups,
    num_groups,
    shrunk,
    s_stride,
    b_addr,
    bias_addr,
    ranks,
    table_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_FIRST: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    WEIGHT: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DOT: tl.constexpr,
    HAS_LORA: tl.constexpr,
    CAPACITY: tl.constexpr,
    RANK_CAPACITY: tl.constexpr,
    ADAPTER: tl.constexpr,
    ADAPTER_BIAS: tl.constexpr,
    ADAPTER_DOT: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (blocks, blocks of columns of a slice). OUT: columns of a slice; a first linear has two: gate and up.

    Q_STRIDE: from row to row of a weight. x_scales: of the rows of x where that is float8.
    """
    block = tl.program_id(0)
    expert = tl.load(blocks + block)
    if expert >= 0:
        first, count = tl.load(blocks + num_blocks + block), tl.load(blocks + 2 * num_blocks + block)
        place = first + tl.arange(0, ROWS)
        is_row = place < first + count
        row, x_rows = _rows_of(x, x_stride, order, place, is_row, IS_FIRST, TOP_K)
        n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = n < OUT
        num_slices: tl.constexpr = 2 if IS_FIRST else 1
        weight = tl.load(linears + WEIGHT_OF * NUM_EXPERTS + expert)
        q_rows = tl.multiple_of(weight.to(tl.pointer_type(WEIGHT)), 16) + n.to(tl.int64) * Q_STRIDE
        scale = tl.load(linears + SCALE_OF * NUM_EXPERTS + expert)
        scale_at = scale.to(tl.pointer_type(SCALE)) + n
        acc, acc_up = tl.zeros((COLUMNS, ROWS), tl.float32), tl.zeros((COLUMNS, ROWS), tl.float32)
        for turn in range(tl.cdiv(IN, DEPTH)):
            part: tl.constexpr = DEPTH // 2 if tl.uint8 == WEIGHT else DEPTH
            k = turn * DEPTH + tl.arange(0, part)
            x_mask, high_mask = is_row[None, :], is_row[None, :]
            if IN % DEPTH != 0:
                x_mask, high_mask = x_mask & (k < IN)[:, None], high_mask & (k + part < IN)[:, None]
            x_low = tl.load(x_rows[None, :] + k[:, None], mask=x_mask, other=0.0).to(DOT)
            x_high = x_low
            if tl.uint8 == WEIGHT:
                x_high = tl.load(x_rows[None, :] + (k + part)[:, None], mask=high_mask, other=0.0).to(DOT)
            width: tl.constexpr = OUT * num_slices
            acc = _column_sums(acc, x_low, x_high, q_rows, scale_at, turn, is_column, IN, width, DEPTH, WEIGHT, DOT)
            if IS_FIRST:
                acc_up = _column_sums(
                    acc_up, x_low, x_high, q_rows + OUT * Q_STRIDE, scale_at + OUT, turn, is_column,
                    IN, width, DEPTH, WEIGHT, DOT,
                )  # fmt: skip
        x_scale = tl.full((ROWS,), 1.0, tl.float32)
        if tl.float8e4nv == WEIGHT:
            x_scale = tl.load(x_scales + row, mask=is_row, other=0.0)
        acc = _scaled(acc, scale_at, x_scale, is_column, WEIGHT)
        if IS_FIRST:
            acc_up = _scaled(acc_up, scale_at + OUT, x_scale, is_column, WEIGHT)
        if HAS_BIAS:
            bias_at = tl.load(linears + BIAS_OF * NUM_EXPERTS + expert).to(tl.pointer_type(out.dtype.element_ty)) + n
            acc += tl.load(bias_at, mask=is_column, other=0.0).to(tl.float32)[:, None]
            if IS_FIRST:
                acc_up += tl.load(bias_at + OUT, mask=is_column, other=0.0).to(tl.float32)[:, None]
        if HAS_LORA:
            acc = _with_deltas(
                acc, 0, expert, first, count, place, n, is_column, shrunk, s_stride, groups, num_groups, linears,
                b_addr, bias_addr, ranks, table_rows, NUM_EXPERTS, num_slices, CAPACITY, RANK_CAPACITY,
                ADAPTER, ADAPTER_BIAS, ADAPTER_DOT, SPLITS, ROWS, COLUMNS, BLOCK_R,
            )  # fmt: skip
            if IS_FIRST:
                acc_up = _with_deltas(
                    acc_up, 1, expert, first, count, place, n, is_column, shrunk, s_stride, groups, num_groups, linears,
                    b_addr, bias_addr, ranks, table_rows, NUM_EXPERTS, num_slices, CAPACITY, RANK_CAPACITY,
                    ADAPTER, ADAPTER_BIAS, ADAPTER_DOT, SPLITS, ROWS, COLUMNS, BLOCK_R,
                )  # fmt: skip
        if IS_FIRST:
            acc = _activated(acc, acc_up, LIMIT, ALPHA)
        at = out + place.to(tl.int64)[:, None] * OUT + n[None, :]
        tl.store(at, tl.trans(acc).to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def combine_kernel(out, places, factors, y, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    """Grid (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((COLUMNS,), tl.float32)
    for which in tl.static_range(TOP_K):
        place = tl.load(places + row * TOP_K + which).to(tl.int64)
        factor = tl.load(factors + row * TOP_K + which)
        acc += factor * tl.load(out + place * HIDDEN + n, mask=n < HIDDEN, other=0.0).to(tl.float32)
    tl.store(y + row * HIDDEN + n, acc.to(y.dtype.element_ty), mask=n < HIDDEN)
