"""Which names that came by need leave, to make room for others: for a name, for a tenant's bytes, or for files on disk.

The tenant that has most of them loses the one that it has used least recently, of those without requests, pin, switch
or verb. A name that was used just now stays: a request may be about to take it. For a tenant within its share of the
places, one of a tenant beyond it leaves all the same: else requests for all its names all the time would keep them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

from loraplex.adapters.registry import LoadedName, LoRARegistry
from loraplex.adapters.sources.named import ORIGIN
from loraplex.errors import AdapterNoRoomError, TenantLimitError
from loraplex.server.engine_surface import EngineSurface
from loraplex.tenants.records import TenantTable

JUST_USED_S = 1.0
"""A name that was used within it stays."""

MAX_LEAVING = 64
"""For one load: after a limit was lowered, there may be thousands too many."""

_log = logging.getLogger("loraplex.server")


class NameRoom:
    """max_names: that may have come by need. table: of the tenants now. `for_new` belongs to one event loop, the rest
    runs in any thread."""

    def __init__(self, engine: EngineSurface, table: Callable[[], TenantTable], max_names: int) -> None:
        self._engine = engine
        self._table = table
        self._max_names = max_names
        self._evicting = threading.Lock()
        self._num_coming = 0
        self._needed: set[str] = set()  # names that requests load, one load each (AdapterResolver)
        self._made: set[str] = set()  # those that others have left for

    @asynccontextmanager
    async def for_new(self, name: str, *, is_needed: bool = False) -> AsyncIterator[None]:
        """Around a load that may bring a new name, of a request (is_needed) or by a verb, until it is registered.

        For a request it says whether names could leave, and `make_for_needed`, once the adapter is known to be good,
        has them leave. Raises AdapterNoRoomError for a request; what a verb finds no room for, its load refuses.
        """
        registry = self._engine.registry
        if registry is None or registry.is_registered(name):
            yield
            return
        self._num_coming += 1
        if is_needed:
            self._needed.add(name)
        try:
            if is_needed or registry.max_loaded_loras is not None:
                await self._engine.on_registry(self._prepare, name, is_needed)
            yield
        finally:
            self._num_coming -= 1
            if is_needed:
                self._needed.discard(name)
                self._made.discard(name)

    def _prepare(self, registry: LoRARegistry, name: str, is_needed: bool) -> None:
        """Make the places that a load takes before its files are read, those of `max_loaded_loras`."""
        with self._evicting:
            loaded, most = registry.loaded_from(ORIGIN), registry.max_loaded_loras
            num_more = 0 if most is None else len(registry.registered()) + self._num_coming - most
            latest_of = self._latest_of(loaded, name)
            if is_needed:
                num_leaving = min(max(num_more, self._num_over(loaded, self._needed)), MAX_LEAVING)
                if num_leaving > sum(each.is_idle and each.last_used_time < latest_of(each.name) for each in loaded):
                    raise _all_in_use(loaded)
            num_left = self._evict_some(registry, loaded, min(num_more, MAX_LEAVING), latest_of)
        if num_left > 0 and is_needed:
            raise _all_in_use(loaded)

    def make_for_needed(self, registry: LoRARegistry, name: str) -> None:
        """Names leave for one that a request loads, within `for_new`. Raises AdapterNoRoomError."""
        with self._evicting:
            loaded = registry.loaded_from(ORIGIN)
            if name in self._needed:
                self._made.add(name)
            num = min(self._num_over(loaded, self._made), MAX_LEAVING)
            if self._evict_some(registry, loaded, num, self._latest_of(loaded, name)) > 0:
                raise _all_in_use(loaded)

    def _latest_of(self, loaded: Sequence[LoadedName], name: str) -> Callable[[str], float]:
        """By name: when it may have been used at the latest, to leave for `name`."""
        owner_of, now_s = self._table().owner_of, time.time()
        counts = Counter(owner_of(each.name) for each in loaded)
        share = self._max_names / len(counts.keys() | {owner_of(name)})
        beyond = {owner for owner, count in counts.items() if count > share}
        if counts[owner_of(name)] + 1 > share:
            beyond.clear()
        return lambda other: now_s + (JUST_USED_S if owner_of(other) in beyond else -JUST_USED_S)

    def check_pin(self, registry: LoRARegistry, tenant: str, name: str) -> None:
        """Raises AdapterNoRoomError where a tenant's pins of names that came by need would exceed its share: they never
        leave."""
        num_tenants = max(2, len(self._table().tenants))
        loaded = [each for each in registry.loaded_from(ORIGIN) if each.name.startswith(f"{tenant}/")]
        pinned = {each.name for each in loaded if each.is_pinned} | {name}
        if name in {each.name for each in loaded} and len(pinned) > max(1, self._max_names // num_tenants):
            text = f"{len(pinned) - 1} adapters of this tenant that came from sources are pinned, which is its share"
            raise AdapterNoRoomError(f"{text} of {self._max_names}; unpin another one first")

    def _num_over(self, loaded: Sequence[LoadedName], coming: set[str]) -> int:
        """coming: names that will be there, or are already; taken in one step, for the event loop changes them."""
        return len(coming.copy().union(each.name for each in loaded)) - self._max_names

    def _evict_some(
        self, registry: LoRARegistry, loaded: list[LoadedName], num: int, latest_of: Callable[[str], float]
    ) -> int:
        """How many are left of `num` that were to leave."""
        for name in self._in_turn(loaded, latest_of) if num > 0 else ():
            num -= _unload(registry, name, latest_of(name))
            if num <= 0:
                break
        return num

    def _in_turn(self, loaded: list[LoadedName], latest_of: Callable[[str], float]) -> Iterator[str]:
        """Idle names in the order in which they leave."""
        owner_of = self._table().owner_of
        counts = Counter(owner_of(each.name) for each in loaded)
        idle: dict[str, list[str]] = {}
        for each in reversed(loaded):
            if each.is_idle and each.last_used_time < latest_of(each.name):
                idle.setdefault(owner_of(each.name), []).append(each.name)
        while idle:
            largest = max(idle, key=lambda owner: counts[owner])
            counts[largest] -= 1
            yield idle[largest].pop()
            if not idle[largest]:
                del idle[largest]

    def evict(self, registry: LoRARegistry, is_here: Callable[[str], bool]) -> bool:
        """Unload one name whose files lie in a directory to which `is_here` says yes. Whether there was one."""
        latest = time.time() - JUST_USED_S
        with self._evicting:
            loaded = [each for each in registry.loaded_from(ORIGIN) if is_here(each.path)]
            return any(_unload(registry, name, latest) for name in self._in_turn(loaded, lambda name: latest))

    def check_own(self, registry: LoRARegistry, prefix: str, num: int, error: TenantLimitError) -> None:
        """Raises the error of a tenant at its limit where fewer than `num` of its names may leave now."""
        latest = time.time() - JUST_USED_S
        idle = _idle_of(registry, prefix)
        if sum(each.last_used_time < latest for each in idle) < num:
            if len(idle) >= num:
                error.retry_after_s = JUST_USED_S
            raise error

    def evict_own(self, registry: LoRARegistry, prefix: str, error: TenantLimitError) -> None:
        """Unload one of a tenant at its limit. Raises the error where none of its names may leave now."""
        latest = time.time() - JUST_USED_S
        with self._evicting:
            idle = _idle_of(registry, prefix)
            if any(_unload(registry, each.name, latest) for each in idle):
                return
        if idle:
            error.retry_after_s = JUST_USED_S
        raise error


def bytes_of_idle(registry: LoRARegistry, prefix: str) -> int:
    """Of the files of all versions of a tenant's names that may leave, but for when they were used."""
    idle = {each.name for each in _idle_of(registry, prefix)}
    return sum(spec.nbytes for spec in registry.specs() if spec.adapter_name in idle)


def _idle_of(registry: LoRARegistry, prefix: str) -> list[LoadedName]:
    """The least recently used first."""
    return [each for each in registry.loaded_from(ORIGIN) if each.is_idle and each.name.startswith(prefix)]


def _all_in_use(loaded: Sequence[LoadedName]) -> AdapterNoRoomError:
    text = f"{len(loaded)} adapters that came from sources are loaded, and all are in use; try again later"
    return AdapterNoRoomError(text)


def _unload(registry: LoRARegistry, name: str, latest: float) -> bool:
    """Unless a request or a verb took it since the list was made. Whether it is gone."""
    if not registry.unload_idle(name, ORIGIN, latest):
        return not registry.is_registered(name)
    _log.info("adapter %.200r, which came from a source, was unloaded for another one", name)
    return True
