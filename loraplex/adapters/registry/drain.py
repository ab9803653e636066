"""Drains: with its last reference an old version is dropped or leaves memory, a switched one leaves the device.

What is due then is done once, by the thread that comes first: that of the verb when the version is idle, else a job
that the last `release` hands to `run_later`. The store is called under no lock.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial, wraps
from typing import Generic, ParamSpec, TypeVar

from loraplex.adapter_store import AdapterStore
from loraplex.adapters.registry.shared_table import SharedTable
from loraplex.adapters.registry.version import AdapterVersion, AfterDrain, PendingDrain
from loraplex.core import Tier
from loraplex.errors import AdapterNotFoundError, DatabaseUnavailableError, InvalidRequestError, JournalError

ABORT_GRACE_S = 5.0

P = ParamSpec("P")
T = TypeVar("T")
Steps = Generator[tuple[Sequence[Future[bool]], float], None, T]
"""A verb that gives, each time that it waits for requests, the drains and how many seconds at most."""

_log = logging.getLogger(__name__)


def start_thread(job: Callable[[], None]) -> None:
    """Run `job` beside the caller.

    Drains are rare (one per unload, reload or switch), so no thread is kept for them.
    """
    threading.Thread(target=job, name="loraplex-drain", daemon=True).start()


def check_deadline(deadline_s: float | None) -> None:
    if deadline_s is not None and not 0 <= deadline_s < math.inf:
        raise InvalidRequestError(
            f"deadline_s must be a number of seconds >= 0, got {deadline_s!r}", param="deadline_s"
        )


class Draining(Generic[T]):
    """A verb that has taken effect. waits_for: what it gave last; None: it is over, and has a `result`.

    Its caller waits, where it likes, and lets it go on.
    """

    result: T

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps
        self.go_on()

    def go_on(self) -> None:
        """Raises what the verb raises."""
        self.waits_for: tuple[Sequence[Future[bool]], float] | None = None
        try:
            self.waits_for = next(self._steps)
        except StopIteration as end:
            self.result = end.value

    def finish(self) -> T:
        """The result, for which this thread waits."""
        while self.waits_for is not None:
            wait(*self.waits_for)
            self.go_on()
        return self.result


def begun(verb: Callable[P, Steps[T]]) -> Callable[P, Draining[T]]:
    """A verb that returns when it has to wait for requests."""

    @wraps(verb)
    def begin(*args: P.args, **kwargs: P.kwargs) -> Draining[T]:
        return Draining(verb(*args, **kwargs))

    return begin


def ended(begin: Callable[P, Draining[T]]) -> Callable[P, T]:
    """The whole of such a verb, whose waits are its thread's."""

    @wraps(begin)
    def verb(*args: P.args, **kwargs: P.kwargs) -> T:
        return begin(*args, **kwargs).finish()

    return verb


