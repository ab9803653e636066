"""API keys as an operator gives them: flags, files and a variable of the environment. No message contains a key."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loraplex.config import setting
from loraplex.errors import ConfigError
from loraplex.tenants.records import key_digest

API_KEY_VARIABLE = "LORAPLEX_API_KEY"
ADMIN_KEY_VARIABLE = "LORAPLEX_ADMIN_API_KEY"

MAX_KEYS = 1000
"""Each request is compared with all of them."""

MIN_KEY_CHARS = 16
"""A shorter key can be guessed."""

MAX_FILE_BYTES = 2**20


def _keys(text: str) -> Any:
    return field(default=(), repr=False, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySettings:
    """Where keys come from. Of the environment: LORAPLEX_API_KEY and LORAPLEX_ADMIN_API_KEY, separated by commas."""

    api_key: tuple[str, ...] = _keys(
        "key that clients must send (several times: several); other users see it in the list of processes, a file is "
        "better"
    )
    api_key_file: tuple[str, ...] = setting(
        (), "file of such keys, one a line; or the variable LORAPLEX_API_KEY, with commas between keys"
    )
    admin_api_key: tuple[str, ...] = _keys(
        "key for the routes that change the server or show its inside; the other keys are then for inference alone"
    )
    admin_api_key_file: tuple[str, ...] = setting(
        (), "file of such keys, one a line; or the variable LORAPLEX_ADMIN_API_KEY"
    )

    def inference_keys(self) -> tuple[str, ...]:
        """Raises ConfigError as `read_keys`."""
        return read_keys(self.api_key, self.api_key_file, API_KEY_VARIABLE)

    def admin_keys(self) -> tuple[str, ...]:
        return read_keys(self.admin_api_key, self.admin_api_key_file, ADMIN_KEY_VARIABLE)


def read_keys(
    given: Sequence[str], files: Sequence[str], variable: str, environment: MutableMapping[str, str] = os.environ
) -> tuple[str, ...]:
    """All keys of one kind, each once. The variable is removed: child processes inherit the environment.

    Raises ConfigError for a file that cannot be read, holds no key, or may be changed by other users, and for a
    variable that is set and has no key: without one the server would be open.
    """
    value = environment.pop(variable, None)
    of_environment = [] if value is None else [key.strip() for key in value.split(",") if key.strip()]
    if value is not None and not of_environment:
        raise ConfigError(f"{variable} is set and has no key; unset it for a server without such keys")
    of_files = (key for path in files for key in _read_file(path))
    return tuple(dict.fromkeys((*given, *of_files, *of_environment)))


def _read_file(path: str) -> list[str]:
    """One key a line; empty lines and those that begin with # are passed over."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the key file {path!r} cannot be read: {error.strerror}") from None
    if stat.S_ISREG(mode) and mode & stat.S_IWOTH:
        raise ConfigError(f"the key file {path!r} can be changed by every user of this machine; chmod 600 it")
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        print(f"warning: the key file {path} can be read by every user of this machine; chmod 600 it", file=sys.stderr)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"the key file {path!r} is longer than {MAX_FILE_BYTES} bytes")
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    bad = next((number for number, line in numbered if not is_key(line)), None)
    if bad is not None:
        raise ConfigError(f"line {bad} of the key file {path!r} has a character that no header can carry")
    if not numbered:
        raise ConfigError(f"the key file {path!r} has no key; write one a line, or leave the file out")
    return [line for _, line in numbered]


def is_key(key: Any) -> bool:
    """Whether a header can carry it."""
    return isinstance(key, str) and bool(key) and key.isascii() and key.isprintable() and " " not in key


def fingerprint(key: str) -> str:
    """The first eight digits of the key's SHA-256: its name in logs and events."""
    return key_digest(key).hex()[:8]
