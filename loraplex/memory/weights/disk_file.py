"""One packed adapter as a file.

    prefix      48 bytes: magic, version, crc32 of the header behind it; extents, bytes of the layout, bytes of all
                extents, identity
    checksums   of the extents (checksum.py), 8 bytes each
    layout      JSON: [sizes, [[target, extent, offset, [slice or null, ...]], ...]], and behind them the size of the
                adapter's vocabulary where it is not the base's, the factor of its context where that is not the base's,
                and projections in the last extent [digest, rank, inputs, outputs, dtype, b, bytes]; null for what is
                not there, nothing for what is not there behind the last that is;
                slice := [a, b, bias, rank, scale, dtype], and behind it [gain, input gain] where it has one of them or
                a weight of its own, which is behind these [weight, row ids, rows, dtype], or where it has scales, which
                are the last number of 3 or 7 of these
    zeros       up to a multiple of 4096
    extents     one after the other, to the end of the file

Numbers are little-endian. Nothing that a file says is believed before it was checked: sizes are bounded before they are
read, and whether a layout is one that this model's adapters can have is for `Packer.check_layout`. A slice's offsets
count from its block's start.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.regular_file import transfer
from loraplex.config import MAX_CONTEXT_FACTOR
from loraplex.kernels.checksum import Checksums
from loraplex.kernels.slices import ABSENT, ALIGNMENT, DTYPE_CODES, ProjectionsLayout, SliceLayout
from loraplex.memory.weights.packing import PackedBlock, PackedLayout

MAGIC = b"loraplex"
VERSION = 1
PAGE_BYTES = 4096
IDENTITY_BYTES = 16
"""Of the hash that names content and form: a file under another's name is not taken for it."""

MAX_EXTENTS = 1 << 16
MAX_LAYOUT_BYTES = 1 << 24
MAX_RANK = 1 << 20
MAX_VOCABULARY = 1 << 29
MAX_WIDTH = 1 << 24
MAX_OFFSET = 1 << 48

_START = struct.Struct("<8sII")
_REST = struct.Struct(f"<IIQ{IDENTITY_BYTES}s")
_PREFIX_BYTES = _START.size + _REST.size
_FIRST_READ = 1 << 15
"""Bytes in which most headers are whole."""

NO_GAINS = (ABSENT, ABSENT)

_DIGEST = re.compile(r"[0-9a-f]{32}")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_CODES}


