"""Which names that came by need leave, to make room for others: for a name, for a tenant's bytes, or for files on disk.

The tenant that has most of them loses the one that it has used least recently, of those without requests, pin, switch
or verb. A name that was used just now stays: a request may be about to take it. For a tenant within its share of the
places, one of a tenant beyond it leaves all the same: else requests for all its names all the time would keep them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice

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

NumOver = Callable[[Sequence[LoadedName]], int]
"""How many too many there will be, by what is loaded and stays."""


class NameRoom:
    """max_names: that may have come by need. table: of the tenants now. `for_new` belongs to one event loop, the rest
    runs in any thread."""

    def __init__(self, engine: EngineSurface, table: Callable[[], TenantTable], max_names: int) -> None:
        self._engine = engine
        self._table = table
        self._max_names = max_names
        self._choosing = threading.Lock()  # nothing waits under it
        self._leaving: set[str] = set()  # names that a load has chosen and unloads now; others choose different ones
        self._coming: Counter[str] = Counter()
        self._placed: set[str] = set()  # those that others have left for, within `max_loaded_loras`
        self._needed: set[str] = set()  # names that requests load, one load each (AdapterResolver)
        self._made: set[str] = set()  # those that others have left for, within `max_names`

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
        self._coming[name] += 1
        if is_needed:
            self._needed.add(name)
        try:
            if is_needed or registry.max_loaded_loras is not None:
                await self._engine.on_registry(self._prepare, name, is_needed)
            yield
        finally:
            self._coming[name] -= 1
            if not self._coming[name]:
                del self._coming[name]
                self._placed.discard(name)
            if is_needed:
                self._needed.discard(name)
                self._made.discard(name)

    def _prepare(self, registry: LoRARegistry, name: str, is_needed: bool) -> None:
        """Make the places that a load takes before its files are read, those of `max_loaded_loras`."""
        most = registry.max_loaded_loras

        def num_over(loaded: Sequence[LoadedName]) -> int:
            there = {*registry.registered()} - self._leaving
            return 0 if most is None else len(there | self._placed.copy() | {name}) - most

        def num_leaving(loaded: Sequence[LoadedName]) -> int:
            return max(num_over(loaded), self._num_over(loaded, self._needed))

        if is_needed:
            with self._choosing:
                self._choose(registry, name, num_leaving, MAX_LEAVING, is_needed)
        if most is not None:
            self._have_leave(registry, name, num_over, is_needed, self._placed, self._coming)

    def make_for_needed(self, registry: LoRARegistry, name: str) -> None:
        """Names leave for one that a request loads, within `for_new`. Raises AdapterNoRoomError."""

        def num_over(loaded: Sequence[LoadedName]) -> int:
            return self._num_over(loaded, self._made | {name})

        self._have_leave(registry, name, num_over, True, self._made, self._needed)

    def _have_leave(
        self,
        registry: LoRARegistry,
        name: str,
        num_over: NumOver,
        is_needed: bool,
        have_place: set[str],
        coming: Collection[str],
    ) -> None:
        """Names leave for `name` until as few are there as may be. Each load waits for those alone that it chose.
        have_place: has it while `coming` does."""
        tried: set[str] = set()
        num_most = MAX_LEAVING
        while num_most:
            with self._choosing:
                chosen = self._choose(registry, name, num_over, num_most, is_needed, tried)
                self._leaving.update(chosen)
                have_place.add(name)
                if name not in coming:  # its load was given up; where that comes only now, `for_new` takes it away
                    have_place.discard(name)
            if not chosen:
                return
            tried.update(chosen)
            num_most -= self._unload(registry, chosen)

    def _choose(
        self,
        registry: LoRARegistry,
        name: str,
        num_over: NumOver,
        num_most: int,
        is_needed: bool,
        tried: Collection[str] = (),
    ) -> dict[str, float]:
        """Names that are to leave for `name`, and when each may have been used at the latest. The caller has the lock.
        Raises AdapterNoRoomError for a request where too few may."""
        loaded = self._staying(registry)
        num, latest_of = min(num_over(loaded), num_most), self._latest_of(loaded, name)
        idle = (each for each in self._in_turn(loaded, latest_of) if each not in tried)
        chosen = {each: latest_of(each) for each in islice(idle, max(0, num))}
        if is_needed and len(chosen) < num:
            raise _all_in_use(loaded)
        return chosen

    def _staying(self, registry: LoRARegistry) -> list[LoadedName]:
        """What came by need, but for names that leave now. The caller has the lock."""
        return [each for each in registry.loaded_from(ORIGIN) if each.name not in self._leaving]

    def _unload(self, registry: LoRARegistry, chosen: Mapping[str, float]) -> int:
        """Names that are among those that leave. How many are gone: a request or a verb may have taken one since."""
        left, num_gone = deque(chosen), 0
        try:
            while left:
                num_gone += _unload(registry, left[0], chosen[left[0]])
                self._leaving.discard(left.popleft())
        finally:
            self._leaving.difference_update(left)
        return num_gone

    def _latest_of(self, loaded: Sequence[LoadedName], name: str) -> Callable[[str], float]:
        """By name: when it may have been used at the latest, to leave for `name`."""
        owner_of, now_s = self._table().owner_of, time.time()
        counts = Counter(owner_of(each.name) for each in loaded)
        share = self._max_names / len(counts.keys() | {owner_of(name)})
        beyond = {owner for owner, count in counts.items() if count > share}
        if counts[owner_of(name)] + 1 > share:
            beyond.clear()
        return lambda other: now_s + (JUST_USED_S if owner_of(other) in beyond else -JUST_USED_S)

    def check_held(self, registry: LoRARegistry, tenant: str, *names: str) -> None:
        """Before a verb of a tenant that pins or switches these. Raises AdapterNoRoomError where more of its names that
        came by need than its share would be held, or of their files kept: they never leave."""
        self.check_files(registry, tenant, *names)
        loaded = [each for each in registry.loaded_from(ORIGIN) if each.name.startswith(f"{tenant}/")]
        before = {each.name for each in loaded if each.is_held}
        after = before | {each.name for each in loaded if each.name in names}
        share = max(1, self._max_names // self._num_tenants())
        if len(after) > max(share, len(before)):
            text = f"{len(after)} adapters of this tenant that came from sources would be pinned or switched, and its"
            raise AdapterNoRoomError(f"{text} share of {self._max_names} is {share}; unpin or unload others first")

    def check_files(self, registry: LoRARegistry, tenant: str, *names: str) -> None:
        """Before a verb of a tenant after which the files of these stay: a pin, a switch, a clone, a new version.
        Raises AdapterNoRoomError where more bytes than its share were fetched for what stays, but for a first one."""
        leaving = {each.name for each in registry.loaded_from(ORIGIN) if not each.is_held}
        if leaving.isdisjoint(names):
            return
        files = self._engine.by_need.files
        own = [spec for spec in registry.specs() if spec.adapter_name.startswith(f"{tenant}/")]
        before, after = (
            files.bytes_of(spec.path for spec in own if spec.adapter_name not in each)
            for each in (leaving, leaving.difference(names))
        )
        share = files.max_bytes // self._num_tenants()
        if before and after > max(share, before):
            text = f"{after} bytes that were fetched from sources would stay for this tenant, and its share of"
            raise AdapterNoRoomError(f"{text} {files.max_bytes} is {share}; unpin or unload others first")

    def _num_tenants(self) -> int:
        return max(2, len(self._table().tenants))

    def _num_over(self, loaded: Sequence[LoadedName], coming: set[str]) -> int:
        """coming: names that will be there, or are already; taken in one step, for the event loop changes them."""
        return len(coming.copy().union(each.name for each in loaded)) - self._max_names

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

    def evict(
        self, registry: LoRARegistry, is_here: Callable[[str], bool], can_fit: Callable[[Iterable[str]], bool]
    ) -> bool:
        """An `Evict` (adapters/remote/fetched.py)."""
        latest = time.time() - JUST_USED_S
        idle = {each.name for each in registry.loaded_from(ORIGIN) if each.is_idle and each.last_used_time < latest}
        leaving = idle | self._leaving.copy()
        if not can_fit(spec.path for spec in registry.specs() if spec.adapter_name not in leaving):
            return False

        def in_turn(loaded: list[LoadedName]) -> Iterator[str]:
            return self._in_turn([each for each in loaded if is_here(each.path)], lambda name: latest)

        return self._unload_one(registry, latest, in_turn)

    def _unload_one(
        self, registry: LoRARegistry, latest: float, in_turn: Callable[[list[LoadedName]], Iterator[str]]
    ) -> bool:
        """The first of those that may go. Whether there was one."""
        tried: set[str] = set()
        while True:
            with self._choosing:
                name = next((each for each in in_turn(self._staying(registry)) if each not in tried), None)
                if name is None:
                    return False
                self._leaving.add(name)
            tried.add(name)
            if self._unload(registry, {name: latest}):
                return True

    def check_own(self, registry: LoRARegistry, prefix: str, num: int, error: TenantLimitError) -> None:
        """Raises the error of a tenant at its limit where fewer than `num` of its names may leave now."""
        latest = time.time() - JUST_USED_S
        idle = _idle_of(registry.loaded_from(ORIGIN), prefix)
        if sum(each.last_used_time < latest for each in idle) < num:
            if len(idle) >= num:
                error.retry_after_s = JUST_USED_S
            raise error

    def evict_own(self, registry: LoRARegistry, prefix: str, error: TenantLimitError) -> None:
        """Unload one of a tenant at its limit. Raises the error where none of its names may leave now."""
        latest = time.time() - JUST_USED_S
        if self._unload_one(registry, latest, lambda loaded: (each.name for each in _idle_of(loaded, prefix))):
            return
        if _idle_of(registry.loaded_from(ORIGIN), prefix):
            error.retry_after_s = JUST_USED_S
        raise error


def bytes_of_idle(registry: LoRARegistry, prefix: str) -> int:
    """Of the files of all versions of a tenant's names that may leave, but for when they were used."""
    idle = {each.name for each in _idle_of(registry.loaded_from(ORIGIN), prefix)}
    return sum(spec.nbytes for spec in registry.specs() if spec.adapter_name in idle)


def _idle_of(loaded: Sequence[LoadedName], prefix: str) -> list[LoadedName]:
    """The least recently used first."""
    return [each for each in loaded if each.is_idle and each.name.startswith(prefix)]


def _all_in_use(loaded: Sequence[LoadedName]) -> AdapterNoRoomError:
    text = f"{len(loaded)} adapters that came from sources are loaded, and all are in use; try again later"
    return AdapterNoRoomError(text)


def _unload(registry: LoRARegistry, name: str, latest: float) -> bool:
    """Unless a request or a verb took it since the list was made. Whether it is gone."""
    if not registry.unload_idle(name, ORIGIN, latest):
        return not registry.is_registered(name)
    _log.info("adapter %.200r, which came from a source, was unloaded for another one", name)
    return True
