"""The arena lends whole chunks, the pool hands out extents; every byte has one owner."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as HypothesisBundle
from hypothesis.stateful import RuleBasedStateMachine, consumes, invariant, precondition, rule

from loraplex.kernels.slices import ALIGNMENT
from loraplex.memory.space.arena import POISON, Arena, Extent, Owner
from loraplex.memory.space.pool import LoRAMemoryPool

CHUNK = 256


def make_arena(num_chunks: int = 8) -> Arena:
    return Arena(num_chunks * CHUNK, CHUNK, "cpu")


def test_the_arena_rounds_up_to_chunks_and_is_aligned() -> None:
    arena = Arena(CHUNK + 1, CHUNK, "cpu")
    assert (arena.num_chunks, arena.num_bytes, arena.memory.numel()) == (2, 2 * CHUNK, 2 * CHUNK)
    assert arena.memory.dtype == torch.uint8
    assert arena.memory.data_ptr() % ALIGNMENT == 0


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def flags_at(address: int) -> list[str]:
    """What the system notes of the mapping that an address lies in."""
    flags: list[str] = []
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if not head.endswith(":"):
            first, last = (int(end, 16) for end in head.split("-"))
            is_here = first <= address < last
        elif is_here and head == "VmFlags:":
            flags = line.split()[1:]
    return flags


@pytest.mark.skipif(not (sys.platform.startswith("linux") and HUGE_PAGES.is_dir()), reason="no huge pages here")
def test_the_memory_of_a_cpu_is_to_have_huge_pages_and_that_for_a_gpu_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.memory.space.arena.pin", lambda memory: None)
    size = 64 << 20
    arenas = [Arena(size, 1 << 20, "cpu", is_pinned=is_pinned) for is_pinned in (False, True)]
    found = [flags_at(arena.memory.data_ptr() + size // 2) for arena in arenas]
    assert ["hg" in flags for flags in found] == [True, False]
    assert all("wr" in flags for flags in found)


@pytest.mark.parametrize(("num_bytes", "chunk_bytes"), [(0, CHUNK), (CHUNK, 0), (CHUNK, 100)])
def test_an_impossible_arena_is_refused_with_its_numbers(num_bytes: int, chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"{num_bytes} and {chunk_bytes}"):
        Arena(num_bytes, chunk_bytes, "cpu")


def test_kv_takes_chunks_from_the_front_and_adapters_from_the_back() -> None:
    arena = make_arena()
    assert arena.lend(Owner.KV, 3) == range(0, 3)
    assert arena.lend(Owner.ADAPTERS) == range(7, 8)
    assert arena.lend(Owner.ADAPTERS, 2) == range(5, 7)
    assert arena.lend(Owner.KV, 3) is None
    assert arena.num_free_chunks == 2
    assert arena.chunks_of(Owner.KV) == [0, 1, 2]
    arena.give_back(Owner.KV, [1])
    assert arena.lend(Owner.KV) == range(1, 2)


def test_a_chunk_comes_back_from_its_owner_only() -> None:
    arena = make_arena()
    arena.lend(Owner.KV)
    with pytest.raises(AssertionError, match="belongs to kv"):
        arena.give_back(Owner.ADAPTERS, [0])


def test_bytes_of_chunks_are_a_view() -> None:
    arena = make_arena()
    arena.memory.zero_()
    arena.bytes_of(range(2, 4)).fill_(7)
    assert arena.memory.nonzero().flatten().tolist() == list(range(2 * CHUNK, 4 * CHUNK))


def test_extents_are_aligned_and_as_large_as_asked() -> None:
    pool = LoRAMemoryPool(make_arena())
    extent = pool.allocate(65)
    assert extent is not None
    assert extent.nbytes == 128
    assert extent.offset % ALIGNMENT == 0
    assert pool.view(extent).numel() == 128
    pool.check_integrity()


def test_nothing_is_not_an_extent() -> None:
    with pytest.raises(ValueError, match="at least one byte, got 0"):
        LoRAMemoryPool(make_arena()).allocate(0)


def test_extents_fill_the_arena_to_the_last_byte_across_chunks() -> None:
    pool = LoRAMemoryPool(make_arena(3))  # 768 bytes, and extents that do not divide a chunk
    extents = [pool.allocate(192) for _ in range(4)]
    assert None not in extents
    assert pool.allocate(64) is None
    assert pool.stats().fragmentation == 0.0
    pool.check_integrity()


def test_a_large_extent_takes_adjacent_chunks_and_leaves_the_rest_to_others() -> None:
    arena = make_arena()
    pool = LoRAMemoryPool(arena)
    large = pool.allocate(2 * CHUNK + 64)
    assert large is not None
    assert arena.num_free_chunks == 5
    assert pool.stats().free_bytes == CHUNK - 64
    small = pool.allocate(CHUNK - 64)
    assert arena.num_free_chunks == 5
    assert small is not None
    pool.free(large)
    pool.check_integrity()
    assert arena.num_free_chunks == 7
    pool.free(small)
    assert arena.num_free_chunks == 8


def test_the_smallest_hole_that_fits_is_taken() -> None:
    pool = LoRAMemoryPool(make_arena(2))
    a, b, c, d = (pool.allocate(nbytes) for nbytes in (64, 128, 192, 128))
    assert a
    assert b
    assert c
    assert d
    pool.free(c)
    pool.free(a)
    assert pool.allocate(64) == a
    pool.check_integrity()


def test_an_allocation_that_raises_midway_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = LoRAMemoryPool(make_arena())
    lend, left = pool.arena.lend, [1, 1]

    def failing(owner: Owner, num_chunks: int = 1) -> range | None:
        if not left:
            raise MemoryError("no memory")
        left.pop()
        return lend(owner, num_chunks)

    monkeypatch.setattr(pool.arena, "lend", failing)
    with pytest.raises(MemoryError):
        pool.allocate_all([CHUNK, CHUNK, 64])
    assert pool.used_bytes == 0
    pool.check_integrity()


def test_an_adapter_lies_in_as_few_places_as_the_holes_allow() -> None:
    pool = LoRAMemoryPool(make_arena(4))
    first, second, third = (pool.allocate_all([CHUNK // 4] * 4) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert [num_runs(extents) for extents in (first, second, third)] == [1, 1, 1]
    pool.free_all([*first[:2], *third[2:]])  # two holes, of half a chunk each
    whole = pool.allocate_all([CHUNK // 4, CHUNK // 4])
    split = pool.allocate_all([CHUNK // 4] * 4)
    assert whole is not None
    assert split is not None
    assert num_runs(whole) == 1
    assert num_runs(split) == 2
    pool.check_integrity()
    pool.free_all([*whole, *split, *first[2:], *second, *third[:2]])
    assert pool.arena.num_free_chunks == 4
    pool.check_integrity()


def num_runs(extents: Sequence[Extent]) -> int:
    """Of extents that lie side by side."""
    return len({extent.offset for extent in extents} - {extent.end for extent in extents})


def test_an_extent_is_returned_once() -> None:
    pool = LoRAMemoryPool(make_arena())
    extent = pool.allocate(128)
    assert extent is not None
    with pytest.raises(AssertionError, match="not lent"):
        pool.free_all([extent, extent])


def test_all_or_nothing() -> None:
    pool = LoRAMemoryPool(make_arena(2))
    assert pool.allocate_all([CHUNK, CHUNK, 64]) is None
    assert pool.used_bytes == 0
    assert pool.arena.num_free_chunks == 2
    assert pool.allocate_all([]) == ()
    assert pool.allocate_all([CHUNK, CHUNK]) is not None


def test_kv_chunks_are_never_touched() -> None:
    arena = make_arena(4)
    pool = LoRAMemoryPool(arena)
    kv = arena.lend(Owner.KV, 3)
    assert kv is not None
    arena.bytes_of(kv).fill_(1)
    pool.poison()
    extent = pool.allocate(CHUNK)
    assert extent == Extent(3 * CHUNK, CHUNK)
    assert pool.allocate(64) is None
    pool.free(extent)
    assert bool((arena.bytes_of(kv) == 1).all())


@pytest.mark.parametrize("extent", [Extent(0, 64), Extent(1024, 64)])
def test_a_foreign_or_twice_freed_extent_is_caught(extent: Extent) -> None:
    pool = LoRAMemoryPool(make_arena())
    mine = pool.allocate(64)
    assert mine is not None
    pool.free(mine)
    with pytest.raises(AssertionError, match="not lent"):
        pool.free(extent)
    with pytest.raises(AssertionError, match="not lent"):
        pool.free(mine)


def test_poison_shows_who_writes_into_free_memory() -> None:
    pool = LoRAMemoryPool(make_arena())
    pool.poison()
    keep, gone = pool.allocate(64), pool.allocate(64)
    assert keep is not None
    assert gone is not None
    pool.view(gone).zero_()
    pool.free(gone)
    assert bool((pool.view(gone) == POISON).all())
    assert bool(pool.view(gone).view(torch.float32).isnan().all())
    pool.check_integrity()
    pool.view(gone)[0] = 0
    with pytest.raises(AssertionError, match="wrote into the free bytes"):
        pool.check_integrity()


def test_the_rest_of_the_last_chunk_is_no_fragmentation() -> None:
    """Nothing could give it back: two tiny adapters, and a hole between extents, need their chunk."""
    pool = LoRAMemoryPool(make_arena(1))
    assert pool.stats().fragmentation == 0.0
    a, b, _ = (pool.allocate(64) for _ in range(3))
    assert a
    assert b
    pool.free(b)
    stats = pool.stats()
    assert (stats.lent_bytes, stats.used_bytes, stats.free_bytes) == (256, 128, 128)
    assert (stats.num_extents, stats.num_holes, stats.num_chunks, stats.largest_hole_bytes) == (2, 2, 1, 64)
    assert stats.fragmentation == 0.0


def test_fragmentation_is_the_share_of_chunks_that_perfect_packing_frees() -> None:
    pool = LoRAMemoryPool(make_arena(4))
    extents = [extent for _ in range(16) if (extent := pool.allocate(64)) is not None]
    by_chunk = sorted(extents, key=lambda extent: extent.offset)
    pool.free_all(extent for index, extent in enumerate(by_chunk) if index % 4)
    assert (pool.stats().num_chunks, pool.stats().used_bytes) == (4, 256)
    assert pool.stats().fragmentation == 0.75


def test_ten_threads_share_a_pool() -> None:
    pool = LoRAMemoryPool(make_arena(16))

    def churn(seed: int) -> None:
        for i in range(60):
            extents = pool.allocate_all([64 + 64 * ((seed + i) % 3), 320])
            if extents is not None:
                for extent in extents:
                    pool.view(extent).fill_(seed)
                assert all(bool((pool.view(extent) == seed).all()) for extent in extents)
                pool.free_all(extents)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.check_integrity()
    assert pool.arena.num_free_chunks == 16


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of allocations, frees and loans to the KV cache keeps the books exact and the contents apart."""

    extents = HypothesisBundle("extents")

    def __init__(self) -> None:
        super().__init__()
        self.arena = make_arena(6)
        self.pool = LoRAMemoryPool(self.arena)
        self.pool.poison()
        self.mark = 0
        self.live: dict[Extent, int] = {}
        self.kv: list[range] = []

    @rule(target=extents, nbytes=st.integers(1, 3 * CHUNK))
    def allocate(self, nbytes: int) -> Extent | None:
        extent = self.pool.allocate(nbytes)
        if extent is None:
            return None
        assert extent.nbytes - 64 < nbytes <= extent.nbytes
        self.mark = self.mark % 200 + 1
        self.pool.view(extent).fill_(self.mark)
        self.live[extent] = self.mark
        return extent

    @rule(extent=consumes(extents))
    def free(self, extent: Extent | None) -> None:
        if extent is not None:
            assert bool((self.pool.view(extent) == self.live.pop(extent)).all())
            self.pool.free(extent)

    @rule(num_chunks=st.integers(1, 2))
    def lend_to_kv(self, num_chunks: int) -> None:
        chunks = self.arena.lend(Owner.KV, num_chunks)
        if chunks is not None:
            self.arena.bytes_of(chunks).fill_(POISON - 1)
            self.kv.append(chunks)

    @precondition(lambda self: self.kv)
    @rule()
    def take_from_kv(self) -> None:
        self.arena.give_back(Owner.KV, self.kv.pop())

    @invariant()
    def books_are_exact(self) -> None:
        self.pool.check_integrity()
        for extent, mark in self.live.items():
            assert bool((self.pool.view(extent) == mark).all())

    def teardown(self) -> None:
        self.pool.free_all(self.live)
        self.pool.check_integrity()
        assert self.arena.num_free_chunks == self.arena.num_chunks - sum(map(len, self.kv))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
