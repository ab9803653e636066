"""Which weights leave a tier so that another can come in, and what is said when none can.

Never leaves: what runs, is pinned, is being loaded or copied; and for a request, what was asked for earlier in the same
scheduling pass (so requests that want more than fits are served in turn instead of evicting each other again and
again). The host tier gives up what is only there first, then what is on the device too. The order is a policy's
(policies.py), but for what is kept for other tenants (shares.py). What a tenant has beyond its own limit leaves before
all that, and room of the tier does not help it (quotas.py).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from loraplex.core import Tier, WaitsFor
from loraplex.errors import (
    AdapterBeyondQuotaError,
    AdapterMemoryError,
    AdapterMixError,
    AdapterNoRoomError,
    AdapterQuotaError,
    AdapterTooLargeError,
)
from loraplex.memory.eviction.budget import Budget, together_nbytes
from loraplex.memory.eviction.quotas import UNREFUSED, Account, Quotas, Standing, holds, pins
from loraplex.memory.eviction.shares import Claim, TenantUse, is_in_share
from loraplex.memory.residency.records import Demand, StoredAdapter, StoredWeights
from loraplex.memory.residency.tiers import Tiers
from loraplex.memory.space.arena import Extent
from loraplex.memory.space.pool import RetiredMemory
from loraplex.memory.weights.packing import Mixing, PackedLayout


class Room:
    """Decisions over both tiers; it moves nothing. Not thread-safe: the store calls it under its lock.

    pass_id: of the scheduling pass; the store counts it.
    """

    def __init__(
        self, tiers: Tiers, retired: RetiredMemory, weights: Mapping[str, StoredWeights], tenants: Mapping[str, int]
    ) -> None:
        """tenants: of all adapters that the store knows, with how many each has."""
        self._clock = tiers.clock
        self._tenants = tenants
        self._tiers = tiers
        self._host = tiers.host
        self._device = tiers.device
        self._retired = retired
        self._weights = weights
        self.uses = {tier: TenantUse() for tier in (Tier.HOST, Tier.DEVICE)}
        self.quotas = Quotas(self.uses, weights)
        self._biased_base = frozenset(
            (target.name, index)
            for target in tiers.device.table.targets
            for index, each in enumerate(target.slices)
            if each.has_bias
        )
        self._promises: dict[Tier, StoredWeights] = {}
        self._together: Collection[StoredWeights] = ()  # of the mix that is asked for
        self.pass_id = 0

    # ------------------------------------------------------------------------------------------------------- promises

    def promise(self, cache: Budget, weights: StoredWeights) -> None:
        """The memory on its way back to `cache` is for `weights` before other requests, while it is asked for."""
        if self.promised(cache) is None:
            self._promises[cache.tier] = weights

    def promised(self, cache: Budget) -> StoredWeights | None:
        """The weights that get the next free memory of `cache`."""
        weights = self._promises.get(cache.tier)
        is_due = weights is not None and weights.job is None and not _holds(cache, weights)
        if weights is not None and is_due and weights.wanted_in_pass >= self.pass_id - 1:
            return weights
        self._promises.pop(cache.tier, None)
        return None

    @contextmanager
    def together(self, mix: Collection[StoredWeights]) -> Iterator[None]:
        """Within the block none of these leaves for another one of them: they are wanted at the same time."""
        self._together = mix
        try:
            yield
        finally:
            self._together = ()

    # ---------------------------------------------------------------------------------------------------- who may leave

    def leaving_for(
        self, cache: Budget, wanted: StoredWeights, demand: Demand, nbytes: int
    ) -> list[StoredWeights] | None:
        """The first that must leave before `nbytes` of `wanted` fit; None when all that may leave would not do."""
        own = self._own_leaving(cache, wanted, demand, nbytes)
        if own is None:
            if self._promises.get(cache.tier) is wanted:
                del self._promises[cache.tier]  # more memory does not help it
            return None
        return self.fewest(cache, nbytes, self.candidates(cache, wanted, demand, nbytes, own), len(own))

    def candidates(
        self,
        cache: Budget,
        wanted: StoredWeights | None,
        demand: Demand,
        nbytes: int = 0,
        first: Sequence[StoredWeights] = (),
    ) -> Iterator[StoredWeights]:
        """What may leave `cache` for `wanted`, first to go first. Evict nothing while iterating.

        nbytes: that it wants, where its layout is not known yet. first: these leave before all others.
        """
        if not cache.policy.evicts:
            return
        claim = self._claim(cache, wanted, demand, nbytes)
        kept: list[StoredWeights] = []
        for each in first:
            if claim is not None:
                claim.left(each)
            yield each
        for each in self._in_order(cache):
            if each is not wanted and each not in first and self._may_leave(each, cache, demand):
                if claim is not None and claim.keeps(each):
                    kept.append(each)
                    continue
                if claim is not None:
                    claim.left(each)
                yield each
        if kept and claim is not None and self._may_take_kept(cache, claim):
            yield from kept

    def _claim(self, cache: Budget, wanted: StoredWeights | None, demand: Demand, nbytes: int = 0) -> Claim | None:
        """None where there are no two tenants."""
        if wanted is None or len(self._tenants) < 2:
            return None
        nbytes = nbytes if wanted.layout is None else wanted.own_nbytes
        return Claim(cache, self.uses[cache.tier], wanted, nbytes, demand, self._clock())

    def _may_take_kept(self, cache: Budget, claim: Claim) -> bool:
        if not claim.is_beyond_share or not claim.may_take_kept:
            return claim.may_take_kept
        return not any(claim.is_own(each) and not _is_settled(each, self.pass_id) for each in self._held(cache))

    def count(self, weights: StoredWeights) -> None:
        """It has come to a tier or left one, or has other adapters than before."""
        self.uses[Tier.HOST].count(weights, weights.host)
        self.uses[Tier.DEVICE].count(weights, weights.device)
        if self._tiers.disk is not None:
            self._tiers.disk.assign(weights.digest, frozenset(weights.tenants))

    def fewest(
        self, cache: Budget, nbytes: int, candidates: Iterator[StoredWeights], at_least: int = 0
    ) -> list[StoredWeights] | None:
        """The first of `candidates`, `at_least` so many, that must leave before `nbytes` fit; None when all of them
        would not do."""
        leaving: list[StoredWeights] = []
        used_bytes, num_adapters, shared = cache.used_bytes, cache.num_adapters, Counter[Extent | None]()
        while len(leaving) < at_least or not cache.allows(nbytes, used_bytes, num_adapters):
            victim = next(candidates, None)
            if victim is None:
                return None
            leaving.append(victim)
            used_bytes -= cache.freed_by(victim, shared)
            shared[victim.shared] += 1
            num_adapters -= 1
        return leaving

    def _needed(self, cache: Budget, wanted: StoredWeights) -> int:
        """Bytes that it would take of `cache` now. A load brings its projections even where their equals are."""
        assert wanted.layout is not None
        is_there = cache is self._device and self._host.shared_of(wanted.layout) in cache.sharers
        return wanted.layout.own_nbytes if is_there else wanted.nbytes

    def victims_for(self, adapter: StoredAdapter, in_use: Sequence[StoredWeights]) -> list[StoredAdapter]:
        """Those of the first unpinned ones of `in_use` whose release would make room for `adapter`; [] if none would.
        Of a limit of its tenant, adapters of that tenant alone."""
        wanted = adapter.weights
        if wanted.job is not None or wanted.is_on_device or wanted.layout is None:
            return []
        caches: list[Budget] = [self._device] if wanted.host is not None else [self._host, self._device]
        victims: dict[StoredWeights, str | None] = {}
        for cache in caches:
            own = self._own_in_the_way(cache, adapter, in_use, victims)
            if own is None:
                return []
            victims = {**dict.fromkeys(own, adapter.spec.tenant), **victims}
            more = self._in_the_way(cache, wanted, in_use, list(victims))
            if more is None:
                return []
            victims |= dict.fromkeys(more)
        victims = victims or dict.fromkeys(self._holders_beside_kv(wanted, in_use))
        return [
            each
            for weights, tenant in victims.items()
            for each in weights.adapters.values()
            if each.num_running and tenant in (None, each.spec.tenant)
        ]

    def _holders_beside_kv(self, wanted: StoredWeights, in_use: Sequence[StoredWeights]) -> list[StoredWeights]:
        """The budget has room and the KV cache has the memory: those whose end gives as much of either back."""
        cache = self._device if wanted.host is not None else self._host
        victims: list[StoredWeights] = []
        for each in in_use if self._is_kv_in_the_way(cache) else ():
            is_lacking = sum(victim.own_nbytes for victim in victims) < self._needed(cache, wanted)
            if is_lacking and each is not wanted and _holds(cache, each) and _can_give_way(each):
                victims.append(each)
        return victims

    def _is_kv_in_the_way(self, cache: Budget) -> bool:
        pool = self._device.pool if cache is self._device else self._host.pool
        return pool is not None and pool.is_kv_in_the_way

    def _why_no_piece_is_free(self, cache: Budget) -> str:
        if self._is_kv_in_the_way(cache):
            return "the KV cache has the rest"
        pool = self._device.pool if cache is self._device else self._host.pool
        fenced_bytes = 0 if pool is None else pool.fenced_bytes
        failing = f", and {fenced_bytes} bytes are fenced, since they failed" if fenced_bytes else ""
        return f"what is free is in pieces that are too small{failing}"

    def _in_the_way(
        self, cache: Budget, wanted: StoredWeights, in_use: Sequence[StoredWeights], leaving: list[StoredWeights]
    ) -> list[StoredWeights] | None:
        """Beside `leaving`. Of a tenant within its share (shares.py) none ends, unless nothing else of `in_use` makes
        the room."""
        demand = Demand("request")
        freely, claim = list(self.candidates(cache, wanted, demand)), self._claim(cache, wanted, demand)
        gone = freely + [each for each in leaving if each not in freely and _holds(cache, each)]
        running = [each for each in in_use if each not in gone and _holds(cache, each) and _can_give_way(each)]
        kept = [] if claim is None else [each for each in running if claim.keeps(each)]
        first = [each for each in running if each not in kept]
        held = () if claim is None else self._held(cache)
        others = (each for each in held if each not in gone and each is not wanted)
        idle = (each for each in others if self._may_leave(each, cache, demand))
        chosen = self.fewest(cache, self._needed(cache, wanted), itertools.chain(gone, first, idle, kept))
        return None if chosen is None else [each for each in chosen if each in first or each in kept]

    def _in_order(self, cache: Budget) -> Iterator[StoredWeights]:
        for is_on_device in (True,) if cache is self._device else (False, True):
            yield from (each for each in self._held(cache) if each.is_on_device == is_on_device)

    def _held(self, cache: Budget) -> Iterator[StoredWeights]:
        return (self._weights[digest] for digest in cache.policy.order(self._is_queued))

    def _is_queued(self, digest: str) -> bool:
        """Whether a request asked for it in this scheduling pass or the last and did not get it."""
        return self._weights[digest].wanted_in_pass >= max(0, self.pass_id - 1)

    def _may_leave(self, weights: StoredWeights, cache: Budget, demand: Demand) -> bool:
        is_spare_copy = cache is self._host and self._device.pool is not None and weights.is_on_device
        if is_spare_copy:
            return weights.is_at_rest
        is_wanted = demand.is_for_request and weights.wanted_in_pass == self.pass_id
        return weights.is_idle and not is_wanted and weights not in self._together

    # -------------------------------------------------------------------------------------------- a tenant's own limit

    def beyond_quotas(self, cache: Budget) -> Iterator[list[StoredWeights]]:
        """Of each tenant that is beyond its limit, what may leave for that now."""
        for account in self.quotas.all_beyond(cache.tier):
            standing = self._standing(cache, account, None, Demand("quota"))
            yield self._first_of(cache, standing, account.excess_bytes)

    def _own_leaving(
        self, cache: Budget, wanted: StoredWeights, demand: Demand, nbytes: int
    ) -> list[StoredWeights] | None:
        """What leaves so that the tenant for which `wanted` comes stays within its limit; None: too little may."""
        leaving: list[StoredWeights] | None = []
        for account in self._beyond(cache, wanted, demand, nbytes):
            standing = self._standing(cache, account, wanted, demand)
            if standing.free_bytes >= account.excess_bytes or demand.cause in UNREFUSED:
                return self._first_of(cache, standing, account.excess_bytes)
            leaving = None
        return leaving

    def _own_in_the_way(
        self, cache: Budget, adapter: StoredAdapter, in_use: Sequence[StoredWeights], leaving: Collection[StoredWeights]
    ) -> list[StoredWeights] | None:
        """Of `in_use`, what runs for the tenant of `adapter` and is in the way of its limit; None: its end would not
        be enough."""
        demand, wanted, chosen = Demand("request", adapter=adapter), adapter.weights, list[StoredWeights]()
        for account in self._beyond(cache, wanted, demand, wanted.own_nbytes):
            standing, use = self._standing(cache, account, wanted, demand), self.uses[cache.tier]
            own = [each for each in in_use if each not in standing.idle and holds(account.tenant, each)]
            lacking_bytes = account.excess_bytes - standing.free_bytes
            for each in sorted(own, key=lambda each: each not in leaving):  # stable: what ends anyway first
                if lacking_bytes > 0 and each is not wanted and _holds(cache, each) and _can_give_way(each):
                    chosen.append(each)
                    lacking_bytes -= use.nbytes_of(each)
            if lacking_bytes > 0:
                return None
        return chosen

    def _beyond(self, cache: Budget, wanted: StoredWeights, demand: Demand, nbytes: int) -> list[Account]:
        nbytes = nbytes if wanted.layout is None else wanted.own_nbytes
        return self.quotas.beyond(cache.tier, wanted, nbytes, demand)

    def _standing(self, cache: Budget, account: Account, wanted: StoredWeights | None, demand: Demand) -> Standing:
        is_pinned_there = cache is self._device or self._device.pool is None  # else the host's copy of that is spare

        def may_leave(each: StoredWeights) -> bool:
            return cache.policy.evicts and self._may_leave(each, cache, demand)

        def stays(each: StoredWeights, tenant: str) -> bool:
            return is_pinned_there and (pins(tenant, each) or each in self._together)

        return self.quotas.standing(account, wanted, may_leave, stays)

    def _first_of(self, cache: Budget, standing: Standing, nbytes: int) -> list[StoredWeights]:
        """What is idle, in the policy's order, until there are so many bytes of it."""
        leaving, use = list[StoredWeights](), self.uses[cache.tier]
        for each in self._in_order(cache) if standing.idle else ():
            if nbytes <= 0:
                break
            if each in standing.idle:
                leaving.append(each)
                nbytes -= use.nbytes_of(each)
        return leaving

    def _is_beyond_quota(
        self, cache: Budget, wanted: StoredWeights, demand: Demand, name: str, nbytes: int, *, is_verb: bool = False
    ) -> bool:
        """Whether the end of what its tenant runs or loads is what it waits for. Raises AdapterBeyondQuotaError and
        AdapterQuotaError when none makes it fit. is_verb: it does not wait for requests."""
        if self._own_leaving(cache, wanted, demand, nbytes) is not None:
            return False
        errors = [
            self._quota_error(cache, account, wanted, demand, name, is_verb=is_verb)
            for account in self._beyond(cache, wanted, demand, nbytes)
        ]
        if errors and errors[0] is not None and all(errors):
            raise errors[0]
        return True

    def _quota_error(
        self, cache: Budget, account: Account, wanted: StoredWeights, demand: Demand, name: str, *, is_verb: bool
    ) -> AdapterMemoryError | None:
        """None: it can come when something has ended."""
        if account.nbytes > account.max_bytes:
            return _too_large(account, name)
        use, tenant = self.uses[cache.tier], account.tenant
        pinned_bytes = self._standing(cache, account, wanted, demand).pinned_bytes
        own = (self._weights[digest] for digest in use.digests.get(tenant, ()))
        is_in_motion = not is_verb or any(_is_soon_at_rest(each) for each in own)  # what is neither idle nor pinned is
        if cache.policy.evicts and is_in_motion and pinned_bytes + account.nbytes <= account.max_bytes:
            return None
        return AdapterQuotaError(
            f"adapter {name!r} needs {account.nbytes} bytes of {cache.tier.value} memory, and {account.limit}: "
            f"{use.nbytes[tenant]} are taken, {pinned_bytes} of them pinned; unpin or evict another adapter of the "
            "tenant, or raise the limit",
            tenant,
        )

    # -------------------------------------------------------------------------------------------------- what is refused

    def check_is_coming(self, cache: Budget, wanted: StoredWeights, demand: Demand, name: str, nbytes: int) -> None:
        """Raises AdapterNoRoomError unless waiting helps a verb: memory is on its way back, or a load that has its
        room will soon be done."""
        if self._is_beyond_quota(cache, wanted, demand, name, nbytes, is_verb=True):
            return
        others = (each for each in self._weights.values() if each is not wanted)
        if not (self._retired.nbytes > 0 or any(_is_soon_at_rest(each) for each in others)):
            raise self.no_room(cache, wanted, name, nbytes)

    def check_can_come(self, cache: Budget, wanted: StoredWeights, demand: Demand) -> None:
        """Raises AdapterNoRoomError when no end of running requests or loads makes room for `wanted` in `cache`."""
        nbytes, name = self._needed(cache, wanted), (demand.adapter or next(iter(wanted.adapters.values()))).name
        if self._is_beyond_quota(cache, wanted, demand, name, nbytes):
            return
        if self._retired.nbytes or self.promised(cache) not in (None, wanted):
            return
        if self._is_kv_in_the_way(cache) and cache.fits(nbytes):
            return  # requests end, and the KV cache gives back
        has_pins = cache is self._device or self._device.pool is None  # else the host's copy of what is pinned is spare
        others = [each for each in self._held(cache) if each is not wanted]
        beside = [each for each in others if each in self._together and not each.num_pinned] if has_pins else []
        pinned = [*beside, *(self._pinned(wanted) if has_pins else ())]
        beside_bytes = together_nbytes(pinned)
        more_bytes = together_nbytes([*pinned, wanted]) - beside_bytes if cache is self._device else wanted.nbytes
        can_fit = cache.allows(more_bytes, beside_bytes, len(pinned))
        is_in_motion = any(each not in beside and not _is_settled(each, self.pass_id) for each in others)
        if not (cache.policy.evicts and can_fit and is_in_motion):
            raise self.no_room(cache, wanted, name, nbytes)

    def check_mix(self, adapters: Sequence[StoredAdapter], factors: Sequence[float]) -> None:
        """Raises AdapterMixError for adapters or weights that PEFT has no result for, AdapterTooLargeError when an
        empty device would not hold them together. What was never loaded is not judged yet."""
        layouts = {each.weights: layout for each in adapters if (layout := each.weights.layout) is not None}
        for adapter, factor in zip(adapters, factors, strict=True):
            others = [layouts[each.weights] for each in adapters if each is not adapter and each.weights in layouts]
            layout = layouts.get(adapter.weights)
            why = None if layout is None else _why_not_mixed(layout, factor, others, self._biased_base)
            if why is not None:
                raise AdapterMixError(f"adapter {adapter.name!r} {why}")
        nbytes = together_nbytes(layouts)
        for cache in (self._device, self._host) if self._device.pool is None else (self._device,):
            most = cache.max_adapters
            if nbytes > cache.max_bytes or (most is not None and len(layouts) > most):
                raise AdapterTooLargeError(
                    f"a mix of {len(layouts)} adapters needs {nbytes} bytes of {cache.tier.value} memory, all of it is "
                    f"{cache.max_bytes} bytes" + (f" and {most} adapters" if most is not None else "") + "; raise "
                    f"{cache.setting} or mix fewer"
                )
            for tenant in {each.spec.tenant for each in adapters} if self.quotas else ():
                own = {each.weights for each in adapters if each.spec.tenant == tenant and each.weights in layouts}
                account = self.quotas.alone(tenant, cache.tier, sum(each.own_nbytes for each in own))
                if account is not None:
                    raise AdapterBeyondQuotaError(
                        f"a mix of {len(own)} adapters of tenant {tenant} needs {account.nbytes} bytes of "
                        f"{cache.tier.value} memory, and {account.limit}; mix fewer, or raise the limit",
                        tenant,
                    )

    def check_pinnable(self, weights: StoredWeights, name: str) -> None:
        """Raises AdapterNoRoomError when the pinned adapters and this one together exceed the device."""
        if weights.layout is None or weights.num_pinned:
            return
        pinned = self._pinned(weights)
        pinned_bytes = together_nbytes(pinned)
        nbytes = together_nbytes([*pinned, weights]) - pinned_bytes
        if not self._device.allows(nbytes, pinned_bytes, len(pinned)):
            raise AdapterNoRoomError(
                f"adapter {name!r} cannot be pinned: it needs {nbytes} bytes, and {pinned_bytes} of the "
                f"{self._device.max_bytes} bytes and {len(pinned)} of the {self._device.max_adapters} slots of the "
                "device are pinned already; unpin another adapter or raise adapter_memory_bytes"
            )

    def _on_device(self, tenant: str) -> Iterator[StoredWeights]:
        """Contents of a tenant; all that are pinned are among them, but for one whose damaged copy is replaced."""
        return (self._weights[digest] for digest in self.uses[Tier.DEVICE].digests.get(tenant, ()))

    def check_share_of_pins(self, tenant: str, wanted: StoredWeights | None) -> None:
        """Raises AdapterNoRoomError when a tenant's pinned contents and this one exceed its limit, or its share of the
        device."""
        pinned = {each for each in self._on_device(tenant) if each.num_pinned}
        if self.quotas:
            self._check_quota_of_pins(tenant, wanted)
        if wanted in pinned:
            return
        num_tenants = len(self._tenants.keys() | {tenant})
        num_more = len(pinned) + 1
        nbytes = together_nbytes(pinned) + 1 if wanted is None else together_nbytes({*pinned, wanted})
        if num_tenants > 1 and not is_in_share(self._device, nbytes, num_more, num_tenants):
            raise AdapterNoRoomError(
                f"with one more than {len(pinned)} pinned adapters this tenant would have more than its share of the "
                "device; unpin another one first"
            )

    def _check_quota_of_pins(self, tenant: str, wanted: StoredWeights | None) -> None:
        """What was never loaded is taken to have the bytes of its files; what is not there yet, one byte."""
        pinned = {each for each in self._on_device(tenant) if pins(tenant, each)}
        if wanted in pinned:
            return
        pinned_bytes = sum(map(_expected_nbytes, pinned))
        nbytes = 1 if wanted is None else _expected_nbytes(wanted)
        for cache in (self._device, self._host) if self._device.pool is None else (self._device,):
            account = self.quotas.alone(tenant, cache.tier, pinned_bytes + nbytes)
            if account is not None:
                raise AdapterQuotaError(
                    f"{account.limit}: {pinned_bytes} bytes of {len(pinned)} adapters are pinned, and this one needs "
                    f"{nbytes}; unpin another one first, or raise the limit",
                    tenant,
                )

    def check_size(self, weights: StoredWeights, demand: Demand, name: str, nbytes: int) -> None:
        """Raises AdapterTooLargeError when an empty tier would not hold the adapter, or a tenant's limit all alone."""
        for cache in (self._device, self._host):
            accounts = [] if demand.cause in UNREFUSED else self._beyond(cache, weights, demand, nbytes)
            if accounts and all(each.nbytes > each.max_bytes for each in accounts):
                raise _too_large(accounts[0], name)
            if nbytes > cache.max_bytes:
                raise AdapterTooLargeError(
                    f"adapter {name!r} needs {nbytes} bytes of {cache.tier.value} memory, all of it is "
                    f"{cache.max_bytes} bytes; raise {cache.setting} or use a lower rank"
                )

    def no_room(self, cache: Budget, wanted: StoredWeights, name: str, nbytes: int) -> AdapterNoRoomError:
        held = [each for each in self._held(cache) if each is not wanted]
        pinned = together_nbytes(each for each in held if each.num_pinned)
        in_use = together_nbytes(each for each in held if each.num_running and not each.num_pinned)
        most = cache.max_adapters
        bound = "" if most is None else f" ({cache.num_adapters} of at most {most} adapters)"
        rule = "" if cache.policy.evicts else f"; eviction_policy is {cache.policy.name}, so nothing is evicted"
        if cache.fits(nbytes):
            rule += f"; {self._why_no_piece_is_free(cache)}"
        return AdapterNoRoomError(
            f"adapter {name!r} needs {nbytes} bytes of {cache.tier.value} memory and finds no room: "
            f"{cache.used_bytes} of {cache.max_bytes} bytes are taken{bound}, {pinned} bytes pinned and {in_use} in "
            f"use{rule}; unpin or evict another adapter, or raise {cache.setting}"
        )

    def _pinned(self, besides: StoredWeights) -> list[StoredWeights]:
        return [each for each in self._held(self._device) if each.num_pinned and each is not besides]

    def is_waiting(self, weights: StoredWeights, cause: WaitsFor) -> bool:
        """Whether a request did not get it in this scheduling pass or the last, because of `cause`."""
        return weights.waits_for is cause and weights.wanted_in_pass >= self.pass_id - 1

    @property
    def pinned_bytes(self) -> int:
        return together_nbytes(each for each in self._held(self._device) if each.num_pinned)


