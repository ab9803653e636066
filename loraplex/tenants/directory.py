"""What a running server knows of its tenants: the table of the database, read again when its number changes.

One thread asks for the number every POLL_S; so a key that is revoked anywhere opens nothing after that time. While the
database does not answer, the last table is what counts. Reading it is one attribute: nothing waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from loraplex.errors import JournalError, LoraplexError
from loraplex.tenants.records import TenantTable

if TYPE_CHECKING:
    from loraplex.tenants.store import TenantStore

POLL_S = 0.25
CLOSE_PATIENCE_S = 5.0

_log = logging.getLogger(__name__)


class Tables(Protocol):
    @property
    def table(self) -> TenantTable:
        """What holds now."""
        ...


class TenantDirectory:
    """`table` is what holds now. Raises JournalError when the database cannot be read at first."""

    def __init__(self, store: TenantStore, poll_s: float = POLL_S) -> None:
        self.store = store
        self.table = store.read()
        self._poll_s = poll_s
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._followers: list[Callable[[TenantTable], None]] = []
        self._watcher = threading.Thread(target=self._watch, name="loraplex-tenants", daemon=True)
        self._watcher.start()

    def refresh(self) -> TenantTable:
        """What the database has now: after a change of this server's, which is answered when it holds.

        Raises JournalError, also for a number that was there and is lost: a server with tenants never opens without.
        """
        with self._lock:
            revision = self.store.revision()
            if revision != self.table.revision:
                if not revision:
                    raise JournalError("the database has lost the number of the last change of its tenants")
                self.table = self.store.read()
                for tell in self._followers:
                    tell(self.table)
            return self.table

    def follow(self, tell: Callable[[TenantTable], None]) -> None:
        """Give it the table, now and after each change, in any thread. It must not wait."""
        with self._lock:
            self._followers.append(tell)
            tell(self.table)

    def close(self) -> None:
        """A database that does not answer is not waited for."""
        self._is_closed.set()
        self._watcher.join(CLOSE_PATIENCE_S)
        self.store.close()

    def _watch(self) -> None:
        is_away = False
        while not self._is_closed.wait(self._poll_s):
            try:
                self.refresh()
                is_away = False
            except Exception as error:  # the thread goes on, whatever it was
                if not is_away:
                    _log.error(
                        "%s; keys and tenants stay as they are known",
                        error,
                        exc_info=not isinstance(error, LoraplexError),
                    )
                is_away = True
