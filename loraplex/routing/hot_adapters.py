"""Adapters that one runner has too many requests for: copies on other devices ahead of need, and their end.

    runners that an adapter needs := ceil(its requests / (share * places of a runner))

An adapter is hot where it needs more than the runners that have it on their device, and has more than `share` of the
places of one of them. A copy goes where its weights are nearest, then where adapters have the most room. It is taken
back when the adapter has not needed it for `hold_s` and has no request there; so nothing is copied to and fro.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.core import Tier
from loraplex.routing.policies import TIER_ORDER
from loraplex.routing.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class HotRules:
    """min_room: the share of a runner's adapter memory that is free, below which no copy is made there."""

    share: float = 0.5
    hold_s: float = 30.0
    min_room: float = 0.1


@dataclass(frozen=True, slots=True)
class Copy:
    """An adapter that was brought to the device of a runner ahead of need."""

    adapter: str
    runner: str


@dataclass(frozen=True, slots=True)
class Copies:
    make: tuple[Copy, ...] = ()
    take_back: tuple[Copy, ...] = ()


class HotAdapters:
    """Knows the copies that were made, and when each was needed last. Times are the caller's."""

    def __init__(self, rules: HotRules | None = None) -> None:
        self._rules = rules or HotRules()
        self._needed_s: dict[Copy, float] = {}

    def decide(self, runners: Sequence[Snapshot], now_s: float) -> Copies:
        """At most one new copy of an adapter at a time. What is to be made counts as made: one that could not be made
        is not tried again while it is needed. A runner that is not open has no copies any more.
        """
        is_open = {each.name: each for each in runners if each.is_open}
        for copy in [each for each in self._needed_s if each.runner not in is_open]:
            del self._needed_s[copy]
        make = self._hot(list(is_open.values()))
        self._needed_s.update(dict.fromkeys(make, now_s))
        take_back = []
        for copy, needed_s in list(self._needed_s.items()):
            if is_open[copy.runner].num_by_adapter.get(copy.adapter, 0) or self._is_needed(
                copy, tuple(is_open.values())
            ):
                self._needed_s[copy] = now_s
            elif now_s - needed_s >= self._rules.hold_s:
                take_back.append(copy)
                del self._needed_s[copy]
        return Copies(tuple(make), tuple(take_back))

    def _hot(self, runners: Sequence[Snapshot]) -> list[Copy]:
        queued = {
            adapter
            for each in runners
            for adapter, number in each.num_by_adapter.items()
            if number > self._rules.share * each.max_requests
        }
        found = []
        for adapter in sorted(queued, key=lambda each: (-_total(each, runners), each)):
            lacking = [each for each in runners if not self._has(each, adapter)]
            num_more = self._num_needed(adapter, runners) - (len(runners) - len(lacking))
            fitting = [each for each in lacking if each.adapter_room >= self._rules.min_room]
            if num_more > 0 and fitting:
                best = min(fitting, key=lambda each: (_order(each, adapter), each.name))
                found.append(Copy(adapter, best.name))
        return found

    def _has(self, runner: Snapshot, adapter: str) -> bool:
        return runner.tier_of(adapter) is Tier.DEVICE or Copy(adapter, runner.name) in self._needed_s

    def _num_needed(self, adapter: str, runners: Sequence[Snapshot]) -> int:
        places = min(each.max_requests for each in runners)
        return min(len(runners), math.ceil(_total(adapter, runners) / (self._rules.share * places)))

    def _is_needed(self, copy: Copy, runners: Sequence[Snapshot]) -> bool:
        others = [each for each in runners if each.name != copy.runner and self._has(each, copy.adapter)]
        return self._num_needed(copy.adapter, runners) > len(others)


def _total(adapter: str, runners: Sequence[Snapshot]) -> int:
    return sum(each.num_by_adapter.get(adapter, 0) for each in runners)


def _order(runner: Snapshot, adapter: str) -> tuple[float, ...]:
    return TIER_ORDER[runner.tier_of(adapter)], -runner.adapter_room, runner.num_requests
