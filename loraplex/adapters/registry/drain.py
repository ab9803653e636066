"""Farewells: an old version is dropped or leaves memory, or a switched one leaves the device, once, when its last reference goes.

Whoever comes first carries a farewell out: the verb that unnamed the version when nobody uses it, else a job that the last
`release` hands to `run_later`. The store is called under no lock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress

from loraplex.adapters.registry.effects import Effects
from loraplex.adapters.registry.version import AdapterVersion, Farewell, Parting
from loraplex.core import AdapterStore, Tier
from loraplex.errors import AdapterNotFoundError, InvalidRequestError

_log = logging.getLogger(__name__)


def check_deadline(deadline_s: float | None) -> None:
    if deadline_s is not None and not 0 <= deadline_s < math.inf:
        raise InvalidRequestError(
            f"deadline_s must be a number of seconds >= 0, got {deadline_s!r}", param="deadline_s"
        )


class Drain:
    """abort_grace_s: how long a forced verb waits for the requests that it aborted to let go."""

    def __init__(self, store: AdapterStore, effects: Effects, abort_grace_s: float) -> None:
        self._store = store
        self._effects = effects
        self._lock = effects.lock
        self._table = effects.table
        self._abort_grace_s = abort_grace_s

    def part(self, parting: Parting) -> None:
        """Carry out a farewell if it is due and nobody did. Never raises: the error is in `parting.done`."""
        version = parting.version
        with self._lock:
            is_mine = self._table.take(parting)
            is_shared = self._table.is_content_answering(version) or self._is_shelved_shared(parting)
        if not is_mine:
            return
        try:
            has_changed = self._say_farewell(parting, is_shared)
        except Exception as error:
            _log.warning("adapter %r: %s failed: %s", version.ref.adapter_name, parting.farewell.value, error)
            parting.done.set_exception(error)
        else:
            parting.done.set_result(has_changed)

    def _is_shelved_shared(self, parting: Parting) -> bool:
        return parting.farewell is Farewell.SHELVE and self._table.is_content_named(parting.version)

    def _say_farewell(self, parting: Parting, is_shared: bool) -> bool:
        version = parting.version
        if parting.farewell is Farewell.DROP:
            return self._drop(version)
        if is_shared:  # what the old one leaves, the new one needs
            self.lift_pin(version)
            return False
        return self.leave_device(version) if parting.farewell is Farewell.EVICT else self._leave_memory(version)

    def finish(self, partings: Sequence[Parting], deadline_s: float | None, force: bool) -> int:
        """Part with what is idle, wait for the rest, abort it if forced; returns how many requests were aborted.

        Raises what the store raised for the farewells that are done.
        """
        for parting in partings:
            self.part(parting)
            if parting.farewell is Farewell.DROP and not parting.done.done():
                with suppress(AdapterNotFoundError):  # its last request has ended just now
                    self.lift_pin(
                        parting.version
                    )  # or requests for others would be refused for want of its room, until it is drained
        dones = [parting.done for parting in partings]
        in_use = wait(dones, 0 if deadline_s is None else deadline_s).not_done
        num_aborted = 0
        if force and in_use:
            versions = [parting.version for parting in partings if parting.done in in_use]
            with (
                self._lock
            ):  # before the engine is told: what has a reference and is not sent yet must not be sent any more
                for version in versions:
                    version.is_forced_out = True
            num_aborted = sum(self._store.abort_adapter(version.adapter_id) for version in versions)
            wait(dones, self._abort_grace_s)
        for done in dones:
            if done.done():
                done.result()
        return num_aborted

    def evict(self, version: AdapterVersion) -> bool:
        """One tier down, whichever it is in; a pin would forbid it and is lifted."""
        was_pinned = self.lift_pin(version)
        return self._store.evict_adapter(version.adapter_id) or was_pinned

    def leave_device(self, version: AdapterVersion) -> bool:
        """Off the device, but no farther down: its weights stay on the host. False when it was not on the device."""
        self.lift_pin(version)
        return self.is_on_device(version) and self._store.evict_adapter(version.adapter_id)

    def _leave_memory(self, version: AdapterVersion) -> bool:
        """Off the device and out of host memory."""
        has_changed = False
        while self._tier_of(version) in (Tier.DEVICE, Tier.HOST) and self._store.evict_adapter(version.adapter_id):
            has_changed = True
        return has_changed

    def is_on_device(self, version: AdapterVersion) -> bool:
        return self._tier_of(version) is Tier.DEVICE

    def _tier_of(self, version: AdapterVersion) -> Tier | None:
        return next((where.tier for where in self._store.list_adapters([version.adapter_id])), None)

    def lift_pin(self, version: AdapterVersion) -> bool:
        """Whether there was one."""
        if not version.is_pinned:
            return False
        self._store.unpin_adapter(version.adapter_id)
        self.note_pin(version, False)
        return True

    def pass_pin_on(self, version: AdapterVersion, heir: AdapterVersion) -> None:
        """Pin `heir` instead of `version`, so that no budget must hold both. When it cannot be, this raises and `version` has it back."""
        self._store.unpin_adapter(version.adapter_id)
        try:
            self._store.pin_adapter(heir.adapter_id)
        except BaseException:
            if not self.try_quietly(self._store.pin_adapter, version.adapter_id):
                self.note_pin(version, False)
            raise

    def note_pin(self, version: AdapterVersion, is_pinned: bool) -> None:
        """The store has pinned it, or not any more."""
        with self._effects.change() as table:
            version.is_pinned = is_pinned
            table.touch(version.ref.adapter_name)

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
