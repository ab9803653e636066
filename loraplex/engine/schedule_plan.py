"""What a step is made of: requests inside the engine, which of their tokens run, and what came of it."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from loraplex.core import FinishReason, Request, TokenLogprobs, TokenOutput
from loraplex.engine.waiting.shares import TenantShare
from loraplex.errors import LoraplexError

PRIORITY_STEPS = 128
"""Steps of waiting that a level of priority is worth."""


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class OutputGrammar(Protocol):
    """Which tokens may come next: `structured.GrammarState`."""

    @property
    def is_complete(self) -> bool: ...
    def is_ready(self) -> bool: ...
    def cancel(self) -> None: ...
    def commit(self, token_id: int) -> None: ...


class Drafts(Protocol):
    """What a request may draw next, and how much of it is tried: `speculation.Drafting`."""

    def depth_at(self, num_tokens: int) -> int: ...
    def propose(self, token_ids: Sequence[int], depth: int) -> tuple[int, ...]: ...
    def see(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None: ...


class TokenCounts(Protocol):
    """What the sampler keeps of a request between steps; it is told each new token."""

    def commit(self, token_ids: Sequence[int]) -> None: ...


@dataclass(slots=True, eq=False)
class RequestState:
    """A request inside the engine: what it has, how far it is computed, what it waits for.

    token_ids: the prompt's, shared with its other completions until `append`. share: of its tenant. scheduled_s: Unix
    time when it began to run. num_computed_tokens: whose KV is written; num_scheduled_tokens: those and what the steps
    in flight compute. num_steps_in_flight: steps that run it and are not committed; num_pending_tokens: how many of
    them draw a token, not known yet. num_tokens_admitted: how many tokens it had when it last began to run.
    arrival_step, num_steps_run: counted by the scheduler. keeps_kv: it waits, and has its KV: it made room for another
    adapter. is_prompt_checked: its token ids are of the vocabulary of its adapter, or of the base's. mix_slots: of all
    adapters of a mix, the first of which is in `lora_slot`. grammar: of its output; None: any text. drafting: None
    where it has no drafts. rank: its place among waiting requests of its tenant (waiting/queue.py). arrival_s: when it
    came; seen_s: then, or when its newest token came.
    """

    request: Request
    arrival_index: int
    token_ids: tuple[int, ...] | list[int]
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_steps_in_flight: int = 0
    num_pending_tokens: int = 0
    num_cached_tokens: int | None = None
    scheduled_s: float = 0.0
    num_tokens_admitted: int = 0
    lora_slot: int | None = None
    mix_slots: tuple[int, ...] = ()
    arrival_step: int = 0
    num_steps_run: int = 0
    keeps_kv: bool = False
    num_preemptions: int = 0
    preempted_at_step: int = -1
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    sampling_state: TokenCounts | None = None
    is_prompt_checked: bool = True
    grammar: OutputGrammar | None = None
    drafting: Drafts | None = None
    share: TenantShare = field(default_factory=TenantShare)
    arrival_s: float = 0.0
    seen_s: float = field(init=False)
    rank: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.seen_s = self.arrival_s
        self.rank = self.arrival_step + self.request.claim.priority * PRIORITY_STEPS, self.arrival_index

    def arrive(self, arrival_index: int, arrival_step: int) -> None:
        """It comes now, and not before."""
        self.arrival_index, self.arrival_step = arrival_index, arrival_step
        self.__post_init__()

    def begin(self) -> None:
        """It runs for the first time, with what was computed of it cached."""
        self.num_cached_tokens, self.scheduled_s = self.num_computed_tokens, time.time()

    def append(self, token_id: int) -> None:
        if isinstance(self.token_ids, tuple):
            self.token_ids = list(self.token_ids)
        self.token_ids.append(token_id)
        if self.sampling_state is not None:
            self.sampling_state.commit((token_id,))
        if self.grammar is not None:
            self.grammar.commit(token_id)

    @property
    def starting_lag(self) -> int:
        """The step less its lag (AdapterTurns): it stays while the request waits, and the least is furthest behind."""
        return self.arrival_step + self.num_steps_run // 2

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_unscheduled_tokens(self) -> int:
        """Tokens that no step has run yet, one that is being drawn included."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_scheduled_tokens

    @property
    def num_candidates_a_token(self) -> int:
        """Of log probabilities of the prompt, until it has run."""
        num_logprobs = self.request.sampling_params.prompt_logprobs
        if num_logprobs is None or self.num_scheduled_tokens >= self.num_prompt_tokens:
            return 0
        return num_logprobs + 1

    @property
    def needs_commit(self) -> bool:
        """Whether its next step depends on more of the step in flight than the id of the token drawn there, which stays
        on the device.

        Penalties count that token on the host, and a grammar goes on with it there; a draft follows it; the prompt
        logprobs of a chunk are taken after those of the chunk before.
        """
        if not self.num_steps_in_flight:
            return False
        params = self.request.sampling_params
        is_prompt_scored = params.prompt_logprobs is not None and self.num_scheduled_tokens < self.num_prompt_tokens
        if is_prompt_scored or not self.num_pending_tokens:
            return is_prompt_scored
        is_drafting = self.drafting is not None and self.drafting.depth_at(len(self.token_ids) + 1) > 0
        return params.has_penalties or self.grammar is not None or is_drafting

    def is_last_token_pending(self, max_model_len: int) -> bool:
        """Whether the token that is being drawn ends it whatever it is: max_tokens, or the model's length."""
        return self.num_pending_tokens > 0 and self.is_full(self.num_pending_tokens, max_model_len)

    def is_full(self, num_more_tokens: int, max_model_len: int) -> bool:
        """Whether it ends for its length with so many tokens more."""
        return self.num_tokens_to_come(max_model_len) <= num_more_tokens

    def num_tokens_to_come(self, max_model_len: int) -> int:
        """How many it may still get. max_model_len: unless the request has its own."""
        limit = min(self.num_prompt_tokens + self.request.max_tokens, self.request.max_model_len or max_model_len)
        return limit - len(self.token_ids)

    def finish_reason(self, token_id: int, max_model_len: int) -> FinishReason | None:
        """What its newest token, `token_id`, ends it for; None when it goes on."""
        params = self.request.sampling_params
        if self.grammar is not None and self.grammar.is_complete:
            return FinishReason.STOP
        if self.num_output_tokens >= params.min_tokens:
            is_eos = not params.ignore_eos and token_id in self.request.eos_token_ids
            if is_eos or token_id in params.stop_token_ids:
                return FinishReason.STOP
        return FinishReason.LENGTH if self.is_full(0, max_model_len) else None


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Tokens [start, start + num_tokens) of one request run in this step; `is_sampled` when they reach its last token.

    With look-ahead the last of them may be drawn by the step before, and not be known yet. draft: the last of them are
    no tokens of the request, but what may follow it (speculation.py).
    """

    state: RequestState
    start: int
    num_tokens: int
    is_sampled: bool
    draft: tuple[int, ...] = ()

    @classmethod
    def next_of(cls, state: RequestState, num_tokens: int) -> Self:
        start = state.num_scheduled_tokens
        return cls(state, start, num_tokens, is_sampled=num_tokens == state.num_unscheduled_tokens)

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def is_prefill(self) -> bool:
        """Whether several of its tokens are the request's own."""
        return self.num_tokens - len(self.draft) > 1

    def with_draft(self, draft: tuple[int, ...]) -> Self:
        return replace(self, num_tokens=self.num_tokens + len(draft), draft=draft)

    def rows(self) -> tuple[Self, ...]:
        """One for each token that is drawn: the sequence without its draft, then behind the first token of that, and so
        on."""
        if not self.draft:
            return (self,)
        num_own = self.num_tokens - len(self.draft)
        lengths = range(len(self.draft) + 1)
        return tuple(replace(self, num_tokens=num_own + each, draft=self.draft[:each]) for each in lengths)


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """What one step runs. `failed` are requests that ended before they could run; made_s: when it was made."""

    step_id: int
    sequences: tuple[ScheduledSequence, ...]
    failed: tuple[TokenOutput, ...] = ()
    made_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)


