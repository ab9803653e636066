"""Files that requests had fetched from the hub and from object stores: a folder of this server alone, bounded in bytes.

DIR/models--ORG--REPO/       a repository of the hub, as its library keeps it: what was fetched of it
DIR/folders/HASH/            the same of one folder of a repository
DIR/objects/PREFIX/LIST/     what a store had below a prefix

Each of these is a place. A fetch makes room for all that it will download before the first byte: places go, the one
that was loaded first before others, unless a registered version or a load that runs needs them. Where that is not
enough, idle names leave whose files lie here, if it fits without all of them. DIR is `fetched` in the state directory,
else a temporary folder.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from loraplex.adapters.merging.part_folder import temporary_folder
from loraplex.errors import (
    AdapterFetchError,
    AdapterFetchTimeoutError,
    AdapterNoRoomError,
    AdapterTooLargeError,
    ConfigError,
    LoraplexError,
)
from loraplex.private_folder import private_folder

FOLDER_NAME, FOLDERS, OBJECTS = "fetched", "folders", "objects"
_NUM_PARTS = {FOLDERS: 2, OBJECTS: 3}
"""Of the path of a place."""

LOCKS = ".locks"
PART_PREFIX = ".part-"
"""Of a fetch that runs, beside the lists of its prefix."""

MAX_FETCHED_BYTES = 2**36
SPARE_DISK_BYTES = 2**26
"""Stay free: others write to the same disk."""

_log = logging.getLogger(__name__)

MakeRoom = Callable[[object, Path, int], None]
"""Of an adapter (as messages call it) whose files will lie in a directory, and of which so many bytes are missing.
Raises AdapterFetchError, AdapterNoRoomError, AdapterTooLargeError."""

Evict = Callable[[Callable[[str], bool], Callable[[Iterable[str]], bool]], bool]
"""Unload an idle name whose files lie in a directory to which the first function says yes, if the second one does to
those that are used still when all idle names have left. Whether there was one."""


def check_disk(adapter: object, directory: Path, nbytes: int) -> None:
    """A `MakeRoom` that removes nothing."""
    folder = next(each for each in (directory, *directory.parents) if each.exists())
    free = shutil.disk_usage(folder).free
    if nbytes and nbytes + SPARE_DISK_BYTES > free:
        _log.warning("%s has %d bytes, and the disk of %s has %d bytes left", adapter, nbytes, folder, free)
        text = "and the disk of this server has no room for them (see its log)"  # how full it is, is the operator's
        raise AdapterFetchError(f"{adapter} has {nbytes} bytes, {text}")


class FetchedFiles:
    """Thread-safe. folder: None is a temporary one, made with the first fetch. max_bytes: of all places together."""

    def __init__(self, folder: Path | None = None, max_bytes: int = MAX_FETCHED_BYTES) -> None:
        self.max_bytes = max_bytes
        self._given = folder
        self._folder: Path | None = None
        self._at_end = ExitStack()
        self._lock = threading.RLock()  # of the books; nothing waits under it
        self._sizes: dict[Path, int] = {}
        self._coming: Counter[Path] = Counter()
        self._num_loads: Counter[Path] = Counter()

    @property
    def folder(self) -> Path:
        """Made if need be. Raises AdapterFetchError."""
        with self._lock:
            if self._folder is None:
                folder = self._made()
                for left in folder.glob(f"{OBJECTS}/*/{PART_PREFIX}*"):  # by a server that was killed
                    shutil.rmtree(left, ignore_errors=True)
                shutil.rmtree(folder / LOCKS, ignore_errors=True)
                found = (*folder.glob("models--*"), *folder.glob(f"{FOLDERS}/*"), *folder.glob(f"{OBJECTS}/*/[!.]*"))
                self._sizes = {place: _size_of(place) for place in found}
                self._folder = folder
            return self._folder

    @property
    def num_bytes(self) -> int:
        """Of what is there and of what is coming."""
        with self._lock:
            return sum(self._sizes.values()) + self._coming.total()

    def bytes_of(self, paths: Iterable[str]) -> int:
        """Of the places that these directories lie in, each once."""
        with self._lock:
            places = {self._place_of(Path(each)) for each in paths}
            return sum(size for place, size in self._sizes.items() if place in places)

    @contextmanager
    def loading(self, used: Callable[[], Iterable[str]], evict: Evict) -> Iterator[MakeRoom]:
        """Around a load, until a version has what it fetches. used: the directories of registered versions."""
        coming: Counter[Path] = Counter()
        is_over = False

        def check_goes_on(adapter: object) -> None:
            if is_over:  # its fetch goes on in a thread that cannot be ended
                raise AdapterFetchTimeoutError(f"{adapter}: its load was given up")

        def make_room(adapter: object, directory: Path, nbytes: int) -> None:
            place, taken = self._place_of(directory), 0
            with self._lock:
                check_goes_on(adapter)
                if place is not None:
                    if not self._num_loads[place]:  # less may have come than a load that failed was to bring
                        self._sizes[place] = _size_of(place)
                    self._num_loads[place] += place not in coming
                    coming[place] += 0
            if place is None:
                return check_disk(adapter, directory, nbytes)

            def take(is_last_try: bool) -> int:
                """How many of `nbytes` have no room; what has some stays taken, unless the last try finds no more."""
                nonlocal taken
                with self._lock:
                    check_goes_on(adapter)
                    num_more = min(nbytes - taken, self._free(nbytes - taken, used))
                    if taken + num_more < nbytes and is_last_try:
                        num_more = -taken
                    taken += num_more
                    coming[place] += num_more
                    self._coming[place] += num_more
                    return nbytes - taken

            try:
                self._make_room(adapter, nbytes, take, evict)
                with self._lock:
                    check_goes_on(adapter)
                    check_disk(adapter, directory, self._coming.total() if nbytes else 0)
            except LoraplexError:
                with self._lock:
                    if not is_over:
                        coming[place] -= taken
                        self._coming[place] -= taken
                raise

        has_loaded = False
        try:
            yield make_room
            has_loaded = True
        finally:
            with self._lock:
                is_over = True
                for place, nbytes in coming.items():
                    self._end(place, nbytes, has_loaded)

    def close(self) -> None:
        """Remove a temporary folder."""
        self._at_end.close()

    def _made(self) -> Path:
        try:
            if self._given is None:
                return temporary_folder(FOLDER_NAME, self._at_end)
            remedy = "give another --state-dir"
            if self._given.is_symlink():
                text = "what is in there may be another's, and fetched adapters are removed: link the state directory"
                raise ConfigError(f"the folder of fetched adapters {self._given} is a link: {text} itself")
            return private_folder(self._given, "the folder of fetched adapters", remedy).resolve()
        except (OSError, ConfigError) as error:
            _log.error("the folder of fetched adapters cannot be used: %s", error)
            raise AdapterFetchError("this server has no folder for adapters that are fetched (see its log)") from None

    def _end(self, place: Path, nbytes: int, has_loaded: bool) -> None:
        self._coming[place] -= nbytes
        self._num_loads[place] -= 1
        self._sizes[place] = self._sizes.get(place, 0) + nbytes
        if self._num_loads[place]:
            return
        del self._num_loads[place], self._coming[place]
        if not place.is_dir():
            _remove(place)
            del self._sizes[place]
            return
        os.utime(place)
        size = _size_of(place)
        self._sizes[place] = size if has_loaded else max(size, self._sizes[place])  # the rest of it may come yet

    def _make_room(self, adapter: object, nbytes: int, take: Callable[[bool], int], evict: Evict) -> None:
        """Under no lock. take: of `loading`."""
        if nbytes > self.max_bytes:
            text = f"and all that requests fetch together may have {self.max_bytes} (--max-fetched-bytes)"
            raise AdapterTooLargeError(f"{adapter} has {nbytes} bytes, {text}")
        while missing := take(False):
            if not evict(self._is_here, partial(self._can_fit, missing)) and take(True):
                text = f"requests have fetched as many bytes as they may ({self.max_bytes}), and all are in use"
                raise AdapterNoRoomError(f"{adapter} is not fetched: {text}; try again later")

    def _free(self, wanted: int, used: Callable[[], Iterable[str]]) -> int:
        """How many bytes are free. Of what nothing uses as much goes as has to. The caller has the lock."""
        if self.num_bytes + wanted > self.max_bytes:
            for place in sorted(self._unused(used()), key=_time_of):
                _remove(place)
                del self._sizes[place]
                if self.num_bytes + wanted <= self.max_bytes:
                    break
        return max(0, self.max_bytes - self.num_bytes)

    def _can_fit(self, nbytes: int, used_still: Iterable[str]) -> bool:
        with self._lock:
            unused_bytes = sum(self._sizes[each] for each in self._unused(used_still))
            return self.num_bytes - unused_bytes + nbytes <= self.max_bytes

    def _unused(self, used: Iterable[str]) -> list[Path]:
        """Places that may go. The caller has the lock."""
        kept = {self._place_of(Path(each)) for each in used}
        return [each for each in self._sizes if each not in kept and not self._num_loads[each]]

    def _is_here(self, path: str) -> bool:
        return path.startswith(f"{self._folder}{os.sep}")

    def _place_of(self, directory: Path) -> Path | None:
        """None: it lies elsewhere."""
        if self._folder is None or not directory.is_relative_to(self._folder):
            return None
        parts = directory.relative_to(self._folder).parts
        return self._folder.joinpath(*parts[: _NUM_PARTS.get(parts[0], 1) if parts else 0])


def _remove(place: Path) -> None:
    """With the files by which the hub's library locks what it writes there: it removes none."""
    for each in (place, place.parent / LOCKS / place.name):
        shutil.rmtree(each, ignore_errors=True)


def _size_of(place: Path) -> int:
    """Of its files; links are none."""
    return sum(
        os.lstat(os.path.join(folder, name)).st_size
        for folder, _, names in os.walk(place)
        for name in names
        if not os.path.islink(os.path.join(folder, name))
    )


def _time_of(place: Path) -> float:
    try:
        return place.stat().st_mtime
    except OSError:
        return 0.0