class Drain:
    """abort_grace_s: how long a forced verb waits for the requests that it aborted to let go. on_unused: is told a
    directory that no version has any longer."""

    def __init__(
        self, store: AdapterStore, names: SharedTable, abort_grace_s: float, on_unused: Callable[[str], None]
    ) -> None:
        self._store = store
        self._names = names
        self._abort_grace_s = abort_grace_s
        self._on_unused = on_unused
        self._late: list[PendingDrain] = []  # for which the system had no thread
        self._left: set[str] = set()  # directories that no version has, which the journal may not know

    def complete(self, drains: Iterable[PendingDrain]) -> None:
        """Do what is due of these, if no other thread did. Never raises: the error is in `done`."""
        for drain in drains:
            self._complete(drain)

    def complete_later(self, drain: PendingDrain | None, run_later: Callable[[Callable[[], None]], object]) -> None:
        """`complete` it. Where the system has no thread for that, the next release or verb tries again."""
        due = [*self._take_late(), *([] if drain is None else [drain])]
        if due:
            try:
                run_later(partial(self.complete, due))
            except RuntimeError as error:
                _log.warning("no thread for a drain: %s", error)
                with self._names.lock:
                    self._late += due

    def _take_late(self) -> list[PendingDrain]:
        if not self._late:
            return []
        with self._names.lock:
            late, self._late = self._late, []
        return late

    def _complete(self, drain: PendingDrain) -> None:
        version, table = drain.version, self._names.table
        with self._names.lock:
            if not table.take(drain):
                return
            is_shelved = drain.then is AfterDrain.SHELVE
            is_shared = table.is_content_answering(version) or (is_shelved and table.is_content_named(version))
        try:
            has_changed = self._do(drain.then, version, is_shared)
        except Exception as error:
            _log.warning("adapter %r: %s failed: %s", version.ref.adapter_name, drain.then.value, error)
            drain.done.set_exception(error)
        else:
            drain.done.set_result(has_changed)

    def _do(self, then: AfterDrain, version: AdapterVersion, is_shared: bool) -> bool:
        if then is AfterDrain.DROP:
            return self._drop(version)
        if is_shared:  # what the old one leaves, the new one needs
            self.lift_pin(version)
            return False
        return self.leave_device(version) if then is AfterDrain.EVICT else self._leave_memory(version)

    def finish(self, drains: Sequence[PendingDrain], deadline_s: float | None, force: bool) -> Steps[int]:
        """Complete what is idle, wait for the rest, abort it if forced; returns how many requests were aborted.

        Raises what the store raised for the drains that are done.
        """
        self.complete(self._take_late())
        for drain in drains:
            self._complete(drain)
            if drain.then is AfterDrain.DROP and not drain.done.done():
                with suppress(AdapterNotFoundError):  # its last request has ended just now
                    self.lift_pin(drain.version)  # a pin would deny its room to other adapters until it is drained
        dones = [drain.done for drain in drains]
        if deadline_s:
            yield dones, deadline_s
        num_aborted, versions = 0, [drain.version for drain in drains if not drain.done.done()]
        if force and versions:
            with self._names.lock:  # before the engine: a request with a reference that is not sent yet stays unsent
                for version in versions:
                    version.is_forced_out = True
            num_aborted = sum(self._store.abort_adapter(version.adapter_id) for version in versions)
            yield dones, self._abort_grace_s
        for done in dones:
            if done.done():
                done.result()
        return num_aborted

    def _drop(self, version: AdapterVersion) -> bool:
        try:
            self._store.drop_adapter(version.adapter_id)
        except AdapterNotFoundError:
            return False  # the engine started again meanwhile: nothing is left to drop
        finally:
            self._let_go(version.spec.path)
        return True

    def _let_go(self, path: str) -> None:
        """Tell that no version has a directory, when the journal knows, too: until then the next process would look for
        its files. The next drop tries again."""
        with self._names.lock:
            self._left.add(path)
            left = set(self._left)
        with suppress(JournalError):
            self._names.settle()
            with self._names.lock:
                self._left -= left
                unused = left - {each.spec.path for each in self._names.table.versions()}
            for each in unused:
                self._on_unused(each)

    # ------------------------------------------------------------------------------------------------- down, and pins

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
        while self._store.evict_adapter(version.adapter_id):  # the last call, for nothing, ends predictions of it
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
        self.set_pin(version, False)
        return True

    def set_pin(self, version: AdapterVersion, is_pinned: bool) -> bool:
        """Pin or unpin, in the store and in the table. Whether the store changed something."""
        do, undo = self._store.pin_adapter, self._store.unpin_adapter
        if not is_pinned:
            do, undo = undo, do
        has_changed = do(version.adapter_id)
        try:
            self.note_pin(version, is_pinned)
        except DatabaseUnavailableError:
            if has_changed and version.is_pinned != is_pinned:  # else it may have taken place
                self.try_quietly(undo, version.adapter_id)
            raise
        return has_changed

    def pass_pin_on(self, version: AdapterVersion, heir: AdapterVersion) -> None:
        """Pin `heir` instead of `version`, so that no budget must hold both.

        Where that fails, `version` has it back.
        """
        self._store.unpin_adapter(version.adapter_id)
        try:
            self._store.pin_adapter(heir.adapter_id)
        except BaseException:
            if not self.try_quietly(self._store.pin_adapter, version.adapter_id):
                self.note_pin(version, False)
            raise

    def give_pin_back(self, version: AdapterVersion | None, heir: AdapterVersion) -> None:
        """`heir` is not published after all: what has the pin in the table has it in the store again."""
        if version is not None and version.is_pinned:
            self.try_quietly(self._store.unpin_adapter, heir.adapter_id)
            self.try_quietly(self._store.pin_adapter, version.adapter_id)

    def note_pin(self, version: AdapterVersion, is_pinned: bool) -> None:
        """The store has pinned it, or does so no longer."""
        with self._names.change() as table:
            version.is_pinned = is_pinned
            table.touch(version.ref.adapter_name)

    @staticmethod
    def try_quietly(call: Callable[[int], object], adapter_id: int) -> bool:
        """To undo after an error, which is the one to report. Whether it worked."""
        try:
            call(adapter_id)
        except AdapterNotFoundError:
            return False  # an unload came between and dropped it: nothing is left to undo
        except Exception:
            _log.warning("adapter_id %d: undoing a failed verb failed too", adapter_id, exc_info=True)
            return False
        return True
