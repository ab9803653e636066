"""Which requests run in the next step, and with how many tokens. Pure Python: it sees memory through two protocols.

A step is schedule -> run -> commit. `schedule` reserves KV and adapter references; `commit` is the only place where
tokens, phases and references change afterwards. Between the two nothing of a scheduled request may be taken away: one
that ends meanwhile ends for its client at once, and keeps its KV and its adapter until the last step that runs it is
committed.

The next step may be scheduled while one is in flight (look-ahead), unless `needs_commit`. A request whose next token is
being drawn there is then scheduled with that token pending, if what the host knows does not end it; if the token does,
what the next step draws for it is dropped.

Policy: running requests first; then waiting ones, of the tenant that was served least (waiting/shares.py), by priority
and arrival (waiting/queue.py): with one tenant and no priorities first come, first served. A request whose adapter is
not there yet lets others pass. Where adapters lack room they take turns (`AdapterTurns`) instead of thrashing: running
requests are paused for one that is further behind. With n adapters waiting before it, one gets in within aging_steps +
n * (aging_steps / 16 + the steps of a prompt) steps. Where all seats, or all KV, are taken, the tenant that was served
least takes some, by pauses, from a tenant that was served more and has more seats by weight. A paused request keeps its
KV as long as no other needs the memory; preemption for lack of KV is by recompute, which the prefix cache makes cheap.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing

from loraplex.core import (
    BlockAllocator,
    FinishReason,
    MixPart,
    Request,
    ResidencyView,
    TokenOutput,
    WaitsFor,
    has_content,
)
from loraplex.engine.schedule_plan import (
    OutputGrammar,
    RequestState,
    RequestStatus,
    SampledToken,
    ScheduledSequence,
    SchedulePlan,
    check_places,
    check_steps_in_flight,
    runs_on,
    token_output,
)
from loraplex.engine.speculation import Speculation
from loraplex.engine.waiting.adapter_turns import AdapterTurns, HeldAdapters
from loraplex.engine.waiting.compiling import CompilingRequests
from loraplex.engine.waiting.queue import SEAT, Admission, WaitingQueue, arrival_index
from loraplex.engine.waiting.seats import MixSeats, borrowers_of, goes_after, last_served
from loraplex.engine.waiting.service_levels import ServiceLevels, StepBudget
from loraplex.engine.waiting.shares import TenantShare, TenantShares
from loraplex.errors import AdapterError, InvalidRequestError, LoraplexError

MAX_STEPS_IN_FLIGHT = 2
"""Plans that are not committed: one, and the next while it is launched."""

PREFETCH_DEPTH = 16  # waiting requests whose adapters are looked ahead for while no seat is free


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
        num_speculative_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """num_speculative_tokens: of a draft, at most; 0: none. clock: seconds, for the targets of tenants alone."""
        self._blocks = blocks
        self._clock = clock
        self.levels = ServiceLevels(max_num_batched_tokens)
        self.speculation = Speculation(num_speculative_tokens)
        self._adapters = HeldAdapters(residency)
        self._max_num_seqs = max_num_seqs
        self._max_running = max_num_seqs
        self._max_model_len = max_model_len
        self._states: dict[str, RequestState] = {}
        self._shares = TenantShares()
        self._compiling = CompilingRequests()
        self._waiting = WaitingQueue()
        self._paused: list[RequestState] = []  # those that wait and keep their KV, in order of arrival
        self._running: list[RequestState] = []  # in order of admission
        self._lacks_kv: RequestState | None = None  # the first that was to be admitted, but for KV
        self._past_it: list[RequestState] = []  # of other tenants, that went past such a request
        self._turns = AdapterTurns(residency, aging_steps)
        self._mixes = MixSeats()
        self._uncommitted: deque[SchedulePlan] = deque()  # the oldest first
        self._leaving: dict[str, RequestState] = {}  # ended, but a step in flight runs them
        self._failed: list[TokenOutput] = []  # ends that the next plan tells
        self._num_arrivals = 0
        self.num_preemptions = self.num_pauses = self.num_prompt_tokens = self.num_generated_tokens = 0
        self.num_finished: Counter[str] = Counter()
        self.num_admitted: Counter[str] = Counter()

    # --------------------------------------------------------------------------------------------- requests come and go

    def add(self, request: Request, *, is_prompt_checked: bool = True, grammar: OutputGrammar | None = None) -> None:
        """is_prompt_checked: False where its adapter's vocabulary is not known before it is loaded. grammar: of its
        output; the request arrives in the queue when it is compiled, and no other one waits for that."""
        assert request.request_id not in self._states, f"request {request.request_id} is known already"
        state = RequestState(
            request,
            self._num_arrivals,
            request.prompt_token_ids,
            arrival_step=self._turns.step_id,
            arrival_s=self._clock(),
            share=self._shares.enter(request.claim),
        )
        state.is_prompt_checked, state.grammar = is_prompt_checked, grammar
        self.speculation.begin(state)
        state.num_cached_tokens = request.num_cached_tokens
        if request.output_token_ids:
            state.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self._num_arrivals += 1
        self._states[request.request_id] = state
        if grammar is None:
            self._waiting.arrive(state)
        else:
            self._compiling.add(state)
        self._adapters.prefetch((state,))

    def has(self, request_id: str) -> bool:
        """Whether a request of this name has not ended."""
        return request_id in self._states

    def abort(self, request_id: str) -> TokenOutput | None:
        """End a request; None for an unknown id."""
        state = self._states.get(request_id)
        return None if state is None else self._finish(state, FinishReason.ABORT)

    def withdraw(self, request_id: str) -> int | None:
        """Forget a request that `has`, since it goes on in another engine; its `Request.num_cached_tokens` there."""
        state = self._states[request_id]
        self._leave(state)
        return state.num_cached_tokens

    def abort_adapter(self, adapter_id: int) -> list[TokenOutput]:
        """End every request of an adapter."""
        return [self._finish(state, FinishReason.ABORT) for state in self._states_of(adapter_id)]

    def fail_adapter(self, adapter_id: int, error: LoraplexError) -> list[TokenOutput]:
        """End every request of an adapter with an error."""
        return [self._finish(state, FinishReason.ERROR, error=error) for state in self._states_of(adapter_id)]

    def _states_of(self, adapter_id: int) -> list[RequestState]:
        others = [s for s in (*self._running, *self._compiling) if runs_on(s.request, adapter_id)]
        return sorted([*others, *self._waiting.states_of(adapter_id)], key=arrival_index)

    def forget_kv(self, adapter_digest: str) -> None:
        """Drop what an adapter's content computed. Paused requests compute theirs again, running ones keep it."""
        self._blocks.drop_digest(adapter_digest)
        for state in list(self._paused):
            if has_content(state.request.adapter_digest, adapter_digest):
                self._drop_kv(state)

    def throttle(self, share: int) -> None:
        """Admit up to one in `share` of the batch's places, at least one; 1: as many as ever. Those that run go on."""
        self._max_running = max(1, self._max_num_seqs // share)

    @property
    def has_unfinished(self) -> bool:
        """Whether requests have not ended."""
        return bool(self._states)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._compiling)

    def waiting_by_cause(self) -> Mapping[str, int]:
        """How many waiting requests wait for what: `seat` (a place in the batch, KV, or a grammar), `load`, `room`."""
        causes = Counter(self._waiting.by_cause())
        causes[SEAT] += len(self._compiling)
        return causes

    def shares(self) -> list[TenantShare]:
        """What tenants with requests were served; they change with the next step."""
        return self._shares.active()

    def adapters_of(self, status: RequestStatus) -> set[int]:
        """Ids of the adapters that running or waiting requests use."""
        if status is RequestStatus.WAITING:
            compiling = (state.request.adapter_ids for state in self._compiling)
            return self._waiting.adapter_ids().union(*compiling)
        return {adapter_id for state in self._running for adapter_id in state.request.adapter_ids}

    # --------------------------------------------------------------------------------------------------------- schedule

    def needs_commit(self) -> bool:
        """Whether the step in flight has to be committed before the next is scheduled: the one place for this rule.

        So when the next step of a running request depends on more of it than a token's id; and when one has to be
        paused: a request in a step in flight keeps its place.
        """
        if not self._uncommitted:
            return False
        return (
            any(state.needs_commit for state in self._running)
            or not all(self._reserve(state, num_tokens) for state, num_tokens in self._next_tokens())
            or bool(self._turns.to_pause(self._waiting, self._running))
            or bool(self._giving())
        )

    def schedule(self) -> SchedulePlan:
        """Reserve memory for the next step and say what it runs; an empty plan when nothing can run.

        Not before a commit while `needs_commit`.
        """
        assert len(self._uncommitted) < MAX_STEPS_IN_FLIGHT, "the plan before the last is not committed"
        self._turns.step_id += 1
        now_s = self._clock()
        self._waiting.tell_time(now_s)
        scheduled: list[ScheduledSequence] = []
        self._take_compiled()
        paused = [] if self._uncommitted else self._turns.call(self._waiting, self._running)
        for state in paused:
            self._give_way(state, keeps_kv=True)
        for state, keeps_kv in () if self._uncommitted else self._giving().items():
            self._give_way(state, keeps_kv=keeps_kv)
        budget = self._schedule_running(scheduled)
        self._schedule_waiting(scheduled, budget)
        budget.give_back(scheduled)
        self.speculation.extend(scheduled, budget.num_tokens, self._blocks.reserve, self._max_model_len)
        called = self._turns.called(self._waiting) if paused else ()
        if (self._waiting.lacks_room and not self._running) or any(map(self._waiting.waits_for_room, called)):
            self._drop_newest_kv()  # it may be what an adapter lacks: both are in one arena
        self._adapters.prefetch(self._waiting.first(PREFETCH_DEPTH))
        plan = SchedulePlan(self._turns.step_id, tuple(scheduled), tuple(self._failed), now_s)
        self._failed.clear()
        if scheduled:
            self._uncommitted.append(plan)
        for sequence in scheduled:
            state = sequence.state
            state.num_scheduled_tokens = sequence.end
            state.num_steps_run += 1
            state.num_steps_in_flight += 1
            state.num_pending_tokens += sequence.is_sampled
        return plan

    def _take_compiled(self) -> None:
        """Requests whose grammar is there join the queue, as if they came now."""
        for state, error in self._compiling.take():
            if error is not None:
                self._failed.append(self._finish(state, FinishReason.ERROR, error=error))
                continue
            state.arrive(self._num_arrivals, self._turns.step_id)
            self._num_arrivals += 1
            self._waiting.arrive(state)

    def _seat_to_give(self) -> RequestState | None:
        """As `_seated_for` the request that comes next. None where the step has no tokens left for it."""
        if (first := self._next_ready()) is None or (seated := self._seated_for(first)) is None:
            return None
        budget = self.levels.budget(self._running)
        for state, num_tokens in self._next_tokens():
            budget.take(num_tokens, state)
        return seated if budget.fit(first) else None

    def _giving(self) -> dict[RequestState, bool]:
        """Running requests that give their seats to one that waits, and whether they keep their KV."""
        giving = dict.fromkeys(self._mixes.borrowers(self._running, self._max_running), True)
        if not giving and (seated := self._seat_to_give()) is not None:
            giving[seated] = True
        if (first := self._lacks_kv) is not None and first in self._waiting:
            giving |= dict.fromkeys(borrowers_of(first, self._past_it, self._blocks), False)
        return giving

    def _seated_for(self, first: RequestState) -> RequestState | None:
        return self._mixes.seated_for(first, self._running, self._max_running, lacks_kv=first is self._lacks_kv)

    def _next_ready(self) -> RequestState | None:
        return self._waiting.next_ready(lambda state: self._mixes.lets_pass(state, self._running, self._max_running))

    def _next_tokens(self) -> Iterable[tuple[RequestState, int]]:
        """The running requests that have something to run, and how many tokens the budget gives each."""
        running = [state for state in self._running if not state.is_last_token_pending(self._max_model_len)]
        return self.levels.budget(self._running).shared_out(running, self._may_admit)

    def _may_admit(self) -> bool:
        if (first := self._next_ready()) is None:
            return False
        return self._num_seats_taken < self._max_running or self._seated_for(first) is not None

    def _schedule_running(self, scheduled: list[ScheduledSequence]) -> StepBudget:
        """Give every running request its next tokens; returns the tokens left. Short of KV, it preempts the last."""
        budget = self.levels.budget(self._running)
        for state, num_tokens in list(self._next_tokens()):
            while state.status is RequestStatus.RUNNING and not self._reserve(state, num_tokens):
                in_step = [sequence.state for sequence in scheduled]
                later = [each for each in self._running if each not in in_step]
                self._give_way(last_served(later), keeps_kv=False)
            if state.status is not RequestStatus.RUNNING:
                continue  # it was preempted itself, or for one before it
            scheduled.append(ScheduledSequence.next_of(state, num_tokens))
            budget.take(num_tokens, state)
        return budget

    def _reserve(self, state: RequestState, num_tokens: int) -> bool:
        """KV for so many tokens more. Before a running request lacks it, those that are paused lose theirs, the newest
        first; for one that is to run, those that go after it, or all if others were paused for it or nothing runs."""
        request_id, num_tokens = state.request.request_id, state.num_scheduled_tokens + num_tokens
        is_first = state.status is RequestStatus.RUNNING or self._turns.is_called(state) or not self._running
        while not self._blocks.reserve(request_id, num_tokens):
            if not self._drop_newest_kv(besides=state, is_any=is_first):
                return False
        return True

    def _drop_newest_kv(self, besides: RequestState | None = None, is_any: bool = True) -> bool:
        """Of the newest paused request; `is_any` False: of those that go after `besides`; whether there was one."""
        for state in reversed(self._paused):
            if state is not besides and (is_any or besides is None or goes_after(state, besides)):
                self._drop_kv(state)
                return True
        return False

    def _schedule_waiting(self, scheduled: list[ScheduledSequence], budget: StepBudget) -> None:
        self._lacks_kv, self._past_it = None, [each for each in self._past_it if each.status is RequestStatus.RUNNING]
        self._mixes.begin_look()
        with closing(self._waiting.admission(self._turns.called(self._waiting), self._turns.step_id)) as admission:
            blocked = self._admit_from(admission, scheduled, budget)
        for state in self._waiting.loading():  # what has come since is seen whether or not a seat or a token is free
            try:
                if (waits_for := self._adapters.acquire(state, blocked)) is None:
                    self._adapters.release(state)
                self._waiting.found(state, waits_for)
            except (AdapterError, InvalidRequestError) as error:
                self._failed.append(self._finish(state, FinishReason.ERROR, error=error))

    def _admit_from(
        self, admission: Admission, scheduled: list[ScheduledSequence], budget: StepBudget
    ) -> dict[int | tuple[MixPart, ...], WaitsFor]:
        """Returns the adapters and mixes that were found not ready."""
        blocked: dict[int | tuple[MixPart, ...], WaitsFor] = {}
        num_seats = self._max_running - self._num_seats_taken - self._mixes.num_more
        while budget.num_tokens > 0 and num_seats > 0 and (state := admission.next()) is not None:
            if state.preempted_at_step == self._turns.step_id or state.request.request_id in self._leaving:
                admission.pass_over(state)  # preempted in this very step, or KV of its name is in use until a commit
                continue
            if not budget.may_share(state.share):
                admission.pass_tenant(state)
                continue
            num_taken = self._mixes.needed_for(state.request.mix)
            lacks_seats = num_taken > num_seats and bool(self._running) and state.request.mix not in blocked
            if lacks_seats and not self._waiting.is_missing(state):
                if self._seated_for(state) is not None:
                    break  # it gets them one after another
                self._mixes.pass_by(state)
                admission.pass_tenant(state)
                continue
            if not budget.fit(state):  # an adapter is used by what runs
                if not budget.num_prompt_tokens:
                    break
                admission.pass_some(state)  # log probabilities of its prompt lack room: others have none
                continue
            try:
                waits_for = self._adapters.acquire(state, blocked)
            except (AdapterError, InvalidRequestError) as error:
                self._failed.append(self._finish(state, FinishReason.ERROR, error=error))
                continue
            if waits_for is not None:
                admission.block(state, waits_for)
                continue
            if lacks_seats:
                self._adapters.release(state)
                self._waiting.found(state, None)  # it waits for seats now
                continue
            lacking = self._lacks_kv
            if self._admit(state, budget, scheduled):
                num_seats -= num_taken
                if state.share.num_running == 1 < len(self._running) and 4 * num_seats <= self._max_running:
                    admission.hurry()
                self._past_it += [] if lacking is None else [state]
            elif lacking is self._lacks_kv:
                break  # out of tokens of prompts, or of KV for a second one: first come, first served
            else:
                admission.pass_tenant(state)  # others use KV that is too little for it, and give it back
        return blocked

    @property
    def _num_seats_taken(self) -> int:
        """By requests that run in the next step: one whose last token is being drawn leaves its seat."""
        if not self._uncommitted:
            return len(self._running)
        return sum(not state.is_last_token_pending(self._max_model_len) for state in self._running)

    def _admit(self, state: RequestState, budget: StepBudget, scheduled: list[ScheduledSequence]) -> bool:
        """Move a request to the running ones with KV for all its tokens; False when that, or the budget, is short."""
        has_table, is_reserved, num_cached = state.keeps_kv, False, 0
        try:
            if not has_table:
                num_cached = self._blocks.start(state.request, state.token_ids)
                state.num_computed_tokens = state.num_scheduled_tokens = num_cached
                has_table = True
            num_tokens = budget.fit(state)
            is_reserved = num_tokens > 0 and self._reserve(state, state.num_unscheduled_tokens)
        finally:
            if not is_reserved:
                if has_table and not state.keeps_kv:
                    self._drop_kv(state)
                self._adapters.release(state)
        if not is_reserved:
            self._lacks_kv = self._lacks_kv or (state if num_tokens > 0 else None)
            return False
        waited_for = self._waiting.remove(state)
        self._running.append(state)
        self.num_admitted["nothing" if waited_for is None else waited_for.value] += 1
        if state.keeps_kv:
            self._paused.remove(state)
        state.status, state.keeps_kv = RequestStatus.RUNNING, False
        if not state.num_tokens_admitted:
            state.share.charge_prompt(state.num_unscheduled_tokens)
        state.num_tokens_admitted = len(state.token_ids)
        if state.num_cached_tokens is None:
            state.begin()
            self.num_prompt_tokens += state.num_prompt_tokens
        state.share.num_running += 1
        self._turns.begin(state)
        self._mixes.begin(state)
        budget.take(num_tokens, state)
        budget.take_shared(num_cached // self._blocks.block_size, state.share)
        scheduled.append(ScheduledSequence.next_of(state, num_tokens))
        return True

    def _give_way(self, state: RequestState, *, keeps_kv: bool) -> None:
        """Back to waiting, at its place by arrival, without its adapter: paused, or preempted, to be computed again."""
        assert not state.num_steps_in_flight, "a step in flight runs it"
        self._leave_running(state, keeps_kv=True)
        state.status, state.keeps_kv = RequestStatus.PREEMPTED, True
        state.preempted_at_step = self._turns.step_id
        self._waiting.put_back(state)
        insort(self._paused, state, key=arrival_index)
        self.num_pauses += keeps_kv
        if not keeps_kv:
            self._drop_kv(state)

    def _drop_kv(self, state: RequestState) -> None:
        """Of a request that waits; one that had run is computed again."""
        self._blocks.free(state.request.request_id)
        state.num_computed_tokens = state.num_scheduled_tokens = 0
        state.num_preemptions += state.keeps_kv
        self.num_preemptions += state.keeps_kv
        if state.keeps_kv:
            self._paused.remove(state)
        state.keeps_kv = False

    # ----------------------------------------------------------------------------------------------------------- commit

    def commit(self, plan: SchedulePlan, sampled: Mapping[str, SampledToken]) -> list[TokenOutput]:
        """Take over what a step computed: `sampled` has one token for each sequence with `is_sampled`, by request_id,
        and `more` behind a draft: as many steps would, up to one that ends the request.

        What it computed for a request that ended meanwhile is dropped.
        """
        outputs, now_s = [], self._clock()
        self.levels.see_step(plan.sequences, plan.made_s, now_s)
        for sequence in self._land(plan):
            token = sampled[sequence.state.request.request_id] if sequence.is_sampled else None
            if token is not None and sequence.draft:
                outputs += self._commit_run(sequence, token, now_s)
            elif (output := self._commit_one(sequence, token, now_s)) is not None:
                outputs.append(output)
        return outputs

    def fail(self, plan: SchedulePlan, error: LoraplexError) -> list[TokenOutput]:
        """The step could not run: its requests end with the error, the others go on."""
        return [self._finish(sequence.state, FinishReason.ERROR, error=error) for sequence in self._land(plan)]

    def _land(self, plan: SchedulePlan) -> list[ScheduledSequence]:
        """The oldest step in flight is over; returns what it ran of requests that have not ended. The others leave."""
        oldest = self._uncommitted.popleft()
        assert plan is oldest, "only the oldest plan in flight can be committed, or fail"
        for sequence in plan.sequences:
            state = sequence.state
            state.num_steps_in_flight -= 1
            state.num_pending_tokens -= sequence.is_sampled
            if state.status is RequestStatus.FINISHED and not state.num_steps_in_flight:
                del self._leaving[state.request.request_id]
                self._return_memory(state)
        return [sequence for sequence in plan.sequences if sequence.state.status is RequestStatus.RUNNING]

    def _commit_run(self, sequence: ScheduledSequence, first: SampledToken, now_s: float) -> list[TokenOutput]:
        state, outputs = sequence.state, list[TokenOutput]()
        for row, token in zip(sequence.rows(), first.run, strict=False):  # rows whose draft did not hold are dropped
            outputs += filter(None, [self._commit_one(row, token, now_s)])
            if state.status is RequestStatus.FINISHED:
                break
        state.num_scheduled_tokens = state.num_computed_tokens
        self.speculation.see(sequence, sum(len(output.token_ids) for output in outputs))
        return outputs

    def _commit_one(self, sequence: ScheduledSequence, token: SampledToken | None, now_s: float) -> TokenOutput | None:
        state = sequence.state
        state.num_computed_tokens = sequence.end
        if token is not None and token.is_late:
            state.num_computed_tokens = state.num_scheduled_tokens = sequence.end - 1
        self._blocks.commit(state.request.request_id, state.token_ids, state.num_computed_tokens)
        if token is None or token.is_late:
            return None
        if token.has_odd_logits:
            self._blocks.withdraw(state.request.request_id)
        if token.error is not None:
            return self._finish(state, FinishReason.ERROR, error=token.error)
        state.append(token.token_id)
        self.num_generated_tokens += 1
        state.share.charge_output()
        self.levels.see_token(state, now_s)
        reason = state.finish_reason(token.token_id, self._max_model_len)
        return token_output(state, token) if reason is None else self._finish(state, reason, token)

    def _finish(
        self,
        state: RequestState,
        reason: FinishReason,
        token: SampledToken | None = None,
        error: LoraplexError | None = None,
    ) -> TokenOutput:
        self._leave(state)
        self.levels.see_end(state, self._clock())
        self.num_finished[reason.value] += 1
        return token_output(state, token, reason, error)

    def _leave(self, state: RequestState) -> None:
        if state.status is RequestStatus.RUNNING:
            self._leave_running(state)
        elif not self._compiling.discard(state):
            self._waiting.remove(state)
            if state.keeps_kv:
                self._paused.remove(state)
                self._blocks.free(state.request.request_id)
        state.status = RequestStatus.FINISHED
        state.share.num_requests -= 1
        del self._states[state.request.request_id]

    def _leave_running(self, state: RequestState, *, keeps_kv: bool = False) -> None:
        """Adapter reference and KV, unless it keeps that, return now, or when the last step that runs it commits."""
        self._running.remove(state)
        state.share.num_running -= 1
        self._mixes.end(state.request.mix)
        for adapter_id in state.request.adapter_ids:
            if not any(runs_on(other.request, adapter_id) for other in self._running):
                self._turns.end(adapter_id)
        if state.num_steps_in_flight:
            self._leaving[state.request.request_id] = state
        else:
            (self._adapters.release if keeps_kv else self._return_memory)(state)

    def _return_memory(self, state: RequestState) -> None:
        self._blocks.free(state.request.request_id)
        self._adapters.release(state)

    def check_integrity(self) -> None:
        """Assert that every request is in exactly one queue and that only running ones hold an adapter."""
        assert len(self._waiting) + len(self._running) + len(self._compiling) == len(self._states)
        check_places(self._waiting, self._running, self._leaving.values())
        check_steps_in_flight(self._uncommitted, [*self._running, *self._leaving.values(), *self._waiting])
        assert self._turns.adapter_ids == self.adapters_of(RequestStatus.RUNNING)
        self._mixes.check_integrity(self._running)
        assert self._paused == [state for state in self._waiting if state.keeps_kv]
        self._waiting.check_integrity()
        states, active = self._states.values(), self._shares.active()
        assert Counter(state.share for state in states) == {share: share.num_requests for share in active}
        assert sum(share.num_running for share in active) == len(self._running)
