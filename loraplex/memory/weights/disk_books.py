"""The files of the disk tier, and which leaves first: of tenants beyond their share the least recently used.

    tenant    before the slash of an adapter's name; what no adapter of this process has is the operator's
    share     of each of n tenants that have files, or want one: B / n of the B bytes that the tier may have
    leaves    the least recently used file that only tenants beyond their share have, the file that is wanted counted.
              Where there is none, the least recently used of all, for a tenant that is within its share

So no room lies idle, and a tenant keeps its share however long it does not use it: these files are what comes back
after a restart. A file that several tenants have counts in each one's share.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

OPERATOR = frozenset({""})


@dataclass(frozen=True, slots=True)
class FileEntry:
    """mtime_ns: when last seen. tenants: that have an adapter of this content."""

    nbytes: int
    mtime_ns: int
    tenants: frozenset[str]


class DiskBooks:
    """Not thread-safe. files: by path."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.files: dict[str, FileEntry] = {}
        self._bytes_of: Counter[str] = Counter()
        self._by_age: dict[frozenset[str], list[tuple[int, str]]] = {}
        """By the tenants: a heap of (mtime in ns, path), which may name what is gone, used again or others' now."""

    def enter(self, path: str, nbytes: int, mtime_ns: int, tenants: frozenset[str]) -> None:
        """Its file is there: new, used again or others' than before."""
        self.forget(path)
        self.files[path] = FileEntry(nbytes, mtime_ns, tenants)
        self.used_bytes += nbytes
        for tenant in tenants:
            self._bytes_of[tenant] += nbytes
        heapq.heappush(self._by_age.setdefault(tenants, []), (mtime_ns, path))

    def forget(self, path: str) -> int:
        """The bytes of its file, which is gone; 0 for one that is not in the books."""
        entry = self.files.pop(path, None)
        if entry is None:
            return 0
        self.used_bytes -= entry.nbytes
        for tenant in entry.tenants:
            self._bytes_of[tenant] -= entry.nbytes
            if not self._bytes_of[tenant]:
                del self._bytes_of[tenant]
        return entry.nbytes

    def pop_next(self, asking: frozenset[str], nbytes: int, max_bytes: int) -> tuple[int, str] | None:
        """The time and path of the next to leave for a file of `nbytes` of the tenants `asking`, out of the order of
        age: it is to be entered again unless it leaves. None where no other may leave for it."""
        share = max_bytes / len(self._bytes_of.keys() | asking)
        beyond = {each for each, has in self._bytes_of.items() if has + nbytes * (each in asking) > share}
        for tenants in tuple(self._by_age):
            self._drop_stale(tenants)
        heaps = [heap for tenants, heap in self._by_age.items() if tenants <= beyond]
        if not heaps and any(self._bytes_of[each] + nbytes <= share for each in asking):
            heaps = list(self._by_age.values())
        return heapq.heappop(min(heaps, key=lambda each: each[0])) if heaps else None

    def _drop_stale(self, tenants: frozenset[str]) -> None:
        """From the front of their heap, so that it begins with a file of theirs."""
        heap = self._by_age[tenants]
        while heap and ((entry := self.files.get(heap[0][1])) is None or entry.tenants != tenants):
            heapq.heappop(heap)
        if not heap:
            del self._by_age[tenants]

    def check_integrity(self, found: Mapping[str, int]) -> None:
        """AssertionError unless the books say what was found, as bytes by path."""
        entries = {path: entry.nbytes for path, entry in self.files.items()}
        assert entries == found, f"{len(entries)} files in the books, {len(found)} on the disk"
        assert self.used_bytes == sum(found.values()), "the sum of the files is wrong"
        of_tenants: Counter[str] = Counter()
        in_order = {(tenants, path) for tenants, heap in self._by_age.items() for _, path in heap}
        for path, entry in self.files.items():
            assert (entry.tenants, path) in in_order, f"{path} would never be deleted"
            of_tenants.update(dict.fromkeys(entry.tenants, entry.nbytes))
        assert self._bytes_of == of_tenants, "the sums of tenants are wrong"
