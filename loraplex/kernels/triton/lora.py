"""add_lora in Triton: which kernels run, in which shapes, and the memory between shrink and expand.

    small tiles   lora_small.py   two launches
    large tiles   lora_large.py   two launches, three where K is split

A decode step has small tiles alone, in a grid as large as its rows (or as the plan's room), so that it depends on the
padded batch only. Sizes of blocks follow from shapes, dtypes and the largest rank of any adapter that the table has
held (`rank_capacity`): nothing is tried out at run time, and every start takes the same.

Kernels that know of gains run from the first block with a gain on, in this table; without gains the others cost
nothing more than they did.

What does not change from step to step of a linear is worked out once (`_Linear`): in a step that is no graph's the host
launches five kernels for each of a hundred linears and more.

What a capture needs: the same step was run once before, which makes the workspace; afterwards a replay reads tiles,
table and rows of x alone. It is good for any plan of the same padded size, as long as no rank of the step is above the
capacity of the capture, and no adapter of the step has a gain that the table had not at the capture (has_gains).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton.language as tl

from loraplex.core import LoraSlice
from loraplex.kernels.plan import LoraPlan, SlotTable
from loraplex.kernels.reference import check_rows
from loraplex.kernels.tiles import SMALL_ROWS, Tiles
from loraplex.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from loraplex.kernels.triton.lora_large import expand_large_kernel, reduce_kernel, shrink_large_kernel
from loraplex.kernels.triton.lora_small import expand_small_kernel, shrink_small_kernel
from loraplex.kernels.triton.workspace import Workspace

TRITON_DTYPES: dict[torch.dtype, tl.dtype] = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8,
}

LEAST_RANK_CAPACITY = 16

SPLIT_K, SHRINK_K, SHRINK_STAGES = 512, 256, 3
"""Of a shrink program: columns of A in all, in one step of its pipeline, and steps on their way."""

EXPAND_N, EXPAND_WARPS = 256, 4
"""Columns of y in one expand program, with 16 ranks of B: 8 KB."""

SMALL_BLOCK_R = 16
"""Ranks in one block of a program. More would leave most of it empty for adapters of small ranks in a table that has a
large one too."""

LARGE_STAGE_BYTES = 98_304
"""Shared memory for the stages of a large product: two programs on a multiprocessor of an H100, one on small GPUs."""

REDUCE_BLOCK = 1024


def rank_capacity(table: SlotTable) -> int:
    """Ranks that launches over this table are made for: a power of two, never less than any rank the table has held."""
    return max(LEAST_RANK_CAPACITY, next_power_of_2(table.max_rank))


def num_small_tiles(plan: LoraPlan) -> int:
    """That kernels go over: in a decode step as many as its padded rows can need, for a capture to serve other
    steps."""
    found = int(plan.cut_tiles().small.shape[1])
    return max(found, min(plan.num_tokens, plan.small_tiles.shape[1])) if plan.is_decode else found


@dataclass(frozen=True, slots=True)
class SmallBlocks:
    """Sizes of the blocks of small tiles. They do not depend on the batch: nor does, then, what a row gets.

    split_k: columns of x in one shrink program, block_k of them in one step.
    """

    split_k: int
    block_k: int
    splits: int
    block_n: int

    @classmethod
    def of(cls, in_features: int, dot: torch.dtype) -> SmallBlocks:
        is_wide = dot == torch.float32
        split_k = min(SPLIT_K, max(64, next_power_of_2(in_features)))
        block_k = 32 if is_wide else min(SHRINK_K, split_k)
        return cls(split_k, block_k, cdiv(in_features, split_k), EXPAND_N // 2 if is_wide else EXPAND_N)


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

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(
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
        block_j = min(next_power_of_2(num_lanes), 64 if is_wide else 128)
        block_k = min(32 if is_wide else 64, max(16, next_power_of_2(in_features)))
        programs = num_tiles * cdiv(num_lanes, block_j)
        steps = cdiv(in_features, block_k)
        splits = max(1, min(num_sms // programs, steps // 4, 8))
        split_k = cdiv(steps, splits) * block_k
        return LargeBlocks(
            dot=dot,
            block_j=block_j,
            block_k=block_k,
            block_n=64,
            block_r=min(capacity, 32 if is_wide else 64),
            splits=cdiv(in_features, split_k),
            split_k=split_k,
            num_stages=min(4, LARGE_STAGE_BYTES // ((block_m + block_j) * block_k * dot.itemsize)),
        )


@dataclass(frozen=True)
class _Linear:
    """A linear's adapters in a table, as long as its kernels are made for no more ranks, dtypes and gains."""

    table: SlotTable
    first_row: int
    slices: tuple[LoraSlice, ...]
    in_features: int
    dtype: torch.dtype
    block_dtype: torch.dtype
    capacity: int
    has_gains: bool

    def is_still(self, table: SlotTable, slices: tuple[LoraSlice, ...], dtype: torch.dtype) -> bool:
        return (
            self.table is table
            and self.slices is slices
            and self.dtype == dtype
            and self.capacity >= table.max_rank
            and self.has_gains == table.has_gains
            and table.block_dtypes == {self.block_dtype}
        )

    @cached_property
    def dot(self) -> torch.dtype:
        """Of products. Eight bits are exact in every dtype of x."""
        return self.dtype if self.block_dtype == torch.int8 else torch.promote_types(self.dtype, self.block_dtype)

    @cached_property
    def small(self) -> SmallBlocks:
        return SmallBlocks.of(self.in_features, self.dot)

    @cached_property
    def shape(self) -> dict[str, Any]:
        """Constants of every kernel."""
        return {
            "BLOCK": TRITON_DTYPES[self.block_dtype],
            "NUM_SLICES": len(self.slices),
            "RANK_CAPACITY": self.capacity,
        }

    @cached_property
    def columns(self) -> dict[str, Any]:
        """Constants of the kernels that write y."""
        bias = torch.float32 if self.block_dtype == torch.int8 else self.block_dtype
        return {
            "OFFSETS": tuple(s.out_offset for s in self.slices),
            "WIDTHS": tuple(s.out_features for s in self.slices),
            "BIAS": TRITON_DTYPES[bias],
            "HAS_GAINS": self.has_gains,
        }

    @cached_property
    def shrink_small(self) -> dict[str, Any]:
        blocks = self.small
        return {
            **self.shape, "IN": self.in_features, "DOT": TRITON_DTYPES[self.dot], "SPLITS": blocks.splits,
            "SPLIT_K": blocks.split_k, "BLOCK_M": SMALL_ROWS, "BLOCK_K": blocks.block_k, "BLOCK_R": SMALL_BLOCK_R,
            "num_stages": SHRINK_STAGES,
        }  # fmt: skip

    @cached_property
    def expand_small(self) -> dict[str, Any]:
        return {
            **self.shape, **self.columns, "SPLITS": self.small.splits, "BLOCK_M": SMALL_ROWS,
            "BLOCK_N": self.small.block_n, "BLOCK_R": SMALL_BLOCK_R, "PRECISION": self._precision,
            "num_warps": EXPAND_WARPS, "num_stages": 1,
        }  # fmt: skip

    @property
    def _precision(self) -> str:
        """How lora_small.py multiplies what a shrink gave with B."""
        if self.block_dtype == torch.float32:
            return "ieee"
        return "bf16x2" if self.dtype == torch.bfloat16 and self.block_dtype != torch.float16 else "tf32x3"

    @cached_property
    def num_small_chunks(self) -> int:
        return self.num_chunks(self.small.block_n)

    def num_chunks(self, block_n: int) -> int:
        return sum(cdiv(s.out_features, block_n) for s in self.slices)


