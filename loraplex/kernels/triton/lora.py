"""add_lora in Triton: which kernels run, in which shapes, and the memory between shrink and expand.

    small tiles   lora_small.py   one fused launch, or two where the items would not all fit on the GPU at once
    large tiles   lora_large.py   two launches, three where K is split

A decode step has small tiles alone, in a grid as large as its rows (or as the plan's room), so that it depends on the
padded batch only. Sizes of blocks follow from shapes, dtypes and the largest rank of any adapter that the table has
held (`rank_capacity`): nothing is tried out at run time, and every start takes the same.

Kernels that know of gains run from the first block with a gain on, in this table; without gains the others cost
nothing more than they did.

What a capture needs: the same step was run once before, which makes the workspace; afterwards a replay reads tiles,
table and rows of x alone. It is good for any plan of the same padded size, as long as no rank of the step is above the
capacity of the capture, and no adapter of the step has a gain that the table had not at the capture (has_gains).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.core import LoraSlice
from loraplex.kernels.plan import LoraPlan, SlotTable
from loraplex.kernels.reference import check_rows
from loraplex.kernels.tiles import SMALL_ROWS, Tiles
from loraplex.kernels.triton.launch import Launcher
from loraplex.kernels.triton.lora_large import expand_large_kernel, reduce_kernel, shrink_large_kernel
from loraplex.kernels.triton.lora_small import expand_small_kernel, fused_small_kernel, shrink_small_kernel
from loraplex.kernels.triton.workspace import Workspace

TRITON_DTYPES: dict[torch.dtype, tl.dtype] = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8,
}

LEAST_RANK_CAPACITY = 16

SHRINK_ELEMENTS = 8192
"""Of A in one block of a shrink item, in 16 bits: 16 KB in flight per program."""

EXPAND_ELEMENTS = 4096
"""Of B in flight in one expand item: one block, or two where adapters may have more ranks than a block."""

SMALL_BLOCK_R = 16
"""Ranks in one block of an item. More would leave most of it empty for adapters of small ranks in a table that has a
large one too."""

FUSED_ITEMS_PER_SM = 8
"""Items of a fused launch per multiprocessor up to which it is chosen: about what runs at once. Not measured."""

LARGE_STAGE_BYTES = 98_304
"""Shared memory for the stages of a large product: two programs on a multiprocessor of an H100, one on small GPUs."""

REDUCE_BLOCK = 1024


def rank_capacity(table: SlotTable) -> int:
    """Ranks that launches over this table are made for: a power of two, never less than any rank the table has held."""
    capacity: int = max(LEAST_RANK_CAPACITY, triton.next_power_of_2(table.max_rank))
    return capacity


@dataclass(frozen=True)
class _Linear:
    """One add_lora, ready for its launches."""

    launcher: Launcher
    workspace: Workspace
    y: torch.Tensor
    x: torch.Tensor
    plan: LoraPlan
    table: SlotTable
    first_row: int
    slices: tuple[LoraSlice, ...]
    block_dtype: torch.dtype

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        self.launcher.launch(kernel, grid, *args, **constants)

    @property
    def capacity(self) -> int:
        return rank_capacity(self.table)

    @property
    def shape(self) -> dict[str, Any]:
        """Constants of every kernel."""
        return {
            "BLOCK": TRITON_DTYPES[self.block_dtype],
            "NUM_SLICES": len(self.slices),
            "RANK_CAPACITY": self.capacity,
        }

    @property
    def columns(self) -> dict[str, Any]:
        """Constants of the kernels that write y."""
        bias = torch.float32 if self.block_dtype == torch.int8 else self.block_dtype
        return {
            "OFFSETS": tuple(s.out_offset for s in self.slices),
            "WIDTHS": tuple(s.out_features for s in self.slices),
            "BIAS": TRITON_DTYPES[bias],
            "HAS_GAINS": self.table.has_gains,
        }

    def num_chunks(self, block_n: int) -> int:
        return sum(triton.cdiv(s.out_features, block_n) for s in self.slices)


def num_small_tiles(plan: LoraPlan) -> int:
    """That kernels go over: in a decode step as many as its padded rows can need, for a capture to serve other
    steps."""
    found = int(plan.cut_tiles().small.shape[1])
    return max(found, min(plan.num_tokens, plan.small_tiles.shape[1])) if plan.is_decode else found


def add_lora(
    launcher: Launcher,
    workspace: Workspace,
    y: torch.Tensor,
    x: torch.Tensor,
    plan: LoraPlan,
    table: SlotTable,
    first_row: int,
    slices: tuple[LoraSlice, ...],
    *,
    is_fused: bool | None = None,
) -> None:
    """As KernelBackend.add_lora. Rows of x and y are dense; the blocks of `table` have one dtype.

    is_fused: whether small tiles take one launch; None: as the shapes say.
    """
    check_rows(y, x, plan)
    if not table.block_dtypes:
        return  # no adapter was ever there
    (block_dtype,) = table.block_dtypes
    linear = _Linear(launcher, workspace, y, x, plan, table, first_row, slices, block_dtype)
    tiles = plan.cut_tiles()
    num_small = num_small_tiles(plan)
    if num_small:
        _add_small(linear, num_small, is_fused)
    if tiles.large.shape[1]:
        _add_large(linear, tiles)


# --------------------------------------------------------------------------------------------------------- small tiles


@dataclass(frozen=True, slots=True)
class SmallBlocks:
    """Sizes of the blocks of small tiles. They do not depend on the batch: nor does, then, what a row gets."""

    block_k: int
    splits: int
    block_n: int

    @classmethod
    def of(cls, in_features: int, block_dtype: torch.dtype, capacity: int) -> SmallBlocks:
        width = 2 if block_dtype == torch.float32 else 1
        block_k = min(SHRINK_ELEMENTS // SMALL_BLOCK_R // width, max(64, triton.next_power_of_2(in_features)))
        num_blocks = 1 if capacity <= SMALL_BLOCK_R else 2
        block_n = EXPAND_ELEMENTS // SMALL_BLOCK_R // width // num_blocks
        return cls(block_k, triton.cdiv(in_features, block_k), block_n)


def _add_small(linear: _Linear, num_tiles: int, is_fused: bool | None) -> None:
    in_features, num_slices = linear.x.shape[1], len(linear.slices)
    blocks = SmallBlocks.of(in_features, linear.block_dtype, linear.capacity)
    num_chunks = linear.num_chunks(blocks.block_n)
    items = num_tiles * (num_slices * blocks.splits + num_chunks)
    device = linear.x.device
    partial = linear.workspace.take(
        "partial", num_tiles * SMALL_ROWS * num_slices * blocks.splits * linear.capacity, torch.float32, device
    )
    if is_fused is None:
        is_fused = items <= FUSED_ITEMS_PER_SM * linear.launcher.target.num_sms
    y, x, table = linear.y, linear.x, linear.table
    tiles, room = linear.plan.small_tiles, linear.plan.small_tiles.shape[1]
    at = linear.first_row, table.num_rows
    shrink = {"IN": in_features, "SPLITS": blocks.splits, "BLOCK_K": blocks.block_k}
    expand = {"PADDED_SPLITS": triton.next_power_of_2(blocks.splits), "BLOCK_N": blocks.block_n}
    addends = table.b_addr, table.bias_addr, table.gain_addr, table.rank, table.scale
    if is_fused:
        counters = linear.workspace.take("counters", 1 + num_tiles * num_slices, torch.int32, device)
        linear.launch(
            fused_small_kernel, (items,),
            y, y.stride(0), x, x.stride(0), partial, tiles, room, table.a_addr, *addends, *at, counters, num_tiles,
            **linear.shape, **linear.columns, **shrink, **expand, NUM_CHUNKS=num_chunks, BLOCK_R=SMALL_BLOCK_R,
        )  # fmt: skip
        return
    linear.launch(
        shrink_small_kernel, (num_slices * blocks.splits, num_tiles),
        x, x.stride(0), partial, tiles, room, table.a_addr, table.rank, *at,
        **linear.shape, **shrink, BLOCK_R=SMALL_BLOCK_R,
    )  # fmt: skip
    linear.launch(
        expand_small_kernel, (num_chunks, num_tiles),
        y, y.stride(0), partial, tiles, room, *addends, *at,
        **linear.shape, **linear.columns, **expand, SPLITS=blocks.splits, BLOCK_R=SMALL_BLOCK_R,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- large tiles


@dataclass(frozen=True, slots=True)
class LargeBlocks:
    """Sizes of the blocks of large tiles, of which there are `num_tiles`. `dot` is the dtype of the products.

    The expand is bound by y: its blocks are such that two programs have registers on one multiprocessor (128 a thread
    and eight warps).
    """

    dot: torch.dtype
    block_j: int
    block_k: int
    block_n: int
    block_r: int
    splits: int
    split_k: int
    num_stages: int

    @classmethod
    def of(
        cls,
        dot: torch.dtype,
        block_m: int,
        in_features: int,
        num_lanes: int,
        capacity: int,
        num_tiles: int,
        num_sms: int,
    ) -> LargeBlocks:
        """num_lanes: the most ranks that an adapter has in all slices."""
        is_wide = dot == torch.float32
        block_j = min(triton.next_power_of_2(num_lanes), 64 if is_wide else 128)
        block_k = min(32 if is_wide else 64, max(16, triton.next_power_of_2(in_features)))
        programs = num_tiles * triton.cdiv(num_lanes, block_j)
        steps = triton.cdiv(in_features, block_k)
        splits = max(1, min(num_sms // programs, steps // 4, 8))
        split_k = triton.cdiv(steps, splits) * block_k
        return cls(
            dot=dot,
            block_j=block_j,
            block_k=block_k,
            block_n=64,
            block_r=min(capacity, 32 if is_wide else 64),
            splits=triton.cdiv(in_features, split_k),
            split_k=split_k,
            num_stages=min(4, LARGE_STAGE_BYTES // ((block_m + block_j) * block_k * dot.itemsize)),
        )


def _dot_dtype(x: torch.dtype, block: torch.dtype) -> torch.dtype:
    """Eight bits are exact in every dtype of x."""
    return x if block == torch.int8 else torch.promote_types(x, block)


def _add_large(linear: _Linear, found: Tiles) -> None:
    num_tiles, block_m = found.large.shape[1], found.large_rows
    num_slices, capacity = len(linear.slices), linear.capacity
    dot = _dot_dtype(linear.x.dtype, linear.block_dtype)
    num_lanes = num_slices * capacity
    num_sms = linear.launcher.target.num_sms
    blocks = LargeBlocks.of(dot, block_m, linear.x.shape[1], num_lanes, capacity, num_tiles, num_sms)
    y, x, table, device = linear.y, linear.x, linear.table, linear.x.device
    count = num_tiles * block_m * num_lanes
    s = linear.workspace.take("shrunk", count, dot, device)
    partial = s if blocks.splits == 1 else linear.workspace.take("splits", blocks.splits * count, torch.float32, device)
    tiles, room = linear.plan.large_tiles, linear.plan.large_tiles.shape[1]
    at = linear.first_row, table.num_rows
    shape = {**linear.shape, "BLOCK_M": block_m, "DOT": TRITON_DTYPES[dot], "num_warps": 8 if block_m > 64 else 4}
    linear.launch(
        shrink_large_kernel, (triton.cdiv(num_lanes, blocks.block_j), blocks.splits, num_tiles),
        x, x.stride(0), partial, count, tiles, room, table.a_addr, table.rank, table.scale, *at, blocks.split_k,
        **shape, IN=x.shape[1], BLOCK_J=blocks.block_j, BLOCK_K=blocks.block_k, num_stages=blocks.num_stages,
    )  # fmt: skip
    if blocks.splits > 1:
        linear.launch(
            reduce_kernel, (triton.cdiv(count, REDUCE_BLOCK),), partial, s, count, blocks.splits,
            BLOCK=REDUCE_BLOCK,
        )  # fmt: skip
    linear.launch(
        expand_large_kernel, (linear.num_chunks(blocks.block_n), num_tiles),
        y, y.stride(0), s, tiles, room, table.b_addr, table.bias_addr, table.gain_addr, table.rank, *at,
        **shape, **linear.columns, BLOCK_N=blocks.block_n, BLOCK_R=blocks.block_r,
    )  # fmt: skip
