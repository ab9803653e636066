"""The order of admission as a rule over a list: what `waiting.queue.WaitingQueue` has to say for one tenant.

order       those that others were paused for, then by rank
passed      a request that the step came to, and whose content it found not there: it waits since the first time
cause       what its content was last found to wait for; of requests that were passed, and of no others
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from loraplex.core import WaitsFor
from loraplex.engine.schedule_plan import RequestState


class SlowQueue:
    """Walks the list for everything."""

    def __init__(self) -> None:
        self.states: list[RequestState] = []  # by arrival
        self.since: dict[RequestState, int] = {}
        self.apart: set[RequestState] = set()
        self.causes: dict[object, WaitsFor | None] = {}

    def __len__(self) -> int:
        return len(self.states)

    def __contains__(self, state: RequestState) -> bool:
        return state in self.states

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self.states)

    def put_back(self, state: RequestState) -> None:
        self.apart.add(state)
        self.arrive(state)

    def arrive(self, state: RequestState) -> None:
        self.states.append(state)
        self.states.sort(key=lambda each: each.arrival_index)

    def remove(self, state: RequestState) -> WaitsFor | None:
        cause = self.cause_of(state)
        self.states.remove(state)
        self.since.pop(state, None)
        return cause

    def set_apart(self, state: RequestState) -> None:
        self.apart.add(state)

    def first_of_line(self, state: RequestState) -> RequestState:
        """It waits for what this one does: the first of its priority and content, but for those that are apart."""
        mine = content_of(state), state.request.claim.priority
        line = [each for each in self.states if (content_of(each), each.request.claim.priority) == mine]
        return state if state in self.apart else next(each for each in line if each not in self.apart)

    def cause_of(self, state: RequestState) -> WaitsFor | None:
        return self.causes[content_of(state)] if state in self.since else None

    @property
    def lacks_room(self) -> bool:
        return any(map(self.waits_for_room, self.states))

    def waits_for_room(self, state: RequestState) -> bool:
        return state in self.states and self.cause_of(state) is WaitsFor.ROOM

    def furthest_behind(self, step_id: int, aging_steps: int) -> RequestState | None:
        def urgency(state: RequestState) -> tuple[int, int]:
            lag = step_id - state.arrival_step - state.num_steps_run // 2
            return min(lag, aging_steps), step_id - self.since[state]

        return max(filter(self.waits_for_room, self.states), key=urgency, default=None)

    def tell_time(self, now_s: float) -> None:
        """No tenant has a target."""

    def next_ready(self, lets_pass: Callable[[RequestState], bool]) -> RequestState | None:
        ready = (state for state in self.states if self.cause_of(self.first_of_line(state)) is None)
        first = min(ready, key=lambda each: each.rank, default=None)
        return None if first is None or lets_pass(first) else first

    def is_missing(self, state: RequestState) -> bool:
        return self.cause_of(state) is not None

    def loading(self) -> Iterator[RequestState]:
        lines: dict[RequestState, list[RequestState]] = {}
        for state in self.states:
            lines.setdefault(self.first_of_line(state), []).append(state)
        for first, line in lines.items():
            for state in line if self.cause_of(first) is WaitsFor.LOAD else ():
                yield state
                if state in self:
                    break

    def found(self, state: RequestState, cause: WaitsFor | None) -> None:
        self.causes[content_of(state)] = cause

    def first(self, num_states: int) -> list[RequestState]:
        return [state for state in self.states[:num_states] if self.cause_of(state) is None]

    def adapter_ids(self) -> set[int]:
        return {adapter_id for state in self.states for adapter_id in state.request.adapter_ids}

    def states_of(self, adapter_id: int) -> list[RequestState]:
        return [state for state in self.states if adapter_id in state.request.adapter_ids]

    def admission(self, called: Sequence[RequestState], step_id: int) -> SlowAdmission:
        return SlowAdmission(self, called, step_id)

    def check_integrity(self) -> None:
        """Its lists are what it says."""


class SlowAdmission:
    def __init__(self, queue: SlowQueue, called: Sequence[RequestState], step_id: int) -> None:
        others = sorted((state for state in queue.states if state not in called), key=lambda each: each.rank)
        self._queue, self._step_id = queue, step_id
        self._order, self._called = [*called, *others], called
        self._found: set[object] = set()

    def next(self) -> RequestState | None:
        while self._order:
            state = self._order[0]
            is_passed = content_of(state) in self._found and state.preempted_at_step != self._step_id
            if state in self._queue and is_passed:
                self._queue.since.setdefault(state, self._step_id)
            elif state in self._queue:
                return state
            del self._order[0]
        return None

    def pass_over(self, state: RequestState) -> None:
        self._order.remove(state)

    def pass_tenant(self, state: RequestState) -> None:
        self._order = [
            each
            for each in self._order
            if each is not state and (each.share is not state.share or each in self._called)
        ]

    def block(self, state: RequestState, cause: WaitsFor) -> None:
        self._queue.since.setdefault(state, self._step_id)
        self._queue.causes[content_of(state)] = cause
        self._found.add(content_of(state))
        self._order.remove(state)

    def close(self) -> None:
        """Marks are set already."""


def content_of(state: RequestState) -> object:
    return state.request.mix or state.request.adapter_id
