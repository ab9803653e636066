"""Sums over ranks without native kernels: bits, also when ranks are late; the end of a rank, and its silence."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from loraplex.core import Shard
from loraplex.ranks import board as board_module
from loraplex.ranks.board import PART_BYTES, FileBoard, file_board_nbytes

AT_ONCE = PART_BYTES // 4


@pytest.fixture
def file() -> Iterator[int]:
    file = os.memfd_create("board")
    yield file
    os.close(file)


def boards_of(file: int, size: int, watched: Sequence[int] = ()) -> list[FileBoard]:
    os.ftruncate(file, file_board_nbytes(size))
    return [FileBoard(Shard(rank, size), file, watched) for rank in range(size)]


def together(size: int, run: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(run, range(size)))


def in_order(parts: torch.Tensor) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_are_added_in_the_order_of_ranks_and_stand_side_by_side(file: int, size: int, dtype: torch.dtype) -> None:
    """More often than a rank's number has values, of sizes up to several pieces, each rank late at times."""
    generator = torch.Generator().manual_seed(size)
    boards = boards_of(file, size)
    shapes = [(1, 7), (5, 96), (3, AT_ONCE), (1, AT_ONCE + 1), (2, AT_ONCE // 2 + 5), (0, 8), *[(1, 1)] * 300]
    cases = [torch.randn(size, *shape, generator=generator).to(dtype) for shape in shapes]

    def run(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        results = []
        for index, parts in enumerate(cases):
            if index < 20 and index % size == rank:
                time.sleep(0.005)
            total = boards[rank].sum(parts[rank].clone())
            results.append((total, boards[rank].side_by_side(parts[rank])))
        return results

    for rank, results in enumerate(together(size, run)):
        for parts, (total, joined) in zip(cases, results, strict=True):
            assert torch.equal(total, in_order(parts))
            if rank == 0:
                assert torch.equal(joined, torch.cat(list(parts), dim=1))


def test_a_part_may_be_a_view_with_gaps(file: int) -> None:
    boards, whole = boards_of(file, 2), torch.arange(24.0).view(4, 6)
    totals = together(2, lambda rank: boards[rank].sum(whole[:, ::2]))
    assert all(torch.equal(total, 2 * whole[:, ::2]) for total in totals)


def test_a_rank_that_only_gives_its_part_waits_for_no_other(file: int) -> None:
    boards, part = boards_of(file, 2), torch.ones(1, 4)
    boards[1].side_by_side(part)
    assert boards[0].side_by_side(2 * part).tolist() == [[2] * 4 + [1] * 4]


def test_the_end_of_a_rank_is_an_error_of_the_others(file: int) -> None:
    """Which wait for it, and from then on of every call."""
    ours, theirs = os.pipe()
    board = boards_of(file, 2, [ours])[0]
    threading.Timer(0.05, os.close, [theirs]).start()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a rank has ended"):
            board.sum(torch.ones(4))
    os.close(ours)


def test_what_a_pipe_has_to_say_is_not_its_end(file: int) -> None:
    ours, theirs = os.pipe()
    os.write(theirs, b"a message")
    boards = boards_of(file, 2, [ours])

    def run(rank: int) -> float:
        time.sleep(0.1 * rank)
        return float(boards[rank].sum(torch.ones(1)))

    assert together(2, run) == [2, 2]
    os.close(ours)
    os.close(theirs)


def test_a_rank_that_is_silent_is_lost(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "COLLECTIVE_TIMEOUT", timedelta(seconds=0.05))
    with pytest.raises(RuntimeError, match="silent"):
        boards_of(file, 2)[1].sum(torch.ones(4))


def test_a_board_outlives_the_descriptor_that_it_was_made_of() -> None:
    file = os.memfd_create("board")
    boards = boards_of(file, 2)
    os.close(file)
    assert [float(total) for total in together(2, lambda rank: boards[rank].sum(torch.ones(1)))] == [2, 2]
