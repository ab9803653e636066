"""Which weights go first when room is needed. A policy sees keys, their bytes and their cost of return, never tiers.

A tier tells its policy who enters, who is used, who leaves; the room asks for the order and skips what may not go
(running, pinned, loading). Policies are chosen by name:

    lru          the least recently used goes first
    lfu          the least often used
    fifo         the first that entered
    gdsf         greedy-dual-size-frequency (Cherkasova, 1998): clock + uses * reload seconds / bytes; the clock is a
                 victim's highest value
    cost_aware   decayed uses * reload seconds / bytes; what queued requests ask for goes after everything else
    none         nothing goes by itself

A `use` is a request that gets the weights: one each. A `touch` is any other sign of interest in them, however often (a
waiting request asks in every step), and says something of recency alone.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from loraplex.errors import ConfigError

IsQueued = Callable[[str], bool]

HALF_LIFE_S = 300.0
"""After this long a use counts half. From 1 to 20 requests a second `benchmarks/eviction.py` loads least with it, or
nearly: a minute forgets who comes back regularly, 20 minutes hold on to what was popular once."""

READ_BYTES_PER_S = 1e9
"""A reload that was never timed is taken to read this fast."""

MIN_RELOAD_S = 1e-4
"""A reload is never free: below this, what was timed is the clock's grain."""

MIN_GHOSTS = 4096
GHOSTS_PER_KEY = 4
"""Keys that left keep their count of uses: `MIN_GHOSTS` of them, or this many times the tier's if that is more."""


class EvictionPolicy(Protocol):
    """The keys of one tier. Not thread-safe: it is called under the lock of the residency (WeightStore)."""

    @property
    def name(self) -> str: ...

    @property
    def evicts(self) -> bool:
        """Whether anything is ever evicted to make room; if not, a full tier refuses."""
        ...

    def enter(self, key: str, nbytes: int, reload_s: float | None = None) -> None:
        """`key` is in the tier from now on, and would take `reload_s` to come back (None: not timed yet). Again: that
        is known better."""
        ...

    def use(self, key: str) -> None:
        """One request got `key`; that counts for its history also when it is not in the tier."""
        ...

    def touch(self, key: str) -> None:
        """`key` was waited for, prefetched or given back. Nothing for a key that is not in the tier."""
        ...

    def evict(self, key: str) -> None:
        """`key` leaves to make room for another."""
        ...

    def forget(self, key: str) -> None:
        """`key` is not in the tier any more, for whatever reason; nothing if it never was."""
        ...

    def order(self, is_queued: IsQueued | None = None) -> Iterator[str]:
        """All keys in the tier, the one that goes first in front. Do not change the policy while iterating.

        is_queued: whether a waiting request asks for a key; a policy may spare those.
        """
        ...


# ---------------------------------------------------------------------------------------------------------- in sequence


