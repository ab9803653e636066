"""Which requests run in the next step, and with how many tokens. Pure Python: it sees memory through two protocols.

A step is schedule -> run -> commit. `schedule` reserves KV and adapter references; `commit` is the only place where tokens, phases and
references change afterwards. Between the two nothing of a scheduled request may be taken away.

Policy: running requests first; then waiting ones first come, first served, except that a request whose adapter is not there
yet lets others pass. When one lacks room on the device for `aging_steps / 8` steps, those behind it no longer keep the adapters
in its way busy: these finish what they run, and leave. Those that have waited `aging_steps` steps for their adapters go first,
and make the running requests of another adapter give way (they are preempted and resume later). An adapter that got in has its
turn: it is left alone for `aging_steps / 4` steps, and until the request that brought it in has ended or got as many tokens (a
prompt that takes longer would else begin anew for ever). So many waiting ones take turns instead of thrashing: with n adapters
waiting before it, one gets in within aging_steps + n * (aging_steps / 4 + the steps of a prompt) steps.
Preemption is by recompute; the prefix cache makes it cheap.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from loraplex.core import BlockAllocator, FinishReason, Request, ResidencyView, TokenOutput, WaitsFor
from loraplex.engine.schedule_plan import RequestState, RequestStatus, SampledToken, ScheduledSequence, SchedulePlan
from loraplex.errors import AdapterError, LoraplexError

PREFETCH_DEPTH = 16  # waiting requests whose adapters are looked ahead for while no seat is free


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


class Scheduler:
    """Continuous batching over one queue; see the module's docstring for the policy."""

    def __init__(
        self,
        blocks: BlockAllocator,
        residency: ResidencyView | None,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        aging_steps: int = 128,
    ) -> None:
        self._blocks = blocks
        self._residency = residency
        self._max_num_seqs = max_num_seqs
        self._max_running = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._aging_steps = aging_steps
        self._states: dict[str, RequestState] = {}
        self._waiting: list[RequestState] = []  # in order of arrival
        self._running: list[RequestState] = []  # in order of admission
        self._turns: dict[int, _Turn] = {}  # of the adapters of running requests
        self._hold: _Hold | None = None
        self._uncommitted: SchedulePlan | None = None
        self._step_id = 0
        self._num_arrivals = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_finished: Counter[str] = Counter()
        self.num_admitted: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        assert request.request_id not in self._states, f"request {request.request_id} is known already"
        state = RequestState(request, self._num_arrivals, list(request.prompt_token_ids))
        self._num_arrivals += 1
        self._states[request.request_id] = state
        self._waiting.append(state)
        if request.adapter_id is not None and self._residency is not None:
            self._residency.prefetch(request.adapter_id)

    def abort(self, request_id: str) -> TokenOutput | None:
        """End a request now, or at the commit when it is in the step in flight (None then, and for an unknown id)."""
        state = self._states.get(request_id)
        if state is None:
            return None
        if self._is_in_flight(state):
            state.is_aborted = True
            return None
        return self._finish(state, FinishReason.ABORT)

    def abort_adapter(self, adapter_id: int) -> list[TokenOutput]:
        """End every request of an adapter; those in flight end at the commit."""
        ids = [rid for rid, state in self._states.items() if state.request.adapter_id == adapter_id]
        return [output for output in map(self.abort, ids) if output is not None]

    def fail_adapter(self, adapter_id: int, error: LoraplexError) -> list[TokenOutput]:
        """End every request of an adapter with an error. Between steps only."""
        assert self._uncommitted is None, "a step is in flight"
        states = [state for state in self._states.values() if state.request.adapter_id == adapter_id]
        return [self._finish(state, FinishReason.ERROR, error=error) for state in states]

    def throttle(self, share: int) -> None:
        """Admit requests up to one in `share` of the batch's places (at least one); 1 is as many as ever. Those that run go on."""
        self._max_running = max(1, self._max_num_seqs // share)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._states)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def waiting_by_cause(self) -> Mapping[str, int]:
        """How many waiting requests wait for what: `seat` (a place in the batch or KV), `load`, `room`."""
        causes = {"seat": 0, WaitsFor.LOAD.value: 0, WaitsFor.ROOM.value: 0}
        for state in self._waiting:
            causes["seat" if state.waits_for is None else state.waits_for.value] += 1
        return causes

    def adapters_of(self, status: RequestStatus) -> set[int]:
        """Ids of the adapters that running or waiting requests use."""
        states = self._running if status is RequestStatus.RUNNING else self._waiting
        return {state.request.adapter_id for state in states if state.request.adapter_id is not None}

    # --------------------------------------------------------------------------------------------------------- schedule

    def schedule(self) -> SchedulePlan:
        """Reserve memory for the next step and say what it runs; an empty plan when nothing can run."""
        assert self._uncommitted is None, "the previous plan is not committed"
        self._step_id += 1
        scheduled: list[ScheduledSequence] = []
        failed: list[TokenOutput] = []
        aged = self._make_room_for_aged()
        self._update_hold()
        budget = self._schedule_running(scheduled)
        self._schedule_waiting(aged, scheduled, failed, budget)
        self._prefetch_waiting()
        plan = SchedulePlan(self._step_id, tuple(scheduled), tuple(failed))
        if scheduled:
            self._uncommitted = plan
        return plan

    def _make_room_for_aged(self) -> list[RequestState]:
        """The requests that have waited too long for their adapters, as they arrived; running ones give way to the first that lacks room.

        Who got room and waits for its load stays among them: the next one would take the room away again, and so on for ever.
        """
        aged = [state for state in self._waiting if self._is_aged(state)]
        lacks_room = next((state for state in aged if state.waits_for is WaitsFor.ROOM), None)
        if lacks_room is not None:
            self._make_room(lacks_room)
        return aged

    def _update_hold(self) -> None:
        """For one request at a time, the first that lacks room for long; it lasts as long as the adapters in its way are in use."""
        lacking = next((state for state in self._waiting if self._lacks_room_for_long(state)), None)
        if lacking is None:
            self._hold = None
        elif (
            self._hold is None or self._hold.waiting is not lacking or not self._hold.adapter_ids <= self._turns.keys()
        ):
            assert self._residency is not None
            assert lacking.request.adapter_id is not None
            self._hold = _Hold(lacking, frozenset(self._residency.victims_for(lacking.request.adapter_id)))

    def _lacks_room_for_long(self, state: RequestState) -> bool:
        since = state.waits_since_step
        return (
            state.waits_for is WaitsFor.ROOM and since is not None and self._step_id - since >= self._aging_steps // 8
        )

    def _is_on_hold(self, state: RequestState) -> bool:
        hold = self._hold
        is_behind = hold is not None and state.arrival_index > hold.waiting.arrival_index
        return is_behind and hold is not None and state.request.adapter_id in hold.adapter_ids

    def _is_aged(self, state: RequestState) -> bool:
        since = state.waits_since_step
        return since is not None and self._step_id - since >= self._aging_steps

    def _make_room(self, aged: RequestState) -> None:
        assert self._residency is not None
        assert aged.request.adapter_id is not None
        victims = set(self._residency.victims_for(aged.request.adapter_id))
        if all(self._has_had_turn(self._turns[adapter_id]) for adapter_id in victims if adapter_id in self._turns):
            for state in [state for state in self._running if state.request.adapter_id in victims]:
                self._preempt(state)

    def _has_had_turn(self, turn: _Turn) -> bool:
        shortest = self._aging_steps // 4
        opener = turn.opener
        num_new_tokens = len(opener.token_ids) - opener.num_tokens_admitted
        is_served = opener.status is not RequestStatus.RUNNING or num_new_tokens >= max(1, shortest)
        return is_served and self._step_id - turn.since_step >= shortest

    def _schedule_running(self, scheduled: list[ScheduledSequence]) -> int:
        """Give every running request its next tokens; returns the tokens left. The newest give way when KV runs out."""
        budget = self._max_num_batched_tokens
        index = 0
        while index < len(self._running) and budget > 0:
            state = self._running[index]
            num_tokens = min(len(state.token_ids) - state.num_computed_tokens, budget)
            if not self._reserve_or_preempt(state, state.num_computed_tokens + num_tokens):
                break  # `state` was the newest and gave way itself
            scheduled.append(_scheduled(state, num_tokens))
            budget -= num_tokens
            index += 1
        return budget

    def _reserve_or_preempt(self, state: RequestState, num_tokens: int) -> bool:
        while not self._blocks.reserve(state.request.request_id, num_tokens):
            newest = self._running[-1]
            self._preempt(newest)
            if newest is state:
                return False
        return True

    def _schedule_waiting(
        self, aged: list[RequestState], scheduled: list[ScheduledSequence], failed: list[TokenOutput], budget: int
    ) -> None:
        blocked: dict[int, WaitsFor] = {}  # adapters found not ready in this step
        others = [state for state in self._waiting if not self._is_aged(state)] if aged else self._waiting.copy()
        for state in aged + others:
            if budget <= 0 or len(self._running) >= self._max_running:
                break
            if state.preempted_at_step == self._step_id or self._is_on_hold(state):
                continue  # it gave way in this very step, or its adapter is to leave
            try:
                is_ready = self._acquire_adapter(state, blocked)
            except AdapterError as error:
                failed.append(self._finish(state, FinishReason.ERROR, error=error))
                continue
            if is_ready:
                num_tokens = self._admit(state, budget, scheduled)
                if num_tokens == 0:
                    break  # out of KV: first come, first served
                budget -= num_tokens

    def _acquire_adapter(self, state: RequestState, blocked: dict[int, WaitsFor]) -> bool:
        adapter_id = state.request.adapter_id
        if adapter_id is None:
            return True
        assert self._residency is not None, "a request for an adapter in an engine without LoRA"
        if adapter_id not in blocked:
            result = self._residency.try_acquire(adapter_id)
            if result.waits_for is None:
                state.lora_slot = result.lora_slot
                return True
            blocked[adapter_id] = result.waits_for
        state.waits_for = blocked[adapter_id]
        if state.waits_since_step is None:
            state.waits_since_step = self._step_id
        return False

    def _admit(self, state: RequestState, budget: int, scheduled: list[ScheduledSequence]) -> int:
        """Move a request to the running ones with KV for all its tokens; returns how many it runs now, 0 when KV is short."""
        num_cached = self._blocks.start(state.request, state.token_ids)
        is_reserved = False
        try:
            is_reserved = self._blocks.reserve(state.request.request_id, len(state.token_ids))
        finally:
            if not is_reserved:
                self._blocks.free(state.request.request_id)
                self._release_adapter(state)
        if not is_reserved:
            return 0
        self._waiting.remove(state)
        self._running.append(state)
        state.status = RequestStatus.RUNNING
        self.num_admitted["nothing" if state.waits_for is None else state.waits_for.value] += 1
        state.waits_for = state.waits_since_step = None
        state.num_computed_tokens = num_cached
        state.num_tokens_admitted = len(state.token_ids)
        if state.num_cached_tokens is None:
            state.num_cached_tokens = num_cached
            self.num_prompt_tokens += state.num_prompt_tokens
        if state.request.adapter_id is not None:
            self._turns.setdefault(state.request.adapter_id, _Turn(self._step_id, state))
        num_tokens = min(len(state.token_ids) - num_cached, budget)
        scheduled.append(_scheduled(state, num_tokens))
        return num_tokens

    def _prefetch_waiting(self) -> None:
        if self._residency is not None:
            for state in self._waiting[:PREFETCH_DEPTH]:
                if state.request.adapter_id is not None and state.waits_for is None:
                    self._residency.prefetch(state.request.adapter_id)

    def _preempt(self, state: RequestState) -> None:
        """Back to waiting, at its place by arrival, to be computed again; KV and adapter reference are returned."""
        self._running.remove(state)
        self._blocks.free(state.request.request_id)
        self._release_adapter(state)
        state.status = RequestStatus.PREEMPTED
        state.num_computed_tokens = 0
        state.preempted_at_step = self._step_id
        state.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, state, key=lambda waiting: waiting.arrival_index)

    # ----------------------------------------------------------------------------------------------------------- commit

    def commit(self, plan: SchedulePlan, sampled: Mapping[str, SampledToken]) -> list[TokenOutput]:
        """Take over what a step computed: `sampled` has one token for each sequence with `is_sampled`, by request_id."""
        assert plan is self._uncommitted, "only the plan in flight can be committed"
        self._uncommitted = None
        outputs = []
        for sequence in plan.sequences:
            output = self._commit_sequence(sequence, sampled)
            if output is not None:
                outputs.append(output)
        return outputs

    def fail(self, plan: SchedulePlan, error: LoraplexError) -> list[TokenOutput]:
        """The step could not run: its requests end with the error, the others go on."""
        assert plan is self._uncommitted, "only the plan in flight can fail"
        self._uncommitted = None
        return [self._finish(sequence.state, FinishReason.ERROR, error=error) for sequence in plan.sequences]

    def _commit_sequence(self, sequence: ScheduledSequence, sampled: Mapping[str, SampledToken]) -> TokenOutput | None:
        state = sequence.state
        state.num_computed_tokens = sequence.start + sequence.num_tokens
        self._blocks.commit(state.request.request_id, state.token_ids, state.num_computed_tokens)
        if state.is_aborted:
            return self._finish(state, FinishReason.ABORT)
        if not sequence.is_sampled:
            return None
        token = sampled[state.request.request_id]
        if token.error is not None:
            return self._finish(state, FinishReason.ERROR, error=token.error)
        state.token_ids.append(token.token_id)
        self.num_generated_tokens += 1
        if state.sampling_state is not None:
            state.sampling_state.commit((token.token_id,))
        reason = self._finish_reason(state, token.token_id)
        return self._token_output(state, token) if reason is None else self._finish(state, reason, token)

    def _finish_reason(self, state: RequestState, token_id: int) -> FinishReason | None:
        params = state.request.sampling_params
        if state.num_output_tokens >= params.min_tokens:
            is_eos = not params.ignore_eos and token_id in state.request.eos_token_ids
            if is_eos or token_id in params.stop_token_ids:
                return FinishReason.STOP
        is_full = state.num_output_tokens >= state.request.max_tokens or len(state.token_ids) >= self._max_model_len
        return FinishReason.LENGTH if is_full else None

    @staticmethod
    def _token_output(
        state: RequestState,
        token: SampledToken | None = None,
        reason: FinishReason | None = None,
        error: LoraplexError | None = None,
    ) -> TokenOutput:
        has_prompt_logprobs = state.request.sampling_params.prompt_logprobs is not None
        is_first = token is not None and state.num_output_tokens == 1
        has_logprobs = token is not None and token.logprobs is not None
        stop_ids = state.request.sampling_params.stop_token_ids
        return TokenOutput(
            request_id=state.request.request_id,
            token_ids=() if token is None else (token.token_id,),
            finish_reason=reason,
            stop_token_id=token.token_id
            if reason is FinishReason.STOP and token and token.token_id in stop_ids
            else None,
            logprobs=(token.logprobs,) if has_logprobs and token and token.logprobs is not None else None,
            prompt_logprobs=tuple(state.prompt_logprobs) if is_first and has_prompt_logprobs else None,
            num_cached_tokens=state.num_cached_tokens or 0,
            error=None if error is None else error.to_payload(),
        )

    def _finish(
        self,
        state: RequestState,
        reason: FinishReason,
        token: SampledToken | None = None,
        error: LoraplexError | None = None,
    ) -> TokenOutput:
        if state.status is RequestStatus.RUNNING:
            self._running.remove(state)
            self._blocks.free(state.request.request_id)
            self._release_adapter(state)
        else:
            self._waiting.remove(state)
        state.status = RequestStatus.FINISHED
        self.num_finished[reason.value] += 1
        del self._states[state.request.request_id]
        return self._token_output(state, token, reason, error)

    def _release_adapter(self, state: RequestState) -> None:
        adapter_id, state.lora_slot = state.request.adapter_id, None
        if adapter_id is None:
            return
        assert self._residency is not None
        self._residency.release(adapter_id)
        if all(other.request.adapter_id != adapter_id or other is state for other in self._running):
            self._turns.pop(adapter_id, None)

    def _is_in_flight(self, state: RequestState) -> bool:
        plan = self._uncommitted
        return plan is not None and any(sequence.state is state for sequence in plan.sequences)

    def check_integrity(self) -> None:
        """Assert that every request is in exactly one queue and that only running ones hold an adapter."""
        assert len(self._waiting) + len(self._running) == len(self._states)
        for state in self._waiting:
            assert state.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert state.lora_slot is None
        for state in self._running:
            assert state.status is RequestStatus.RUNNING
            assert (state.lora_slot is None) == (state.request.adapter_id is None)
        assert set(self._turns) == self.adapters_of(RequestStatus.RUNNING)
        arrivals = [state.arrival_index for state in self._waiting]
        assert arrivals == sorted(arrivals), "the queue is out of order"


def _scheduled(state: RequestState, num_tokens: int) -> ScheduledSequence:
    start = state.num_computed_tokens
    return ScheduledSequence(state, start, num_tokens, is_sampled=start + num_tokens == len(state.token_ids))
