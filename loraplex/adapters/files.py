"""The files of an adapter directory, opened and parsed so that no content can harm the process.

    adapter_config.json                        at most MAX_CONFIG_BYTES, MAX_CONFIG_VALUES
    adapter_model.safetensors                  or
    adapter_model.safetensors.index.json       with its shards, or
    adapter_model.bin                          (bin_file.py)
    TEXT_NAMES                                 if there are any (text/adapter_text.py)

From here to a tensor a file passes, in this order: its path (source.py), the open descriptor (regular_file.py: roots, a
plain file), configuration (here, then fields.py, format.py), index and headers (here), names and shapes against the
base (validation.py), bytes (tensors.py: unchanged, not sparse, digest, finite).

`max_tensors` bounds tensors and headers of the whole adapter, all shards together. JSON is counted before it is parsed
(bounds/json_size.py).

Sizes come from the file system, never from the file's own claims. Files are read, not mapped: a mapped file that its
owner truncates kills the process (SIGBUS), and the bytes that were hashed must be the bytes that are served.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from loraplex.adapters.regular_file import RegularFile, Roots, Stamp
from loraplex.bounds.json_size import MAX_LONG_NUMBERS, Excess, excess_of
from loraplex.errors import (
    AdapterConfigMissingError,
    AdapterFileFormatError,
    AdapterLoadError,
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
NEW_EMBEDDINGS = ("new_embeddings.safetensors", "new_embeddings.bin")
"""Where older vLLM looks for rows of added tokens: to serve without them would be another adapter."""
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
TEMPLATE, GENERATION_CONFIG = "chat_template.jinja", "generation_config.json"
TOKEN_NAMES = (TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS)
TEXT_NAMES = (*TOKEN_NAMES, TEMPLATE, GENERATION_CONFIG)
"""What is about the text of its requests (text/adapter_text.py)."""

MAX_CONFIG_BYTES = 2**20
MAX_CONFIG_VALUES = 2**16
MAX_CONFIG_DEPTH = 16
MAX_SHARDS = 1024
MAX_NAME_CHARS, MAX_NAME_DOTS = 512, 32
"""Of a tensor's name: what a configuration may say of a module grows with its dots."""
MAX_DTYPE_CHARS = 32

MIN_TENSORS, MAX_TENSORS = 2**13, 2**16
"""What is read of one adapter, all shards together, whatever the base model; MAX_TENSORS where none is known."""
HEADER_BYTES_A_TENSOR = 256
VALUES_A_TENSOR = 20
SPARE_VALUES = 2**12
"""A tensor's name, dtype, shape and offsets are 12 bytes of `,:[{`, with eight axes 18; the rest is `__metadata__`."""
METADATA_KEY = b'"__metadata__"'
MAX_METADATA_BYTES, MAX_METADATA_VALUES = 2 * MAX_CONFIG_BYTES, 2**18
"""Of what `metadata_of` looks at: a configuration as a string, and the tensors behind it, which it does not parse."""

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}
DTYPE_BYTES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1}
SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\.safetensors")
_ENTRY_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a weight file: `nbytes` at `offset` of shard number `shard`; `dtype` as safetensors names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    shard: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """A safetensors file as it was at `stamp`: its header, JSON. expected: the tensors that an index says it has."""

    name: str
    stamp: Stamp
    header: bytes
    expected: frozenset[str] | None = None

    @property
    def data_start(self) -> int:
        return 8 + len(self.header)

    @property
    def size(self) -> int:
        return self.stamp[2]


