"""Slow verbs on one name take turns, without a lock: the next one waits for the future of the one that runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager

from loraplex.adapters.registry.name_table import NameTable
from loraplex.adapters.registry.verb import Verb
from loraplex.adapters.registry.version import AdapterVersion


class Turns:
    """`lock` guards `table`. Loads take their turns too (load.py); unload alone waits for nobody."""

    def __init__(self, lock: threading.Lock, table: NameTable) -> None:
        self._lock = lock
        self._table = table

    @contextmanager
    def verb_on(self, name: str) -> Iterator[AdapterVersion]:
        """Be the one slow verb on `name`, after the one that runs; yields its own version, not what answers for it."""
        while True:
            with self._lock:
                running = self._table.verbs.get(name)
                if running is None:
                    version = self._table.own(name)
                    verb = self._table.verbs[name] = Verb()
                    break
            wait((running.done,))
        try:
            yield version
        finally:
            with self._lock:
                del self._table.verbs[name]
            verb.done.set_result(None)
