"""A number that tells whether the bytes of an extent are still those that were packed, at the speed of reading them.

    words    := the bytes as int64, in rows of 512 (the words that do not fill a row: the rest)
    columns  := the sum of each column, rows := the sum of each row, both modulo 2^64
    checksum := crc32(columns) * 2^32 + crc32(rows | rest | number of bytes)

Sums are what numpy and every accelerator do fast, and equal on both. Noticed for certain: a flipped bit (it adds a
power of two to one sum of either kind, and CRC-32 sees any such carry). Noticed but for 1 in 2^32 or fewer: everything
inside one row's length, since no two of its words share a column; two words, lines or pages that changed places; pages
lost, repeated or of another file. Not noticed: changes made so that the sums stay (such as +1 and -1 at the corners of
a rectangle of words): it guards against faults, not against people. That the content is the right one says the
adapter's digest, when it is read from its source.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

ROW_WORDS = 512
"""A row is a page of 4096 bytes: pages that changed places change the sums of rows."""

BLOCK_ROWS = 128
"""Rows summed along both axes while they are in the processor's cache: 512 KB."""

MULTIPLE = 64
"""Bytes that a length must be a multiple of."""

Checksums = Callable[[Sequence[torch.Tensor]], tuple[int, ...]]
"""`checksums`, or another way to the same numbers."""


def checksum(data: torch.Tensor, *, is_summed_by_torch: bool | None = None) -> int:
    """64 bits for a flat contiguous uint8 tensor. ValueError when its length is no multiple of 64.

    On the host numpy sums, which takes neither the interpreter's lock nor torch's threads; on another device torch
    does, there. is_summed_by_torch: choose, the number is the same.
    """
    if is_summed_by_torch is None:
        is_summed_by_torch = data.device.type != "cpu"
    if is_summed_by_torch:
        return _checksums_by_torch([data])[0]
    check_bytes(data)
    return _folded(_sums_by_numpy(data), data.numel())


def checksums(pieces: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """`checksum` of each; on another device all are summed there before anything is brought here."""
    if pieces and pieces[0].device.type != "cpu":
        return _checksums_by_torch(pieces)
    return tuple(checksum(piece) for piece in pieces)


def check_bytes(data: torch.Tensor) -> None:
    """ValueError for what has no checksum."""
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous() or data.numel() % MULTIPLE:
        raise ValueError(f"a checksum needs flat bytes, a multiple of {MULTIPLE}, got {data.dtype} {tuple(data.shape)}")


def _folded(sums: NDArray[np.int64], num_bytes: int) -> int:
    """sums: [columns | rows | rest]"""
    rest_and_rows = zlib.crc32(num_bytes.to_bytes(8, "little"), zlib.crc32(sums[ROW_WORDS:].data))
    return zlib.crc32(sums[:ROW_WORDS].data) << 32 | rest_and_rows


def _sums_by_numpy(data: torch.Tensor) -> NDArray[np.int64]:
    """[columns | rows | rest]"""
    words = data.numpy().view(np.int64)
    num_rows = words.size // ROW_WORDS
    whole = words[: num_rows * ROW_WORDS].reshape(num_rows, ROW_WORDS)
    sums = np.zeros(ROW_WORDS + num_rows + words.size % ROW_WORDS, dtype=np.int64)
    for start in range(0, num_rows, BLOCK_ROWS):
        block = whole[start : start + BLOCK_ROWS]
        sums[:ROW_WORDS] += block.sum(axis=0)
        block.sum(axis=1, out=sums[ROW_WORDS + start : ROW_WORDS + start + len(block)])
    sums[ROW_WORDS + num_rows :] = words[num_rows * ROW_WORDS :]
    return sums


def _checksums_by_torch(pieces: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Three sums a piece, and one transfer for all of them."""
    for piece in pieces:
        check_bytes(piece)
    sums = [_sums_by_torch(piece) for piece in pieces]
    on_host: NDArray[np.int64] = torch.cat(sums).cpu().numpy()
    ends = np.cumsum([len(each) for each in sums]).tolist()
    starts = [0, *ends[:-1]]
    return tuple(
        _folded(on_host[start:end], piece.numel()) for piece, start, end in zip(pieces, starts, ends, strict=True)
    )


def _sums_by_torch(data: torch.Tensor) -> torch.Tensor:
    """[columns | rows | rest], where the data is."""
    words = data.view(torch.int64)
    num_rows = words.numel() // ROW_WORDS
    whole = words[: num_rows * ROW_WORDS].view(num_rows, ROW_WORDS)
    return torch.cat((whole.sum(0), whole.sum(1), words[num_rows * ROW_WORDS :]))
