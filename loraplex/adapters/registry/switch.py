"""Switching: requests for one adapter go to another, or to another version, once that is on the device.

promote `new` -> redirect, or move (one critical section) -> `old` leaves when its last reference goes
"""

from __future__ import annotations

import time
from collections.abc import Callable

from loraplex.adapter_store import AdapterStore
from loraplex.adapters.registry.drain import Drain, Steps
from loraplex.adapters.registry.shared_table import SharedTable
from loraplex.adapters.registry.verbs import CheckAnswer, LoadResult, LoadStatus, SwitchResult
from loraplex.adapters.registry.version import AdapterVersion, PendingDrain
from loraplex.errors import AdapterNoRoomError, DatabaseUnavailableError


class AdapterSwitch:
    """The store is called under no lock."""

    def __init__(self, store: AdapterStore, names: SharedTable, drain: Drain) -> None:
        self._store = store
        self._names = names
        self._lock = names.lock
        self._table = names.table
        self._drain = drain

    def switch(self, old: str, new: str, deadline_s: float | None, force: bool) -> Steps[SwitchResult]:
        """`new` is loaded; `old` need not be. When `new` cannot be promoted, `old` answers on."""
        began_s = time.monotonic()
        with self._names.verb_on(new) as version:
            was_on_device = self._is_on_device(old)
            with self._lock:
                leaving = self._table.current.get(old)
                if leaving is not None:
                    self._table.aliases.check_room(old, new)
            evicted, has_made_room = self._promote(version, leaving)
            with self._names.change() as table:
                drains = table.redirect(old, version)
        switched_s = time.monotonic()
        is_in_use = any(each.version.num_references for each in drains)
        num_aborted = yield from self._drain.finish(drains, deadline_s, force)
        is_drained = all(each.done.done() for each in drains)
        is_evicted = has_made_room or (is_drained and any(each.done.result() for each in drains))
        return SwitchResult(
            old=old,
            ref=version.ref,
            is_old_loaded=bool(drains),
            is_old_active=was_on_device or is_in_use or is_evicted,
            load_s=0.0,
            promote_s=switched_s - began_s,
            evict_s=time.monotonic() - switched_s if is_drained else None,
            evicted=(*evicted, *((old,) if is_evicted and old not in evicted else ())),
            num_references=sum(each.version.num_references for each in drains),
            num_aborted=num_aborted,
        )

    def move(
        self, name: str, number: int | None, may_answer: Callable[[str], bool], check_answer: CheckAnswer
    ) -> LoadResult:
        """Let a kept version of `name` answer again, or (None) what answered before what does now.

        It is promoted first; a version of its own inherits the pin. When there is no room for it on the device now, it
        answers all the same, and its requests wait for room. When it can no longer be read, this raises and nothing has
        changed.
        """
        result = None
        while result is None:
            with self._lock:
                version = self._table.earlier(name, number, may_answer)
            result = self._move_to(name, number, version, may_answer, check_answer)
        return result

    def _move_to(
        self,
        name: str,
        number: int | None,
        version: AdapterVersion,
        may_answer: Callable[[str], bool],
        check_answer: CheckAnswer,
    ) -> LoadResult | None:
        """None when a verb came between, after which the move goes elsewhere."""
        began_s = time.monotonic()
        with self._names.verb_on(version.ref.adapter_name):
            with self._lock:
                current, was_alias = self._table.own(name), name in self._table.aliases
            if version is current and not was_alias:
                return LoadResult(LoadStatus.ALREADY_LOADED, version.ref)
            check_answer(version.ref.adapter_name)
            evicted = self._bring(version, current)
            drains: tuple[PendingDrain, ...] | None = None
            try:
                with self._names.change() as table:
                    if table.earlier(name, number, may_answer) is version:
                        drains = table.move(name, version)
            except DatabaseUnavailableError:
                if drains is None and version is not current and version.ref.adapter_name == name:
                    self._drain.give_pin_back(current, version)
                raise
            finally:
                self._drain.complete(drains or ())
            if drains is None:
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
        """Undo a pin that was passed on to `version`: the verb that came between has lifted that of the one before."""
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
        """What the promotion evicted, and whether `leaving` was evicted for it: if it is idle and there is no room."""
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
