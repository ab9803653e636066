"""A heap whose items leave from anywhere and change their keys."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from itertools import count
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

MAX_STALE = 64
"""Entries beside twice the items, before the heap is built again."""


class KeyedHeap(Generic[Item]):
    """Items by key, the least first; of equal keys the one that was put first.

    `put`, `discard` and `first` take O(log n), averaged over the calls: what left or changed stays in the heap until it
    comes up, or until most of the heap is such. Keys are compared with each other, items never.
    """

    __slots__ = ("_entries", "_heap", "_numbers")

    def __init__(self) -> None:
        self._entries: dict[Item, tuple[Any, int, Item]] = {}
        self._heap: list[tuple[Any, int, Item]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._entries

    def put(self, item: Item, key: Any) -> None:
        """Add an item, or give it another key."""
        entry = self._entries[item] = (key, next(self._numbers), item)
        if len(self._heap) > 2 * len(self._entries) + MAX_STALE:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, entry)

    def discard(self, item: Item) -> None:
        """Take an item out; one that is not in is passed over."""
        self._entries.pop(item, None)

    def key(self, item: Item) -> Any:
        """Raises KeyError for an item that is not in."""
        return self._entries[item][0]

    def first(self) -> Item | None:
        """The item with the least key; None when there is none."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            if entries.get(entry[2]) is entry:
                return entry[2]
            heapq.heappop(heap)
        return None
