"""Blocks, prefix keys and block tables: references, sharing, and what a dropped adapter leaves behind."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.core import Request, SamplingParams
from loraplex.kvcache.allocator import KEPT_CHAINS, KVBlockAllocator
from loraplex.kvcache.block_pool import BlockPool, FixedChunks
from loraplex.kvcache.prefix_cache import PrefixCache, next_key, root_key
from loraplex.sampling_params import Claim
from loraplex.text.processor import NEVER_ACTIVE

BLOCK_SIZE = 8


def make_request(request_id: str, prompt: list[int], digest: str = "", salt: str = "", **params: object) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(**params),  # type: ignore[arg-type]
        max_tokens=16,
        seed=0,
        adapter_id=1 if digest else None,
        adapter_digest=digest,
        cache_salt=salt,
    )


def activated(request: Request, adapter_from: int) -> Request:
    """The same, of an aLoRA."""
    return replace(request, adapter_from=adapter_from if request.adapter_digest else 0)


def compute(allocator: KVBlockAllocator, request: Request) -> int:
    """Run a request through: returns the number of cached tokens."""
    prompt = request.prompt_token_ids
    num_cached = allocator.start(request, prompt)
    assert allocator.reserve(request.request_id, len(prompt))
    allocator.commit(request.request_id, prompt, len(prompt))
    allocator.check_integrity()
    return num_cached


class TestBlockPool:
    def test_allocates_all_or_nothing(self) -> None:
        pool = BlockPool(FixedChunks(3), 1)
        assert pool.allocate(4) is None
        assert pool.num_used_blocks == 0
        assert sorted(pool.allocate(3) or []) == [0, 1, 2]
        assert pool.allocate(1) is None

    def test_the_first_of_those_freed_last_is_reused_first(self) -> None:
        pool = BlockPool(FixedChunks(4), 1)
        assert pool.allocate(3) == [0, 1, 2]
        pool.release([1])
        pool.release([2, 0])
        assert pool.allocate(4) == [2, 0, 1, 3]

    def test_a_shared_block_is_freed_by_its_last_release(self) -> None:
        pool = BlockPool(FixedChunks(1), 1)
        pool.allocate(1)
        pool.share(0)
        pool.release([0])
        assert pool.num_used_blocks == 1
        pool.release([0])
        assert pool.num_used_blocks == 0
        pool.check_integrity()

    def test_releasing_a_free_block_is_a_bug(self) -> None:
        with pytest.raises(AssertionError, match="more often"):
            BlockPool(FixedChunks(1), 1).release([0])


class TestPrefixKeys:
    def test_every_part_of_the_identity_changes_the_key(self) -> None:
        keys = {
            root_key("", ""),
            root_key("ab", "c"),
            root_key("a", "bc"),
            root_key("abc", ""),
            next_key(root_key("", ""), [1, 2]),
            next_key(root_key("", ""), [2, 1]),
        }
        assert len(keys) == 6

    def test_publish_keeps_the_first_block_of_a_key(self) -> None:
        cache = PrefixCache()
        assert cache.publish(b"k", 1, "d")
        assert not cache.publish(b"k", 2, "d")
        assert cache.find(b"k") == 1
        assert cache.drop_digest("d") == [1]
        assert cache.find(b"k") is None
        cache.check_integrity()

    def test_a_dropped_content_takes_its_mixes_along_and_looks_at_no_others(self) -> None:
        """There may be as many mixes as blocks: their weights are any numbers of a client."""
        num_looks = 0

        class Digest(str):
            __slots__ = ()

            def split(self, *args: Any) -> list[str]:
                nonlocal num_looks
                num_looks += 1
                return super().split(*args)

        cache = PrefixCache()
        for number in range(100):
            assert cache.publish(b"other %d" % number, number, Digest(f"{number}*one+1*two"))
        for number, digest in enumerate(("three", "1*three+1*one", "1*one+1*three", "2*three+1*three", "4*four"), 100):
            assert cache.publish(b"%d" % number, number, digest)
        num_looks = 0
        assert sorted(cache.drop_digest("three")) == [100, 101, 102, 103]
        assert cache.drop_digest("three") == []
        assert not num_looks
        cache.check_integrity()
        assert len(cache.drop_digest("one")) == 100
        assert cache.drop_digest("four") == [104]
        assert not len(cache)
        cache.check_integrity()


class TestSharing:
    def test_the_same_prompt_shares_all_full_blocks_but_the_last_token(self) -> None:
        allocator = KVBlockAllocator(16, BLOCK_SIZE)
        prompt = list(range(3 * BLOCK_SIZE))
        assert compute(allocator, make_request("a", prompt)) == 0
        # 24 tokens are three full blocks, but the last token must be computed: two are shared.
        assert compute(allocator, make_request("b", prompt)) == 2 * BLOCK_SIZE
        assert list(allocator.block_table("a"))[:2] == list(allocator.block_table("b"))[:2]
        assert allocator.block_table("a")[2] != allocator.block_table("b")[2]

    def test_a_step_copies_a_table_as_it_is(self) -> None:
        allocator = KVBlockAllocator(16, BLOCK_SIZE)
        compute(allocator, make_request("a", list(range(3 * BLOCK_SIZE))))
        table = np.frombuffer(memoryview(allocator.block_table("a")), np.int32)  # type: ignore[arg-type]
        assert table.tolist() == list(allocator.block_table("a"))
        assert len(table) == 3

    @pytest.mark.parametrize(("digest", "salt"), [("other", ""), ("", "tenant")])
    def test_another_adapter_or_tenant_shares_nothing(self, digest: str, salt: str) -> None:
        allocator = KVBlockAllocator(16, BLOCK_SIZE)
        prompt = list(range(20))
        compute(allocator, make_request("a", prompt))
        assert compute(allocator, make_request("b", prompt, digest, salt)) == 0

    def test_freed_blocks_are_found_again_until_reused(self) -> None:
        allocator = KVBlockAllocator(4, BLOCK_SIZE)
        prompt = list(range(20))
        compute(allocator, make_request("a", prompt))
        allocator.free("a")
        assert allocator.num_free_blocks == 4
        assert compute(allocator, make_request("b", prompt)) == 16
        allocator.free("b")
        compute(allocator, make_request("c", list(range(100, 132))))
        allocator.free("c")
        assert compute(allocator, make_request("d", prompt)) == 0

    def test_dropping_a_digest_forgets_its_kv_only(self) -> None:
        allocator = KVBlockAllocator(16, BLOCK_SIZE)
        prompt = list(range(20))
        for name, digest in (("a", "one"), ("b", "two")):
            compute(allocator, make_request(name, prompt, digest))
            allocator.free(name)
        allocator.drop_digest("one")
        assert compute(allocator, make_request("c", prompt, "one")) == 0
        assert compute(allocator, make_request("d", prompt, "two")) == 16

    def test_dropping_an_alora_leaves_what_lies_before_its_invocation_to_the_base(self) -> None:
        allocator = KVBlockAllocator(16, BLOCK_SIZE)
        prompt = list(range(3 * BLOCK_SIZE + 1))
        compute(allocator, activated(make_request("a", prompt, "one"), BLOCK_SIZE + 3))
        allocator.free("a")
        allocator.drop_digest("one")
        assert compute(allocator, activated(make_request("b", prompt, "one"), BLOCK_SIZE + 3)) == BLOCK_SIZE
        allocator.drop_digest("")
        assert compute(allocator, make_request("c", prompt)) == 0

    def test_an_invocation_elsewhere_in_the_same_block_is_other_kv(self) -> None:
        """Of prompts that are equal up to the block's end: only what follows says where the last invocation is."""
        allocator = KVBlockAllocator(16, BLOCK_SIZE)
        prompt = list(range(3 * BLOCK_SIZE))
        compute(allocator, activated(make_request("a", prompt, "one"), BLOCK_SIZE + 2))
        for name, adapter_from, num_cached in (
            ("b", BLOCK_SIZE + 3, BLOCK_SIZE),
            ("c", BLOCK_SIZE + 2, 2 * BLOCK_SIZE),
        ):
            assert compute(allocator, activated(make_request(name, prompt, "one"), adapter_from)) == num_cached

    @given(data=st.data())
    def test_what_is_shared_was_computed_by_the_same_model_from_the_same_tokens(self, data: st.DataObject) -> None:
        """Row by row: the base before an aLoRA's invocation, the adapter from there on. Nothing more, nothing less."""
        allocator = KVBlockAllocator(64, BLOCK_SIZE)
        owned = []
        for name in ("a", "b"):
            prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=5 * BLOCK_SIZE))
            prompt = [0] * data.draw(st.integers(0, 3 * BLOCK_SIZE)) + prompt
            digest, salt = data.draw(st.sampled_from(["", "one", "two"])), data.draw(st.sampled_from(["", "", "s"]))
            start = data.draw(st.one_of(st.just(0), st.just(NEVER_ACTIVE), st.integers(0, len(prompt) - 1)))
            request = activated(make_request(name, prompt, digest, salt), start)
            owners = [digest if at >= request.adapter_from else "" for at in range(len(prompt))]
            owned.append([salt, *zip(prompt, owners, strict=True)])
            num_cached = compute(allocator, request)
        alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*owned, strict=False))) - 1
        alike = min(alike, len(owned[1]) - 2)  # the last token is always computed
        assert num_cached == max(0, alike) // BLOCK_SIZE * BLOCK_SIZE

    def test_keys_that_are_kept_for_a_prompt_are_those_of_an_equal_one(self) -> None:
        """Whatever else differs between requests with the same object: model, tenant, invocation, tokens behind it."""
        prompt = tuple(range(3 * BLOCK_SIZE + 1))
        same, equal = KVBlockAllocator(400, BLOCK_SIZE), KVBlockAllocator(400, BLOCK_SIZE)
        starts = 0, BLOCK_SIZE + 2, BLOCK_SIZE + 3
        kinds = list(itertools.product(["", "one", "two"], ["", "salt"], starts, [0, 1, 9]))
        for index, (digest, salt, start, num_outputs) in enumerate([*kinds, *reversed(kinds), *kinds]):
            tables = []
            for blocks, token_ids in ((same, prompt), (equal, (*prompt,))):
                request = activated(make_request(f"r{index}", [], digest, salt), start)
                request = replace(request, prompt_token_ids=token_ids)
                token_ids += (7,) * num_outputs
                blocks.start(request, token_ids)
                assert blocks.reserve(request.request_id, len(token_ids))
                blocks.commit(request.request_id, token_ids, len(token_ids))
                tables.append(blocks._tables[request.request_id])
                blocks.free(request.request_id)
            assert tables[0] == tables[1]
        assert len(same._chains) == KEPT_CHAINS

    def test_prompt_logprobs_need_every_token_computed(self) -> None:
        allocator = KVBlockAllocator(16, BLOCK_SIZE)
        prompt = list(range(20))
        compute(allocator, make_request("a", prompt))
        assert compute(allocator, make_request("b", prompt, prompt_logprobs=1)) == 0

    def test_without_prefix_caching_nothing_is_shared(self) -> None:
        allocator = KVBlockAllocator(16, BLOCK_SIZE, is_prefix_caching=False)
        prompt = list(range(20))
        compute(allocator, make_request("a", prompt))
        assert compute(allocator, make_request("b", prompt)) == 0

    def test_reserve_is_all_or_nothing(self) -> None:
        allocator = KVBlockAllocator(2, BLOCK_SIZE)
        request = make_request("a", list(range(8)))
        allocator.start(request, request.prompt_token_ids)
        assert allocator.reserve("a", 8)
        assert not allocator.reserve("a", 25)
        assert len(allocator.block_table("a")) == 1
        assert allocator.reserve("a", 16)


