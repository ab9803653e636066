"""Packed adapters on disk, by content: what leaves host memory, or a process, comes back without its source.

    folder / form / digest.lora      form := a hash of what decides how an adapter is packed: forms never mix

Behind the digest of an adapter with packed norms of the base's rows stands a hash that names the base's weights. They
decide its bytes and no other adapter's: a checkpoint that is written again leaves the others where they are.

Any number of processes may share the folder: a file appears whole by a rename, one that is deleted stays readable for
who has it open, and each process keeps the folder within its own byte budget by deleting files, its own or not: of
tenants beyond their share the least recently used (disk_books.py). What others do is noticed at the next look
(RESCAN_S), so that until then the folder may hold more than its budget. A file that is not what was written is deleted.
Nothing here raises OSError: a disk that is full, read-only or gone means a cache that holds nothing.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import hashlib
import itertools
import logging
import math
import os
import re
import secrets
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from loraplex.kernels.checksum import Checksums, checksums
from loraplex.memory.weights.disk_books import OPERATOR, DiskBooks
from loraplex.memory.weights.disk_file import (
    IDENTITY_BYTES,
    DamagedFileError,
    Header,
    encode_header,
    opened,
    parse_layout,
    read_extents,
    read_header,
    write_file,
)
from loraplex.memory.weights.packing import PackedLayout

logger = logging.getLogger(__name__)

MAX_FULLNESS = 0.95
"""Of the disk: the cache does not fill it further than this."""

RESCAN_S = 10.0
"""After this long a write looks at the folder again: what other processes wrote, used and deleted."""

TOUCH_S = 60.0
"""A file's time of use is written to disk at most this often."""

UNFINISHED_S = 60.0
"""A file whose writer died is deleted when it is this old."""

COMPLAINT_S = 60.0
"""One complaint about a disk that does not work is logged in this time."""

MAX_TOUCHED = 1 << 14
"""Times of use that are remembered for that."""

MAX_LAYOUTS = 64
"""Parsed layouts kept: adapters of one rank on the same targets have equal ones."""

_DIGEST = re.compile(r"[0-9a-f]{1,144}")
_FORM = re.compile(r"[0-9a-f]{16}")
_FILE = re.compile(r"[0-9a-f]{1,144}\.lora")
_UNFINISHED = re.compile(r"[0-9a-f]{1,144}\.[0-9a-f]{16}\.tmp")


class DiskRead(enum.Enum):
    """What came of reading a file: the extents are there; there is no file; it was damaged and is deleted."""

    DONE = "done"
    MISSING = "missing"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """What a file says of an adapter: where its blocks lie, and the checksum of each extent."""

    layout: PackedLayout
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DiskStats:
    """used_bytes, num_files: of the whole folder at the last look, all forms; the rest counts what this process did.

    hits: extents read; misses: no file; refused: not written, for lack of room or because the disk did not let it.
    """

    used_bytes: int
    max_bytes: int
    num_files: int
    num_hits: int = 0
    num_misses: int = 0
    num_writes: int = 0
    num_refused: int = 0
    num_evictions: int = 0
    num_damaged: int = 0


