"""A schedule plan becomes tensors: the rows of a step in adapter order, positions, KV addresses, LoRA segments.

Rows are ordered by lora_slot, base rows first, so that the rows of one adapter lie together and all layers share one
`LoraPlan`; where there are mixes of adapters, by all lora_slots with their weights. Sequences stay whole: of an aLoRA
whose invocation begins in a chunk, the rows before are base rows between those of its slot. Lengths are per sequence in
Python and per token in numpy.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.core import BASE_SLOT, BlockAllocator
from loraplex.engine.schedule_plan import RequestState, ScheduledSequence, SchedulePlan
from loraplex.engine.step_buffers import StepArrays, StepBuffers, StepShape, StepTensors
from loraplex.errors import InvalidRequestError
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.step_batch import AttentionPlan, StepBatch

DEBUG_VARIABLE = "LORAPLEX_DEBUG"
"""Environment variable that makes an engine check each step's mapping against the slot table, for tests."""


@dataclass(frozen=True, eq=False)
class LoRAMapping:
    """Which adapter each token and each prompt of a batch goes through, as lora_slot; -1 is the base model.

    index_mapping: int32 [num_tokens]; prompt_mapping: int32 [num_prompts]; is_prefill: some prompt has more than one
    token here.
    """

    index_mapping: NDArray[np.int32]
    prompt_mapping: NDArray[np.int32]
    is_prefill: bool = False

    @classmethod
    def from_prompts(cls, lora_slots: Sequence[int], query_lens: Sequence[int]) -> LoRAMapping:
        """Prompt i has `query_lens[i]` tokens, one after the other. Raises InvalidRequestError when lengths differ."""
        if len(lora_slots) != len(query_lens):
            raise InvalidRequestError(f"{len(lora_slots)} lora slots for {len(query_lens)} prompts")
        prompts = np.asarray(lora_slots, dtype=np.int32)
        return cls(np.repeat(prompts, query_lens), prompts, is_prefill=max(query_lens, default=0) > 1)

    def validate(
        self, num_tokens: int, num_prompts: int, num_slots: int, is_resident: Callable[[int], bool] | None = None
    ) -> None:
        """Raises InvalidRequestError unless the lengths fit, -1 <= slot < num_slots, and each slot holds an adapter."""
        if len(self.index_mapping) != num_tokens:
            raise InvalidRequestError(f"index_mapping has {len(self.index_mapping)} entries for {num_tokens} tokens")
        if len(self.prompt_mapping) != num_prompts:
            raise InvalidRequestError(
                f"prompt_mapping has {len(self.prompt_mapping)} entries for {num_prompts} prompts"
            )
        used = set(np.unique(np.concatenate([self.index_mapping, self.prompt_mapping])).tolist())
        wrong = sorted(slot for slot in used if not BASE_SLOT <= slot < num_slots)
        if wrong:
            raise InvalidRequestError(f"lora slot {wrong[0]} is not in -1..{num_slots - 1}")
        absent = sorted(slot for slot in used - {BASE_SLOT} if is_resident is not None and not is_resident(slot))
        if absent:
            raise InvalidRequestError(f"lora slot {absent[0]} holds no adapter")

    def to_segments(self) -> list[LoraSegment]:
        """Maximal runs of tokens of one adapter; base rows are in none."""
        if len(self.index_mapping) == 0:
            return []
        borders = np.flatnonzero(np.diff(self.index_mapping)) + 1
        starts = np.concatenate([[0], borders]).tolist()
        ends = np.concatenate([borders, [len(self.index_mapping)]]).tolist()
        slots = self.index_mapping[starts].tolist()
        runs = zip(starts, ends, slots, strict=True)
        return [LoraSegment(start, end, slot) for start, end, slot in runs if slot != BASE_SLOT]


