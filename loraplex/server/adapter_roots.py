"""Where the load routes may read. The operator's own adapters (--lora-modules) are not bound to it.

A root is a directory, or `hf://` (any hub repository) or `hf://ORG` (those of one organisation), or
`s3://BUCKET[/PREFIX]` (what is below that prefix of an object store). Symbolic links are
resolved first, of the adapter's directory and of the files in it; nothing is said about what lies outside, nor where
the roots are: the log has that.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Self

from loraplex.adapters.files import AdapterFolder, read_files
from loraplex.adapters.remote.hub import HUB_PREFIX, HubAdapter
from loraplex.adapters.remote.object_store import ObjectAdapter
from loraplex.errors import AdapterLoadError, AdapterPathForbiddenError, AdapterPathNotFoundError, shortened, shown
from loraplex.server.config import ServerConfig, local_roots

MAX_PARTS = 64
"""Of a path that a client sends: to resolve each one takes a call of the system, in Python."""

_log = logging.getLogger("loraplex.server")


class AdapterRoots:
    """roots: None is anywhere, () nowhere; directories: the local ones, links resolved. of_tenant: in messages."""

    def __init__(
        self, roots: tuple[str, ...] | None, directories: tuple[Path, ...], *, of_tenant: bool = False
    ) -> None:
        self._roots, self._directories, self._is_of_tenant = roots, directories, of_tenant

    @classmethod
    def of(cls, config: ServerConfig) -> Self:
        return cls(config.allowed_adapter_roots, config.local_adapter_roots or ())

    @classmethod
    def of_tenant(cls, roots: tuple[str, ...]) -> Self:
        """Touches the disk, as `check` does."""
        return cls(roots, local_roots(roots), of_tenant=True)

    def check(self, path: str, field: str = "path") -> None:
        """Raises AdapterPathForbiddenError, and AdapterPathNotFoundError for a hub id that cannot be; both name the
        field that the path came in. Touches the disk: call it in a thread."""
        try:
            if path.count("/") > MAX_PARTS:
                text = f"adapter {shown(path)} has {path.count('/')} slashes, and a path may have {MAX_PARTS}"
                raise AdapterPathNotFoundError(f"{text}: load it by a shorter one")
            stored = ObjectAdapter.parse(path)
            if stored is not None:
                self._check_stored(path, stored)
            else:
                self._check(path, HubAdapter.parse(path))
        except AdapterLoadError as error:
            error.param = field
            raise

    def _check(self, path: str, hub: HubAdapter | None) -> None:
        if self._roots is None:
            return
        is_hub = hub is not None and (hub.is_explicit or not self._is_directory_inside(path))
        outside = self._outside_hub(hub.repo) if hub is not None and is_hub else self._outside(path)
        if outside is not None:
            _log.info("adapter %.200r is refused: it leads outside %s", path, self._roots)
            what = f"its {outside} leads" if outside else "is"
            raise AdapterPathForbiddenError(
                f"adapter {shown(path)} {what} outside what this server may load: {self._advice()}"
            )

    def _check_stored(self, path: str, stored: ObjectAdapter) -> None:
        roots = None if self._roots is None else [ObjectAdapter.parse(root) for root in self._roots]
        if roots is not None and not any(root is not None and stored.is_below(root) for root in roots):
            _log.info("adapter %.200r is refused: it leads outside %s", path, self._roots)
            raise AdapterPathForbiddenError(
                f"adapter {shown(path)} is outside what this server may load: {self._advice()}"
            )

    def _outside_hub(self, repo: str) -> str | None:
        """As `_outside`, of a hub repository."""
        roots = [root.removeprefix(HUB_PREFIX) for root in self._roots or () if root.startswith(HUB_PREFIX)]
        has_root = any(not root or repo.startswith(root.rstrip("/") + "/") for root in roots)
        return None if has_root else ""

    def _outside(self, path: str) -> str | None:
        """None when the directory and all files that a load reads are inside the roots; "" or the name of what is not.

        What else is in the directory does not matter: a root may be an adapter, too.
        """
        outside = ""
        try:
            real = Path(path).expanduser().resolve()
            if not self._has_root(real):
                return outside
            for file in read_files(AdapterFolder(real, shortened(path))):
                outside = file.name
                if not self._has_root(file.resolve()):
                    return outside
        except (OSError, RuntimeError, ValueError):  # a loop of links, a NUL, no permission
            return outside
        return None

    def _is_directory_inside(self, path: str) -> bool:
        try:
            return self._outside(path) is None and Path(path).is_dir()
        except (OSError, ValueError):
            return False

    def _has_root(self, real: Path) -> bool:
        return any(real.is_relative_to(root) for root in self._directories)

    def _advice(self) -> str:
        if self._is_of_tenant:
            return "only from the places that its operator gave to this tenant"
        if not self._roots:
            return "it may load nothing while it listens beyond this machine; start it with --adapter-root DIR"
        return "only what its operator chose with --adapter-root"
