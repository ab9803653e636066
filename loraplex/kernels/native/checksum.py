"""Checksums of bytes on the host, one pass each and no lock of the interpreter meanwhile (csrc/checksum.cpp)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from loraplex.kernels.checksum import check_bytes
from loraplex.kernels.native.library import NativeLibrary


def checksums(library: NativeLibrary, pieces: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """As kernels.checksum.checksums, in this thread."""
    for piece in pieces:
        check_bytes(piece)
    addresses = np.array([piece.data_ptr() for piece in pieces], dtype=np.int64)
    sizes = np.array([piece.numel() for piece in pieces], dtype=np.int64)
    numbers = np.empty(len(pieces), dtype=np.uint64)
    library.functions.loraplex_checksums(addresses.ctypes.data, sizes.ctypes.data, len(pieces), numbers.ctypes.data)
    return tuple(numbers.tolist())