def _why_not_mixed(
    layout: PackedLayout, factor: float, others: Sequence[PackedLayout], biased_base: frozenset[tuple[str, int]]
) -> str | None:
    """What PEFT has no result for to be equal to.

    It weighs deltas alone, LoRA's own biases with them. A bias of the base may be replaced by one adapter, whichever
    comes first. biased_base: slices of targets that have one.
    """
    kind, biases = layout.mixing, layout.biased & biased_base
    if kind is Mixing.ALONE:
        return f"{kind.value}, which are in no mix; name it alone"
    if any(each.rope_factor != layout.rope_factor for each in others):
        return "has another context than others of the mix: all of a mix have one scaling factor"
    if factor != 1 and (kind is not Mixing.SUM or biases):
        what = "has biases" if kind is Mixing.SUM else f"{kind.value} (DoRA, IA3)"
        return f"{what}: its weight in a mix is 1, not {factor:g}"
    if kind is Mixing.PRODUCT and any(each.mixing is not kind for each in others):
        return "is an IA3, which is mixed with other IA3s only"
    if any(biases & each.biased for each in others):
        return "has biases, and so has another one of the mix in the same modules: one may"
    return None


def _holds(cache: Budget, weights: StoredWeights) -> bool:
    return (weights.device if cache.tier is Tier.DEVICE else weights.host) is not None


