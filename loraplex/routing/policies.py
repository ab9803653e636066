"""The policies of placement: each orders the runners that fit, and the first one takes the request.

    place(needs, snapshots, policy, now_s) = argmin over those that fit of (policy.key(needs, snapshot), name)

`pack`     the busiest runner that still fits, so that quiet ones drain and can be released (Punica, section 5)
`latency`  the least estimated seconds to the first token: queue, weights on their way, prompt, ranks
`spread`   the shortest queue
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from loraplex.core import Tier
from loraplex.routing.snapshot import Needs, Snapshot

TIER_ORDER = {tier: number for number, tier in enumerate(Tier)}

MAX_AGE_S = 10.0
"""A runner whose snapshot is older takes a request only where no other one fits."""

Key = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of what a request waits for; measured ones make `latency` exact, these make it order sensibly.

    tiers: until an adapter that is there can run. waiting_s: of each request in the queue; running_s: what one in the
    batch adds, rank_s a unit of its adapter's rank. token_s: of each prompt token that is computed.
    """

    tiers: Mapping[Tier, float] = field(
        default_factory=lambda: MappingProxyType({Tier.DEVICE: 0.0, Tier.HOST: 0.02, Tier.DISK: 0.15, Tier.SOURCE: 0.5})
    )
    waiting_s: float = 0.25
    running_s: float = 0.01
    rank_s: float = 1e-5
    token_s: float = 0.0005

    def seconds(self, needs: Needs, runner: Snapshot) -> float:
        """Estimated, to the first token."""
        return (
            self.tiers[runner.tier_of(needs.adapter)]
            + self.waiting_s * runner.num_waiting
            + self.running_s * runner.num_running
            + self.token_s * runner.num_uncached_tokens(needs)
            + self.rank_s * runner.ranks
        )


class Policy(Protocol):
    """The runner with the least key takes a request. A key depends on the runner and on the request alone."""

    @property
    def name(self) -> str: ...
    def key(self, needs: Needs, runner: Snapshot) -> Key: ...


def _affinity(needs: Needs, runner: Snapshot) -> Key:
    """Among equals: the adapter is near, the prompt is cached, the tenant has few requests there, there is room."""
    return (
        TIER_ORDER[runner.tier_of(needs.adapter)],
        -runner.cached_share(needs),
        runner.num_of_tenant(needs),
        -runner.adapter_room,
    )


@dataclass(frozen=True, slots=True)
class Pack:
    name: str = "pack"

    def key(self, needs: Needs, runner: Snapshot) -> Key:
        return (-runner.num_requests, *_affinity(needs, runner))


@dataclass(frozen=True, slots=True)
class Latency:
    costs: Costs = field(default_factory=Costs)
    name: str = "latency"

    def key(self, needs: Needs, runner: Snapshot) -> Key:
        return (self.costs.seconds(needs, runner), *_affinity(needs, runner))


@dataclass(frozen=True, slots=True)
class Spread:
    name: str = "spread"

    def key(self, needs: Needs, runner: Snapshot) -> Key:
        return (runner.num_requests, *_affinity(needs, runner))


POLICIES: Mapping[str, Policy] = MappingProxyType({each.name: each for each in (Pack(), Latency(), Spread())})


def place(needs: Needs, runners: Iterable[Snapshot], policy: Policy, now_s: float) -> str | None:
    """The name of the runner that takes the request.

    None: no runner is open.
    """
    is_open = (runner for runner in runners if runner.is_open)
    best = min(is_open, key=lambda runner: order(needs, runner, policy, now_s), default=None)
    return None if best is None else best.name


def order(needs: Needs, runner: Snapshot, policy: Policy, now_s: float) -> tuple[bool, bool, Key, str]:
    """The least takes the request.

    Those that fit come first, in the policy's order; then, where none does, the shortest queue of those that are open,
    with a fresh snapshot if there is one. Names decide between equals.
    """
    is_stale = now_s - runner.seen_s > MAX_AGE_S
    is_full = not runner.fits(needs)
    key = policy.key(needs, runner) if not is_full else (runner.num_requests, *_affinity(needs, runner))
    return is_stale, is_full, key, runner.name
