"""What the registry shows: names and versions of the table beside where the store has their weights."""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from loraplex.adapter_store import AdapterStore
from loraplex.adapters.registry.shared_table import SharedTable
from loraplex.adapters.registry.version import AdapterVersion, LoRARef
from loraplex.core import AdapterResidency, AdapterSpec, Tier

SORTED_AT_ONCE = 4096
"""A call that sorts 200,000 names keeps all other threads waiting for 0.2 s."""

NAMES_AT_FIRST, NAMES_AT_ONCE = 64, 2048
"""The store is asked for so many names at a time, first few and then twice as many each time: one answer for all would
hold up its steps, and a caller may want a short page alone."""


@dataclass(frozen=True, slots=True)
class NameQuery:
    """Which names, in the order of their loads; is_sorted: by name. after: the last name of the page before."""

    prefix: str = ""
    contains: str = ""
    after: str = ""
    is_sorted: bool = False

    def of(self, names: Iterable[str]) -> Iterator[str]:
        found = [name for name in names if name > self.after and name.startswith(self.prefix) and self.contains in name]
        if not self.is_sorted:
            return iter(found)
        starts = range(0, len(found), SORTED_AT_ONCE)
        return heapq.merge(*(sorted(found[start : start + SORTED_AT_ONCE]) for start in starts))


