"""Compaction gives chunks back, changes no byte of any adapter, and leaves alone what is on its way or read."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch

from loraplex.compat.vllm import WorkerLoRAManager
from loraplex.core import AdapterSpec
from loraplex.events import EventKind
from loraplex.memory.care.compaction import CompactionResult, CompactionSide
from loraplex.memory.space.arena import Arena, Extent, Owner
from loraplex.memory.space.pool import LoRAMemoryPool
from tests.memory.rig import Rig, make_model

CHUNK = 4096
SIZES = {
    "small": lambda rng: rng.randint(1, 8) * 64,
    "three ranks": lambda rng: rng.choice([640, 1024, 1536]),
    "four ranks": lambda rng: rng.choice([512, 1024, 2048, 4096]),
    "up to half a chunk": lambda rng: rng.randint(1, 32) * 64,
    "three quarters of a chunk": lambda rng: 3 * CHUNK // 4,
    "one and a half chunks": lambda rng: 3 * CHUNK // 2,
}


def filled(sizes: str, keep: float, seed: int, num_chunks: int = 100) -> tuple[LoRAMemoryPool, dict[Extent, int]]:
    """A full pool in which a random share of the extents stays, each with bytes of its own."""
    rng = Random(seed)
    pool = LoRAMemoryPool(Arena(num_chunks * CHUNK, CHUNK, "cpu"))
    pool.poison()
    extents: list[Extent] = []
    while (extent := pool.allocate(SIZES[sizes](rng))) is not None:
        extents.append(extent)
    rng.shuffle(extents)
    num_kept = int(keep * len(extents))
    pool.free_all(extents[num_kept:])
    marks = {extent: index % 250 for index, extent in enumerate(extents[:num_kept])}
    for extent, mark in marks.items():
        pool.view(extent).fill_(mark)
    return pool, marks


def compact(pool: LoRAMemoryPool, marks: dict[Extent, int], max_bytes: int = 1 << 30) -> int:
    """All the moves there are; returns the bytes moved."""
    moved_bytes = 0
    while moves := pool.compaction_moves(max_bytes - moved_bytes, marks.__contains__):
        for move in moves:
            pool.view(move.target).copy_(pool.view(move.source))
            marks[move.target] = marks.pop(move.source)
            pool.free(move.source)
            moved_bytes += move.source.nbytes
        pool.check_integrity()
    return moved_bytes


def num_freeable(pool: LoRAMemoryPool) -> int:
    """Not even perfect packing frees more."""
    return pool.stats().num_chunks - math.ceil(pool.used_bytes / CHUNK)


@pytest.mark.parametrize("keep", [0.1, 0.3, 0.5, 0.7, 0.85])
@pytest.mark.parametrize("sizes", SIZES)
def test_nine_of_ten_chunks_that_could_be_freed_are(sizes: str, keep: float) -> None:
    num_freed = num_possible = 0
    for seed in range(4):
        pool, marks = filled(sizes, keep, seed)
        before, possible = pool.stats().num_chunks, num_freeable(pool)
        compact(pool, marks)
        num_freed += before - pool.stats().num_chunks
        num_possible += possible
        assert all(bool((pool.view(extent) == mark).all()) for extent, mark in marks.items())
        assert pool.arena.num_lent(Owner.ADAPTERS) == pool.stats().num_chunks
    assert num_freed >= 0.9 * num_possible


def test_a_budget_of_bytes_holds_and_more_calls_go_on_from_there() -> None:
    pool, marks = filled("small", 0.5, seed=1)
    before = pool.stats().num_chunks
    assert 0 < compact(pool, marks, max_bytes=2 * CHUNK) <= 2 * CHUNK
    between = pool.stats().num_chunks
    assert before > between
    compact(pool, marks)
    assert pool.stats().num_chunks < between


def test_what_may_not_move_stays() -> None:
    pool, marks = filled("small", 0.5, seed=2)
    assert pool.compaction_moves(1 << 30, lambda extent: False) == []
    fixed = set(sorted(marks, key=lambda extent: extent.offset)[::10])
    while moves := pool.compaction_moves(1 << 30, lambda extent: extent in marks and extent not in fixed):
        for move in moves:
            marks[move.target] = marks.pop(move.source)
            pool.free(move.source)
    assert fixed <= marks.keys()
    pool.check_integrity()


def test_a_full_pool_has_nothing_to_move() -> None:
    pool, marks = filled("small", 1.0, seed=3)
    assert compact(pool, marks) == 0


def test_a_chunk_that_is_being_emptied_takes_nobody_in() -> None:
    """Its old extents may be retired for a while; who comes meanwhile goes elsewhere."""
    pool, marks = filled("small", 0.3, seed=4)
    moves = pool.compaction_moves(1 << 30, marks.__contains__)
    assert len(moves) > 1
    chunks = {extent.offset // CHUNK for extent in (move.source for move in moves)}
    chunks &= {(move.source.end - 1) // CHUNK for move in moves}
    late = [pool.allocate(64) for _ in range(40)]
    emptied = [chunk for chunk in chunks if pool._space.is_closed(chunk)]
    assert len(emptied) == 1
    assert not any(extent is not None and extent.offset // CHUNK in emptied for extent in late)
    pool.free_all(move.source for move in moves)
    assert emptied[0] not in pool.arena.chunks_of(Owner.ADAPTERS)
    pool.check_integrity()


def test_a_fenced_chunk_of_adapters_goes_when_its_extents_do() -> None:
    pool, _ = filled("small", 0.5, seed=5)
    chunk = pool.arena.chunks_of(Owner.ADAPTERS)[3]
    extents = pool.fence(chunk)
    assert extents
    assert all(extent.offset < (chunk + 1) * CHUNK and extent.end > chunk * CHUNK for extent in extents)
    pool.check_integrity()
    for _ in range(200):
        extent = pool.allocate(64)
        assert extent is None or extent.offset // CHUNK != chunk
    assert pool.arena.num_lent(Owner.FENCED) == 0
    pool.free_all(extents)
    assert pool.arena.owners()[chunk] is Owner.FENCED
    assert pool.arena.num_lent(Owner.FENCED) == 1
    pool.check_integrity()
    assert pool.fence(chunk) == []


# ------------------------------------------------------------------------------------------------------- of the manager


RANKS = dict(enumerate([1, 4, 12, 4, 7, 2, 9, 4, 3, 16, 4, 8], start=1))
MODELS = {adapter_id: make_model(f"d{adapter_id}", rank) for adapter_id, rank in RANKS.items()}


def spec(rig: Rig, adapter_id: int) -> AdapterSpec:
    rig.source.models[f"/p{adapter_id}"] = MODELS[adapter_id]
    return rig.spec(adapter_id)


def sparse_rig(is_separate: bool, seed: int = 0) -> Rig:
    """Twelve adapters come to the device, half of them leave again."""
    rig = Rig(num_device=30, num_host=30, is_separate=is_separate, slack_bytes=1 << 16)
    ids = list(RANKS)
    Random(seed).shuffle(ids)
    for adapter_id in ids:
        rig.manager.add_adapter(spec(rig, adapter_id))
        rig.activate(adapter_id)
    for adapter_id in ids[::2]:
        rig.manager.remove_adapter(adapter_id)
    rig.manager.check_integrity()
    return rig


def contents(rig: Rig) -> dict[str, bytes]:
    store = rig.manager._residency
    tiers = {"host": store.tiers.host.pool, "device": store.tiers.device.pool}
    return {
        f"{tier} {weights.digest}": b"".join(pool.view(extent).numpy().tobytes() for extent in place.extents)
        for weights in store.weights.values()
        for tier, pool in tiers.items()
        if pool is not None and (place := weights.host if tier == "host" else weights.device) is not None
    }


def check_outputs(rig: Rig) -> None:
    for lora_slot, adapter_id in enumerate(WorkerLoRAManager(rig.manager).lora_index_to_id):
        if adapter_id is not None:
            rig.check_output(lora_slot, MODELS[adapter_id])


@pytest.mark.parametrize("is_separate", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_adapters_are_the_same_afterwards(is_separate: bool, seed: int) -> None:
    rig = sparse_rig(is_separate, seed)
    before, pools = contents(rig), [rig.manager._residency.tiers.host.pool, rig.manager._residency.tiers.device.pool]
    chunks = [pool.stats().num_chunks for pool in pools if pool is not None]
    result = rig.manager.compact(1 << 30, deadline_s=1.0)
    assert result.num_moved > 0
    assert (
        result.num_chunks_freed == sum(chunks) - sum(pool.stats().num_chunks for pool in pools if pool is not None) > 0
    )
    assert contents(rig) == before
    rig.manager.check_integrity()
    check_outputs(rig)
    for adapter_id in [each.adapter_id for each in rig.manager.list_adapters()]:
        rig.manager.remove_adapter(adapter_id)
    rig.check_empty()


def test_it_is_told_and_ends_with_its_time() -> None:
    rig = sparse_rig(is_separate=False)
    assert rig.manager.compact(1 << 30, deadline_s=0.0) == CompactionResult()
    assert rig.manager.compact(0, deadline_s=1.0) == CompactionResult()
    result = rig.manager.compact(1 << 30, deadline_s=1.0)
    (event,) = [each for each in rig.manager._residency.log.events.take() if each.kind is EventKind.COMPACTION]
    assert event.details == {"num_moved": result.num_moved, "nbytes": result.moved_bytes}
    assert rig.manager.compact(1 << 30, deadline_s=1.0).num_chunks_freed == 0


def test_what_lies_where_is_looked_up_once_in_a_compaction_of_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each step it was, of all layers of all contents: 50 ms with 2,000 adapters, of 1 ms that a step may take."""
    rig = sparse_rig(is_separate=False)
    looks, look_up = [], CompactionSide._owners_locked
    monkeypatch.setattr(CompactionSide, "_owners_locked", lambda side: looks.append(1) or look_up(side))
    before, num_steps = contents(rig), 1
    while rig.manager.compact(1024, deadline_s=1.0).num_moved:
        num_steps += 1
    assert num_steps > 3
    assert len(looks) == 1
    assert contents(rig) == before
    rig.manager.check_integrity()
    rig.manager.compact(1024, deadline_s=1.0)
    assert len(looks) == 2, "the next one looks again"


