"""scale_input in Triton: rows of a linear's input times the input gains of their adapters, in place.

One launch for small tiles and one for large ones. A program multiplies the gains of a tile's chain, in the order of the
segments, and then the rows by that: float32, rounded once. Tiles without an input gain are neither read nor written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loraplex.kernels.plan import LoraPlan, SlotTable
from loraplex.kernels.reference import check_rows
from loraplex.kernels.tiles import SMALL_ROWS
from loraplex.kernels.triton.launch import FLOAT_DTYPES, Launcher, cdiv, next_power_of_2
from loraplex.kernels.triton.lora import num_small_tiles
from loraplex.kernels.triton.lora_small import WORDS

NUMBERS = 4096
"""Of x in one program."""


@triton.jit(
    do_not_specialize=["tile_room", "row", "num_rows"],
    do_not_specialize_on_alignment=["tiles", "input_gain_addr"],
)
def scale_input_kernel(
    x,
    x_stride,
    tiles,
    tile_room,
    input_gain_addr,
    row,
    num_rows,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (blocks of BLOCK_K columns, tiles)."""
    tile = tl.program_id(1)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    in_range = k < IN
    chain = tl.load(tiles + 3 * tile_room + tile)
    start = tl.load(tiles + tile)
    rows = tl.load(tiles + tile_room + tile)
    factor = tl.full((BLOCK_K,), 1.0, tl.float32)
    touched = 0
    for link in range(chain):
        member = tile + link
        slot = tl.load(tiles + 2 * tile_room + member)
        weight = tl.load(tiles + 4 * tile_room + member).to(tl.float32, bitcast=True)
        address = tl.load(input_gain_addr + (slot * num_rows + row) * WORDS)
        if address != 0:
            touched = 1
            gain = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
            factor *= weight * tl.load(gain + k, mask=in_range, other=0) + (1 - weight)
    if touched != 0:
        m = tl.arange(0, BLOCK_M)
        at = x + start.to(tl.int64) * x_stride + ((m * x_stride)[:, None] + k[None, :])
        mask = (m < rows)[:, None] & in_range[None, :]
        scaled = tl.load(at, mask=mask, other=0).to(tl.float32) * factor[None, :]
        tl.store(at, scaled.to(x.dtype.element_ty), mask=mask)


def scale_input_gap(x: torch.Tensor) -> str | None:
    """Why the kernel does not cover the case; None: it does."""
    if x.dtype not in FLOAT_DTYPES or x.stride(1) != 1:
        return f"x is {x.dtype}, or not dense"
    return None


def scale_input(launcher: Launcher, x: torch.Tensor, plan: LoraPlan, table: SlotTable, row: int) -> None:
    """As KernelBackend.scale_input. The grid of a decode step depends on its padded size alone."""
    check_rows(x, x, plan)
    found = plan.cut_tiles()
    for tiles, count, block_m in (
        (plan.small_tiles, num_small_tiles(plan), SMALL_ROWS),
        (plan.large_tiles, found.large.shape[1], found.large_rows),
    ):
        block_k = min(NUMBERS // block_m, next_power_of_2(x.shape[1]))
        launcher.launch(
            scale_input_kernel, (cdiv(x.shape[1], block_k), count),
            x, x.stride(0), tiles, tiles.shape[1], table.input_gain_addr, row, table.num_rows,
            IN=x.shape[1], BLOCK_M=block_m, BLOCK_K=block_k,
        )  # fmt: skip
