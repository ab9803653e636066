"""Sums over ranks without native kernels: over a file in memory that the processes of these ranks alone have open.

The file has a number of each rank, then two halves with a part of each rank. A rank writes its part, then its number,
and reads the others' parts when their numbers say so. Two halves take turns: a rank writes to one when all have arrived
at the piece before, so they have read what was there. It is read and written by system calls, whose order every
processor keeps.
"""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Sequence

import torch

from loraplex.core import Shard
from loraplex.distributed import COLLECTIVE_TIMEOUT

HEAD_BYTES = 4096
"""A byte for each rank: its number modulo 256, which is never half written. Ranks are at most two apart."""

PART_BYTES = 512 << 10
"""What a rank says at once; longer tensors take turns."""

TURNS_S = 0.001
"""A rank that waits lets others run for so long, then sleeps."""

NAP_S = 0.0002

LOOK_S = 0.02
"""From look to look at the other processes."""


def file_board_nbytes(num_ranks: int) -> int:
    return HEAD_BYTES + 2 * num_ranks * PART_BYTES


class FileBoard:
    """One rank's side. `file`: of file_board_nbytes, zeros when the first rank begins; it may be closed afterwards.

    watched: pipes from or to the processes of other ranks, whose end is theirs.
    """

    is_captured = False

    def __init__(self, shard: Shard, file: int, watched: Sequence[int]) -> None:
        assert shard.size <= HEAD_BYTES
        self._shard, self._file = shard, os.dup(file)
        weakref.finalize(self, os.close, self._file)
        self._watched = select.poll()
        for each in watched:
            self._watched.register(each, 0)  # the end alone, not what is there to read
        self._number = 0
        self._is_lost = False

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        total, *others = self._exchange(part, is_read=True)
        for each in others:
            total += each
        return total

    def side_by_side(self, part: torch.Tensor) -> torch.Tensor:
        """On rank 0 alone; what another rank gets is its own part, without waiting."""
        parts = self._exchange(part, is_read=self._shard.rank == 0)
        return torch.cat(parts, dim=1) if parts else part

    def _exchange(self, part: torch.Tensor, is_read: bool) -> list[torch.Tensor]:
        """All ranks' parts in their order; none without `is_read`: then it waits for no other to write its part."""
        part, size = part.contiguous(), self._shard.size
        parts = [torch.empty_like(part) for _ in range(size if is_read else 0)]
        own, views = _bytes_of(part), [_bytes_of(each) for each in parts]
        for first in range(0, len(own), PART_BYTES):
            piece = slice(first, first + PART_BYTES)
            self._wait(self._number)
            self._number += 1
            os.pwrite(self._file, own[piece], self._place(self._shard.rank))
            os.pwrite(self._file, bytes([self._number & 255]), self._shard.rank)
            if is_read:
                self._wait(self._number)
                for rank, view in enumerate(views):
                    os.preadv(self._file, [view[piece]], self._place(rank))
        return parts

    def _place(self, rank: int) -> int:
        return HEAD_BYTES + ((self._number & 1) * self._shard.size + rank) * PART_BYTES

    def _wait(self, number: int) -> None:
        """Until every rank has arrived there. RuntimeError when one has ended, or is silent."""
        began_s = looked_s = time.monotonic()
        while not self._is_lost:
            if not any((each - number) & 128 for each in os.pread(self._file, self._shard.size, 0)):
                return
            now_s = time.monotonic()
            if now_s - looked_s > LOOK_S:
                looked_s = now_s
                self._is_lost = bool(self._watched.poll(0)) or now_s - began_s > COLLECTIVE_TIMEOUT.total_seconds()
            time.sleep(0 if now_s - began_s < TURNS_S else NAP_S)
        raise RuntimeError("a rank has ended, or is silent")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view
