"""Adapters of the Hugging Face hub, by `huggingface_hub` (imported when the first hub id is given).

A hub id is checked in one place, `HubAdapter.parse`, before the library or the disk sees it: the library joins the name
and the revision to paths of its cache. The hub is asked for the commit, then once for what lies directly beside the
adapter's configuration, names and sizes; what a load reads of it is counted, and then downloaded as that commit has it.
All of it must lie in the library's cache, and so must every file that a load reads, links resolved.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from loraplex.adapters.files import CONFIG_NAME, AdapterFolder, read_files
from loraplex.adapters.regular_file import RegularFile
from loraplex.adapters.remote.fetched import MakeRoom, check_disk
from loraplex.adapters.remote.fetches import Fetches
from loraplex.adapters.remote.hub_client import HubFetch, guard_client
from loraplex.adapters.remote.wanted import MAX_FILES, check_sizes, wanted_names
from loraplex.errors import (
    AdapterConfigMissingError,
    AdapterFetchError,
    AdapterFetchTimeoutError,
    AdapterFileFormatError,
    AdapterLoadError,
    AdapterPathForbiddenError,
    AdapterPathNotFoundError,
    AdapterPermissionError,
    AdapterWeightsMissingError,
    LoraplexError,
    shown,
)

HUB_PREFIX = "hf://"
REQUEST_TIMEOUT_S = 10.0

_SHARD = re.compile(r"adapter_model-[A-Za-z0-9_.-]{1,100}\.safetensors")
_COMMIT = re.compile("[0-9a-f]{40}")
CACHE_PREFIX = "models--"
MAX_REFERENCE_BYTES = 1024
"""A reference is a commit's hash."""

MAX_REPO_CHARS, MAX_REVISION_CHARS = 96, 128
_PART = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_REPO = re.compile(f"{_PART}/{_PART}")
_FOLDER = re.compile(f"{_PART}(?:/{_PART}){{0,7}}")
MAX_FOLDER_CHARS = 256
_HUB_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>.*))?", re.DOTALL)
_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_REVISION = re.compile(rf"refs/pr/[0-9]{{1,9}}|(?!refs(?:/|$)){_SEGMENT}(?:/{_SEGMENT})*")
_NO_NAME = re.compile(r"\.\.|--|\.git$")
_NO_REVISION = re.compile(r"\.\.|\.(?:lock)?(?:/|$)")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubAdapter:
    """A repository and revision (None: main), and the folder of it that has the adapter ("": its top).

    `is_explicit` when the user wrote `hf://`, so that no directory can have been meant. called: what messages call it
    for a client that has not named the repository; "": by the repository.
    """

    repo: str
    revision: str | None = None
    is_explicit: bool = True
    folder: str = ""
    called: str = ""

    @classmethod
    def parse(cls, given: str, revision: str | None = None) -> HubAdapter | None:
        """What `hf://org/name[/folder][@revision]` or `org/name[@revision]` names; None for what can only be a path.

        `revision` takes precedence.
        Raises AdapterPathNotFoundError for a name or revision that breaks the rules of hub ids. Touches no disk.
        """
        is_explicit = given.startswith(HUB_PREFIX)
        if is_explicit:
            place, at, tail = given.removeprefix(HUB_PREFIX).partition("@")
            repo, folder = _split_folder(place)
        elif match := _HUB_ID.fullmatch(given):
            repo, at, tail = match["repo"], "" if match["revision"] is None else "@", match["revision"] or ""
            folder = ""
        else:
            return None
        if len(repo) > MAX_REPO_CHARS or not _REPO.fullmatch(repo) or _NO_NAME.search(repo):
            if not is_explicit:
                return None
            raise AdapterPathNotFoundError(
                f"adapter {shown(given)}: {shown(repo)} is no hub repository; "
                "write hf://org/name or hf://org/name@revision, each of the two of letters, digits and _.-"
            )
        if folder and not _is_folder(folder):
            raise AdapterPathNotFoundError(
                f"adapter {shown(given)}: {shown(folder)} is no folder of a repository; write "
                "hf://org/name/folder@revision, its parts of letters, digits and _.-, without '..'"
            )
        wanted = revision if revision is not None else tail if at else None
        if wanted is not None and not _is_revision(wanted):
            raise AdapterPathNotFoundError(
                f"adapter {shown(given)}: {shown(wanted)} is no revision; give a branch, a tag, a commit hash or "
                "refs/pr/N: letters, digits and _.- with single slashes between, no '..', "
                f"at most {MAX_REVISION_CHARS} characters"
            )
        return cls(repo, wanted, is_explicit, folder)

    @property
    def not_here(self) -> str:
        """How an error begins for `org/name`, which may have been meant as a directory."""
        return "" if self.is_explicit else "no such directory here, and "

    def __str__(self) -> str:
        if self.called:
            return f"adapter {shown(self.called)}"
        place = f"{self.repo}/{self.folder}" if self.folder else self.repo
        return f"adapter {place!r}" + (f" at revision {shown(self.revision)}" if self.revision else "")


