"""Where adapters come from: a local directory, or a repository of the Hugging Face hub.

/path/to/adapter, ./adapter, ~/adapter      a directory, symbolic links resolved, inside the allowed roots if there are any
hf://org/name, hf://org/name@revision       the hub
org/name                                    the hub, when no such local directory exists
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from loraplex.adapters.files import CONFIG_NAME, WEIGHT_NAMES, check_directory
from loraplex.adapters.hub import HubAdapter, fetch_from_hub
from loraplex.errors import AdapterPathForbiddenError, AdapterPathNotFoundError

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def read_files(directory: Path) -> list[Path]:
    """The files of an adapter's directory that a load may read, there or not; nothing else in it is looked at."""
    return [directory / CONFIG_NAME, *(directory / name for name in WEIGHT_NAMES), *directory.glob("*.safetensors")]


@dataclass(frozen=True)
class AdapterSource:
    """`allowed_roots` None allows every local path, () none. `hub_cache` None is huggingface_hub's own. `timeout_s` bounds a fetch."""

    allowed_roots: tuple[Path, ...] | None = None
    hub_cache: Path | None = None
    timeout_s: float = 300.0

    def fetch(self, path_or_id: str, revision: str | None = None) -> Path:
        """A local directory with the adapter's files. Raises AdapterPathNotFoundError, AdapterPathForbiddenError,
        AdapterPermissionError, AdapterFetchError, AdapterFetchTimeoutError."""
        if path_or_id.startswith("hf://"):
            repo, _, at = path_or_id.removeprefix("hf://").partition("@")
            return self._from_hub(repo, revision or at or None, path_or_id)
        if "://" in path_or_id:
            raise AdapterPathNotFoundError(
                f"adapter {path_or_id!r}: this kind of source is not supported; give a directory or hf://org/name"
            )
        path = self._path(path_or_id)
        if _REPO.fullmatch(path_or_id) and not self._is_visible_directory(path):
            return self._from_hub(path_or_id, revision, path_or_id)
        return self._from_disk(path, path_or_id)

    def _path(self, given: str) -> Path:
        try:
            path = Path(given).expanduser() if given else None
        except RuntimeError:  # ~name of nobody
            path = None
        if path is None:
            raise AdapterPathNotFoundError(f"adapter {given!r}: no such directory; give a directory or a hub id")
        return path

    def _from_hub(self, repo: str, revision: str | None, given: str) -> Path:
        if not _REPO.fullmatch(repo):
            raise AdapterPathNotFoundError(
                f"adapter {given!r}: {repo!r} is no hub repository; write hf://org/name or hf://org/name@revision"
            )
        return fetch_from_hub(HubAdapter(repo, revision, given.startswith("hf://")), self.hub_cache, self.timeout_s)

    def _from_disk(self, path: Path, given: str) -> Path:
        directory = self._resolved(path, given)
        check_directory(directory, given)
        for file in read_files(directory):
            self._resolved(file, given)
        return directory

    def _resolved(self, path: Path, given: str) -> Path:
        try:
            real = path.resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL
            raise AdapterPathNotFoundError(f"adapter {given!r}: no such directory: {error}") from error
        if not self._is_allowed(real):
            raise AdapterPathForbiddenError(
                f"adapter {given!r} is outside the directories that adapters may be loaded from{self._advice()}"
            )
        return real

    def _is_allowed(self, real: Path) -> bool:
        return self.allowed_roots is None or any(real.is_relative_to(root.resolve()) for root in self.allowed_roots)

    def _advice(self) -> str:
        if not self.allowed_roots:
            return " (none is allowed); start the server with --adapter-root DIR"
        return (
            f" ({', '.join(map(str, self.allowed_roots))}); move it there or start the server with --adapter-root DIR"
        )

    def _is_visible_directory(self, path: Path) -> bool:
        try:
            return self._is_allowed(path.resolve()) and path.is_dir()
        except (OSError, RuntimeError, ValueError):
            return False
