"""LoRA for small tiles (decode): up to sixteen rows of one adapter, bound by the bytes of A and B.

    shrink   partial[t, slice, split, :rank] = x[t, K-chunk] A[:, K-chunk]^T       for the rows t of a tile
    expand   y[t, chunk] += sum over the chain of
                                weight * (scale * sum(partial, splits) B[chunk]^T + bias)

With gains, a member of the chain multiplies what is there before it by f = 1 + weight (gain - 1), and its product by
its gain: the sum, and y times the product of all f, are added at the end. No gain is a factor of 1, which changes no
bit.

A program reads a piece of A or B once, for all rows of its tile. Products are those of the matrix units, and sums are
float32. The expand multiplies B, which is exact, with the sum over splits in two parts of bfloat16 (16 bits of it) where
rows are bfloat16, in three of tf32 (all bits) for float16, and float32 as it is. Sums over splits have a fixed order,
and what a row gets does not depend on the other rows of the step.
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
def _tile(tiles, tile_room, tile, num_tiles):
    """(slot, chain, start, rows, weight); past the last tile as an unused one."""
    is_there = tile < num_tiles
    slot = tl.load(tiles + 2 * tile_room + tile, mask=is_there, other=-1)
    chain = tl.load(tiles + 3 * tile_room + tile, mask=is_there, other=0)
    start = tl.load(tiles + tile, mask=is_there, other=0)
    rows = tl.load(tiles + tile_room + tile, mask=is_there, other=0)
    weight = tl.load(tiles + 4 * tile_room + tile, mask=is_there, other=0).to(tl.float32, bitcast=True)
    return slot, chain, start, rows, weight


@triton.jit
def _entry(slot, b_addr, bias_addr, gain_addr, ranks, scales, num_rows, row, RANK_CAPACITY, HAS_GAINS):
    """(rank, scale, addresses of B, bias and gain) of a slot's adapter; rank 0 and no addresses without one."""
    entry = (tl.maximum(slot, 0) * num_rows + row) * WORDS
    is_there = slot >= 0
    rank = tl.minimum(tl.load(ranks + 2 * entry, mask=is_there, other=0), RANK_CAPACITY)
    scale = tl.load(scales + 2 * entry, mask=is_there, other=0)
    address = tl.load(b_addr + entry, mask=is_there, other=0)
    bias_address = tl.load(bias_addr + entry, mask=is_there, other=0)
    gain_address = bias_address
    if HAS_GAINS:
        gain_address = tl.load(gain_addr + entry, mask=is_there, other=0)
    return rank, scale, address, bias_address, gain_address