def _split_folder(place: str) -> tuple[str, str]:
    """(`org/name`, `folder`) of `org/name/folder`."""
    org, _, rest = place.partition("/")
    name, slash, folder = rest.partition("/")
    return (f"{org}/{name}", folder) if slash and folder else (place, "")


def _is_folder(text: str) -> bool:
    return len(text) <= MAX_FOLDER_CHARS and bool(_FOLDER.fullmatch(text)) and ".." not in text


def _is_revision(text: str) -> bool:
    return len(text) <= MAX_REVISION_CHARS and bool(_REVISION.fullmatch(text)) and not _NO_REVISION.search(text)


@dataclass(frozen=True, slots=True)
class HubCache:
    """A folder in the form of the hub library's cache, and what bounds fetches into it.

    root: None is the library's own. max_bytes: of one adapter. make_room: is asked before anything is downloaded.
    """

    root: Path | None = None
    timeout_s: float = 300.0
    max_bytes: int = 2**34
    make_room: MakeRoom = check_disk
    fetches: Fetches = field(default_factory=Fetches)

    def fetch(self, adapter: HubAdapter) -> Path:
        """The directory of the adapter in the snapshot, which is named by commit: its content never changes.

        Only adapter files are downloaded, `.bin` only if need be. Where the hub is away, what was fetched before
        serves, and what the library's own cache has. Raises AdapterLoadError's kin, AdapterTooLargeError,
        AdapterNoRoomError.
        """

        def work() -> Path:
            try:
                return self._fetch(adapter, root)
            except Exception as error:
                raise _as_adapter_error(error, adapter) from error

        try:
            root = (self.root or _own_root()).expanduser()
            return self.fetches.run(_folder_of(adapter, root) / adapter.folder, work, self.timeout_s)
        except TimeoutError:
            text = f"{adapter.not_here}the hub did not deliver it within {self.timeout_s:g} s; try again later"
            raise AdapterFetchTimeoutError(f"{adapter}: {text}") from None
        except ImportError:
            raise _no_hub(adapter, "huggingface_hub is not installed") from None

    def _fetch(self, adapter: HubAdapter, root: Path) -> Path:
        folder = _folder_of(adapter, root)
        _check_reference(folder, adapter)
        guard_client()
        requests = HubFetch(self.timeout_s)
        try:
            with requests.listing():
                commit, listed = _listed(adapter)
        except Exception as error:
            return self._found_here(adapter, root, error)
        if CONFIG_NAME not in listed:
            raise _no_config(adapter)
        sizes = {name: listed[name] for name in wanted_names(listed, _SHARD)}
        check_sizes(adapter, sizes, self.max_bytes)
        directory = folder / "snapshots" / commit / adapter.folder
        missing = sum(size for name, size in sizes.items() if not (directory / name).exists())
        self.make_room(adapter, folder, missing)
        _download(adapter, root, commit, sizes, requests)
        if adapter.revision != commit:  # for when the hub is away; the library notes what it resolved itself
            reference = folder / "refs" / (adapter.revision or "main")
            with suppress(OSError):  # another revision may have had the name of its folder
                reference.parent.mkdir(parents=True, exist_ok=True)
                reference.write_text(commit)
        return _inside(directory, folder, adapter)

    def _found_here(self, adapter: HubAdapter, root: Path, error: Exception) -> Path:
        """What was fetched before. Raises the error of the hub where nothing was."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError

        if isinstance(error, (LoraplexError, RevisionNotFoundError)):
            raise error
        for each in dict.fromkeys((root, _own_root().expanduser())):
            folder = _folder_of(adapter, each)
            _check_reference(folder, adapter)
            try:
                path = snapshot_download(
                    adapter.repo, revision=adapter.revision, cache_dir=each, local_files_only=True, allow_patterns=[]
                )
            except LocalEntryNotFoundError:
                continue
            self.make_room(adapter, folder, 0)
            directory = Path(path, adapter.folder)
            if not (directory / CONFIG_NAME).exists():
                raise _no_config(adapter)
            return _inside(directory, folder, adapter)
        raise error


def _own_root() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _folder_of(adapter: HubAdapter, root: Path) -> Path:
    """The repository's part of a cache."""
    return (root / f"{CACHE_PREFIX}{adapter.repo.replace('/', '--')}").resolve()


