"""The files of an adapter directory, opened and parsed so that no content can harm the process.

    adapter_config.json                        at most MAX_CONFIG_BYTES, MAX_CONFIG_VALUES
    adapter_model.safetensors                  or
    adapter_model.safetensors.index.json       with its shards, or
    adapter_model.bin                          (bin_file.py)

One Limits object bounds headers, tensors and shards of the whole adapter. JSON is counted before it is parsed: a value of a document is
behind `,`, `:` or `[`, so the number of these bytes bounds the number of objects that a parser can make of it.

Sizes come from the file system, never from the file's own claims. Files are read, not mapped: a mapped file that its owner truncates
kills the process (SIGBUS), and the bytes that were hashed must be the bytes that are served.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from loraplex.adapters.regular_file import RegularFile, Roots, Stamp
from loraplex.errors import (
    AdapterConfigMissingError,
    AdapterFileFormatError,
    AdapterPathNotFoundError,
    AdapterPermissionError,
    AdapterTruncatedError,
    AdapterWeightsMissingError,
    shown,
)

CONFIG_NAME = "adapter_config.json"
SAFETENSORS_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"
BIN_NAME = "adapter_model.bin"
WEIGHT_NAMES = (SAFETENSORS_NAME, INDEX_NAME, BIN_NAME)

MAX_CONFIG_BYTES = 2**20
MAX_CONFIG_VALUES = 2**16
MAX_CONFIG_DEPTH = 16
MAX_SHARDS = 1024
MAX_NAME_CHARS = 512
MAX_DTYPE_CHARS = 32

MIN_TENSORS, MAX_TENSORS = 2**13, 2**16
HEADER_BYTES_A_TENSOR = 256
VALUES_A_TENSOR = 20
SPARE_VALUES = 2**12
"""A tensor's name, dtype, shape and offsets are 11 bytes of `,:[`, with eight axes 17; the rest is for `__metadata__`."""

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
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\.safetensors")
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


@dataclass(frozen=True, slots=True)
class Limits:
    """What the weight files of one adapter may have, all shards together: tensors, and bytes of headers."""

    max_tensors: int = MAX_TENSORS

    @classmethod
    def of_base(cls, num_tensors: int) -> Limits:
        """For a base model that has a use for `num_tensors`; with spare, so that an adapter of a larger one is told what is wrong."""
        return cls(max(MIN_TENSORS, num_tensors))

    @property
    def max_header_bytes(self) -> int:
        return self.max_tensors * HEADER_BYTES_A_TENSOR


# ---------------------------------------------------------------------------------------------------------- directory


def read_files(directory: Path) -> list[Path]:
    """The files of an adapter's directory that a load may read, there or not; nothing else in it is looked at.

    Raises AdapterFileFormatError for more shards than a load reads.
    """
    shards = list(islice(filter(_is_shard, directory.glob("*.safetensors")), MAX_SHARDS + 1))
    if len(shards) > MAX_SHARDS:
        raise AdapterFileFormatError(f"the adapter's directory has more than {MAX_SHARDS} .safetensors files")
    return [directory / CONFIG_NAME, *(directory / name for name in WEIGHT_NAMES), *shards]


def _read_bounded(path: Path, adapter: str, limit: int, roots: Roots) -> bytes:
    with RegularFile.open(path, adapter, roots) as file:
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
        raise AdapterPermissionError(f"adapter {adapter!r}: its directory may not be read: {error.strerror}") from error
    except (OSError, ValueError) as error:
        raise AdapterPathNotFoundError(f"adapter {adapter!r}: no such directory") from error
    if not is_directory:
        raise AdapterPathNotFoundError(f"adapter {adapter!r}: this is not a directory; give the one with {CONFIG_NAME}")
    if not os.access(path, os.X_OK):
        raise AdapterPermissionError(f"adapter {adapter!r}: its directory may not be read: permission denied")


def _is_shard(path: Path) -> bool:
    return _SHARD_NAME.fullmatch(path.name) is not None


def read_config_file(directory: Path, adapter: str, roots: Roots) -> Any:
    """The document in `adapter_config.json`, at most MAX_CONFIG_DEPTH deep.

    Raises AdapterConfigMissingError, AdapterFileFormatError, and what opening raises.
    """
    check_directory(directory, adapter)
    try:
        data = _read_bounded(directory / CONFIG_NAME, adapter, MAX_CONFIG_BYTES, roots)
    except AdapterWeightsMissingError as error:
        raise AdapterConfigMissingError(
            f"adapter {adapter!r}: there is no {CONFIG_NAME}; is it the output of save_pretrained?"
        ) from error
    where = f"adapter {adapter!r}: {CONFIG_NAME}"
    _check_num_values(data, MAX_CONFIG_VALUES, where)
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise AdapterFileFormatError(f"{where} is not JSON in UTF-8: {error}") from error
    level = [document]
    for _ in range(MAX_CONFIG_DEPTH):
        level = [child for value in level for child in _children(value)]
    if level:
        raise AdapterFileFormatError(f"{where} is nested deeper than {MAX_CONFIG_DEPTH} levels")
    return document


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _check_num_values(data: bytes, limit: int, where: str) -> None:
    """Raise AdapterFileFormatError for JSON that may have more values than `limit`; counts bytes, parses nothing."""
    if data.count(b",") + data.count(b":") + data.count(b"[") > limit:
        raise AdapterFileFormatError(f"{where} has more than {limit} values; none of a real adapter has")