# --------------------------------------------------------------------------------------------------------- directory


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The directory of what messages call `adapter`. roots: where its files must lie whenever they are opened."""

    path: Path
    adapter: str
    roots: Roots = None

    def open(self, name: str) -> AbstractContextManager[RegularFile]:
        return RegularFile.open(self.path / name, self.adapter, self.roots)

    def where(self, name: str) -> str:
        """How messages about a file begin."""
        return f"adapter {self.adapter!r}: {name}"

    def read(self, name: str, max_bytes: int) -> bytes:
        with self.open(name) as file:
            if file.size > max_bytes:
                raise AdapterFileFormatError(f"{file.where} has {file.size} bytes, at most {max_bytes} are read")
            return bytes(file.read_all())

    def check(self) -> None:
        """Raise AdapterPathNotFoundError or AdapterPermissionError unless this is a directory that can be entered."""
        adapter = f"adapter {self.adapter!r}"
        try:
            is_directory = stat.S_ISDIR(os.stat(self.path).st_mode)
        except PermissionError as error:
            raise AdapterPermissionError(f"{adapter}: its directory may not be read: {error.strerror}") from error
        except (OSError, ValueError) as error:
            raise AdapterPathNotFoundError(f"{adapter}: no such directory") from error
        if not is_directory:
            raise AdapterPathNotFoundError(f"{adapter}: this is not a directory; give the one with {CONFIG_NAME}")
        if not os.access(self.path, os.X_OK):
            raise AdapterPermissionError(f"{adapter}: its directory may not be read: permission denied")

    def read_config(self) -> Any:
        """The document in `adapter_config.json`, at most MAX_CONFIG_DEPTH deep.

        Raises AdapterConfigMissingError, AdapterFileFormatError, and what opening raises.
        """
        self.check()
        where = self.where(CONFIG_NAME)
        try:
            data = self.read(CONFIG_NAME, MAX_CONFIG_BYTES)
        except AdapterWeightsMissingError as error:
            text = f"there is no {CONFIG_NAME}; is it the output of save_pretrained?"
            raise AdapterConfigMissingError(f"adapter {self.adapter!r}: {text}") from error
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

    def weight_name(self) -> str:
        """The first of WEIGHT_NAMES that exists. Raises AdapterWeightsMissingError.

        Raises AdapterFileFormatError where a file of NEW_EMBEDDINGS lies beside it.
        """
        self.check()
        for name in NEW_EMBEDDINGS:
            if os.path.lexists(self.path / name):
                text = "is not read; save the adapter with save_embedding_layers=True, which needs no such file"
                raise AdapterFileFormatError(f"{self.where(name)} {text}")
        for name in WEIGHT_NAMES:
            if os.path.lexists(self.path / name):
                return name
        names = ", ".join(WEIGHT_NAMES)
        raise AdapterWeightsMissingError(f"adapter {self.adapter!r}: its directory has none of {names}")

    def shard_names(self) -> frozenset[str]:
        """The .safetensors files; none of a directory that is not there.

        Raises AdapterFileFormatError for more than a load reads. A directory that may be entered but not listed would
        keep its files from every check (Path.glob takes it for an empty one): AdapterPermissionError, AdapterLoadError.
        """
        where = f"adapter {self.adapter!r}: its directory"
        try:
            with os.scandir(self.path) as entries:
                names = (entry.name for entry in entries)
                found = frozenset(islice(filter(SHARD_NAME.fullmatch, names), MAX_SHARDS + 1))
        except (FileNotFoundError, NotADirectoryError):
            return frozenset()
        except OSError as error:
            kind = AdapterPermissionError if isinstance(error, PermissionError) else AdapterLoadError
            raise kind(f"{where} cannot be listed: {error.strerror}") from error
        if len(found) > MAX_SHARDS:
            raise AdapterFileFormatError(f"{where} has more than {MAX_SHARDS} .safetensors files")
        return found


def read_files(folder: AdapterFolder) -> list[Path]:
    """The files of an adapter's directory that a load may read, there or not. Raises what `shard_names` raises."""
    names = (CONFIG_NAME, *WEIGHT_NAMES, *TEXT_NAMES, *sorted(folder.shard_names()))
    return [folder.path / name for name in names]


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _check_num_values(data: bytes, limit: int, where: str) -> None:
    """Before JSON is parsed: raise AdapterFileFormatError for more values than `limit`, or too many long numbers."""
    excess = excess_of(data, limit)
    if excess is not None:
        most = limit if excess is Excess.VALUES else MAX_LONG_NUMBERS
        raise AdapterFileFormatError(f"{where} has more than {most} {excess.value}; none of a real adapter has")


def damaged(where: str, what: str) -> AdapterFileFormatError:
    return AdapterFileFormatError(f"{where} is damaged: {what}")


def _truncated(where: str, what: str) -> AdapterTruncatedError:
    return AdapterTruncatedError(f"{where} is truncated: {what}; copy the file again")