class LoraKernels:
    """`add_lora` of one backend. workspace: what is between the launches."""

    def __init__(self, launcher: Launcher, workspace: Workspace) -> None:
        self._launcher, self._workspace = launcher, workspace
        self._linears: dict[tuple[int, torch.dtype], _Linear] = {}

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        plan: LoraPlan,
        table: SlotTable,
        first_row: int,
        slices: tuple[LoraSlice, ...],
        *,
        is_shrunk: bool = False,
    ) -> None:
        """As KernelBackend.add_lora. Rows of x and y are dense; the blocks of `table` have one dtype.

        is_shrunk: `shrink_small` ran on the same arguments.
        """
        check_rows(y, x, plan)
        if not table.block_dtypes:
            return  # no adapter was ever there
        linear = self._linear(x, table, first_row, slices)
        tiles, num_small = plan.cut_tiles(), num_small_tiles(plan)
        if num_small:
            if not is_shrunk:
                self._shrink_small(linear, x, plan, num_small)
            self._expand_small(linear, y, plan, num_small)
        if tiles.large.shape[1]:
            self._add_large(linear, y, x, plan, tiles)

    def shrink_small(
        self, x: torch.Tensor, plan: LoraPlan, table: SlotTable, first_row: int, slices: tuple[LoraSlice, ...]
    ) -> None:
        """The first half of a decode step's `add_lora`, which needs no y."""
        num_small = num_small_tiles(plan)
        if table.block_dtypes and num_small:
            self._shrink_small(self._linear(x, table, first_row, slices), x, plan, num_small)

    def _linear(self, x: torch.Tensor, table: SlotTable, first_row: int, slices: tuple[LoraSlice, ...]) -> _Linear:
        key = first_row, x.dtype
        known = self._linears.get(key)
        if known is None or not known.is_still(table, slices, x.dtype):
            (block_dtype,) = table.block_dtypes
            at = table, first_row, slices
            known = _Linear(*at, x.shape[1], x.dtype, block_dtype, rank_capacity(table), table.has_gains)
            self._linears[key] = known
        return known

    # ----------------------------------------------------------------------------------------------------- small tiles

    def _partial(self, linear: _Linear, num_tiles: int, device: torch.device) -> torch.Tensor:
        """What the shrink writes and the expand reads: float32 [tiles, SMALL_ROWS, slices, splits, RANK_CAPACITY]."""
        count = num_tiles * SMALL_ROWS * len(linear.slices) * linear.small.splits * linear.capacity
        return self._workspace.take("partial", count, torch.float32, device)

    def _shrink_small(self, linear: _Linear, x: torch.Tensor, plan: LoraPlan, num_tiles: int) -> None:
        table, tiles = linear.table, plan.small_tiles
        self._launcher.launch(
            shrink_small_kernel, (len(linear.slices) * linear.small.splits, num_tiles),
            x, x.stride(0), self._partial(linear, num_tiles, x.device), tiles, tiles.shape[1], table.a_addr, table.rank,
            linear.first_row, table.num_rows, **linear.shrink_small,
        )  # fmt: skip

    def _expand_small(self, linear: _Linear, y: torch.Tensor, plan: LoraPlan, num_tiles: int) -> None:
        table, tiles = linear.table, plan.small_tiles
        self._launcher.launch(
            expand_small_kernel, (linear.num_small_chunks, num_tiles),
            y, y.stride(0), self._partial(linear, num_tiles, y.device), tiles, tiles.shape[1],
            table.b_addr, table.bias_addr, table.gain_addr, table.rank, table.scale, linear.first_row, table.num_rows,
            **linear.expand_small,
        )  # fmt: skip

    # ----------------------------------------------------------------------------------------------------- large tiles

    def _add_large(self, linear: _Linear, y: torch.Tensor, x: torch.Tensor, plan: LoraPlan, found: Tiles) -> None:
        num_tiles, block_m = found.large.shape[1], found.large_rows
        dot, capacity, table, device = linear.dot, linear.capacity, linear.table, x.device
        num_lanes = len(linear.slices) * capacity
        num_sms = self._launcher.target.num_sms
        blocks = LargeBlocks.of(dot, block_m, x.shape[1], num_lanes, capacity, num_tiles, num_sms)
        count = num_tiles * block_m * num_lanes
        s = self._workspace.take("shrunk", count, dot, device)
        is_split = blocks.splits > 1
        partial = self._workspace.take("splits", blocks.splits * count, torch.float32, device) if is_split else s
        tiles, room = plan.large_tiles, plan.large_tiles.shape[1]
        at = linear.first_row, table.num_rows
        shape = {**linear.shape, "BLOCK_M": block_m, "DOT": TRITON_DTYPES[dot], "num_warps": 8 if block_m > 64 else 4}
        self._launcher.launch(
            shrink_large_kernel, (cdiv(num_lanes, blocks.block_j), blocks.splits, num_tiles),
            x, x.stride(0), partial, count, tiles, room, table.a_addr, table.rank, table.scale, *at, blocks.split_k,
            **shape, IN=x.shape[1], BLOCK_J=blocks.block_j, BLOCK_K=blocks.block_k, num_stages=blocks.num_stages,
        )  # fmt: skip
        if is_split:
            self._launcher.launch(
                reduce_kernel, (cdiv(count, REDUCE_BLOCK),), partial, s, count, blocks.splits, BLOCK=REDUCE_BLOCK
            )
        self._launcher.launch(
            expand_large_kernel, (linear.num_chunks(blocks.block_n), num_tiles),
            y, y.stride(0), s, tiles, room, table.b_addr, table.bias_addr, table.gain_addr, table.rank, *at,
            **shape, **linear.columns, BLOCK_N=blocks.block_n, BLOCK_R=blocks.block_r,
        )  # fmt: skip
