"""A file of a tenant's, opened so that it cannot block, and known again so that a change under our hands is noticed."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from loraplex.errors import (
    AdapterDiskFullError,
    AdapterFileFormatError,
    AdapterLoadError,
    AdapterPathForbiddenError,
    AdapterPermissionError,
    AdapterTooLargeError,
    AdapterWeightsMissingError,
    LoraplexError,
)

MAX_BUFFERS = 512
"""Pieces of memory in one system call; systems take 1024."""

BLOCK_BYTES = 512
"""What `st_blocks` counts, on every file system."""

SPARSE_BYTES = 2**20
SPARSE_SHARE = 8
"""A larger file of which less than one byte in so many is stored is refused. A file system that compresses stores at
least half of an adapter's weights, and a new adapter's B, which is 0, is half of it."""

Stamp = tuple[int, int, int, int]
"""(device, inode, size, time of modification in ns): equal stamps, equal content."""

Roots = Collection[Path] | None
"""Directories, links resolved, in one of which a file must lie; None: it may be anywhere."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RegularFile:
    """An open regular file; `stamp` is of the moment of opening."""

    path: Path
    where: str
    """How messages about this file begin."""
    fd: int
    stamp: Stamp

    @classmethod
    @contextmanager
    def open(cls, path: Path, adapter: str, roots: Roots) -> Iterator[RegularFile]:
        """Raises AdapterPathForbiddenError when what was opened is outside the roots, whatever `path` led to before.

        Also AdapterWeightsMissingError, AdapterPermissionError, AdapterFileFormatError (no regular file),
        AdapterLoadError.
        """
        fd, where = -1, f"adapter {adapter!r}: {path.name}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would block without O_NONBLOCK
            file = cls(path, where, fd, _stamp_of(fd))
            if roots is not None:
                file._check_inside(roots)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise AdapterFileFormatError(f"{where} is not a regular file")
            yield file
        except FileNotFoundError as error:
            raise AdapterWeightsMissingError(f"{where} is missing") from error
        except PermissionError as error:
            raise AdapterPermissionError(f"{where} may not be read: {error.strerror}") from error
        except OSError as error:
            raise AdapterLoadError(f"{where} cannot be read: {error.strerror}") from error
        finally:
            if fd >= 0:
                os.close(fd)

    @property
    def size(self) -> int:
        return self.stamp[2]

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset`; returns the bytes that were there (fewer only at the end of the file)."""
        return self.read_pieces((buffer,), offset)

    def read_pieces(self, pieces: Sequence[memoryview], offset: int) -> int:
        """`read_into` for what lies side by side in the file, and not in memory."""
        try:
            return transfer(lambda some, at: os.preadv(self.fd, some, at), pieces, offset)
        except OSError as error:
            raise AdapterLoadError(f"{self.where} cannot be read: {error.strerror}") from error

    def read_all(self) -> bytearray:
        """The whole file, of one moment."""
        data = bytearray(self.size)
        self.read_into(memoryview(data), 0)
        self.check_unchanged(self.stamp)
        return data

    def check_unchanged(self, stamp: Stamp) -> None:
        """Raise AdapterLoadError if the file is not as it was when `stamp` was taken."""
        if _stamp_of(self.fd) != stamp:
            raise AdapterLoadError(f"{self.where} changed while it was read; load it again when it is complete")

    def check_stored(self) -> None:
        """Raise AdapterFileFormatError for a file that is mostly holes: its reader pays for bytes that no disk has."""
        about = os.fstat(self.fd)
        num_stored = about.st_blocks * BLOCK_BYTES  # 0 where the file system does not say
        if about.st_size > SPARSE_BYTES and 0 < num_stored < about.st_size // SPARSE_SHARE:
            text = f"is sparse: {num_stored} of its {about.st_size} bytes are stored; copy the file again"
            raise AdapterFileFormatError(f"{self.where} {text}")

    def _check_inside(self, roots: Roots) -> None:
        """Of the descriptor: between a check of a path and its opening, a directory can become a link."""
        real = self._real_path()
        if not is_inside(real, roots):
            _log.warning("%.200s is refused: it was opened as %r, outside its roots", self.where, str(real))
            raise outside_roots(self.where)

    def _real_path(self) -> Path:
        try:
            return Path(os.readlink(f"/proc/self/fd/{self.fd}"))
        except FileNotFoundError:  # no Linux, or no /proc
            real = Path(os.path.realpath(self.path))
        if not os.path.samestat(os.fstat(self.fd), os.stat(real, follow_symlinks=False)):
            raise AdapterLoadError(f"{self.where} changed while it was opened; load it again")
        return real


def outside_roots(where: str, note: str = "") -> AdapterPathForbiddenError:
    return AdapterPathForbiddenError(
        f"{where} is outside the directories that adapters may be loaded from{note}; "
        "move it there or start the server with --adapter-root DIR"
    )


def is_inside(real: Path, roots: Roots) -> bool:
    """Whether a path without links is one of the roots or lies below one."""
    return roots is None or not {real, *real.parents}.isdisjoint(roots)


def transfer(move: Callable[[list[memoryview], int], int], pieces: Sequence[memoryview], offset: int) -> int:
    """Bytes that `move`, preadv or pwritev of a file, moved: all, unless the file ends before."""
    pending = [piece for piece in reversed(pieces) if len(piece)]
    done, count = 0, -1
    while pending and count != 0:
        count = move(list(islice(reversed(pending), MAX_BUFFERS)), offset + done)
        done += count
        left = count
        while pending and left >= len(pending[-1]):
            left -= len(pending.pop())
        if left:
            pending[-1] = pending[-1][left:]
    return done


def check_size(nbytes: int, max_bytes: int, adapter: str) -> None:
    """Raise AdapterTooLargeError, with both numbers, beyond `max_bytes`."""
    if nbytes > max_bytes:
        raise AdapterTooLargeError(
            f"adapter {adapter!r} has {nbytes} bytes, the host budget for adapters is {max_bytes} bytes; "
            "raise host_memory_bytes or train with a lower rank"
        )


def _stamp_of(fd: int) -> Stamp:
    status = os.fstat(fd)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def sync_path(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(what: str, error: OSError) -> LoraplexError:
    """AdapterDiskFullError where a disk, or the server's share of it, is full."""
    kind = AdapterDiskFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else LoraplexError
    return kind(f"{what} could not be written: {error.strerror or error}")
