"""The environment of child processes: without what could be a secret. They read what clients send, and need none."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_SECRET_NAME = re.compile(
    r"(KEY|TOKEN|SECRET|PASS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|PAT|DSN)S?(_|$)|^(AWS|AZURE|GCP|VAULT)_"
)
_SECRET_VALUE = re.compile(r"://[^/\s@]*:[^/\s@]+@")
"""A URL with a password, as proxies and databases have them."""


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Every variable whose name and value look harmless. Names are judged by words: TOKENIZERS_PARALLELISM stays."""
    return {
        name: value
        for name, value in environment.items()
        if not _SECRET_NAME.search(name.upper()) and not _SECRET_VALUE.search(value)
    }