class TestShares:
    """A tenant keeps what it has up to its share of what is cached."""

    def fill(self, weight_of_beta: float = 1.0) -> tuple[KVBlockAllocator, list[Request]]:
        """beta has 4 prompts of 2 blocks in 20, used before; acme then sends 30 prompts of 2 blocks."""
        allocator = KVBlockAllocator(20, BLOCK_SIZE)
        beta = Claim(tenant="beta", weight=weight_of_beta)
        prompts = [replace(make_request(f"b{i}", [i] * 17, salt="beta"), claim=beta) for i in range(4)]
        for request in prompts:
            compute(allocator, request)
            allocator.free(request.request_id)
        for i in range(30):
            request = replace(make_request(f"a{i}", [100 + i] * 17, salt="acme"), claim=Claim(tenant="acme"))
            compute(allocator, request)
            allocator.free(request.request_id)
        return allocator, prompts

    def hits(self, allocator: KVBlockAllocator, prompts: list[Request]) -> list[int]:
        found = []
        for request in prompts:
            found.append(allocator.start(request, request.prompt_token_ids))
            allocator.free(request.request_id)
        return found

    def test_others_push_out_nothing_of_it(self) -> None:
        allocator, prompts = self.fill()
        assert self.hits(allocator, prompts) == [16] * 4

    def test_a_smaller_weight_keeps_less_and_what_was_used_last(self) -> None:
        allocator, prompts = self.fill(weight_of_beta=0.25)
        assert self.hits(allocator, prompts) == [0, 0, 8, 16]  # 3 blocks of weight 1/4 are as 12 of the 14 others

    def test_a_tenant_that_is_alone_has_all(self) -> None:
        allocator = KVBlockAllocator(20, BLOCK_SIZE)
        requests = [make_request(f"a{i}", [i] * 17) for i in range(12)]
        for request in requests:
            compute(allocator, request)
            allocator.free(request.request_id)
        assert self.hits(allocator, requests[-9:]) == [16] * 9

    def test_a_block_costs_the_same_however_many_tenants_there_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One entry a tenant is put right when a block is lent: it was all that had been made for the tenant."""
        allocator = KVBlockAllocator(1024, BLOCK_SIZE)
        for i in range(100):
            small = replace(make_request(f"s{i}", [i] * 9, salt=f"t{i}"), claim=Claim(tenant=f"t{i}"))
            compute(allocator, small)
            allocator.free(small.request_id)
        for i in range(9):
            large = replace(make_request(f"l{i}", [200 + i] * 801, salt="acme"), claim=Claim(tenant="acme"))
            compute(allocator, large)
            allocator.free(large.request_id)
        num_asked = 0

        def share_of(cache: PrefixCache, owner: str) -> float:
            nonlocal num_asked
            num_asked += 1
            return original(cache, owner)

        original = PrefixCache.share_of
        monkeypatch.setattr(PrefixCache, "share_of", share_of)
        allocator.start(make_request("next", [7] * 4001), [7] * 4001)
        assert allocator.reserve("next", 4001)
        assert num_asked < 1500

    def test_running_requests_count(self) -> None:
        """Those of acme hold most, and what it has besides goes before that of beta."""
        allocator = KVBlockAllocator(16, BLOCK_SIZE)
        acme, beta = Claim(tenant="acme"), Claim(tenant="beta")
        runs = replace(make_request("runs", [1] * 40, salt="acme"), claim=acme)
        old = [replace(make_request(f"b{i}", [10 + i] * 17, salt="beta"), claim=beta) for i in range(2)]
        last = replace(make_request("last", [2] * 17, salt="acme"), claim=acme)
        for request in (runs, *old, last):
            compute(allocator, request)
        for request in (*old, last):
            allocator.free(request.request_id)
        more = replace(make_request("more", [3] * 56, salt="acme"), claim=acme)
        compute(allocator, more)
        assert self.hits(allocator, old) == [16, 16]


class AllocatorMachine(RuleBasedStateMachine):
    """Any order of starts, growth, ends and drops keeps references exact, and everything returns."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = KVBlockAllocator(12, BLOCK_SIZE)
        self.tokens: dict[str, list[int]] = {}
        self.counter = 0

    @rule(
        length=st.integers(1, 30),
        flavour=st.integers(0, 2),
        digest=st.sampled_from(["", "a", "b"]),
        adapter_from=st.one_of(st.just(0), st.integers(0, 40)),
        claim=st.builds(Claim, tenant=st.sampled_from(["", "acme", "beta"]), weight=st.sampled_from([0.5, 1.0, 3.0])),
    )
    def start(self, length: int, flavour: int, digest: str, adapter_from: int, claim: Claim) -> None:
        self.counter += 1
        prompt = [flavour] * (length // 2) + list(range(length - length // 2))
        request = activated(make_request(f"r{self.counter}", prompt, digest), adapter_from)
        request = replace(request, claim=claim)
        num_cached = self.allocator.start(request, prompt)
        assert num_cached < len(prompt)
        if self.allocator.reserve(request.request_id, len(prompt)):
            self.tokens[request.request_id] = prompt
            self.allocator.commit(request.request_id, prompt, len(prompt))
        else:
            self.allocator.free(request.request_id)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.tokens)))
        tokens = self.tokens[request_id]
        if self.allocator.reserve(request_id, len(tokens) + 1):
            tokens.append(7)
            self.allocator.commit(request_id, tokens, len(tokens))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.tokens)))
        del self.tokens[request_id]
        self.allocator.free(request_id)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.tokens)))
        self.allocator.withdraw(request_id)
        again = make_request("again", self.tokens[request_id], self.allocator._tables[request_id].adapter_digest)
        self.allocator.start(again, [*self.tokens[request_id], 7])
        shared = set(self.allocator.block_table("again")) & set(self.allocator.block_table(request_id))
        self.allocator.free("again")
        assert not shared

    @rule(digest=st.sampled_from(["", "a", "b"]))
    def drop(self, digest: str) -> None:
        self.allocator.drop_digest(digest)

    @invariant()
    def is_consistent(self) -> None:
        self.allocator.check_integrity()

    @invariant()
    def what_is_lent_next_is_of_the_tenant_that_has_most(self) -> None:
        cache, free = self.allocator._cache, self.allocator._pool._cached
        assert cache is not None
        if free:
            assert cache.share_of(cache.owner_of(free.next())) == max(cache.share_of(cache.owner_of(i)) for i in free)

    def teardown(self) -> None:
        for request_id in self.tokens:
            self.allocator.free(request_id)
        self.allocator.check_integrity()
        assert self.allocator.num_free_blocks == self.allocator.num_blocks


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_blocks_without_a_prefix_are_lent_before_untouched_ones() -> None:
    prompt = list(range(BLOCK_SIZE + 3))
    for is_prefix_caching in (False, True):
        allocator = KVBlockAllocator(8, BLOCK_SIZE, is_prefix_caching=is_prefix_caching)
        first = make_request("a", prompt)
        compute(allocator, first)
        full, partial = allocator.block_table("a")
        allocator.free("a")
        compute(allocator, make_request("b", [7, *prompt]))
        again = set(allocator.block_table("b"))
        assert partial in again
        assert (full in again) == (not is_prefix_caching)
        allocator.check_integrity()
