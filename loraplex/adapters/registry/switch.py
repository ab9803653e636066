"""Switching: requests for one adapter go to another from the moment that it is on the device.

promote `new` -> redirect (one critical section) -> `old` leaves the device when its last reference goes
"""

from __future__ import annotations

import threading
import time

from loraplex.adapters.registry.drain import Drain
from loraplex.adapters.registry.name_table import NameTable
from loraplex.adapters.registry.outcome import SwitchResult
from loraplex.adapters.registry.turns import Turns
from loraplex.adapters.registry.version import AdapterVersion
from loraplex.core import AdapterStore
from loraplex.errors import AdapterNoRoomError


class AdapterSwitch:
    """`lock` guards `table`; the store is called outside it."""

    def __init__(self, store: AdapterStore, lock: threading.Lock, table: NameTable, drain: Drain, turns: Turns) -> None:
        self._store = store
        self._lock = lock
        self._table = table
        self._drain = drain
        self._turns = turns

    def switch(self, old: str, new: str, deadline_s: float | None, force: bool) -> SwitchResult:
        """`new` is loaded; `old` need not be. When `new` cannot be promoted, `old` answers on."""
        began_s = time.monotonic()
        with self._turns.verb_on(new) as version:
            was_on_device = self._is_on_device(old)
            evicted, has_made_room = self._promote(version, old)
            with self._lock:
                parting = self._table.redirect(old, version)
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

    def _is_on_device(self, name: str) -> bool:
        """Whether the version under a name of its own is there; the weights may be shared, and stay when it leaves."""
        with self._lock:
            version = self._table.current.get(name)
        return version is not None and self._drain.is_on_device(version)

    def _promote(self, version: AdapterVersion, old: str) -> tuple[tuple[str, ...], bool]:
        """Whom the promotion evicted, and whether `old` made room first: it does when nobody uses it and there is none beside it."""
        try:
            return self._store.promote_adapter(version.adapter_id).evicted, False
        except AdapterNoRoomError:
            with self._lock:
                leaving = self._table.current.get(old)
                is_idle = leaving is not None and leaving.num_references == 0
            if leaving is None or not is_idle:
                raise
            was_pinned = leaving.is_pinned
            if not self._drain.leave_device(leaving):
                raise
        try:
            return self._store.promote_adapter(version.adapter_id).evicted, True
        except BaseException:
            if was_pinned:
                leaving.is_pinned = self._drain.try_quietly(self._store.pin_adapter, leaving.adapter_id)
            raise
