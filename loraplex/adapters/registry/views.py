"""What the registry shows: names and versions of the table beside where the store has their weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from loraplex.adapters.registry.name_table import NameTable
from loraplex.adapters.registry.outcome import AdapterInfo, VersionInfo, VersionState
from loraplex.adapters.registry.version import AdapterVersion
from loraplex.core import AdapterResidency, AdapterStore, Tier

NAMES_AT_ONCE = 2048
"""The store is asked for so many names at a time: one answer for all would hold up its steps."""


@dataclass(frozen=True, slots=True)
class NameQuery:
    """Which names, in the order of their loads; `is_sorted`: by name. `after` (a name, there or not) and `limit` are for pages."""

    prefix: str = ""
    contains: str = ""
    after: str = ""
    is_sorted: bool = False

    def of(self, names: Iterable[str]) -> list[str]:
        found = [name for name in names if name > self.after and name.startswith(self.prefix) and self.contains in name]
        return sorted(found) if self.is_sorted else found


class Views:
    """`lock` guards `table`; the store is asked outside it."""

    def __init__(self, store: AdapterStore, lock: threading.Lock, table: NameTable) -> None:
        self._store = store
        self._lock = lock
        self._table = table

    def describe(self, name: str) -> AdapterInfo:
        """Of a name, or of the version that `name@N` addresses. Raises AdapterNotFoundError when nothing is loaded under it."""
        with self._lock:
            own_name = self._described(name).ref.adapter_name
        residency = self._residency([own_name])
        with self._lock:
            return self._info(self._described(name), residency, self._table.aliases_of())

    def infos(self, query: NameQuery) -> Iterator[AdapterInfo]:
        """One by one, so that a caller may stop."""
        with self._lock:
            aliases, names = self._table.aliases_of(), list(self._table.current)
        found = query.of(names)
        for start in range(0, len(found), NAMES_AT_ONCE):
            some = found[start : start + NAMES_AT_ONCE]
            residency = self._residency(some)
            for name in some:
                with self._lock:  # for one name at a time: requests take it too
                    info = (
                        self._info(self._table.own(name), residency, aliases) if name in self._table.current else None
                    )
                if info is not None:
                    yield info

    def _described(self, name: str) -> AdapterVersion:
        """Never what a switch sends the requests for a name to."""
        return self._table.own(name) if name in self._table.current else self._table.answering(name)

    def _residency(self, names: Iterable[str]) -> dict[int, AdapterResidency]:
        """Of every version of these names."""
        with self._lock:
            adapter_ids = [version.adapter_id for name in names for version in self._table.versions_of(name)]
        return {each.adapter_id: each for each in self._store.list_adapters(adapter_ids)}

    def _info(
        self,
        version: AdapterVersion,
        residency: Mapping[int, AdapterResidency],
        aliases: Mapping[str, tuple[str, ...]],
    ) -> AdapterInfo:
        """A version that the store has not, or no longer, is at its source."""
        table, name = self._table, version.ref.adapter_name
        current, usage = table.own(name), table.usage(name)
        where = residency.get(version.adapter_id)
        kept, draining = table.kept.get(name, ()), table.draining.get(name, ())
        states = {each.adapter_id: VersionState.KEPT for each in kept} | {current.adapter_id: VersionState.CURRENT}
        return AdapterInfo(
            ref=version.ref,
            origin=version.origin,
            alias_of=table.aliases.get(name) if version is current else None,
            aliases=aliases.get(name, ()) if version is current else (),
            tier=Tier.SOURCE if where is None else where.tier,
            nbytes=version.spec.nbytes if where is None else where.nbytes,
            lora_slot=None if where is None else where.lora_slot,
            is_pinned=version.is_pinned,
            is_loading=where is not None and where.is_loading,
            num_references=version.num_references,
            num_draining=sum(each is not version for each in draining)
            + sum(each.num_references > 0 and each is not version for each in kept),
            loaded_time=version.loaded_time,
            last_used_time=version.last_used_time,
            error=None if where is None else where.error,
            num_loads=usage.num_loads,
            num_requests=usage.num_requests,
            versions=tuple(
                _version_info(each, states.get(each.adapter_id, VersionState.DRAINING), residency.get)
                for each in sorted(table.versions_of(name), key=lambda each: -each.number)
            ),
        )


def _version_info(
    version: AdapterVersion, state: VersionState, residency_of: Callable[[int], AdapterResidency | None]
) -> VersionInfo:
    where = residency_of(version.adapter_id)
    tier = Tier.SOURCE if where is None else where.tier
    nbytes = version.spec.nbytes if where is None else where.nbytes
    return VersionInfo(version.ref, state, tier, nbytes, version.num_references, version.loaded_time)
