"""The point of effect of a verb: one critical section of the table, on disk before its caller hears of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from loraplex.adapters.registry.name_table import NameTable
from loraplex.adapters.registry.records import Journal


class Effects:
    """`lock` guards `table`; it is held for dictionary operations only, never while the journal writes."""

    def __init__(self, table: NameTable, journal: Journal | None) -> None:
        self.lock = threading.Lock()
        self.table = table
        self._journal = journal

    @contextmanager
    def change(self) -> Iterator[NameTable]:
        """Change the table. What changed is handed to the journal under the lock, so in order, and waited for outside it.

        Raises JournalError when it could not be written: the change holds in this process, and may be forgotten by the next one.
        """
        with self.lock:
            yield self.table
            names = self.table.take_changed()
            journal = self._journal if names else None
            written = None if journal is None else journal.record([self.table.change_of(name) for name in names])
        if written is not None:
            written.result()
