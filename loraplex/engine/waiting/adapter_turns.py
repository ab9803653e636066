"""Adapters of requests: the references of those that run, and which adapters have the room when not all that are
wanted fit: requests take turns on it instead of thrashing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loraplex.core import MixPart, ResidencyView, WaitsFor
from loraplex.engine.schedule_plan import RequestState, RequestStatus
from loraplex.engine.waiting.queue import WaitingQueue
from loraplex.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class _Turn:
    """An adapter's time on the device: since when requests run on it, and the request that brought it there."""

    since_step: int
    opener: RequestState


class AdapterTurns:
    """Whose turn it is on the device: the request that is furthest behind runs, and no request waits very much longer
    than the others.

        lag of a request := steps since it came - half of the steps that ran it

    When a request lacks room, and leads the running requests of each adapter in its way by `aging_steps / 32` steps of
    lag, these are paused: they give up their adapter, keep their KV, and go on when they are furthest behind
    themselves. Running requests count as if they lagged by less than `aging_steps`, so a request that waited so long
    leads. An adapter that got in has its turn: it is left alone for `aging_steps / 16` steps, and until the request
    that brought it in has ended or got as many tokens (a prompt whose KV is needed elsewhere would otherwise be
    computed again and again).

    Only requests of a tenant that was served at least as much are paused for one of another tenant.

    Simulated for equal requests, six adapters over room for three (docs/performance.md): waiting for the end of running
    requests gives P99 / median 2.2, first come first served with pauses 2.0, this rule 1.8 with the lowest P99 of the
    three. Steps spent waiting alone, without the half, shorten the tail no further and lengthen the median.

    Counted in steps; the scheduler says which step it is, and which requests run and wait. `residency` is None in an
    engine without LoRA.
    """

    def __init__(self, residency: ResidencyView | None, aging_steps: int) -> None:
        self._residency = residency
        self._aging_steps = aging_steps
        self._lead = max(1, aging_steps // 32)
        self._shortest = aging_steps // 16
        self._turns: dict[int, _Turn] = {}
        self._called: list[RequestState] = []  # others were paused for these, which do not run yet; the first first
        self.step_id = 0

    @property
    def adapter_ids(self) -> set[int]:
        """Adapters that have a turn now."""
        return set(self._turns)

    def begin(self, state: RequestState) -> None:
        """A request runs; the first one of its adapter opens the turn."""
        if state in self._called:
            self._called.remove(state)
        for adapter_id in state.request.adapter_ids:
            self._turns.setdefault(adapter_id, _Turn(self.step_id, state))

    def end(self, adapter_id: int) -> None:
        """No request of the adapter runs any more."""
        del self._turns[adapter_id]

    def is_called(self, state: RequestState) -> bool:
        """Whether others were paused for it, and it does not run yet."""
        return state in self._called

    def called(self, waiting: WaitingQueue) -> list[RequestState]:
        """Those that others were paused for: they are admitted before the rest, so that they get the room."""
        self._called = [state for state in self._called if state in waiting]
        return self._called

    def call(self, waiting: WaitingQueue, running: Sequence[RequestState]) -> list[RequestState]:
        """The requests that `to_pause` names, for the one that is furthest behind; it goes first from now on."""
        paused = self.to_pause(waiting, running)
        caller = self._next(waiting) if paused else None
        if caller is not None and caller not in self._called:
            waiting.set_apart(caller)
            self._called.append(caller)
        return paused

    def to_pause(self, waiting: WaitingQueue, running: Sequence[RequestState]) -> list[RequestState]:
        """Running requests in the way of the one that lacks room and is furthest behind, if it leads them all and each
        had its turn."""
        caller = self._next(waiting)
        if caller is None:
            return []
        lag_of: dict[int, int] = {}  # of the request of an adapter that is furthest behind
        for state in running:
            for adapter_id in state.request.adapter_ids:
                lag_of[adapter_id] = max(lag_of.get(adapter_id, 0), self._lag(state))
        victims = self._victims_for(caller, sorted(lag_of, key=lag_of.__getitem__))
        if not all(self._may_end(each, lag, caller) for each, lag in lag_of.items() if each in victims):
            return []
        paused = [state for state in running if not victims.isdisjoint(state.request.adapter_ids)]
        return [] if any(state.share.served < caller.share.served for state in paused) else paused

    def _next(self, waiting: WaitingQueue) -> RequestState | None:
        return waiting.furthest_behind(self.step_id, self._aging_steps)

    def _lag(self, state: RequestState) -> int:
        return self.step_id - state.starting_lag

    def _may_end(self, adapter_id: int, lag: int, caller: RequestState) -> bool:
        turn = self._turns[adapter_id]
        opener = turn.opener
        num_new_tokens = len(opener.token_ids) - opener.num_tokens_admitted
        is_served = opener.status is not RequestStatus.RUNNING or num_new_tokens >= max(1, self._shortest)
        has_had_turn = is_served and self.step_id - turn.since_step >= self._shortest
        return has_had_turn and self._lag(caller) >= min(lag, self._aging_steps - self._lead) + self._lead

    def _victims_for(self, state: RequestState, adapter_ids: Sequence[int]) -> frozenset[int]:
        assert self._residency is not None
        assert state.request.adapter_id is not None
        if state.request.mix:
            return frozenset(self._residency.victims_for_mix(state.request.adapter_ids, adapter_ids))
        return frozenset(self._residency.victims_for(state.request.adapter_id, adapter_ids))


class HeldAdapters:
    """References to the adapters of running requests. `residency` is None in an engine without LoRA."""

    def __init__(self, residency: ResidencyView | None) -> None:
        self._residency = residency

    def acquire(self, state: RequestState, blocked: dict[int | tuple[MixPart, ...], WaitsFor]) -> WaitsFor | None:
        """What it waits for; None when there is a reference. blocked: what was found so in this step."""
        adapter_id, mix, residency = state.request.adapter_id, state.request.mix, self._residency
        if adapter_id is None:
            return None
        assert residency is not None, "a request for an adapter in an engine without LoRA"
        asked = mix or adapter_id
        if asked not in blocked:
            result = residency.try_acquire_mix(mix) if mix else residency.try_acquire(adapter_id)
            if result.waits_for is None:
                state.lora_slot, state.mix_slots = result.lora_slot, result.mix_slots
                self._check_prompt(state, result.vocab_size)
                return None
            blocked[asked] = result.waits_for
        return blocked[asked]

    def _check_prompt(self, state: RequestState, vocab_size: int | None) -> None:
        """Once its adapter is loaded; raises InvalidRequestError, without the adapter."""
        if state.is_prompt_checked or vocab_size is None:
            return
        try:
            state.request.check_prompt(vocab_size)
        except InvalidRequestError:
            self.release(state)
            raise
        state.is_prompt_checked = True

    def release(self, state: RequestState) -> None:
        state.lora_slot, state.mix_slots = None, ()
        for adapter_id in state.request.adapter_ids:
            assert self._residency is not None
            self._residency.release(adapter_id)

    def prefetch(self, states: Iterable[RequestState]) -> None:
        if self._residency is not None:
            for state in states:
                for adapter_id in state.request.adapter_ids:
                    self._residency.prefetch(adapter_id)
