"""LoRA for large tiles (prefill): 64 or 128 rows of one adapter, matrix products.

    shrink   s[t, slice, :rank] = weight * scale * x[t] A^T      the slices' A's as one matrix: a tile of x is read once
    reduce   s = sum of the splits                               only where K is split: too few tiles to fill the GPU
    expand   y[t, chunk] += sum over the chain of s B[chunk]^T + weight * bias; with gains as lora_small.py says

s is in the dtype of the products (float32 where x or the blocks are); products add up in float32, without tf32. Work is
by tile, so the grid grows with the rows that adapters have, not with the batch. Lane j of the joined A's, and of a row
of s, is rank r of slice i, where j = r + sum of the ranks of the slices before i, each rounded up to 8 so that vectors
stay aligned: a slice that an adapter lacks takes no part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.triton.lora_small import WORDS


@triton.jit(
    do_not_specialize=["tile_room", "first_row", "num_rows"],
    do_not_specialize_on_alignment=["tiles", "a_addr", "ranks", "scales"],
)
def shrink_large_kernel(
    x,
    x_stride,
    s,
    s_split_stride,
    tiles,
    tile_room,
    a_addr,
    ranks,
    scales,
    first_row,
    num_rows,
    split_k,
    IN: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    RANK_CAPACITY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (blocks of BLOCK_J lanes, splits of `split_k` columns of x, tiles). split_k: a multiple of BLOCK_K, and of
    16."""
    tile = tl.program_id(2)
    slot = tl.load(tiles + 2 * tile_room + tile)
    start = tl.load(tiles + tile)
    rows = tl.load(tiles + tile_room + tile)
    weight = tl.load(tiles + 4 * tile_room + tile).to(tl.float32, bitcast=True)
    entry = (tl.maximum(slot, 0) * num_rows + first_row) * WORDS
    j = tl.program_id(0) * BLOCK_J + tl.arange(0, BLOCK_J)
    index, before = tl.zeros((BLOCK_J,), tl.int32), tl.zeros((BLOCK_J,), tl.int32)
    rank, total = tl.zeros((BLOCK_J,), tl.int32), 0
    for i in tl.static_range(NUM_SLICES):
        of_slice, is_behind = tl.minimum(tl.load(ranks + 2 * (entry + i * WORDS)), RANK_CAPACITY), j >= total
        index, before, rank = (
            tl.where(is_behind, i, index),
            tl.where(is_behind, total, before),
            tl.where(is_behind, of_slice, rank),
        )
        total += (of_slice + 7) // 8 * 8
    if (slot >= 0) & (tl.program_id(0) * BLOCK_J < total):
        entries, r = entry + index * WORDS, j - before
        is_lane = r < rank
        address = tl.load(a_addr + entries, mask=is_lane, other=0)
        factor = weight * tl.load(scales + 2 * entries, mask=is_lane, other=0)
        if tl.int8 == BLOCK:
            scale_at = address + (rank.to(tl.int64) * IN + 63) // 64 * 64
            factor *= tl.load(scale_at.to(tl.pointer_type(tl.float32)) + r, mask=is_lane, other=0)
        k_first = tl.program_id(1) * split_k
        k = tl.arange(0, BLOCK_K)
        m = tl.arange(0, BLOCK_M)
        is_row = m < rows
        a = tl.multiple_of(address.to(tl.pointer_type(BLOCK)), 16) + r * IN
        x_at = x + start.to(tl.int64) * x_stride + ((m * x_stride)[:, None] + k[None, :])
        a_at = a[:, None] + k[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_J), tl.float32)
        for k0 in range(k_first, tl.minimum(k_first + split_k, IN), BLOCK_K):
            if IN % BLOCK_K == 0:
                x_block = tl.load(x_at + k0, mask=is_row[:, None], other=0)
                a_block = tl.load(a_at + k0, mask=is_lane[:, None], other=0)
            else:
                in_range = k0 + k < IN
                x_block = tl.load(x_at + k0, mask=is_row[:, None] & in_range[None, :], other=0)
                a_block = tl.load(a_at + k0, mask=is_lane[:, None] & in_range[None, :], other=0)
            acc = tl.dot(x_block.to(DOT), tl.trans(a_block.to(DOT)), acc, input_precision="ieee")
        acc *= factor[None, :]
        num_lanes: tl.constexpr = NUM_SLICES * RANK_CAPACITY
        out = s + tl.program_id(1).to(tl.int64) * s_split_stride + tile.to(tl.int64) * (BLOCK_M * num_lanes)
        at = out + ((m * num_lanes)[:, None] + j[None, :])
        tl.store(at, acc.to(s.dtype.element_ty), mask=is_row[:, None] & (j < total)[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def reduce_kernel(partial, s, count, num_splits, BLOCK: tl.constexpr):
    """s[i] = partial[0, i] + partial[1, i] + ...; grid (blocks of s). What lies past an adapter's rank is summed as
    well, and not read."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = i < count
    at = partial + i
    total = tl.load(at, mask=is_inside, other=0)
    for _ in range(1, num_splits):
        at += count
        total += tl.load(at, mask=is_inside, other=0)
    tl.store(s + i, total.to(s.dtype.element_ty), mask=is_inside)


@triton.jit
def _dot_ranks(
    acc, s_at, b_at, is_row, in_width, rank, DOT: tl.constexpr, BLOCK_R: tl.constexpr
):  # b_at: of column n, rank 0
    r = tl.arange(0, BLOCK_R)
    for r0 in range(0, rank, BLOCK_R):
        in_rank = r0 + r < rank
        s_block = tl.load(s_at[:, None] + (r0 + r)[None, :], mask=is_row[:, None] & in_rank[None, :], other=0)
        b_block = tl.load(b_at[:, None] + (r0 + r)[None, :], mask=in_width[:, None] & in_rank[None, :], other=0)
        acc = tl.dot(s_block.to(DOT), tl.trans(b_block.to(DOT)), acc, input_precision="ieee")
    return acc


@triton.jit(
    do_not_specialize=["tile_room", "first_row", "num_rows"],
    do_not_specialize_on_alignment=["tiles", "b_addr", "bias_addr", "gain_addr", "ranks"],
)
def expand_large_kernel(
    y,
    y_stride,
    s,
    tiles,
    tile_room,
    b_addr,
    bias_addr,
    gain_addr,
    ranks,
    first_row,
    num_rows,
    OFFSETS: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_GAINS: tl.constexpr,
    DOT: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    RANK_CAPACITY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (chunks of BLOCK_N columns of all slices, tiles)."""
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
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    kept = tl.full((BLOCK_N,), 1.0, tl.float32)  # of y
    touched = 0
    for link in range(chain):
        member = tile + link
        slot = tl.load(tiles + 2 * tile_room + member)
        weight = tl.load(tiles + 4 * tile_room + member).to(tl.float32, bitcast=True)
        entry = (slot * num_rows + first_row + index) * WORDS
        rank = tl.minimum(tl.load(ranks + 2 * entry), RANK_CAPACITY)
        address, bias_address = tl.load(b_addr + entry), tl.load(bias_addr + entry)
        total = acc  # which a member with a gain has of its own
        if HAS_GAINS:
            gain_address = tl.load(gain_addr + entry)
            is_gained = gain_address != 0
            total = tl.where(is_gained, 0.0, acc)
        if rank > 0:
            touched = 1
            b = tl.multiple_of(address.to(tl.pointer_type(BLOCK)), 16)
            lane = 0
            for i in tl.static_range(NUM_SLICES):
                of_slice = tl.minimum(tl.load(ranks + 2 * (entry + (i - index) * WORDS)), RANK_CAPACITY)
                lane += tl.where(i < index, (of_slice + 7) // 8 * 8, 0)
            s_at = s + (member * BLOCK_M + m).to(tl.int64) * (NUM_SLICES * RANK_CAPACITY) + lane
            # With a rank of whole vectors, the compiler knows that rows of B are loaded in vectors; without, each
            # element has an address # of its own, and a large block of them would take the registers that all ranks
            # need.
            if rank % 8 == 0:
                rank8 = rank // 8 * 8
                total = _dot_ranks(total, s_at, b + n * rank8, is_row, in_width, rank8, DOT, BLOCK_R)
            else:
                total = _dot_ranks(total, s_at, b + n * rank, is_row, in_width, rank, DOT, 16)
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
        y_tile = y + start.to(tl.int64) * y_stride + offset + (chunk - first) * BLOCK_N
        at = y_tile + ((m * y_stride)[:, None] + column[None, :])
        mask = is_row[:, None] & in_width[None, :]
        present = tl.load(at, mask=mask, other=0).to(tl.float32)
        if HAS_GAINS:
            present *= kept[None, :]
        tl.store(at, (present + acc).to(y.dtype.element_ty), mask=mask)