def check_no_pointer(start: bytes | bytearray, where: str) -> None:
    """A clone without git-lfs has text where the file should be."""
    if start[:8] == b"version ":
        text = "is a git-lfs pointer, not the file; run `git lfs pull` in its repository"
        raise AdapterFileFormatError(f"{where} {text}")


# ------------------------------------------------------------------------------------------------------- safetensors


def read_shards(folder: AdapterFolder, name: str, max_tensors: int) -> tuple[Shard, ...]:
    """The headers of a safetensors file, or of all shards of an index; not parsed, since those of many are equal.

    Their bytes are bounded together, before each is read; two shards may not be one file.
    """
    expected: dict[str, frozenset[str] | None] = {name: None}
    if name == INDEX_NAME:
        expected = dict(_read_index(folder, max_tensors))
    shards: list[Shard] = []
    inodes: set[tuple[int, int]] = set()
    left_bytes = max_tensors * HEADER_BYTES_A_TENSOR
    for each, names in expected.items():
        with folder.open(each) as file:
            if file.stamp[:2] in inodes:
                text = "is the same file as another shard; each shard is a file of its own"
                raise AdapterFileFormatError(f"{file.where} {text}")
            inodes.add(file.stamp[:2])
            header = _read_header(file, left_bytes)
            left_bytes -= len(header)
            shards.append(Shard(each, file.stamp, header, names))
    limit = max_tensors * VALUES_A_TENSOR + SPARE_VALUES * len(shards)
    for shard in shards:
        _check_num_values(shard.header, limit, folder.where(f"the header of {shard.name}"))
    return tuple(shards)


