"""A limit of all that leaves every tenant something, whatever the others hold."""

from __future__ import annotations

from collections import Counter

SHARE = 8
"""A tenant finds a place for 1/SHARE of the limit when it is reached, until twice the limit is held in all."""

MOST_OF_LIMIT = 2
"""Times the limit: the most that all hold together."""


def has_room(limit: int, total: int, tenant: str, own: int) -> bool:
    """Whether all may hold so much, `own` of it a tenant; the amount that is asked for is in both."""
    return total <= limit or (tenant != "" and own <= max(1, limit // SHARE) and total <= MOST_OF_LIMIT * limit)


class FairLimit:
    """Counts what is held, by tenant; "" is a server without keys, where all callers are one.

    One tenant may hold the whole limit. Another one then still gets its 1/SHARE, so none is refused for what a single
    one holds, and never more than 2 * limit are held together. lets_one_in: what finds nothing held may be larger.
    """

    def __init__(self, limit: int, *, lets_one_in: bool = False) -> None:
        self.limit = limit
        self._lets_one_in = lets_one_in
        self.total = 0
        self._held: Counter[str] = Counter()

    def take(self, tenant: str, num: int) -> bool:
        """Whether there was room for so many more; they are held then until `give_back`."""
        total, own = self.total + num, self._held.get(tenant, 0) + num
        if not has_room(self.limit, total, tenant, own) and not (self._lets_one_in and not self.total):
            return False
        self.total, self._held[tenant] = total, own
        return True

    def give_back(self, tenant: str, num: int) -> None:
        self.total -= num
        self._held[tenant] -= num
        assert self._held[tenant] >= 0, f"{tenant} gave back what it did not hold"
        if not self._held[tenant]:
            del self._held[tenant]
