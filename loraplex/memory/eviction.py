"""Which weights go first when room is needed. A policy sees keys in the order of their use, never bytes or tiers.

The manager asks for the order and skips what may not go (running, pinned, loading). Policies are chosen by name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from loraplex.errors import ConfigError


class EvictionPolicy(Protocol):
    """Not thread-safe: the manager calls it under its lock."""

    @property
    def name(self) -> str: ...

    @property
    def evicts(self) -> bool:
        """Whether anything is ever evicted to make room; if not, a full tier refuses."""
        ...

    def touch(self, key: str) -> None:
        """`key` is used now; it is tracked from now on."""
        ...

    def forget(self, key: str) -> None:
        """Stop tracking `key`, if it is tracked."""
        ...

    def order(self) -> Iterator[str]:
        """All tracked keys, the one that goes first in front. Do not change the policy while iterating."""
        ...


class _UseOrder:
    """Keys by their last use, the oldest first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()

    def touch(self, key: str) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)

    def forget(self, key: str) -> None:
        self._keys.pop(key, None)

    def order(self) -> Iterator[str]:
        return iter(self._keys)


class LRU(_UseOrder):
    """The least recently used goes first."""

    name = "lru"
    evicts = True


class NoEviction(_UseOrder):
    """Nothing goes by itself: an adapter is evicted by name only, and a full tier refuses."""

    name = "none"
    evicts = False


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {"lru": LRU, "none": NoEviction}


def get_policy(name: str) -> EvictionPolicy:
    """A new policy of that name. Raises ConfigError for any other name."""
    if name not in POLICIES:
        raise ConfigError(f"eviction_policy must be one of {tuple(POLICIES)}, got {name!r}")
    return POLICIES[name]()