class VersionState(enum.StrEnum):
    """`current` answers for the name; `kept` can be rolled back to; `draining` is dropped after its last request."""

    CURRENT = "current"
    KEPT = "kept"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version that `name@N` addresses."""

    ref: LoRARef
    state: VersionState
    tier: Tier
    nbytes: int
    num_references: int
    loaded_time: float


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One name as `GET /v1/adapters` shows it.

    alias_of: the adapter that answers for this name since a switch; aliases: the names that were switched to this one;
    num_references: requests on this version; num_draining: other versions that requests still run on; times:
    `time.time()`. num_loads, num_requests: of all versions; versions: the newest first.
    """

    ref: LoRARef
    origin: str
    alias_of: str | None
    aliases: tuple[str, ...]
    tier: Tier
    nbytes: int
    lora_slot: int | None
    is_pinned: bool
    is_loading: bool
    num_references: int
    num_draining: int
    loaded_time: float
    last_used_time: float
    error: str | None = None
    num_loads: int = 0
    num_requests: int = 0
    versions: tuple[VersionInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedName:
    """path: the directory of its files. is_held: a pin or a switch holds the name. is_idle: nor does a request or a
    verb, so an unload would take nothing from anything."""

    name: str
    path: str
    last_used_time: float
    is_idle: bool
    is_held: bool


class Views:
    """Asks the store outside the lock of the table."""

    def __init__(self, store: AdapterStore, names: SharedTable) -> None:
        self._store = store
        self._lock = names.lock
        self._table = names.table

    def describe(self, name: str) -> AdapterInfo:
        """Of a name, or of the version that `name@N` addresses; raises AdapterNotFoundError when nothing is loaded."""
        with self._lock:
            own_name = self._described(name).ref.adapter_name
        residency = self._residency([own_name])
        with self._lock:
            return self._info(self._described(name), residency)

    def infos(self, query: NameQuery) -> Iterator[AdapterInfo]:
        """One by one, so that a caller may stop."""
        with self._lock:
            names = list(self._table.current)
        found = query.of(names)
        num_names = min(NAMES_AT_FIRST, NAMES_AT_ONCE)
        while some := list(itertools.islice(found, num_names)):
            num_names = min(2 * num_names, NAMES_AT_ONCE)
            residency = self._residency(some)
            for name in some:
                with self._lock:  # for one name at a time: requests take it too
                    version = self._table.current.get(name)
                    info = None if version is None else self._info(version, residency)
                if info is not None:
                    yield info

    def loaded_from(self, origin: str) -> list[LoadedName]:
        """As LoRARegistry.loaded_from. Requests take the lock: under it all is copied and nothing counted."""
        with self._lock:
            current, versions = list(self._table.current.items()), self._table.versions()
            aliases, busy = self._table.aliases.copy(), {*self._table.verbs}
        busy.update(each.ref.adapter_name for each in versions if each.num_references)
        held = {name for name, each in current if each.is_pinned}.union(*aliases.items())
        found = [
            LoadedName(
                name,
                each.spec.path,
                each.last_used_time,
                is_idle=name not in held and name not in busy,
                is_held=name in held,
            )
            for name, each in current
            if each.origin.startswith(origin)
        ]
        return sorted(found, key=lambda each: each.last_used_time)

    def num_from(self, origin: str) -> int:
        """How many names have one, of those that resolve."""
        with self._lock:
            current, aliases = self._table.current.copy(), self._table.aliases.copy()
        return sum(
            each.origin.startswith(origin) and aliases.get(name, name) in current for name, each in current.items()
        )

    def nbytes_with(self, name: str, nbytes: int, prefix: str, size_of: Callable[[AdapterSpec], int]) -> int:
        """As LoRARegistry.nbytes_with."""
        with self._lock:
            versions = self._table.versions()
            kept = [*self._table.kept.get(name, ()), *filter(None, [self._table.current.get(name)])]
        num_over = max(0, len(kept) + 1 - self._table.max_versions_kept)
        leaving = [each for each in kept[:num_over] if not each.num_references]
        of_prefix = (each for each in versions if each.ref.adapter_name.startswith(prefix) and each not in leaving)
        return nbytes + sum(size_of(each.spec) for each in of_prefix)

    def is_idle(self, name: str, origin: str, used_before: float) -> bool:
        """Of one name what `loaded_from` says. The caller has the lock."""
        table, version = self._table, self._table.current.get(name)
        if version is None or version.is_pinned or name in table.verbs:
            return False
        is_switched = name in table.aliases or table.aliases.is_target(name)
        is_busy = any(each.num_references for each in table.versions_of(name))
        is_meant = version.origin.startswith(origin) and version.last_used_time < used_before
        return is_meant and not (is_switched or is_busy)

    def _described(self, name: str) -> AdapterVersion:
        """Never what a switch sends the requests for a name to."""
        return self._table.own(name) if name in self._table.current else self._table.answering(name)

    def _residency(self, names: Iterable[str]) -> dict[int, AdapterResidency]:
        """Of every version of these names."""
        with self._lock:
            adapter_ids = [version.adapter_id for name in names for version in self._table.versions_of(name)]
        return {each.adapter_id: each for each in self._store.list_adapters(adapter_ids)}

    def _info(self, version: AdapterVersion, residency: Mapping[int, AdapterResidency]) -> AdapterInfo:
        table, name = self._table, version.ref.adapter_name
        current, usage = table.own(name), table.usage(name)
        where = _where(version, residency)
        kept, draining = table.kept.get(name, ()), table.draining.get(name, ())
        running = [*draining, *(each for each in kept if each.num_references)]
        states = {each.adapter_id: VersionState.KEPT for each in kept} | {current.adapter_id: VersionState.CURRENT}
        versions = sorted(table.versions_of(name), key=lambda each: -each.number)
        return AdapterInfo(
            ref=version.ref,
            origin=version.origin,
            alias_of=table.aliases.get(name) if version is current else None,
            aliases=table.aliases.of(name) if version is current else (),
            tier=where.tier,
            nbytes=where.nbytes,
            lora_slot=where.lora_slot,
            is_pinned=version.is_pinned,
            is_loading=where.is_loading,
            num_references=version.num_references,
            num_draining=sum(each is not version for each in running),
            loaded_time=version.loaded_time,
            last_used_time=version.last_used_time,
            error=where.error,
            num_loads=usage.num_loads,
            num_requests=usage.num_requests,
            versions=tuple(
                _version_info(each, states.get(each.adapter_id, VersionState.DRAINING), _where(each, residency))
                for each in versions
            ),
        )


def _where(version: AdapterVersion, residency: Mapping[int, AdapterResidency]) -> AdapterResidency:
    """A version that the store does not have, or no longer, is at its source."""
    found = residency.get(version.adapter_id)
    return found or AdapterResidency(version.adapter_id, Tier.SOURCE, None, version.spec.nbytes, 0, False, False, 0.0)


def _version_info(version: AdapterVersion, state: VersionState, where: AdapterResidency) -> VersionInfo:
    return VersionInfo(version.ref, state, where.tier, where.nbytes, version.num_references, version.loaded_time)
