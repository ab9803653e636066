"""The rows of a step cut into tiles, as GPU kernels take them: pieces of one adapter with a bounded number of rows.

An interval is a run of rows that are in the same segments. Short ones, and all of a decode step's, become small tiles,
which are bound by the adapters' bytes; long ones become large tiles, which are bound by arithmetic. Rows in several
segments give as many tiles in a row: the first of them, their head, has `chain` := how many they are, the others 0.
What writes to y is one piece of work for a head, which goes through the chain in the order of the segments: sums have a
fixed order, and no two write to the same rows.

    tile := int32 [start, rows, slot, chain, bits of the float32 weight]; unused: slot -1 and chain 0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loraplex.core import BASE_SLOT

TILE_FIELDS = 5
START, ROWS, SLOT, CHAIN, WEIGHT = range(TILE_FIELDS)

SMALL_ROWS = 16
"""Rows of a small tile, at most: those of one product of matrix units."""

LONGEST_SMALL = 16
"""Rows of the longest interval that is cut into small tiles in a step which is no decode step."""

LARGE_ROWS = (64, 128)
"""Rows of a large tile: the first unless intervals are long."""

LONG_INTERVAL = 256
"""Mean rows of the long intervals from which large tiles have more rows."""


class Segment(Protocol):
    """What a tile needs of plan.py's LoraSegment."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def lora_slot(self) -> int: ...
    @property
    def weight(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Tiles:
    """Of one step: int32 [TILE_FIELDS, n] of the small and of the large ones, and rows of a large one."""

    small: NDArray[np.int32]
    large: NDArray[np.int32]
    large_rows: int


NO_TILES = Tiles(np.empty((TILE_FIELDS, 0), np.int32), np.empty((TILE_FIELDS, 0), np.int32), LARGE_ROWS[0])


def tile_room(max_segments: int, max_tokens: int, overlap: int = 1) -> tuple[int, int]:
    """(small, large) tiles that any step of so many segments and so many rows fits in.

    overlap: segments that a row is in, at most; segments that share rows share all of theirs.
    """
    members = overlap * max_tokens
    small_rows = min(members, max_segments * LONGEST_SMALL)
    small = max(-(-max_tokens // SMALL_ROWS), -(-small_rows // SMALL_ROWS)) + max_segments
    return small, -(-members // LARGE_ROWS[0]) + max_segments


def cut_tiles(segments: Sequence[Segment], is_decode: bool) -> Tiles:
    """The tiles of valid segments, in their order; of rows in several segments in the order of the rows."""
    starts = np.array([s.start for s in segments], np.int32)
    ends = np.array([s.end for s in segments], np.int32)
    slots = np.array([s.lora_slot for s in segments], np.int32)
    weights = np.array([s.weight for s in segments], np.float32).view(np.int32)
    chains = np.ones(len(segments), np.int32)
    if (starts[1:] < ends[:-1]).any():
        starts, ends, chains, members = _intervals(starts, ends)
        slots, weights = slots[members], weights[members]
    lengths = ends - starts
    is_small = np.full(len(lengths), fill_value=True) if is_decode else lengths <= LONGEST_SMALL
    longer = lengths[~is_small]
    large_rows = LARGE_ROWS[bool(len(longer)) and bool(longer.mean() >= LONG_INTERVAL)]
    columns = starts, lengths, chains, slots, weights
    return Tiles(_cut(*columns, is_small, SMALL_ROWS), _cut(*columns, ~is_small, large_rows), large_rows)


def _cut(
    starts: NDArray[np.int32],
    lengths: NDArray[np.int32],
    chains: NDArray[np.int32],
    slots: NDArray[np.int32],
    weights: NDArray[np.int32],
    is_wanted: NDArray[np.bool_],
    most_rows: int,
) -> NDArray[np.int32]:
    """Tiles of the wanted intervals. slots, weights: of all members, chains[i] of them for interval i."""
    wanted = np.flatnonzero(is_wanted)
    if not len(wanted):
        return NO_TILES.small
    if len(wanted) == len(slots) and lengths.max() <= most_rows:  # as in most decode steps: a tile for each
        return np.stack([starts, lengths, slots, chains, weights])
    first_member = np.cumsum(chains) - chains
    interval, part = _repeated(wanted, -(-lengths[wanted] // most_rows))
    piece, member = _repeated(np.arange(len(interval)), chains[interval])
    interval, part = interval[piece], part[piece]
    source = first_member[interval] + member
    tiles = np.empty((TILE_FIELDS, len(piece)), np.int32)
    tiles[START] = starts[interval] + part * most_rows
    tiles[ROWS] = np.minimum(lengths[interval] - part * most_rows, most_rows)
    tiles[SLOT] = slots[source]
    tiles[CHAIN] = np.where(member == 0, chains[interval], 0)
    tiles[WEIGHT] = weights[source]
    return tiles


def _repeated(values: NDArray[np.int64], counts: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(each value as often as its count says, 0 .. count - 1 beside it)"""
    which = np.repeat(np.arange(len(values)), counts)
    first = np.cumsum(counts) - counts
    return values[which], np.arange(len(which)) - first[which]


def _intervals(
    starts: NDArray[np.int32], ends: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """(starts, ends, number of members, members) of the runs of rows that are in the same segments, at least one."""
    cuts = np.unique(np.concatenate([starts, ends]))
    is_member = (starts <= cuts[:-1, None]) & (ends >= cuts[1:, None])
    found = is_member.any(1)
    _, members = np.nonzero(is_member)
    return cuts[:-1][found], cuts[1:][found], is_member.sum(1, dtype=np.int32)[found], members


class TileBuffer:
    """Room for the tiles of one step in one int32 array: the small ones' fields, then the large ones'."""

    def __init__(self, num_small: int, num_large: int) -> None:
        self.num_small, self.num_large = num_small, num_large

    @property
    def size(self) -> int:
        return TILE_FIELDS * (self.num_small + self.num_large)

    def fits(self, tiles: Tiles) -> bool:
        small, large = tiles.small.shape[1], tiles.large.shape[1]
        return bool(small <= self.num_small and large <= self.num_large)

    def grown(self, tiles: Tiles) -> TileBuffer:
        """Room for these as well, and for more of their kind."""

        def room(present: int, wanted: int) -> int:
            return present if wanted <= present else 2 ** math.ceil(math.log2(wanted))

        return TileBuffer(room(self.num_small, tiles.small.shape[1]), room(self.num_large, tiles.large.shape[1]))

    def write(self, tiles: Tiles, memory: NDArray[np.int32]) -> None:
        border = TILE_FIELDS * self.num_small
        for part, room, found in (
            (memory[:border], self.num_small, tiles.small),
            (memory[border:], self.num_large, tiles.large),
        ):
            fields, count = part.reshape(TILE_FIELDS, room), found.shape[1]
            fields[:, :count] = found
            fields[:, count:] = 0
            fields[SLOT, count:] = BASE_SLOT
