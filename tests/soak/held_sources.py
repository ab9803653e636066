"""Sources that hang: a thread that reads an adapter whose directory has a marker waits until the marker is gone.

Two markers, because two processes read: the server's, which checks an adapter, and the engine's, which loads it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from loraplex.adapters import source_reader

FRONT_MARKER = "held-front"
ENGINE_MARKER = "held-engine"
MAX_HOLD_S = 20.0
POLL_S = 0.005


@contextmanager
def heeding(marker: str) -> Iterator[None]:
    """In this process, reads of a directory with `marker` in it hang; MAX_HOLD_S stands for no end."""
    read_adapter = source_reader.read_adapter

    def wait_and_read(path: str, *arguments: Any) -> Any:
        deadline_s = time.monotonic() + MAX_HOLD_S
        while (Path(path) / marker).exists() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return read_adapter(path, *arguments)

    with mock.patch.object(source_reader, "read_adapter", wait_and_read):
        yield


@contextmanager
def held(directory: Path, marker: str) -> Iterator[None]:
    """A thread that reads `directory` meanwhile waits."""
    (directory / marker).touch()
    try:
        yield
    finally:
        (directory / marker).unlink()
