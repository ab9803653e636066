"""LoRA for small tiles (decode): one to four rows of one adapter, bound by the bytes of A and B.

    shrink item (tile, slice, split)   partial[t, slice, split, :rank] = x[t, K-chunk] A[:, K-chunk]^T
                                       for the rows t of the tile
    expand item (head tile, N-chunk)   y[t, chunk] += sum over the chain of
                                           weight * (scale * sum(partial, splits) B[chunk]^T + bias)

With gains, a member of the chain multiplies what is there before it by f = 1 + weight (gain - 1), and its product by
its gain: the sum, and y times the product of all f, are added at the end. No gain is a factor of 1, which changes no
bit.

An item reads a piece of A or B once, for all rows of its tile, into registers, the next block of ranks while the
present one is multiplied. Products and sums are float32, sums over splits have a fixed order, and what a row gets does
not depend on the other rows of the step.

`fused` runs both kinds in one launch. A program takes a ticket from a counter in memory; tickets 0 .. number of shrink
items - 1 are these, the ones behind are the expand items. An expand item loads its first block of B, then waits until
the counter of its (tile, slice) says that all splits are written. It cannot deadlock: a ticket is only ever taken by a
program that runs, shrink items wait for nothing, so they all end, and an expand item waits for shrink items alone,
whose tickets are smaller, hence taken already. The order in which the GPU starts programs, and how many fit on it at
once, do not matter. Counters are 0 again at the end: the program with the last ticket resets the tickets (none is taken
after it), and the last of a slice's expand items, each of which adds 1 after its wait, resets the slice's. After a step
that failed, `Workspace.reset` does.
"""

# Triton's arguments have no types of Python's.
from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.plan import ENTRY_WORDS

WORDS = tl.constexpr(ENTRY_WORDS)
"""From entry to entry of the slot table, in words of 64 bits; twice as many in words of 32."""


@triton.jit
def _dot_rows(block, x_row):
    """block [R, K] float32, x_row [K] -> [R]"""
    return tl.sum(block * x_row[None, :].to(tl.float32), axis=1)


