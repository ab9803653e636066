"""Boards of ranks that are threads of one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from loraplex.core import Shard
from loraplex.kernels.native.board import RankBoard, board_nbytes
from loraplex.kernels.native.library import NativeLibrary
from loraplex.ranks.board import FileBoard, file_board_nbytes


def native_boards(library: NativeLibrary, size: int, watched: Sequence[int] = ()) -> list[RankBoard]:
    memory = torch.zeros(board_nbytes(size), dtype=torch.uint8)
    return [RankBoard(library, Shard(rank, size), memory, watched) for rank in range(size)]


def file_boards(size: int, watched: Sequence[int] = ()) -> list[FileBoard]:
    """They outlive the descriptor that they are made of."""
    file = os.memfd_create("board")
    os.ftruncate(file, file_board_nbytes(size))
    try:
        return [FileBoard(Shard(rank, size), file, watched) for rank in range(size)]
    finally:
        os.close(file)


def together(size: int, run: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(run, range(size)))
