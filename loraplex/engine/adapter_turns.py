"""Whose turn it is on the device, where adapters wait for room: no tenant may keep it for ever, none is sent away at once.

When a request lacks room for its adapter for `aging_steps / 8` steps, those behind it no longer keep the adapters in its way busy:
these finish what they run, and leave. After `aging_steps` steps running requests of adapters in its way make room. An adapter that got in
has its turn: it is left alone for `aging_steps / 4` steps, and until the request that brought it in has ended or got as many
tokens (a prompt that takes longer would else begin anew for ever).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.core import ResidencyView, WaitsFor
from loraplex.engine.schedule_plan import RequestState, RequestStatus


@dataclass(frozen=True, slots=True)
class _Hold:
    """Adapters in the way of a request that lacks room: requests that came after it wait for it."""

    waiting: RequestState
    adapter_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Turn:
    """An adapter's time on the device: since when requests run on it, and the request that brought it there."""

    since_step: int
    opener: RequestState


class AdapterTurns:
    """The turns of the adapters of running requests, counted in steps; the scheduler says which step it is, who runs and who waits.

    `residency` is None in an engine without LoRA: nobody waits for an adapter then.
    """

    def __init__(self, residency: ResidencyView | None, aging_steps: int) -> None:
        self._residency = residency
        self._aging_steps = aging_steps
        self._turns: dict[int, _Turn] = {}
        self._hold: _Hold | None = None
        self.step_id = 0

    @property
    def adapter_ids(self) -> set[int]:
        """Adapters that have a turn now."""
        return set(self._turns)

    def begin(self, adapter_id: int, opener: RequestState) -> None:
        """A request of the adapter runs; the first one opens its turn."""
        self._turns.setdefault(adapter_id, _Turn(self.step_id, opener))

    def end(self, adapter_id: int) -> None:
        """No request of the adapter runs any more."""
        del self._turns[adapter_id]

    # ------------------------------------------------------------------------------------------------ after aging_steps

    def is_aged(self, state: RequestState) -> bool:
        """Whether it has waited too long for its adapter. Who got room and waits for its load stays aged: the next one would take the
        room away again, and so on for ever."""
        since = state.waits_since_step
        return since is not None and self.step_id - since >= self._aging_steps

    def in_the_way(self, waiting: Sequence[RequestState], running: Sequence[RequestState]) -> list[RequestState]:
        """Running requests that must give way to the first aged one that lacks room, once each of their adapters has had its turn."""
        lacks_room = next((each for each in waiting if each.waits_for is WaitsFor.ROOM and self.is_aged(each)), None)
        if lacks_room is None:
            return []
        victims = self._victims_for(lacks_room)
        if all(self._has_had_turn(self._turns[adapter_id]) for adapter_id in victims if adapter_id in self._turns):
            return [state for state in running if state.request.adapter_id in victims]
        return []

    def _has_had_turn(self, turn: _Turn) -> bool:
        shortest = self._aging_steps // 4
        opener = turn.opener
        num_new_tokens = len(opener.token_ids) - opener.num_tokens_admitted
        is_served = opener.status is not RequestStatus.RUNNING or num_new_tokens >= max(1, shortest)
        return is_served and self.step_id - turn.since_step >= shortest

    # ------------------------------------------------------------------------------------------- after an eighth of that

    def update_hold(self, waiting: Sequence[RequestState]) -> None:
        """For one request at a time, the first that lacks room for long; it lasts as long as the adapters in its way are in use."""
        lacking = next((state for state in waiting if self._lacks_room_for_long(state)), None)
        if lacking is None:
            self._hold = None
        elif (
            self._hold is None or self._hold.waiting is not lacking or not self._hold.adapter_ids <= self._turns.keys()
        ):
            self._hold = _Hold(lacking, self._victims_for(lacking))

    def is_on_hold(self, state: RequestState) -> bool:
        """Whether its adapter is to leave, for a request that came before it."""
        hold = self._hold
        is_behind = hold is not None and state.arrival_index > hold.waiting.arrival_index
        return is_behind and hold is not None and state.request.adapter_id in hold.adapter_ids

    def _lacks_room_for_long(self, state: RequestState) -> bool:
        since = state.waits_since_step
        return state.waits_for is WaitsFor.ROOM and since is not None and self.step_id - since >= self._aging_steps // 8

    def _victims_for(self, state: RequestState) -> frozenset[int]:
        assert self._residency is not None
        assert state.request.adapter_id is not None
        return frozenset(self._residency.victims_for(state.request.adapter_id))
