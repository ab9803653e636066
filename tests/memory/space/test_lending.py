"""KV cache and adapters over one arena: chunks go where they are needed, floors hold, bad chunks stay away, no byte is
lost."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loraplex.kvcache.allocator import KVBlockAllocator
from loraplex.kvcache.block_pool import BlockPool
from loraplex.memory.space.arena import Arena, Extent, KVShare, Limits, Owner
from loraplex.memory.space.pool import LoRAMemoryPool
from tests.kvcache.test_kvcache import make_request

CHUNK = 256
BLOCK_BYTES = 64
BLOCKS_PER_CHUNK = CHUNK // BLOCK_BYTES
BLOCK_SIZE = 8


class Shared:
    """An arena with both of its users, wired as an engine wires them; adapters that `reclaim` may take are `idle`."""

    def __init__(self, num_chunks: int, kv: Limits, adapters: Limits) -> None:
        self.arena = Arena(num_chunks * CHUNK, CHUNK, "cpu", limits={Owner.KV: kv, Owner.ADAPTERS: adapters})
        self.blocks = KVBlockAllocator(
            0, BLOCK_SIZE, chunks=KVShare(self.arena), blocks_per_chunk=BLOCKS_PER_CHUNK, reclaim=self.reclaim
        )
        self.pool = LoRAMemoryPool(self.arena, ask_kv=self.blocks.give_back)
        self.pool.poison()
        self.kv = self.arena.memory.view(num_chunks * BLOCKS_PER_CHUNK, BLOCK_BYTES)
        self.marks: dict[Extent, int] = {}
        self.idle: list[Extent] = []

    def reclaim(self, num_chunks: int) -> int:
        had = self.arena.num_lent(Owner.ADAPTERS)
        floor = self.arena.limits(Owner.ADAPTERS).floor
        while self.idle and had - self.arena.num_lent(Owner.ADAPTERS) < num_chunks:
            if self.pool.used_bytes - self.idle[0].nbytes < floor * CHUNK:
                break
            self.free(self.idle.pop(0))
        return had - self.arena.num_lent(Owner.ADAPTERS)

    def allocate(self, nbytes: int, mark: int) -> Extent | None:
        extent = self.pool.allocate(nbytes)
        if extent is not None:
            self.pool.view(extent).fill_(mark)
            self.marks[extent] = mark
        return extent

    def free(self, extent: Extent) -> None:
        assert bool((self.pool.view(extent) == self.marks.pop(extent)).all())
        self.pool.free(extent)

    def open(self, request_id: str, num_tokens: int) -> bool:
        request = make_request(request_id, list(range(num_tokens)), salt=request_id)
        self.blocks.start(request, request.prompt_token_ids)
        if not self.blocks.reserve(request_id, num_tokens):
            self.blocks.free(request_id)
            return False
        return True

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.kv[list(targets)] = self.kv[list(sources)]

    def check(self) -> None:
        self.arena.check_integrity()
        self.blocks.check_integrity()
        self.pool.check_integrity()
        for extent, mark in self.marks.items():
            assert bool((self.pool.view(extent) == mark).all())


def test_each_grows_into_what_the_other_leaves_and_gives_it_back() -> None:
    shared = Shared(8, Limits(2), Limits(1))
    assert shared.blocks.num_chunks == 2
    assert shared.blocks.num_blocks == 7 * BLOCKS_PER_CHUNK
    extent = shared.allocate(5 * CHUNK, 1)
    assert extent is not None
    assert shared.open("a", 3 * BLOCKS_PER_CHUNK * BLOCK_SIZE)
    assert not shared.open("b", BLOCK_SIZE)
    shared.blocks.free("a")
    shared.free(extent)
    assert shared.open("b", 7 * BLOCKS_PER_CHUNK * BLOCK_SIZE)  # all but the adapters' floor
    assert shared.allocate(2 * CHUNK, 2) is None
    assert shared.allocate(CHUNK, 2) is not None
    shared.blocks.free("b")
    assert shared.allocate(5 * CHUNK, 3) is not None
    assert shared.blocks.num_chunks == 2
    assert shared.allocate(64, 3) is None, "that would be of the KV cache's floor"
    shared.check()


def test_idle_adapters_make_way_for_a_request_down_to_their_floor() -> None:
    shared = Shared(8, Limits(1), Limits(2))
    for mark in range(7):
        extent = shared.allocate(CHUNK, mark)
        assert extent is not None
        shared.idle.append(extent)
    assert shared.open("a", 6 * BLOCKS_PER_CHUNK * BLOCK_SIZE)
    assert not shared.open("b", BLOCK_SIZE)
    assert len(shared.marks) == 2
    shared.check()


def test_ceilings_hold_while_memory_is_free() -> None:
    shared = Shared(8, Limits(1, 2), Limits(0, 3))
    assert not shared.open("a", 3 * BLOCKS_PER_CHUNK * BLOCK_SIZE)
    assert shared.open("a", 2 * BLOCKS_PER_CHUNK * BLOCK_SIZE)
    assert shared.allocate(3 * CHUNK, 1) is not None
    assert shared.allocate(64, 1) is None
    assert shared.arena.num_free_chunks == 3
    shared.check()


def test_cached_prefixes_go_before_running_requests_and_the_least_first() -> None:
    shared = Shared(4, Limits(1), Limits(0))
    num_tokens = BLOCKS_PER_CHUNK * BLOCK_SIZE
    for name, num_cached in (("a", 4), ("b", 1), ("c", 2), ("d", 0)):
        assert shared.open(name, num_tokens)
        shared.blocks.commit(name, range(num_tokens), num_cached * BLOCK_SIZE)
    for name in "abc":
        shared.blocks.free(name)
    shared.check()
    assert shared.blocks.give_back(1) == 1
    for name, num_cached in (("a", 3), ("b", 0), ("c", 2)):
        request = make_request(name + "2", list(range(num_tokens)), salt=name)
        assert shared.blocks.start(request, request.prompt_token_ids) == num_cached * BLOCK_SIZE
        shared.blocks.free(name + "2")
    assert shared.blocks.give_back(9) == 2
    assert list(shared.blocks.block_table("d")) == [12, 13, 14, 15]
    shared.check()


def test_sparse_kv_chunks_are_vacated_and_shared_blocks_stay_shared() -> None:
    shared = Shared(4, Limits(1), Limits(0))
    for index in range(4):  # one chunk each; then one block of each stays
        assert shared.open(f"r{index}", BLOCKS_PER_CHUNK * BLOCK_SIZE)
    for index in range(4):
        shared.blocks.free(f"r{index}")
    keep = [shared.open(f"k{index}", BLOCKS_PER_CHUNK * BLOCK_SIZE) for index in range(4)]
    assert all(keep)
    prompt = list(range(2 * BLOCK_SIZE))
    tables = {}
    for index in range(4):
        shared.blocks.free(f"k{index}")
        request = make_request(f"s{index}", prompt, salt="x")
        shared.blocks.start(request, prompt)
        assert shared.blocks.reserve(f"s{index}", len(prompt))
        shared.blocks.commit(f"s{index}", prompt, len(prompt))
        tables[f"s{index}"] = list(shared.blocks.block_table(f"s{index}"))
        shared.kv[tables[f"s{index}"]] = index + 1
    assert {table[0] for table in tables.values()} == {tables["s0"][0]}
    contents = {name: shared.kv[table].clone() for name, table in tables.items()}
    assert shared.blocks.give_back(3) + shared.blocks.vacate(3, shared.move) >= 2
    shared.check()
    for name, content in contents.items():
        assert torch.equal(shared.kv[list(shared.blocks.block_table(name))], content)
    first = {shared.blocks.block_table(name)[0] for name in tables}
    assert len(first) == 1
    request = make_request("again", prompt, salt="x")
    assert shared.blocks.start(request, prompt) == BLOCK_SIZE
    assert shared.blocks.block_table("again")[0] in first


def test_all_chunks_that_are_vacated_at_once_cost_one_walk_over_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk had every request's table written anew, and all free blocks listed."""
    shared, written, listed = Shared(8, Limits(1), Limits(0)), [], []
    for index in range(6):  # one chunk each, of which one block stays
        assert shared.open(f"r{index}", (BLOCKS_PER_CHUNK - 1) * BLOCK_SIZE)
        assert shared.open(f"s{index}", BLOCK_SIZE)
        shared.kv[list(shared.blocks.block_table(f"s{index}"))] = index + 1
    for index in range(6):
        shared.blocks.free(f"r{index}")
    free_blocks = BlockPool.free_blocks
    monkeypatch.setattr(BlockPool, "free_blocks", lambda pool, besides: listed.append(1) or free_blocks(pool, besides))
    monkeypatch.setattr("loraplex.kvcache.allocator.array", lambda *values: written.append(1) or array(*values))
    assert shared.blocks.vacate(4, shared.move) == 4
    assert (len(listed), len(written)) == (1, 6)
    shared.check()
    for index in range(6):
        assert bool((shared.kv[list(shared.blocks.block_table(f"s{index}"))] == index + 1).all())


