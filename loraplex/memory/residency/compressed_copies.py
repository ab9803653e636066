"""Cold adapters that stay in host memory in fewer bytes, beside those that kernels can read: a budget of its own, the oldest goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loraplex.memory.weights.compression import CompressedCopy, Compression
from loraplex.memory.weights.packing import PackedLayout

HOST_SHARE = 4
"""With compression on, one in so many of the host's bytes is for compressed copies."""


@dataclass(frozen=True, slots=True)
class KeptCopy:
    """One adapter. checksums: of its extents as they were; None for a lossy copy, whose extents will have others."""

    layout: PackedLayout
    copy: CompressedCopy
    checksums: tuple[int, ...] | None


class CompressedCopies:
    """Thread-safe. A copy larger than the budget is not kept."""

    def __init__(self, compression: Compression, max_bytes: int) -> None:
        self.compression = compression
        self.max_bytes = max_bytes
        self._copies: OrderedDict[str, KeptCopy] = OrderedDict()
        self._used_bytes = 0
        self._lock = threading.Lock()

    def compress(self, layout: PackedLayout, views: Sequence[torch.Tensor], checksums: tuple[int, ...]) -> KeptCopy:
        copy = self.compression.compress(layout, views)
        return KeptCopy(layout, copy, checksums if self.compression.is_exact else None)

    def put(self, digest: str, kept: KeptCopy) -> bool:
        """Whether it is kept; older copies make room."""
        with self._lock:
            self._pop(digest)
            if kept.copy.nbytes > self.max_bytes:
                return False
            while self._used_bytes + kept.copy.nbytes > self.max_bytes:
                self._pop(next(iter(self._copies)))
            self._copies[digest] = kept
            self._used_bytes += kept.copy.nbytes
            return True

    def get(self, digest: str) -> KeptCopy | None:
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
        """The largest of all kept copies (compression.CompressedCopy); 0 when all are exact."""
        with self._lock:
            return max((kept.copy.max_error for kept in self._copies.values()), default=0.0)

    def _pop(self, digest: str) -> None:
        kept = self._copies.pop(digest, None)
        if kept is not None:
            self._used_bytes -= kept.copy.nbytes

    def check_integrity(self) -> None:
        with self._lock:
            assert self._used_bytes == sum(kept.copy.nbytes for kept in self._copies.values()) <= self.max_bytes
