"""Which experts a row goes to, and the pairs (row, expert) sorted by (expert, row) and cut into blocks, on the device.

    route    one program a row      factors float32 and the chosen experts, ascending; in how many segments the row is
    count    one program an expert  its pairs, and how many of them (pair, segment) there are
    place    one program an expert  its pairs' places in the order, its blocks of ROWS pairs
    group    one program an expert  which of its places are in which segment of the plan

The sizes of all of it follow from shapes: the host waits for nothing, and a captured step may hold it. Nothing is added
by atomics, so places do not depend on which program is first. A batch is ordered by adapter: the pairs of an expert, in
the order of their rows, are sorted by adapter, and a segment's are one range.

    blocks  int32 [3, num_blocks]           expert (-1: unused), first place, number of places
    groups  int32 [5, experts, capacity]    first place, last place + 1, lora_slot, bits of the weight, first row of s
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP_FIELDS = 5
BLOCK_FIELDS = 3


@triton.jit(do_not_specialize_on_alignment=["starts", "ends", "slots"])
def route_kernel(
    logits,
    row_stride,
    chosen,
    factors,
    members,
    starts,
    ends,
    slots,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZES: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """p = softmax(logits[t]) in float32; the TOP_K largest, of equal ones the first expert; a row of NaN has some.

    CAPACITY: of the plan's segments; 0: there are none.
    """
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    is_expert = expert < NUM_EXPERTS
    wide = tl.load(logits + row * row_stride + expert, mask=is_expert, other=float("-inf")).to(tl.float32)
    powers = tl.exp(wide - tl.max(wide, axis=0))
    p = tl.where(is_expert, powers / tl.sum(powers, axis=0), 0.0)
    left = tl.where(is_expert, tl.where(p == p, p, 0.0), -2.0)
    is_chosen = tl.zeros((BLOCK_E,), tl.int32)
    for _ in tl.static_range(TOP_K):
        best = tl.min(tl.where(left == tl.max(left, axis=0), expert, BLOCK_E), axis=0)
        is_chosen = tl.where(expert == best, 1, is_chosen)
        left = tl.where(expert == best, -1.0, left)
    factor = tl.where(is_chosen != 0, p, 0.0)
    if NORMALIZES:
        factor /= tl.sum(factor, axis=0)
    place = row * TOP_K + tl.cumsum(is_chosen, axis=0) - 1
    tl.store(chosen + place, expert, mask=is_chosen != 0)
    tl.store(factors + place, factor, mask=is_chosen != 0)
    if CAPACITY > 0:
        segment = tl.arange(0, BLOCK_S)
        is_segment = segment < CAPACITY
        start = tl.load(starts + segment, mask=is_segment, other=0)
        end = tl.load(ends + segment, mask=is_segment, other=0)
        slot = tl.load(slots + segment, mask=is_segment, other=-1)
        is_in = (slot >= 0) & (start <= row) & (row < end)
        tl.store(members + row, tl.sum(is_in.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    chosen,
    members,
    counts,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_LORA: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """counts[0, e]: pairs of expert e; counts[1, e]: the sum of their rows' segments."""
    expert = tl.program_id(0)
    count = tl.zeros((PAIRS,), tl.int32)
    in_segments = tl.zeros((PAIRS,), tl.int32)
    for first in range(0, num_pairs, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        is_mine = tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == expert
        count += is_mine.to(tl.int32)
        if HAS_LORA:
            in_segments += tl.load(members + pair // TOP_K, mask=is_mine, other=0)
    tl.store(counts + expert, tl.sum(count, axis=0))
    if HAS_LORA:
        tl.store(counts + NUM_EXPERTS + expert, tl.sum(in_segments, axis=0))


@triton.jit
def _before(counts, expert, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr):
    """Of the experts before this one, the sum of counts rounded up to blocks of ROWS, in blocks."""
    other = tl.arange(0, BLOCK_E)
    found = tl.load(counts + other, mask=(other < NUM_EXPERTS) & (other < expert), other=0)
    return tl.sum((found + ROWS - 1) // ROWS, axis=0)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def place_kernel(
    chosen,
    counts,
    order,
    places,
    blocks,
    num_pairs,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """order[place] = pair and places[pair] = place, in which pair = row * TOP_K + which of the row's experts."""
    expert = tl.program_id(0)
    begin = _before(counts, expert, NUM_EXPERTS, BLOCK_E, 1)
    count = tl.load(counts + expert)
    place = begin
    for first in range(0, num_pairs, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        is_mine = (tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
        at = place + tl.cumsum(is_mine, axis=0) - 1
        tl.store(order + at, pair, mask=is_mine != 0)
        tl.store(places + pair, at, mask=is_mine != 0)
        place += tl.sum(is_mine, axis=0)
    first_block = _before(counts, expert, NUM_EXPERTS, BLOCK_E, ROWS)
    behind = first_block + (count + ROWS - 1) // ROWS
    for first in range(first_block, behind, PAIRS):
        block = first + tl.arange(0, PAIRS)
        start = (block - first_block) * ROWS
        tl.store(blocks + block, tl.zeros((PAIRS,), tl.int32) + expert, mask=block < behind)
        tl.store(blocks + num_blocks + block, begin + start, mask=block < behind)
        tl.store(blocks + 2 * num_blocks + block, tl.minimum(count - start, ROWS), mask=block < behind)
    if expert == NUM_EXPERTS - 1:
        for first in range(behind, num_blocks, PAIRS):
            block = first + tl.arange(0, PAIRS)
            tl.store(blocks + block, tl.full((PAIRS,), -1, tl.int32), mask=block < num_blocks)


@triton.jit
def _first_not_below(order, count, row, num_turns, TOP_K: tl.constexpr):
    """The number of the `count` pairs at `order` whose rows are less than `row`, for each number in `row`."""
    low = tl.zeros_like(row)
    high = low + count
    for _ in range(num_turns):
        is_open = low < high
        middle = (low + high) // 2
        is_less = tl.load(order + middle, mask=is_open, other=0) // TOP_K < row
        low = tl.where(is_open & is_less, middle + 1, low)
        high = tl.where(is_open & (is_less == 0), middle, high)
    return low


@triton.jit(do_not_specialize=["num_turns"], do_not_specialize_on_alignment=["starts", "ends", "slots", "weights"])
def group_kernel(
    order,
    counts,
    groups,
    num_groups,
    starts,
    ends,
    slots,
    weights,
    num_turns,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The groups of an expert in the order of the segments; num_turns: to halve the number of rows to nothing."""
    expert = tl.program_id(0)
    begin = _before(counts, expert, NUM_EXPERTS, BLOCK_E, 1)
    row_of_s = _before(counts + NUM_EXPERTS, expert, NUM_EXPERTS, BLOCK_E, 1)
    count = tl.load(counts + expert)
    segment = tl.arange(0, BLOCK_S)
    is_segment = segment < CAPACITY
    slot = tl.load(slots + segment, mask=is_segment, other=-1)
    start = tl.load(starts + segment, mask=is_segment, other=0)
    end = tl.load(ends + segment, mask=is_segment, other=0)
    weight = tl.load(weights + segment, mask=is_segment, other=0.0)
    first = _first_not_below(order + begin, count, start, num_turns, TOP_K)
    last = _first_not_below(order + begin, count, end, num_turns, TOP_K)
    length = tl.where(slot >= 0, last - first, 0)
    is_there = length > 0
    at = groups + expert * CAPACITY + tl.cumsum(is_there.to(tl.int32), axis=0) - 1
    stride = NUM_EXPERTS * CAPACITY
    tl.store(at, begin + first, mask=is_there)
    tl.store(at + stride, begin + last, mask=is_there)
    tl.store(at + 2 * stride, slot, mask=is_there)
    tl.store(at + 3 * stride, weight.to(tl.int32, bitcast=True), mask=is_there)
    tl.store(at + 4 * stride, row_of_s + tl.cumsum(length, axis=0) - length, mask=is_there)
    tl.store(num_groups + expert, tl.sum(is_there.to(tl.int32), axis=0))