def runs_on(request: Request, adapter_id: int) -> bool:
    """Whether it goes through the adapter, alone or in a mix."""
    return request.adapter_id == adapter_id or (bool(request.mix) and adapter_id in request.adapter_ids)


def check_places(
    waiting: Iterable[RequestState], running: Iterable[RequestState], leaving: Iterable[RequestState]
) -> None:
    """Assert that requests are as the scheduler's queue they are in says, and that only running ones hold an
    adapter."""
    for state in waiting:
        assert state.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        assert state.keeps_kv or not state.num_computed_tokens
        assert state.lora_slot is None
    for state in running:
        assert state.status is RequestStatus.RUNNING
        assert not state.keeps_kv
        assert (state.lora_slot is None) == (state.request.adapter_id is None)
        assert len(state.mix_slots) == len(state.request.mix)
    for state in leaving:
        assert state.status is RequestStatus.FINISHED
        assert state.num_steps_in_flight > 0, "its memory did not return"


def check_steps_in_flight(plans: Iterable[SchedulePlan], states: Iterable[RequestState]) -> None:
    """Assert that requests count what plans that are not committed run of them."""
    in_flight = [sequence for plan in plans for sequence in plan.sequences]
    for state in states:
        own = [sequence for sequence in in_flight if sequence.state is state]
        assert state.num_steps_in_flight == len(own)
        assert state.num_pending_tokens == sum(sequence.is_sampled for sequence in own)
        assert state.num_scheduled_tokens == (own[-1].end if own else state.num_computed_tokens)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What the model runner made of a sampled sequence; `error` when there is no token.

    has_odd_logits: the model gave NaN or no finite maximum, which speaks against the adapter or the base. is_late: the
    mask of its grammar was not there, so the next step runs the sequence's last token once more. more: what was drawn
    behind it, each token as the draft had the one before.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: LoraplexError | None = None
    has_odd_logits: bool = False
    is_late: bool = False
    more: tuple[SampledToken, ...] = ()

    @property
    def run(self) -> tuple[SampledToken, ...]:
        """With what was drawn behind it."""
        return (self, *self.more)


def token_output(
    state: RequestState,
    token: SampledToken | None = None,
    reason: FinishReason | None = None,
    error: LoraplexError | None = None,
) -> TokenOutput:
    """What a step added to a request: its newest token, why it ended, or both."""
    has_prompt_logprobs = state.request.sampling_params.prompt_logprobs is not None
    is_first = token is not None and state.num_output_tokens == 1
    has_logprobs = token is not None and token.logprobs is not None
    stop_ids = state.request.sampling_params.stop_token_ids
    return TokenOutput(
        request_id=state.request.request_id,
        token_ids=() if token is None else (token.token_id,),
        finish_reason=reason,
        stop_token_id=token.token_id if reason is FinishReason.STOP and token and token.token_id in stop_ids else None,
        logprobs=(token.logprobs,) if has_logprobs and token and token.logprobs is not None else None,
        prompt_logprobs=tuple(state.prompt_logprobs) if is_first and has_prompt_logprobs else None,
        num_cached_tokens=state.num_cached_tokens or 0,
        scheduled_s=state.scheduled_s,
        error=None if error is None else error.to_payload(),
    )
