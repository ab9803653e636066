"""Dated copies of the journal, so that a file that is emptied or damaged costs minutes of changes, not all adapters.

A copy is a whole SQLite file, made beside the running server; it appears under its name when it is complete. Kept are
the NUM_NEWEST newest ones, and the newest one of each of the last NUM_DAYS days that have one.
"""

from __future__ import annotations

import os
import re
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from loraplex.adapters.journal.state_directory import FILE_MODE
from loraplex.adapters.regular_file import sync_path

NUM_NEWEST = 3
NUM_DAYS = 7
_NAME = re.compile(r"journal-\d{8}T\d{12}Z\.sqlite", re.ASCII)
_TIME_FORMAT = "journal-%Y%m%dT%H%M%S%fZ.sqlite"


class JournalCopies:
    """folder: where they lie; it is there before the first `add`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def files(self) -> list[Path]:
        """The newest first."""
        named = (file for file in self._folder.glob("journal-*") if _NAME.fullmatch(file.name))
        return sorted((file for file in named if file.is_file() and not file.is_symlink()), reverse=True)

    def add(self, source: sqlite3.Connection, now: datetime | None = None) -> Path:
        """Copy all that is committed. Raises OSError or sqlite3.Error, and leaves no half of a copy under its name."""
        file = self._folder / (now or datetime.now(UTC)).strftime(_TIME_FORMAT)
        unfinished = file.with_suffix(".unfinished")
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE))
        with closing(sqlite3.connect(unfinished)) as target:
            source.backup(target)
            target.execute("PRAGMA journal_mode=DELETE")
        sync_path(unfinished)
        unfinished.rename(file)
        sync_path(self._folder)
        self._prune()
        return file

    def _prune(self) -> None:
        files = self.files()
        days = [next(group) for _, group in groupby(files, key=_day)]
        keep = {*files[:NUM_NEWEST], *days[:NUM_DAYS]}
        stale = [*(file for file in files if file not in keep), *self._folder.glob("*.unfinished*")]
        for file in stale:
            file.unlink(missing_ok=True)


def time_of(copy: Path) -> str:
    """When a copy was made: 2026-11-22 09:15:00 UTC."""
    return f"{datetime.strptime(copy.name, _TIME_FORMAT):%Y-%m-%d %H:%M:%S} UTC"


def _day(copy: Path) -> str:
    return copy.name[: len("journal-20261122")]


def counts_of(file: Path) -> tuple[int, int]:
    """The highest adapter_id and the number of the last change of tenants that a copy has, which never fall. (0, 0): it
    cannot be read."""
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            found = dict(database.execute("SELECT key, value FROM about WHERE key IN ('last_adapter_id', 'tenants')"))
    except (sqlite3.Error, OSError, ValueError):
        return 0, 0
    last_adapter_id, revision = (str(found.get(key, "0")) for key in ("last_adapter_id", "tenants"))
    is_number = [each.isascii() and each.isdigit() and len(each) < 19 for each in (last_adapter_id, revision)]
    return int(last_adapter_id) if is_number[0] else 0, int(revision) if is_number[1] else 0
