"""The mapping of a batch's tokens to adapters, and the tensors of a step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.core import LoraSlice, LoraTarget, Request, SamplingParams
from loraplex.engine.batch import BatchBuilder, LoRAMapping
from loraplex.engine.schedule_plan import RequestState, ScheduledSequence, SchedulePlan
from loraplex.engine.step_buffers import HostBuffers
from loraplex.errors import InvalidRequestError
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.slices import SliceLayout
from loraplex.kvcache.allocator import KVBlockAllocator
from loraplex.text.processor import NEVER_ACTIVE

BLOCK_SIZE = 8
TABLE_WIDTH = 8


class TestLoRAMapping:
    def test_prompts_become_tokens_and_segments(self) -> None:
        mapping = LoRAMapping.from_prompts([-1, 2, 2, 0], [3, 1, 2, 1])
        assert mapping.index_mapping.tolist() == [-1, -1, -1, 2, 2, 2, 0]
        assert mapping.prompt_mapping.tolist() == [-1, 2, 2, 0]
        assert mapping.is_prefill
        assert mapping.to_segments() == [LoraSegment(3, 6, 2), LoraSegment(6, 7, 0)]

    def test_one_token_each_is_decode(self) -> None:
        assert not LoRAMapping.from_prompts([0, 1], [1, 1]).is_prefill

    @pytest.mark.parametrize(
        ("num_tokens", "num_prompts", "num_slots", "message"),
        [
            (4, 2, 3, "index_mapping has 3 entries for 4 tokens"),
            (3, 1, 3, "prompt_mapping has 2 entries for 1 prompts"),
            (3, 2, 2, r"lora slot 2 is not in -1\.\.1"),
        ],
    )
    def test_validation(self, num_tokens: int, num_prompts: int, num_slots: int, message: str) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            LoRAMapping.from_prompts([-1, 2], [1, 2]).validate(num_tokens, num_prompts, num_slots)

    def test_a_slot_below_the_base_is_refused(self) -> None:
        with pytest.raises(InvalidRequestError, match="lora slot -2"):
            LoRAMapping.from_prompts([-2], [1]).validate(1, 1, 4)

    def test_a_slot_without_an_adapter_is_refused(self) -> None:
        mapping = LoRAMapping.from_prompts([-1, 1], [1, 1])
        mapping.validate(2, 2, 4, is_resident=lambda slot: slot == 1)
        with pytest.raises(InvalidRequestError, match="lora slot 1 holds no adapter"):
            mapping.validate(2, 2, 4, is_resident=lambda slot: False)

    def test_lengths_must_match_and_indices_exist(self) -> None:
        with pytest.raises(InvalidRequestError, match="2 lora slots for 1 prompts"):
            LoRAMapping.from_prompts([0, 1], [1])

    @given(st.lists(st.tuples(st.integers(-1, 4), st.integers(1, 5)), max_size=12))
    def test_segments_are_the_runs_of_the_mapping(self, prompts: list[tuple[int, int]]) -> None:
        mapping = LoRAMapping.from_prompts([slot for slot, _ in prompts], [length for _, length in prompts])
        rebuilt = np.full(len(mapping.index_mapping), -1)
        for segment in mapping.to_segments():
            assert (rebuilt[segment.start : segment.end] == -1).all()
            rebuilt[segment.start : segment.end] = segment.lora_slot
        assert rebuilt.tolist() == mapping.index_mapping.tolist()


def activated(plan: SchedulePlan, begins: Mapping[int, int]) -> SchedulePlan:
    """The same, where sequence i goes through its adapter from position `begins[i]` on."""
    for index, adapter_from in begins.items():
        state = plan.sequences[index].state
        state.request = replace(state.request, adapter_from=adapter_from)
    return plan


class TestBatchBuilder:
    def make(self, *asked: tuple[int | None, int, int, int]) -> tuple[BatchBuilder, SchedulePlan, KVBlockAllocator]:
        """Sequences (lora_slot, length, start, num_tokens) with their KV reserved."""
        blocks = KVBlockAllocator(64, BLOCK_SIZE)
        sequences = []
        for index, (slot, length, start, count) in enumerate(asked):
            prompt = tuple(range(100 * index, 100 * index + length))
            request = Request(f"r{index}", prompt, SamplingParams(), 8, 0, adapter_digest=f"d{index}")
            blocks.start(request, prompt)
            assert blocks.reserve(request.request_id, start + count)
            state = RequestState(request, index, list(prompt), num_computed_tokens=start, lora_slot=slot)
            sequences.append(ScheduledSequence(state, start, count, is_sampled=start + count == length))
        return BatchBuilder(blocks, HostBuffers(), LoraPlan(8), TABLE_WIDTH), SchedulePlan(1, tuple(sequences)), blocks

    def test_rows_are_in_adapter_order_base_first(self) -> None:
        builder, plan, _ = self.make((1, 10, 9, 1), (None, 12, 0, 12), (0, 9, 4, 3), (1, 4, 0, 4))
        step = builder.build(plan)
        batch = step.batch
        assert batch.token_ids.tolist() == [*range(100, 112), 204, 205, 206, 9, *range(300, 304)]
        assert batch.positions.tolist() == [*range(12), 4, 5, 6, 9, 0, 1, 2, 3]
        assert batch.attention.q_indptr.tolist() == [0, 12, 15, 16, 20]
        assert batch.attention.context_lens.tolist() == [12, 7, 10, 4]
        assert batch.lora is not None
        assert batch.lora.segments == (LoraSegment(12, 15, 0), LoraSegment(15, 20, 1))
        assert [s.state.request.request_id for s in step.sampled] == ["r1", "r0", "r3"]
        assert batch.logits_indices.tolist() == [11, 15, 19]

    def test_rows_before_an_invocation_are_base_rows(self) -> None:
        """One chunk lies before it, one behind, one on both sides; the last one's sequence stays whole."""
        builder, plan, _ = self.make((1, 10, 9, 1), (1, 12, 0, 6), (1, 9, 2, 7), (None, 5, 0, 5), (0, 8, 0, 8))
        plan = activated(plan, {0: 9, 1: 6, 2: 4})
        step = builder.build(plan)
        assert step.batch.token_ids.tolist() == [
            *range(100, 106),
            *range(300, 305),
            *range(400, 408),
            9,
            *range(202, 209),
        ]
        assert step.batch.attention.q_indptr.tolist() == [0, 6, 11, 19, 20, 27]
        assert step.batch.lora is not None
        assert step.batch.lora.segments == (LoraSegment(11, 19, 0), LoraSegment(19, 20, 1), LoraSegment(22, 27, 1))

    def test_a_step_before_all_invocations_has_no_plan(self) -> None:
        builder, plan, _ = self.make((1, 10, 0, 6), (0, 12, 11, 1), (None, 5, 0, 5))
        assert builder.build(activated(plan, {0: 6, 1: NEVER_ACTIVE})).batch.lora is None
        builder, plan, _ = self.make((0, 12, 11, 1), (None, 5, 4, 1))
        assert builder.build(activated(plan, {0: NEVER_ACTIVE}), padded_size=4).batch.lora is None

    @given(
        st.lists(
            st.tuples(
                st.one_of(st.none(), st.integers(0, 2)),  # lora_slot
                st.integers(1, 20),  # length
                st.floats(0, 1),  # where the chunk begins
                st.floats(0, 1),  # and how much of the rest it takes
                st.one_of(st.just(0), st.integers(0, 24), st.just(NEVER_ACTIVE)),
            ),
            min_size=1,
            max_size=8,
        )
    )
    def test_each_row_goes_through_its_adapter_from_the_invocation_on(
        self, drawn: list[tuple[int | None, int, float, float, int]]
    ) -> None:
        asked, begins = [], {}
        for index, (slot, length, begin, share, adapter_from) in enumerate(drawn):
            start = int(begin * (length - 1))
            asked.append((slot, length, start, 1 + int(share * (length - start - 1))))
            begins[index] = 0 if slot is None else adapter_from
        builder, plan, _ = self.make(*asked)
        lora = builder.build(plan := activated(plan, begins)).batch.lora
        tokens = builder.build(plan).batch.token_ids.tolist()
        found = dict.fromkeys(range(len(tokens)), -1)
        for segment in () if lora is None else lora.segments:
            for row in range(segment.start, segment.end):
                assert found[row] == -1, "a row is in one segment"
                found[row] = segment.lora_slot
        for row, token in enumerate(tokens):
            index, position = divmod(token, 100)
            slot = asked[index][0]
            assert found[row] == (-1 if slot is None or position < begins[index] else slot)
        rows_of = [token // 100 for token in tokens]
        assert [index for index, _ in itertools.groupby(rows_of)] == list(dict.fromkeys(rows_of)), "sequences are whole"

    def test_a_slot_that_holds_no_adapter_is_refused_in_debug_mode(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, plan, blocks = self.make((1, 10, 9, 1), (None, 12, 0, 12))
        target = LoraTarget("m", 0, 8, 8, (LoraSlice("m", 0, 8, 8),))
        table = SlotTable([target], 2, torch.zeros(1024, dtype=torch.uint8))
        table.set_block("m", 0, 0, [SliceLayout(0, 64, -1, 1, 1.0, torch.float32)])
        arguments = blocks, HostBuffers(), LoraPlan(8), TABLE_WIDTH, table
        with pytest.raises(InvalidRequestError, match="lora slot 1 holds no adapter"):
            BatchBuilder(*arguments).build(plan)
        table.set_block("m", 1, 128, [SliceLayout(0, 64, -1, 1, 1.0, torch.float32)])
        assert BatchBuilder(*arguments).build(plan).batch.lora is not None
        table.clear_slot(1)
        monkeypatch.delenv("LORAPLEX_DEBUG")
        assert BatchBuilder(*arguments).build(plan).batch.lora is not None

    def test_a_token_that_is_being_drawn_is_0_and_named(self) -> None:
        builder, plan, _ = self.make((1, 10, 10, 1), (None, 12, 0, 12), (0, 9, 9, 1))
        step = builder.build(plan)
        states = {sequence.state.request.request_id: sequence.state for sequence in plan.sequences}
        assert step.pending == ((12, states["r2"]), (13, states["r0"]))
        assert step.batch.token_ids.tolist() == [*range(100, 112), 0, 0]
        assert step.batch.positions.tolist()[12:] == [9, 10]
        states["r0"].token_ids.append(77)  # known by now
        step = builder.build(plan)
        assert step.pending == ((12, states["r2"]),)
        assert step.batch.token_ids.tolist()[13] == 77

    def test_kv_slots_follow_the_block_tables(self) -> None:
        builder, plan, blocks = self.make((None, 20, 6, 5), (None, 3, 0, 3))
        batch = builder.build(plan).batch
        first, second = blocks.block_table("r0"), blocks.block_table("r1")
        expected = [first[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(6, 11)]
        expected += [second[0] * BLOCK_SIZE + p for p in range(3)]
        assert batch.attention.kv_slot_mapping.tolist() == expected
        assert batch.attention.block_tables[0, :2].tolist() == list(first)

    def test_a_batch_of_base_rows_has_no_plan(self) -> None:
        builder, plan, _ = self.make((None, 4, 0, 4), (None, 4, 3, 1))
        assert builder.build(plan).batch.lora is None

    def test_a_chunk_that_does_not_reach_the_end_needs_no_logits(self) -> None:
        builder, plan, _ = self.make((0, 10, 0, 4))
        step = builder.build(plan)
        assert step.sampled == ()
        assert step.batch.logits_indices.tolist() == []

    def test_a_decode_step_is_padded(self) -> None:
        """Rows of padding are sequences with one token and no context, whose KV goes nowhere."""
        builder, plan, blocks = self.make((1, 10, 9, 1), (None, 12, 11, 1), (1, 4, 3, 1))
        plain = builder.build(plan)
        step = builder.build(plan, padded_size=5)
        batch, attention = step.batch, step.batch.attention
        assert batch.token_ids.tolist() == [*plain.batch.token_ids.tolist(), 0, 0]
        assert batch.positions.tolist() == [11, 9, 3, 0, 0]
        assert attention.q_indptr.tolist() == [0, 1, 2, 3, 4, 5]
        assert attention.context_lens.tolist() == [12, 10, 4, 0, 0]
        assert attention.kv_slot_mapping.tolist() == [*plain.batch.attention.kv_slot_mapping.tolist(), -1, -1]
        assert attention.block_tables.shape == (5, TABLE_WIDTH)
        for row, name in enumerate(("r1", "r0", "r2")):
            table = list(blocks.block_table(name))
            assert attention.block_tables[row].tolist() == table + [0] * (TABLE_WIDTH - len(table))
        assert not attention.block_tables[3:].any()
        assert (attention.query_lens, attention.context_lens_host) == ((1,) * 5, (12, 10, 4, 0, 0))
        assert batch.logits_indices.tolist() == [0, 1, 2, 3, 4]
        assert batch.lora is not None
        assert (batch.lora.segments, batch.lora.num_tokens) == ((LoraSegment(1, 3, 1),), 5)
        assert (step.sampled_rows, step.padded_size) == ((0, 1, 2), 5)
        assert [s.state.request.request_id for s in step.sampled] == ["r1", "r0", "r2"]

    def test_a_full_batch_is_padded_by_its_block_tables_alone(self) -> None:
        builder, plan, _ = self.make((None, 10, 9, 1), (None, 4, 3, 1))
        batch = builder.build(plan, padded_size=2).batch
        assert batch.attention.context_lens.tolist() == [10, 4]
        assert batch.attention.block_tables.shape == (2, TABLE_WIDTH)
        assert batch.lora is None

    @pytest.mark.parametrize("sequence", [(None, 10, 0, 10), (None, 10, 4, 1)], ids=["a prompt", "not sampled"])
    def test_other_steps_are_not_padded(self, sequence: tuple[None, int, int, int]) -> None:
        builder, plan, _ = self.make(sequence)
        with pytest.raises(AssertionError, match="only decode steps are padded"):
            builder.build(plan, padded_size=16)

    def test_a_blank_step_is_padding_and_tells_the_host_nothing(self) -> None:
        builder, plan, _ = self.make((1, 10, 9, 1))
        builder.build(plan)
        batch = builder.blank(3, has_adapters=True)
        assert batch.attention.kv_slot_mapping.tolist() == [-1, -1, -1]
        assert batch.attention.context_lens.tolist() == [0, 0, 0]
        assert batch.attention.q_indptr.tolist() == [0, 1, 2, 3]
        assert batch.attention.context_lens_host == ()
        assert batch.lora is not None
        assert (batch.lora.segments, batch.lora.num_segments, batch.lora.num_tokens) == ((), 8, 3)
        assert set(batch.lora.seg_slots.tolist()) == {-1}
        assert builder.blank(3, has_adapters=False).lora is None

    def test_a_captured_plan_reads_the_buffers_of_the_next_step_and_nothing_else_of_it(self) -> None:
        builder, plan, _ = self.make((1, 10, 9, 1))
        captured = builder.blank(2, has_adapters=True).lora
        built = builder.build(plan, padded_size=2).batch.lora
        assert captured is not None
        assert built is not None
        assert captured.seg_slots.data_ptr() == built.seg_slots.data_ptr()
        assert captured.seg_slots[0] == 1
        assert (captured.segments, captured.num_segments) == ((), 8)
