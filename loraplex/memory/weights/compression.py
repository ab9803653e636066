"""Compressed copies of cold adapters on the host: fewer bytes at rest, restored into extents as they were.

    lossless   the words' bytes in planes (all first bytes, all second bytes, ...), each deflated where that pays: the
               same bit for bit
    int8       each rank row, A's row and B's column of one rank, as int8 with a float32 scale; biases, gains, scalings
               and weights of the adapter's own as they are

What is left of normally distributed weights of rank 16, 896 inputs and outputs: lossless 0.67 of bfloat16, 0.84 of
float16, 0.83 of float32; int8 0.50 of 16 bits, 0.25 of 32. Lossless is what weights allow: mantissas are noise, signs
and exponents are what is deflated.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.errors import ConfigError
from loraplex.kernels.slices import SliceWeights
from loraplex.memory.weights.packing import PackedLayout, Packer

COMPRESSIONS = ("none", "lossless", "int8")

MAX_SHARE = 0.95
"""A plane is deflated when that leaves less than this share of it."""

PROBE_BYTES = 1 << 14
"""The first bytes of a plane, from which it is told whether deflating the rest is worth the time."""


@dataclass(frozen=True, slots=True)
class CompressedCopy:
    """An adapter's extents, smaller. `data` is its compression's own: deflated bytes, or tensors (uint8) as they are.

    max_error: largest |restored - original| of a weight over the largest |original| in its rank row; 0 for an exact
    copy. checksums: of the extents as they were; None for a lossy copy, whose extents will have others.
    """

    layout: PackedLayout
    data: tuple[bytes | torch.Tensor, ...]
    max_error: float = 0.0
    checksums: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return sum(len(part) for part in self.data)


class Compression(Protocol):
    """Stateless: any number of threads may use one at once. `views[i]` is the memory of extent i, uint8 on the host."""

    @property
    def name(self) -> str: ...

    @property
    def is_exact(self) -> bool:
        """Whether the restored extents have the bytes of the first ones."""
        ...

    def compress(self, layout: PackedLayout, views: Sequence[torch.Tensor]) -> CompressedCopy: ...

    def restore(self, copy: CompressedCopy, views: Sequence[torch.Tensor]) -> None:
        """Write every byte of `views`, the extents of the copy's layout."""
        ...


def get_compression(name: str, packer: Packer) -> Compression | None:
    """None for `none`. Raises ConfigError for a name that is not one of COMPRESSIONS."""
    if name not in COMPRESSIONS:
        raise ConfigError(f"the compression must be one of {', '.join(COMPRESSIONS)}, got {name!r}")
    if name == "lossless":
        return LosslessCompression()
    return Int8Compression(packer) if name == "int8" else None


# ------------------------------------------------------------------------------------------------------------- lossless


class LosslessCompression:
    """Planes of bytes, in the order of the extents. It knows of a layout how wide the words are, nothing else."""

    name = "lossless"
    is_exact = True

    def compress(self, layout: PackedLayout, views: Sequence[torch.Tensor]) -> CompressedCopy:
        data: list[bytes | torch.Tensor] = []
        for view, width in zip(views, _word_bytes(layout), strict=True):
            planes = np.ascontiguousarray(view.numpy().reshape(-1, width).T)
            data += [_deflated(plane) for plane in planes]
        return CompressedCopy(layout, tuple(data))

    def restore(self, copy: CompressedCopy, views: Sequence[torch.Tensor]) -> None:
        planes = iter(copy.data)
        for view, width in zip(views, _word_bytes(copy.layout), strict=True):
            words = view.numpy().reshape(-1, width)
            for column in range(width):
                words[:, column] = _inflated(next(planes))


def _word_bytes(layout: PackedLayout) -> list[int]:
    """Of each extent: of the first weights in it. Words of another width are kept as well, they only deflate less."""
    widths = [1] * len(layout.sizes)
    for block in reversed(layout.blocks):
        widths[block.extent_index] = next(each.dtype.itemsize for each in block.layouts if each is not None)
    return widths


def _deflated(plane: NDArray[np.uint8]) -> bytes | torch.Tensor:
    probe = plane[:PROBE_BYTES]
    if len(_deflate(probe)) < MAX_SHARE * len(probe):
        data = _deflate(plane)
        if len(data) < MAX_SHARE * len(plane):
            return data
    return torch.from_numpy(plane.copy())  # of its own: the planes of an extent are one array


def _deflate(plane: NDArray[np.uint8]) -> bytes:
    """With runs and Huffman codes alone: weights do not repeat, and a search adds a tenth (0.72 for 0.67)."""
    deflate = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    return deflate.compress(plane.data) + deflate.flush()


def _inflated(part: bytes | torch.Tensor) -> NDArray[np.uint8]:
    if isinstance(part, bytes):
        return np.frombuffer(zlib.decompress(part), dtype=np.uint8)
    plane: NDArray[np.uint8] = part.numpy()
    return plane


# ----------------------------------------------------------------------------------------------------------------- int8


KEPT_PARTS = ("bias", "gain", "input_gain", "weight", "row_ids")