class DamagedFileError(ValueError):
    """The file is not what was written. Never leaves the disk cache."""


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the extents; the layout is not parsed yet, since equal ones are many."""

    checksums: tuple[int, ...]
    layout_text: bytes
    nbytes: int
    """Of the header: where the extents begin."""
    body_bytes: int

    def check(self, layout: PackedLayout) -> None:
        """Raises DamagedFileError unless the file has the extents of `layout`."""
        if layout.nbytes != self.body_bytes or len(layout.sizes) != len(self.checksums):
            raise DamagedFileError(f"it has {self.body_bytes} bytes of extents, its layout {layout.nbytes}")


def encode_header(identity: bytes, layout: PackedLayout, checksums: Sequence[int]) -> bytes:
    text = _encode_layout(layout)
    count = len(layout.sizes)
    assert len(checksums) == count, f"{len(checksums)} checksums of {count} extents"
    rest = _REST.pack(count, len(text), layout.nbytes, identity) + struct.pack(f"<{count}Q", *checksums) + text
    rest += bytes(-(_START.size + len(rest)) % PAGE_BYTES)
    return _START.pack(MAGIC, VERSION, zlib.crc32(rest)) + rest


@contextmanager
def opened(file: Path) -> Iterator[int]:
    """A descriptor for reading. Raises OSError, for a symbolic link too; FileNotFoundError: no regular file."""
    fd = os.open(
        file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    )  # a FIFO would block without O_NONBLOCK
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FileNotFoundError(f"{file} is not a regular file")
        yield fd
    finally:
        os.close(fd)


def read_header(fd: int, identity: bytes) -> Header:
    """Raises DamagedFileError: not whole, or not of this identity."""
    data = os.pread(fd, _FIRST_READ, 0)
    if len(data) < _PREFIX_BYTES:
        raise DamagedFileError(f"it ends after {len(data)} bytes")
    magic, version, crc = _START.unpack_from(data)
    num_extents, layout_bytes, body_bytes, found = _REST.unpack_from(data, _START.size)
    if (magic, version) != (MAGIC, VERSION) or num_extents > MAX_EXTENTS or layout_bytes > MAX_LAYOUT_BYTES:
        raise DamagedFileError("it does not begin as a packed adapter")
    layout_start = _PREFIX_BYTES + 8 * num_extents
    nbytes = -(-(layout_start + layout_bytes) // PAGE_BYTES) * PAGE_BYTES
    size = os.fstat(fd).st_size
    if size != nbytes + body_bytes:
        raise DamagedFileError(f"it has {size} bytes of {nbytes + body_bytes}")
    if len(data) < nbytes:
        data += os.pread(fd, nbytes - len(data), len(data))
    header = memoryview(data)[:nbytes]
    if zlib.crc32(header[_START.size :]) != crc:
        raise DamagedFileError("its header is damaged")
    if found != identity:
        raise DamagedFileError("it is of another adapter, or packed for another model")
    checksums = struct.unpack_from(f"<{num_extents}Q", header, _PREFIX_BYTES)
    return Header(checksums, bytes(header[layout_start : layout_start + layout_bytes]), nbytes, body_bytes)


def read_extents(fd: int, header: Header, views: Sequence[torch.Tensor], checksums: Checksums) -> None:
    """Into `views`, which have the sizes of the extents; `checksums` says what arrived there.

    Raises DamagedFileError, with the views half written.
    """
    wanted = sum(view.numel() for view in views)
    done = transfer(lambda pieces, offset: os.preadv(fd, pieces, offset), _memory_of(views), header.nbytes)
    if done != wanted:
        raise DamagedFileError(f"it ends after {done} bytes of {wanted}")
    for index, (found, expected) in enumerate(zip(checksums(views), header.checksums, strict=True)):
        if found != expected:
            raise DamagedFileError(f"extent {index} is damaged")


def write_file(fd: int, header: bytes, views: Sequence[torch.Tensor]) -> None:
    """Raises OSError."""
    pieces = [memoryview(header), *_memory_of(views)]
    transfer(lambda some, offset: os.pwritev(fd, some, offset), pieces, 0)


def _memory_of(views: Sequence[torch.Tensor]) -> list[memoryview]:
    return [view.numpy().data for view in views]


# ---------------------------------------------------------------------------------------------------------- the layout


def _encode_layout(layout: PackedLayout) -> bytes:
    blocks = [
        (block.target_name, block.extent_index, block.offset, [_encode_slice(each) for each in block.layouts])
        for block in layout.blocks
    ]
    projections = None
    if (shared := layout.projections) is not None:
        numbers = shared.digest, shared.rank, shared.in_features, shared.out_features
        projections = (*numbers, _name_of(shared.dtype), shared.b_offset, shared.nbytes)
    rest: list[Any] = [layout.vocab_size, layout.rope_factor, projections]
    while rest and rest[-1] is None:
        rest.pop()
    return json.dumps((layout.sizes, blocks, *rest), separators=(",", ":"), allow_nan=False).encode()


def _encode_slice(layout: SliceLayout | None) -> tuple[int | float | str, ...] | None:
    if layout is None:
        return None
    offsets = layout.a_offset, layout.b_offset, layout.bias_offset
    gains = layout.gain_offset, layout.input_gain_offset
    plain = (*offsets, layout.rank, layout.scale, _name_of(layout.dtype))
    scales = () if layout.scales_offset == ABSENT else (layout.scales_offset,)
    last = (True,) if layout.is_exchanged else ()
    if layout.weight_dtype is not None:
        own = layout.weight_offset, layout.row_ids_offset, layout.num_rows, _name_of(layout.weight_dtype)
        return (*plain, *gains, *own, *scales, *last)
    return (*plain, *last) if gains == NO_GAINS and not scales else (*plain, *gains, *scales, *last)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parse_layout(text: bytes) -> PackedLayout:
    """Raises DamagedFileError unless types, bounds, alignments and places of parts in their extents are right."""
    try:
        layout = _parse_layout(*json.loads(text))
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise DamagedFileError(f"its layout is not one: {error}") from error
    return layout


def _parse_layout(sizes: Any, blocks: Any, *rest: Any) -> PackedLayout:
    if rest and rest[-1] is None:
        raise ValueError("null behind all that is there")
    vocab_size, rope_factor, projections = (*rest, None, None, None)[: max(3, len(rest))]
    layout = PackedLayout(
        tuple(_whole(size, MAX_OFFSET) for size in sizes),
        tuple(_parse_block(sizes, *block) for block in blocks),
        None if vocab_size is None else _whole(vocab_size, MAX_VOCABULARY, 1),
        None if rope_factor is None else _parse_rope_factor(rope_factor),
        None if projections is None else _parse_projections(*projections),
    )
    if layout.projections is None and any(each and each.is_shared for b in layout.blocks for each in b.layouts):
        raise ValueError("scales without projections")
    return layout


def _parse_rope_factor(value: Any) -> float:
    if type(value) is not float or not 0 < value <= MAX_CONTEXT_FACTOR:
        raise ValueError(f"a factor of {value!r}")
    return value


def _parse_projections(
    digest: Any, rank: Any, inputs: Any, outputs: Any, dtype: Any, b_offset: Any, nbytes: Any
) -> ProjectionsLayout:
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest) or dtype not in _DTYPES:
        raise ValueError(f"projections {digest!r} of dtype {dtype!r}")
    widths = _whole(inputs, MAX_WIDTH, 1), _whole(outputs, MAX_WIDTH, 1)
    offsets = _whole(b_offset, MAX_OFFSET), _whole(nbytes, MAX_OFFSET)
    return ProjectionsLayout(digest, _whole(rank, MAX_RANK, 1), *widths, _DTYPES[dtype], *offsets)


def _parse_block(sizes: Sequence[int], target_name: Any, extent_index: Any, offset: Any, slices: Any) -> PackedBlock:
    if not isinstance(target_name, str) or not isinstance(slices, list):
        raise TypeError(f"a block of {target_name!r}")
    place = _whole(extent_index, len(sizes) - 1, 1), _whole(offset, sizes[extent_index] - 1)
    room = sizes[extent_index] - offset
    return PackedBlock(
        target_name, *place, tuple(None if each is None else _parse_slice(room, *each) for each in slices)
    )


def _parse_slice(room: int, a: Any, b: Any, bias: Any, rank: Any, scale: Any, dtype: Any, *more: Any) -> SliceLayout:
    """`room`: bytes from the start of the block to the end of its extent."""
    is_exchanged = bool(more) and more[-1] is True
    more = more[:-1] if is_exchanged else more
    offsets = (a, b, bias, *(more[:2] or NO_GAINS))
    a, b, bias, gain, input_gain = (ABSENT if each == ABSENT else _whole(each, room - 1) for each in offsets)
    if not isinstance(scale, float) or not math.isfinite(scale):
        raise ValueError(f"a scale of {scale!r}")
    if dtype not in _DTYPES:
        raise ValueError(f"a dtype of {dtype!r}")
    layout = SliceLayout(a, b, bias, _whole(rank, MAX_RANK, 1), scale, _DTYPES[dtype], gain, input_gain)
    layout = replace(layout, is_exchanged=is_exchanged)
    if len(more) in (3, 7):
        layout, more = replace(layout, scales_offset=_whole(more[-1], room - 1)), more[:-1]
    return replace(layout, **_parse_own(room, *more[2:])) if len(more) > 2 else layout


def _parse_own(room: int, weight: Any, row_ids: Any, num_rows: Any, dtype: Any) -> dict[str, Any]:
    if dtype not in _DTYPES:
        raise ValueError(f"a dtype of {dtype!r}")
    return {
        "weight_offset": _whole(weight, room - 1),
        "row_ids_offset": ABSENT if row_ids == ABSENT else _whole(row_ids, room - 1),
        "num_rows": _whole(num_rows, MAX_OFFSET, 1),
        "weight_dtype": _DTYPES[dtype],
    }


def _whole(value: Any, most: int, multiple: int = ALIGNMENT) -> int:
    """`value` if it is a whole number from 0 to `most` and a multiple of `multiple`."""
    if type(value) is not int or not 0 <= value <= most or value % multiple:
        raise ValueError(f"{value!r} where a multiple of {multiple} from 0 to {most} belongs")
    return value
