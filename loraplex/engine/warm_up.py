"""Steps before the first request, on a GPU: what compiles, loads or allocates at first use has done so.

Triton compiles a kernel for seconds at its first launch (and keeps it on disk for the next start); cuBLAS and torch
load theirs then. The steps are those that serving will have: prompts of all sizes, alone and beside a decode, many
short ones, a few tokens behind a long context, decodes; each without adapters, and through lora_slots, which are empty.
Their KV blocks hold anything, and no request gets their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loraplex.core import BlockAllocator, Request, SamplingParams
from loraplex.engine.model_runner import ModelRunner
from loraplex.engine.schedule_plan import RequestState, ScheduledSequence, SchedulePlan

FEW_TOKENS = 16
SHORT_PROMPT = 33
"""Tokens: more than LoRA's small tiles take."""

DRAWS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.0, logprobs=1, presence_penalty=0.5),
)
"""One of each kind that the sampler has."""

Progress = Callable[[int, int], None]
"""(steps done, steps in all)"""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A step: tokens [start, end) of each sequence. Through adapters, sequence i has lora_slot i of `num_slots`; 0:
    only the base."""

    ranges: tuple[tuple[int, int], ...]
    num_slots: int = 0


def rehearsals(max_tokens: int, max_num_seqs: int, max_context: int, num_slots: int) -> Iterator[Rehearsal]:
    """The steps for an engine of at most `max_tokens` in a step and `max_context` in a sequence; num_slots: of
    adapters, 0 without LoRA."""
    few, short = min(FEW_TOKENS, max_tokens - 1, max_context), min(SHORT_PROMPT, max_context)
    for slots in (0, num_slots) if num_slots else (0,):
        for num_seqs in _powers_of_two(min(max_num_seqs, max_tokens)):
            yield Rehearsal(((1, 2),) * num_seqs, slots)
        for num_tokens in _powers_of_two(max_tokens):
            yield Rehearsal(_prompts(num_tokens, max_context), slots)
        yield Rehearsal(((0, short),) * min(max_num_seqs, max_tokens // short), slots)
        if few > 0:
            yield Rehearsal(((1, 2), (0, few)), slots)
            yield Rehearsal(((max_context - few, max_context),), slots)


def warm_up(
    runner: ModelRunner,
    blocks: BlockAllocator,
    steps: list[Rehearsal],
    on_progress: Progress | None = None,
) -> None:
    """Run the steps; those for which the KV cache is too small are left out."""
    for num_done, step in enumerate(steps, 1):
        _run(runner, blocks, step)
        if on_progress is not None:
            on_progress(num_done, len(steps))
    runner.wait()


def _run(runner: ModelRunner, blocks: BlockAllocator, step: Rehearsal) -> None:
    begun: list[str] = []
    sequences: list[ScheduledSequence] = []
    try:
        for index, (start, end) in enumerate(step.ranges):
            request_id, prompt = f"warm-up-{index}", (0,) * end
            request = Request(request_id, prompt, DRAWS[index % len(DRAWS)], 1, 0, cache_salt=request_id)
            blocks.start(request, prompt)
            begun.append(request_id)
            if not blocks.reserve(request_id, end):
                return
            slot = index % step.num_slots if step.num_slots else None
            state = RequestState(request, -1, list(prompt), lora_slot=slot)
            sequences.append(ScheduledSequence(state, start, end - start, is_sampled=True))
        if sequences:
            runner.rehearse(SchedulePlan(-1, tuple(sequences)))
    finally:
        for request_id in begun:
            blocks.free(request_id)


def _powers_of_two(most: int) -> Iterator[int]:
    """1, 2, 4, ... and `most` itself."""
    size = 1
    while size < most:
        yield size
        size *= 2
    yield most


def _prompts(num_tokens: int, longest: int) -> tuple[tuple[int, int], ...]:
    """Sequences of `num_tokens` together, none longer than `longest`."""
    whole, rest = divmod(num_tokens, longest)
    return ((0, longest),) * whole + (((0, rest),) if rest else ())