def test_kv_that_cannot_be_moved_for_lack_of_memory_stays_where_it_is() -> None:
    shared = Shared(4, Limits(1), Limits(0))
    for name in "ab":
        assert shared.open(name, (BLOCKS_PER_CHUNK - 1) * BLOCK_SIZE)
        assert shared.open(f"{name}2", BLOCK_SIZE)
    for name in "ab":
        shared.blocks.free(name)

    def fail(sources: object, targets: object) -> None:
        raise MemoryError

    num_free = shared.blocks.num_free_blocks
    with pytest.raises(MemoryError):
        shared.blocks.vacate(1, fail)
    assert shared.blocks.num_free_blocks == num_free
    shared.check()


def test_what_the_kv_cache_owes_is_what_requests_use() -> None:
    shared = Shared(4, Limits(1), Limits(0))
    assert shared.open("a", 3 * BLOCKS_PER_CHUNK * BLOCK_SIZE)
    assert shared.allocate(2 * CHUNK, 1) is None
    assert shared.blocks.num_chunks_owed == 2
    assert shared.blocks.vacate(2, shared.move) == 0
    assert shared.blocks.num_chunks_owed == 0
    shared.blocks.free("a")
    assert shared.allocate(2 * CHUNK, 1) is not None


@pytest.mark.parametrize("is_used", [False, True])
def test_a_fenced_kv_chunk_is_never_used_again(is_used: bool) -> None:
    shared = Shared(4, Limits(2), Limits(0))
    num_tokens = 2 * BLOCKS_PER_CHUNK * BLOCK_SIZE
    assert shared.open("a", num_tokens)
    shared.blocks.commit("a", range(num_tokens), num_tokens)
    if not is_used:
        shared.blocks.free("a")
    shared.blocks.fence(0)
    shared.check()
    if is_used:
        assert shared.arena.num_lent(Owner.FENCED) == 0
        shared.blocks.free("a")
    assert shared.arena.owners()[0] is Owner.FENCED
    assert shared.arena.num_lent(Owner.FENCED) == 1
    assert shared.open("b", num_tokens)
    assert min(shared.blocks.block_table("b")) >= BLOCKS_PER_CHUNK
    shared.check()
    request = make_request("c", list(range(num_tokens)), salt="a")
    assert shared.blocks.start(request, request.prompt_token_ids) == 0, "it shares nothing of a bad chunk"


