"""Seats of the batch: how many of them mixes of adapters take, and which request gives its own, or its KV, to another.

The batch needs a segment for each adapter of a mix: its first request takes as many seats, each further one of the same
mix one. Where there are not so many, the first one runs alone.

A mix that needs more seats than are free, and than others give, waits until enough of the requests that run have ended.
Those of other tenants go past it meanwhile, and give their seats back as soon as these are enough with what is free.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from loraplex.core import BlockAllocator, MixPart
from loraplex.engine.schedule_plan import RequestState, RequestStatus
from loraplex.engine.waiting.shares import TenantShare


class MixSeats:
    """Of the running requests; () is no mix."""

    def __init__(self) -> None:
        self._num_running: Counter[tuple[MixPart, ...]] = Counter()
        self._passed: RequestState | None = None  # the first that others went past
        self._past: list[RequestState] = []  # those others
        self._is_passed = False  # in this look through the queue

    @property
    def num_more(self) -> int:
        """Seats that are taken beside one for each request."""
        return sum(len(mix) - 1 for mix in self._num_running)

    def needed_for(self, mix: tuple[MixPart, ...]) -> int:
        """Seats of a request more."""
        return len(mix) if mix and mix not in self._num_running else 1

    def begin(self, state: RequestState) -> None:
        if state.request.mix:
            self._num_running[state.request.mix] += 1
        if self._is_passed:
            self._past.append(state)

    def begin_look(self) -> None:
        """Through the queue."""
        self._is_passed = False
        self._past = [each for each in self._past if each.status is RequestStatus.RUNNING]

    def pass_by(self, state: RequestState) -> None:
        """What is admitted in the rest of this look goes past it."""
        self._passed, self._is_passed = self._passed if self._is_passed else state, True

    def end(self, mix: tuple[MixPart, ...]) -> None:
        if mix:
            self._num_running -= Counter((mix,))

    def seated_for(
        self, first: RequestState, running: Sequence[RequestState], max_running: int, *, lacks_kv: bool
    ) -> RequestState | None:
        """`seated_for`. None while there are seats and KV for it, and where more are taken than may be. What needs more
        than one gives gets one after another."""
        num_needed, num_left = self.needed_for(first.request.mix), max_running - len(running) - self.num_more
        if (num_needed <= num_left and not lacks_kv) or (num_left < 0 and len(running) > 1):
            return None
        return seated_for(first, running, num_needed, num_left)

    def lets_pass(self, first: RequestState, running: Sequence[RequestState], max_running: int) -> bool:
        """Whether it is a mix that waits for the end of others."""
        num_needed, num_left = self.needed_for(first.request.mix), max_running - len(running) - self.num_more
        is_lacking = num_needed > max(1, num_left) and len(running) > 0
        return is_lacking and self.seated_for(first, running, max_running, lacks_kv=False) is None

    def borrowers(self, running: Sequence[RequestState], max_running: int) -> list[RequestState]:
        """Those that give their seats back to a mix, which they went past: of tenants that were served more."""
        first = self._passed
        if first is None or first.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED) or not running:
            return []
        past = [each for each in self._past if each.status is RequestStatus.RUNNING]
        borrowers = [each for each in past if each.share.served > first.share.place]
        others = {*running}.difference(borrowers)
        mixes = {each.request.mix for each in others if each.request.mix}
        num_left = max_running - len(others) - sum(len(mix) - 1 for mix in mixes)
        num_needed = 1 if first.request.mix in mixes else len(first.request.mix)
        is_seated = self.needed_for(first.request.mix) <= max_running - len(running) - self.num_more
        return borrowers if not is_seated and (num_needed <= num_left or not others) else []

    def check_integrity(self, running: Iterable[RequestState]) -> None:
        assert self._num_running == Counter(state.request.mix for state in running if state.request.mix)


def seated_for(
    first: RequestState, running: Sequence[RequestState], num_needed: int, num_left: int
) -> RequestState | None:
    """Which of the running requests gives its seat to one that waits and needs so many: of those whose tenants were
    served no less and have more seats by weight even then, the one that is served last. None where all that they could
    give, and the num_left that are free, are too few: seats would stand empty until others end."""
    tenant, of_mixes = first.share, Counter[TenantShare]()
    for mix, state in {state.request.mix: state for state in running if state.request.mix}.items():
        of_mixes[state.share] += len(mix) - 1  # one of its requests has them
    num_seats = (tenant.num_running + of_mixes[tenant] + num_needed) / tenant.weight
    served_more = {each.share for each in running if each.share is not tenant and each.share.served >= tenant.place}
    giving: dict[TenantShare, int] = {}
    for each in served_more:
        num_own = each.num_running + of_mixes[each]
        if (num_above := num_own - num_seats * each.weight) > 0:
            giving[each] = num_own if of_mixes[each] else math.ceil(num_above)  # a mix gives all of its seats at once
    if num_left + sum(giving.values()) < num_needed:
        return None
    others = [state for state in running if state.share in giving]
    return last_served(others) if others else None


def last_served(states: Sequence[RequestState]) -> RequestState:
    """Of requests in order of admission: of the tenant that was served most, then by priority, the newest."""
    return max(reversed(states), key=lambda each: (each.share.served, each.request.claim.priority))


def borrowers_of(first: RequestState, past: Iterable[RequestState], blocks: BlockAllocator) -> list[RequestState]:
    """Of the requests that went past one for which KV was short, those that give it up, since it is enough with theirs.

    They are of tenants that were served more, so it comes before them when they wait.
    """
    borrowers = [
        each for each in past if each.status is RequestStatus.RUNNING and each.share.served > first.share.place
    ]
    num_blocks = sum(len(blocks.block_table(each.request.request_id)) for each in borrowers)
    num_needed = -(-len(first.token_ids) // blocks.block_size)
    return borrowers if blocks.num_free_blocks + num_blocks >= num_needed else []


def goes_after(state: RequestState, other: RequestState) -> bool:
    """Whether its KV is given to the other: it came later, or its tenant was served more."""
    if state.share is other.share:
        return state.arrival_index > other.arrival_index
    return state.share.served > other.share.served
