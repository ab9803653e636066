"""LoRA for small tiles (decode): up to sixteen rows of one adapter, bound by the bytes of A and B.

    shrink   partial[t, slice, split, :rank] = x[t, K-chunk] A[:, K-chunk]^T       for the rows t of a tile
    expand   y[t, chunk] += sum over the chain of
                                weight * (scale * sum(partial, splits) B[chunk]^T + bias)

With gains, a member of the chain multiplies what is there before it by f = 1 + weight (gain - 1), and its product by
its gain: the sum, and y times the product of all f, are added at the end. No gain is a factor of 1, which changes no
bit.

A program reads a piece of A or B once, for all rows of its tile. Products are those of the matrix units, and sums are
float32. The expand multiplies B, which is exact, with the sum over splits in two parts of bfloat16 (16 bits) where rows
are bfloat16, in three of tf32 (all bits) for float16, and float32 as it is. Sums over splits have a fixed order, and
what a row gets does not depend on the other rows of the step.
"""

# Triton's arguments have no types of Python's.
from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.plan import ENTRY_WORDS

WORDS = tl.constexpr(ENTRY_WORDS)
"""From entry to entry of the slot table, in words of 64 bits; twice as many in words of 32."""


@triton.jit(
    do_not_specialize=["tile_room", "first_row", "num_rows"],
    do_not_specialize_on_alignment=["tiles", "a_addr", "ranks"],
)
def shrink_small_kernel(
    x,
    x_stride,
    partial,
    tiles,
    tile_room,
    a_addr,
    ranks,
    first_row,
    num_rows,
    IN: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    RANK_CAPACITY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (slices x splits of SPLIT_K columns of x, tiles)."""
    index, split, tile = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS, tl.program_id(1)
    slot = tl.load(tiles + 2 * tile_room + tile)
    start = tl.load(tiles + tile)
    rows = tl.load(tiles + tile_room + tile)
    entry = (tl.maximum(slot, 0) * num_rows + first_row + index) * WORDS
    rank = tl.minimum(tl.load(ranks + 2 * entry), RANK_CAPACITY)
    address = tl.load(a_addr + entry)
    if slot < 0:
        rank = 0
    a = tl.multiple_of(address.to(tl.pointer_type(BLOCK)), 16)
    m, r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    k = split * SPLIT_K + tl.arange(0, BLOCK_K)
    is_row = m < rows
    x_at = x + start.to(tl.int64) * x_stride + ((m * x_stride)[:, None] + k[None, :])
    row_size: tl.constexpr = NUM_SLICES * SPLITS * RANK_CAPACITY
    out = partial + (tile * BLOCK_M).to(tl.int64) * row_size + (index * SPLITS + split) * RANK_CAPACITY
    for r0 in range(0, rank, BLOCK_R):
        in_rank = r0 + r < rank
        a_at = a + ((r0 + r)[:, None] * IN + k[None, :])
        acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for k0 in range(0, SPLIT_K, BLOCK_K):
            if IN % SPLIT_K == 0:
                x_block = tl.load(x_at + k0, mask=is_row[:, None], other=0)
                a_block = tl.load(a_at + k0, mask=in_rank[:, None], other=0)
            else:
                in_range = k0 + k < IN
                x_block = tl.load(x_at + k0, mask=is_row[:, None] & in_range[None, :], other=0)
                a_block = tl.load(a_at + k0, mask=in_rank[:, None] & in_range[None, :], other=0)
            acc = tl.dot(x_block.to(DOT), tl.trans(a_block.to(DOT)), acc, input_precision="ieee")
        if tl.int8 == BLOCK:
            scale_at = address + (rank.to(tl.int64) * IN + 63) // 64 * 64
            scale = tl.load(scale_at.to(tl.pointer_type(tl.float32)) + r0 + r, mask=in_rank, other=0)
            acc *= scale[None, :]
        tl.store(out + ((m * row_size)[:, None] + (r0 + r)[None, :]), acc, mask=is_row[:, None] & in_rank[None, :])


@triton.jit
def _dot_ranks(
    acc,
    partial,
    b,
    n,
    is_row,
    in_width,
    rank,
    factor,
    SPLITS: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    RANK_CAPACITY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc + factor * sum(partial, splits) B^T; b: of one slice, partial: the tile's first row in it."""
    r = tl.arange(0, BLOCK_R)
    b_at = b + n[:, None] * rank + r[None, :]
    s_at = partial + ((tl.arange(0, BLOCK_M) * ROW_SIZE)[:, None] + r[None, :])
    present = tl.load(b_at, mask=in_width[:, None] & (r < rank)[None, :], other=0)
    for r0 in range(0, rank, BLOCK_R):
        following = present
        if RANK_CAPACITY > BLOCK_R:
            b_at += BLOCK_R
            following = tl.load(b_at, mask=in_width[:, None] & (r0 + BLOCK_R + r < rank)[None, :], other=0)
        is_inside = is_row[:, None] & (r0 + r < rank)[None, :]
        s = tl.load(s_at + r0, mask=is_inside, other=0)
        for split in tl.static_range(1, SPLITS):
            s += tl.load(s_at + (r0 + split * RANK_CAPACITY), mask=is_inside, other=0)
        s *= factor
        if PRECISION == "bf16x2":
            high = s.to(tl.bfloat16)
            low = (s - high.to(tl.float32)).to(tl.bfloat16)
            b_block = tl.trans(present.to(tl.bfloat16))
            acc = tl.dot(high, b_block, tl.dot(low, b_block, acc))
        else:
            acc = tl.dot(s, tl.trans(present.to(tl.float32)), acc, input_precision=PRECISION)
        present = following
    return acc


@triton.jit(
    do_not_specialize=["tile_room", "first_row", "num_rows"],
    do_not_specialize_on_alignment=["tiles", "b_addr", "bias_addr", "gain_addr", "ranks", "scales"],
)
def expand_small_kernel(
    y,
    y_stride,
    partial,
    tiles,
    tile_room,
    b_addr,
    bias_addr,
    gain_addr,
    ranks,
    scales,
    first_row,
    num_rows,
    OFFSETS: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK_CAPACITY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_GAINS: tl.constexpr,
):
    """Grid (chunks of BLOCK_N columns of all slices, tiles); the tiles of a chain are their head's.

    A program is short, and many run at once: one that goes through several tiles, with the next B on its way, was half
    as fast on an H200 (docs/performance.md).
    """
    chunk, tile = tl.program_id(0), tl.program_id(1)
    index, first, offset, width = 0, 0, OFFSETS[0], WIDTHS[0]
    begin = 0
    for i in tl.static_range(1, NUM_SLICES):
        begin += (WIDTHS[i - 1] + BLOCK_N - 1) // BLOCK_N
        is_behind = chunk >= begin
        index, first = tl.where(is_behind, i, index), tl.where(is_behind, begin, first)
        offset, width = tl.where(is_behind, OFFSETS[i], offset), tl.where(is_behind, WIDTHS[i], width)
    chain = tl.load(tiles + 3 * tile_room + tile)
    start = tl.load(tiles + tile)
    rows = tl.load(tiles + tile_room + tile)
    m = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    n = (chunk - first) * BLOCK_N + column
    is_row, in_width = m < rows, n < width
    row_size: tl.constexpr = NUM_SLICES * SPLITS * RANK_CAPACITY
    y_tile = y + start.to(tl.int64) * y_stride + offset + (chunk - first) * BLOCK_N
    y_at = y_tile + ((m * y_stride)[:, None] + column[None, :])
    mask = is_row[:, None] & in_width[None, :] & (chain > 0)
    given = tl.load(y_at, mask=mask, other=0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    kept = tl.full((BLOCK_N,), 1.0, tl.float32)  # of y
    touched = 0
    for link in range(chain):
        member = tile + link
        slot = tl.load(tiles + 2 * tile_room + member)
        weight = tl.load(tiles + 4 * tile_room + member).to(tl.float32, bitcast=True)
        entry = (slot * num_rows + first_row + index) * WORDS
        rank = tl.minimum(tl.load(ranks + 2 * entry), RANK_CAPACITY)
        factor = weight * tl.load(scales + 2 * entry)
        address, bias_address = tl.load(b_addr + entry), tl.load(bias_addr + entry)
        s = partial + (member * BLOCK_M).to(tl.int64) * row_size + index * (SPLITS * RANK_CAPACITY)
        total = acc  # which a member with a gain has of its own
        if HAS_GAINS:
            gain_address = tl.load(gain_addr + entry)
            is_gained = gain_address != 0
            total = tl.where(is_gained, 0.0, acc)
        if rank > 0:
            touched = 1
            b = tl.multiple_of(address.to(tl.pointer_type(BLOCK)), 16)
            # With a rank of whole vectors, the compiler knows that rows of B are loaded in vectors; without, each
            # element has an address of its own.
            if rank % 8 == 0:
                total = _dot_ranks(
                    total, s, b, n, is_row, in_width, rank // 8 * 8, factor,
                    SPLITS, row_size, RANK_CAPACITY, BLOCK_M, BLOCK_R, PRECISION,
                )  # fmt: skip
            else:
                total = _dot_ranks(
                    total, s, b, n, is_row, in_width, rank, factor,
                    SPLITS, row_size, RANK_CAPACITY, BLOCK_M, BLOCK_R, PRECISION,
                )  # fmt: skip
        if HAS_GAINS:
            gains = tl.multiple_of(gain_address.to(tl.pointer_type(tl.float32)), 16)
            gain = tl.load(gains + n, mask=in_width & is_gained, other=1)
            f = tl.where(is_gained, weight * gain + (1 - weight), 1.0)
            total = tl.where(is_gained, acc * f[None, :] + total * gain[None, :], total)
            kept *= f
            touched = tl.where(is_gained, 1, touched)
        acc = total
        if bias_address != 0:
            touched = 1
            bias = tl.multiple_of(bias_address.to(tl.pointer_type(BIAS)), 16)
            acc += (weight * tl.load(bias + n, mask=in_width, other=0).to(tl.float32))[None, :]
    if touched != 0:
        there = given.to(tl.float32)
        if HAS_GAINS:
            there *= kept[None, :]
        tl.store(y_at, (there + acc).to(y.dtype.element_ty), mask=mask)
