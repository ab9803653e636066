"""What a load has in memory beside what it keeps, and how it stays small.

At a moment of a load there are: the weights that are prepared already; one layer as it came and as it is prepared; and
pages of the files that were read. So the largest layers come first, when little is there yet; pages are dropped once
they are copied (the system's cache has them still); and what malloc holds on to goes back to the system.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from loraplex.layers.common import WeightedLayer
from loraplex.memory.space.arena import release_pages

LARGE_SHARE = 20
"""A layer with more than one part in so many of all weights is loaded before the others."""

NUM_RELEASES = 32
MAX_RELEASE_BYTES = 2**26
"""Memory is given back so many times in a load, and whenever so many bytes were loaded."""


def largest_first(layers: Sequence[WeightedLayer]) -> list[WeightedLayer]:
    """Large layers by size, then the others in their order, which is about that of the files. A head that is made of
    the embedding has no parts, and stays behind it."""
    sizes = [nbytes_of(layer) for layer in layers]
    least = sum(sizes) // LARGE_SHARE
    large = sorted((i for i, size in enumerate(sizes) if size > least), key=lambda i: -sizes[i])
    return [layers[i] for i in large] + [layer for layer, size in zip(layers, sizes, strict=True) if size <= least]


def nbytes_of(layer: WeightedLayer) -> int:
    """Of its weights as they are loaded, before they are prepared."""
    return sum(part.destination.nbytes for part in layer.weight_parts())


class LoadMemory:
    """Gives back what a load of `total` bytes from these files does not need any more."""

    def __init__(self, files: Sequence[Path], total: int) -> None:
        self._files = frozenset(os.path.realpath(file) for file in files)
        self._step = min(MAX_RELEASE_BYTES, total // NUM_RELEASES)
        self._since = 0

    def note(self, num_bytes: int) -> None:
        """So many more bytes were loaded."""
        self._since += num_bytes
        if self._since > self._step:
            self.release()

    def release(self) -> None:
        """Pages of the files, which are mapped to be read, and malloc's free memory."""
        self._since = 0
        for start, end in _maps_of(self._files):
            release_pages(start, end - start)
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(0)


def _maps_of(files: frozenset[str]) -> Iterator[tuple[int, int]]:
    """Where these files are mapped in this process: [start, end) of each map of which no page was written to; none
    where there is no Linux.

    To drop a written page of a private map would undo the write: another model of this process may have the same file
    mapped, with its weights changed in place.
    """
    with contextlib.suppress(OSError), open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape") as lines:
        start = end = 0
        for line in lines:
            first, _, rest = line.partition(" ")
            if not first.endswith(":"):
                _, _, _, _, *named = rest.rstrip("\n").split(maxsplit=4)
                is_wanted = bool(named) and named[0] in files
                start, end = (int(place, 16) for place in first.split("-")) if is_wanted else (0, 0)
            elif first == "Anonymous:" and end and rest.split()[0] == "0":
                yield start, end
