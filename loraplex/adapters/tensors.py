"""Reading of an adapter's tensors: where each lies is worked out once for equal headers.

Then all are read, hashed and looked at for NaN and Inf in a few calls, none of which holds the interpreter's lock while
it goes over the bytes.

An adapter's identity is what it computes, whatever it is called and however it is filed:

    adapter_digest = blake2b-256( "loraplex-adapter-1" | len(canonical) | canonical
                                  | for each tensor, sorted by canonical name: len(line) | line | bytes )
    line           = JSON [canonical name, dtype, shape]
    bytes          = the tensor's elements, row-major, little-endian

Lengths are 8 bytes, little-endian. `canonical` is PEFTHelper.canonical(): all of the configuration that changes what
given tensors compute. Not in it: file names, shards, prefixes of tensor names, peft_version, the base's path,
target_modules (the tensors say it).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch

from loraplex.adapters.bin_file import read_bin
from loraplex.adapters.files import (
    BIN_NAME,
    MAX_TENSORS,
    AdapterFolder,
    Shard,
    TensorEntry,
    parse_shards,
    read_shards,
)
from loraplex.adapters.kinds import TensorName
from loraplex.adapters.regular_file import RegularFile
from loraplex.errors import AdapterTruncatedError

TAG = b"loraplex-adapter-1"
ALIGNMENT = 64
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EXPONENTS = {torch.float32: 0x7F800000, torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
INT_OF_SIZE = {4: torch.int32, 2: torch.int16}
FINITE_PIECE = 2**22
"""Numbers that are looked at together for NaN and Inf: each look makes a copy of them."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class WeightFile:
    """The weights of an adapter directory: of safetensors the headers as they were read, of .bin all tensors."""

    folder: AdapterFolder
    name: str
    max_tensors: int
    shards: tuple[Shard, ...] = ()
    loaded: Mapping[str, torch.Tensor] | None = None

    @classmethod
    def open(cls, folder: AdapterFolder, max_bytes: int, max_tensors: int = MAX_TENSORS) -> WeightFile:
        """Find the file and read its headers. Raises AdapterTooLargeError for a .bin beyond `max_bytes`."""
        name = folder.weight_name()
        if name == BIN_NAME:
            return cls(folder, name, max_tensors, loaded=read_bin(folder, max_bytes, max_tensors))
        return cls(folder, name, max_tensors, read_shards(folder, name, max_tensors))

    @cached_property
    def entries(self) -> tuple[TensorEntry, ...]:
        """The tensors, by the names in the file; headers are parsed now. Raises what `parse_shards` raises."""
        if self.loaded is not None:
            return tuple(_entry_of(name, tensor) for name, tensor in self.loaded.items())
        return parse_shards(self.folder, self.shards, self.max_tensors)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """Where tensors lie in their files, and in one block of memory: in canonical order, each aligned to 64 bytes.

    starts: bytes in the block; lines: what the digest has before each of them.
    """

    names: tuple[TensorName, ...]
    entries: tuple[TensorEntry, ...]
    starts: tuple[int, ...]
    lines: tuple[bytes, ...]
    block_bytes: int

    @classmethod
    def of(cls, names: Mapping[TensorName, TensorEntry]) -> ReadPlan:
        """names: what to read; dtypes of DTYPES only."""
        ordered = sorted(names.items(), key=lambda item: item[0].canonical)
        entries = tuple(entry for _, entry in ordered)
        ends = tuple(accumulate((-(-entry.nbytes // ALIGNMENT) * ALIGNMENT for entry in entries), initial=0))
        lines = tuple(digest_line(name.canonical, entry.dtype, entry.shape) for name, entry in ordered)
        return cls(tuple(name for name, _ in ordered), entries, ends[:-1], lines, ends[-1])

    @cached_property
    def nbytes(self) -> int:
        """Of the tensors."""
        return sum(entry.nbytes for entry in self.entries)

    @cached_property
    def views(self) -> tuple[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int], ...]:
        """Of each tensor: dtype, shape, strides, and its first element, counted in elements from the block's start.

        Of tensors that were found good, which have one or two axes.
        """
        return tuple(
            (dtype := DTYPES[entry.dtype], shape := entry.shape, (shape[-1], 1)[-len(shape) :], start // dtype.itemsize)
            for entry, start in zip(self.entries, self.starts, strict=True)
        )

    def tensors(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Those of a block that was read by this plan."""
        typed = {dtype: block.view(dtype) for dtype in {dtype for dtype, *_ in self.views}}
        return [typed[dtype].as_strided(shape, strides, first) for dtype, shape, strides, first in self.views]

    @cached_property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of tensors that follow one another in a file without a gap, in its order."""
        runs: list[list[int]] = []
        place = (-1, 0)
        for index in sorted(range(len(self.entries)), key=lambda i: (self.entries[i].shard, self.entries[i].offset)):
            entry = self.entries[index]
            if (entry.shard, entry.offset) != place:
                runs.append([])
            runs[-1].append(index)
            place = entry.shard, entry.offset + entry.nbytes
        return tuple(tuple(run) for run in runs)


def digest_line(canonical_name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """What stands before a tensor's bytes."""
    return _sized(json.dumps([canonical_name, dtype, shape], separators=(",", ":")).encode())


def adapter_digest(canonical: bytes, tensors: Iterable[tuple[bytes, memoryview]]) -> str:
    """(line, bytes) of each tensor, in the order of their canonical names."""
    content = hashlib.blake2b(TAG + _sized(canonical), digest_size=32)
    for line, data in tensors:
        content.update(line)
        content.update(data)  # releases the interpreter lock
    return content.hexdigest()


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def read_tensors(file: WeightFile, plan: ReadPlan, canonical: bytes) -> tuple[torch.Tensor, str, list[str]]:
    """(the block, the adapter's digest, names in the file of tensors with NaN or Inf)."""
    block = torch.empty(plan.block_bytes, dtype=torch.uint8)
    view = block.numpy().data
    parts = [view[start : start + entry.nbytes] for start, entry in zip(plan.starts, plan.entries, strict=True)]
    if file.loaded is None:
        _read_shards_into(parts, file, plan)
    else:
        for entry, part in zip(plan.entries, parts, strict=True):
            part[:] = file.loaded[entry.name].contiguous().view(-1).view(torch.uint8).numpy().data
    digest = adapter_digest(canonical, zip(plan.lines, parts, strict=True))
    return block, digest, _not_finite(plan, block)


def _read_shards_into(parts: Sequence[memoryview], file: WeightFile, plan: ReadPlan) -> None:
    """Each file must be the one whose header was read, at the beginning and at the end."""
    with contextlib.ExitStack() as stack:
        opened: dict[int, RegularFile] = {}
        for run in plan.runs:
            number = plan.entries[run[0]].shard
            if number not in opened:
                opened[number] = stack.enter_context(_unchanged(file.shards[number], file.folder))
            done = opened[number].read_pieces([parts[index] for index in run], plan.entries[run[0]].offset)
            for index in run:
                done -= plan.entries[index].nbytes
                if done < 0:
                    text = f"ended within {plan.entries[index].name!r} while it was read; copy the file again"
                    raise AdapterTruncatedError(f"{opened[number].where} {text}")


@contextlib.contextmanager
def _unchanged(shard: Shard, folder: AdapterFolder) -> Iterator[RegularFile]:
    with folder.open(shard.name) as file:
        file.check_unchanged(shard.stamp)
        file.check_stored()
        yield file
        file.check_unchanged(shard.stamp)


def _not_finite(plan: ReadPlan, block: torch.Tensor) -> list[str]:
    """Names of the tensors with NaN or Inf. To look at the whole block first is quicker than at hundreds of tensors."""
    dtypes = {entry.dtype for entry in plan.entries}
    if len(dtypes) == 1 and is_finite(block.view(DTYPES[dtypes.pop()])):
        return []
    pieces = (
        (entry, block[start : start + entry.nbytes]) for start, entry in zip(plan.starts, plan.entries, strict=True)
    )
    return [entry.name for entry, piece in pieces if not is_finite(piece.view(DTYPES[entry.dtype]))]


def is_finite(tensor: torch.Tensor) -> bool:
    """No NaN, no Inf: no exponent is all ones. In numpy: torch would start a pool of threads for each loader thread."""
    mask = EXPONENTS[tensor.dtype]
    bits = tensor.contiguous().view(-1).view(INT_OF_SIZE[tensor.element_size()]).numpy()
    pieces = (bits[start : start + FINITE_PIECE] for start in range(0, bits.size, FINITE_PIECE))
    return all(int(np.bitwise_and(piece, mask).max()) != mask for piece in pieces)


def _entry_of(name: str, tensor: torch.Tensor) -> TensorEntry:
    dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return TensorEntry(name, dtype, tuple(tensor.shape), tensor.numel() * tensor.element_size())