@triton.jit
def _first_ranks(address, n, in_width, rank, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr):
    """The first BLOCK_R ranks of a chunk of B, [BLOCK_N, BLOCK_R]."""
    r = tl.arange(0, BLOCK_R)
    b = tl.multiple_of(address.to(tl.pointer_type(BLOCK)), 16)
    mask = in_width[:, None] & (r < rank)[None, :]
    # With a rank of whole vectors, the compiler knows that rows of B are loaded in vectors; without, each element has
    # an address of its own.
    if rank % 8 == 0:
        block = tl.load(b + n[:, None] * (rank // 8 * 8) + r[None, :], mask=mask, other=0)
    else:
        block = tl.load(b + n[:, None] * rank + r[None, :], mask=mask, other=0)
    return block


@triton.jit
def _dot_ranks(
    acc,
    present,
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
    """acc + factor * sum(partial, splits) B^T; b: of one slice, present: its first ranks, partial: the tile's first row
    in the slice."""
    r = tl.arange(0, BLOCK_R)
    b_at = b + n[:, None] * rank + r[None, :]
    s_at = partial + ((tl.arange(0, BLOCK_M) * ROW_SIZE)[:, None] + r[None, :])
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
    do_not_specialize=["tile_room", "first_row", "num_rows", "num_tiles", "tiles_each"],
    do_not_specialize_on_alignment=["tiles", "b_addr", "bias_addr", "gain_addr", "ranks", "scales"],
)
def expand_small_kernel(
    y,
    y_stride,
    partial,
    tiles,
    tile_room,
    num_tiles,
    tiles_each,
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
    """Grid (chunks of BLOCK_N columns of all slices, groups of `tiles_each` tiles).

    A program goes through its tiles, and on to the end of the last one's chain; a chain's first tiles may be those of
    the group before. While a tile is multiplied, B of the next one, the entry of the one behind and the tile behind
    that are on their way.
    """
    chunk, first_tile = tl.program_id(0), tl.program_id(1) * tiles_each
    index, first, offset, width = 0, 0, OFFSETS[0], WIDTHS[0]
    begin = 0
    for i in tl.static_range(1, NUM_SLICES):
        begin += (WIDTHS[i - 1] + BLOCK_N - 1) // BLOCK_N
        is_behind = chunk >= begin
        index, first = tl.where(is_behind, i, index), tl.where(is_behind, begin, first)
        offset, width = tl.where(is_behind, OFFSETS[i], offset), tl.where(is_behind, WIDTHS[i], width)
    m = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    n = (chunk - first) * BLOCK_N + column
    in_width = n < width
    row_size: tl.constexpr = NUM_SLICES * SPLITS * RANK_CAPACITY
    y_chunk = y + offset + (chunk - first) * BLOCK_N + ((m * y_stride)[:, None] + column[None, :])
    row = first_row + index
    s = partial + (first_tile * BLOCK_M).to(tl.int64) * row_size + index * (SPLITS * RANK_CAPACITY)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    kept = tl.full((BLOCK_N,), 1.0, tl.float32)  # of y
    touched, left, end = 0, 0, tl.minimum(first_tile + tiles_each, num_tiles)
    end -= tl.minimum(tl.load(tiles + 3 * tile_room + end, mask=end < num_tiles, other=0), 0)  # to the end of a chain
    slot, chain, start, rows, weight = _tile(tiles, tile_room, first_tile, num_tiles)
    slot1, chain1, start1, rows1, weight1 = _tile(tiles, tile_room, first_tile + 1, num_tiles)
    rank, scale, address, bias_address, gain_address = _entry(
        slot, b_addr, bias_addr, gain_addr, ranks, scales, num_rows, row, RANK_CAPACITY, HAS_GAINS
    )
    rank1, scale1, address1, bias_address1, gain_address1 = _entry(
        slot1, b_addr, bias_addr, gain_addr, ranks, scales, num_rows, row, RANK_CAPACITY, HAS_GAINS
    )
    present = _first_ranks(address, n, in_width, rank, BLOCK, BLOCK_R)
    for tile in range(first_tile, end):
        is_head = chain > 0
        left = tl.where(is_head, chain, left)
        touched = tl.where(is_head, 0, touched)
        acc = tl.where(is_head, 0.0, acc)
        kept = tl.where(is_head, 1.0, kept)
        following = _first_ranks(address1, n, in_width, rank1, BLOCK, BLOCK_R)
        slot2, chain2, start2, rows2, weight2 = _tile(tiles, tile_room, tile + 2, num_tiles)
        if left > 0:
            is_row = m < rows
            y_at = y_chunk + start.to(tl.int64) * y_stride
            mask = is_row[:, None] & in_width[None, :]
            total = acc  # which a member with a gain has of its own
            if HAS_GAINS:
                is_gained = gain_address != 0
                total = tl.where(is_gained, 0.0, acc)
            if rank > 0:
                touched = 1
                b = tl.multiple_of(address.to(tl.pointer_type(BLOCK)), 16)
                if RANK_CAPACITY <= BLOCK_R:
                    total = _dot_ranks(
                        total, present, s, b, n, is_row, in_width, rank, weight * scale,
                        SPLITS, row_size, RANK_CAPACITY, BLOCK_M, BLOCK_R, PRECISION,
                    )  # fmt: skip
                elif rank % 8 == 0:
                    total = _dot_ranks(
                        total, present, s, b, n, is_row, in_width, rank // 8 * 8, weight * scale,
                        SPLITS, row_size, RANK_CAPACITY, BLOCK_M, BLOCK_R, PRECISION,
                    )  # fmt: skip
                else:
                    total = _dot_ranks(
                        total, present, s, b, n, is_row, in_width, rank, weight * scale,
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
            if (left == 1) & (touched != 0):
                there = tl.load(y_at, mask=mask, other=0).to(tl.float32)
                if HAS_GAINS:
                    there *= kept[None, :]
                tl.store(y_at, (there + acc).to(y.dtype.element_ty), mask=mask)
            left -= 1
        rank2, scale2, address2, bias_address2, gain_address2 = _entry(
            slot2, b_addr, bias_addr, gain_addr, ranks, scales, num_rows, row, RANK_CAPACITY, HAS_GAINS
        )
        s += BLOCK_M * row_size
        present = following
        slot, chain, start, rows, weight = slot1, chain1, start1, rows1, weight1
        slot1, chain1, start1, rows1, weight1 = slot2, chain2, start2, rows2, weight2
        rank, scale, address = rank1, scale1, address1
        bias_address, gain_address = bias_address1, gain_address1
        rank1, scale1, address1 = rank2, scale2, address2
        bias_address1, gain_address1 = bias_address2, gain_address2
