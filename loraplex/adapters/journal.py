"""What the registry knows, kept in a directory (`--state-dir`): names, versions, pins, numbers, aliases and counters, in SQLite.

    DIR/journal.sqlite   WAL, synchronous=FULL: what was acknowledged is on disk; a write that a crash tore is as if never begun
    DIR/lock             held by the one server that uses the directory, as long as its process lives

One thread writes. Changes queue up in the order in which the registry made them, and all that wait are one transaction, so many verbs
at once cost few syncs. Counters are written every COUNT_INTERVAL_S and at the end; a crash may lose the latest.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from loraplex.adapters.journal_tables import JournalTables
from loraplex.adapters.registry.records import NameChange, NameRecord, NameUsage
from loraplex.errors import ConfigError, JournalError

_log = logging.getLogger(__name__)

COUNT_INTERVAL_S = 5.0


class SqliteJournal:
    """`registry.Journal` on disk. `names` and `last_adapter_id` are what was there when it was opened.

    base_model: whose adapters they are; a directory belongs to one. Raises ConfigError when the directory cannot be used: another
    server has it, it is another model's or another version's, or it cannot be read.
    """

    def __init__(self, state_dir: str | Path, base_model: str, count_interval_s: float = COUNT_INTERVAL_S) -> None:
        self._directory = Path(state_dir)
        self._count_interval_s = count_interval_s
        self._lock_file = _lock(self._directory)
        try:
            self._tables = JournalTables(self._directory / "journal.sqlite", base_model)
            self.names: Mapping[str, NameRecord]
            self.names, self.last_adapter_id = self._tables.read()
        except BaseException:
            self._lock_file.close()
            raise
        self._queue: deque[tuple[Sequence[NameChange], Future[None]]] = deque()
        self._wake = threading.Condition()
        self._is_closed = False
        self._unwritten: dict[str, NameChange] = {}
        self._take_usage: Callable[[], Sequence[NameUsage]] = tuple
        self._writer = threading.Thread(target=self._write, name="loraplex-journal", daemon=True)
        self._writer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def record(self, changes: Sequence[NameChange]) -> Future[None]:
        """As registry.Journal says. After `close` the future raises JournalError."""
        written: Future[None] = Future()
        with self._wake:
            if self._is_closed:
                written.set_exception(JournalError(f"the state directory {self._directory} is closed: the server ends"))
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
        self._lock_file.close()

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
                counted_s = time.monotonic()

    def _write_changes(self, waiting: Sequence[tuple[Sequence[NameChange], Future[None]]]) -> None:
        """One transaction for all: the last state of each name. What fails is kept, to be written before what comes next."""
        for changes, _ in waiting:
            self._unwritten.update({change.name: change for change in changes})
        if not self._unwritten:
            return
        try:
            self._tables.write(list(self._unwritten.values()))
        except Exception as cause:
            text = (
                f"what was done holds as long as this server, but could not be written to {self._directory} ({cause}); "
                "mend that: it is tried again with the next change"
            )
            _log.error("%s", text)
            for _, written in waiting:
                written.set_exception(JournalError(text))
        else:
            self._unwritten.clear()
            for _, written in waiting:
                written.set_result(None)

    def _write_counters(self) -> None:
        """Counters are of those names that are written; they are not worth an error."""
        with suppress(Exception):
            self._tables.write_usage(self._take_usage())


def _lock(directory: Path) -> IO[str]:
    """Own the directory until the file is closed, or the process ends however."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("a+")
    except OSError as error:
        why = "it is a file; give a directory" if directory.is_file() else error.strerror
        raise ConfigError(f"the state directory {directory} cannot be used: {why}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read(32).strip()
        file.close()
        raise ConfigError(
            f"the state directory {directory} is in use by another server (process {owner or 'unknown'}); "
            "stop that one, or give this one a --state-dir of its own"
        ) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
