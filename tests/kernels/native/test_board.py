"""Deltas of which no rank has all, over native kernels. The boards themselves: tests/ranks/test_board.py."""

from __future__ import annotations

import pytest
import torch

from loraplex.core import LoraSlice, LoraTarget, Shard, ShardKind
from loraplex.distributed import shard_bias, shard_gain, shard_lora
from loraplex.kernels.native import lora
from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.native.board import RankBoard
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.slices import SliceWeights
from tests.kernels.native.machine import ISAS, library_or_skip
from tests.ranks.boards import native_boards, together

library_or_skip(ISAS[-1])

IN, OUTS, LORA_RANK = 96, (80, 48), 10


def weights_of(generator: torch.Generator, rank: int, in_features: int, out: int, has_gain: bool) -> SliceWeights:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    gain = draw(out) if has_gain else None
    return SliceWeights(draw(rank, in_features), draw(out, rank), draw(out), 0.5, gain)


def target_of(kind: ShardKind, shard: Shard) -> LoraTarget:
    if kind is ShardKind.ROW:
        slices = (LoraSlice("m.0", 0, OUTS[0], OUTS[0]),)
        return LoraTarget("m", 0, IN // shard.size, IN, slices, kind, shard, is_fully_sharded=True)
    here = [out // shard.size for out in OUTS]
    slices = tuple(LoraSlice(f"m.{i}", sum(here[:i]), here[i], full) for i, full in enumerate(OUTS))
    return LoraTarget("m", 0, IN, IN, slices, kind, shard, is_fully_sharded=True)


def share_of(target: LoraTarget, index: int, whole: SliceWeights) -> SliceWeights:
    assert whole.lora_a is not None
    assert whole.lora_b is not None
    assert whole.bias is not None
    a, b, is_exchanged = shard_lora(target, index, whole.lora_a, whole.lora_b)
    bias = shard_bias(target, index, whole.bias)
    gain = None if whole.gain is None else shard_gain(target, index, whole.gain)
    bias = torch.zeros_like(whole.bias) if bias is None else bias
    return SliceWeights(a, b, bias, whole.scaling, gain, is_exchanged=is_exchanged)


@pytest.mark.parametrize("num_rows", [1, 5, 300])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", [ShardKind.COLUMN, ShardKind.ROW])
def test_deltas_of_which_no_rank_has_all(
    native: NativeBackend, kind: ShardKind, size: int, num_threads: int, num_rows: int
) -> None:
    """Two adapters, one with a gain, some rows in both. Cut by outputs they have the bits of one rank."""
    generator = torch.Generator().manual_seed(size)
    outs = OUTS if kind is ShardKind.COLUMN else OUTS[:1]
    adapters = [[weights_of(generator, LORA_RANK + 3 * slot, IN, out, slot == 1) for out in outs] for slot in (0, 1)]
    segments = [LoraSegment(0, -(-2 * num_rows // 3), 0, 0.3), LoraSegment(num_rows // 3, num_rows, 1)]
    x, y = (torch.randn(num_rows, width, generator=generator) for width in (IN, sum(outs)))

    def run(target: LoraTarget, board: RankBoard | None, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        half = 1 << 17
        table = SlotTable([target], 2, torch.zeros(2 * half, dtype=torch.uint8))
        table.collectives = board
        for slot, weights in enumerate(adapters):
            shares = [share_of(target, index, each) for index, each in enumerate(weights)]
            layouts = lora.pack(native.library, shares, table.buffer[slot * half :])
            table.set_block("m", slot, slot * half, layouts)
        plan = LoraPlan.build(segments, len(x), 2)
        lora.add_lora(native.library, y, x.contiguous(), plan, table, 0, target.slices, num_threads)
        return y

    expected = run(target_of(kind, Shard()), None, x, y.clone())
    boards, targets = native_boards(native.library, size), [target_of(kind, Shard(rank, size)) for rank in range(size)]
    if kind is ShardKind.ROW:
        xs, ys = x.chunk(size, dim=1), y.chunk(1) + (torch.zeros_like(y),) * (size - 1)
    else:
        xs = (x,) * size
        ys = tuple(
            torch.cat([part.chunk(size, dim=1)[rank] for part in y.split(OUTS, dim=1)], dim=1) for rank in range(size)
        )
    parts = together(size, lambda rank: run(targets[rank], boards[rank], xs[rank], ys[rank].clone()))
    if kind is ShardKind.ROW:
        torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-4)
        return
    widths = [out // size for out in OUTS]
    slices = zip(*(part.split(widths, dim=1) for part in parts), strict=True)
    assert torch.equal(torch.cat([torch.cat(each, dim=1) for each in slices], dim=1), expected)