class DiskCache:
    """The files of one form. Thread-safe; data is read and written without a lock.

    form: names all that decides how an adapter is packed; weights_name: the base's weights (Packer.weights_name).
    check_layout: raises ValueError for a layout that is not one of this model's (Packer.check_layout). clock: seconds.
    checksums: of extents on the host. A digest is a lower-case hexadecimal number; another is a ValueError.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        form: str,
        check_layout: Callable[[PackedLayout], None],
        clock: Callable[[], float] = time.monotonic,
        checksums: Checksums = checksums,
        weights_name: str = "",
    ) -> None:
        self._folder = folder
        self._form = form
        self._of_weights = hashlib.blake2b(weights_name.encode(), digest_size=8).hexdigest()
        self._own_folder = folder / hashlib.blake2b(form.encode(), digest_size=8).hexdigest()
        self._check_layout = check_layout
        self._checksums = checksums
        self._clock = clock
        self._lock = threading.RLock()
        self._layouts: dict[bytes, PackedLayout] = {}
        self._touched: dict[str, float] = {}
        self._next_complaint_s = -math.inf
        self._max_bytes = max_bytes
        self._counts: Counter[str] = Counter()  # of DiskStats
        self._books = DiskBooks()
        self._tenants_of: dict[str, frozenset[str]] = {}  # by digest; the operator's alone are not there
        self._changed: set[str] = set()  # digests of files that are others' than the books say
        self._reserved_bytes = 0
        self._scanned_s = 0.0
        self._rescan()

    def has(self, digest: str) -> bool:
        """Whether there is a file; whether it is good shows when it is read."""
        return self._is_file(self._found(digest))

    def lists(self, digest: str) -> bool:
        """As `has`, without a look at the disk for a file that is in the books: a list asks of many, between two steps.
        One that another process deleted is there until the next look."""
        names = (self._normed(digest), digest)
        return bool(self._listed(digest)) or any(map(self._is_file, names))

    def read_layout(self, digest: str, on_damage: Callable[[], None] = lambda: None) -> StoredLayout | None:
        """None when there is no good file; one that is damaged is deleted, and then `on_damage` is called."""
        stored: list[StoredLayout] = []

        def read(fd: int, header: Header) -> None:
            stored.append(StoredLayout(self._layout_of(header), header.checksums))

        outcome = self._read(self._found(digest), read)
        if outcome is DiskRead.DAMAGED:
            on_damage()
        return stored[0] if outcome is DiskRead.DONE else None

    def read_into(self, digest: str, views: Sequence[torch.Tensor]) -> DiskRead:
        """Fill the extents and compare their checksums. Unless DONE, what `views` hold then is undefined."""

        def read(fd: int, header: Header) -> None:
            sizes = self._layout_of(header).sizes
            if sizes != tuple(view.numel() for view in views):
                raise DamagedFileError(f"its extents of {sizes} bytes are not those of the adapter")
            read_extents(fd, header, views, self._checksums)

        outcome = self._read(self._found(digest), read)
        if outcome is DiskRead.DONE:
            self._count("num_hits")
            self.touch(digest)
        return outcome

    def write(self, digest: str, layout: PackedLayout, views: Sequence[torch.Tensor], checksums: Sequence[int]) -> bool:
        """Whether the file is there now. `views` are the extents' memory on the host, not written meanwhile."""
        if self.has(digest):
            self.touch(digest)
            return True
        name = self._normed(digest) if layout.depends_on_base else digest
        is_written = False
        try:
            for folder in (self._folder, self._own_folder):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._own_folder.is_symlink():
                raise NotADirectoryError(f"{self._own_folder} is a symbolic link")
            is_written = self._write(self._file(name), encode_header(self._identity(name), layout, checksums), views)
        except OSError as error:
            self._complain(error)
        self._count("num_writes" if is_written else "num_refused")
        return is_written

    def touch(self, digest: str) -> None:
        """Used now: the last to be deleted for room."""
        now_s, name = self._clock(), self._found(digest)
        with self._lock:
            if now_s - self._touched.get(name, -TOUCH_S) < TOUCH_S:
                return
            if len(self._touched) >= MAX_TOUCHED:
                self._touched.clear()
            self._touched[name] = now_s
        now_ns = time.time_ns()
        with suppress(OSError):
            os.utime(self._file(name), ns=(now_ns, now_ns), follow_symlinks=False)

    def drop(self, digest: str) -> bool:
        """Whether there was a file."""
        name = self._found(digest)
        file = self._file(name)
        with self._lock:
            self._touched.pop(name, None)
            try:
                file.unlink()
            except OSError:
                return False
            self._books.forget(str(file))
            return True

    def assign(self, digest: str, tenants: frozenset[str]) -> None:
        """Adapters of these have the content now; it is the operator's where none has. Waits for no lock and no disk:
        the next write regards it."""
        tenants = tenants or OPERATOR
        if tenants == self._tenants_of.get(digest, OPERATOR):
            return
        if tenants == OPERATOR:
            del self._tenants_of[digest]
        else:
            self._tenants_of[digest] = tenants
        if self._listed(digest):
            self._changed.add(digest)

    def stats(self) -> DiskStats:
        with self._lock:
            return DiskStats(self._books.used_bytes, self._max_bytes, len(self._books.files), **self._counts)

    def check_integrity(self) -> None:
        """AssertionError unless the books say what is on the disk; while no process writes here or there."""
        with self._lock:
            found = {path: status.st_size for path, status in self._walk()}
            assert self._reserved_bytes == 0, f"{self._reserved_bytes} bytes are reserved for no write"
            self._books.check_integrity(found)

    # --------------------------------------------------------------------------------------------------------- one file

    def _found(self, digest: str) -> str:
        """The name of the adapter's file; that of a plain adapter when there is none."""
        normed = self._normed(digest)
        return normed if self._is_file(normed) else digest

    def _normed(self, digest: str) -> str:
        return digest + self._of_weights

    def _is_file(self, name: str) -> bool:
        try:
            return stat.S_ISREG(os.lstat(self._file(name)).st_mode)
        except OSError:
            return False

    def _listed(self, digest: str) -> list[str]:
        """The paths of its files that are in the books."""
        paths = [str(self._file(name)) for name in (self._normed(digest), digest)]
        return [path for path in paths if path in self._books.files]

    def _file(self, name: str) -> Path:
        if not _DIGEST.fullmatch(name):
            raise ValueError(f"the digest of an adapter must be a lower-case hexadecimal number, got {name!r}")
        return self._own_folder / f"{name}.lora"

    def _identity(self, name: str) -> bytes:
        return hashlib.blake2b(f"{name}\n{self._form}".encode(), digest_size=IDENTITY_BYTES).digest()

    def _read(self, name: str, read: Callable[[int, Header], None]) -> DiskRead:
        try:
            with opened(self._file(name)) as fd:
                read(fd, read_header(fd, self._identity(name)))
        except DamagedFileError as error:
            return self._discard(name, error)
        except OSError as error:
            if error.errno == errno.EIO:
                return self._discard(name, error)
            if not isinstance(error, FileNotFoundError):
                self._complain(error)
            self._count("num_misses")
            return DiskRead.MISSING
        return DiskRead.DONE

    def _discard(self, name: str, error: Exception) -> DiskRead:
        logger.warning("%s is damaged and is deleted: %s", self._file(name), error)
        self.drop(name)
        self._count("num_damaged")
        return DiskRead.DAMAGED

    def _layout_of(self, header: Header) -> PackedLayout:
        """Raises DamagedFileError for a layout that is not one of this model's."""
        with self._lock:
            layout = self._layouts.get(header.layout_text)
        if layout is None:
            layout = parse_layout(header.layout_text)
            try:
                self._check_layout(layout)
            except ValueError as error:
                raise DamagedFileError(str(error)) from error
        header.check(layout)
        with self._lock:
            if len(self._layouts) >= MAX_LAYOUTS and header.layout_text not in self._layouts:
                self._layouts.clear()
            return self._layouts.setdefault(header.layout_text, layout)

    def _write(self, file: Path, header: bytes, views: Sequence[torch.Tensor]) -> bool:
        """False for lack of room. Raises OSError, and leaves nothing."""
        nbytes = len(header) + sum(view.numel() for view in views)
        if not self._reserve(nbytes, self._tenants_at(str(file))):
            text = f"no room for {nbytes} bytes within the budget and {MAX_FULLNESS:.0%} of the disk"
            self._complain(OSError(errno.ENOSPC, text))
            return False
        is_written = False
        try:
            _write_whole(file, header, views)
            is_written = True
        finally:
            with self._lock:
                self._reserved_bytes -= nbytes
                if is_written:
                    self._enter(str(file), nbytes, time.time_ns())
        return True

    # ------------------------------------------------------------------------------------------------------- the budget

    def _reserve(self, nbytes: int, tenants: frozenset[str]) -> bool:
        """Room for a file of these tenants, for which others go; False when that is not enough. Raises OSError."""
        with self._lock:
            if self._clock() - self._scanned_s >= RESCAN_S:
                self._rescan()
            self._regroup()
            used_bytes = self._books.used_bytes + self._reserved_bytes
            most_bytes = min(self._max_bytes, used_bytes + self._free_disk_bytes())
            lack = used_bytes + nbytes - most_bytes
            if lack > self._books.used_bytes:
                return False
            while lack > 0 and (found := self._books.pop_next(tenants, nbytes, most_bytes)) is not None:
                lack -= self._evict(*found)
            if lack > 0:
                return False
            self._reserved_bytes += nbytes
            return True

    def _evict(self, seen_ns: int, path: str) -> int:
        """Bytes that are free now; 0 when it was used meanwhile, or cannot be deleted."""
        try:
            status = os.lstat(path)
            if status.st_mtime_ns > seen_ns:
                self._enter(path, status.st_size, status.st_mtime_ns)
                return 0
            os.unlink(path)
            self._count("num_evictions")
        except FileNotFoundError:
            pass  # another process deleted it
        except OSError as error:
            self._complain(error)
            return 0
        return self._books.forget(path)

    def _free_disk_bytes(self) -> int:
        """Until the disk is as full as it may be. Raises OSError."""
        disk = os.statvfs(self._folder)
        return int((disk.f_bavail - (1 - MAX_FULLNESS) * disk.f_blocks) * disk.f_frsize)

    def _enter(self, path: str, nbytes: int, mtime_ns: int) -> None:
        self._books.enter(path, nbytes, mtime_ns, self._tenants_at(path))

    def _tenants_at(self, path: str) -> frozenset[str]:
        """Of a file; a file of another form is the operator's."""
        folder, _, name = path.rpartition("/")
        if not self._tenants_of or folder != str(self._own_folder):
            return OPERATOR
        digest = name.removesuffix(".lora")
        found = self._tenants_of.get(digest) or self._tenants_of.get(digest.removesuffix(self._of_weights))
        return found or OPERATOR

    def _regroup(self) -> None:
        while self._changed:
            for path in self._listed(self._changed.pop()):
                entry = self._books.files[path]
                self._enter(path, entry.nbytes, entry.mtime_ns)

    def _rescan(self) -> None:
        self._scanned_s = self._clock()
        self._books = DiskBooks()
        for path, status in self._walk():
            self._enter(path, status.st_size, status.st_mtime_ns)

    def _walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """The files of every form; what dead processes left is deleted on the way, what is not ours is passed over."""
        forms = (form for form in _entries(self._folder, stat.S_ISDIR) if _FORM.fullmatch(form[0].name))
        for entry, status in itertools.chain.from_iterable(_entries(form.path, stat.S_ISREG) for form, _ in forms):
            if _FILE.fullmatch(entry.name):
                yield entry.path, status
            elif _UNFINISHED.fullmatch(entry.name) and time.time() - status.st_mtime > UNFINISHED_S:
                _delete_abandoned(entry.path)

    # ------------------------------------------------------------------------------------------------------------ books

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _complain(self, error: OSError) -> None:
        text = "the disk cache in %s does not work, adapters are read from their sources: %s"
        with self._lock:
            if self._clock() >= self._next_complaint_s:
                self._next_complaint_s = self._clock() + COMPLAINT_S
                logger.warning(text, self._folder, error)


def _write_whole(file: Path, header: bytes, views: Sequence[torch.Tensor]) -> None:
    """Under a name of its own first. Raises OSError, and leaves nothing."""
    unfinished = file.with_suffix(f".{secrets.token_hex(8)}.tmp")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # a file system without locks: what dead processes leave there is not swept
            fcntl.flock(fd, fcntl.LOCK_EX)
        write_file(fd, header, views)
        now_ns = time.time_ns()
        os.utime(fd, ns=(now_ns, now_ns))
        unfinished.rename(file)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise
    finally:
        os.close(fd)


def _entries(folder: Path | str, is_meant: Callable[[int], bool]) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Those of one kind, links not followed; empty when there is no such folder, or it may not be read."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # it may vanish at any moment
                status = entry.stat(follow_symlinks=False)
                if is_meant(status.st_mode):
                    yield entry, status


def _delete_abandoned(path: str) -> None:
    """Delete an unfinished file that is no longer written: its writer's lock ends with the process, in any
    container."""
    with suppress(OSError), opened(Path(path)) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
