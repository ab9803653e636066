"""The table of names as threads share it: the lock, the section in which a verb takes effect, one slow verb a name.

With a shared journal the same holds among servers: a section is a turn of the journal, and the slow verb on a name is
the only one of all servers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from loraplex.adapters.registry.name_table import NameTable
from loraplex.adapters.registry.records import Journal, NameChange, SharedJournal
from loraplex.adapters.registry.verbs import Verb
from loraplex.adapters.registry.version import AdapterVersion
from loraplex.errors import JournalError


class SharedTable:
    """`lock` guards `table`; it is held for dictionary operations only, never while store or journal work."""

    def __init__(self, table: NameTable, journal: Journal | SharedJournal | None) -> None:
        self.lock = threading.Lock()
        self.table = table
        self.shared = journal if isinstance(journal, SharedJournal) else None
        self._journal = None if isinstance(journal, SharedJournal) else journal

    @contextmanager
    def change(self) -> Iterator[NameTable]:
        """Change the table. The journal gets what changed under the lock, so in order, and is waited for outside it.

        Raises JournalError when it could not be written: the change holds in this process, and may be forgotten by the
        next. Of a shared journal: what was changed is refused here until it is known which of the two the servers have.
        """
        if self.shared is not None:
            with self._turn(self.shared) as table:
                yield table
            return
        with self.lock:
            yield self.table
            changes = self._take_changes()
            written = self._journal.record(changes) if self._journal is not None and changes else None
        if written is not None:
            written.result()

    @contextmanager
    def _turn(self, shared: SharedJournal) -> Iterator[NameTable]:
        with shared.turn() as write:
            with self.lock:
                yield self.table
                changes = self._take_changes()
            try:
                if changes:
                    write(changes)
            except JournalError:
                with self.lock:
                    self.table.call_off_drains([change.name for change in changes])
                raise

    def _take_changes(self) -> list[NameChange]:
        return [self.table.change_of(name) for name in self.table.take_changed()]

    def call_off(self, verb: Verb) -> None:
        """A load failed. What it had reserved was never in a shared journal, which may be away now."""
        if self.shared is not None:
            with self.lock:
                self.table.call_off(verb)
            return
        with suppress(JournalError), self.change() as table:
            table.call_off(verb)

    def settle(self) -> None:
        """For the answer that nothing had to change: what changed before is on disk. Raises JournalError if it is
        not."""
        if self._journal is not None:
            self._journal.record(()).result()

    def check_known(self, version: AdapterVersion, name: str) -> None:
        """Raises AdapterUnavailableError where another server may have changed what answers for `name`."""
        if self.shared is not None:
            self.shared.check_known(name, version.ref.adapter_name)

    def alone_on(self, name: str) -> AbstractContextManager[None]:
        """Among servers; the verbs of this one queue in `verb_on` and in load.py."""
        return nullcontext() if self.shared is None else self.shared.alone_on(name)

    @contextmanager
    def verb_on(self, name: str) -> Iterator[AdapterVersion]:
        """Be the one slow verb on `name`, after the one that runs; yields its own version, not what answers for it.

        The lock is not held: the next verb waits for a future. Loads queue here too (load.py); unload waits for none.
        """
        with self.alone_on(name):
            if self.shared is not None:
                with self.change():
                    pass  # now the table has what the verb before did at another server
            with self.own_verb_on(name) as version:
                yield version

    @contextmanager
    def own_verb_on(self, name: str) -> Iterator[AdapterVersion]:
        """Among the verbs of this server alone."""
        while True:
            with self.lock:
                running = self.table.verbs.get(name)
                if running is None:
                    version = self.table.own(name)
                    version.check_ready()
                    verb = self.table.verbs[name] = Verb()
                    break
            wait((running.done,))
        try:
            yield version
        finally:
            with self.lock:
                del self.table.verbs[name]
            verb.done.set_result(None)