@dataclass(frozen=True, slots=True)
class PromptLogitRows:
    """Logits rows [start, start + len(next_ids)) of a step are for prompt positions, to predict `next_ids`."""

    state: RequestState
    start: int
    next_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """A step as tensors. `sampled[i]` is drawn from logits row `sampled_rows[i]`; rows behind all of them are padding.
    Of a sequence with a draft, `sampled` has its `rows`.

    pending: (row of batch.token_ids, request) of tokens that the step in flight draws; they are 0 until they are taken
    from there. padded_size: rows of a decode step that a captured graph may run, padding counted; None for any other
    step. is_long: as `BatchBuilder.is_long` of its plan.
    """

    batch: StepBatch
    sampled: tuple[ScheduledSequence, ...]
    sampled_rows: tuple[int, ...]
    prompt_rows: tuple[PromptLogitRows, ...]
    pending: tuple[tuple[int, RequestState], ...] = ()
    padded_size: int | None = None
    is_long: bool = False


Route = tuple[tuple[int, float], ...]
"""The adapters that a row goes through, in their order: (lora_slot, weight) of each; () is the base model."""


def route_of(state: RequestState) -> Route:
    """From `Request.adapter_from` on."""
    if state.mix_slots:
        weights = (part.weight for part in state.request.mix)
        return tuple(zip(state.mix_slots, weights, strict=True))
    return () if state.lora_slot is None else ((state.lora_slot, 1.0),)


def logit_segments(states: Sequence[RequestState], num_rows: int = 1) -> list[LoraSegment]:
    """Of rows of logits, `num_rows` a request."""
    return _segments_of(map(route_of, states), itertools.repeat(num_rows, len(states)))


def _segments_of(routes: Iterable[Route], lens: Iterable[int]) -> list[LoraSegment]:
    """For each run of rows of one route, a segment for each of its adapters. lens: rows of each."""
    segments: list[LoraSegment] = []
    start = 0
    for route, run in itertools.groupby(zip(routes, lens, strict=True), key=lambda row: row[0]):
        end = start + sum(num for _, num in run)
        segments += [LoraSegment(start, end, lora_slot, weight) for lora_slot, weight in route]
        start = end
    return segments


def has_mixes(sequences: Sequence[ScheduledSequence]) -> bool:
    """Whether rows of some sequence go through several adapters."""
    return any(sequence.state.mix_slots for sequence in sequences)


def goes_through_base(sequence: ScheduledSequence) -> bool:
    """Whether all its rows here lie before the invocation of an aLoRA."""
    return sequence.end <= sequence.state.request.adapter_from


def sole_content(plan: SchedulePlan) -> str:
    """The digest of the adapter that all rows of a plan go through, with weight 1 and no other one; "": none."""
    digest = plan.sequences[0].state.request.adapter_digest
    for sequence in plan.sequences:
        request = sequence.state.request
        if request.adapter_digest != digest or request.mix or sequence.start < request.adapter_from:
            return ""
    return digest


def _last_route(sequence: ScheduledSequence) -> Route:
    return () if goes_through_base(sequence) else route_of(sequence.state)


def _runs_of(sequence: ScheduledSequence) -> Iterator[tuple[Route, int]]:
    """(route, number of rows): at most two, before the invocation of an aLoRA and from there on."""
    num_before = min(max(sequence.state.request.adapter_from - sequence.start, 0), sequence.num_tokens)
    if num_before:
        yield (), num_before
    if num_before < sequence.num_tokens:
        yield route_of(sequence.state), sequence.num_tokens - num_before


