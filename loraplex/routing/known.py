"""What a front has learned of a runner's memory from what it heard and sent: where adapters are, whose prompts it has
seen. Bounded: what was learned first is forgotten first."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Set
from typing import Generic, TypeVar

from loraplex.bounds.largest import Largest
from loraplex.core import Tier
from loraplex.routing.snapshot import Needs

K = TypeVar("K")
V = TypeVar("V")

MAX_KNOWN_ADAPTERS = 65_536
MAX_KNOWN_PREFIXES = 65_536

_BELOW = {Tier.DEVICE: Tier.HOST, Tier.HOST: Tier.DISK, Tier.DISK: Tier.SOURCE}


class Known(OrderedDict[K, V], Generic[K, V]):
    """A dictionary of the `max_len` entries that were put last."""

    def __init__(self, max_len: int) -> None:
        super().__init__()
        self._max_len = max_len

    def put(self, key: K, value: V) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._max_len:
            self.popitem(last=False)


class KnownPrefixes:
    """Digests, at most `max_len`. What goes first is of the client that has most, and of that one's what was put first:
    a client with many prompts, or with long ones of blanks, takes nothing from others."""

    def __init__(self, max_len: int) -> None:
        self._max_len = max_len
        self.clear()

    def clear(self) -> None:
        self._client_of: dict[bytes, str] = {}
        self._of: dict[str, OrderedDict[bytes, None]] = {}
        self._largest = Largest(lambda client: len(self._of[client]))

    def keys(self) -> Set[bytes]:
        return self._client_of.keys()

    def put(self, digest: bytes, client: str) -> None:
        if self._client_of.get(digest, client) != client:
            self._discard(digest)
        self._client_of[digest] = client
        own = self._of.setdefault(client, OrderedDict())
        own[digest] = None
        own.move_to_end(digest)
        self._largest.note(client)
        if len(self._client_of) > self._max_len:
            self._discard(next(iter(self._of[self._largest.owner()])))

    def _discard(self, digest: bytes) -> None:
        client = self._client_of.pop(digest)
        del self._of[client][digest]
        if not self._of[client]:
            self._largest.forget(client)
            del self._of[client]


class KnownMemory:
    """Of one runner or replica. Adapters are under the keys that `Needs.adapter` has."""

    def __init__(self) -> None:
        self.tiers: Known[str, Tier] = Known(MAX_KNOWN_ADAPTERS)
        self.prefixes = KnownPrefixes(MAX_KNOWN_PREFIXES)

    def learn_served(self, needs: Needs, client: str | None = None) -> None:
        """It has answered such a request: it has the weights on the device, and the prompt's KV. client: whose share
        of what is known the prompt takes; None: that of `needs.tenant`."""
        if needs.adapter is not None:
            self.tiers.put(needs.adapter, Tier.DEVICE)
        for digest in needs.prefix_digests:
            self.prefixes.put(digest, client or needs.tenant or "")

    def learn_tiers(self, tiers: Iterable[tuple[str, Tier]]) -> None:
        for name, tier in tiers:
            self.tiers.put(name, tier)

    def learn_event(self, kind: str, adapter: str, tier: object) -> None:
        """Of an event (`EventKind`): `load`, `evict` from a tier, or one after which an adapter is not there."""
        if kind == "load":
            if self.tiers.get(adapter) is not Tier.DEVICE:
                self.tiers.put(adapter, Tier.HOST)
        elif kind == "evict":
            if tier in _BELOW:
                self.tiers.put(adapter, _BELOW[Tier(str(tier))])
        else:
            self.tiers.pop(adapter, None)

    def forget(self) -> None:
        """It started again: its memory is empty."""
        self.tiers.clear()
        self.prefixes.clear()


def prefix_digests(prompt: bytes, salt: str, block_bytes: int, max_blocks: int) -> tuple[bytes, ...]:
    """digests[i] := hash(salt, prompt[: (i + 1) * block_bytes]); what is beyond the last whole block is in none."""
    running = hashlib.blake2b(salt.encode("utf-8", "replace"), digest_size=16)
    found = []
    for start in range(0, min(len(prompt) // block_bytes, max_blocks) * block_bytes, block_bytes):
        running.update(prompt[start : start + block_bytes])
        found.append(running.digest())
    return tuple(found)
