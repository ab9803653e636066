"""Reading of an adapter's tensors: one pass that copies, checks for NaN and Inf, and hashes, tensor by tensor while it is in the cache."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from loraplex.adapters.bin_file import read_bin
from loraplex.adapters.digest import AdapterHasher
from loraplex.adapters.files import (
    BIN_NAME,
    TensorEntry,
    find_weight_file,
    read_safetensors_entries,
)
from loraplex.adapters.regular_file import RegularFile, check_size
from loraplex.adapters.tensor_names import TensorName
from loraplex.errors import AdapterTruncatedError

ALIGNMENT = 64
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EXPONENTS = {torch.float32: 0x7F800000, torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
INT_OF_SIZE = {4: torch.int32, 2: torch.int16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class WeightFile:
    """The tensors of an adapter directory, by the names in the file; `loaded` holds them when the format reads all at once (.bin)."""

    path: Path
    entries: tuple[TensorEntry, ...]
    loaded: Mapping[str, torch.Tensor] | None = None

    @classmethod
    def open(cls, directory: Path, adapter: str, max_bytes: int) -> WeightFile:
        """Find and parse the file; of safetensors only headers are read. Raises AdapterTooLargeError beyond `max_bytes` of tensors."""
        path = find_weight_file(directory, adapter)
        if path.name == BIN_NAME:
            loaded = read_bin(path, adapter, max_bytes)
            return cls(path, tuple(_entry_of(path, name, tensor) for name, tensor in loaded.items()), loaded)
        file = cls(path, read_safetensors_entries(path, adapter))
        check_size(file.nbytes, max_bytes, adapter)
        return file

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True)
class ReadTensors:
    """Tensors by canonical name, each aligned to 64 bytes in one block; names (of the file) of those with NaN or Inf; the digest."""

    by_name: Mapping[TensorName, torch.Tensor]
    not_finite: tuple[str, ...]
    adapter_digest: str


def read_tensors(
    file: WeightFile, names: Mapping[TensorName, TensorEntry], canonical: bytes, adapter: str
) -> ReadTensors:
    """Read the entries of `names` (dtypes of DTYPES only) in canonical order."""
    ordered = sorted(names.items(), key=lambda item: item[0].canonical)
    hasher = AdapterHasher(canonical)
    block = torch.empty(sum(_aligned(entry.nbytes) for _, entry in ordered), dtype=torch.uint8)
    view, offset = block.numpy().data, 0
    found: dict[TensorName, torch.Tensor] = {}
    with _Source(file, adapter) as source:
        for name, entry in ordered:
            part = view[offset : offset + entry.nbytes]
            source.read(entry, part)
            tensor = block[offset : offset + entry.nbytes].view(DTYPES[entry.dtype]).view(entry.shape)
            hasher.add(name.canonical, entry.dtype, entry.shape, part)
            found[name] = tensor
            offset += _aligned(entry.nbytes)
    return ReadTensors(found, _not_finite(block, ordered, found), hasher.hexdigest())


def _not_finite(
    block: torch.Tensor, entries: Sequence[tuple[TensorName, TensorEntry]], found: Mapping[TensorName, torch.Tensor]
) -> tuple[str, ...]:
    """Names of the tensors with NaN or Inf. The whole block is looked at first, which is quicker than hundreds of tensors."""
    dtypes = {tensor.dtype for tensor in found.values()}
    if len(dtypes) == 1 and is_finite(block.view(*dtypes)):
        return ()
    return tuple(entry.name for name, entry in entries if not is_finite(found[name]))


def is_finite(tensor: torch.Tensor) -> bool:
    """No NaN, no Inf: no exponent is all ones. In numpy, because torch would start a pool of threads for each loader thread."""
    mask = EXPONENTS[tensor.dtype]
    bits = tensor.contiguous().view(-1).view(INT_OF_SIZE[tensor.element_size()]).numpy()
    return bits.size == 0 or int(np.bitwise_and(bits, mask).max()) != mask


def pack_aligned(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the tensors, contiguous, each at a multiple of 64 bytes of one block."""
    block = torch.empty(sum(_aligned(tensor.nbytes) for tensor in tensors), dtype=torch.uint8)
    packed, offset = [], 0
    for tensor in tensors:
        view = block[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        packed.append(view.copy_(tensor))
        offset += _aligned(tensor.nbytes)
    return packed


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _entry_of(path: Path, name: str, tensor: torch.Tensor) -> TensorEntry:
    dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return TensorEntry(name, dtype, tuple(tensor.shape), tensor.numel() * tensor.element_size(), path)


class _Source:
    """Copies the bytes of entries; opens each shard once, and makes sure that it is the file whose header was read."""

    def __init__(self, file: WeightFile, adapter: str) -> None:
        self._loaded = file.loaded
        self._adapter = adapter
        self._open: dict[Path, RegularFile] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        with self._stack:
            if kind is None:
                for file in self._open.values():
                    file.check_unchanged(file.stamp)

    def read(self, entry: TensorEntry, into: memoryview) -> None:
        if self._loaded is not None:
            into[:] = self._loaded[entry.name].contiguous().view(-1).view(torch.uint8).numpy().data
        elif self._file(entry).read_into(into, entry.offset) < entry.nbytes:
            raise AdapterTruncatedError(
                f"adapter {self._adapter!r}: {entry.path.name} ended within {entry.name!r} while it was read; copy the file again"
            )

    def _file(self, entry: TensorEntry) -> RegularFile:
        if entry.path not in self._open:
            file = self._stack.enter_context(RegularFile.open(entry.path, self._adapter))
            file.check_unchanged(entry.stamp)
            self._open[entry.path] = file
        return self._open[entry.path]
