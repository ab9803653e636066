"""Block tables of requests: what the scheduler asks for KV memory (`core.BlockAllocator`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from loraplex.core import Request
from loraplex.kvcache.block_pool import BlockPool
from loraplex.kvcache.prefix_cache import PrefixCache, next_key, root_key


@dataclass(slots=True)
class _Table:
    """One request's blocks; the first `len(keys) - 1` of them are full and have been offered to the cache.

    num_queried, num_hit: what its look-up adds to the counters once it runs; one that finds no room asks again in every step.
    """

    adapter_digest: str
    keys: list[bytes]
    blocks: list[int] = field(default_factory=list)
    num_queried: int = 0
    num_hit: int = 0


class KVBlockAllocator:
    """Block tables over a `BlockPool`, sharing full blocks through a `PrefixCache`.

    A request's table covers positions [0, len(blocks) * block_size). Blocks are shared only when full and computed.
    """

    def __init__(self, num_blocks: int, block_size: int, *, is_prefix_caching: bool = True) -> None:
        self._block_size = block_size
        self._cache = PrefixCache() if is_prefix_caching else None
        self._pool = BlockPool(num_blocks, on_reuse=None if self._cache is None else self._cache.forget)
        self._tables: dict[str, _Table] = {}
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
        return self._pool.num_free_blocks

    def start(self, request: Request, token_ids: Sequence[int]) -> int:
        assert request.request_id not in self._tables, f"request {request.request_id} has a block table already"
        table = _Table(request.adapter_digest, [root_key(request.adapter_digest, request.cache_salt)])
        self._tables[request.request_id] = table
        if self._cache is None:
            return 0
        # The last token is always computed: the step needs its logits. Prompt logprobs need those of every token.
        is_sharable = request.sampling_params.prompt_logprobs is None
        for begin in range(0, len(token_ids) - self._block_size if is_sharable else 0, self._block_size):
            key = next_key(table.keys[-1], token_ids[begin : begin + self._block_size])
            kv_block = self._cache.find(key)
            if kv_block is None:
                break
            self._pool.share(kv_block)
            table.keys.append(key)
            table.blocks.append(kv_block)
        num_cached = len(table.blocks) * self._block_size
        table.num_queried, table.num_hit = len(token_ids), num_cached
        return num_cached

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        table = self._tables[request_id]
        missing = -(-num_tokens // self._block_size) - len(table.blocks)
        if missing <= 0:
            return True
        blocks = self._pool.allocate(missing)
        if blocks is None:
            return False
        table.blocks += blocks
        return True

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
            begin = index * self._block_size
            table.keys.append(next_key(table.keys[-1], token_ids[begin : begin + self._block_size]))
            self._cache.publish(table.keys[-1], table.blocks[index], table.adapter_digest)

    def free(self, request_id: str) -> None:
        blocks = self._tables.pop(request_id).blocks
        self._pool.release(reversed(blocks))
        for (
            kv_block
        ) in blocks:  # what no prompt can share: memory that was touched is touched again, rather than new memory
            if self._cache is None or not self._cache.has(kv_block):
                self._pool.reuse_first(kv_block)

    def drop_digest(self, adapter_digest: str) -> None:
        """Forget the KV of an adapter's content; its blocks are reused first. Running requests keep their own blocks."""
        if self._cache is not None:
            for kv_block in self._cache.drop_digest(adapter_digest):
                self._pool.reuse_first(kv_block)

    def reset_cache(self) -> None:
        """Forget every cached prefix (running requests keep their blocks)."""
        if self._cache is not None:
            for kv_block in range(self._pool.num_blocks):
                self._cache.forget(kv_block)

    def check_integrity(self) -> None:
        """Assert that references equal the tables that hold each block, and that the cache is consistent."""
        self._pool.check_integrity()
        expected = [0] * self._pool.num_blocks
        for table in self._tables.values():
            assert len(set(table.blocks)) == len(table.blocks), "a block stands twice in one table"
            for kv_block in table.blocks:
                expected[kv_block] += 1
        for kv_block, refs in enumerate(expected):
            assert self._pool.num_refs(kv_block) == refs, (
                f"KV block {kv_block} has {self._pool.num_refs(kv_block)} references, not {refs}"
            )
        if self._cache is not None:
            self._cache.check_integrity()