@pytest.mark.parametrize("is_separate", [False, True])
def test_a_step_in_flight_keeps_what_it_reads(is_separate: bool) -> None:
    """Adapters of running requests stay where they are; the old places of the others come free with the commit."""
    rig = sparse_rig(is_separate)
    store, pool = (
        rig.manager._residency,
        rig.manager._residency.tiers.device.pool or rig.manager._residency.tiers.host.pool,
    )
    running = rig.manager.list_adapters()[0].adapter_id
    rig.acquire(running)
    weights = store.adapters[running].weights
    place = weights.host if pool is store.tiers.host.pool else weights.device
    rig.manager.step_launched(1)
    before = contents(rig)
    rig.manager.compact(1 << 30, deadline_s=1.0)
    assert (weights.host if pool is store.tiers.host.pool else weights.device) == place
    assert store.retired.nbytes > 0
    rig.manager.check_integrity()
    assert contents(rig) == before
    num_chunks = pool.stats().num_chunks
    rig.manager.step_committed(1)
    assert store.retired.nbytes == 0
    assert pool.stats().num_chunks < num_chunks
    rig.manager.check_integrity()
    check_outputs(rig)


def test_a_load_that_is_under_way_stays_where_it_is() -> None:
    rig = sparse_rig(is_separate=False)
    loading = rig.manager.list_adapters()[0].adapter_id
    while rig.tier_of(loading) != "source":
        rig.manager.evict_adapter(loading)
    rig.manager.poll()
    assert rig.manager.try_acquire(loading).lora_slot is None
    weights = rig.manager._residency.adapters[loading].weights
    place = weights.host
    assert weights.job is not None
    assert place is not None
    rig.manager.compact(1 << 30, deadline_s=1.0)
    assert weights.host == place
    assert rig.loader is not None
    rig.loader.run_all()
    rig.acquire(loading)
    check_outputs(rig)
    rig.manager.check_integrity()


