"""The files of an adapter directory, opened and parsed so that no content can harm the process.

    adapter_config.json                        at most MAX_CONFIG_BYTES
    adapter_model.safetensors                  or
    adapter_model.safetensors.index.json       with its shards, or
    adapter_model.bin                          (pickle.py)

Sizes come from the file system, never from the file's own claims. Files are read, not mapped: a mapped file that its owner truncates
kills the process (SIGBUS), and the bytes that were hashed must be the bytes that are served.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.adapters.regular_file import RegularFile, Stamp
from loraplex.errors import (
    AdapterConfigMissingError,
    AdapterFileFormatError,
    AdapterPathNotFoundError,
    AdapterPermissionError,
    AdapterTruncatedError,
    AdapterWeightsMissingError,
)

CONFIG_NAME = "adapter_config.json"
SAFETENSORS_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"
BIN_NAME = "adapter_model.bin"
WEIGHT_NAMES = (SAFETENSORS_NAME, INDEX_NAME, BIN_NAME)

MAX_CONFIG_BYTES = 2**20
MAX_HEADER_BYTES = 16 * 2**20
MAX_SHARDS = 1024

DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
}
DTYPE_BYTES |= {"BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a weight file: `nbytes` at `offset` of shard number `shard`. `dtype` is safetensors' name for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    shard: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """A safetensors file as it was at `stamp`: its header, JSON. expected: the tensors that an index says it has."""

    path: Path
    stamp: Stamp
    header: bytes
    expected: frozenset[str] | None = None

    @property
    def data_start(self) -> int:
        return 8 + len(self.header)

    @property
    def size(self) -> int:
        return self.stamp[2]


# ---------------------------------------------------------------------------------------------------------- directory


def _read_bounded(path: Path, adapter: str, limit: int) -> bytes:
    with RegularFile.open(path, adapter) as file:
        if file.size > limit:
            raise AdapterFileFormatError(
                f"adapter {adapter!r}: {path.name} has {file.size} bytes, at most {limit} are read"
            )
        return bytes(file.read_all())


def check_directory(path: Path, adapter: str) -> None:
    """Raise AdapterPathNotFoundError or AdapterPermissionError unless `path` is a directory that can be entered."""
    try:
        is_directory = stat.S_ISDIR(os.stat(path).st_mode)
    except PermissionError as error:
        raise AdapterPermissionError(f"adapter {adapter!r}: {path} may not be read: {error.strerror}") from error
    except (OSError, ValueError) as error:
        raise AdapterPathNotFoundError(f"adapter {adapter!r}: no such directory: {path}") from error
    if not is_directory:
        raise AdapterPathNotFoundError(
            f"adapter {adapter!r}: {path} is not a directory; give the one with {CONFIG_NAME}"
        )
    if not os.access(path, os.X_OK):
        raise AdapterPermissionError(f"adapter {adapter!r}: {path} may not be read: permission denied")


def read_config_file(directory: Path, adapter: str) -> str:
    check_directory(directory, adapter)
    try:
        return _read_bounded(directory / CONFIG_NAME, adapter, MAX_CONFIG_BYTES).decode("utf-8")
    except AdapterWeightsMissingError as error:
        raise AdapterConfigMissingError(
            f"adapter {adapter!r}: {directory} has no {CONFIG_NAME}; is it the output of save_pretrained?"
        ) from error
    except UnicodeDecodeError as error:
        raise AdapterFileFormatError(f"adapter {adapter!r}: {CONFIG_NAME} is not UTF-8: {error}") from error


def find_weight_file(directory: Path, adapter: str) -> Path:
    """The first of WEIGHT_NAMES that exists. Raises AdapterWeightsMissingError."""
    check_directory(directory, adapter)
    for name in WEIGHT_NAMES:
        if os.path.lexists(directory / name):
            return directory / name
    raise AdapterWeightsMissingError(f"adapter {adapter!r}: {directory} has none of {', '.join(WEIGHT_NAMES)}")


# -------------------------------------------------------------------------------------------------------- safetensors


def read_shards(weight_file: Path, adapter: str) -> tuple[Shard, ...]:
    """The headers of a safetensors file, or of all shards of an index; not parsed yet, since those of many adapters are equal."""
    if weight_file.name != INDEX_NAME:
        return (_read_shard(weight_file, adapter, None),)
    return tuple(_read_shard(path, adapter, expected) for path, expected in _index(weight_file, adapter).items())


def parse_shards(shards: Sequence[Shard], adapter: str) -> tuple[TensorEntry, ...]:
    """Their tensors. Raises AdapterFileFormatError, AdapterTruncatedError."""
    entries: list[TensorEntry] = []
    for number, shard in enumerate(shards):
        found = _entries_of(shard, number, adapter)
        if shard.expected is not None and {entry.name for entry in found} != shard.expected:
            odd = sorted({entry.name for entry in found} ^ shard.expected)[:3]
            raise AdapterFileFormatError(
                f"adapter {adapter!r}: {shard.path.name} and {INDEX_NAME} disagree about {', '.join(odd)}"
            )
        entries.extend(found)
    return tuple(entries)


def _index(index: Path, adapter: str) -> dict[Path, frozenset[str]]:
    """The shards and the tensors that each of them has."""
    where = f"adapter {adapter!r}: {INDEX_NAME}"
    document = _parse_json(_read_bounded(index, adapter, MAX_HEADER_BYTES), where)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise AdapterFileFormatError(f"{where} has no weight_map")
    shards: dict[Path, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or name != os.path.basename(name):
            raise AdapterFileFormatError(
                f"{where} names the shard {name!r}; a file beside it, ending in .safetensors, is wanted"
            )
        shards.setdefault(index.parent / name, set()).add(tensor)
    if len(shards) > MAX_SHARDS:
        raise AdapterFileFormatError(f"{where} names {len(shards)} shards, at most {MAX_SHARDS} are read")
    return {path: frozenset(tensors) for path, tensors in shards.items()}


def _read_shard(path: Path, adapter: str, expected: frozenset[str] | None) -> Shard:
    with RegularFile.open(path, adapter) as file:
        return Shard(path, file.stamp, _read_header(file, f"adapter {adapter!r}: {path.name}"), expected)


def _entries_of(shard: Shard, number: int, adapter: str) -> list[TensorEntry]:
    where = f"adapter {adapter!r}: {shard.path.name}"
    document = _parse_json(shard.header, where)
    document.pop("__metadata__", None)
    entries = [_entry(name, fields, number, shard.data_start, where) for name, fields in document.items()]
    _check_extents(entries, shard, where)
    return entries


def _read_header(file: RegularFile, where: str) -> bytes:
    prefix = bytearray(8)
    if file.read_into(memoryview(prefix), 0) < 8:
        raise AdapterTruncatedError(
            f"{where} is truncated: {file.size} bytes, not even the header's length; copy the file again"
        )
    check_no_pointer(prefix, where)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:  # random bytes claim far more than any real file: say that first
        raise AdapterFileFormatError(
            f"{where} is not safetensors: its header would have {length} bytes (at most {MAX_HEADER_BYTES})"
        )
    if 8 + length > file.size:
        raise AdapterTruncatedError(
            f"{where} is truncated: a header of {length} bytes in a file of {file.size}; copy the file again"
        )
    header = bytearray(length)
    file.read_into(memoryview(header), 8)
    if not header.startswith(b"{"):
        raise AdapterFileFormatError(f"{where} is not safetensors: its header does not begin with '{{'")
    return bytes(header)


def check_no_pointer(start: bytes | bytearray, where: str) -> None:
    """A clone without git-lfs has text where the file should be."""
    if start[:8] == b"version ":
        raise AdapterFileFormatError(
            f"{where} is a git-lfs pointer, not the file; run `git lfs pull` in its repository"
        )


def _parse_json(data: bytes, where: str) -> dict[str, Any]:
    def refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key is there twice")
        return found

    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=refuse_repeats)
    except (ValueError, RecursionError) as error:
        raise AdapterFileFormatError(f"{where} is damaged: its header is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise AdapterFileFormatError(f"{where} is damaged: its header is not a JSON object")
    return document


def _are_sizes(values: Any) -> bool:
    return type(values) is list and all(type(value) is int and 0 <= value < 2**48 for value in values)


def _entry(name: str, fields: Any, shard: int, data_start: int, where: str) -> TensorEntry:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise AdapterFileFormatError(f"{where} is damaged: the header of {name!r} is not dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    is_fine = _are_sizes(shape) and len(shape) <= 8 and _are_sizes(offsets) and len(offsets) == 2
    if not is_fine or not isinstance(dtype, str):
        raise AdapterFileFormatError(f"{where} is damaged: the header of {name!r} has a wrong dtype, shape or offset")
    begin, end = offsets
    expected = math.prod(shape) * DTYPE_BYTES.get(dtype, 0)
    if end < begin or (dtype in DTYPE_BYTES and end - begin != expected):
        raise AdapterFileFormatError(
            f"{where} is damaged: {name!r} takes {end - begin} bytes, its shape and dtype {expected}"
        )
    return TensorEntry(name, dtype, tuple(shape), end - begin, shard, data_start + begin)


def _check_extents(entries: list[TensorEntry], shard: Shard, where: str) -> None:
    """Tensors follow one another without gap or overlap from the header to the end of the file."""
    position, size = shard.data_start, shard.size
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != position:
            raise AdapterFileFormatError(
                f"{where} is damaged: {entry.name!r} does not begin where the tensor before it ends"
            )
        position += entry.nbytes
    if position > size:
        raise AdapterTruncatedError(
            f"{where} is truncated: its tensors end at byte {position}, the file at {size}; copy the file again"
        )
    if position < size:
        raise AdapterFileFormatError(f"{where} is damaged: {size - position} bytes follow its last tensor")