class BatchBuilder:
    """Builds the tensors of one step after the other, in buffers that are reused: only the last step's are valid.

    A decode step may be padded to a number of rows: see `build`. `table_width`: KV blocks of the longest request, but
    for those through adapters with a longer context: theirs are up to `long_width`. `table`: where the adapters are;
    with LORAPLEX_DEBUG a step that names a slot without one raises InvalidRequestError. base_rope_factor: as
    `core.LongContexts` has it; None: padded steps have no rope_factors.
    """

    def __init__(
        self,
        blocks: BlockAllocator,
        buffers: StepBuffers,
        lora_plan: LoraPlan,
        table_width: int,
        table: SlotTable | None = None,
        long_width: int = 0,
        base_rope_factor: float | None = None,
    ) -> None:
        self._blocks = blocks
        self._buffers = buffers
        self._lora_plan = lora_plan
        self._table_width = table_width
        self._long_width = max(table_width, long_width)
        self._table = table
        self._base_rope_factor = base_rope_factor
        self._checked_table = table if os.environ.get(DEBUG_VARIABLE) else None

    @property
    def block_size(self) -> int:
        return self._blocks.block_size

    @property
    def has_long_widths(self) -> bool:
        return self._long_width > self._table_width

    @property
    def pads_rope_factors(self) -> bool:
        """Whether padded steps through adapters have each row's factor."""
        return self._base_rope_factor is not None

    def is_long(self, plan: SchedulePlan) -> bool:
        """Whether a context of the plan is longer than any of the base model's."""
        return max(each.end for each in plan.sequences) > self._table_width * self.block_size

    def build(self, plan: SchedulePlan, padded_size: int | None = None) -> BuiltStep:
        """With `padded_size` (only where each sequence is sampled and has one token), rows of padding follow.

        A row of padding is a sequence of its own with one token 0 at position 0, no context, and a KV slot of -1:
        nothing is written for it. Its logits mean nothing.
        """
        has_runs = any(each.start < each.state.request.adapter_from for each in plan.sequences)
        has_routes = has_runs or has_mixes(plan.sequences)
        row_order: Callable[[ScheduledSequence], Any] = _last_route if has_routes else _slot_of
        sequences = sorted(plan.sequences, key=row_order)
        starts = np.array([sequence.start for sequence in sequences], dtype=np.int64)
        query_lens = np.array([sequence.num_tokens for sequence in sequences], dtype=np.int64)
        context_lens = starts + query_lens
        num_blocks = -(-context_lens // self._blocks.block_size)
        sampled, sampled_rows, prompt_rows, logits_rows = _logits_rows(sequences, query_lens.tolist())
        num_tokens = int(query_lens.sum())
        if padded_size is None:
            shape = StepShape(num_tokens, len(sequences), int(num_blocks.max()), len(logits_rows))
        else:
            assert num_tokens == len(sequences) == len(sampled), "only decode steps are padded"
            assert not prompt_rows, "a decode step has no logits of prompts"
            shape = self.padded_shape(padded_size, self.is_long(plan))
        arrays = self._buffers.begin(shape)
        _write_padding(arrays, num_tokens, len(sequences), len(logits_rows))
        arrays.token_ids[:num_tokens] = np.concatenate([_tokens_of(sequence) for sequence in sequences])
        arrays.logits_indices[: len(logits_rows)] = logits_rows
        self._write_tables(arrays, sequences, context_lens, num_blocks)
        self._write_positions(arrays, starts, query_lens)
        padding = shape.num_sequences - len(sequences)
        write = self._write_routes if has_routes else self._write_lora_plan
        lora = write(sequences, query_lens, shape.num_tokens, is_rehearsal=plan.step_id < 0)
        has_factors = lora is not None and self._write_rope_factors(arrays, sequences, query_lens, padded_size)
        batch = self._batch(
            self._buffers.upload(shape, lora),
            lora,
            (*query_lens.tolist(), *(1,) * padding),
            (*context_lens.tolist(), *(0,) * padding),
            has_factors,
        )
        pending, is_long = _pending(sequences), self.is_long(plan)
        return BuiltStep(batch, sampled, sampled_rows, prompt_rows, pending, padded_size, is_long)

    def blank(self, size: int, has_adapters: bool, is_long: bool = False) -> StepBatch:
        """A decode step of `size` rows of padding, for a capture; its tensors are those of later steps of that size.

        It has no lengths on the host, which would be those of the capture in every replay: a kernel that reads them
        fails here.
        """
        shape = self.padded_shape(size, is_long)
        arrays = self._buffers.begin(shape)
        _write_padding(arrays, 0, 0, 0)
        self._lora_plan.write((), size, is_decode=True)
        tensors = self._buffers.upload(shape, self._lora_plan)
        lora = _as_captured(self._lora_plan, size) if has_adapters else None
        return self._batch(tensors, lora, (1,) * size, (), has_adapters and self.pads_rope_factors)

    def padded_shape(self, size: int, is_long: bool = False) -> StepShape:
        """Of a decode step that is padded to `size` rows. is_long: as of the plan."""
        return StepShape(size, size, self._long_width if is_long else self._table_width, size)

    def _batch(
        self,
        tensors: StepTensors,
        lora: LoraPlan | None,
        query_lens: tuple[int, ...],
        context_lens: tuple[int, ...],
        has_rope_factors: bool,
    ) -> StepBatch:
        attention = AttentionPlan(
            q_indptr=tensors.q_indptr,
            context_lens=tensors.context_lens,
            block_tables=tensors.block_tables,
            kv_slot_mapping=tensors.kv_slot_mapping,
            query_lens=query_lens,
            context_lens_host=context_lens,
            block_size=self._blocks.block_size,
        )
        factors = tensors.rope_factors if has_rope_factors else None
        return StepBatch(
            tensors.token_ids, tensors.positions, attention, lora, tensors.logits_indices, rope_factors=factors
        )

    def _write_tables(
        self,
        arrays: StepArrays,
        sequences: Sequence[ScheduledSequence],
        context_lens: NDArray[np.int64],
        num_blocks: NDArray[np.int64],
    ) -> None:
        arrays.context_lens[: len(sequences)] = context_lens
        for row, (sequence, count) in enumerate(zip(sequences, num_blocks.tolist(), strict=True)):
            arrays.block_tables[row, :count] = self._blocks.block_table(sequence.state.request.request_id)[:count]

    def _write_positions(self, arrays: StepArrays, starts: NDArray[np.int64], query_lens: NDArray[np.int64]) -> None:
        """Positions, and where in the KV cache they are; the block tables are written."""
        block_size = self._blocks.block_size
        q_indptr = np.concatenate([[0], np.cumsum(query_lens)])
        rows = np.repeat(np.arange(len(starts)), query_lens)
        positions = np.arange(q_indptr[-1]) - np.repeat(q_indptr[:-1] - starts, query_lens)
        blocks = arrays.block_tables[rows, positions // block_size].astype(np.int64)
        arrays.q_indptr[: len(q_indptr)] = q_indptr
        arrays.positions[: len(positions)] = positions
        arrays.kv_slot_mapping[: len(positions)] = blocks * block_size + positions % block_size

    def _write_rope_factors(
        self,
        arrays: StepArrays,
        sequences: Sequence[ScheduledSequence],
        query_lens: NDArray[np.int64],
        padded_size: int | None,
    ) -> bool:
        """Of each token, by its adapter (all of a mix have one); whether they are needed: always where a graph may read
        them."""
        known: Mapping[int, float] = {} if self._table is None else self._table.rope_factors
        slots = [_slot_of(sequence) for sequence in sequences]
        if not (known.keys() & set(slots) or (padded_size is not None and self.pads_rope_factors)):
            return False
        base = self._base_rope_factor or 1.0
        factors = np.array([known.get(slot, base) for slot in slots], np.float32)
        arrays.rope_factors[: int(query_lens.sum())] = np.repeat(factors, query_lens)
        return True

    def _write_lora_plan(
        self, sequences: Sequence[ScheduledSequence], query_lens: NDArray[np.int64], num_tokens: int, is_rehearsal: bool
    ) -> LoraPlan | None:
        """A rehearsal (warm_up.py) goes through slots that are empty."""
        lora_slots = [_slot_of(sequence) for sequence in sequences]
        if lora_slots[-1] == BASE_SLOT:  # ordered by slot: all of them are base rows
            return None
        mapping = LoRAMapping.from_prompts(lora_slots, query_lens.tolist())
        self._check(mapping, query_lens, is_rehearsal)
        self._lora_plan.write(mapping.to_segments(), num_tokens, is_decode=not mapping.is_prefill)
        return self._lora_plan

    def _write_routes(
        self, sequences: Sequence[ScheduledSequence], query_lens: NDArray[np.int64], num_tokens: int, is_rehearsal: bool
    ) -> LoraPlan | None:
        """Rows of equal routes lie together, but for those before an invocation."""
        runs = [run for sequence in sequences for run in _runs_of(sequence)]
        routes, lens = [route for route, _ in runs], [length for _, length in runs]
        for members in itertools.zip_longest(*routes, fillvalue=(BASE_SLOT, 0.0)):
            self._check(LoRAMapping.from_prompts([slot for slot, _ in members], lens), lens, is_rehearsal)
        segments = _segments_of(routes, lens)
        if not segments:
            return None
        self._lora_plan.write(segments, num_tokens, is_decode=int(query_lens.max()) == 1)
        return self._lora_plan

    def _check(self, mapping: LoRAMapping, lens: Sequence[int] | NDArray[np.int64], is_rehearsal: bool) -> None:
        table = self._checked_table
        if table is not None:
            is_resident = None if is_rehearsal else lambda slot: not table.is_clear(slot)
            mapping.validate(int(sum(lens)), len(lens), table.capacity, is_resident)


def _as_captured(plan: LoraPlan, num_tokens: int) -> LoraPlan:
    """The plan as a graph of so many rows has it: its buffers, all their segments, and nothing of a step on the host.

    It stays as it is when the plan is rewritten: a replay reads the buffers, and nothing else.
    """
    captured = copy.copy(plan)
    captured.num_segments, captured.num_tokens = plan.capacity, num_tokens
    captured.segments, captured.scratch = (), {}
    return captured


def _write_padding(arrays: StepArrays, num_tokens: int, num_sequences: int, num_logits: int) -> None:
    """What lies behind the real rows, and the block tables' entries past a context, where anything may have been."""
    arrays.block_tables.fill(0)
    if num_sequences == len(arrays.context_lens):
        return
    arrays.token_ids[num_tokens:] = 0
    arrays.positions[num_tokens:] = 0
    arrays.kv_slot_mapping[num_tokens:] = -1
    arrays.context_lens[num_sequences:] = 0
    arrays.q_indptr[num_sequences:] = np.arange(num_tokens, num_tokens + len(arrays.q_indptr) - num_sequences)
    arrays.logits_indices[num_logits:] = np.arange(num_logits, len(arrays.logits_indices))
    arrays.rope_factors[num_tokens:] = 1


def _slot_of(sequence: ScheduledSequence) -> int:
    """Where all its rows go through one adapter, or the base."""
    lora_slot = sequence.state.lora_slot
    return BASE_SLOT if lora_slot is None else lora_slot


def _tokens_of(sequence: ScheduledSequence) -> NDArray[np.int64]:
    """0 for one that is not known yet."""
    token_ids = np.zeros(sequence.num_tokens, dtype=np.int64)
    known = sequence.state.token_ids[sequence.start : sequence.end - len(sequence.draft)]
    token_ids[: len(known)] = known
    if sequence.draft:
        token_ids[-len(sequence.draft) :] = sequence.draft
    return token_ids


def _pending(sequences: Sequence[ScheduledSequence]) -> tuple[tuple[int, RequestState], ...]:
    """The last row of each sequence whose last token is not known yet."""
    ends = itertools.accumulate(sequence.num_tokens for sequence in sequences)
    found = zip(sequences, ends, strict=True)
    return tuple(
        (end - 1, each.state) for each, end in found if not each.draft and each.end > len(each.state.token_ids)
    )


def _logits_rows(
    sequences: Sequence[ScheduledSequence], query_lens: Sequence[int]
) -> tuple[tuple[ScheduledSequence, ...], tuple[int, ...], tuple[PromptLogitRows, ...], list[int]]:
    """Which token rows need logits: the last of each sampled sequence, those of drafts, and those with prompt
    logprobs."""
    sampled, sampled_rows, prompt_rows = [], [], []
    token_rows: list[int] = []
    first = 0
    for sequence, query_len in zip(sequences, query_lens, strict=True):
        state, start = sequence.state, sequence.start
        if state.request.sampling_params.prompt_logprobs is not None:
            # A row at position p predicts token p + 1; after a preemption some are known already.
            begin = max(start, len(state.prompt_logprobs))
            end = min(start + sequence.num_tokens, state.num_prompt_tokens - 1)
            if begin < end:
                prompt_rows.append(
                    PromptLogitRows(state, len(token_rows), state.request.prompt_token_ids[begin + 1 : end + 1])
                )
                token_rows += range(first + begin - start, first + end - start)
        for row in sequence.rows() if sequence.is_sampled else ():
            sampled.append(row)
            sampled_rows.append(len(token_rows))
            token_rows.append(first + row.num_tokens - 1)
        first += query_len
    return tuple(sampled), tuple(sampled_rows), tuple(prompt_rows), token_rows