def _is_soon_at_rest(weights: StoredWeights) -> bool:
    """Not when requests still run on what did not arrive: they end in the engine's thread, maybe the asking one."""
    job = weights.job
    return weights.num_readers > 0 or (job is not None and job.error is None and weights.host is not None)


def _can_give_way(weights: StoredWeights) -> bool:
    is_draining = any(adapter.is_removed for adapter in weights.adapters.values())
    return weights.num_running > 0 and weights.num_pinned == 0 and weights.is_at_rest and not is_draining


def _expected_nbytes(weights: StoredWeights) -> int:
    if weights.layout is not None:
        return weights.own_nbytes
    return max([1, *(each.spec.nbytes for each in weights.adapters.values())])


def _too_large(account: Account, name: str) -> AdapterBeyondQuotaError:
    text = f"adapter {name!r} needs {account.nbytes} bytes of {account.tier.value} memory, and {account.limit}"
    return AdapterBeyondQuotaError(f"{text}; raise the limit, or use a lower rank", account.tenant)


def _is_settled(weights: StoredWeights, pass_id: int) -> bool:
    """Nothing about it will change by itself: it is idle or pinned, and no request asked for it in this pass."""
    return (weights.is_idle and weights.wanted_in_pass != pass_id) or weights.num_pinned > 0
