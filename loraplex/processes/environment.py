"""The environment of child processes: without what could be a secret. They read what clients send, and need none.

Also which signals say that a child was killed from outside, and which ones it leaves to its parent.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping

_SECRET_NAME = re.compile(
    r"(HEADER|KEY|TOKEN|SECRET|PASS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|PAT|DSN)S?(_|$)"
    r"|^(AWS|AZURE|GCP|VAULT|FSSPEC)_"
)
_SECRET_VALUE = re.compile(r"://[^/\s@]*:[^/\s@]+@")
"""A URL with a password, as proxies and databases have them."""

OUTSIDE_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""What people and systems end a process with. A process that fails by itself gets others."""


def leave_to_parent() -> None:
    """Ctrl-C, a closed terminal, and a SIGTERM to every process of a service are the parent's: it may have requests to
    finish, and this process ends with it."""
    for each in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Every variable whose name and value look harmless. Names are judged by words: TOKENIZERS_PARALLELISM stays."""
    return {
        name: value
        for name, value in environment.items()
        if not _SECRET_NAME.search(name.upper()) and not _SECRET_VALUE.search(value)
    }