@triton.jit
def _shrink(
    x,
    x_stride,
    partial,
    tiles,
    tile_room,
    a_addr,
    ranks,
    first_row,
    num_rows,
    tile,
    index,
    split,
    IN: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK_CAPACITY: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One shrink item; returns whether the tile has this slice, and so something was written."""
    slot = tl.load(tiles + 2 * tile_room + tile)
    start = tl.load(tiles + tile)
    rows = tl.load(tiles + tile_room + tile)
    entry = (tl.maximum(slot, 0) * num_rows + first_row + index) * WORDS
    rank = tl.minimum(tl.load(ranks + 2 * entry), RANK_CAPACITY)
    address = tl.load(a_addr + entry)
    is_present = (slot >= 0) & (rank > 0)
    if is_present:
        a = tl.multiple_of(address.to(tl.pointer_type(BLOCK)), 16)
        k = split * BLOCK_K + tl.arange(0, BLOCK_K)
        r = tl.arange(0, BLOCK_R)
        in_range = k < IN
        at = a + r[:, None] * IN + k[None, :]
        present = tl.load(at, mask=(r < rank)[:, None] & in_range[None, :], other=0)
        x_at = x + start.to(tl.int64) * x_stride + k
        x0 = tl.load(x_at, mask=in_range, other=0)
        x1 = tl.load(x_at + x_stride, mask=in_range & (rows > 1), other=0)
        x2 = tl.load(x_at + 2 * x_stride, mask=in_range & (rows > 2), other=0)
        x3 = tl.load(x_at + 3 * x_stride, mask=in_range & (rows > 3), other=0)
        row_size: tl.constexpr = NUM_SLICES * SPLITS * RANK_CAPACITY
        out = partial + (tile * 4).to(tl.int64) * row_size + (index * SPLITS + split) * RANK_CAPACITY + r
        for r0 in range(0, rank, BLOCK_R):
            following = present
            if RANK_CAPACITY > BLOCK_R:
                at += BLOCK_R * IN
                following = tl.load(at, mask=(r0 + BLOCK_R + r < rank)[:, None] & in_range[None, :], other=0)
            wide = present.to(tl.float32)
            in_rank = r0 + r < rank
            if tl.int8 == BLOCK:
                scale_at = address + (rank.to(tl.int64) * IN + 63) // 64 * 64
                scale = tl.load(scale_at.to(tl.pointer_type(tl.float32)) + r0 + r, mask=in_rank, other=0)
                wide *= scale[:, None]
            tl.store(out + r0, _dot_rows(wide, x0), mask=in_rank)
            if rows > 1:
                tl.store(out + row_size + r0, _dot_rows(wide, x1), mask=in_rank)
            if rows > 2:
                tl.store(out + 2 * row_size + r0, _dot_rows(wide, x2), mask=in_rank)
            if rows > 3:
                tl.store(out + 3 * row_size + r0, _dot_rows(wide, x3), mask=in_rank)
            present = following
    return is_present


@triton.jit
def _reduced(partial, in_rank, SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr, RANK_CAPACITY: tl.constexpr):
    """The sum over splits, [BLOCK_R]. Past the L1 cache: other programs of this launch may have written it."""
    split = tl.arange(0, PADDED_SPLITS)
    at = partial[None, :] + split[:, None] * RANK_CAPACITY
    parts = tl.load(at, mask=(split < SPLITS)[:, None] & in_rank[None, :], other=0, cache_modifier=".cg")
    return tl.sum(parts, axis=0)


@triton.jit
def _wait(counter, NUM_PRODUCERS: tl.constexpr, NUM_CONSUMERS):
    """Until all splits are written; see the module for who resets the counter."""
    while tl.load(counter, volatile=True) < NUM_PRODUCERS:
        pass
    tl.debug_barrier()  # every thread has seen it before this program counts as one that has
    seen = tl.atomic_add(counter, 1, sem="acquire", scope="gpu")
    if seen == NUM_PRODUCERS + NUM_CONSUMERS - 1:
        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
    tl.debug_barrier()


@triton.jit
def _gained(block, gain, HAS_GAINS: tl.constexpr):
    if HAS_GAINS:
        block *= gain
    return block


@triton.jit
def _add_member(
    acc0,
    acc1,
    acc2,
    acc3,
    gain,
    partial,
    b,
    n,
    in_width,
    rank,
    rows,
    factor,
    counter,
    num_consumers,
    NUM_SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    RANK_CAPACITY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WAITS: tl.constexpr,
    HAS_GAINS: tl.constexpr,
):
    """acc_i += gain * factor * (s_i B^T) for rows i of a tile; b: the slice's B, partial: the tile's first row in the
    slice."""
    r = tl.arange(0, BLOCK_R)
    at = b + n[:, None] * rank + r[None, :]
    present = tl.load(at, mask=in_width[:, None] & (r < rank)[None, :], other=0)
    if WAITS:
        _wait(counter, SPLITS, num_consumers)
    row_size: tl.constexpr = NUM_SLICES * SPLITS * RANK_CAPACITY
    for r0 in range(0, rank, BLOCK_R):
        following = present
        if RANK_CAPACITY > BLOCK_R:
            at += BLOCK_R
            following = tl.load(at, mask=in_width[:, None] & (r0 + BLOCK_R + r < rank)[None, :], other=0)
        wide = present.to(tl.float32)
        in_rank = r0 + r < rank
        s = partial + r0 + r
        dot = _dot_rows(wide, factor * _reduced(s, in_rank, SPLITS, PADDED_SPLITS, RANK_CAPACITY))
        acc0 += _gained(dot, gain, HAS_GAINS)
        if rows > 1:
            s += row_size
            dot = _dot_rows(wide, factor * _reduced(s, in_rank, SPLITS, PADDED_SPLITS, RANK_CAPACITY))
            acc1 += _gained(dot, gain, HAS_GAINS)
        if rows > 2:
            s += row_size
            dot = _dot_rows(wide, factor * _reduced(s, in_rank, SPLITS, PADDED_SPLITS, RANK_CAPACITY))
            acc2 += _gained(dot, gain, HAS_GAINS)
        if rows > 3:
            s += row_size
            dot = _dot_rows(wide, factor * _reduced(s, in_rank, SPLITS, PADDED_SPLITS, RANK_CAPACITY))
            acc3 += _gained(dot, gain, HAS_GAINS)
        present = following
    return acc0, acc1, acc2, acc3


@triton.jit
def _add_to_row(y, kept, acc, mask, HAS_GAINS: tl.constexpr):
    present = _gained(tl.load(y, mask=mask, other=0).to(tl.float32), kept, HAS_GAINS)
    tl.store(y, (present + acc).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _expand(
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
    counters,
    tile,
    chunk,
    OFFSETS: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    RANK_CAPACITY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_GAINS: tl.constexpr,
    WAITS: tl.constexpr,
):
    """One expand item: columns number `chunk` of all slices' chunks of BLOCK_N columns, for the rows of a head tile."""
    index, first, offset, width = 0, 0, OFFSETS[0], WIDTHS[0]
    begin = 0
    for i in tl.static_range(1, NUM_SLICES):
        begin += (WIDTHS[i - 1] + BLOCK_N - 1) // BLOCK_N
        is_behind = chunk >= begin
        index, first = tl.where(is_behind, i, index), tl.where(is_behind, begin, first)
        offset, width = tl.where(is_behind, OFFSETS[i], offset), tl.where(is_behind, WIDTHS[i], width)
    num_chunks = (width + BLOCK_N - 1) // BLOCK_N
    n = (chunk - first) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_width = n < width
    chain = tl.load(tiles + 3 * tile_room + tile)
    start = tl.load(tiles + tile)
    rows = tl.load(tiles + tile_room + tile)
    acc0 = tl.zeros((BLOCK_N,), tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
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
        s = partial + ((member * 4).to(tl.int64) * NUM_SLICES + index) * (SPLITS * RANK_CAPACITY)
        counter = counters + member * NUM_SLICES + index
        gain = kept
        if HAS_GAINS:
            gain_address = tl.load(gain_addr + entry)
            is_gained = gain_address != 0
            gains = tl.multiple_of(gain_address.to(tl.pointer_type(tl.float32)), 16)
            gain = tl.load(gains + n, mask=in_width & is_gained, other=1)
            f = tl.where(is_gained, weight * gain + (1 - weight), 1.0)
            acc0, acc1, acc2, acc3, kept = acc0 * f, acc1 * f, acc2 * f, acc3 * f, kept * f
            touched = tl.where(is_gained, 1, touched)
        if rank > 0:
            b = tl.multiple_of(address.to(tl.pointer_type(BLOCK)), 16)
            touched = 1
            # With a rank of whole vectors, the compiler knows that rows of B are loaded in vectors; without, each
            # element has an address # of its own.
            if rank % 8 == 0:
                acc0, acc1, acc2, acc3 = _add_member(
                    acc0, acc1, acc2, acc3, gain, s, b, n, in_width, rank // 8 * 8, rows, factor, counter, num_chunks,
                    NUM_SLICES, SPLITS, PADDED_SPLITS, RANK_CAPACITY, BLOCK_R, WAITS, HAS_GAINS,
                )  # fmt: skip
            else:
                acc0, acc1, acc2, acc3 = _add_member(
                    acc0, acc1, acc2, acc3, gain, s, b, n, in_width, rank, rows, factor, counter, num_chunks,
                    NUM_SLICES, SPLITS, PADDED_SPLITS, RANK_CAPACITY, BLOCK_R, WAITS, HAS_GAINS,
                )  # fmt: skip
        if bias_address != 0:
            touched = 1
            bias = tl.multiple_of(bias_address.to(tl.pointer_type(BIAS)), 16)
            added = weight * tl.load(bias + n, mask=in_width, other=0).to(tl.float32)
            acc0, acc1, acc2, acc3 = acc0 + added, acc1 + added, acc2 + added, acc3 + added
    if touched != 0:
        y_at = y + start.to(tl.int64) * y_stride + offset + n
        _add_to_row(y_at, kept, acc0, in_width, HAS_GAINS)
        if rows > 1:
            _add_to_row(y_at + y_stride, kept, acc1, in_width, HAS_GAINS)
        if rows > 2:
            _add_to_row(y_at + 2 * y_stride, kept, acc2, in_width, HAS_GAINS)
        if rows > 3:
            _add_to_row(y_at + 3 * y_stride, kept, acc3, in_width, HAS_GAINS)


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
    NUM_SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK_CAPACITY: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (slices x splits, tiles)."""
    item = tl.program_id(0)
    _shrink(
        x, x_stride, partial, tiles, tile_room, a_addr, ranks, first_row, num_rows,
        tl.program_id(1), item // SPLITS, item % SPLITS,
        IN, BLOCK, NUM_SLICES, SPLITS, RANK_CAPACITY, BLOCK_K, BLOCK_R,
    )  # fmt: skip


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
    PADDED_SPLITS: tl.constexpr,
    RANK_CAPACITY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_GAINS: tl.constexpr,
):
    """Grid (N-chunks of all slices, tiles)."""
    _expand(
        y, y_stride, partial, tiles, tile_room, b_addr, bias_addr, gain_addr, ranks, scales, first_row, num_rows,
        ranks, tl.program_id(1), tl.program_id(0),
        OFFSETS, WIDTHS, BLOCK, BIAS, NUM_SLICES, SPLITS, PADDED_SPLITS, RANK_CAPACITY, BLOCK_N, BLOCK_R, HAS_GAINS,
        False,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["tile_room", "first_row", "num_rows", "num_tiles"],
    do_not_specialize_on_alignment=["tiles", "a_addr", "b_addr", "bias_addr", "gain_addr", "ranks", "scales"],
)
def fused_small_kernel(
    y,
    y_stride,
    x,
    x_stride,
    partial,
    tiles,
    tile_room,
    a_addr,
    b_addr,
    bias_addr,
    gain_addr,
    ranks,
    scales,
    first_row,
    num_rows,
    counters,
    num_tiles,
    IN: tl.constexpr,
    OFFSETS: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    RANK_CAPACITY: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_GAINS: tl.constexpr,
):
    """Grid (num_tiles x (slices x splits + N-chunks)). counters: int32, 0 before and after: tickets, (tile, slice)."""
    shrink_items = num_tiles * (NUM_SLICES * SPLITS)
    ticket = tl.atomic_add(counters, 1, sem="relaxed", scope="gpu")
    if ticket == shrink_items + num_tiles * NUM_CHUNKS - 1:
        tl.atomic_xchg(counters, 0, sem="relaxed", scope="gpu")
    if ticket < shrink_items:
        tile, item = ticket // (NUM_SLICES * SPLITS), ticket % (NUM_SLICES * SPLITS)
        is_written = _shrink(
            x, x_stride, partial, tiles, tile_room, a_addr, ranks, first_row, num_rows,
            tile, item // SPLITS, item % SPLITS,
            IN, BLOCK, NUM_SLICES, SPLITS, RANK_CAPACITY, BLOCK_K, BLOCK_R,
        )  # fmt: skip
        if is_written:
            tl.debug_barrier()  # every thread has stored before the counter says so
            tl.atomic_add(counters + 1 + tile * NUM_SLICES + item // SPLITS, 1, sem="release", scope="gpu")
    else:
        rest = ticket - shrink_items
        _expand(
            y, y_stride, partial, tiles, tile_room, b_addr, bias_addr, gain_addr, ranks, scales, first_row, num_rows,
            counters + 1, rest // NUM_CHUNKS, rest % NUM_CHUNKS,
            OFFSETS, WIDTHS, BLOCK, BIAS, NUM_SLICES, SPLITS, PADDED_SPLITS, RANK_CAPACITY, BLOCK_N, BLOCK_R, HAS_GAINS,
            True,
        )  # fmt: skip