class Int8Compression:
    """One flat tensor per copy: of each slice A's int8 rows and their scales, B's, then KEPT_PARTS as they are.

    q := round(w / scale), scale := max |rank row| / 127, so that |restored - w| <= scale / 2 before it is rounded to
    the dtype of the block: max_error is at most 1/254 for float32, and 1/254 + 2^-8 for bfloat16. Weights must be
    finite; a load refuses others.
    """

    name = "int8"
    is_exact = False

    def __init__(self, packer: Packer) -> None:
        self._packer = packer

    def compress(self, layout: PackedLayout, views: Sequence[torch.Tensor]) -> CompressedCopy:
        parts: list[torch.Tensor] = []
        max_error = 0.0
        for block in layout.blocks:
            shares = self._packer.shares(views[block.extent_index])
            for each in itertools.chain.from_iterable(self._packer.unpack(block, share) for share in shares):
                if each is None:
                    continue
                if each.lora_a is not None and each.lora_b is not None:
                    for rows in (each.lora_a, each.lora_b.T):
                        q, scale = _quantize(rows)
                        max_error = max(max_error, _error(rows, _dequantize(q, scale, rows.dtype)))
                        parts += [q, scale]
                parts += [getattr(each, name) for name in KEPT_PARTS if getattr(each, name) is not None]
        flat = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
        data = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
        return CompressedCopy(layout, (data,), max_error)

    def restore(self, copy: CompressedCopy, views: Sequence[torch.Tensor]) -> None:
        (data,) = copy.data
        assert isinstance(data, torch.Tensor)
        rest = _Reader(data)
        for block in copy.layout.blocks:
            for share in self._packer.shares(views[block.extent_index]):
                shapes = self._packer.unpack(block, share)  # of what it holds now, shapes and dtypes matter alone
                self._packer.repack(block, [None if each is None else _restored(each, rest) for each in shapes], share)


class _Reader:
    """Tensors one after the other from flat bytes, copied out: there they are not aligned."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._at = 0

    def take(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        end = self._at + tensor.nbytes
        tensor.view(-1).view(torch.uint8).copy_(self._data[self._at : end])
        self._at = end
        return tensor


def _restored(shape: SliceWeights, rest: _Reader) -> SliceWeights:
    """The slice whose tensors have the shapes and dtypes of `shape`'s."""

    def rows(like: torch.Tensor) -> torch.Tensor:
        q = rest.take(torch.int8, *like.shape)
        return _dequantize(q, rest.take(torch.float32, like.shape[0], 1), like.dtype)

    a = b = None
    if shape.lora_a is not None and shape.lora_b is not None:
        a, b = rows(shape.lora_a), rows(shape.lora_b.T).T
    kept = {name: getattr(shape, name) for name in KEPT_PARTS}
    parts: dict[str, Any] = {
        name: None if like is None else rest.take(like.dtype, *like.shape) for name, like in kept.items()
    }
    return SliceWeights(a, b, scaling=shape.scaling, **parts)


def _quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [rank, n], scale float32 [rank, 1])"""
    wide = rows.float()
    scale = _largest(wide) / 127
    return (wide / _or_one(scale)).round().clamp_(-127, 127).to(torch.int8), scale


def _dequantize(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (q * scale).to(dtype)


def _error(rows: torch.Tensor, restored: torch.Tensor) -> float:
    wide = rows.float()
    return ((restored.float() - wide).abs() / _or_one(_largest(wide))).max().item()


def _largest(rows: torch.Tensor) -> torch.Tensor:
    return rows.abs().amax(-1, keepdim=True)


def _or_one(divisor: torch.Tensor) -> torch.Tensor:
    """A row of zeros is divided by 1."""
    return divisor.masked_fill(divisor == 0, 1)


# --------------------------------------------------------------------------------------------------- compressed copies


HOST_SHARE = 4
"""With compression on, one in so many of the host's bytes is for compressed copies."""


class CompressedCopies:
    """Cold adapters in fewer bytes: a budget of its own, the oldest goes first. Thread-safe.

    A copy larger than the budget is not kept.
    """

    def __init__(self, compression: Compression, max_bytes: int) -> None:
        self.compression = compression
        self.max_bytes = max_bytes
        self._copies: OrderedDict[str, CompressedCopy] = OrderedDict()
        self._used_bytes = 0
        self._lock = threading.Lock()

    def compress(
        self, layout: PackedLayout, views: Sequence[torch.Tensor], checksums: tuple[int, ...]
    ) -> CompressedCopy:
        copy = self.compression.compress(layout, views)
        return replace(copy, checksums=checksums) if self.compression.is_exact else copy

    def put(self, digest: str, copy: CompressedCopy) -> bool:
        """Whether it is kept; older copies make room."""
        with self._lock:
            self._pop(digest)
            if copy.nbytes > self.max_bytes:
                return False
            while self._used_bytes + copy.nbytes > self.max_bytes:
                self._pop(next(iter(self._copies)))
            self._copies[digest] = copy
            self._used_bytes += copy.nbytes
            return True

    def get(self, digest: str) -> CompressedCopy | None:
        with self._lock:
            return self._copies.get(digest)

    def drop(self, digest: str) -> None:
        with self._lock:
            self._pop(digest)

    def clear(self) -> int:
        """Let all go; returns the bytes."""
        with self._lock:
            released, self._used_bytes = self._used_bytes, 0
            self._copies.clear()
            return released

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def max_error(self) -> float:
        """The largest of all copies; 0 when all are exact."""
        with self._lock:
            return max((copy.max_error for copy in self._copies.values()), default=0.0)

    def _pop(self, digest: str) -> None:
        copy = self._copies.pop(digest, None)
        if copy is not None:
            self._used_bytes -= copy.nbytes

    def check_integrity(self) -> None:
        with self._lock:
            assert self._used_bytes == sum(copy.nbytes for copy in self._copies.values()) <= self.max_bytes
