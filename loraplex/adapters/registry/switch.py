"""Switching: requests for one adapter go to another, or to another version of it, from the moment that it is on the device.

promote `new` -> redirect, or move (one critical section) -> `old` leaves when its last reference goes
"""

from __future__ import annotations

import time

from loraplex.adapters.registry.drain import Drain
from loraplex.adapters.registry.effects import Effects
from loraplex.adapters.registry.outcome import LoadResult, LoadStatus, SwitchResult
from loraplex.adapters.registry.turns import Turns
from loraplex.adapters.registry.version import AdapterVersion, Parting
from loraplex.core import AdapterStore
from loraplex.errors import AdapterNoRoomError


class AdapterSwitch:
    """The store is called under no lock."""

    def __init__(self, store: AdapterStore, effects: Effects, drain: Drain, turns: Turns) -> None:
        self._store = store
        self._effects = effects
        self._lock = effects.lock
        self._table = effects.table
        self._drain = drain
        self._turns = turns

    def switch(self, old: str, new: str, deadline_s: float | None, force: bool) -> SwitchResult:
        """`new` is loaded; `old` need not be. When `new` cannot be promoted, `old` answers on."""
        began_s = time.monotonic()
        with self._turns.verb_on(new) as version:
            was_on_device = self._is_on_device(old)
            with self._lock:
                leaving = self._table.current.get(old)
            evicted, has_made_room = self._promote(version, leaving)
            with self._effects.change() as table:
                parting = table.redirect(old, version)
        switched_s = time.monotonic()
        partings = () if parting is None else (parting,)
        is_in_use = any(each.version.num_references for each in partings)
        num_aborted = self._drain.finish(partings, deadline_s, force)
        is_gone = all(each.done.done() for each in partings)
        is_evicted = has_made_room or (is_gone and any(each.done.result() for each in partings))
        return SwitchResult(
            old=old,
            ref=version.ref,
            is_old_active=was_on_device or is_in_use or is_evicted,
            load_s=0.0,
            promote_s=switched_s - began_s,
            evict_s=time.monotonic() - switched_s if is_gone else None,
            evicted=(*evicted, *((old,) if is_evicted and old not in evicted else ())),
            num_references=sum(each.version.num_references for each in partings),
            num_aborted=num_aborted,
        )

    def move(self, name: str, number: int | None) -> LoadResult:
        """Let a kept version of `name` answer again, or (None) what answered before what does now: a version, or another adapter.

        It is promoted first; a version of its own inherits the pin. When there is no room for it on the device now, it answers all the
        same, and its requests wait for room. When it cannot be read any more, this raises and nothing has changed.
        """
        result = None
        while result is None:
            with self._lock:
                version = self._table.earlier(name, number)
            result = self._move_to(name, number, version)
        return result

    def _move_to(self, name: str, number: int | None, version: AdapterVersion) -> LoadResult | None:
        """None when a verb came between, after which the move goes elsewhere."""
        began_s = time.monotonic()
        with self._turns.verb_on(version.ref.adapter_name):
            with self._lock:
                current, was_alias = self._table.own(name), name in self._table.aliases
            if version is current and not was_alias:
                return LoadResult(LoadStatus.ALREADY_LOADED, version.ref)
            evicted = self._bring(version, current)
            partings: tuple[Parting, ...] | None = None
            try:
                with self._effects.change() as table:
                    if table.earlier(name, number) is version:
                        partings = table.move(name, version)
            finally:
                for parting in partings or ():
                    self._drain.part(parting)
            if partings is None:
                self._leave_again(version)
                return None
        previous = None if was_alias or version is current else current.number
        return LoadResult(LoadStatus.MOVED, version.ref, evicted, time.monotonic() - began_s, previous)

    def _bring(self, version: AdapterVersion, current: AdapterVersion) -> tuple[str, ...]:
        is_heir = version is not current and version.ref.adapter_name == current.ref.adapter_name
        if is_heir and current.is_pinned:
            self._drain.pass_pin_on(current, version)
            return ()
        try:
            return self._promote(version, current)[0]
        except AdapterNoRoomError:
            return ()

    def _leave_again(self, version: AdapterVersion) -> None:
        """A pin that was passed on to `version` is nobody's: whoever came between has lifted that of the one before."""
        with self._lock:
            is_pinned = version.is_pinned
        if not is_pinned:
            self._drain.try_quietly(self._store.unpin_adapter, version.adapter_id)

    def _is_on_device(self, name: str) -> bool:
        """Whether the version under a name of its own is there; the weights may be shared, and stay when it leaves."""
        with self._lock:
            version = self._table.current.get(name)
        return version is not None and self._drain.is_on_device(version)

    def _promote(self, version: AdapterVersion, leaving: AdapterVersion | None) -> tuple[tuple[str, ...], bool]:
        """Whom the promotion evicted, and whether `leaving` made room: it does when nobody uses it and there is none beside it."""
        try:
            return self._store.promote_adapter(version.adapter_id).evicted, False
        except AdapterNoRoomError:
            with self._lock:
                is_idle = leaving is not None and leaving.num_references == 0
            if leaving is None or not is_idle:
                raise
            was_pinned = leaving.is_pinned
            if not self._drain.leave_device(leaving):
                raise
        try:
            return self._store.promote_adapter(version.adapter_id).evicted, True
        except BaseException:
            if was_pinned and self._drain.try_quietly(self._store.pin_adapter, leaving.adapter_id):
                self._drain.note_pin(leaving, True)
            raise
