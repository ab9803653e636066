"""Files of adapters that clients send: received beside what is served, and there whole or not at all. No torch.

DIR/.receiving-xxxxxxxx/   files that come; removed when the server starts
DIR/DIGEST-xxxxxxxx/       an adapter's directory, from `keep` to `remove`: a folder of its own for each upload

    store.receive() -> Upload     write(name, data) ... -> keep() -> the directory, or discard()
    store.sweep(paths)            at the start: what no registered version has goes
    store.remove(path)            when the last version that has it was dropped

DIR is `uploads` in the state directory, whose server owns it alone; what is kept is on the disk before `keep` returns.
Without a state directory it is a temporary folder, which goes with the process: its lock tells the next process.
Of all uploads together there are at most `total_bytes` on the disk, those that come included. A tenant's are no more
than what stays free beside them, so that another one finds room.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from loraplex.adapters.merging.part_folder import temporary_folder
from loraplex.adapters.regular_file import sync_path, unwritable
from loraplex.errors import (
    AdapterDiskFullError,
    AdapterTooLargeError,
    ConfigError,
    RequestAbortedError,
)
from loraplex.private_folder import private_folder

_log = logging.getLogger(__name__)

FOLDER_NAME = "uploads"
UPLOAD_PREFIX = "upload://"
"""What stands for the source of an uploaded version, before its digest: no path, so that nothing is fetched from it."""

RECEIVING = ".receiving-"
_OWN_NAME = re.compile(r"(?:\.receiving|[0-9a-f]+)-[0-9a-f]{8}")
SPARE_DISK_BYTES = 64 * 2**20
"""Stay free: others write to the same disk."""

MAX_UPLOAD_BYTES, MAX_STORED_BYTES = 2**30, 2**35
FILE_MODE = 0o600


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Bytes: of one upload, and of all that are kept or come."""

    max_bytes: int = MAX_UPLOAD_BYTES
    total_bytes: int = MAX_STORED_BYTES


DEFAULT_LIMITS = UploadLimits()