# ----------------------------------------------------------------------------------------------------- for the KV cache


@pytest.mark.parametrize("is_separate", [False, True])
def test_idle_adapters_leave_for_the_kv_cache(is_separate: bool) -> None:
    rig = sparse_rig(is_separate)
    used = [each.adapter_id for each in rig.manager.list_adapters()][:2]
    rig.pin(used[0])
    rig.acquire(used[1])
    free = rig.arena.num_free_chunks
    num_chunks = rig.manager.reclaim_chunks(9)
    assert 9 <= num_chunks == rig.arena.num_free_chunks - free
    assert rig.manager._log.counters.evictions["kv_pressure"] > 0
    rig.manager.check_integrity()
    check_outputs(rig)
    assert {rig.tier_of(adapter_id) for adapter_id in used} == {"device"}


def test_nobody_leaves_for_too_little() -> None:
    rig = sparse_rig(is_separate=False)
    before = rig.manager.report().tier("host").num_adapters
    assert rig.manager.reclaim_chunks(rig.arena.num_chunks) == 0
    assert rig.manager.report().tier("host").num_adapters == before


def test_free_pages_go_back_and_others_keep_their_bytes() -> None:
    arena = Arena(64 * CHUNK, CHUNK, "cpu")
    arena.memory.fill_(7)
    kept = arena.lend(Owner.KV, 8)
    assert kept is not None
    num_bytes = arena.release_pages()
    assert 50 * CHUNK < num_bytes <= 56 * CHUNK or num_bytes == 0  # 0 where the system is not Linux
    assert bool((arena.bytes_of(kept) == 7).all())
    if num_bytes:
        assert int(torch.count_nonzero(arena.memory)) < 16 * CHUNK


