"""Adapters of the Hugging Face hub, by `huggingface_hub.snapshot_download` (imported when the first hub id is given).

A hub id is checked in one place, `HubAdapter.parse`, before the library or the disk sees it: the library joins the name
and the revision to paths of its cache. What it returns must lie in that cache, and so must every file that a load
reads, links resolved.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.adapters.files import (
    BIN_NAME,
    CONFIG_NAME,
    INDEX_NAME,
    NEW_EMBEDDINGS,
    SAFETENSORS_NAME,
    TEXT_NAMES,
    WEIGHT_NAMES,
    AdapterFolder,
    read_files,
)
from loraplex.adapters.regular_file import RegularFile
from loraplex.errors import (
    AdapterConfigMissingError,
    AdapterFetchError,
    AdapterFetchTimeoutError,
    AdapterLoadError,
    AdapterPathForbiddenError,
    AdapterPathNotFoundError,
    AdapterPermissionError,
    AdapterWeightsMissingError,
    shown,
)

HUB_PREFIX = "hf://"
WANTED = (CONFIG_NAME, SAFETENSORS_NAME, INDEX_NAME, "adapter_model-*.safetensors", *NEW_EMBEDDINGS, *TEXT_NAMES)
REQUEST_TIMEOUT_S = 10.0
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

    `is_explicit` when the user wrote `hf://`, so that no directory can have been meant.
    """

    repo: str
    revision: str | None = None
    is_explicit: bool = True
    folder: str = ""

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


def fetch_from_hub(adapter: HubAdapter, cache: Path | None, timeout_s: float) -> Path:
    """The directory of the adapter in the snapshot, which is named by commit: its content never changes.

    Only adapter files are downloaded, `.bin` only if need be.
    """
    result: list[Path | AdapterLoadError] = []

    def work() -> None:
        try:
            result.append(_download(adapter, cache, timeout_s))
        except Exception as error:
            result.append(_as_adapter_error(error, adapter))

    # huggingface_hub cannot be cancelled: past the deadline the thread is left to end by its own timeouts.
    thread = threading.Thread(target=work, name=f"fetch {adapter.repo}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not result:
        raise AdapterFetchTimeoutError(
            f"{adapter}: {adapter.not_here}the hub did not deliver it within {timeout_s:g} s; try again later"
        )
    if isinstance(result[0], AdapterLoadError):
        raise result[0]
    return result[0]


def _download(adapter: HubAdapter, cache: Path | None, timeout_s: float) -> Path:
    snapshot = _snapshot(adapter, cache, timeout_s, WANTED)
    if not (snapshot / CONFIG_NAME).exists():
        if adapter.folder:
            raise AdapterPathNotFoundError(f"{adapter}: the hub's repository has no {CONFIG_NAME} in such a folder")
        raise AdapterConfigMissingError(
            f"{adapter}: the hub's repository has no {CONFIG_NAME} at its top; is it an adapter?"
        )
    if not any((snapshot / name).exists() for name in WEIGHT_NAMES):
        snapshot = _snapshot(adapter, cache, timeout_s, (*WANTED, BIN_NAME))
    return snapshot


def _snapshot(adapter: HubAdapter, cache: Path | None, timeout_s: float, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.utils import tqdm

    class NoProgressBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    root = Path(cache or HF_HUB_CACHE)
    folder = (root.expanduser() / f"{CACHE_PREFIX}{adapter.repo.replace('/', '--')}").resolve()
    _check_reference(folder, adapter)
    path = snapshot_download(
        adapter.repo,
        revision=adapter.revision,
        cache_dir=root,
        allow_patterns=[f"{adapter.folder}/{each}" if adapter.folder else each for each in patterns],
        etag_timeout=min(REQUEST_TIMEOUT_S, timeout_s),
        tqdm_class=NoProgressBar,
    )
    return _inside(Path(path, adapter.folder), folder, adapter)


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
        with RegularFile.open(reference, adapter.repo, frozenset((folder,))) as file:
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
    for file in (real, *read_files(AdapterFolder(real, adapter.repo))):
        if real == root or not file.resolve().is_relative_to(root):
            _log.warning("%s: %s leads outside the hub's cache of it, %s", adapter, file, root)
            raise AdapterPathForbiddenError(f"{adapter} is not read: its files do not all lie in the hub's cache")
    return real


def _as_adapter_error(error: Exception, adapter: HubAdapter) -> AdapterLoadError:
    """The error of this package for one of huggingface_hub or of the network below it."""
    if isinstance(error, AdapterLoadError):
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