def test_requests_move_out_of_a_fenced_chunk() -> None:
    shared = Shared(4, Limits(2), Limits(0))
    assert shared.open("a", 3 * BLOCK_SIZE)
    shared.kv[list(shared.blocks.block_table("a"))] = 7
    shared.blocks.fence(0)
    assert shared.blocks.vacate(0, shared.move) == 0
    assert shared.arena.owners()[0] is Owner.FENCED
    table = list(shared.blocks.block_table("a"))
    assert min(table) >= BLOCKS_PER_CHUNK
    assert bool((shared.kv[table] == 7).all())
    shared.check()


class LendingMachine(RuleBasedStateMachine):
    """Any demands from both sides, with compaction and fences: the books are exact after each step, contents
    unchanged."""

    @initialize(
        kv_floor=st.integers(0, 3), adapter_floor=st.integers(0, 3), kv=st.integers(3, 12), adapters=st.integers(3, 12)
    )
    def start(self, kv_floor: int, adapter_floor: int, kv: int, adapters: int) -> None:
        self.shared = Shared(10, Limits(kv_floor, kv), Limits(adapter_floor, adapters))
        self.mark = 0
        self.requests: dict[str, dict[int, int]] = {}  # request -> position in its table -> mark
        self.num_fenced = 0

    def next_mark(self) -> int:
        self.mark = self.mark % 200 + 1
        return self.mark

    @rule(num_blocks=st.integers(1, 14))
    def open(self, num_blocks: int) -> None:
        request_id = f"r{self.mark}-{len(self.requests)}"
        if request_id not in self.requests and self.shared.open(request_id, num_blocks * BLOCK_SIZE):
            self.requests[request_id] = {}
            self.write(request_id)

    def write(self, request_id: str) -> None:
        marks = self.requests[request_id]
        table = self.shared.blocks.block_table(request_id)
        for position in range(len(marks), len(table)):
            marks[position] = self.next_mark()
            self.shared.kv[table[position]] = marks[position]
        num_tokens = len(table) * BLOCK_SIZE
        self.shared.blocks.commit(request_id, range(num_tokens), num_tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        if self.shared.blocks.reserve(request_id, (len(self.requests[request_id]) + 1) * BLOCK_SIZE):
            self.write(request_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        del self.requests[request_id]
        self.shared.blocks.free(request_id)

    @rule(nbytes=st.integers(1, 3 * CHUNK), is_idle=st.booleans())
    def allocate(self, nbytes: int, is_idle: bool) -> None:
        extent = self.shared.allocate(nbytes, self.next_mark())
        if extent is not None and is_idle:
            self.shared.idle.append(extent)

    @precondition(lambda self: self.shared.marks)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        extent = data.draw(st.sampled_from(sorted(self.shared.marks, key=lambda extent: extent.offset)))
        if extent in self.shared.idle:
            self.shared.idle.remove(extent)
        self.shared.free(extent)

    @rule(is_retired_at_once=st.booleans())
    def compact(self, is_retired_at_once: bool) -> None:
        shared, retired = self.shared, []
        for move in shared.pool.compaction_moves(4 * CHUNK, shared.marks.__contains__):
            shared.pool.view(move.target).copy_(shared.pool.view(move.source))
            shared.marks[move.target] = shared.marks.pop(move.source)
            shared.idle = [move.target if extent == move.source else extent for extent in shared.idle]
            if is_retired_at_once:
                shared.pool.free(move.source)
            else:
                retired.append(move.source)
        shared.pool.check_integrity()
        shared.pool.free_all(retired)

    @rule(num_chunks=st.integers(0, 4))
    def vacate(self, num_chunks: int) -> None:
        self.shared.blocks.vacate(num_chunks, self.shared.move)

    @rule(num_chunks=st.integers(0, 4))
    def kv_gives_back(self, num_chunks: int) -> None:
        assert self.shared.blocks.give_back(num_chunks) <= num_chunks

    @precondition(lambda self: self.num_fenced < 2)
    @rule(chunk=st.integers(0, 9))
    def fence(self, chunk: int) -> None:
        self.num_fenced += 1
        self.shared.blocks.fence(chunk)
        self.shared.pool.fence(chunk)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.shared.check()
        for request_id, marks in self.requests.items():
            table = self.shared.blocks.block_table(request_id)
            assert self.shared.kv[list(table), 0].tolist() == list(marks.values())
            assert self.shared.kv[list(table), -1].tolist() == list(marks.values())

    @invariant()
    def floors_are_kept(self) -> None:
        """What an owner lacks of its floor is free for it, unless it is fenced."""
        arena = self.shared.arena
        for owner in (Owner.KV, Owner.ADAPTERS):
            lacks = arena.limits(owner).floor - arena.num_lent(owner)
            assert lacks <= max(0, arena.num_free_chunks) + self.num_fenced

    def teardown(self) -> None:
        if not hasattr(self, "shared"):
            return
        for request_id in self.requests:
            self.shared.blocks.free(request_id)
        for extent in list(self.shared.marks):
            self.shared.free(extent)
        self.shared.check()
        arena = self.shared.arena
        assert arena.chunks_of(Owner.ADAPTERS) == []
        assert self.shared.blocks.num_free_blocks == self.shared.blocks.num_blocks
        assert arena.owners().count(Owner.FENCED) <= self.num_fenced


TestLending = LendingMachine.TestCase
TestLending.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
