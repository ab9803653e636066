"""The journal that a server writes: `registry.Journal` in SQLite.

WAL, synchronous=FULL: what was acknowledged is on disk; a write that a crash tore is as if never begun. One thread
writes. Changes queue up in the order in which the registry made them, and all that wait are one transaction, so many
verbs at once cost few syncs. A directory that is removed under the server would keep nothing of them: verbs fail while
the files at their paths are not those that are open. Counters are written every COUNT_INTERVAL_S and at the end; a
crash may lose the latest. A dated copy is made at the start, COPY_INTERVAL_S after a change at the latest, and at the
end.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import sqlalchemy as sa

from loraplex.adapters.journal.copies import JournalCopies, time_of
from loraplex.adapters.journal.damage import summary
from loraplex.adapters.journal.state_directory import StateDirectory
from loraplex.adapters.journal.tables import DamagedJournalError, JournalTables, engine_of
from loraplex.adapters.journal.texts import SavedTexts
from loraplex.adapters.registry.records import NameChange, NameRecord, NameUsage
from loraplex.errors import ConfigError, JournalError

_log = logging.getLogger(__name__)

COUNT_INTERVAL_S = 5.0
COPY_INTERVAL_S = 60.0


class SqliteJournal:
    """`registry.Journal` on disk. `names` and `last_adapter_id` are what was there when it was opened.

    base_model: whose adapters they are; a directory belongs to one. Raises ConfigError when the directory cannot be
    used: another server has it, another user can write to it, it is another model's or another version's, or its
    journal is damaged or gone.
    """

    def __init__(
        self,
        state_dir: str | Path,
        base_model: str,
        count_interval_s: float = COUNT_INTERVAL_S,
        copy_interval_s: float = COPY_INTERVAL_S,
    ) -> None:
        self._count_interval_s = count_interval_s
        self._copy_interval_s = copy_interval_s
        self._directory = StateDirectory(state_dir)
        try:
            self._copies = JournalCopies(self._directory.make_folder(self._directory.copies))
            self._texts = SavedTexts(self._directory)
            self._tables = self._open(base_model)
        except BaseException:
            self._directory.close()
            raise
        self._queue: deque[tuple[Sequence[NameChange], Future[None]]] = deque()
        self._wake = threading.Condition()
        self._is_closed = False
        journal = self._directory.journal_file
        self._opened = {file: _identity(file) for file in (journal, journal.with_name(f"{journal.name}-wal"))}
        self._unwritten: dict[str, NameChange] = {}
        self._logged = ""
        self._take_usage: Callable[[], Sequence[NameUsage]] = tuple
        self._is_changed = False  # since the last copy
        self._copied_tenants = self._tables.tenants_revision()
        self._copied_s = time.monotonic()
        self._copy()
        self._writer = threading.Thread(target=self._write, name="loraplex-journal", daemon=True)
        self._writer.start()

    def _open(self, base_model: str) -> JournalTables:
        """The tables, with `names` and `last_adapter_id` read. Raises ConfigError for what is not whole."""
        directory = self._directory
        remedy = f"run: loraplex state check {directory.path}"
        copies = self._copies.files()
        is_there = os.path.lexists(directory.journal_file)
        if is_there:
            directory.make_private(directory.journal_file)
        if not directory.has_journal and (is_there or copies):
            copy = f"there is a copy of it of {time_of(copies[0])}" if copies else "there is no copy of it"
            raise ConfigError(f"{directory.journal_file} is {'empty' if is_there else 'missing'}, and {copy}; {remedy}")
        if not is_there:
            self._make(base_model)
        with ExitStack() as opened:
            try:
                tables = opened.enter_context(closing(JournalTables(directory.journal_file, base_model)))
                contents = tables.read()
                if not contents.damages:
                    contents.check_age(self._copies)
            except DamagedJournalError as error:
                raise ConfigError(f"{error}; {remedy}") from error
            if contents.damages:
                raise ConfigError(f"{directory.journal_file} is damaged: {summary(contents.damages)}; {remedy}")
            self.names: Mapping[str, NameRecord] = self._texts.attach(contents.names)
            opened.pop_all()
        self.last_adapter_id = contents.last_adapter_id
        return tables

    def _make(self, base_model: str) -> None:
        """A journal without adapters; it has its name when it is whole, so an empty file was emptied later."""
        made = self._directory.path / "journal.new.sqlite"
        for left in self._directory.path.glob(f"{made.name}*"):  # of a start that was killed
            self._directory.remove(left)
        self._directory.make_private(made)
        JournalTables(made, base_model).close()
        made.rename(self._directory.journal_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open_state(self) -> sa.Engine:
        """Further connections to the file, for tables of others than the registry."""
        return engine_of(self._directory.journal_file)

    def record(self, changes: Sequence[NameChange]) -> Future[None]:
        """As registry.Journal says. After `close` the future raises JournalError."""
        written: Future[None] = Future()
        with self._wake:
            if self._is_closed:
                written.set_exception(
                    JournalError(f"the state directory {self._directory.path} is closed: the server is shutting down")
                )
                return written
            self._queue.append((changes, written))
            self._wake.notify()
        return written

    def count(self, take_usage: Callable[[], Sequence[NameUsage]]) -> None:
        self._take_usage = take_usage

    def close(self) -> None:
        """Write what waits and the counters, and let the directory go. Called again, it does nothing."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._writer.join()
        self._tables.close()
        self._directory.close()

    def _write(self) -> None:
        is_last = False
        counted_s = time.monotonic()
        while not is_last:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._is_closed, self._count_interval_s)
                waiting, is_last = list(self._queue), self._is_closed
                self._queue.clear()
            self._write_changes(waiting)
            if is_last or time.monotonic() - counted_s >= self._count_interval_s:
                self._write_counters()
                self._look_at_tenants()
                counted_s = time.monotonic()
            if self._is_changed and (is_last or time.monotonic() - self._copied_s >= self._copy_interval_s):
                self._copy()

    def _write_changes(self, waiting: Sequence[tuple[Sequence[NameChange], Future[None]]]) -> None:
        """One transaction for all: the last state of each name.

        What fails is kept, to be written before what comes next.
        """
        for changes, _ in waiting:
            self._unwritten.update({change.name: change for change in changes})
        try:
            self._check_place()
            if self._unwritten:
                changes = list(self._unwritten.values())
                self._texts.save(changes)
                self._tables.write(changes)
                self._check_place()
                self._texts.prune(changes)
                self._is_changed = True
        except Exception as cause:
            reason = getattr(cause, "orig", cause)  # SQLite's, without SQLAlchemy's link
            text = (
                "what was done holds as long as this server, but could not be written to its state directory "
                f"({reason}); mend that: it is tried again with the next verb"
            )
            if text != self._logged:
                _log.error("%s: %s", self._directory.path, text)
            self._logged = text
            for _, written in waiting:
                written.set_exception(JournalError(text))
        else:
            self._unwritten.clear()
            self._logged = ""
            for _, written in waiting:
                written.set_result(None)

    def _check_place(self) -> None:
        """Raises OSError when what is written would go to files that no later server finds."""
        for file, opened in self._opened.items():
            if _identity(file) != opened:
                reason = "is not the file that this server opened: put that back, or start the server again"
                raise OSError(f"{file.name} {reason}")

    def _write_counters(self) -> None:
        """Counters are of those names that are written; they are not worth an error."""
        with suppress(Exception):
            self._tables.write_usage(self._take_usage())

    def _look_at_tenants(self) -> None:
        """Others write them: keys that were made or revoked are to be in a copy, too."""
        with suppress(Exception):
            revision = self._tables.tenants_revision()
            self._is_changed |= revision != self._copied_tenants
            self._copied_tenants = revision

    def _copy(self) -> None:
        """Without a copy the journal itself is still whole: a failure is logged, and the next copy is made in time."""
        self._copied_s = time.monotonic()
        try:
            self._tables.copy_to(self._copies)
        except Exception as cause:
            _log.warning("no copy of the journal could be made in %s: %s", self._directory.copies, cause)
        else:
            self._is_changed = False


def _identity(file: Path) -> tuple[int, int] | None:
    """None: it is not there."""
    with suppress(OSError):
        about = file.stat()
        return about.st_dev, about.st_ino
    return None