def find_weight_file(directory: Path, adapter: str) -> Path:
    """The first of WEIGHT_NAMES that exists. Raises AdapterWeightsMissingError."""
    check_directory(directory, adapter)
    for name in WEIGHT_NAMES:
        if os.path.lexists(directory / name):
            return directory / name
    raise AdapterWeightsMissingError(f"adapter {adapter!r}: its directory has none of {', '.join(WEIGHT_NAMES)}")


# -------------------------------------------------------------------------------------------------------- safetensors


def read_shards(weight_file: Path, adapter: str, limits: Limits, roots: Roots) -> tuple[Shard, ...]:
    """The headers of a safetensors file, or of all shards of an index; not parsed yet, since those of many adapters are equal.

    Their bytes are bounded together, before each is read; two shards may not be one file.
    """
    expected: dict[Path, frozenset[str] | None] = {weight_file: None}
    if weight_file.name == INDEX_NAME:
        expected = dict(_index(weight_file, adapter, limits, roots))
    shards: list[Shard] = []
    inodes: set[tuple[int, int]] = set()
    left_bytes = limits.max_header_bytes
    for path, names in expected.items():
        with RegularFile.open(path, adapter, roots) as file:
            where = f"adapter {adapter!r}: {path.name}"
            if file.stamp[:2] in inodes:
                raise AdapterFileFormatError(
                    f"{where} is the same file as another shard; each shard is a file of its own"
                )
            inodes.add(file.stamp[:2])
            header = _read_header(file, where, left_bytes)
            left_bytes -= len(header)
            shards.append(Shard(path, file.stamp, header, names))
    limit = limits.max_tensors * VALUES_A_TENSOR + SPARE_VALUES * len(shards)
    for shard in shards:
        _check_num_values(shard.header, limit, f"adapter {adapter!r}: the header of {shard.path.name}")
    return tuple(shards)


def parse_shards(shards: Sequence[Shard], adapter: str, limits: Limits | None = None) -> tuple[TensorEntry, ...]:
    """Their tensors. Raises AdapterFileFormatError, AdapterTruncatedError."""
    limits = limits or Limits()
    entries: list[TensorEntry] = []
    for number, shard in enumerate(shards):
        found = _entries_of(shard, number, adapter)
        entries.extend(found)
        if len(entries) > limits.max_tensors:
            raise AdapterFileFormatError(
                f"adapter {adapter!r} has more than {limits.max_tensors} tensors; no adapter of this base model has"
            )
        if shard.expected is not None and {entry.name for entry in found} != shard.expected:
            odd = sorted({entry.name for entry in found} ^ shard.expected)[:3]
            raise AdapterFileFormatError(
                f"adapter {adapter!r}: {shard.path.name} and {INDEX_NAME} disagree about {', '.join(map(shown, odd))}"
            )
    return tuple(entries)


def _index(index: Path, adapter: str, limits: Limits, roots: Roots) -> dict[Path, frozenset[str]]:
    """The shards and the tensors that each of them has."""
    where = f"adapter {adapter!r}: {INDEX_NAME}"
    data = _read_bounded(index, adapter, limits.max_header_bytes, roots)
    _check_num_values(data, 2 * limits.max_tensors + SPARE_VALUES, where)
    weight_map = _parse_json(data, where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise AdapterFileFormatError(f"{where} has no weight_map")
    shards: dict[Path, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
            raise AdapterFileFormatError(
                f"{where} names the shard {shown(name)}; a file beside it is wanted, of letters, digits and _.-, ending in .safetensors"
            )
        shards.setdefault(index.parent / name, set()).add(tensor)
    if len(shards) > MAX_SHARDS:
        raise AdapterFileFormatError(f"{where} names {len(shards)} shards, at most {MAX_SHARDS} are read")
    return {path: frozenset(tensors) for path, tensors in shards.items()}


def _entries_of(shard: Shard, number: int, adapter: str) -> list[TensorEntry]:
    where = f"adapter {adapter!r}: {shard.path.name}"
    document = _parse_json(shard.header, where)
    document.pop("__metadata__", None)
    entries = [_entry(name, fields, number, shard.data_start, where) for name, fields in document.items()]
    _check_extents(entries, shard, where)
    return entries


def _read_header(file: RegularFile, where: str, max_bytes: int) -> bytes:
    prefix = bytearray(8)
    if file.read_into(memoryview(prefix), 0) < 8:
        raise AdapterTruncatedError(
            f"{where} is truncated: {file.size} bytes, not even the header's length; copy the file again"
        )
    check_no_pointer(prefix, where)
    length = int.from_bytes(prefix, "little")
    if length > max_bytes:  # random bytes claim far more than any real file: say that first
        raise AdapterFileFormatError(
            f"{where} is not safetensors: its header would have {length} bytes (at most {max_bytes} are left for it)"
        )
    if 8 + length > file.size:
        raise AdapterTruncatedError(
            f"{where} is truncated: a header of {length} bytes in a file of {file.size}; copy the file again"
        )
    header = bytearray(min(length, 1))
    file.read_into(memoryview(header), 8)
    if header == b"{":
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
    if len(name) > MAX_NAME_CHARS:
        raise AdapterFileFormatError(
            f"{where} names a tensor in {len(name)} characters, at most {MAX_NAME_CHARS} are read"
        )
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise AdapterFileFormatError(f"{where} is damaged: the header of {name!r} is not dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    is_fine = _are_sizes(shape) and len(shape) <= 8 and _are_sizes(offsets) and len(offsets) == 2
    if not is_fine or not isinstance(dtype, str) or len(dtype) > MAX_DTYPE_CHARS or not dtype.isascii():
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
