"""What a tenant may call an adapter, and the other things a caller names it by: its number and its source.

A name is 1 to 256 characters as NFKC leaves them, so that two names that look alike for their compatibility forms are
one. None is a control, format (zero-width, bidirectional) or blank character, and there is no space at either end. The
parts between slashes are neither empty nor `.` nor `..`, and begin with no combining mark; only the operator's names
have slashes at all (`--lora-paths /srv/sql` is its own name), since what stands before a slash will be a tenant. `:` is
allowed, unless the name starts with `BASE:` for one of the base model's names: `BASE:adapter` is how SGLang's clients
select an adapter, so such a name would mean two things. The names of the base model are not names of adapters. `NAME@2`
addresses version 2 of NAME, so no adapter can be loaded under a name of that form, in the digits of any script. What
has the form of a tenant's key is no name: names stand in logs, events and metrics.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from loraplex.errors import KEY, AdapterConflictError, InvalidRequestError, shown

MAX_NAME_LEN = 256
_BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\ufe00-\ufe0f\U00016fe4\U000e0100-\U000e01ef]")
"""Printable to Python, and drawn as nothing: fillers, variation selectors, the blank of Braille."""

_KEY_ALONE = re.compile(rf"(?<!\w){KEY.pattern}(?![\w-])", re.ASCII)
_KEY_WITHIN = re.compile(rf"(?=({KEY.pattern}))", re.ASCII)

_ADDRESS = re.compile(r"(.+)@([0-9]{1,18})", re.DOTALL | re.ASCII)


def split_address(name: str) -> tuple[str, int] | None:
    """(`NAME`, 2) of `NAME@2`; None for a name without a version."""
    match = _ADDRESS.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def address_text(name: str, number: int) -> str:
    """The inverse of `split_address`."""
    return f"{name}@{number}"


def is_one_version(address: str) -> InvalidRequestError:
    """For a verb that is of all versions of a name."""
    name = address.rpartition("@")[0]
    return InvalidRequestError(
        f"{address!r} is one version of adapter {name!r}, and this is done to all; name {name!r}", param="name"
    )


def check_adapter_name(adapter_name: str, base_names: Iterable[str], *, param: str = "name") -> None:
    """Raises InvalidRequestError for a name that cannot be, AdapterConflictError for one of the base model."""
    if not isinstance(adapter_name, str) or not adapter_name:
        raise InvalidRequestError(
            f"an adapter's name must be a non-empty string, got {shown(adapter_name)}", param=param
        )
    if len(adapter_name) > MAX_NAME_LEN:
        raise InvalidRequestError(
            f"adapter name {shown(adapter_name)} has {len(adapter_name)} characters, "
            f"at most {MAX_NAME_LEN} are allowed",
            param=param,
        )
    wrong = _why_unusable(adapter_name)
    if wrong is not None:
        raise InvalidRequestError(f"adapter name {shown(adapter_name)} {wrong}", param=param)
    addressed, _, number = adapter_name.rpartition("@")
    if addressed and number.isdecimal():
        raise InvalidRequestError(
            f"adapter name {shown(adapter_name)} would address a version of {shown(addressed)}; "
            "choose a name without @ and a number at its end",
            param=param,
        )
    for base_name in base_names:
        if adapter_name == base_name or adapter_name.startswith(base_name + ":"):
            raise AdapterConflictError(
                f"adapter name {shown(adapter_name)} would select the base model {base_name!r}; choose another name",
                param=param,
            )


def _why_unusable(name: str) -> str | None:
    if not name.isprintable() or _BLANK.search(name) or name != name.strip():
        return "has control or invisible characters, or a space at an end; remove them"
    if not unicodedata.is_normalized("NFKC", name):
        return f"is another name than it looks: write {shown(unicodedata.normalize('NFKC', name))} (its NFKC form)"
    if _KEY_ALONE.search(name) or any(map(_is_drawn, _KEY_WITHIN.findall(name))):
        return "has the form of a key, and names stand in logs; choose another name"
    parts = name.removeprefix("/").split("/")
    if not {"", ".", ".."}.isdisjoint(parts):
        return "has an empty part, '.' or '..' between slashes; choose another name"
    if any(unicodedata.category(part[0]).startswith("M") for part in parts):
        return "begins with a combining mark, which is drawn on what stands before it; choose another name"
    return None


def _is_drawn(text: str) -> bool:
    """Whether it has letters of both cases and digits, as a key: a long name that begins with `help-` has not."""
    return any(map(str.isupper, text)) and any(map(str.isdigit, text)) and any(map(str.islower, text[3:]))


def check_clients_name(adapter_name: str, *, param: str = "name") -> None:
    """Raises InvalidRequestError for a new name with a slash: only the operator's have one."""
    if "/" in adapter_name:
        raise InvalidRequestError(
            f"adapter name {shown(adapter_name)} has a slash, "
            "which is for names that the operator gives (--lora-modules); choose another name",
            param=param,
        )


def check_lora_int_id(adapter_name: str, lora_int_id: int | None) -> None:
    is_number = isinstance(lora_int_id, int) and not isinstance(lora_int_id, bool) and lora_int_id >= 1
    if lora_int_id is not None and not is_number:
        raise InvalidRequestError(
            f"adapter {adapter_name!r}: lora_int_id must be a whole number >= 1, got {lora_int_id!r}",
            param="lora_int_id",
        )


def normalize_source(adapter_name: str, path: str) -> str:
    """`path` without slashes at its end, so that `dir` and `dir/` are the same source. Links are not followed."""
    if not isinstance(path, str) or not path.strip():
        raise InvalidRequestError(
            f"adapter {adapter_name!r}: the path is empty; give a directory or a hub id", param="path"
        )
    return path.rstrip("/") or path
