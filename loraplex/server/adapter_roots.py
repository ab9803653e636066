"""Where the load routes may read. The operator's own adapters (--lora-modules) are not bound to it.

A root is a directory, or `hf://` (any hub repository) or `hf://ORG` (those of one organisation). Symbolic links are resolved first, of
the adapter's directory and of the files in it; nothing is said about what lies outside.
"""

from __future__ import annotations

import re
from pathlib import Path

from loraplex.adapters.source import read_files
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
        outside = self._outside_hub(path) if self._is_hub_id(path) else self._outside(path)
        if outside is not None:
            what = f"its {outside} leads" if outside else "is"
            raise AdapterPathForbiddenError(
                f"adapter {path[:200]!r} {what} outside what this server may load: {self._advice()}", param=field
            )

    def _is_hub_id(self, path: str) -> bool:
        return path.startswith(HUB_PREFIX) or (
            HUB_ID.fullmatch(path) is not None and not self._is_directory_inside(path)
        )

    def _outside_hub(self, path: str) -> str | None:
        """As `_outside`, of a hub id."""
        repository = HUB_PREFIX + path.removeprefix(HUB_PREFIX)
        roots = [root for root in self._roots or () if root.startswith(HUB_PREFIX)]
        has_root = any(root == HUB_PREFIX or repository.startswith(root.rstrip("/") + "/") for root in roots)
        return None if has_root else ""

    def _outside(self, path: str) -> str | None:
        """None when the directory and all files of it that a load reads are inside the roots; "" or the name of what is not.

        What else is in the directory does not matter: a root may be an adapter, too.
        """
        outside = ""
        try:
            real = Path(path).expanduser().resolve()
            if not self._has_root(real):
                return outside
            for file in read_files(real):
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
        if not self._roots:
            return "it may load nothing while it listens beyond this machine; start it with --adapter-root DIR"
        return f"only {', '.join(self._roots)}"
