"""Sums over ranks, with native kernels and without: bits, also when ranks are late; the end of a rank, and silence."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

from loraplex.core import Shard
from loraplex.distributed import RankGroup
from loraplex.kernels.native import board as native_board
from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.reference import ReferenceBackend
from loraplex.ranks import board as file_board
from tests.kernels.native.machine import ISAS, library_or_skip
from tests.ranks.boards import file_boards, native_boards, together

AT_ONCE = max(native_board.PART_BYTES, file_board.PART_BYTES) // 4

Make = Callable[..., list[Any]]


@pytest.fixture(params=["file", *ISAS])
def make(request: pytest.FixtureRequest) -> Make:
    """Boards of so many ranks, which watch descriptors."""
    return file_boards if request.param == "file" else partial(native_boards, library_or_skip(request.param))


def in_order(parts: torch.Tensor) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_are_added_in_the_order_of_ranks_and_stand_side_by_side(make: Make, size: int) -> None:
    check_sums(make, size, torch.float32)


@pytest.mark.parametrize("size", [2, 3])
def test_without_native_kernels_other_types_are_added_in_their_own(size: int) -> None:
    check_sums(file_boards, size, torch.bfloat16)


def check_sums(make: Make, size: int, dtype: torch.dtype) -> None:
    """More often than a rank's number has values, of sizes up to several pieces, each rank late at times."""
    generator = torch.Generator().manual_seed(size)
    boards = make(size)
    shapes = [(1, 7), (5, 96), (3, AT_ONCE), (1, AT_ONCE + 1), (2, AT_ONCE // 2 + 5), *[(1, 1)] * 300]
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
            assert torch.equal(joined, torch.cat(list(parts), dim=1) if rank == 0 else parts[rank])


@pytest.mark.parametrize("num_copies", [1, 2])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("isa", ["file", *ISAS])
def test_a_norm_over_all_ranks_parts_is_that_of_the_whole(isa: str, size: int, num_copies: int) -> None:
    """Of rows with gaps between them; neighbours may have the same part. A row's bits depend on no other row."""
    ops = ReferenceBackend() if isa == "file" else NativeBackend(library_or_skip(isa), 1)
    num_ranks = size * num_copies
    boards = native_boards(ops.library, num_ranks) if isinstance(ops, NativeBackend) else file_boards(num_ranks)
    generator, eps = torch.Generator().manual_seed(size), 1e-3
    x, weight = torch.randn(5, size * 37, generator=generator), torch.randn(size * 37, generator=generator)
    want = ReferenceBackend().rms_norm(x.double(), weight.double(), eps)

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        ranks = RankGroup(Shard(rank, num_ranks), boards[rank])
        own, own_weight = x.chunk(size, 1)[rank // num_copies], weight.chunk(size)[rank // num_copies]
        return ops.rms_norm_ranks(own, own_weight, eps, ranks), ops.rms_norm_ranks(own[3:4], own_weight, eps, ranks)

    found = together(num_ranks, run)
    whole = torch.cat([y for y, _ in found[::num_copies]], dim=1)
    torch.testing.assert_close(whole.double(), want, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(y[3:4], alone) for y, alone in found)


def test_a_part_may_be_a_view_with_gaps_or_nothing() -> None:
    boards, whole = file_boards(2), torch.arange(24.0).view(4, 6)
    totals = together(2, lambda rank: boards[rank].sum(whole[:, ::2]))
    assert all(torch.equal(total, 2 * whole[:, ::2]) for total in totals)
    assert [total.shape for total in together(2, lambda rank: boards[rank].sum(torch.ones(0, 8)))] == [(0, 8)] * 2


def test_a_rank_that_only_gives_its_part_waits_for_no_other(make: Make) -> None:
    boards, part = make(2), torch.ones(1, 4)
    boards[1].side_by_side(part)
    assert boards[0].side_by_side(2 * part).tolist() == [[2] * 4 + [1] * 4]


def test_the_end_of_a_rank_is_an_error_of_the_others(make: Make) -> None:
    """Which wait for it, and from then on of every call."""
    ours, theirs = os.pipe()
    board = make(2, [ours])[0]
    threading.Timer(0.05, os.close, [theirs]).start()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a rank has ended"):
            board.sum(torch.ones(4))
    os.close(ours)


def test_what_a_pipe_has_to_say_is_not_its_end(make: Make) -> None:
    ours, theirs = os.pipe()
    os.write(theirs, b"a message")
    boards = make(2, [ours])

    def run(rank: int) -> float:
        time.sleep(0.1 * rank)
        return float(boards[rank].sum(torch.ones(1)))

    assert together(2, run) == [2, 2]
    os.close(ours)
    os.close(theirs)


def test_a_rank_that_is_silent_is_lost(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (native_board, file_board):
        monkeypatch.setattr(module, "COLLECTIVE_TIMEOUT", timedelta(seconds=0.05))
    with pytest.raises(RuntimeError, match="silent"):
        make(2)[1].sum(torch.ones(4))
