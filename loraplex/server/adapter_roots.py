"""Where the load routes may read. The operator's own adapters (--lora-modules) are not bound to it.

A root is a directory, or `hf://` (any hub repository) or `hf://ORG` (those of one organisation). Symbolic links are resolved first, of
the adapter's directory and of the files in it; nothing is said about what lies outside.
"""

from __future__ import annotations

import re
from pathlib import Path

from loraplex.errors import AdapterPathForbiddenError
from loraplex.server.config import ServerConfig

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
HUB_PREFIX = "hf://"


class AdapterRoots:
    def __init__(self, config: ServerConfig) -> None:
        self._roots = config.allowed_adapter_roots
        self._directories = config.local_adapter_roots or ()

    def check(self, path: str, field: str = "path") -> None:
        """Raises AdapterPathForbiddenError, which names the field that the path came in. Touches the disk: call it in a thread."""
        if self._roots is None:
            return
        is_hub = self._is_hub_id(path)
        if not (self._has_hub_root(path) if is_hub else self._is_inside(path)):
            raise AdapterPathForbiddenError(
                f"adapter {path[:200]!r} is outside what this server may load: {self._advice()}", param=field
            )

    def _is_hub_id(self, path: str) -> bool:
        return path.startswith(HUB_PREFIX) or (
            HUB_ID.fullmatch(path) is not None and not self._is_inside(path, must_exist=True)
        )

    def _has_hub_root(self, path: str) -> bool:
        repository = HUB_PREFIX + path.removeprefix(HUB_PREFIX)
        roots = [root for root in self._roots or () if root.startswith(HUB_PREFIX)]
        return any(root == HUB_PREFIX or repository.startswith(root.rstrip("/") + "/") for root in roots)

    def _is_inside(self, path: str, must_exist: bool = False) -> bool:
        """Whether the directory and all that is in it are inside the roots."""
        try:
            real = Path(path).expanduser().resolve()
            if not self._has_root(real):
                return False
            files = [entry.resolve() for entry in real.iterdir()] if real.is_dir() else []
            return all(map(self._has_root, files)) and (real.is_dir() or not must_exist)
        except (OSError, RuntimeError, ValueError):  # a loop of links, a NUL, no permission
            return False

    def _has_root(self, real: Path) -> bool:
        return any(real.is_relative_to(root) for root in self._directories)

    def _advice(self) -> str:
        if not self._roots:
            return "it may load nothing while it listens beyond this machine; start it with --adapter-root DIR"
        return f"only {', '.join(self._roots)}"