class UploadStore:
    """Thread-safe. folder: None is a temporary one, made with the first upload."""

    def __init__(self, folder: Path | None, limits: UploadLimits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        self.is_durable = folder is not None
        self._folder = folder
        self._at_end = ExitStack()
        self._lock = threading.Lock()
        self._sizes: dict[Path, int] = {}
        self._tenants: dict[Path, str] = {}

    @property
    def num_bytes(self) -> int:
        """Of all uploads that are kept or come."""
        with self._lock:
            return sum(self._sizes.values())

    def size_of(self, path: str) -> int:
        """Bytes of the files of one; 0: it is not here."""
        with self._lock:
            return self._sizes.get(Path(path), 0)

    def receive(self, tenant: str = "") -> Upload:
        """Begin one. Raises LoraplexError for a folder that cannot be written to."""
        try:
            part = self._made() / f"{RECEIVING}{secrets.token_hex(4)}"
            part.mkdir(mode=0o700)
        except OSError as error:
            raise unwritable("an upload", error) from error
        with self._lock:
            self._sizes[part], self._tenants[part] = 0, tenant
        return Upload(self, part)

    def has(self, path: str) -> bool:
        """Whether a directory is one of this store's."""
        return self._folder is not None and Path(path).parent == self._folder

    def sweep(self, used: Mapping[str, str]) -> None:
        """Remove what an earlier process left, but for these directories, and count those of each tenant. The state
        directory may have been called by another path then.

        Only what has a name of this store's goes: the folder may hold another's files. Raises ConfigError for a link
        in its place.
        """
        if self._folder is None or not self._folder.is_dir():
            return
        if self._folder.is_symlink():
            text = "what is in there may be another's, and uploads are removed: link the state directory itself"
            raise ConfigError(f"the folder of uploads {self._folder} is a link: {text}")
        kept, num_others = {Path(each).name: tenant for each, tenant in used.items()}, 0
        for path in self._folder.iterdir():
            if path.is_symlink() or not path.is_dir() or not _OWN_NAME.fullmatch(path.name):
                num_others += 1
            elif path.name in kept:
                with self._lock:
                    self._sizes[path] = sum(each.stat().st_size for each in path.iterdir())
                    self._tenants[path] = kept[path.name]
            else:
                shutil.rmtree(path, ignore_errors=True)
        if num_others:
            _log.warning("%d entries of %s are no uploads of this server, and stay there", num_others, self._folder)

    def remove(self, path: str | Path) -> None:
        """A directory of this store; others are left alone."""
        if self.has(str(path)):
            shutil.rmtree(path, ignore_errors=True)
            self._drop(Path(path))

    def close(self) -> None:
        """Remove a temporary folder."""
        self._at_end.close()

    def _made(self) -> Path:
        with self._lock:
            if self._folder is None:
                self._folder = temporary_folder(FOLDER_NAME, self._at_end)
            elif self.is_durable and not self._folder.is_dir():
                self._folder = private_folder(self._folder, "the folder of uploads", "give another --state-dir")
            return self._folder

    def _take(self, part: Path, num_bytes: int) -> None:
        """Count bytes that come. Raises AdapterTooLargeError, AdapterDiskFullError."""
        with self._lock:
            nbytes, total = self._sizes[part] + num_bytes, sum(self._sizes.values()) + num_bytes
            tenant, free = self._tenants[part], self.limits.total_bytes - total
            if nbytes > self.limits.max_bytes:
                text = f"the upload is longer than {self.limits.max_bytes} bytes (--max-upload-bytes)"
                raise AdapterTooLargeError(text)
            if total > self.limits.total_bytes:
                raise AdapterDiskFullError(
                    f"the folder of uploads is full: with this one {total} bytes, and it may have "
                    f"{self.limits.total_bytes} (--max-stored-upload-bytes); unload an adapter that was uploaded"
                )
            own = num_bytes + sum(size for each, size in self._sizes.items() if self._tenants[each] == tenant)
            if tenant and own > free:
                raise AdapterDiskFullError(
                    f"with this one the uploads of tenant {tenant!r} have {own} bytes, and {free} stay free"
                )
            self._sizes[part] = nbytes

    def _rename(self, part: Path, folder: Path) -> None:
        part.rename(folder)
        with self._lock:
            self._sizes[folder], self._tenants[folder] = self._sizes.pop(part), self._tenants.pop(part)

    def _forget(self, part: Path) -> None:
        shutil.rmtree(part, ignore_errors=True)
        self._drop(part)

    def _drop(self, path: Path) -> None:
        with self._lock:
            self._sizes.pop(path, None)
            self._tenants.pop(path, None)


class Upload:
    """The files of one adapter while they come. `folder`: where they are now. Its methods may run in any thread."""

    def __init__(self, store: UploadStore, part: Path) -> None:
        self._store = store
        self.folder = part
        self._files: dict[str, int] = {}
        self._hashes: dict[str, hashlib._Hash] = {}
        self._lock = threading.Lock()  # a caller that goes away abandons it while another thread writes
        self._is_taken = self._is_over = False

    def write(self, name: str, data: bytes | bytearray | memoryview) -> None:
        """More of a file, of which a caller chose the name and no client. Raises AdapterTooLargeError,
        AdapterDiskFullError, and LoraplexError for a disk that fails."""
        with self._lock:
            if self._is_over:
                raise RequestAbortedError("the upload was given up by its client")
            try:
                self._check_disk(len(data))
                if name not in self._files:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                    self._files[name] = os.open(self.folder / name, flags, FILE_MODE)
                    self._hashes[name] = hashlib.sha256()
                self._store._take(self.folder, len(data))
                self._hashes[name].update(data)
                left = memoryview(data)
                while left:
                    left = left[os.write(self._files[name], left) :]
            except OSError as error:
                raise unwritable("an upload", error) from error

    def has(self, name: str) -> bool:
        """Whether anything of a file came."""
        return name in self._hashes

    def sha256(self, name: str) -> str:
        """Of what came of a file, in hexadecimal digits."""
        if name not in self._hashes:
            return hashlib.sha256().hexdigest()
        return self._hashes[name].hexdigest()

    def keep(self, digest: str) -> Path:
        """The directory under its last name, which begins with `digest`: hexadecimal digits. Raises LoraplexError."""
        folder = self.folder.parent / f"{digest}-{secrets.token_hex(4)}"
        try:
            self._close(is_synced=self._store.is_durable)
            if self._store.is_durable:
                sync_path(self.folder)
            self._store._rename(self.folder, folder)
            self.folder = folder
            if self._store.is_durable:
                sync_path(folder.parent)
        except OSError as error:
            raise unwritable("an upload", error) from error
        return folder

    def take(self) -> None:
        """All has come: from now on it is for the caller to keep or discard. Raises RequestAbortedError when it was
        abandoned before."""
        with self._lock:
            if self._is_over:
                raise RequestAbortedError("the upload was given up by its client")
            self._is_taken = True

    def abandon(self) -> None:
        """Remove what came, unless it was taken."""
        with self._lock:
            is_over = self._is_over = self._is_over or not self._is_taken
        if is_over:
            self.discard()

    def discard(self) -> None:
        """Remove what came, kept or not."""
        with self._lock:
            self._is_over = True
            self._close(is_synced=False)
            self._store._forget(self.folder)

    def _close(self, is_synced: bool) -> None:
        while self._files:
            _, descriptor = self._files.popitem()
            try:
                if is_synced:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _check_disk(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.folder).free - num_bytes
        if free < SPARE_DISK_BYTES:
            text = f"{free} bytes are free, of which {SPARE_DISK_BYTES} stay free"
            raise AdapterDiskFullError(f"the disk of the folder of uploads is too full: {text}; make room on it")
