"""A folder whose files are trusted, such as packed weights or the journal: no other user may put any in. And where
such folders are when no setting says so."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from loraplex.errors import ConfigError


def private_folder(folder: Path, what: str, remedy: str) -> Path:
    """`folder`, made with mode 0700 if it is missing. A folder that cannot be made is for its user to report.

    Raises ConfigError for one that belongs to another user (root's is fine) or that others may write to; `remedy` ends
    its message.
    """
    try:
        for parent in [*reversed(folder.parents), folder]:
            if not parent.exists():
                parent.mkdir(mode=0o700, exist_ok=True)
        about = folder.stat()
    except OSError:
        return folder
    if about.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{what} {folder} belongs to another user ({about.st_uid}), who could change what is in it: {remedy}"
        )
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(about.st_mode)
        raise ConfigError(
            f"{what} {folder} can be written to by other users (mode {mode:o}): chmod 700 it, or {remedy}"
        )
    return folder


def default_folder() -> Path | None:
    """$LORAPLEX_CACHE, or loraplex in the user's cache folder; None when $LORAPLEX_CACHE is `none`: nothing is to be
    kept on disk."""
    own = os.environ.get("LORAPLEX_CACHE")
    if own:
        return None if own == "none" else Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loraplex"
