"""The directory of `--state-dir`: one process owns it, no other user can write to it, and nothing in it is a link.

DIR/journal.sqlite   the journal, mode 0600 (with SQLite's -wal and -shm beside it)
DIR/copies/          dated copies of the journal (copies.py)
DIR/texts/           texts of adapters that bring one (texts.py), made when there is one
DIR/uploads/         adapters that clients sent (sources/uploads.py)
DIR/fetched/         adapters that requests had fetched (remote/fetched.py)
DIR/damaged/         what `loraplex state repair` replaced
DIR/lock             held by the process that uses the directory, as long as it lives; its number is in it
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from loraplex.errors import ConfigError
from loraplex.private_folder import private_folder

FILE_MODE = 0o600

FOLDERS = ("copies", "damaged", "fetched", "texts", "uploads")
"""All that a server writes to, and removes files of."""


class StateDirectory:
    """Made, checked and locked until `close`.

    Raises ConfigError when the directory cannot be used, or another process has it.
    """

    def __init__(self, path: str | Path, *, must_exist: bool = False) -> None:
        self.path = Path(path)
        self.journal_file = self.path / "journal.sqlite"
        self.copies = self.path / "copies"
        self.damaged = self.path / "damaged"
        if must_exist and not self.path.is_dir():
            raise ConfigError(f"{self.path} is not a directory; give the --state-dir of a server")
        if must_exist and not os.path.lexists(self.journal_file) and not any(self.copies.glob("journal-*.sqlite")):
            text = "has no journal and no copy of one, and is left as it is"
            raise ConfigError(f"{self.path} {text}; give the --state-dir of a server")
        self._lock = -1
        try:
            self._make(self.path)
            self._check_folders()
            self._lock = self._open_own(self.path / "lock")
        except OSError as error:
            why = "it is a file; give a directory" if self.path.is_file() else error.strerror
            raise ConfigError(f"the state directory {self.path} cannot be used: {why}") from error
        try:
            self._take_lock()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def has_journal(self) -> bool:
        """Whether there is a journal with anything in it."""
        return self.journal_file.is_file() and self.journal_file.stat().st_size > 0

    def make_private(self, file: Path) -> None:
        """An existing file, or a new empty one, that this user alone can read.

        Raises ConfigError for a link or another kind of file.
        """
        try:
            descriptor = self._open_own(file)
        except OSError as error:
            raise ConfigError(f"{file} cannot be used: {error.strerror}") from error
        os.close(descriptor)

    def remove(self, file: Path) -> None:
        """Raises ConfigError for what is no file."""
        try:
            file.unlink()
        except OSError as error:
            raise ConfigError(f"{file} cannot be removed: {error.strerror}") from error

    def _check_folders(self) -> None:
        """Raises ConfigError for a link or a file in place of one of them."""
        for name in FOLDERS:
            path = self.path / name
            if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
                what = "a link" if path.is_symlink() else "no folder"
                raise ConfigError(f"{path} is {what}; move it away, or give another --state-dir")

    def make_folder(self, folder: Path) -> Path:
        """Raises ConfigError when it cannot be made, is a link, or another user can write to it."""
        if folder.is_symlink():
            raise ConfigError(f"{folder} is a link; remove it, or give another --state-dir")
        try:
            self._make(folder)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be used: {error.strerror}") from error
        return folder

    def _make(self, folder: Path) -> None:
        private_folder(folder, "the state directory", "give another with --state-dir")
        folder.mkdir(exist_ok=True)  # raises the reason when it could not be made

    def _open_own(self, file: Path) -> int:
        """A descriptor of a regular file, made if it is missing. Links are not followed; nothing is read or written."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(file, flags, FILE_MODE)
        except OSError as error:
            if file.is_symlink() or (file.exists() and not file.is_file()):
                raise _no_plain_file(file) from error
            raise
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
            os.close(descriptor)
            raise _no_plain_file(file)
        if stat.S_IMODE(about.st_mode) != FILE_MODE:
            os.fchmod(descriptor, FILE_MODE)
        return descriptor

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip()
            process = f"process {owner if owner.isdecimal() else 'unknown'}"
            raise ConfigError(
                f"the state directory {self.path} is in use by another server ({process}); "
                "stop that one, or give this one a --state-dir of its own"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)


def _no_plain_file(file: Path) -> ConfigError:
    return ConfigError(f"{file} is a link, or not a plain file; remove it, or give another --state-dir")
