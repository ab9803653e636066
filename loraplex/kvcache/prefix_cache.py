"""Which full KV blocks hold which prefix of which adapter and tenant.

The key of block i of a sequence is a hash chain:
    key[-1] = H(adapter_digest, cache_salt);  key[i] = H(key[i-1], token_ids[i*block_size : (i+1)*block_size])
with H = blake2b of 16 bytes. Of an aLoRA, blocks wholly before its invocation have the keys of the base model, with
which they are shared in both directions. Before the block with the invocation, its position and the adapter's digest
are hashed into the chain. A different adapter content or tenant gives other keys from the root on, so nothing is
shared by accident.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

from loraplex.core import contents_of


def root_key(adapter_digest: str, cache_salt: str) -> bytes:
    """The key before the first block. Lengths are hashed too, so that (ab, c) and (a, bc) differ."""
    digest, salt = adapter_digest.encode(), cache_salt.encode()
    return blake2b(len(digest).to_bytes(4) + digest + salt, digest_size=16).digest()


def next_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full block of `token_ids` that follows the block of `parent`."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


def activated_key(parent: bytes, adapter_digest: str, adapter_from: int) -> bytes:
    """What stands for `parent`, a key of the base's, before the first block with rows of an aLoRA.

    Two prompts may have equal tokens up to a block's end, and invocations that begin in it at different positions.
    """
    content = parent + adapter_from.to_bytes(8) + adapter_digest.encode()
    return blake2b(content, digest_size=16, person=b"activated").digest()


class PrefixCache:
    """key -> KV block, and back. It owns no reference: a cached block may be free, until the pool lends it again.

    The owner of a block is the tenant whose request computed it.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._entry_of: dict[int, tuple[bytes, str, str]] = {}
        self._num_of: dict[str, int] = {}  # blocks of an owner
        self._weight_of: dict[str, float] = {}
        self._blocks_of_digest: dict[str, set[int]] = {}
        self._digests_with: dict[str, set[str]] = {}  # by content: its own, and those of mixes with it

    def __len__(self) -> int:
        return len(self._block_of)

    def find(self, key: bytes) -> int | None:
        return self._block_of.get(key)

    def has(self, kv_block: int) -> bool:
        return kv_block in self._entry_of

    def owner_of(self, kv_block: int) -> str:
        return self._entry_of[kv_block][2]

    def share_of(self, owner: str) -> float:
        """Blocks that it has, over its weight."""
        return self._num_of[owner] / self._weight_of[owner]

    def publish(self, key: bytes, kv_block: int, adapter_digest: str, owner: str = "", weight: float = 1.0) -> bool:
        """Remember that `kv_block` holds `key`; False when another block already does. weight: of the owner from now
        on."""
        if key in self._block_of:
            return False
        self.forget(kv_block)
        self._block_of[key] = kv_block
        self._entry_of[kv_block] = (key, adapter_digest, owner)
        self._num_of[owner] = self._num_of.get(owner, 0) + 1
        self._weight_of[owner] = weight
        if adapter_digest not in self._blocks_of_digest:
            self._blocks_of_digest[adapter_digest] = set()
            for content in contents_of(adapter_digest):
                self._digests_with.setdefault(content, set()).add(adapter_digest)
        self._blocks_of_digest[adapter_digest].add(kv_block)
        return True

    def forget(self, kv_block: int) -> None:
        entry = self._entry_of.pop(kv_block, None)
        if entry is None:
            return
        key, adapter_digest, owner = entry
        del self._block_of[key]
        self._num_of[owner] -= 1
        if not self._num_of[owner]:
            del self._num_of[owner], self._weight_of[owner]
        blocks = self._blocks_of_digest[adapter_digest]
        blocks.discard(kv_block)
        if not blocks:
            del self._blocks_of_digest[adapter_digest]
            for content in contents_of(adapter_digest):
                self._digests_with[content].discard(adapter_digest)
                if not self._digests_with[content]:
                    del self._digests_with[content]

    def rename(self, kv_block: int, new_block: int) -> None:
        """What `kv_block` holds, if it is cached, is in `new_block` now."""
        if kv_block in self._entry_of:
            key, adapter_digest, owner = self._entry_of[kv_block]
            weight = self._weight_of[owner]
            self.forget(kv_block)
            self.publish(key, new_block, adapter_digest, owner, weight)

    def drop_digest(self, adapter_digest: str) -> list[int]:
        """Forget every block of an adapter's content, alone or in a mix; returns them."""
        digests = self._digests_with.get(adapter_digest, ())
        blocks = [kv_block for each in digests for kv_block in self._blocks_of_digest[each]]
        for kv_block in blocks:
            self.forget(kv_block)
        return blocks

    def check_integrity(self) -> None:
        """Assert that the maps say the same."""
        assert len(self._block_of) == len(self._entry_of)
        owners = Counter(owner for _, _, owner in self._entry_of.values())
        assert (self._num_of, self._weight_of.keys()) == (owners, owners.keys())
        for kv_block, (key, adapter_digest, _) in self._entry_of.items():
            assert self._block_of[key] == kv_block
            assert kv_block in self._blocks_of_digest[adapter_digest]
        assert sum(map(len, self._blocks_of_digest.values())) == len(self._entry_of)
        pairs = {(content, each) for each in self._blocks_of_digest for content in contents_of(each)}
        assert {(content, each) for content, some in self._digests_with.items() for each in some} == pairs
        assert all(self._digests_with.values())