def _listed(adapter: HubAdapter) -> tuple[str, dict[str, int]]:
    """The commit, and the bytes of each file directly beside the adapter's configuration. Raises AdapterFileFormatError
    for too many, and what the library raises."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError
    from huggingface_hub.hf_api import RepoFile

    hub, commit = HfApi(), adapter.revision or "main"
    if not _COMMIT.fullmatch(commit):
        commit = hub.model_info(adapter.repo, revision=commit, timeout=REQUEST_TIMEOUT_S, expand=["sha"]).sha or ""
    if not _COMMIT.fullmatch(commit):
        raise AdapterFetchError(f"{adapter}: the hub says no commit of it")
    entries = hub.list_repo_tree(adapter.repo, adapter.folder or None, revision=commit)
    try:
        found = list(islice(entries, MAX_FILES + 1))
    except EntryNotFoundError:
        return commit, {}
    if len(found) > MAX_FILES:
        text = f"has more than {MAX_FILES} files and folders beside it; give it a folder of its own"
        raise AdapterFileFormatError(f"{adapter} {text}")
    files = [each for each in found if isinstance(each, RepoFile)]
    if any(not isinstance(each.size, int) or each.size < 0 for each in files):
        raise AdapterFetchError(f"{adapter}: the hub does not say how long its files are")
    return commit, {each.path.rpartition("/")[2]: each.size for each in files}


def _download(adapter: HubAdapter, root: Path, commit: str, sizes: Mapping[str, int], requests: HubFetch) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import tqdm

    class NoProgressBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    for name, size in sizes.items():
        with requests.receiving(size):
            hf_hub_download(
                adapter.repo,
                f"{adapter.folder}/{name}".lstrip("/"),
                revision=commit,
                cache_dir=root,
                etag_timeout=REQUEST_TIMEOUT_S,
                tqdm_class=NoProgressBar,
            )


def _no_config(adapter: HubAdapter) -> AdapterLoadError:
    if adapter.folder:
        return AdapterPathNotFoundError(f"{adapter}: the hub's repository has no {CONFIG_NAME} in such a folder")
    return AdapterConfigMissingError(
        f"{adapter}: the hub's repository has no {CONFIG_NAME} at its top; is it an adapter?"
    )


def hub_snapshot_of(directory: Path) -> Path | None:
    """The snapshot, named by its commit, that a directory is, or is a folder of; None: it is in none."""
    for each in (directory, *directory.parents):
        if each.parent.name == "snapshots" and each.parent.parent.name.startswith(CACHE_PREFIX):
            return each
    return None


def hub_folder_of(directory: Path) -> Path | None:
    """The repository's part of the cache, with the blobs that a snapshot's files link to; None: it is no snapshot."""
    snapshot = hub_snapshot_of(directory)
    return None if snapshot is None else snapshot.parent.parent


def _check_reference(folder: Path, adapter: HubAdapter) -> None:
    """The library reads refs/REVISION as it is: a FIFO would block it, an endless file would fill the memory."""
    reference = folder / "refs" / (adapter.revision or "main")
    try:
        with RegularFile.open(reference, adapter.called or adapter.repo, frozenset((folder,))) as file:
            problem = f"has {file.size} bytes" if file.size > MAX_REFERENCE_BYTES else None
    except AdapterWeightsMissingError:
        return
    except AdapterLoadError as error:
        problem = str(error)
    if problem is not None:
        _log.warning("%s: %s must be a file of at most %d bytes: %s", adapter, reference, MAX_REFERENCE_BYTES, problem)
        raise AdapterFetchError(
            f"{adapter} is not read: its reference in the hub's cache is no small file (see the log)"
        )


def _inside(snapshot: Path, root: Path, adapter: HubAdapter) -> Path:
    """The snapshot, resolved.

    It and the files that a load reads (links to blobs) must lie in the repository's part of the cache.
    """
    real = snapshot.resolve()
    for file in (real, *read_files(AdapterFolder(real, adapter.called or adapter.repo))):
        if real == root or not file.resolve().is_relative_to(root):
            _log.warning("%s: %s leads outside the hub's cache of it, %s", adapter, file, root)
            raise AdapterPathForbiddenError(f"{adapter} is not read: its files do not all lie in the hub's cache")
    return real


def _as_adapter_error(error: Exception, adapter: HubAdapter) -> LoraplexError:
    """The error of this package for one of huggingface_hub or of the network below it."""
    if isinstance(error, LoraplexError):
        return error
    if isinstance(error, ImportError):
        return _no_hub(adapter, "huggingface_hub is not installed")
    from huggingface_hub import errors as hub

    causes = tuple(_causes(error))
    if any(isinstance(cause, hub.GatedRepoError) or _status(cause) == 403 for cause in causes):
        return AdapterPermissionError(f"{adapter}: the hub refuses access; ask for it there and set HF_TOKEN")
    if any(isinstance(cause, hub.RevisionNotFoundError) for cause in causes):
        return AdapterPathNotFoundError(f"{adapter}: the hub has no such revision")
    if any(isinstance(cause, hub.RepositoryNotFoundError | hub.HFValidationError) for cause in causes):
        return AdapterPathNotFoundError(
            f"{adapter}: no such directory, and the hub has no such repository (or it is private: set HF_TOKEN)"
        )
    if any("Timeout" in type(cause).__name__ for cause in causes):
        return AdapterFetchTimeoutError(f"{adapter}: {adapter.not_here}the hub did not answer in time; try again later")
    if any(isinstance(cause, hub.OfflineModeIsEnabled) for cause in causes):
        return _no_hub(adapter, "HF_HUB_OFFLINE is set and the local cache does not have it")
    _log.warning("%s could not be fetched: %s", adapter, _first_line(error))
    kind = type(error).__name__
    return AdapterFetchError(f"{adapter}: {adapter.not_here}the hub cannot be reached or failed ({kind}; see the log)")


def _no_hub(adapter: HubAdapter, why: str) -> AdapterLoadError:
    """Without a hub, `org/name` is first of all a directory that is not there."""
    if adapter.is_explicit:
        return AdapterFetchError(f"{adapter} cannot be fetched from the hub: {why}; give a directory")
    return AdapterPathNotFoundError(f"{adapter}: no such directory, and it is not fetched from the hub: {why}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
