"""The header of a GGUF file, version 2 or 3: metadata, and where tensors lie. Its numbers are not read.

Every count is checked against the bytes that are left before anything is made of it.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.errors import ModelConfigError, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 65536
"""Of metadata, and of tensors."""

MAX_NAME_BYTES = 1024
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """shape: slowest dimension first. offset: bytes from the file's beginning."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    num_bytes: int

    @classmethod
    def read(cls, path: Path) -> GgufHeader:
        """Raises ModelConfigError, which names the file and what is wrong."""
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
        except (OSError, ValueError) as e:
            raise ModelConfigError(f"{path}: cannot be read as GGUF ({e})") from e


class _Reader:
    """A cursor over the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at, self._end = path, data, 0, len(data)

    def header(self) -> GgufHeader:
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._scalar("<I")
        if version not in VERSIONS:
            raise ValueError(f"version {version} is not supported; only 2 and 3, little-endian")
        num_tensors, num_entries = self._count("tensors"), self._count("metadata entries")
        metadata = {}
        for _ in range(num_entries):
            key = self._string(MAX_NAME_BYTES)
            metadata[key] = self._value(self._scalar("<I"))
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment must be a power of two from 8 on, got {shown(alignment)}")
        for tensor in found:
            if tensor.offset % alignment:
                where = f"begins at byte {tensor.offset}, which is no multiple of {alignment}"
                raise ValueError(f"tensor {shown(tensor.name)} {where}")
        start = -(-self._at // alignment) * alignment
        tensors = {t.name: GgufTensor(t.name, t.shape, t.type_id, start + t.offset) for t in found}
        if len(tensors) != num_tensors:
            raise ValueError("two tensors have one name")
        return GgufHeader(self._path, metadata, tensors, self._end)

    def _tensor(self) -> GgufTensor:
        name, num_dims = self._string(MAX_NAME_BYTES), self._scalar("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise ValueError(f"tensor {shown(name)} has {num_dims} dimensions; at most {MAX_DIMS} are read")
        dims = [self._scalar("<Q") for _ in range(num_dims)]
        if not 0 < math.prod(dims) < 1 << 48:
            raise ValueError(f"tensor {shown(name)} has dimensions {dims}")
        return GgufTensor(name, tuple(reversed(dims)), self._scalar("<I"), self._scalar("<Q"))

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind == STRING:
            return self._string(self._end)
        if kind != ARRAY:
            raise ValueError(f"a metadata value has type {kind}, which does not exist")
        element, count = self._scalar("<I"), self._scalar("<Q")
        if element in SCALARS:
            code = SCALARS[element][1]
            return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}"))))
        if element != STRING or count > (self._end - self._at) // 8:
            raise ValueError(f"a metadata array has {count} entries of type {element}")
        return [self._string(self._end) for _ in range(count)]

    def _count(self, what: str) -> int:
        count: int = self._scalar("<Q")
        if count > MAX_ENTRIES:
            raise ValueError(f"it says that it has {count} {what}; at most {MAX_ENTRIES} are read")
        return count

    def _string(self, limit: int) -> str:
        length = self._scalar("<Q")
        if length > limit:
            raise ValueError(f"a text has {length} bytes; at most {limit} are read")
        return self._take(length).decode("utf-8", errors="replace")

    def _scalar(self, code: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _take(self, size: int) -> bytes:
        if size > self._end - self._at:
            raise ValueError(f"it ends at byte {self._end}, in the middle of its header")
        self._at += size
        return self._data[self._at - size : self._at]