@pytest.mark.parametrize("is_separate", [False, True])
def test_fragmentation_is_of_the_memory_that_the_device_reads(is_separate: bool) -> None:
    """With a pool of its own its holes are the figure, and those of the host count for the start of a compaction."""
    rig = Rig(num_device=8, num_host=8, is_separate=is_separate, is_gated=False)
    rig.add(*range(1, 9))
    for adapter_id in range(1, 9):
        rig.activate(adapter_id)
    pools = rig.manager._residency.tiers.device.pool, rig.manager._residency.tiers.host.pool
    assert rig.manager.report().fragmentation == (pools[0] or pools[1]).stats().fragmentation
    for adapter_id in range(1, 9, 2):
        rig.manager.deactivate_adapter(adapter_id)
    device = (pools[0] or pools[1]).stats().fragmentation
    stats = rig.manager.report()
    assert stats.fragmentation == device
    assert stats.most_fragmentation == max(device, pools[1].stats().fragmentation)
    report = rig.manager.report()
    assert report.fragmentation == device
    assert sum(run.num_chunks for run in report.chunks) == rig.arena.num_chunks
    if is_separate:
        assert device > pools[1].stats().fragmentation


def test_two_tiny_adapters_are_no_reason_to_compact() -> None:
    pool = LoRAMemoryPool(Arena(4 * CHUNK, CHUNK, "cpu"))
    marks = {extent: 1 for _ in range(2) if (extent := pool.allocate(64)) is not None}
    assert len(marks) == 2
    assert pool.stats().fragmentation == 0.0
    assert compact(pool, marks) == 0