class _Sequence:
    """Keys one after another, the next to go in front."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()

    def enter(self, key: str, nbytes: int, reload_s: float | None = None) -> None:
        self._keys.setdefault(key)

    def use(self, key: str) -> None:
        self.touch(key)

    def touch(self, key: str) -> None:
        if key in self._keys:
            self._keys.move_to_end(key)

    def evict(self, key: str) -> None:
        self.forget(key)

    def forget(self, key: str) -> None:
        self._keys.pop(key, None)

    def order(self, is_queued: IsQueued | None = None) -> Iterator[str]:
        return iter(self._keys)


class LRU(_Sequence):
    """The least recently used goes first."""

    name = "lru"
    evicts = True


class FIFO(_Sequence):
    """Who entered first goes first, however much it is used."""

    name = "fifo"
    evicts = True

    def touch(self, key: str) -> None:
        pass


class NoEviction(_Sequence):
    """Nothing goes by itself: an adapter is evicted by name only, and a full tier refuses."""

    name = "none"
    evicts = False


# ------------------------------------------------------------------------------------------------------------- by value


@dataclass(slots=True)
class _Tracked:
    """A key in the tier. uses: as its policy counts, None before the first. is_used: since it entered. place: its entry
    in the ranking."""

    uses: float | None
    seconds_per_byte: float = 0.0
    is_used: bool = False
    place: tuple[float, int, str] | None = None


class _Ranking:
    """Keys by value, the lowest first; of equal ones, the one that was ranked first.

    A key that has just entered is valued as if the use that it came for had happened: a newcomer is not the first to
    go. Ranking a key is a binary search and a move in a flat list; the order is there at any time. By default the value
    is the number of uses.
    """

    evicts = True

    def __init__(self) -> None:
        self._tracked: dict[str, _Tracked] = {}
        self._places: list[tuple[float, int, str]] = []
        self._ghosts: OrderedDict[str, float] = OrderedDict()
        self._num_ranked = 0

    def _count(self, uses: float | None) -> float:
        """One more use; None: the first."""
        return (uses or 0.0) + 1.0

    def _value(self, uses: float, seconds_per_byte: float) -> float:
        return uses

    def enter(self, key: str, nbytes: int, reload_s: float | None = None) -> None:
        tracked = self._tracked.get(key)
        if tracked is None:
            tracked = self._tracked[key] = _Tracked(self._ghosts.pop(key, None))
        nbytes = max(1, nbytes)
        seconds = nbytes / READ_BYTES_PER_S if reload_s is None else reload_s
        tracked.seconds_per_byte = max(MIN_RELOAD_S, seconds) / nbytes
        self._rank(key, tracked)

    def use(self, key: str) -> None:
        tracked = self._tracked.get(key)
        if tracked is None:
            self._remember(key, self._count(self._ghosts.pop(key, None)))
        else:
            tracked.uses, tracked.is_used = self._count(tracked.uses), True
            self._rank(key, tracked)

    def touch(self, key: str) -> None:
        pass

    def evict(self, key: str) -> None:
        self.forget(key)

    def forget(self, key: str) -> None:
        tracked = self._tracked.pop(key, None)
        if tracked is not None:
            self._unrank(tracked)
            if tracked.uses is not None:
                self._remember(key, tracked.uses)

    def order(self, is_queued: IsQueued | None = None) -> Iterator[str]:
        return (key for _, _, key in self._places)

    def _rank(self, key: str, tracked: _Tracked) -> None:
        self._unrank(tracked)
        uses = tracked.uses if tracked.is_used and tracked.uses is not None else self._count(tracked.uses)
        self._num_ranked += 1
        tracked.place = (self._value(uses, tracked.seconds_per_byte), self._num_ranked, key)
        insort(self._places, tracked.place)

    def _unrank(self, tracked: _Tracked) -> None:
        if tracked.place is not None:
            del self._places[bisect_left(self._places, tracked.place)]

    def _remember(self, key: str, uses: float) -> None:
        self._ghosts[key] = uses
        while len(self._ghosts) > max(MIN_GHOSTS, GHOSTS_PER_KEY * len(self._tracked)):
            self._ghosts.popitem(last=False)


class LFU(_Ranking):
    """The least often used goes first."""

    name = "lfu"


class GDSF(_Ranking):
    """value := clock at the last use + uses * reload seconds / bytes; clock := the highest value of a victim so far.

    So what was valued long ago falls behind what is used now.
    """

    name = "gdsf"

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0.0

    def _value(self, uses: float, seconds_per_byte: float) -> float:
        return self._clock + uses * seconds_per_byte

    def evict(self, key: str) -> None:
        tracked = self._tracked.get(key)
        if tracked is not None and tracked.place is not None:
            self._clock = max(self._clock, tracked.place[0])
        self.forget(key)


class CostAware(_Ranking):
    """value := uses, a use counting half after each `half_life_s`, * reload seconds / bytes. What is queued goes last.

    All values decay by one factor, so their order does not change with time: kept is log2(sum of 2^(use_s /
    half_life_s)), which no passing of time can overflow. A queued request's use is certain and near; what the others'
    counts say is less than that.
    """

    name = "cost_aware"

    def __init__(self, clock: Callable[[], float] = time.monotonic, half_life_s: float = HALF_LIFE_S) -> None:
        super().__init__()
        self._clock = clock
        self._half_life_s = half_life_s

    def _count(self, uses: float | None) -> float:
        now = self._clock() / self._half_life_s
        if uses is None:
            return now
        return max(uses, now) + math.log2(1 + 2 ** -abs(uses - now))

    def _value(self, uses: float, seconds_per_byte: float) -> float:
        return uses + math.log2(seconds_per_byte)

    def order(self, is_queued: IsQueued | None = None) -> Iterator[str]:
        queued = []
        for _, _, key in self._places:
            if is_queued is not None and is_queued(key):
                queued.append(key)
            else:
                yield key
        yield from queued


POLICIES: Mapping[str, Callable[[Callable[[], float]], EvictionPolicy]] = {
    "lru": lambda clock: LRU(),
    "lfu": lambda clock: LFU(),
    "fifo": lambda clock: FIFO(),
    "gdsf": lambda clock: GDSF(),
    "cost_aware": CostAware,
    "none": lambda clock: NoEviction(),
}


def get_policy(name: str, clock: Callable[[], float] = time.monotonic) -> EvictionPolicy:
    """A new policy of that name, for one tier; `clock` tells seconds. Raises ConfigError for any other name."""
    if name not in POLICIES:
        raise ConfigError(f"eviction_policy must be one of {tuple(POLICIES)}, got {name!r}")
    return POLICIES[name](clock)
