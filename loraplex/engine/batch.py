"""A schedule plan becomes tensors: the rows of a step in adapter order, positions, KV addresses, LoRA segments.

Rows are ordered by lora_slot, base rows first, so that the rows of one adapter lie together and all layers share one `LoraPlan`.
Sequences stay whole. Lengths are per sequence in Python and per token in numpy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.core import BASE_SLOT, BlockAllocator
from loraplex.engine.schedule_plan import RequestState, ScheduledSequence, SchedulePlan
from loraplex.errors import InvalidRequestError
from loraplex.kernels.plan import AttentionPlan, LoraPlan, LoraSegment, StepBatch


@dataclass(frozen=True, eq=False)
class LoRAMapping:
    """Which adapter each token and each prompt of a batch goes through, as lora_slot; -1 is the base model.

    index_mapping: int32 [num_tokens]; prompt_mapping: int32 [num_prompts]; is_prefill: some prompt has more than one token here.
    """

    index_mapping: NDArray[np.int32]
    prompt_mapping: NDArray[np.int32]
    is_prefill: bool = False

    @classmethod
    def from_prompts(cls, lora_slots: Sequence[int], query_lens: Sequence[int]) -> LoRAMapping:
        """Prompt i has `query_lens[i]` tokens, one prompt after the other. Raises InvalidRequestError when lengths differ."""
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

    def get_lora_id_for_index(self, index: int) -> int:
        """The lora_slot of one token. Raises InvalidRequestError outside the batch."""
        if not 0 <= index < len(self.index_mapping):
            raise InvalidRequestError(f"token {index} is not in the batch of {len(self.index_mapping)} tokens")
        return int(self.index_mapping[index])

    def create_batch_indices(self) -> dict[int, NDArray[np.int64]]:
        """lora_slot -> the tokens that go through it, ascending; base rows under -1."""
        slots = np.unique(self.index_mapping)
        return {int(slot): np.flatnonzero(self.index_mapping == slot) for slot in slots}

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
    """Logits rows [start, start + len(next_ids)) of a step are for prompt positions; each predicts the token in `next_ids`."""

    state: RequestState
    start: int
    next_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """A step as tensors. `sampled[i]` is drawn from logits row `sampled_rows[i]`.

    pending: (row of batch.token_ids, request) of tokens that the step in flight draws; they are 0 until they are taken from there.
    """

    batch: StepBatch
    sampled: tuple[ScheduledSequence, ...]
    sampled_rows: tuple[int, ...]
    prompt_rows: tuple[PromptLogitRows, ...]
    pending: tuple[tuple[int, RequestState], ...] = ()


class BatchBuilder:
    """Builds the tensors of one step after the other; the LoRA plan's buffers are reused, so only the last step's is valid."""

    def __init__(self, blocks: BlockAllocator, max_num_seqs: int, device: torch.device) -> None:
        self._blocks = blocks
        self._device = device
        self._lora_plan = LoraPlan(max_num_seqs, device)

    def build(self, plan: SchedulePlan) -> BuiltStep:
        sequences = sorted(plan.sequences, key=lambda sequence: _slot_of(sequence.state))
        starts = np.array([sequence.start for sequence in sequences], dtype=np.int64)
        query_lens = np.array([sequence.num_tokens for sequence in sequences], dtype=np.int64)
        q_indptr = np.concatenate([[0], np.cumsum(query_lens)])
        rows = np.repeat(np.arange(len(sequences)), query_lens)
        positions = np.arange(q_indptr[-1]) - np.repeat(q_indptr[:-1] - starts, query_lens)
        token_ids = np.concatenate([_tokens_of(sequence) for sequence in sequences])
        sampled, sampled_rows, prompt_rows, logits_indices = _logits_rows(sequences, q_indptr.tolist())
        batch = StepBatch(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            attention=self._attention_plan(sequences, starts + query_lens, query_lens, q_indptr, rows, positions),
            lora=self._rewrite_lora_plan(sequences, query_lens),
            logits_indices=self._tensor(logits_indices),
        )
        return BuiltStep(batch, sampled, sampled_rows, prompt_rows, pending=_pending(sequences))

    def _attention_plan(
        self,
        sequences: Sequence[ScheduledSequence],
        context_lens: NDArray[np.int64],
        query_lens: NDArray[np.int64],
        q_indptr: NDArray[np.int64],
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> AttentionPlan:
        block_size = self._blocks.block_size
        num_blocks = -(-context_lens // block_size)
        block_tables = np.zeros((len(sequences), int(num_blocks.max())), dtype=np.int32)
        for row, sequence in enumerate(sequences):
            count = int(num_blocks[row])
            block_tables[row, :count] = self._blocks.block_table(sequence.state.request.request_id)[:count]
        kv_slots = block_tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
        return AttentionPlan(
            q_indptr=self._tensor(q_indptr.astype(np.int32)),
            context_lens=self._tensor(context_lens.astype(np.int32)),
            block_tables=self._tensor(block_tables),
            kv_slot_mapping=self._tensor(kv_slots),
            query_lens=tuple(query_lens.tolist()),
            context_lens_host=tuple(context_lens.tolist()),
            block_size=block_size,
        )

    def _rewrite_lora_plan(
        self, sequences: Sequence[ScheduledSequence], query_lens: NDArray[np.int64]
    ) -> LoraPlan | None:
        lora_slots = [_slot_of(sequence.state) for sequence in sequences]
        if lora_slots[-1] == BASE_SLOT:  # ordered by slot: all of them are base rows
            return None
        mapping = LoRAMapping.from_prompts(lora_slots, query_lens.tolist())
        self._lora_plan.rewrite(mapping.to_segments(), len(mapping.index_mapping))
        return self._lora_plan

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)


def _slot_of(state: RequestState) -> int:
    return BASE_SLOT if state.lora_slot is None else state.lora_slot


def _tokens_of(sequence: ScheduledSequence) -> NDArray[np.int64]:
    """0 for one that is not known yet."""
    token_ids = np.zeros(sequence.num_tokens, dtype=np.int64)
    known = sequence.state.token_ids[sequence.start : sequence.end]
    token_ids[: len(known)] = known
    return token_ids


def _pending(sequences: Sequence[ScheduledSequence]) -> tuple[tuple[int, RequestState], ...]:
    """The last row of each sequence whose last token is not known yet."""
    ends = itertools.accumulate(sequence.num_tokens for sequence in sequences)
    found = zip(sequences, ends, strict=True)
    return tuple((end - 1, each.state) for each, end in found if each.end > len(each.state.token_ids))


def _logits_rows(
    sequences: Sequence[ScheduledSequence], q_indptr: Sequence[int]
) -> tuple[tuple[ScheduledSequence, ...], tuple[int, ...], tuple[PromptLogitRows, ...], NDArray[np.int64]]:
    """Which token rows need logits: the last one of each sampled sequence, and those whose prompt logprobs were asked."""
    sampled, sampled_rows, prompt_rows = [], [], []
    token_rows: list[int] = []
    for sequence, first in zip(sequences, q_indptr, strict=False):
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
        if sequence.is_sampled:
            sampled.append(sequence)
            sampled_rows.append(len(token_rows))
            token_rows.append(first + sequence.num_tokens - 1)
    return tuple(sampled), tuple(sampled_rows), tuple(prompt_rows), np.array(token_rows, dtype=np.int64)
