"""LoraPlan and SlotTable: what they accept, what they hold, that their memory stays where it is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.slices import ABSENT, DTYPE_CODES, SliceLayout
from tests.kernels.cases import FP32, make_target

SEGMENTS = st.builds(
    LoraSegment,
    start=st.integers(-2, 10),
    end=st.integers(-2, 10),
    lora_slot=st.integers(-2, 5),
    weight=st.sampled_from([1.0, 0.0, -0.5, math.inf, math.nan]),
)


def is_valid(segment: LoraSegment, num_tokens: int) -> bool:
    is_inside = 0 <= segment.start < segment.end <= num_tokens
    return is_inside and segment.lora_slot >= 0 and math.isfinite(segment.weight)


@given(segments=st.lists(SEGMENTS, max_size=5), num_tokens=st.integers(0, 8), capacity=st.integers(1, 4))
def test_a_plan_is_valid_or_refused(segments: list[LoraSegment], num_tokens: int, capacity: int) -> None:
    if len(segments) > capacity or not all(is_valid(s, num_tokens) for s in segments):
        with pytest.raises(ValueError, match=r"segment|Segment"):
            LoraPlan.build(segments, num_tokens, capacity)
        return
    plan = LoraPlan.build(segments, num_tokens, capacity)
    count, rest = len(segments), capacity - len(segments)
    assert (plan.num_segments, plan.num_tokens, plan.segments) == (count, num_tokens, tuple(segments))
    assert plan.seg_starts.tolist() == [s.start for s in segments] + [0] * rest
    assert plan.seg_ends.tolist() == [s.end for s in segments] + [0] * rest
    assert plan.seg_slots.tolist() == [s.lora_slot for s in segments] + [-1] * rest
    assert plan.seg_weights.tolist() == [s.weight for s in segments] + [0.0] * rest
    assert {t.dtype for t in (plan.seg_starts, plan.seg_ends, plan.seg_slots)} == {torch.int32}
    assert plan.seg_weights.dtype == torch.float32


def test_rewrite_keeps_the_buffers_and_leaves_no_residue() -> None:
    plan = LoraPlan.build([LoraSegment(0, 2, 3, 0.5), LoraSegment(2, 3, 1)], 4, capacity=4)
    plan.scratch["made by a backend"] = 1
    buffers = (plan.seg_starts, plan.seg_ends, plan.seg_slots, plan.seg_weights)
    addresses = [t.data_ptr() for t in buffers]
    plan.rewrite([LoraSegment(1, 2, 0)], 2)
    assert [t.data_ptr() for t in buffers] == addresses
    assert plan.seg_slots.tolist() == [0, -1, -1, -1]
    assert plan.seg_ends.tolist() == [2, 0, 0, 0]
    assert not plan.scratch


def test_a_refused_rewrite_changes_nothing() -> None:
    plan = LoraPlan.build([LoraSegment(0, 2, 3)], 4, capacity=2)
    with pytest.raises(ValueError, match="base rows belong in no segment"):
        plan.rewrite([LoraSegment(0, 1, 0), LoraSegment(1, 2, -1)], 4)
    assert plan.segments == (LoraSegment(0, 2, 3),)
    assert plan.seg_slots.tolist() == [3, -1]


def test_a_new_plan_has_no_segments() -> None:
    plan = LoraPlan(3)
    assert (plan.num_segments, plan.num_tokens, plan.seg_slots.tolist()) == (0, 0, [-1, -1, -1])


# ------------------------------------------------------------------------------------------------------------ the table

TARGETS = (make_target(8, (6, 4, 4), "layers.0.qkv"), make_target(6, (8,), "layers.0.o"))


def make_empty_table(capacity: int = 3, nbytes: int = 4096) -> SlotTable:
    return SlotTable(TARGETS, capacity, torch.full((nbytes,), 0xFF, dtype=torch.uint8))


LAYOUT = SliceLayout(a_offset=0, b_offset=128, bias_offset=256, rank=2, scale=0.5, dtype=FP32)
NO_BIAS = SliceLayout(a_offset=320, b_offset=384, bias_offset=ABSENT, rank=1, scale=2.0, dtype=torch.bfloat16)
GAINS = SliceLayout(ABSENT, ABSENT, ABSENT, 0, 1.0, FP32, gain_offset=64, input_gain_offset=128)


def columns(table: SlotTable) -> list[torch.Tensor]:
    addresses = [table.a_addr, table.b_addr, table.bias_addr, table.gain_addr, table.input_gain_addr]
    return [*addresses, table.rank, table.scale, table.dtype]


def test_rows_follow_targets_and_slices() -> None:
    table = make_empty_table()
    assert (table.num_rows, table.first_row("layers.0.qkv"), table.first_row("layers.0.o")) == (4, 0, 3)
    assert {tuple(c.shape) for c in columns(table)} == {(4, 3)}
    assert [c.dtype for c in columns(table)] == [torch.int64] * 5 + [torch.int32, torch.float32, torch.int32]
    with pytest.raises(KeyError):
        table.first_row("layers.1.o")


def test_set_block_writes_addresses_and_clear_slot_removes_them() -> None:
    table = make_empty_table()
    addresses = [c.data_ptr() for c in columns(table)]
    assert all(table.is_clear(slot) for slot in range(3))
    table.set_block("layers.0.qkv", 1, 512, (LAYOUT, None, NO_BIAS))
    base = table.buffer.data_ptr() + 512
    assert table.a_addr[:, 1].tolist() == [base, 0, base + 320, 0]
    assert table.b_addr[:, 1].tolist() == [base + 128, 0, base + 384, 0]
    assert table.bias_addr[:, 1].tolist() == [base + 256, 0, 0, 0]
    assert table.rank[:, 1].tolist() == [2, 0, 1, 0]
    assert table.scale[:, 1].tolist() == [0.5, 0, 2.0, 0]
    assert table.dtype[[0, 2], 1].tolist() == [DTYPE_CODES[FP32], DTYPE_CODES[torch.bfloat16]]
    assert not table.is_clear(1)
    assert not any(c[:, [0, 2]].any() for c in columns(table))
    table.set_block("layers.0.o", 1, 1024, (GAINS,))
    assert table.gain_addr[:, 1].tolist() == [0, 0, 0, base + 512 + 64]
    assert table.input_gain_addr[:, 1].tolist() == [0, 0, 0, base + 512 + 128]
    assert not any(table.addresses(3, 1)[:3])
    table.clear_slot(1)
    assert table.is_clear(1)
    assert not any(c.any() for c in columns(table))
    assert [c.data_ptr() for c in columns(table)] == addresses


def test_views_are_the_arenas_memory() -> None:
    table = make_empty_table()
    table.set_block("layers.0.qkv", 2, 64, (LAYOUT, None, NO_BIAS))
    view = table.views(0, 2)
    assert view is not None
    assert view.lora_a is not None
    assert view.lora_b is not None
    assert view.bias is not None
    assert (tuple(view.lora_a.shape), tuple(view.lora_b.shape), tuple(view.bias.shape)) == ((2, 8), (6, 2), (6,))
    assert view.lora_a.data_ptr() == table.a_addr[0, 2]
    assert view.lora_b.data_ptr() == table.b_addr[0, 2]
    assert view.bias.data_ptr() == table.bias_addr[0, 2]
    assert table.views(1, 2) is None
    assert table.views(0, 0) is None
    third = table.views(2, 2)
    assert third is not None
    assert third.bias is None
    assert third.scale == 2.0
    assert third.gain is third.input_gain is None
    table.set_block("layers.0.o", 2, 1024, (GAINS,))
    gains = table.views(3, 2)
    assert gains is not None
    assert gains.lora_a is gains.lora_b is gains.bias is None
    assert gains.gain is not None
    assert gains.input_gain is not None
    assert (gains.gain.shape, gains.input_gain.shape) == ((8,), (6,))
    assert (gains.gain.dtype, gains.input_gain.dtype) == (FP32, FP32)
    assert [gains.gain.data_ptr(), gains.input_gain.data_ptr()] == table.addresses(3, 2)[3:]


@pytest.mark.parametrize("is_image", [False, True])
def test_what_kernels_are_chosen_by_never_becomes_less(is_image: bool) -> None:
    """Captured steps depend on it."""
    table = make_empty_table()

    def place(layout: SliceLayout) -> tuple[bool, bool]:
        table.clear_slot(0)
        if is_image:
            table.set_image(0, table.image([("layers.0.o", (layout,))]), [0])
        else:
            table.set_block("layers.0.o", 0, 0, (layout,))
        return table.has_gains, table.has_input_gains

    assert place(LAYOUT) == (False, False)
    assert place(replace(LAYOUT, gain_offset=512)) == (True, False)
    assert place(LAYOUT) == (True, False)
    assert place(GAINS) == (True, True)
    table.clear_slot(0)
    assert (table.has_gains, table.has_input_gains, table.max_rank) == (True, True, 2)


def test_derived_lives_as_long_as_its_block() -> None:
    table = make_empty_table()
    table.set_block("layers.0.qkv", 0, 0, (LAYOUT, None, None))
    table.set_block("layers.0.o", 0, 1024, (LAYOUT,))
    table.derived[0].update({0: "of qkv", 3: "of o"})
    table.set_block("layers.0.qkv", 0, 2048, (LAYOUT, None, None))
    assert table.derived[0] == {3: "of o"}
    table.clear_slot(0)
    assert table.derived[0] == {}


def test_what_does_not_fit_the_table_is_refused() -> None:
    table = make_empty_table()
    with pytest.raises(ValueError, match="3 slices, got 1"):
        table.set_block("layers.0.qkv", 0, 0, (LAYOUT,))
    with pytest.raises(ValueError, match="lora_slot 3"):
        table.set_block("layers.0.o", 3, 0, (LAYOUT,))
    with pytest.raises(ValueError, match="lora_slot -1"):
        table.clear_slot(-1)
    with pytest.raises(ValueError, match="outside the buffer"):
        table.set_block("layers.0.o", 0, 4096, (LAYOUT,))
    with pytest.raises(ValueError, match="outside the buffer"):
        table.set_block("layers.0.o", 0, 3900, (LAYOUT,))
    with pytest.raises(ValueError, match="outside the buffer"):
        table.set_block("layers.0.o", 0, 4000, (GAINS,))
    with pytest.raises(ValueError, match="outside the buffer"):
        table.set_image(0, table.image([("layers.0.o", (GAINS,))]), [4000])
    with pytest.raises(ValueError, match="same name"):
        SlotTable([TARGETS[0], TARGETS[0]], 1, torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        SlotTable(TARGETS, 1, torch.zeros(64))
    assert table.is_clear(0)


def test_a_mirrored_table_shows_changes_when_it_is_flushed_all_at_once() -> None:
    table = SlotTable(TARGETS, 3, torch.full((4096,), 0xFF, dtype=torch.uint8), is_mirrored=True)
    direct = SlotTable(TARGETS, 3, table.buffer)
    addresses = [c.data_ptr() for c in columns(table)]
    assert not table.has_changes
    for each in (table, direct):
        each.set_block("layers.0.qkv", 1, 512, (LAYOUT, None, NO_BIAS))
        each.set_image(
            2, each.image([("layers.0.o", (replace(LAYOUT, gain_offset=512, input_gain_offset=576),))]), [1024]
        )
    assert table.has_changes
    assert not direct.has_changes, "there kernels read what was written"
    assert not any(c.any() for c in columns(table)), "a step in flight sees none of it"
    assert table.addresses(0, 1) == [direct.a_addr[0, 1], direct.b_addr[0, 1], direct.bias_addr[0, 1], 0, 0]
    assert table.addresses(3, 2)[3:] == [direct.gain_addr[3, 2], direct.input_gain_addr[3, 2]]
    table.check_integrity()
    table.flush()
    assert not table.has_changes
    assert all(mine.equal(its) for mine, its in zip(columns(table), columns(direct), strict=True))
    table.clear_slot(1)
    assert table.a_addr[0, 1] != 0
    table.flush()
    direct.clear_slot(1)
    assert all(mine.equal(its) for mine, its in zip(columns(table), columns(direct), strict=True))
    assert [c.data_ptr() for c in columns(table)] == addresses, "captured graphs hold them"
    table.check_integrity()
    table.a_addr[0, 0] = 1
    with pytest.raises(AssertionError, match="another slot table"):
        table.check_integrity()


def test_changes_wait_for_a_flush_that_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that could not be launched for lack of memory is tried again."""

    def refuse(*_arguments: object, **_options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    table = SlotTable(TARGETS, 3, torch.full((4096,), 0xFF, dtype=torch.uint8), is_mirrored=True)
    table.set_block("layers.0.qkv", 1, 512, (LAYOUT, None, NO_BIAS))
    with monkeypatch.context() as lacking:
        lacking.setattr(torch, "empty", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            table.flush()
    assert table.has_changes
    table.flush()
    assert table.a_addr[0, 1] == table.addresses(0, 1)[0] != 0
    table.check_integrity()


def test_an_unchanged_table_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before the first change, and not again after a flush."""
    table = SlotTable(TARGETS, 3, torch.full((4096,), 0xFF, dtype=torch.uint8), is_mirrored=True)
    staged: list[object] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: staged.append(sizes) or empty(*sizes, **options))
    table.flush()
    assert not staged
    table.set_block("layers.0.qkv", 1, 512, (LAYOUT, None, NO_BIAS))
    table.flush()
    assert len(staged) == 1
    table.flush()
    assert len(staged) == 1
