"""Tiles cover each row of each segment once, in a fixed order, and stay in the room that a plan has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from loraplex.kernels.plan import LoraPlan, LoraSegment
from loraplex.kernels.tiles import (
    CHAIN,
    LARGE_ROWS,
    LONGEST_SMALL,
    ROWS,
    SLOT,
    SMALL_ROWS,
    START,
    WEIGHT,
    cut_tiles,
    tile_room,
)

NUM_TOKENS = 400


@st.composite
def any_segments(draw: st.DrawFn) -> list[LoraSegment]:
    pairs = draw(st.lists(st.tuples(st.integers(0, NUM_TOKENS - 1), st.integers(1, 40)), max_size=6))
    weights = st.sampled_from([1.0, 0.5, -2.0])
    return [
        LoraSegment(start, min(NUM_TOKENS, start + length * draw(st.sampled_from([1, 1, 10]))), slot, draw(weights))
        for slot, (start, length) in enumerate(pairs)
    ]


def check_tiles(tiles: NDArray[np.int32], most_rows: int) -> list[tuple[int, int, float]]:
    """(row, slot, weight) of every row of every tile, by row and in the order of the chains."""
    found, next_head, heads = [], 0, []
    for t, (start, rows, slot, chain, bits) in enumerate(tiles.T.tolist()):
        assert 1 <= rows <= most_rows
        if t == next_head:
            assert chain >= 1
            next_head += chain
            heads.append((start, start + rows))
        else:
            assert chain == 0
            assert (start, start + rows) == heads[-1]
        weight = np.array(bits, np.int32).view(np.float32).item()
        found += [(row, slot, weight) for row in range(start, start + rows)]
    assert next_head == tiles.shape[1]
    rows_written = [row for start, end in heads for row in range(start, end)]
    assert len(rows_written) == len(set(rows_written))
    return found


@given(segments=any_segments(), is_decode=st.booleans())
def test_tiles_cover_segments_and_heads_share_no_row(segments: list[LoraSegment], is_decode: bool) -> None:
    tiles = cut_tiles(segments, is_decode)
    assert tiles.large_rows in LARGE_ROWS
    found = check_tiles(tiles.small, SMALL_ROWS) + check_tiles(tiles.large, tiles.large_rows)
    wanted = [(row, s.lora_slot, s.weight) for s in segments for row in range(s.start, s.end)]
    assert sorted(found) == sorted(wanted)
    assert not (is_decode and tiles.large.size)
    for row in {row for row, _, _ in found}:  # a chain is in the order of the segments, so sums have one
        assert [slot for at, slot, _ in found if at == row] == sorted(slot for at, slot, _ in wanted if at == row)


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=8),
    gaps=st.lists(st.integers(0, 3), min_size=8, max_size=8),
)
def test_disjoint_segments_fit_in_the_room_of_a_plan(lengths: list[int], gaps: list[int]) -> None:
    segments, end = [], 0
    for slot, (length, gap) in enumerate(zip(lengths, gaps, strict=False)):
        segments.append(LoraSegment(end + gap, end + gap + length, slot))
        end += gap + length
    for is_decode in (False, True):
        tiles = cut_tiles(segments, is_decode)
        small, large = tile_room(len(segments), end)
        assert tiles.small.shape[1] <= small
        assert tiles.large.shape[1] <= large
        assert not is_decode or tiles.small.shape[1] <= end


def test_short_segments_are_small_tiles_and_long_ones_large() -> None:
    segments = [LoraSegment(0, LONGEST_SMALL, 3), LoraSegment(LONGEST_SMALL, 2 * LONGEST_SMALL + 1, 4, 0.5)]
    tiles = cut_tiles(segments, is_decode=False)
    assert tiles.small[[START, ROWS], 0].tolist() == [0, LONGEST_SMALL]
    assert set(tiles.small[SLOT].tolist()) == {3}
    assert tiles.large[[START, ROWS, SLOT, CHAIN], 0].tolist() == [LONGEST_SMALL, LONGEST_SMALL + 1, 4, 1]
    assert tiles.large[WEIGHT].view(np.float32).tolist() == [0.5]
    assert cut_tiles([LoraSegment(0, 500, 0)], is_decode=False).large_rows == max(LARGE_ROWS)


# ------------------------------------------------------------------------------------------------------ in a plan


def test_a_plan_keeps_its_buffer_over_steps_and_unused_tiles_are_empty() -> None:
    plan = LoraPlan(4, max_tokens=100)
    buffer = plan.buffer
    steps = [[LoraSegment(0, 90, 1)], [LoraSegment(i, i + 1, i) for i in range(4)], [], [LoraSegment(0, 8, 2)]]
    for segments in steps:
        plan.rewrite(segments, 100, is_decode=len(segments) == 4)
        tiles = plan.cut_tiles()
        assert plan.buffer is buffer
        for room, cut in ((plan.small_tiles, tiles.small), (plan.large_tiles, tiles.large)):
            count = cut.shape[1]
            assert room[:, :count].tolist() == cut.tolist()
            assert (room[SLOT, count:] == -1).all()
            assert not room[CHAIN, count:].any()


def test_a_plan_grows_for_overlaps_and_keeps_its_segments() -> None:
    plan = LoraPlan(6, max_tokens=8)
    first = plan.buffer
    segments = [LoraSegment(0, 8 - i, i, 0.5) for i in range(6)]
    plan.rewrite(segments, 8)
    tiles = plan.cut_tiles()
    assert tiles.small.shape[1] > tile_room(6, 8)[0]
    assert plan.buffer is not first
    assert plan.seg_slots.tolist() == list(range(6))
    assert plan.seg_weights.tolist() == [0.5] * 6
    assert plan.small_tiles[:, : tiles.small.shape[1]].tolist() == tiles.small.tolist()


@pytest.mark.parametrize("device", ["meta"])
def test_a_plan_elsewhere_is_one_copy_and_is_cut_when_it_is_written(device: str) -> None:
    plan = LoraPlan(4, device, max_tokens=16)
    plan.write([LoraSegment(0, 3, 1)], 3)
    assert plan.tiles is not None
    parts = (plan.seg_starts, plan.seg_ends, plan.seg_slots, plan.seg_weights, plan.small_tiles, plan.large_tiles)
    assert sum(part.numel() for part in parts) == plan.buffer.numel() == plan.host.numel()
    assert all(part.device.type == device for part in parts)
    plan.upload()
