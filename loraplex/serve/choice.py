"""Which replica a request goes to: the policies of `routing`, over what the replicas say of themselves each second.

A front knows its own requests at once, and those of other fronts from the replicas' figures.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loraplex.core import Tier
from loraplex.routing import POLICIES, KnownMemory, Needs, Snapshot
from loraplex.routing.policies import order

MAX_ADAPTERS = 1000
"""In what a replica says of itself."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a replica says of itself. number: counts its looks. num_by_front: requests of each front, by its name.
    tiers: of adapters that are not at their source alone, at most MAX_ADAPTERS: the farthest first, and of one tier the
    one used last at the end."""

    number: int = 0
    is_healthy: bool = True
    num_waiting: int = 0
    num_by_front: Mapping[str, int] = field(default_factory=dict)
    num_kv_blocks: int | None = None
    num_free_kv_blocks: int | None = None
    adapter_room: float = 1.0
    tiers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Replica:
    figures: Figures
    seen_s: float
    known: KnownMemory = field(default_factory=KnownMemory)
    requests: dict[str, str | None] = field(default_factory=dict)
    """The tenant of each request that is there now."""

    by_tenant: Counter[str] = field(default_factory=Counter)
    begun: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_ADAPTERS))
    """Adapters of requests that the last figures may not know of."""

    def learn(self, figures: Figures, now_s: float) -> None:
        """What they do not name has left its memory, unless it has more on its device than they name."""
        self.figures, self.seen_s = figures, now_s
        if sum(tier == Tier.DEVICE for tier in figures.tiers.values()) < MAX_ADAPTERS:
            self.known.tiers.clear()
        self.known.learn_tiers((each, Tier(tier)) for each, tier in figures.tiers.items())
        self.known.learn_tiers((each, Tier.DEVICE) for each in self.begun)
        self.begun.clear()

    def unlearn(self, adapter: str | None) -> None:
        """A request for it went elsewhere."""
        if adapter is not None and adapter in self.begun:
            self.begun.remove(adapter)
            if adapter not in self.begun and adapter not in self.figures.tiers:
                self.known.tiers.pop(adapter, None)


class Choice:
    """Belongs to one front. `max_requests`: of a replica, before it counts as full."""

    def __init__(self, policy: str, max_requests: int, clock: Callable[[], float]) -> None:
        self._policy = POLICIES[policy]
        self._max_requests = max_requests
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._place_of: dict[str, str] = {}

    def see(self, figures: Mapping[str, Mapping[str, Any]]) -> None:
        """The replicas there are, by name, with their last figures (empty: none yet). Others are forgotten."""
        for name in self._replicas.keys() - figures.keys():
            for request_id in tuple(self._replicas[name].requests):
                self.end(name, request_id)
            del self._replicas[name]
        for name, values in figures.items():
            known, now_s = self._replicas.get(name), self._clock()
            if known is None:
                known = self._replicas[name] = _Replica(Figures(), now_s)
            if values and values["number"] != known.figures.number:
                known.learn(Figures(**values), now_s)

    def order(self, needs: Needs, names: Iterable[str], front: str = "") -> list[str]:
        """Of those that were seen, the first one takes the request, the next where it does not; healthy ones first.

        front: the name under which replicas count the requests of this one.
        """
        now_s = self._clock()
        snapshots = [self._snapshot(name, front) for name in names if name in self._replicas]
        ordered = sorted(snapshots, key=lambda each: (not each.is_open, order(needs, each, self._policy, now_s)))
        return [each.name for each in ordered]

    def begin(self, name: str, request_id: str, needs: Needs) -> None:
        """A request goes there, wherever it was to go before: its adapter's weights and its prompt's KV will be there,
        too."""
        place, replica = self._place_of.get(request_id), self._replicas.get(name)
        if place == name or replica is None:
            return
        if place is not None:
            self.end(place, request_id)
            self._replicas[place].unlearn(needs.adapter)
        self._place_of[request_id] = name
        replica.requests[request_id] = needs.tenant
        replica.known.learn_served(needs)
        if needs.adapter is not None:
            replica.begun.append(needs.adapter)
        if needs.tenant is not None:
            replica.by_tenant[needs.tenant] += 1

    def end(self, name: str, request_id: str) -> None:
        """It is over there, however it ended. It may be told twice, or of a request that is somewhere else now."""
        if self._place_of.get(request_id) != name:
            return
        del self._place_of[request_id]
        replica = self._replicas[name]
        tenant = replica.requests.pop(request_id)
        if tenant is not None:
            replica.by_tenant[tenant] -= 1
            if not replica.by_tenant[tenant]:
                del replica.by_tenant[tenant]

    def _snapshot(self, name: str, front: str) -> Snapshot:
        """num_requests := those of other fronts in the last figures + those of this one now."""
        replica = self._replicas[name]
        figures = replica.figures
        num_others = sum(count for each, count in figures.num_by_front.items() if each != front)
        num_all = num_others + len(replica.requests)
        num_waiting = min(figures.num_waiting, num_all)
        return Snapshot(
            name=name,
            seen_s=replica.seen_s,
            num_waiting=num_waiting,
            num_running=num_all - num_waiting,
            max_requests=self._max_requests,
            num_free_kv_blocks=figures.num_free_kv_blocks,
            num_kv_blocks=figures.num_kv_blocks,
            tiers=replica.known.tiers,
            prefix_digests=replica.known.prefixes.keys(),
            num_by_tenant=replica.by_tenant,
            adapter_room=figures.adapter_room,
            is_healthy=figures.is_healthy,
        )
