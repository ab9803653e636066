"""Freed memory comes back only when every step that was launched before is committed."""

from __future__ import annotations

import pytest

from loraplex.memory.space.arena import Arena
from loraplex.memory.space.pool import LoRAMemoryPool, RetiredMemory


@pytest.fixture
def pool() -> LoRAMemoryPool:
    return LoRAMemoryPool(Arena(1024, 256, "cpu"))


def allocate(pool: LoRAMemoryPool) -> tuple:
    extents = pool.allocate_all([64, 64])
    assert extents is not None
    return extents


def test_without_steps_memory_is_free_at_once(pool: LoRAMemoryPool) -> None:
    retired = RetiredMemory(pool)
    retired.retire(allocate(pool))
    assert (pool.used_bytes, retired.nbytes) == (0, 0)


def test_it_waits_for_the_steps_that_were_in_flight_and_no_later_ones(pool: LoRAMemoryPool) -> None:
    retired = RetiredMemory(pool)
    retired.launched(1)
    retired.launched(2)
    retired.retire(allocate(pool))
    retired.launched(3)
    assert not retired.committed(1)
    assert (pool.used_bytes, retired.nbytes) == (128, 128)
    assert retired.committed(2)
    assert (pool.used_bytes, retired.nbytes) == (0, 0)
    retired.check_integrity()


def test_commits_out_of_order_free_nothing_early(pool: LoRAMemoryPool) -> None:
    retired = RetiredMemory(pool)
    retired.launched(1)
    retired.launched(2)
    retired.retire(allocate(pool))
    assert not retired.committed(2)
    assert pool.used_bytes == 128
    assert retired.committed(1)
    assert pool.used_bytes == 0


def test_each_retirement_has_its_own_time(pool: LoRAMemoryPool) -> None:
    retired = RetiredMemory(pool)
    retired.launched(1)
    retired.retire(allocate(pool))
    retired.launched(2)
    retired.retire(allocate(pool))
    assert len(retired.extents()) == 4
    assert retired.committed(1)
    assert retired.nbytes == 128
    assert retired.committed(2)
    assert retired.nbytes == 0


def test_an_unknown_commit_is_ignored(pool: LoRAMemoryPool) -> None:
    retired = RetiredMemory(pool)
    assert not retired.committed(7)
    retired.check_integrity()
