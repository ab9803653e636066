"""Temporary folders in which adapters are made: whose they are, and which of them have lost their maker. No torch.

A maker holds the lock of a file in its folder as long as it lives. The file gets its name when it is locked, so one
that nothing holds is of a maker that ended. A folder without it is judged by its age.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from loraplex.errors import ConfigError
from loraplex.private_folder import default_folder, private_folder

PART_PREFIX = ".making-"
LOCK_NAME = "maker.lock"
ABANDONED_S = 24 * 3600.0
"""A folder without a lock that has this age was left by a process that ended while it wrote: the file system has no
locks, or the process ended in the moment before the folder got its last name."""

MAX_FOLDER_CHARS = 80


def folder_name(adapter_name: str) -> str:
    """A new one: the name as far as every file system takes it, and a number that no other has."""
    return f"{_plain(adapter_name)[:MAX_FOLDER_CHARS] or 'adapter'}-{secrets.token_hex(4)}"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")


def part_prefix(folder: Path) -> str:
    """What the names of the temporary folders of `folder` begin with."""
    return f"{PART_PREFIX}{_plain(folder.name)[: 2 * MAX_FOLDER_CHARS]}-"


@contextmanager
def held(part: Path) -> Iterator[None]:
    """This process is its maker. The lock is there as long, or until `release`, which has to be before the rename."""
    new = part / f"{LOCK_NAME}.new"
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(part / LOCK_NAME)
        except OSError:
            new.unlink()
        yield
    finally:
        os.close(lock)


def release(part: Path) -> None:
    (part / LOCK_NAME).unlink(missing_ok=True)


def remove_parts(folder: Path) -> None:
    """Temporary folders of a process that was ended while it wrote this one."""
    for path in folder.parent.glob(f"{part_prefix(folder)}*"):
        shutil.rmtree(path, ignore_errors=True)


def remove_abandoned(folder: Path, unlocked_s: float = ABANDONED_S) -> None:
    """Temporary folders whose maker has ended. unlocked_s: the age of those without a lock."""
    for path in folder.glob(f"{PART_PREFIX}*"):
        with suppress(OSError):  # it is held, or not ours, or gone meanwhile
            if not path.is_symlink() and _is_abandoned(path, unlocked_s):
                shutil.rmtree(path, ignore_errors=True)


def temporary_folder(what: str, at_end: ExitStack) -> Path:
    """A new folder for `what`, which `at_end` removes: beside other caches, where nothing but this user's files are;
    else in the system's folder for such."""
    above = default_folder()
    if above is not None:
        try:
            above = private_folder(above, "the cache", "set LORAPLEX_CACHE")
        except ConfigError:
            above = None
    if above is None or not os.access(above, os.W_OK):
        above = Path(tempfile.gettempdir())
    remove_abandoned(above)
    folder = Path(tempfile.mkdtemp(prefix=f"{PART_PREFIX}{what}-", dir=above.resolve()))
    at_end.callback(shutil.rmtree, folder, ignore_errors=True)
    at_end.enter_context(held(folder))
    return folder


def _is_abandoned(part: Path, unlocked_s: float) -> bool:
    """Raises OSError when its lock is held, or cannot be taken."""
    try:
        lock = os.open(part / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return time.time() - part.stat().st_mtime > unlocked_s
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(lock)
    return True
