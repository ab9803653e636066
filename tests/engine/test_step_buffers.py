"""Where the arrays of a step lie, on the host and on a device; on a CPU a device's block is memory of its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.step_buffers import (
    MAX_KEPT_SHAPES,
    HostBuffers,
    StagedBuffers,
    StepBuffers,
    StepShape,
    StepTensors,
    make_step_buffers,
)
from loraplex.kernels.plan import LoraPlan, LoraSegment

CPU = torch.device("cpu")
LARGEST = StepShape(40, 9, 5, 40)
SHAPES = st.builds(StepShape, st.integers(1, 40), st.integers(1, 9), st.integers(1, 5), st.integers(0, 40))


def fill(buffers: StepBuffers, shape: StepShape, seed: int) -> tuple[list[list[int]], StepTensors]:
    """(what was written to the arrays, the tensors of it)"""
    rng = np.random.default_rng(seed)
    written = []
    for array in buffers.begin(shape):
        array[...] = rng.integers(-(2**31), 2**31, array.shape)
        written.append(array.tolist())
    return written, buffers.upload(shape, None)


@pytest.mark.parametrize(
    "make", [HostBuffers, lambda: StagedBuffers(CPU, LARGEST, LoraPlan(4))], ids=["host", "staged"]
)
@given(shapes=st.lists(SHAPES, min_size=1, max_size=5))
def test_tensors_are_what_was_written(make: Callable[[], StepBuffers], shapes: list[StepShape]) -> None:
    buffers = make()
    for seed, shape in enumerate(shapes):
        written, tensors = fill(buffers, shape, seed)
        assert [tensor.tolist() for tensor in tensors] == written
        assert [tensor.dtype for tensor in tensors] == [torch.int64] * 4 + [torch.float32] + [torch.int32] * 3
        assert tensors.block_tables.shape == (shape.num_sequences, shape.table_width)
        assert tensors.q_indptr.shape == (shape.num_sequences + 1,)


def test_on_a_cpu_nothing_is_copied() -> None:
    buffers = HostBuffers()
    shape = StepShape(3, 2, 1, 2)
    arrays = buffers.begin(shape)
    tensors = buffers.upload(shape, None)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.data_ptr() == array.ctypes.data
    again = buffers.begin(shape)
    assert again.token_ids.ctypes.data != arrays.token_ids.ctypes.data


@given(shape=SHAPES, others=st.lists(SHAPES, max_size=4))
def test_steps_of_one_shape_have_their_tensors_at_the_same_addresses(shape: StepShape, others: list[StepShape]) -> None:
    buffers = StagedBuffers(CPU, LARGEST, LoraPlan(4))
    _, first = fill(buffers, shape, 0)
    for seed, other in enumerate(others):
        fill(buffers, other, seed)
    written, again = fill(buffers, shape, 7)
    assert [tensor.data_ptr() for tensor in again] == [tensor.data_ptr() for tensor in first]
    assert [tensor.tolist() for tensor in first] == written
    block = buffers.device_block
    assert all(
        0 <= tensor.data_ptr() - block.data_ptr() <= block.numel() - tensor.nbytes for tensor in again if tensor.numel()
    )


def test_the_next_step_is_written_while_the_last_copy_may_be_under_way() -> None:
    buffers = StagedBuffers(CPU, LARGEST, LoraPlan(4))
    shape = StepShape(4, 4, 2, 4)
    blocks = []
    for seed in range(4):
        blocks.append(buffers.begin(shape).token_ids.ctypes.data)
        fill(buffers, shape, seed)
    assert blocks[0] == blocks[2] != blocks[1] == blocks[3]


def test_what_a_step_does_not_need_is_not_copied() -> None:
    buffers = StagedBuffers(CPU, LARGEST, LoraPlan(4))
    buffers.device_block.fill_(7)
    _, tensors = fill(buffers, StepShape(1, 1, 1, 1), 0)
    end = tensors.block_tables.data_ptr() + tensors.block_tables.nbytes - buffers.device_block.data_ptr()
    assert (buffers.device_block[end + 64 :] == 7).all()


def test_a_step_larger_than_the_largest_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="num_tokens=41"):
        StagedBuffers(CPU, LARGEST, LoraPlan(4)).begin(StepShape(41, 1, 1, 1))


def test_tensors_of_many_shapes_are_not_kept_for_ever() -> None:
    largest = StepShape(MAX_KEPT_SHAPES + 10, 1, 1, 1)
    buffers = StagedBuffers(CPU, largest, LoraPlan(4))
    for num_tokens in range(1, largest.num_tokens):
        buffers.begin(StepShape(num_tokens, 1, 1, 1))
        buffers.upload(StepShape(num_tokens, 1, 1, 1), None)
    assert len(buffers._tensors) < MAX_KEPT_SHAPES


def test_staged_where_steps_are_captured_or_copied() -> None:
    assert isinstance(make_step_buffers(CPU, LARGEST, LoraPlan(4), has_graphs=False), HostBuffers)
    assert isinstance(make_step_buffers(CPU, LARGEST, LoraPlan(4), has_graphs=True), StagedBuffers)
    assert isinstance(make_step_buffers(torch.device("meta"), LARGEST, LoraPlan(4), has_graphs=False), StagedBuffers)


def test_the_lora_plan_goes_with_the_step_in_one_copy() -> None:
    plan = LoraPlan(4, max_tokens=40)
    buffers, shape = StagedBuffers(CPU, LARGEST, plan), StepShape(4, 4, 2, 4)
    buffers.begin(shape)
    plan.write([LoraSegment(1, 3, 2, 0.5)], 4, is_decode=True)
    assert plan.seg_slots.tolist() != [2, -1, -1, -1]
    buffers.upload(shape, plan)
    assert (plan.seg_starts[0], plan.seg_ends[0], plan.seg_weights[0]) == (1, 3, 0.5)
    assert plan.seg_slots.tolist() == [2, -1, -1, -1]
    assert plan.small_tiles[:4, :2].tolist() == [[1, 0], [2, 0], [2, -1], [1, 0]]
    buffers.begin(shape)
    buffers.upload(shape, None)
    assert plan.seg_slots[0] == 2
    block = buffers.device_block
    assert 0 <= plan.seg_slots.data_ptr() - block.data_ptr() < block.numel()
