"""Farewells: an old version is dropped, or a switched one evicted, once, when its last reference goes.

Whoever comes first carries a farewell out: the verb that unnamed the version when nobody uses it, else a job that the last
`release` hands to `run_later`. The store is called under no lock.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from concurrent.futures import wait

from loraplex.adapters.name_table import NameTable
from loraplex.adapters.version import AdapterVersion, Farewell, Parting
from loraplex.core import AdapterStore
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
        with self._lock:
            is_mine = self._table.take(parting)
        if not is_mine:
            return
        version = parting.version
        try:
            has_changed = self._drop(version) if parting.farewell is Farewell.DROP else self.evict(version)
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
        """One tier down; a pin would forbid it and is lifted."""
        if version.is_pinned:
            self._store.unpin_adapter(version.adapter_id)
            version.is_pinned = False
        return self._store.evict_adapter(version.adapter_id)

    def _drop(self, version: AdapterVersion) -> bool:
        try:
            self._store.drop_adapter(version.adapter_id)
        except AdapterNotFoundError:
            return False  # the engine started again meanwhile: nothing is left to drop
        return True
