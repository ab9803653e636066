"""The kernels of paged attention: one query per sequence, split over its context; and tiles of queries, split where
they are few.

All fold tiles of keys into a running softmax (Flash Attention, arXiv 2205.14135): top is the largest score so far,
total the sum of 2^(score - top), acc the sum of 2^(score - top) * value. The rows of a tile are the queries of all
heads that share a KV head. Scores are in base 2: their scale carries log2(e). Keys and values that no query may see are
never loaded, for their bytes may be NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_SPLITS = tl.constexpr(32)
"""Parts of one sequence's context, at most."""

MIN_SPLIT = tl.constexpr(256)
"""Keys in a part, at least."""

SPLIT_STEP = tl.constexpr(128)
"""Parts are a multiple of this, and this is one of every tile of keys."""


@triton.jit
def _fold_keys(
    q,
    kv_ptr,
    table_ptr,
    query_positions,
    start,
    end,
    first_key,
    window,
    scale,
    cap,
    block_stride,
    value_offset,
    top,
    total,
    acc,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Keys [start, end), start a multiple of KEYS. IS_WHOLE: all of each tile's keys are seen by every query.

    Scores are in base 2: scale q K^T, or under a soft cap cap tanh(scale q K^T).
    """
    dims = tl.arange(0, DIMS)
    for tile in range(start, end, KEYS):
        positions = tl.multiple_of(tile, KEYS) + tl.arange(0, KEYS)
        if IS_WHOLE:
            blocks = tl.load(table_ptr + positions // BLOCK_SIZE)
        else:
            is_key = (positions >= first_key) & (positions < end)
            blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=is_key, other=0)
        places = blocks.to(tl.int64) * block_stride + positions % BLOCK_SIZE * HEAD_DIM
        ptrs = kv_ptr + places[:, None] + dims[None, :]
        if IS_WHOLE and DIMS == HEAD_DIM:
            keys = tl.load(ptrs)
            values = tl.load(ptrs + value_offset)
        elif IS_WHOLE:
            keys = tl.load(ptrs, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            values = tl.load(ptrs + value_offset, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            is_held = is_key[:, None] & (dims < HEAD_DIM)[None, :]
            keys = tl.load(ptrs, mask=is_held, other=0.0)
            values = tl.load(ptrs + value_offset, mask=is_held, other=0.0)
        scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee") * scale
        if HAS_CAP:
            decay = tl.exp2(-2 * 1.4426950408889634 * tl.abs(scores))
            scores = cap * tl.where(scores < 0, decay - 1, 1 - decay) / (1 + decay)
        if not IS_WHOLE:
            is_seen = is_key[None, :]
            if IS_CAUSAL:
                is_seen = is_seen & (positions[None, :] <= query_positions[:, None])
            if HAS_WINDOW:
                is_seen = is_seen & (positions[None, :] > query_positions[:, None] - window)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # Of a tile with a diagonal or an edge, a query may see no key, and may have seen none before.
        pivot = new_top if IS_WHOLE or not IS_CAUSAL else tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - pivot[:, None])
        decay = tl.exp2(top - pivot)
        total = total * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(q.dtype), values.to(q.dtype), acc * decay[:, None], input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit
def _softmax_start(sinks_ptr, heads, is_row, is_first, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr):
    """(top, total) of rows before their first key: nothing, or in the first part of a context the sinks of their heads,
    which are scores without a value."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=is_row & is_first, other=0.0).to(tl.float32)
        top = tl.where(is_first, sinks * 1.4426950408889634, top)
        total = tl.where(is_first, 1.0, total)
    return top, total


@triton.jit
def _sum_parts(
    partial_ptr,
    softmax_ptr,
    first_part,
    split_stride,
    count,
    NUM_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
):
    """NUM_ROWS rows (padded to ROWS) from their `count` parts, in the order of these: float32 [ROWS, DIMS].

    Part of row r and split s: first_part + s * split_stride + r. Loads go past the cache of the multiprocessor, as
    others wrote it.
    """
    rows, splits, dims = tl.arange(0, ROWS), tl.arange(0, MAX_SPLITS), tl.arange(0, DIMS)
    parts = first_part + splits[:, None] * split_stride + rows[None, :]
    is_part = (splits < count)[:, None] & (rows < NUM_ROWS)[None, :]
    tops = tl.load(softmax_ptr + 2 * parts, mask=is_part, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(softmax_ptr + 2 * parts + 1, mask=is_part, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(totals * tl.exp2(tops - top[None, :]), axis=0)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    CHUNK: tl.constexpr = MAX_SPLITS // ROWS if ROWS < MAX_SPLITS else 1  # so many at once as fit in registers
    for split in range(0, count, CHUNK):
        chunk = split + tl.arange(0, CHUNK)
        chunk_parts = first_part + chunk[:, None] * split_stride + rows[None, :]
        is_inside = (chunk < count)[:, None] & (rows < NUM_ROWS)[None, :]
        chunk_tops = tl.load(softmax_ptr + 2 * chunk_parts, mask=is_inside, other=float("-inf"), cache_modifier=".cg")
        ptrs = partial_ptr + chunk_parts[:, :, None] * HEAD_DIM + dims[None, None, :]
        is_held = is_inside[:, :, None] & (dims < HEAD_DIM)[None, None, :]
        partials = tl.load(ptrs, mask=is_held, other=0.0, cache_modifier=".cg")
        shares = tl.exp2(chunk_tops - top[None, :])
        acc += tl.sum(partials * shares[:, :, None], axis=0)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


# ------------------------------------------------------------------------------------------------- one query a sequence


@triton.jit(
    do_not_specialize=["num_splits", "table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "contexts_ptr", "sequences_ptr", "q_indptr_ptr"],
)
def decode_attention_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    tables_ptr,
    contexts_ptr,
    sequences_ptr,
    q_indptr_ptr,
    partial_ptr,
    softmax_ptr,
    arrivals_ptr,
    sinks_ptr,
    scale,
    cap,
    window,
    num_splits,
    table_stride,
    q_token_stride,
    q_head_stride,
    block_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_LISTED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Program (KV head, sequence, number p): parts p, p + P, ... of the context, P being how many programs there are.
    Those that have nothing to do in most steps begin last.

    Where the parts begin depends on the sequence's own context alone, not on P. Of several programs, the last to arrive
    adds all parts up, in their order; it leaves its counter at 0 for the next launch.
    """
    kv_head, item, first = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, row = item, item
    if IS_LISTED:
        sequence = tl.load(sequences_ptr + item)
        row = tl.load(q_indptr_ptr + sequence)
    context = tl.load(contexts_ptr + sequence)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(context - window, 0)
    begin = first_key // KEYS * KEYS  # the first tile holds a key that is seen
    per_split = tl.cdiv(tl.cdiv(context - begin, MAX_SPLITS), SPLIT_STEP) * SPLIT_STEP
    per_split = tl.maximum(per_split, MIN_SPLIT)
    count = tl.maximum(tl.cdiv(context - begin, per_split), 1)
    if first >= count:
        return
    members = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    is_inside = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + members
    q_ptrs = q_ptr + row.to(tl.int64) * q_token_stride + (heads * q_head_stride)[:, None] + dims[None, :]
    q = tl.load(q_ptrs, mask=is_inside, other=0.0)
    dtype = out_ptr.dtype.element_ty
    out_start = out_ptr + (row.to(tl.int64) * KV_HEADS + kv_head) * GROUP * HEAD_DIM
    out_places = members[:, None] * HEAD_DIM + dims[None, :]
    group = item.to(tl.int64) * KV_HEADS + kv_head
    first_part = group * num_splits * GROUP
    for split in range(first, count if IS_SPLIT else 1, tl.num_programs(2)):
        start = begin + split * per_split
        top, total = _softmax_start(sinks_ptr, heads, members < GROUP, split == 0, ROWS, HAS_SINKS)
        top, total, acc = _fold_keys(
            q,
            kv_ptr + kv_head * BLOCK_SIZE * HEAD_DIM,
            tables_ptr + sequence.to(tl.int64) * table_stride,
            members,  # positions of queries: all see every key
            start,
            tl.minimum(start + per_split, context),
            first_key,
            window,
            scale,
            cap,
            block_stride,
            KV_HEADS * BLOCK_SIZE * HEAD_DIM,
            top,
            total,
            tl.zeros([ROWS, DIMS], tl.float32),
            HEAD_DIM=HEAD_DIM,
            DIMS=DIMS,
            BLOCK_SIZE=BLOCK_SIZE,
            KEYS=KEYS,
            IS_WHOLE=False,
            IS_CAUSAL=False,
            HAS_WINDOW=False,
            HAS_CAP=HAS_CAP,
        )
        if not IS_SPLIT:  # noqa: SIM114 - one branch is chosen at compile time, the other at run time
            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out_start + out_places, acc.to(dtype), mask=is_inside)
        elif count == 1:
            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out_start + out_places, acc.to(dtype), mask=is_inside)
        else:
            part = first_part + split * GROUP
            tl.store(partial_ptr + part * HEAD_DIM + out_places, acc, mask=is_inside)
            tl.store(softmax_ptr + 2 * (part + members), top, mask=members < GROUP)
            tl.store(softmax_ptr + 2 * (part + members) + 1, total, mask=members < GROUP)
    if IS_SPLIT:  # noqa: SIM102 - chosen at compile time
        if count > 1:
            tl.debug_barrier()  # what all threads wrote comes before what one of them signals
            arrived = tl.atomic_add(arrivals_ptr + group, 1)
            if arrived == tl.minimum(count, tl.num_programs(2)) - 1:
                tl.store(arrivals_ptr + group, 0)
                summed = _sum_parts(partial_ptr, softmax_ptr, first_part, GROUP, count, GROUP, MEMBERS, HEAD_DIM, DIMS)
                places = tl.arange(0, MEMBERS)[:, None] * HEAD_DIM + dims[None, :]
                is_member = (tl.arange(0, MEMBERS) < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
                tl.store(out_start + places, summed.to(dtype), mask=is_member)


# ----------------------------------------------------------------------------------------------------- tiles of queries


@triton.jit(
    do_not_specialize=["keys_per_split", "table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "contexts_ptr", "tiles_ptr", "q_indptr_ptr"],
)
def prefill_attention_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    tables_ptr,
    contexts_ptr,
    tiles_ptr,
    q_indptr_ptr,
    partial_ptr,
    softmax_ptr,
    sinks_ptr,
    scale,
    cap,
    window,
    keys_per_split,
    table_stride,
    q_token_stride,
    q_head_stride,
    block_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Program (KV head, tile, part of the keys): QUERIES queries of the tile, times GROUP heads, are up to ROWS rows.

    keys_per_split: a multiple of KEYS. Of several parts, each leaves its sums for `combine_attention_kernel`.
    """
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles_ptr + 2 * tile)
    first_query = tl.load(tiles_ptr + 2 * tile + 1)
    first_row = tl.load(q_indptr_ptr + sequence)
    query_len = tl.load(q_indptr_ptr + sequence + 1) - first_row
    offset = tl.load(contexts_ptr + sequence) - query_len  # the position of the sequence's first query
    end_query = tl.minimum(first_query + QUERIES, query_len)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_inside = (queries < end_query)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (first_row + queries).to(tl.int64)
    q_ptrs = q_ptr + (tokens * q_token_stride + heads * q_head_stride)[:, None] + dims[None, :]
    q = tl.load(q_ptrs, mask=is_inside, other=0.0)

    end = offset + end_query
    whole_end = (offset + first_query + 1) // KEYS * KEYS  # up to here the first query sees every key
    start, first_key, whole_start = 0, 0, 0
    if HAS_WINDOW:
        first_key = tl.maximum(offset + first_query - window + 1, 0)
        start = first_key // KEYS * KEYS
        whole_start = tl.cdiv(tl.maximum(end - window, 0), KEYS) * KEYS  # from here on the last one does
    if IS_SPLIT:
        split = tl.program_id(2)
        start = tl.maximum(start, split * keys_per_split)
        end = tl.minimum(end, (split + 1) * keys_per_split)
        whole_end = tl.minimum(whole_end, (split + 1) * keys_per_split)
    whole_end = tl.maximum(whole_end, start)
    whole_start = tl.minimum(tl.maximum(whole_start, start), whole_end)

    is_first = tl.program_id(2) == 0  # there is one part where they are not split
    top, total = _softmax_start(sinks_ptr, heads, queries < end_query, is_first, ROWS, HAS_SINKS)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for phase in tl.static_range(0 if HAS_WINDOW else 1, 3):  # the window's edge, what all queries see, the diagonal
        top, total, acc = _fold_keys(
            q,
            kv_ptr + kv_head * BLOCK_SIZE * HEAD_DIM,
            tables_ptr + sequence.to(tl.int64) * table_stride,
            offset + queries,
            start if phase == 0 else (whole_start if phase == 1 else whole_end),
            whole_start if phase == 0 else (whole_end if phase == 1 else end),
            first_key,
            window,
            scale,
            cap,
            block_stride,
            KV_HEADS * BLOCK_SIZE * HEAD_DIM,
            top,
            total,
            acc,
            HEAD_DIM=HEAD_DIM,
            DIMS=DIMS,
            BLOCK_SIZE=BLOCK_SIZE,
            KEYS=KEYS,
            IS_WHOLE=phase == 1,
            IS_CAUSAL=True,
            HAS_WINDOW=HAS_WINDOW,
            HAS_CAP=HAS_CAP,
        )
    if IS_SPLIT:
        group = tile.to(tl.int64) * KV_HEADS + kv_head
        parts = (group * tl.num_programs(2) + tl.program_id(2)) * ROWS + rows
        tl.store(softmax_ptr + 2 * parts, top)
        tl.store(softmax_ptr + 2 * parts + 1, total)
        tl.store(partial_ptr + parts[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_inside)
    else:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_ptrs = out_ptr + ((tokens * KV_HEADS * GROUP + heads) * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["tiles_ptr", "q_indptr_ptr"])
def combine_attention_kernel(
    out_ptr,
    tiles_ptr,
    q_indptr_ptr,
    partial_ptr,
    softmax_ptr,
    num_splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Program (row of a tile, KV head, tile): the parts of one query and head, in their order."""
    row, kv_head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tiles_ptr + 2 * tile)
    query = tl.load(tiles_ptr + 2 * tile + 1) + row // GROUP
    first_row = tl.load(q_indptr_ptr + sequence)
    if first_row + query >= tl.load(q_indptr_ptr + sequence + 1):
        return
    group = tile.to(tl.int64) * KV_HEADS + kv_head
    first_part = group * num_splits * ROWS + row
    summed = _sum_parts(partial_ptr, softmax_ptr, first_part, ROWS, num_splits, 1, 1, HEAD_DIM, DIMS)
    dims = tl.arange(0, DIMS)
    head = kv_head * GROUP + row % GROUP
    out_start = out_ptr + ((first_row + query).to(tl.int64) * KV_HEADS * GROUP + head) * HEAD_DIM
    tl.store(out_start + dims[None, :], summed.to(out_ptr.dtype.element_ty), mask=(dims < HEAD_DIM)[None, :])
