"""Farewells: an old version is dropped, or a switched one leaves the device, once, when its last reference goes.

Whoever comes first carries a farewell out: the verb that unnamed the version when nobody uses it, else a job that the last
`release` hands to `run_later`. The store is called under no lock.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait

from loraplex.adapters.registry.name_table import NameTable
from loraplex.adapters.registry.version import AdapterVersion, Farewell, Parting
from loraplex.core import AdapterStore, Tier
from loraplex.errors import AdapterNotFoundError, InvalidRequestError

_log = logging.getLogger(__name__)


def check_deadline(deadline_s: float | None) -> None:
    if deadline_s is not None and not 0 <= deadline_s < math.inf:
        raise InvalidRequestError(f"deadline_s must be a number of seconds >= 0, got {deadline_s!r}")


class Drain:
    """`lock` guards `table`. abort_grace_s: how long a forced verb waits for the requests that it aborted to let go."""

    def __init__(self, store: AdapterStore, lock: threading.Lock, table: NameTable, abort_grace_s: float) -> None:
        self._store = store
        self._lock = lock
        self._table = table
        self._abort_grace_s = abort_grace_s

    def part(self, parting: Parting) -> None:
        """Carry out a farewell if it is due and nobody did. Never raises: the error is in `parting.done`."""
        version = parting.version
        with self._lock:
            is_mine = self._table.take(parting)
            is_shared = self._table.is_content_answering(version)
        if not is_mine:
            return
        try:
            if parting.farewell is Farewell.DROP:
                has_changed = self._drop(version)
            elif is_shared:  # what the old one leaves, the new one needs
                self._lift_pin(version)
                has_changed = False
            else:
                has_changed = self.leave_device(version)
        except Exception as error:
            _log.warning("adapter %r: %s failed: %s", version.ref.adapter_name, parting.farewell.value, error)
            parting.done.set_exception(error)
        else:
            parting.done.set_result(has_changed)

    def finish(self, partings: Sequence[Parting], deadline_s: float | None, force: bool) -> int:
        """Part with what is idle, wait for the rest, abort it if forced; returns how many requests were aborted.

        Raises what the store raised for the farewells that are done.
        """
        for parting in partings:
            self.part(parting)
        dones = [parting.done for parting in partings]
        in_use = wait(dones, 0 if deadline_s is None else deadline_s).not_done
        num_aborted = 0
        if force and in_use:
            ids = [parting.version.adapter_id for parting in partings if parting.done in in_use]
            num_aborted = sum(self._store.abort_adapter(adapter_id) for adapter_id in ids)
            wait(dones, self._abort_grace_s)
        for done in dones:
            if done.done():
                done.result()
        return num_aborted

    def evict(self, version: AdapterVersion) -> bool:
        """One tier down, whichever it is in; a pin would forbid it and is lifted."""
        was_pinned = self._lift_pin(version)
        return self._store.evict_adapter(version.adapter_id) or was_pinned

    def leave_device(self, version: AdapterVersion) -> bool:
        """Off the device, but no farther down: its weights stay on the host. False when it was not on the device."""
        self._lift_pin(version)
        return self.is_on_device(version) and self._store.evict_adapter(version.adapter_id)

    def is_on_device(self, version: AdapterVersion) -> bool:
        tiers = {where.adapter_id: where.tier for where in self._store.list_adapters()}
        return tiers.get(version.adapter_id) is Tier.DEVICE

    def _lift_pin(self, version: AdapterVersion) -> bool:
        if not version.is_pinned:
            return False
        self._store.unpin_adapter(version.adapter_id)
        version.is_pinned = False
        return True

    @staticmethod
    def try_quietly(call: Callable[[int], object], adapter_id: int) -> bool:
        """To undo after an error, which is the one to report. Whether it worked."""
        try:
            call(adapter_id)
        except Exception:
            _log.warning("adapter_id %d: undoing a failed verb failed too", adapter_id, exc_info=True)
            return False
        return True

    def _drop(self, version: AdapterVersion) -> bool:
        try:
            self._store.drop_adapter(version.adapter_id)
        except AdapterNotFoundError:
            return False  # the engine started again meanwhile: nothing is left to drop
        return True
