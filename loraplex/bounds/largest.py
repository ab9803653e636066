"""Which of many owners has most of something that is shared, in amortised logarithmic time.

A heap has an entry for each owner, which says as much as the owner has or more: one that says more is put right when it
comes to the top. Entries that are not an owner's last are dropped there, so that each costs once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection


class Largest:
    """amount_of an owner may fall at any time. Where it grows, or an owner is new, `note` has to be called."""

    def __init__(self, amount_of: Callable[[str], float]) -> None:
        self._amount_of = amount_of
        self._said: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def note(self, owner: str) -> None:
        amount = self._amount_of(owner)
        if amount > self._said.get(owner, -1.0):
            self._said[owner] = amount
            heapq.heappush(self._heap, (-amount, owner))
            if len(self._heap) > 64 + 4 * len(self._said):
                self._heap = [(-said, each) for each, said in self._said.items()]
                heapq.heapify(self._heap)

    def forget(self, owner: str) -> None:
        del self._said[owner]

    def owner(self) -> str:
        """Of equals the first by name."""
        while True:
            minus_said, owner = self._heap[0]
            if self._said.get(owner) != -minus_said:
                heapq.heappop(self._heap)
            elif (amount := self._amount_of(owner)) < -minus_said:
                self._said[owner] = amount
                heapq.heapreplace(self._heap, (-amount, owner))
            else:
                return owner

    def check_integrity(self, owners: Collection[str]) -> None:
        """Assert that each owner has an entry that says enough, and no other has one."""
        assert self._said.keys() == set(owners)
        for owner, said in self._said.items():
            assert (-said, owner) in self._heap
            assert said >= self._amount_of(owner), f"the heap says too little of {owner!r}"
