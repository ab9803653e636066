"""Targets of tenants to the first token and between tokens: hints for admission. Pure: the caller tells the time.

Time to first token: the queue gives a tenant credit while its next request is urgent (queue.py, shares.py).

Time between tokens: beside requests that have such a target and draw tokens, a step computes fewer tokens of prompts.
How many is found by the steps themselves, as in congestion control, between `least` and all of the step's tokens:

    a step took longer than the shortest target    half of what it computed of prompts
    it took less than CALM_SHARE of it             1/GROWTH of the step's tokens more, if it used what it might

`least` is 1/LEAST_SHARE of the step's tokens, so a prompt takes at most LEAST_SHARE times as many steps, and a request
that could run waits for no target. What is missed in spite of this is counted.

A step has a target of its own, STEP_TARGET_S, whatever it runs: a request that comes waits for the steps in flight, and
a token of a prompt costs more the more there are before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loraplex.engine.schedule_plan import RequestState, ScheduledSequence
from loraplex.engine.waiting.shares import TenantShare

LEAST_SHARE = 8
GROWTH = 16
CALM_SHARE = 0.8

STEP_TARGET_S = 0.25
"""Where a step takes so long, less of prompts in it costs hardly any throughput: weights were read long ago."""

ADMITTED_SHARE = 4
"""One in so many of a step's tokens of prompts."""

MAX_CANDIDATES = 4096
"""Of log probabilities of prompts, in a step: each takes microseconds of Python, here and in the server."""

MAX_SHARED_BLOCKS = 2**14
"""Of cached prompts, in a step: each takes a microsecond or two of Python, and more than that where its key is made."""