def metadata_of(folder: AdapterFolder) -> dict[str, Any]:
    """What the safetensors file of a folder says beside its tensors, which are not parsed: a server may ask.

    Raises what `read_shards` raises, AdapterFileFormatError. What is said twice, or is none of the file's own metadata,
    is refused when the file is opened.
    """
    shard = read_shards(folder, SAFETENSORS_NAME, MAX_TENSORS)[0]
    where = folder.where(f"{METADATA_KEY.decode()} of {shard.name}")
    begin = shard.header.find(METADATA_KEY)
    if begin < 0:
        return {}
    piece = shard.header[begin + len(METADATA_KEY) :][:MAX_METADATA_BYTES].lstrip(b" \t\r\n:")
    _check_num_values(piece, MAX_METADATA_VALUES, where)
    try:
        found, _ = json.JSONDecoder().raw_decode(piece.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise damaged(where, f"it is no JSON of at most {MAX_METADATA_BYTES} bytes: {error}") from error
    return found if isinstance(found, dict) else {}


def parse_shards(folder: AdapterFolder, shards: Sequence[Shard], max_tensors: int) -> tuple[TensorEntry, ...]:
    """Their tensors. Raises AdapterFileFormatError, AdapterTruncatedError."""
    entries: list[TensorEntry] = []
    for number, shard in enumerate(shards):
        found = _entries_of(shard, number, folder.where(shard.name))
        entries.extend(found)
        if len(entries) > max_tensors:
            text = f"has more than {max_tensors} tensors; no adapter of this base model has"
            raise AdapterFileFormatError(f"adapter {folder.adapter!r} {text}")
        odd = () if shard.expected is None else {entry.name for entry in found} ^ shard.expected
        if odd:
            listed = ", ".join(map(shown, sorted(odd)[:3]))
            raise AdapterFileFormatError(f"{folder.where(shard.name)} and {INDEX_NAME} disagree about {listed}")
    return tuple(entries)


def _read_index(folder: AdapterFolder, max_tensors: int) -> dict[str, frozenset[str]]:
    """The shards and the tensors that each of them has."""
    where = folder.where(INDEX_NAME)
    data = folder.read(INDEX_NAME, max_tensors * HEADER_BYTES_A_TENSOR)
    _check_num_values(data, 2 * max_tensors + SPARE_VALUES, where)
    weight_map = _parse_json(data, where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise AdapterFileFormatError(f"{where} has no weight_map")
    shards: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not SHARD_NAME.fullmatch(name):
            text = "a file beside it is wanted, of letters, digits and _.-, ending in .safetensors"
            raise AdapterFileFormatError(f"{where} names the shard {shown(name)}; {text}")
        shards.setdefault(name, set()).add(tensor)
    if len(shards) > MAX_SHARDS:
        raise AdapterFileFormatError(f"{where} names {len(shards)} shards, at most {MAX_SHARDS} are read")
    unlisted = shards.keys() - folder.shard_names()
    if unlisted:  # no check saw it
        raise AdapterWeightsMissingError(f"{folder.where(min(unlisted))} is missing")
    return {name: frozenset(tensors) for name, tensors in shards.items()}


def _read_header(file: RegularFile, max_bytes: int) -> bytes:
    where, prefix = file.where, bytearray(8)
    if file.read_into(memoryview(prefix), 0) < 8:
        raise _truncated(where, f"{file.size} bytes, not even the header's length")
    check_no_pointer(prefix, where)
    length = int.from_bytes(prefix, "little")
    if length > max_bytes:  # random bytes claim far more than any real file: say that first
        text = f"its header would have {length} bytes (at most {max_bytes} are left for it)"
        raise AdapterFileFormatError(f"{where} is not safetensors: {text}")
    if 8 + length > file.size:
        raise _truncated(where, f"a header of {length} bytes in a file of {file.size}")
    header = bytearray(min(length, 1))
    file.read_into(memoryview(header), 8)
    if header == b"{":
        header = bytearray(length)
        file.read_into(memoryview(header), 8)
    if not header.startswith(b"{"):
        raise AdapterFileFormatError(f"{where} is not safetensors: its header does not begin with '{{'")
    return bytes(header)


def _parse_json(data: bytes, where: str) -> dict[str, Any]:
    def refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key is there twice")
        return found

    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=refuse_repeats)
    except (ValueError, RecursionError) as error:
        raise damaged(where, f"its header is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise damaged(where, "its header is not a JSON object")
    return document


def _entries_of(shard: Shard, number: int, where: str) -> list[TensorEntry]:
    """Tensors follow one another without gap or overlap from the header to the end of the file."""
    document = _parse_json(shard.header, where)
    document.pop("__metadata__", None)
    entries = [_entry(name, fields, number, shard.data_start, where) for name, fields in document.items()]
    position = shard.data_start
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != position:
            raise damaged(where, f"{entry.name!r} does not begin where the tensor before it ends")
        position += entry.nbytes
    if position > shard.size:
        raise _truncated(where, f"its tensors end at byte {position}, the file at {shard.size}")
    if position < shard.size:
        raise damaged(where, f"{shard.size - position} bytes follow its last tensor")
    return entries


def _are_sizes(values: Any) -> bool:
    return type(values) is list and all(type(value) is int and 0 <= value < 2**48 for value in values)


def check_name(name: str, where: str) -> None:
    """Raise AdapterFileFormatError for a name of a tensor that is longer or deeper than those of models."""
    for num, limit, what in ((len(name), MAX_NAME_CHARS, "characters"), (name.count("."), MAX_NAME_DOTS, "dots")):
        if num > limit:
            text = f"names a tensor in {num} {what}, at most {limit} are read"
            raise AdapterFileFormatError(f"{where} {text}")


def _entry(name: str, fields: Any, shard: int, data_start: int, where: str) -> TensorEntry:
    check_name(name, where)
    if not isinstance(fields, dict) or fields.keys() != _ENTRY_FIELDS:
        raise damaged(where, f"the header of {name!r} is not dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    is_fine = _are_sizes(shape) and len(shape) <= 8 and _are_sizes(offsets) and len(offsets) == 2
    if not is_fine or not isinstance(dtype, str) or len(dtype) > MAX_DTYPE_CHARS or not dtype.isascii():
        raise damaged(where, f"the header of {name!r} has a wrong dtype, shape or offset")
    begin, end = offsets
    expected = math.prod(shape) * DTYPE_BYTES.get(dtype, 0)
    if end < begin or (dtype in DTYPE_BYTES and end - begin != expected):
        raise damaged(where, f"{name!r} takes {end - begin} bytes, its shape and dtype {expected}")
    return TensorEntry(name, dtype, tuple(shape), end - begin, shard, data_start + begin)
