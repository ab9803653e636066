"""What a front has learned of a runner's memory from what it heard and sent: where adapters are, whose prompts it has
seen. Bounded: what was learned first is forgotten first."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

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


class KnownMemory:
    """Of one runner or replica. Adapters are under the keys that `Needs.adapter` has."""

    def __init__(self) -> None:
        self.tiers: Known[str, Tier] = Known(MAX_KNOWN_ADAPTERS)
        self.prefixes: Known[bytes, None] = Known(MAX_KNOWN_PREFIXES)

    def learn_served(self, needs: Needs) -> None:
        """It has answered such a request: it has the weights on the device, and the prompt's KV."""
        if needs.adapter is not None:
            self.tiers.put(needs.adapter, Tier.DEVICE)
        for digest in needs.prefix_digests:
            self.prefixes.put(digest, None)

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