@dataclass(slots=True)
class StepBudget:
    """Tokens that a step may still run; of them, tokens of prompts; candidates of prompts' log probabilities; and
    cached blocks of prompts that begin. sharers: tenants whose prompts had such blocks."""

    num_tokens: int
    num_prompt_tokens: int
    num_candidates: int = MAX_CANDIDATES
    num_shared_blocks: int = MAX_SHARED_BLOCKS
    sharers: set[TenantShare] = field(default_factory=set)

    def may_share(self, tenant: TenantShare) -> bool:
        """Whether a request of the tenant may begin; of its cached blocks there may be more than are left. When none
        are left, each other tenant begins one request with cached blocks, and as many as it has without."""
        return self.num_shared_blocks > 0 or tenant not in self.sharers

    def take_shared(self, num_blocks: int, tenant: TenantShare) -> None:
        self.num_shared_blocks -= num_blocks
        if num_blocks:
            self.sharers.add(tenant)

    def shared_out(
        self, running: Sequence[RequestState], may_admit: Callable[[], bool]
    ) -> list[tuple[RequestState, int]]:
        """What each of the running requests, the oldest first, runs of it; those that run nothing are left out.

        Drawn tokens come first. Of prompts the one with the fewest tokens left comes first, and half is the oldest
        one's. While that takes more than a step, a quarter is for requests that may be admitted: so a long prompt holds
        up no short one, and is never held up itself.
        """
        drawn = [state for state in running if state.num_unscheduled_tokens == 1]
        prompts = [state for state in running if state.num_unscheduled_tokens > 1]
        found = [(state, num_tokens) for state in drawn if (num_tokens := self._give(state)) > 0]
        if not prompts:
            return found
        oldest, most = prompts[0], min(self.num_tokens, self.num_prompt_tokens)
        if oldest.num_unscheduled_tokens > most and may_admit():
            self.num_tokens -= most // ADMITTED_SHARE
            self.num_prompt_tokens -= most // ADMITTED_SHARE
        num_kept = min(oldest.num_unscheduled_tokens, most // 2)
        for state in sorted(prompts, key=lambda each: each.num_unscheduled_tokens):
            num_kept = 0 if state is oldest else num_kept
            if (num_tokens := self._give(state, num_kept)) > 0:
                found.append((state, num_tokens))
        return found

    def give_back(self, scheduled: list[ScheduledSequence]) -> None:
        """What was kept for others, and not used by them, goes to the prompts of the step."""
        for index, sequence in enumerate(scheduled):
            state = sequence.state
            num_left = state.num_unscheduled_tokens - sequence.num_tokens
            num_more = min(num_left, self.num_tokens, self.num_prompt_tokens, self._num_scored(state))
            if num_more > 0:
                scheduled[index] = ScheduledSequence.next_of(state, sequence.num_tokens + num_more)
                self.take(num_more, state)

    def _give(self, state: RequestState, num_kept: int = 0) -> int:
        """num_kept: tokens that are for another."""
        num_tokens = self.fit(state)
        if num_kept:
            num_tokens = max(0, min(num_tokens, self.num_tokens - num_kept, self.num_prompt_tokens - num_kept))
        self.take(num_tokens, state)
        return num_tokens

    def fit(self, state: RequestState) -> int:
        """How many of a request's next tokens; one alone is a token that was drawn."""
        num_tokens = state.num_unscheduled_tokens
        if num_tokens > 1:
            num_tokens = min(num_tokens, self.num_prompt_tokens, self._num_scored(state))
        return min(num_tokens, self.num_tokens)

    def _num_scored(self, state: RequestState) -> int:
        """How many tokens the candidates are for: one at least, where none is taken."""
        each = state.num_candidates_a_token
        if not each:
            return self.num_tokens
        return max(self.num_candidates // each, int(self.num_candidates == MAX_CANDIDATES))

    def take(self, num_tokens: int, state: RequestState) -> None:
        """Before the state knows that they are scheduled."""
        self.num_candidates -= num_tokens * state.num_candidates_a_token
        self.num_tokens -= num_tokens
        self.num_prompt_tokens -= num_tokens if num_tokens > 1 else 0


class PromptLimit:
    """Tokens of prompts in a step, as steps took longer or shorter than a target."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.num_tokens = self._most = max_num_batched_tokens
        self._least = max(1, max_num_batched_tokens // LEAST_SHARE)

    def see_step(self, num_prompt_tokens: int, seconds: float, target_s: float) -> None:
        if seconds > target_s:
            if num_prompt_tokens:
                self.num_tokens = max(self._least, min(self.num_tokens, num_prompt_tokens // 2))
        elif seconds < CALM_SHARE * target_s and num_prompt_tokens >= self.num_tokens:
            self.num_tokens = min(self._most, self.num_tokens + max(1, self._most // GROWTH))


class ServiceLevels:
    """See the module's docstring. outcomes: first tokens (`ttft`) and later ones (`itl`) of requests with a target, by
    whether they came in time: `ttft_met`, `ttft_missed`, `itl_met`, `itl_missed`."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._most = max_num_batched_tokens
        self._limit, self._limit_beside_targets = PromptLimit(self._most), PromptLimit(self._most)
        self._landed_s = 0.0
        self.outcomes: Counter[str] = Counter()

    def budget(self, running: Sequence[RequestState]) -> StepBudget:
        """For the next step of the running requests."""
        num_prompt_tokens = self._limit.num_tokens
        if any(_has_target(state) for state in running):
            num_prompt_tokens = min(num_prompt_tokens, self._limit_beside_targets.num_tokens)
        return StepBudget(self._most, num_prompt_tokens)

    def see_step(self, sequences: Sequence[ScheduledSequence], began_s: float, now_s: float) -> None:
        """A step is over that was scheduled at `began_s`. With look-ahead it ran when the one before it was over."""
        seconds, self._landed_s = now_s - max(began_s, self._landed_s), now_s
        num_prompt_tokens = sum(each.num_tokens for each in sequences if each.is_prefill)
        self._limit.see_step(num_prompt_tokens, seconds, STEP_TARGET_S)
        targets = [each.state.share.itl_target_s or 0.0 for each in sequences if _has_target(each.state)]
        if targets:
            self._limit_beside_targets.see_step(num_prompt_tokens, seconds, min(targets))

    def see_token(self, state: RequestState, now_s: float) -> None:
        """A request got its newest token."""
        is_first = state.num_output_tokens <= 1
        target_s = state.share.ttft_target_s if is_first else state.share.itl_target_s
        if target_s is not None:
            is_missed = now_s - state.seen_s > target_s
            self.outcomes[f"{'ttft' if is_first else 'itl'}_{'missed' if is_missed else 'met'}"] += 1
        state.seen_s = now_s

    def see_end(self, state: RequestState, now_s: float) -> None:
        """A request that ends without a token after its target missed it."""
        target_s = state.share.ttft_target_s
        if not state.num_output_tokens and target_s is not None and now_s - state.arrival_s > target_s:
            self.outcomes["ttft_missed"] += 1


def _has_target(state: RequestState) -> bool:
    """Whether it draws tokens, and its tenant has a target between them."""
    return state.share.itl_target_s is not None and state.num_output_tokens > 0
