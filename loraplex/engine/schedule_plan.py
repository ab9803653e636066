"""What a step is made of: requests inside the engine, which of their tokens run, and what came of it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from loraplex.core import Request, TokenLogprobs, TokenOutput, WaitsFor
from loraplex.errors import LoraplexError


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class TokenCounts(Protocol):
    """What the sampler keeps of a request between steps; it is told each new token."""

    def commit(self, token_ids: Sequence[int]) -> None: ...


@dataclass(slots=True, eq=False)
class RequestState:
    """A request inside the engine: what it has, how far it is computed, what it waits for.

    num_tokens_admitted: how many tokens it had when it last began to run.
    """

    request: Request
    arrival_index: int
    token_ids: list[int]
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_tokens_admitted: int = 0
    lora_slot: int | None = None
    waits_for: WaitsFor | None = None
    waits_since_step: int | None = None
    is_aborted: bool = False
    num_preemptions: int = 0
    preempted_at_step: int = -1
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    sampling_state: TokenCounts | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Tokens [start, start + num_tokens) of one request run in this step; `is_sampled` when they reach its last token."""

    state: RequestState
    start: int
    num_tokens: int
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """What one step runs. `failed` are requests that ended before they could run."""

    step_id: int
    sequences: tuple[ScheduledSequence, ...]
    failed: tuple[TokenOutput, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What the model runner made of a sampled sequence; `error` when its logits cannot be used."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: LoraplexError | None = None
