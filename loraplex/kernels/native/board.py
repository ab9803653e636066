"""Sums over ranks in memory that they share (csrc/ranks.cpp): one call each, and an operator of a captured step."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch

from loraplex.core import Shard
from loraplex.distributed import COLLECTIVE_TIMEOUT
from loraplex.kernels.native.library import NativeLibrary

HEAD_BYTES = 4096
"""As in csrc/ranks.cpp: a cache line for each rank."""

MAX_RANKS = HEAD_BYTES // 64

PART_BYTES = 512 << 10
"""What a rank says at once; longer tensors take turns. A part of each rank stays in the caches."""


def board_nbytes(num_ranks: int) -> int:
    """A part is there twice: one is written while the other is read."""
    return HEAD_BYTES + 2 * num_ranks * PART_BYTES


class _RankBoard(ctypes.Structure):
    """As in csrc/api.h."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("watched", ctypes.c_void_p),
        ("timeout_s", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("num_watched", "rank", "size", "is_lost")),
        ("epoch", ctypes.c_uint32),
    )


class RankBoard:
    """One rank's side of it. `memory`: `board_nbytes`, zeros when the first rank begins.

    watched: pipes from or to the processes of other ranks, whose end is theirs.
    """

    is_captured = True

    def __init__(self, library: NativeLibrary, shard: Shard, memory: torch.Tensor, watched: Sequence[int]) -> None:
        assert memory.numel() == board_nbytes(shard.size), f"{memory.numel()} bytes for {shard.size} ranks"
        self._functions, self._memory, self._watched = library.functions, memory, array("i", watched)
        self._board = _RankBoard(
            memory.data_ptr(),
            PART_BYTES // 4,
            self._watched.buffer_info()[0],
            COLLECTIVE_TIMEOUT.total_seconds(),
            *(len(self._watched), shard.rank, shard.size),
        )
        self.address = ctypes.addressof(self._board)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """In place."""
        assert part.dtype == torch.float32
        assert part.is_contiguous()
        self._functions.loraplex_sum_ranks(self.address, part.data_ptr(), part.numel())
        self.check()
        return part

    def side_by_side(self, part: torch.Tensor) -> torch.Tensor:
        """On rank 0 alone; what another rank gets is its own part, without waiting."""
        part, (rows, width) = part.contiguous(), part.shape
        assert part.dtype == torch.float32
        is_first = self._board.rank == 0
        y = torch.empty(rows, self._board.size * width) if is_first else part
        address = y.data_ptr() if is_first else None
        self._functions.loraplex_join_ranks(self.address, part.data_ptr(), rows, width, address)
        self.check()
        return y

    def check(self) -> None:
        """RuntimeError when a rank has ended."""
        if self._board.is_lost:
            raise RuntimeError("a rank has ended, or is silent")
