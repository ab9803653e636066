"""Paged attention on a GPU: which kernel runs which sequences of a step, in which tiles.

    one query in every sequence   decode kernel; its grid depends on the padded batch and the width of the tables alone,
                                  so a captured step may be replayed with any lengths
    otherwise                     tiles of queries for the sequences with more than one, listed on the host once per
                                  step, the longest first; few tiles over many keys (a short prompt behind a long cached
                                  prefix) are split too. The decode kernel runs the others. Where FlashAttention 3 is
                                  chosen (attention_choice.py), it runs most of the sequences that would have tiles
                                  (_FlashRule)

A sequence that decodes gets the same bits in every batch: where its context is split depends on its own length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.kernels.device_copies import upload
from loraplex.kernels.step_batch import AttentionPlan
from loraplex.kernels.triton.attention_kernels import (
    MAX_SPLITS,
    MIN_SPLIT,
    SPLIT_STEP,
    combine_attention_kernel,
    decode_attention_kernel,
    prefill_attention_kernel,
)
from loraplex.kernels.triton.flash_attention import FlashSequences, flash_attention
from loraplex.kernels.triton.launch import FLOAT_DTYPES, Launcher, next_power_of_2
from loraplex.kernels.triton.workspace import Workspace

LOG2_E = 1.4426950408889634
LEAST_ROWS = 16
"""Of a tile in tl.dot."""

MOST_GROUP = 64
"""Query heads that share a KV head, at most."""

MOST_DIMS = 256
ONE_AHEAD, TWO_AHEAD = 3, 5
"""Stages of the software pipeline for one or two tiles of keys on their way: each tile's entries of the block table
come a step before."""

DECODE_PROGRAMS_PER_SM = 16
"""Of the decode kernel, about: several times what runs at once, so that one long context among short ones does not come
last. No more, for programs without a part cost time too: where sequences are many, each program takes several parts of
a context. Between 2 and 16 no number was better on an H200."""

LEAST_DECODE_PROGRAMS = 2
"""For one sequence and KV head, where its context may have several parts."""

DECODE_TILE_BYTES = 16384
"""Of the keys that one step of the decode kernel loads; as many of values."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """What block sizes depend on."""

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    itemsize: int  # of queries
    kv_itemsize: int

    @property
    def dims(self) -> int:
        return max(LEAST_ROWS, int(next_power_of_2(self.head_dim)))

    @property
    def decode_keys(self) -> int:
        """Keys in a tile of the decode kernel."""
        bytes_per_key = self.dims * max(self.itemsize, self.kv_itemsize)
        return min(int(SPLIT_STEP.value), max(16, DECODE_TILE_BYTES // bytes_per_key))

    def decode_stages(self, launcher: Launcher) -> int:
        """Two blocks on a multiprocessor keep four tiles coming; with less shared memory, each has one on its way."""
        room_of_two = 2 * (2 * 2 * DECODE_TILE_BYTES + 8192)
        return TWO_AHEAD if room_of_two <= launcher.target.max_shared_bytes else ONE_AHEAD


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Of the prefill kernel: rows (queries x heads) and keys of a tile."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def _tiling(shape: _Shape, num_rows: int, launcher: Launcher) -> _Tiling:
    """`num_rows`: query tokens x heads of the step. Large tiles only where they still fill the GPU twice."""
    if shape.itemsize == 4:  # no tensor cores: what is in registers counts
        return _Tiling(rows=max(32, next_power_of_2(shape.group)), keys=16, num_warps=8, num_stages=3)
    is_hopper = launcher.target.capability >= (9, 0)
    if shape.dims > 128:
        rows, keys, num_warps = 64, 32, 8
    elif num_rows >= 2 * 128 * launcher.target.num_sms:
        rows, keys, num_warps = 128, 64, 8
    else:
        rows, keys, num_warps = 64, 64 if is_hopper or shape.dims < 128 else 32, 4
    key_bytes = 2 * keys * shape.dims * max(shape.itemsize, shape.kv_itemsize)
    query_bytes = rows * shape.dims * shape.itemsize
    has_room = query_bytes + 3 * key_bytes <= launcher.target.max_shared_bytes
    return _Tiling(rows, keys, num_warps, num_stages=TWO_AHEAD if has_room else ONE_AHEAD)


@dataclass(frozen=True, slots=True)
class _Schedule:
    """Of a step with prefills: tiles int32 [n, 2] of (sequence, first query), and the sequences that decode, int32 [m].

    max_keys: of the tile with most. flash: the sequences that FlashAttention 3 runs, which have no tiles; None: it runs
    none.
    """

    tiles: torch.Tensor
    decodes: torch.Tensor | None
    max_keys: int
    flash: FlashSequences | None


@dataclass(frozen=True, slots=True)
class _FlashRule:
    """Which sequences FlashAttention 3 runs. A sequence's own lengths decide, so neighbours do not change its bits.

    queries: in a tile of the prefill kernel.
    """

    queries: int
    num_kv_heads: int
    sliding_window: int | None
    launcher: Launcher

    def takes(self, query_len: int, context_len: int) -> bool:
        """Every prompt and chunk but few queries behind a long prefix: the prefill kernel divides their keys."""
        if query_len in (1, context_len):
            return query_len > 1
        num_groups = -(-query_len // self.queries) * self.num_kv_heads
        return _num_prefill_splits(num_groups, context_len, self.sliding_window, self.launcher) == 1


def paged_attention_gap(q: torch.Tensor, kv_layer: torch.Tensor) -> str | None:
    """Why the kernels do not cover the case; None: they do."""
    if q.dtype not in FLOAT_DTYPES or kv_layer.dtype not in FLOAT_DTYPES:
        return f"queries are {q.dtype} and the cache is {kv_layer.dtype}"
    if q.shape[2] > MOST_DIMS:
        return f"heads of {q.shape[2]}, more than {MOST_DIMS}"
    if q.shape[1] > MOST_GROUP * kv_layer.shape[2]:
        return f"{q.shape[1]} heads on {kv_layer.shape[2]} KV heads, more than {MOST_GROUP} on one"
    if q.stride(2) != 1 or not kv_layer[0].is_contiguous():
        return "queries or cache are not dense"
    return None


@dataclass(frozen=True, slots=True)
class _Call:
    """One paged_attention, and the tensor that it fills."""

    launcher: Launcher
    q: torch.Tensor
    kv_layer: torch.Tensor
    plan: AttentionPlan
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    sliding_window: int | None
    shape: _Shape
    out: torch.Tensor

    @property
    def scales(self) -> tuple[float, float]:
        """What a score is multiplied by before the soft cap, and what behind it; in base 2."""
        if self.softcap is None:
            return self.scale * LOG2_E, 0.0
        return self.scale / self.softcap, self.softcap * LOG2_E

    @property
    def sinks_or_any(self) -> torch.Tensor:
        """What kernels without sinks do not read."""
        return self.plan.context_lens if self.sinks is None else self.sinks

    @property
    def numbers(self) -> tuple[int, ...]:
        """The strides that both kernels take, in their order."""
        return (self.plan.block_tables.stride(0), self.q.stride(0), self.q.stride(1), self.kv_layer.stride(0))

    @property
    def constants(self) -> dict[str, int | bool]:
        """Those that both kernels have."""
        return {
            "KV_HEADS": self.shape.num_kv_heads,
            "GROUP": self.shape.group,
            "HEAD_DIM": self.shape.head_dim,
            "DIMS": self.shape.dims,
            "BLOCK_SIZE": self.shape.block_size,
            "HAS_WINDOW": self.sliding_window is not None,
            "HAS_CAP": self.softcap is not None,
            "HAS_SINKS": self.sinks is not None,
        }


def paged_attention(
    launcher: Launcher,
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    sliding_window: int | None,
    workspace: Workspace | None = None,
    *,
    is_flash: bool = False,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See KernelBackend.paged_attention; a sequence without a context gets zeros. `workspace`: new if not given.

    is_flash: FlashAttention 3 is chosen for prompts, and `flash_attention_gap` has nothing against it.
    """
    num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
    shape = _Shape(num_kv_heads, q.shape[1] // num_kv_heads, head_dim, block_size, q.itemsize, kv_layer.itemsize)
    workspace = workspace or Workspace("attention")
    if q.shape[0] == plan.context_lens.shape[0]:
        call = _Call(launcher, q, kv_layer, plan, scale, softcap, sinks, sliding_window, shape, _dense_like(q))
        _decode(call, workspace, None)
        return call.out
    tiling = _tiling(shape, 0 if is_flash else q.shape[0] * q.shape[1], launcher)  # it leaves few queries
    queries = tiling.rows // shape.group
    rule = _FlashRule(queries, num_kv_heads, sliding_window, launcher) if is_flash else None
    schedule = _schedule(plan, queries, rule)
    flash = schedule.flash  # it leaves zeros in the rows of others
    out = _dense_like(q) if flash is None else flash_attention(q, kv_layer, plan, flash, scale, sliding_window)
    call = _Call(launcher, q, kv_layer, plan, scale, softcap, sinks, sliding_window, shape, out)
    if len(schedule.tiles):
        _prefill(call, workspace, tiling, schedule)
    if schedule.decodes is not None:
        _decode(call, workspace, schedule.decodes)
    return out


def _dense_like(q: torch.Tensor) -> torch.Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _schedule(plan: AttentionPlan, queries: int, rule: _FlashRule | None) -> _Schedule:
    """Once per step for all layers alike; `queries` in a tile. rule None: no sequence is FlashAttention 3's."""
    key = ("triton_attention", queries, rule)
    schedule: _Schedule | None = plan.scratch.get(key)
    if schedule is None:
        device, query_lens = plan.context_lens.device, np.array(plan.query_lens, np.int64)
        contexts = np.array(plan.context_lens_host, np.int64)
        is_decode, is_flash = query_lens == 1, np.zeros(len(query_lens), bool)
        if rule is not None:
            is_flash[:] = [*map(rule.takes, plan.query_lens, plan.context_lens_host)]
        is_tiled = ~is_decode & ~is_flash
        schedule = plan.scratch[key] = _Schedule(
            upload(_tiles(query_lens * is_tiled, contexts, queries), device),
            upload(np.flatnonzero(is_decode).astype(np.int32), device) if is_decode.any() else None,
            int((contexts * is_tiled).max()),
            _flash_sequences(query_lens * is_flash, contexts * is_flash, device) if is_flash.any() else None,
        )
    return schedule


def _flash_sequences(
    query_lens: NDArray[np.int64], context_lens: NDArray[np.int64], device: torch.device
) -> FlashSequences:
    """Lengths of 0 are of sequences that others run."""
    return FlashSequences(upload(context_lens.astype(np.int32), device), int(query_lens.max()))


def _tiles(query_lens: NDArray[np.int64], context_lens: NDArray[np.int64], queries: int) -> NDArray[np.int32]:
    """int32 [n, 2]: (sequence, first query), most keys first, so that no long tile begins last."""
    counts = -(-query_lens // queries)
    sequences = np.repeat(np.arange(len(counts)), counts)
    first_queries = (np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
    num_keys = (context_lens - query_lens)[sequences] + first_queries
    order = np.argsort(-num_keys, kind="stable")
    return np.stack([sequences[order], first_queries[order]], axis=1).astype(np.int32)


def _prefill(call: _Call, workspace: Workspace, tiling: _Tiling, schedule: _Schedule) -> None:
    shape, num_tiles = call.shape, len(schedule.tiles)
    num_groups = num_tiles * shape.num_kv_heads
    num_splits = _num_prefill_splits(num_groups, schedule.max_keys, call.sliding_window, call.launcher)
    keys_per_split = _round_up(-(-schedule.max_keys // num_splits), tiling.keys)
    sums = softmax = call.plan.context_lens  # any
    if num_splits > 1:
        num_parts = num_groups * num_splits * tiling.rows
        sums, softmax = _take_parts(call, workspace, num_parts)
    call.launcher.launch(
        prefill_attention_kernel,
        (shape.num_kv_heads, num_tiles, num_splits),
        call.q,
        call.kv_layer,
        call.out,
        call.plan.block_tables,
        call.plan.context_lens,
        schedule.tiles,
        call.plan.q_indptr,
        sums,
        softmax,
        call.sinks_or_any,
        *call.scales,
        call.sliding_window or 0,
        keys_per_split,
        *call.numbers,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        ROWS=tiling.rows,
        QUERIES=tiling.rows // shape.group,
        KEYS=tiling.keys,
        IS_SPLIT=num_splits > 1,
        **call.constants,
    )
    if num_splits > 1:
        call.launcher.launch(
            combine_attention_kernel,
            (tiling.rows // shape.group * shape.group, shape.num_kv_heads, num_tiles),
            call.out,
            schedule.tiles,
            call.plan.q_indptr,
            sums,
            softmax,
            num_splits,
            num_warps=4,
            num_stages=1,
            KV_HEADS=shape.num_kv_heads,
            GROUP=shape.group,
            ROWS=tiling.rows,
            HEAD_DIM=shape.head_dim,
            DIMS=shape.dims,
        )


def _take_parts(call: _Call, workspace: Workspace, num_parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 sums, float32 softmax states) of parts of contexts, for the last of them."""
    device = call.q.device
    sums = workspace.take("sums", num_parts * call.shape.head_dim, torch.float32, device)
    return sums, workspace.take("softmax", 2 * num_parts, torch.float32, device)


def _num_prefill_splits(num_groups: int, max_keys: int, sliding_window: int | None, launcher: Launcher) -> int:
    """Parts of the keys of each tile and KV head: 1 where there are enough of these, else what keeps the GPU busy."""
    if sliding_window is not None and 2 * sliding_window < max_keys:
        return 1  # most parts would lie before the window
    wanted = launcher.target.num_sms // num_groups
    return max(1, min(int(MAX_SPLITS.value), wanted, max_keys // (2 * int(MIN_SPLIT.value))))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _decode(call: _Call, workspace: Workspace, sequences: torch.Tensor | None) -> None:
    """`sequences`: those with one query, or None: all of them, row by row."""
    plan, shape = call.plan, call.shape
    num_sequences = len(plan.context_lens if sequences is None else sequences)
    num_splits = _num_splits(plan.block_tables.shape[1] * shape.block_size, call.sliding_window, shape.decode_keys)
    num_groups = num_sequences * shape.num_kv_heads
    num_programs = _num_decode_programs(num_groups, num_splits, call.launcher)
    sums = softmax = arrivals = plan.context_lens  # any: a context in one part needs none
    if num_splits > 1:
        num_parts = num_groups * num_splits * shape.group
        sums, softmax = _take_parts(call, workspace, num_parts)
        arrivals = workspace.take("arrivals", num_groups, torch.int32, call.q.device)
    call.launcher.launch(
        decode_attention_kernel,
        (shape.num_kv_heads, num_sequences, num_programs),
        call.q,
        call.kv_layer,
        call.out,
        plan.block_tables,
        plan.context_lens,
        plan.context_lens if sequences is None else sequences,
        plan.q_indptr,
        sums,
        softmax,
        arrivals,
        call.sinks_or_any,
        *call.scales,
        call.sliding_window or 0,
        num_splits,
        *call.numbers,
        num_warps=8 if shape.itemsize == 4 else 4,
        num_stages=shape.decode_stages(call.launcher),
        MEMBERS=next_power_of_2(shape.group),
        ROWS=max(LEAST_ROWS, next_power_of_2(shape.group)),
        KEYS=shape.decode_keys,
        IS_LISTED=sequences is not None,
        IS_SPLIT=num_splits > 1,
        **call.constants,
    )


def _num_decode_programs(num_groups: int, num_splits: int, launcher: Launcher) -> int:
    """For each sequence and KV head. What they compute does not depend on it."""
    wanted = -(-DECODE_PROGRAMS_PER_SM * launcher.target.num_sms // max(1, num_groups))
    return min(num_splits, max(LEAST_DECODE_PROGRAMS, wanted))


def _num_splits(max_context: int, sliding_window: int | None, keys: int) -> int:
    """Parts that a context of at most `max_context` tokens can have."""
    if sliding_window is not None:  # aligning its beginning adds less than a tile
        max_context = min(max_context, sliding_window + keys - 1)
    return max(1, min(int(MAX_SPLITS.value), -(-max_context // int(MIN_SPLIT.value))))
