"""Shares of tenants in a tier, and what a tenant may not push out of it.

    tenant     before the slash of an adapter's name (`acme/sql`); all names without one are the operator's
    share      of tenant t in a tier of B bytes and N adapters, with n tenants in it or about to be: B / n, N / n
    kept       an adapter of a tenant that is within its share, used within RECENT_S, from a tenant that is beyond its
               own share with what it wants: it leaves after all others, and not at all while requests of the one that
               asks run, whose end makes room too

What is not used leaves as ever, and so does what is beyond a share: no memory lies idle for a tenant. A content that
several tenants have counts in each one's share, and is kept for any of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from loraplex.memory.eviction.budget import Budget, together_nbytes
from loraplex.memory.residency.records import Demand, StoredWeights

RECENT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Used:
    """By tenants of one tier."""

    nbytes: Counter[str]
    num_adapters: Counter[str]

    @classmethod
    def of(cls, held: Iterable[StoredWeights]) -> _Used:
        used = cls(Counter(), Counter())
        for each in held:
            for tenant in each.tenants:
                used.nbytes[tenant] += each.own_nbytes
                used.num_adapters[tenant] += 1
        return used

    def is_within(self, tenant: str, cache: Budget, nbytes: int = 0, num_more: int = 0) -> bool:
        num_adapters, num_tenants = self.num_adapters[tenant] + num_more, len(self.num_adapters)
        return _is_within(cache, self.nbytes[tenant] + nbytes, num_adapters, num_tenants)


def _is_within(cache: Budget, nbytes: int, num_adapters: int, num_tenants: int) -> bool:
    most = cache.max_adapters
    has_place = most is None or num_adapters <= max(1, most // num_tenants)
    return has_place and nbytes <= cache.max_bytes / num_tenants


def is_in_share(cache: Budget, contents: Collection[StoredWeights], num_tenants: int) -> bool:
    """Whether one of `num_tenants` may have all of these."""
    return _is_within(cache, together_nbytes(contents), len(contents), num_tenants)


def asking_tenants(wanted: StoredWeights, demand: Demand) -> set[str]:
    return wanted.tenants if demand.adapter is None else {demand.adapter.spec.tenant}


def kept_for_others(
    cache: Budget, held: Collection[StoredWeights], wanted: StoredWeights, asking: Collection[str], now_s: float
) -> frozenset[str]:
    """Digests of `held`, all that is in `cache`, that are kept from the tenants that ask for `wanted`."""
    used = _Used.of(held)
    for tenant in asking:
        used.num_adapters[tenant] += 0  # it is about to be in the tier
    is_there = any(each is wanted for each in held)
    nbytes = 0 if wanted.layout is None or is_there else wanted.own_nbytes
    if any(used.is_within(tenant, cache, nbytes, int(not is_there)) for tenant in asking):
        return frozenset()
    within = {tenant for tenant in used.num_adapters if tenant not in asking and used.is_within(tenant, cache)}
    recent_s = now_s - RECENT_S
    return frozenset(
        each.digest for each in held if each.last_used_s > recent_s and not within.isdisjoint(each.tenants)
    )
