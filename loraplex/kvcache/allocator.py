"""Block tables of requests: what the scheduler asks for KV memory (`core.BlockAllocator`)."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loraplex.core import Request
from loraplex.kvcache.block_pool import BlockPool, ChunkLender, FixedChunks
from loraplex.kvcache.prefix_cache import PrefixCache, activated_key, next_key, root_key
from loraplex.sampling_params import NO_CLAIM, Claim

KEPT_CHAINS = 4
"""Prompts whose keys are kept: those that were looked up last."""


@dataclass(slots=True)
class _Table:
    """One request's blocks; the first `len(keys) - 1` of them are full and have been offered to the cache.

    blocks: int32, which a step copies into its own table as they are: as a list they would be converted one by one in
    every step. adapter_from: `Request.adapter_from`. claim: of the tenant that its cached blocks count for.
    num_queried, num_hit: what its look-up adds to the counters once it runs; one that finds no room asks again in every
    step.
    """

    adapter_digest: str
    keys: list[bytes]
    blocks: array[int] = field(default_factory=lambda: array("i"))
    adapter_from: int = 0
    claim: Claim = NO_CLAIM
    num_queried: int = 0
    num_hit: int = 0

    @classmethod
    def of(cls, request: Request) -> _Table:
        digest = "" if request.adapter_from else request.adapter_digest
        keys = [root_key(digest, request.cache_salt)]
        return cls(request.adapter_digest, keys, adapter_from=request.adapter_from, claim=request.claim)

    def next_key(self, token_ids: Sequence[int], block_size: int) -> bytes:
        """Of the block behind those that have keys."""
        begin = (len(self.keys) - 1) * block_size
        parent = self.keys[-1]
        if begin <= self.adapter_from < begin + block_size and self.adapter_from:
            parent = activated_key(parent, self.adapter_digest, self.adapter_from)
        return next_key(parent, token_ids[begin : begin + block_size])

    def digest_of_last(self, block_size: int) -> str:
        """Whose KV the last block with a key holds: the base's before an aLoRA's invocation."""
        return "" if (len(self.keys) - 1) * block_size <= self.adapter_from else self.adapter_digest


@dataclass(frozen=True, slots=True)
class _Chain:
    """Keys of a prompt, as far as one was asked for: its completions share the object `prompt`, and so these.

    That is here so that its `id` stays its own.
    """

    prompt: Sequence[int]
    keys: list[bytes]


@dataclass(slots=True)
class _Moved:
    """Blocks that are moved by `move` before tables are told. places: where what was in each is now; a block may move
    twice, and one that was left may be taken again."""

    move: Callable[[Sequence[int], Sequence[int]], None]
    places: dict[int, int] = field(default_factory=dict)
    _origins: dict[int, int] = field(default_factory=dict)

    def note(self, source: int, target: int) -> None:
        origin = self._origins.pop(source, source)
        self.places[origin], self._origins[target] = target, origin


class KVBlockAllocator:
    """Block tables over a `BlockPool`, sharing full blocks through a `PrefixCache`.

    A request's table covers positions [0, len(blocks) * block_size). Blocks are shared only when full and computed.
    `num_blocks` and `num_free_blocks` are of the ceiling: what is not lent to the KV cache yet counts as free.

    Tables are the engine's thread's; `give_back` and `fence` may come from any thread. `reclaim(num_chunks)`, called
    with no lock held, asks the adapters for chunks; returns how many came.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        is_prefix_caching: bool = True,
        chunks: ChunkLender | None = None,
        blocks_per_chunk: int = 1,
        reclaim: Callable[[int], int] | None = None,
    ) -> None:
        """`num_blocks` of its own, unless a lender of `chunks` is given."""
        self.reclaim = reclaim
        self._block_size = block_size
        self._cache = PrefixCache() if is_prefix_caching else None
        self._pool = BlockPool(chunks or FixedChunks(num_blocks // blocks_per_chunk), blocks_per_chunk, self._cache)
        self._tables: dict[str, _Table] = {}
        self._chains: OrderedDict[tuple[int, str, str, int], _Chain] = OrderedDict()
        self._lock = threading.Lock()
        self._num_owed = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_blocks - self._pool.num_used_blocks

    @property
    def num_chunks(self) -> int:
        """Chunks of the arena that the KV cache has now."""
        return self._pool.num_chunks

    def start(self, request: Request, token_ids: Sequence[int]) -> int:
        assert request.request_id not in self._tables, f"request {request.request_id} has a block table already"
        table = _Table.of(request)
        with self._lock:
            self._tables[request.request_id] = table
            if self._cache is None:
                return 0
            # The last token is always computed: the step needs its logits. Prompt logprobs need those of every token.
            is_sharable = request.sampling_params.prompt_logprobs is None
            keys = self._known_keys(request, token_ids)
            for index in range(1, 1 + (len(token_ids) - 1) // self._block_size if is_sharable else 0):
                if index == len(keys):
                    keys.append(table.next_key(token_ids, self._block_size))
                kv_block = self._cache.find(keys[index])
                if kv_block is None:
                    break
                self._pool.share(kv_block)
                table.keys.append(keys[index])
                table.blocks.append(kv_block)
        num_cached = len(table.blocks) * self._block_size
        table.num_queried, table.num_hit = len(token_ids), num_cached
        return num_cached

    def _known_keys(self, request: Request, token_ids: Sequence[int]) -> list[bytes]:
        """From the root on; what is appended is kept for the prompt, unless there are tokens behind it."""
        prompt = request.prompt_token_ids
        identity = id(prompt), request.adapter_digest, request.cache_salt, request.adapter_from
        chain = self._chains.pop(identity, None) or _Chain(prompt, _Table.of(request).keys)
        self._chains[identity] = chain
        if len(self._chains) > KEPT_CHAINS:
            self._chains.popitem(last=False)
        return chain.keys if len(token_ids) == len(prompt) else chain.keys.copy()

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        table = self._tables[request_id]
        missing = -(-num_tokens // self._block_size) - len(table.blocks)
        if missing <= 0:
            return True
        return self._allocate(table, missing) or (self._reclaim(missing) and self._allocate(table, missing))

    def _allocate(self, table: _Table, count: int) -> bool:
        with self._lock:
            blocks = self._pool.allocate(count)
        table.blocks.extend(blocks or ())
        return blocks is not None

    def _reclaim(self, count: int) -> bool:
        """Ask the adapters for what `count` blocks lack, if the ceiling allows; whether anything came."""
        if self.reclaim is None:
            return False
        with self._lock:
            num_chunks = self._pool.num_chunks_lacking(count)
        return num_chunks > 0 and self.reclaim(num_chunks) > 0

    def block_table(self, request_id: str) -> Sequence[int]:
        return self._tables[request_id].blocks

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        if self._cache is None:
            return
        table = self._tables[request_id]
        self.num_queried_tokens += table.num_queried
        self.num_hit_tokens += table.num_hit
        table.num_queried = table.num_hit = 0
        while len(table.keys) * self._block_size <= num_computed:
            index = len(table.keys) - 1
            table.keys.append(table.next_key(token_ids, self._block_size))
            with self._lock:
                if self._pool.is_usable(table.blocks[index]):
                    digest, claim = table.digest_of_last(self._block_size), table.claim
                    if self._cache.publish(table.keys[-1], table.blocks[index], digest, claim.tenant, claim.weight):
                        self._pool.has_more(claim.tenant)

    def withdraw(self, request_id: str) -> None:
        if self._cache is not None:
            with self._lock:
                for kv_block in self._tables[request_id].blocks:
                    self._cache.forget(kv_block)

    def free(self, request_id: str) -> None:
        with self._lock:
            self._pool.release(reversed(self._tables.pop(request_id).blocks))

    def drop_digest(self, adapter_digest: str) -> None:
        """Forget the KV of an adapter's content; its blocks are reused first. Running requests keep theirs."""
        if self._cache is not None:
            with self._lock:
                for kv_block in self._cache.drop_digest(adapter_digest):
                    self._pool.reuse_first(kv_block)

    def reset_cache(self) -> None:
        """Forget every cached prefix (running requests keep their blocks)."""
        if self._cache is not None:
            with self._lock:
                for kv_block in self._pool.blocks():
                    self._cache.forget(kv_block)
                    self._pool.reuse_first(kv_block)

    # ---------------------------------------------------------------------------------------------- chunks of the arena

    def give_back(self, num_chunks: int) -> int:
        """Return chunks that no request uses to the arena, with least cached content first; never below the floor.

        From any thread. What could not be had is owed: see `num_chunks_owed`.
        """
        with self._lock:
            num_given = self._pool.give_back(num_chunks)
            self._num_owed = num_chunks - num_given
            return num_given

    @property
    def num_chunks_owed(self) -> int:
        """Chunks that `give_back` could not return because requests use some of their blocks; `vacate` may."""
        return self._num_owed

    def vacate(self, num_chunks: int, move: Callable[[Sequence[int], Sequence[int]], None]) -> int:
        """Move the blocks of sparsely used chunks into free blocks of others, and give chunks back; returns how many.

        If those are too few, chunks move to the front of the arena, so that what is free behind is adjacent.
        move(sources, targets) copies the memory of blocks. Engine's thread only, while no step is in flight.
        """
        with self._lock:
            self._num_owed = 0
            num_given = self._pool.give_back(num_chunks)
            chunks = self._pool.sparsest(num_chunks - num_given)
            free, moved = self._pool.free_blocks(besides=chunks), _Moved(move)
            try:
                for chunk in chunks:
                    sources = self._pool.used_blocks_of(chunk)
                    if len(sources) <= len(free):
                        targets = self._pool.take([free.popleft() for _ in sources])
                        num_given += self._move(chunk, sources, targets, moved)
                    else:
                        free.extend(self._pool.free_blocks_of(chunk))
                for chunk in self._pool.farthest(num_chunks - num_given):
                    front = self._pool.move_to_front(chunk)
                    if front is not None:
                        sources = self._pool.used_blocks_of(chunk)
                        num_given += self._move(chunk, sources, self._pool.take(front[: len(sources)]), moved)
            finally:
                for table in self._tables.values() if moved.places else ():
                    table.blocks[:] = array("i", [moved.places.get(kv_block, kv_block) for kv_block in table.blocks])
            return num_given

    def _move(self, chunk: int, sources: Sequence[int], targets: Sequence[int], moved: _Moved) -> bool:
        """Empty a chunk and give it back; False when it is fenced."""
        try:
            if sources:
                moved.move(sources, targets)
        except Exception:
            self._pool.release(targets)
            raise
        for source, target in zip(sources, targets, strict=True):
            self._pool.hand_over(source, target)
            moved.note(source, target)
        return self._pool.give_back_chunk(chunk)

    def fence(self, chunk: int) -> None:
        """Never use a chunk again: its free blocks go now, the others when their requests end or `vacate` moves them.
        From any thread."""
        with self._lock:
            self._pool.fence(chunk)

    def check_integrity(self) -> None:
        """Assert that references equal the tables that hold each block, and that the cache is consistent."""
        with self._lock:
            self._pool.check_integrity()
            expected = dict.fromkeys(self._pool.blocks(), 0)
            for table in self._tables.values():
                assert len(set(table.blocks)) == len(table.blocks), "a block stands twice in one table"
                for kv_block in table.blocks:
                    expected[kv_block] += 1
            for kv_block, refs in expected.items():
                assert self._pool.num_refs(kv_block) == refs, (
                    f"KV block {kv_block} has {self._pool.num_refs(kv_block)} references, not {refs}"
                )
            if self._cache is not None:
                self._cache.check_integrity()
