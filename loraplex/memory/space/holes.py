"""Free ranges of a pool, found by size, by border and by place."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class Holes:
    """Disjoint free ranges [start, end) that do not touch. Not thread-safe."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # (size, start), sorted
        self._starts: list[int] = []  # sorted
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._by_size)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._end_of.items())

    @property
    def largest(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    def add(self, start: int, end: int) -> None:
        """[start, end) is free; it touches no other range (`merged` sees to that)."""
        insort(self._by_size, (end - start, start))
        insort(self._starts, start)
        self._end_of[start] = end
        self._start_of[end] = start

    def take_best(self, size: int) -> tuple[int, int] | None:
        """Remove and return the smallest range of at least `size`; among equals the first."""
        index = bisect_left(self._by_size, (size, 0))
        if index == len(self._by_size):
            return None
        start = self._by_size[index][1]
        return start, self._remove(start)

    def merged(self, start: int, end: int) -> tuple[int, int]:
        """[start, end) with the ranges that touch it, which are removed."""
        if start in self._start_of:
            start = self._start_of[start]
            self._remove(start)
        if end in self._end_of:
            end = self._remove(end)
        return start, end

    def cut(self, start: int, end: int) -> list[tuple[int, int]]:
        """Remove what is free inside [start, end), and return it; the rest of the ranges stays."""
        index = max(0, bisect_left(self._starts, start) - 1)
        inside = []
        while index < len(self._starts) and (hole_start := self._starts[index]) < end:
            if self._end_of[hole_start] <= start:
                index += 1
                continue
            hole_end = self._remove(hole_start)
            inside.append((max(hole_start, start), min(hole_end, end)))
            if hole_start < start:
                self.add(hole_start, start)
                index += 1
            if end < hole_end:
                self.add(end, hole_end)
        return inside

    def beside(self, start: int, end: int) -> tuple[int, int]:
        """The sizes of the ranges that end at `start` and begin at `end`; 0 for none."""
        before = start - self._start_of.get(start, start)
        return before, self._end_of.get(end, end) - end

    def check_integrity(self) -> None:
        assert self._by_size == sorted((end - start, start) for start, end in self._end_of.items())
        assert self._starts == sorted(self._end_of)
        assert self._start_of == {end: start for start, end in self._end_of.items()}

    def _remove(self, start: int) -> int:
        end = self._end_of.pop(start)
        del self._start_of[end]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
        del self._starts[bisect_left(self._starts, start)]
        return end
