"""What the registry knows, kept in a state directory (`--state-dir`): names, versions, pins, numbers, counters."""

from __future__ import annotations

from loraplex.adapters.journal.sqlite_journal import SqliteJournal

__all__ = ["SqliteJournal"]
