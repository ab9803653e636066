"""What a tenant may call an adapter, and the other things a caller names it by: its number and its source.

A name is 1 to 256 printable characters, with no space at either end. `/` is allowed, as in vLLM. `:` is allowed too, unless
the name starts with `BASE:` for one of the base model's names: `BASE:adapter` is how SGLang's clients select an adapter, so
such a name would mean two things. The names of the base model are not names of adapters. `NAME@2` addresses version 2 of NAME, so
no adapter can be loaded under a name of that form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from loraplex.errors import AdapterConflictError, InvalidRequestError

MAX_NAME_LEN = 256
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
    """Raises InvalidRequestError for a name that cannot be, AdapterConflictError for one of the base model; both call it `param`."""
    if not isinstance(adapter_name, str) or not adapter_name:
        raise InvalidRequestError(f"an adapter's name must be a non-empty string, got {adapter_name!r}", param=param)
    if len(adapter_name) > MAX_NAME_LEN:
        raise InvalidRequestError(
            f"adapter name {adapter_name[:32]!r}... has {len(adapter_name)} characters, at most {MAX_NAME_LEN} are allowed",
            param=param,
        )
    if not adapter_name.isprintable() or adapter_name != adapter_name.strip():
        raise InvalidRequestError(
            f"adapter name {adapter_name!r} has control or invisible characters, or a space at an end; remove them",
            param=param,
        )
    if split_address(adapter_name) is not None:
        raise InvalidRequestError(
            f"adapter name {adapter_name!r} would address a version of {adapter_name.rpartition('@')[0]!r}; "
            "choose a name without @ and a number at its end",
            param=param,
        )
    for base_name in base_names:
        if adapter_name == base_name or adapter_name.startswith(base_name + ":"):
            raise AdapterConflictError(
                f"adapter name {adapter_name!r} would select the base model {base_name!r}; choose another name",
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
