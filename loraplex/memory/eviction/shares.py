"""Shares of tenants in a tier, and what a tenant may not push out of it.

    tenant     before the slash of an adapter's name (`acme/sql`); all names without one are the operator's
    share      of tenant t in a tier of B bytes and N adapters, with n tenants in it or about to be: B / n, N / n
    kept       an adapter used within RECENT_S of a tenant that is within its share without what left before. It leaves
               after all others. For a tenant that is beyond its share with what it wants, it does not leave at all
               while something of that tenant's own runs or comes, whose end makes room too, nor ahead of a request

What is not used leaves as ever, and so does what is beyond a share: no memory lies idle for a tenant. A content that
several tenants have counts in each one's share, and is kept for any of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from loraplex.memory.eviction.budget import Budget
from loraplex.memory.residency.records import Demand, Place, StoredWeights

RECENT_S = 60.0
FORESIGHT = ("prefetch", "prediction")


@dataclass(frozen=True, slots=True)
class TenantUse:
    """What each tenant has in one tier, counted as it comes and goes: room is made without a walk over the tier.

    digests: of its contents there.
    """

    nbytes: Counter[str] = field(default_factory=Counter)
    num_adapters: Counter[str] = field(default_factory=Counter)
    digests: dict[str, set[str]] = field(default_factory=dict)
    _counted: dict[str, tuple[frozenset[str], int]] = field(default_factory=dict)

    def count(self, weights: StoredWeights, place: Place | None) -> None:
        """The content is in `place` of the tier (None: it is not), and has the adapters that it has now."""
        tenants, nbytes = self._counted.pop(weights.digest, (frozenset[str](), 0))
        for tenant in tenants:
            self.digests[tenant].discard(weights.digest)
        self._add(tenants, -nbytes, -1)
        if place is not None and weights.adapters:
            nbytes = sum(each.nbytes for each in place.extents) if weights.layout is None else weights.own_nbytes
            tenants = frozenset(weights.tenants)
            self._counted[weights.digest] = tenants, nbytes
            for tenant in tenants:
                self.digests.setdefault(tenant, set()).add(weights.digest)
            self._add(tenants, nbytes, 1)

    def has(self, weights: StoredWeights) -> bool:
        return weights.digest in self._counted

    def tenants_of(self, weights: StoredWeights) -> frozenset[str]:
        """Of what is in the tier; none of what was removed and leaves when its job ends."""
        return self._counted.get(weights.digest, (frozenset[str](), 0))[0]

    def nbytes_of(self, weights: StoredWeights) -> int:
        """Of what is in the tier, without what it shares."""
        return self._counted[weights.digest][1]

    def _add(self, tenants: Iterable[str], nbytes: int, num_adapters: int) -> None:
        for tenant in tenants:
            self.nbytes[tenant] += nbytes
            self.num_adapters[tenant] += num_adapters
            if not self.num_adapters[tenant]:
                del self.nbytes[tenant], self.num_adapters[tenant], self.digests[tenant]

    def check_integrity(self, held: Iterable[tuple[StoredWeights, Place | None]]) -> None:
        """Raises AssertionError unless it counts what a walk finds. held: contents, and where they are in the tier."""
        found = TenantUse()
        for weights, place in held:
            found.count(weights, place)
        assert self == found, f"{self} is counted, {found} is there"


def is_in_share(cache: Budget, nbytes: int, num_adapters: int, num_tenants: int) -> bool:
    """Whether one of `num_tenants` may have so much."""
    most = cache.max_adapters
    has_place = most is None or num_adapters <= max(1, most // num_tenants)
    return has_place and nbytes <= cache.max_bytes / num_tenants


class Claim:
    """What some tenants that want a content may have of a tier. It is asked about those that may leave one after
    another, and reckons with each that it did not keep as gone."""

    def __init__(
        self, cache: Budget, use: TenantUse, wanted: StoredWeights, nbytes: int, demand: Demand, now_s: float
    ) -> None:
        """nbytes: of `wanted`, without what it shares."""
        self._cache, self._use, self._recent_s = cache, use, now_s - RECENT_S
        self._left_bytes, self._num_left = Counter[str](), Counter[str]()
        self._has_kept: dict[str, bool] = {}  # tenants, until more of theirs has left
        self._asking = wanted.tenants if demand.adapter is None else {demand.adapter.spec.tenant}
        self._num_tenants = len(use.num_adapters.keys() | self._asking)
        is_there = use.has(wanted)
        num_more = int(not is_there)
        self.is_beyond_share = not any(self._is_within(each, num_more * nbytes, num_more) for each in self._asking)
        self.may_take_kept = not self.is_beyond_share or demand.cause not in FORESIGHT

    def is_own(self, weights: StoredWeights) -> bool:
        return not self._asking.isdisjoint(self._use.tenants_of(weights))

    def keeps(self, weights: StoredWeights) -> bool:
        """Whether it leaves after all others."""
        if weights.last_used_s <= self._recent_s:
            return False
        return any(self._keeps_of(tenant) for tenant in self._use.tenants_of(weights))

    def _keeps_of(self, tenant: str) -> bool:
        known = self._has_kept.get(tenant)
        if known is None:
            is_other = tenant not in self._asking or not self.is_beyond_share
            known = self._has_kept[tenant] = is_other and self._is_within(tenant)
        return known

    def left(self, weights: StoredWeights) -> None:
        """Those that are asked about next would leave besides."""
        for tenant in self._use.tenants_of(weights):
            self._has_kept.pop(tenant, None)
            self._left_bytes[tenant] += weights.own_nbytes
            self._num_left[tenant] += 1

    def _is_within(self, tenant: str, nbytes: int = 0, num_more: int = 0) -> bool:
        nbytes += self._use.nbytes[tenant] - self._left_bytes[tenant]
        num_adapters = self._use.num_adapters[tenant] - self._num_left[tenant] + num_more
        return is_in_share(self._cache, nbytes, num_adapters, self._num_tenants)
