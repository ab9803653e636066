"""The table of names as threads share it: the lock, the section in which a verb takes effect, one slow verb a name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager

from loraplex.adapters.registry.name_table import NameTable
from loraplex.adapters.registry.records import Journal
from loraplex.adapters.registry.verbs import Verb
from loraplex.adapters.registry.version import AdapterVersion


class SharedTable:
    """`lock` guards `table`; it is held for dictionary operations only, never while store or journal work."""

    def __init__(self, table: NameTable, journal: Journal | None) -> None:
        self.lock = threading.Lock()
        self.table = table
        self._journal = journal

    @contextmanager
    def change(self) -> Iterator[NameTable]:
        """Change the table. The journal gets what changed under the lock, so in order, and is waited for outside it.

        Raises JournalError when it could not be written: the change holds in this process, and may be forgotten by the
        next.
        """
        with self.lock:
            yield self.table
            names = self.table.take_changed()
            journal = self._journal if names else None
            written = None if journal is None else journal.record([self.table.change_of(name) for name in names])
        if written is not None:
            written.result()

    def settle(self) -> None:
        """For the answer that nothing had to change: what changed before is on disk. Raises JournalError if it is
        not."""
        if self._journal is not None:
            self._journal.record(()).result()

    @contextmanager
    def verb_on(self, name: str) -> Iterator[AdapterVersion]:
        """Be the one slow verb on `name`, after the one that runs; yields its own version, not what answers for it.

        The lock is not held: the next verb waits for a future. Loads queue here too (load.py); unload waits for none.
        """
        while True:
            with self.lock:
                running = self.table.verbs.get(name)
                if running is None:
                    version = self.table.own(name)
                    verb = self.table.verbs[name] = Verb()
                    break
            wait((running.done,))
        try:
            yield version
        finally:
            with self.lock:
                del self.table.verbs[name]
            verb.done.set_result(None)
