"""Limits of a tenant's bytes in a tier (`host_bytes`, `device_bytes`), and what of its own is in the way of one.

    use          of a tenant in a tier: the bytes of its contents there (TenantUse), for which tenant they ever came
    beyond       its use, with the content that comes for it, is more than its limit
    of others    a content that another tenant has, too, which is within its own limit, or runs it, or has it pinned.
                 It never leaves for this tenant's limit. It is in the way while this tenant runs or pins it itself
    own          every other content of the tenant: what is idle leaves, in the policy's order, and the rest is waited
                 for: it runs, is pinned, or is being loaded

A limit binds what is brought for an adapter of the tenant. So a content may come for a tenant within its limit while
another one that has it is beyond its own. A pin that a verb has admitted is kept: it pushes out what is idle of its
tenant, and is not refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from loraplex.adapter_store import MemoryQuota
from loraplex.core import Tier
from loraplex.memory.eviction.shares import TenantUse
from loraplex.memory.residency.records import Demand, StoredWeights

UNREFUSED = ("pin", "restore")
"""Causes of demands that were admitted before: by the tenant's verb, or by an operator."""

SETTINGS = {Tier.HOST: "host_bytes", Tier.DEVICE: "device_bytes"}


@dataclass(frozen=True, slots=True)
class Account:
    """A tenant whose limit is exceeded by `excess_bytes` with `nbytes` that come."""

    tenant: str
    tier: Tier
    max_bytes: int
    nbytes: int
    excess_bytes: int

    @property
    def limit(self) -> str:
        """In words, for an error."""
        return f"{SETTINGS[self.tier]} of tenant {self.tenant} is {self.max_bytes} bytes"


@dataclass(frozen=True, slots=True)
class Standing:
    """What a tenant has in a tier beside what comes. idle: may leave for it; spared_bytes: of others, and not in the
    way; pinned_bytes: it stays, whatever ends."""

    idle: frozenset[StoredWeights]
    idle_bytes: int
    spared_bytes: int
    pinned_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.idle_bytes + self.spared_bytes


class Quotas:
    """Of all tenants. False when none has a limit. Not thread-safe: the room calls it under the store's lock."""

    def __init__(self, uses: Mapping[Tier, TenantUse], weights: Mapping[str, StoredWeights]) -> None:
        self._uses = uses
        self._weights = weights
        self._limits: dict[Tier, dict[str, int]] = {tier: {} for tier in SETTINGS}

    def __bool__(self) -> bool:
        return any(self._limits.values())

    def set(self, quotas: Mapping[str, MemoryQuota]) -> None:
        """Instead of all before."""
        for tier, name in SETTINGS.items():
            limits = {tenant: getattr(quota, name) for tenant, quota in quotas.items()}
            self._limits[tier] = {tenant: most for tenant, most in limits.items() if most is not None}

    def account(self, tenant: str, tier: Tier, nbytes: int = 0) -> Account | None:
        """None: it is within its limit with `nbytes` more, or has none."""
        most = self._limits[tier].get(tenant)
        excess_bytes = 0 if most is None else self._uses[tier].nbytes[tenant] + nbytes - most
        return Account(tenant, tier, most, nbytes, excess_bytes) if most is not None and excess_bytes > 0 else None

    def alone(self, tenant: str, tier: Tier, nbytes: int) -> Account | None:
        """The same, where nothing else of it was in the tier."""
        most = self._limits[tier].get(tenant)
        return Account(tenant, tier, most, nbytes, nbytes - most) if most is not None and nbytes > most else None

    def beyond(self, tier: Tier, wanted: StoredWeights, nbytes: int, demand: Demand) -> list[Account]:
        """Of the tenants for which `wanted` comes; none when one of them is within its limit with it."""
        if not self._limits[tier]:
            return []
        asking = wanted.tenants if demand.adapter is None else {demand.adapter.spec.tenant}
        accounts = [self.account(tenant, tier, nbytes) for tenant in sorted(asking)]
        known = [account for account in accounts if account is not None]
        return known if len(known) == len(accounts) else []

    def all_beyond(self, tier: Tier) -> Iterator[Account]:
        """Tenants that are beyond their limits as it is: these became smaller, or pins went beyond them."""
        return filter(None, (self.account(tenant, tier) for tenant in tuple(self._limits[tier])))

    def standing(
        self,
        account: Account,
        wanted: StoredWeights | None,
        may_leave: Callable[[StoredWeights], bool],
        stays: Callable[[StoredWeights, str], bool],
    ) -> Standing:
        """stays: whether no end of requests or loads takes a content of a tenant out of the tier."""
        idle: list[StoredWeights] = []
        idle_bytes = spared_bytes = pinned_bytes = 0
        use = self._uses[account.tier]
        for digest in use.digests.get(account.tenant, ()):
            each = self._weights[digest]
            if each is wanted:
                continue
            nbytes = use.nbytes_of(each)
            is_of_others = self._is_of_others(each, account, wanted)
            if is_of_others and not holds(account.tenant, each):
                spared_bytes += nbytes
            elif not is_of_others and may_leave(each):
                idle.append(each)
                idle_bytes += nbytes
            elif stays(each, account.tenant):
                pinned_bytes += nbytes
        return Standing(frozenset(idle), idle_bytes, spared_bytes, pinned_bytes)

    def _is_of_others(self, weights: StoredWeights, account: Account, wanted: StoredWeights | None) -> bool:
        others = self._uses[account.tier].tenants_of(weights) - {account.tenant}
        return any(holds(tenant, weights) or not self._is_beyond(tenant, account, wanted) for tenant in others)

    def _is_beyond(self, tenant: str, account: Account, wanted: StoredWeights | None) -> bool:
        """Also with what comes, where it has that, too."""
        nbytes = account.nbytes if wanted is not None and tenant in wanted.tenants else 0
        return self.account(tenant, account.tier, nbytes) is not None


def holds(tenant: str, weights: StoredWeights) -> bool:
    """Whether requests run on it through an adapter of the tenant, or such a one is pinned."""
    adapters = weights.adapters.values()
    return any(each.spec.tenant == tenant and (each.num_running > 0 or each.is_pinned) for each in adapters)


def pins(tenant: str, weights: StoredWeights) -> bool:
    return any(each.spec.tenant == tenant and each.is_pinned for each in weights.adapters.values())
