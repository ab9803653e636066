"""The headers of a model's weights: names, dtypes, shapes. No tensor is read, and every size is bounded first."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.adapters.files import MAX_SHARDS, SHARD_NAME
from loraplex.errors import ModelConfigError, ModelError, ModelNotFoundError, ModelWeightError, shown
from loraplex.models.checkpoints.files import INDEX_FILE, WEIGHTS_FILE
from loraplex.models.checkpoints.gguf import GgufFile, type_name

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 2**22
MAX_INDEX_BYTES = 2**26
MAX_HEADER_BYTES = 2**26
"""Of all files of a model together. A model of 100,000 tensors has 12 MiB."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of a checkpoint; `dtype` as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def get_shape(self) -> tuple[int, ...]:
        """As a slice of an opened file."""
        return self.shape


def read_object(file: Path, max_bytes: int, kind: type[ModelError]) -> dict[str, Any]:
    """The JSON object in a regular file. Raises `kind`."""
    return _parsed(_read(file, 0, max_bytes, kind), file, kind)


def read_config(directory: Path) -> dict[str, Any]:
    """Its config.json. Raises ModelNotFoundError where there is none, ModelConfigError."""
    file = directory / CONFIG_FILE
    if not os.path.lexists(file):
        raise ModelNotFoundError(f"{directory} has no {CONFIG_FILE}: give the directory of a model")
    return read_object(file, MAX_CONFIG_BYTES, ModelConfigError)


def weight_files(directory: Path) -> Sequence[str]:
    """The safetensors files of a model directory. Raises ModelWeightError."""
    index = directory / INDEX_FILE
    if not os.path.lexists(index):
        if os.path.lexists(directory / WEIGHTS_FILE):
            return [WEIGHTS_FILE]
        raise ModelWeightError(f"{directory} has no {WEIGHTS_FILE} and no {INDEX_FILE}")
    weight_map = read_object(index, MAX_INDEX_BYTES, ModelWeightError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelWeightError(f"{index} has no weight_map")
    names = {name if isinstance(name, str) else "" for name in weight_map.values()}
    if wrong := [name for name in names if not SHARD_NAME.fullmatch(name)]:
        raise ModelWeightError(f"{index} names {shown(wrong[0])}, which is not the name of a file beside it")
    if len(names) > MAX_SHARDS:
        raise ModelWeightError(f"{index} names {len(names)} files, at most {MAX_SHARDS} are read")
    return sorted(names)


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """Every tensor of a model directory by its name. Raises ModelWeightError, which names the file."""
    found: dict[str, TensorHeader] = {}
    left_bytes = MAX_HEADER_BYTES
    for name in weight_files(directory):
        file = directory / name
        length = int.from_bytes(_read(file, 0, 8, ModelWeightError, is_prefix=True), "little")
        if length > left_bytes:
            text = f"its header would have {length} bytes, {left_bytes} are left for it"
            raise ModelWeightError(f"{file} is not safetensors: {text}")
        left_bytes -= length
        header = _parsed(_read(file, 8, length, ModelWeightError, is_prefix=True), file, ModelWeightError)
        found |= _tensors(header, file, 8 + length)
    return found


def gguf_headers(file: GgufFile) -> dict[str, TensorHeader]:
    """Every tensor of a GGUF file; dtypes are ggml's types."""
    return {
        name: TensorHeader(type_name(tensor.type_id), tensor.shape, file.num_bytes(tensor))
        for name, tensor in file.tensors.items()
    }


def headers_of(infos: Mapping[str, Any]) -> dict[str, TensorHeader]:
    """The same of a hub's answer (`source.fetch_headers`)."""
    return {
        name: TensorHeader(info.dtype, tuple(info.shape), info.data_offsets[1] - info.data_offsets[0])
        for name, info in infos.items()
    }


def _tensors(header: Mapping[str, Any], file: Path, data_start: int) -> dict[str, TensorHeader]:
    tensors: dict[str, TensorHeader] = {}
    last = 0
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (begin, end) = str(fields["dtype"]), tuple(fields["shape"]), fields["data_offsets"]
            sizes = (*shape, begin, end)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelWeightError(f"{file} is damaged: the header of {shown(name)} cannot be read") from error
        if not all(type(size) is int and 0 <= size < 2**48 for size in sizes) or begin > end or len(shape) > 8:
            raise ModelWeightError(f"{file} is damaged: {shown(name)} has a wrong shape or offset")
        tensors[name] = TensorHeader(dtype, shape, end - begin)
        last = max(last, end)
    size = os.stat(file).st_size
    if data_start + last > size:
        text = f"its tensors end at byte {data_start + last}, the file at {size}"
        raise ModelWeightError(f"{file} is truncated: {text}; copy or fetch it again")
    return tensors


def _read(file: Path, offset: int, num_bytes: int, kind: type[ModelError], is_prefix: bool = False) -> bytes:
    """So many bytes of a regular file; without `is_prefix` all of it, which may be fewer, not more."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would block without O_NONBLOCK
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                raise kind(f"{file} is not a regular file")
            if not is_prefix and about.st_size > num_bytes:
                raise kind(f"{file} has {about.st_size} bytes, at most {num_bytes} are read")
            if is_prefix and about.st_size < offset + num_bytes:
                raise kind(f"{file} is truncated: it has {about.st_size} bytes, its header needs {offset + num_bytes}")
            return os.pread(fd, num_bytes, offset)
        finally:
            os.close(fd)
    except OSError as error:
        raise kind(f"{file} cannot be read: {error.strerror}") from error


def _parsed(data: bytes, file: Path, kind: type[ModelError]) -> dict[str, Any]:
    if data.startswith(b"version "):
        raise kind(f"{file} is a git-lfs pointer, not the file; run `git lfs pull` in its repository")
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise kind(f"{file} is damaged: no JSON where it has to be ({error})") from error
    if not isinstance(document, dict):
        raise kind(f"{file} holds {type(document).__name__}, not a JSON object")
    return document
