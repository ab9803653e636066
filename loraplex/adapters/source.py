"""Where adapters come from: a local directory, a repository of the Hugging Face hub, or an object store.

/path/to/adapter, ./adapter, ~/adapter      a directory, links resolved, inside the allowed roots if there are any
hf://org/name, hf://org/name@revision       the hub
hf://org/name/folder@revision               a folder of a repository
org/name, org/name@revision                 the hub, when no such local directory exists
s3://bucket/prefix                          an object store (object_store.py)

Messages name what was given and a file's name, never where it was found: they go to clients.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from loraplex.adapters.files import AdapterFolder, read_files
from loraplex.adapters.registry import VersionRecord
from loraplex.adapters.regular_file import Roots, is_inside, outside_roots
from loraplex.adapters.remote.fetched import FOLDERS, OBJECTS, FetchedFiles, MakeRoom, check_disk
from loraplex.adapters.remote.fetches import Fetches
from loraplex.adapters.remote.hub import HUB_PREFIX, HubAdapter, HubCache, hub_folder_of, hub_snapshot_of
from loraplex.adapters.remote.object_store import ObjectAdapter, fetch_objects, object_folder_of
from loraplex.errors import AdapterContentChangedError, AdapterPathNotFoundError, shortened, shown

_log = logging.getLogger(__name__)
_narrower: ContextVar[Callable[[], tuple[Path, ...] | None]] = ContextVar("narrower_roots", default=lambda: None)


@contextmanager
def narrowed_to(roots: tuple[Path, ...] | Callable[[], tuple[Path, ...]] | None) -> Iterator[None]:
    """What is fetched from the disk and opened meanwhile lies in these roots of a tenant, too, and not only when the
    path is checked: a directory that a load waits for may become a link. None: as ever. A function that resolves them
    is called once, by the thread that opens first: a root may hang."""
    token = _narrower.set(cache(roots) if callable(roots) else lambda: roots)
    try:
        yield
    finally:
        _narrower.reset(token)


@dataclass(frozen=True)
class AdapterSource:
    """`allowed_roots`, without links: None allows every local path, () none. `hub_cache` None is huggingface_hub's own.

    timeout_s: bounds a fetch. object_folder: of what an object store gave; None is the user's cache. max_object_bytes:
    of one adapter there, or on the hub. make_room: is asked before such a one is downloaded.
    """

    allowed_roots: tuple[Path, ...] | None = None
    hub_cache: Path | None = None
    timeout_s: float = 300.0
    object_folder: Path | None = None
    max_object_bytes: int = 2**34
    make_room: MakeRoom = check_disk
    fetches: Fetches = field(default_factory=Fetches, compare=False)

    def into(self, files: FetchedFiles, make_room: MakeRoom) -> AdapterSource:
        """This source, whose fetches go to a folder of their own."""
        return replace(self, hub_cache=files.folder, object_folder=files.folder / OBJECTS, make_room=make_room)

    def fetch(self, path_or_id: str, revision: str | None = None, called: str = "") -> Path:
        """A local directory with the adapter's files. Raises AdapterPathNotFoundError, AdapterPathForbiddenError,
        AdapterPermissionError, AdapterFetchError, AdapterFetchTimeoutError, AdapterTooLargeError, AdapterNoRoomError.

        called: how messages name the adapter to a client that has not written `path_or_id`; "": as that.
        """
        stored = ObjectAdapter.parse(path_or_id)
        if stored is not None:
            stored = replace(stored, called=called)
            return fetch_objects(
                stored, self.object_folder, self.max_object_bytes, self.timeout_s, self.make_room, self.fetches
            )
        hub = HubAdapter.parse(path_or_id, revision)
        if hub is not None and hub.is_explicit:
            return self._from_hub(replace(hub, called=called))
        if "://" in path_or_id:
            raise AdapterPathNotFoundError(
                f"adapter {shown(path_or_id)}: this kind of source is not supported; give a directory, hf://org/name "
                "or s3://bucket/prefix"
            )
        path = _path_of(path_or_id)
        if hub is not None and not self._is_visible_directory(path):
            return self._from_hub(hub)
        return self._from_disk(path, called or path_or_id)

    def _from_hub(self, adapter: HubAdapter) -> Path:
        root = self.hub_cache
        if root is not None and adapter.folder:  # which comes and goes by itself: a repository may have all of a source
            root = root / FOLDERS / hashlib.sha256(f"{adapter.repo}/{adapter.folder}".encode()).hexdigest()
        return HubCache(root, self.timeout_s, self.max_object_bytes, self.make_room, self.fetches).fetch(adapter)

    def roots_of(self, directory: Path) -> Roots:
        """Where the files of a directory that was fetched must lie each time they are opened.

        One inside no root came from the hub, or was allowed by other roots at an earlier start: it keeps to itself.
        """
        narrower = _narrower.get()()
        if narrower is not None and is_inside(directory, narrower):
            return narrower
        if is_inside(directory, self.allowed_roots):
            return self.allowed_roots
        return (hub_folder_of(directory) or directory,)

    def locate(self, record: VersionRecord, may_fetch: bool) -> str | None:
        """Where the files are of a version that another server loaded: where they were there, as far as this one sees.

        None: they have to be fetched, and may not be now. A commit of the hub is fetched as it was loaded.
        """
        there = Path(record.path)
        if there.is_dir():
            return record.path
        content = object_folder_of(there)
        if content is not None and ObjectAdapter.parse(record.lora_path) is not None:
            return self._locate_objects(record, content) if may_fetch else None
        snapshot = hub_snapshot_of(there)
        hub = None if snapshot is None else HubAdapter.parse(record.lora_path)
        if hub is None or snapshot is None:
            return record.path  # its requests are told that it is missing
        place = f"{HUB_PREFIX}{hub.repo}/{hub.folder}".removesuffix("/")
        return str(self.fetch(place, revision=snapshot.name)) if may_fetch else None

    def _locate_objects(self, record: VersionRecord, content: str) -> str:
        found = self.fetch(record.lora_path)
        if found.name != content:
            text = "its objects have changed since another server loaded it; load it again"
            raise AdapterContentChangedError(f"adapter {shown(record.lora_path)}: {text}")
        return str(found)

    def _from_disk(self, path: Path, given: str) -> Path:
        directory = self._resolved(path, given)
        folder = AdapterFolder(directory, shortened(given))
        folder.check()
        for file in read_files(folder):
            self._resolved(file, given)
        return directory

    def _resolved(self, path: Path, given: str) -> Path:
        try:
            real = path.resolve()
            if self.allowed_roots is not None:  # a server, whose engine and journal take UTF-8 alone
                str(real).encode()
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL, no UTF-8
            raise AdapterPathNotFoundError(f"adapter {shown(given)}: no such directory") from error
        if not self._is_inside(real):
            _log.info("adapter %.200r is refused: it leads outside %s", given, _narrower.get()() or self.allowed_roots)
            raise outside_roots(f"adapter {shown(given)}", "" if self.allowed_roots else " (none is allowed)")
        return real

    def _is_visible_directory(self, path: Path) -> bool:
        try:
            return self._is_inside(path.resolve()) and path.is_dir()
        except (OSError, RuntimeError, ValueError):
            return False

    def _is_inside(self, real: Path) -> bool:
        return is_inside(real, self.allowed_roots) and is_inside(real, _narrower.get()())


def _path_of(given: str) -> Path:
    with suppress(RuntimeError):  # ~name of an unknown user
        if given:
            return Path(given).expanduser()
    raise AdapterPathNotFoundError(f"adapter {shown(given)}: no such directory; give a directory or a hub id")
