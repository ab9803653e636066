"""Fetches of this process that run, one of a place at a time: a second one finds what the first has brought."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

MAX_FETCHES = 64
"""At a time, those past their deadline included."""


class Fetches:
    """Of the hub and of object stores. huggingface_hub cannot be cancelled: past its deadline a fetch ends with the
    next piece of an answer (`HubFetch`), and counts until then."""

    def __init__(self) -> None:
        self._running: set[Path] = set()
        self._changed = threading.Condition()

    def run(self, folder: Path, work: Callable[[], Path], timeout_s: float) -> Path:
        """folder: of the adapter, or of all that is fetched of it. Raises what `work` raises, and TimeoutError."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            if not self._changed.wait_for(lambda: self._may_run(folder), timeout_s):
                raise TimeoutError
            self._running.add(folder)
        found: Future[Path] = Future()

        def fetch() -> None:
            try:
                found.set_result(work())
            except BaseException as error:
                found.set_exception(error)
            finally:
                self._end(folder)

        try:
            threading.Thread(target=fetch, name=f"fetch {folder.name}", daemon=True).start()
        except RuntimeError:  # no more threads
            self._end(folder)
            raise
        return found.result(max(0.0, deadline_s - time.monotonic()))

    def _may_run(self, folder: Path) -> bool:
        return folder not in self._running and len(self._running) < MAX_FETCHES

    def _end(self, folder: Path) -> None:
        with self._changed:
            self._running.discard(folder)
            self._changed.notify_all()
