"""The arrays of a step: where the host writes them, and how they get to the device.

    HostBuffers     on a CPU: new arrays for each step, and its tensors are over them; nothing is copied
    StagedBuffers   elsewhere: all arrays lie in one block of page-locked memory and go to one block of the device in
                    one copy

The LoRA plan lies before them. What is where in a block depends on the `StepShape` alone. So all steps of one shape
have their tensors at the same addresses, which is what a captured graph needs: it is captured once and reads what the
next copy brings.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.kernels.plan import LoraPlan
from loraplex.kernels.slices import align

NUM_TURNS = 2
"""Blocks on the host: one may still be read by a copy while the next step is written."""

MAX_KEPT_SHAPES = 1024
"""Tensors are made once for each shape, as long as there are no more: those of decode steps come again and again."""


DType = np.dtype[np.int64] | np.dtype[np.int32] | np.dtype[np.float32]


class StepShape(NamedTuple):
    """Sizes of a step: token rows, sequences, entries of a block table, rows of logits."""

    num_tokens: int
    num_sequences: int
    table_width: int
    num_logits: int


class StepArrays(NamedTuple):
    """A step on the host, as AttentionPlan and StepBatch name them; the writer sets all that is in them.

    rope_factors: only for a batch that has them.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    kv_slot_mapping: NDArray[np.int64]
    logits_indices: NDArray[np.int64]
    rope_factors: NDArray[np.float32]
    q_indptr: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]


class StepTensors(NamedTuple):
    """The same on the device."""

    token_ids: Tensor
    positions: Tensor
    kv_slot_mapping: Tensor
    logits_indices: Tensor
    rope_factors: Tensor
    q_indptr: Tensor
    context_lens: Tensor
    block_tables: Tensor


class StepBuffers(Protocol):
    """`begin`, write, `upload`; then the tensors are good until the next upload, in the order of the device's work."""

    def begin(self, shape: StepShape) -> StepArrays:
        """Arrays for one step, with anything in them."""
        ...

    def upload(self, shape: StepShape, lora: LoraPlan | None) -> StepTensors:
        """What was written to the arrays of the last `begin`, which was of this shape. No write may follow.

        lora: the step's plan, written and not uploaded; None for a step without adapters.
        """
        ...


class HostBuffers:
    """StepBuffers of a CPU."""

    def __init__(self) -> None:
        self._arrays: StepArrays | None = None

    def begin(self, shape: StepShape) -> StepArrays:
        self._arrays = StepArrays(*(np.empty(dims, dtype) for dims, dtype in _dims(shape)))
        return self._arrays

    def upload(self, shape: StepShape, lora: LoraPlan | None) -> StepTensors:
        arrays, self._arrays = self._arrays, None
        assert arrays is not None, "upload without begin"
        return StepTensors(*map(torch.from_numpy, arrays))


class StagedBuffers:
    """StepBuffers of another device. `largest` bounds each size of a step; a copy has what its step needs.

    `lora_plan` is the one that all steps have; it is moved to the block.

    The copy runs on the current stream: after the step before it, which still reads the device's block, and beside what
    the host does.
    """

    def __init__(self, device: torch.device, largest: StepShape, lora_plan: LoraPlan) -> None:
        is_cuda = device.type == "cuda"
        self._lora_nbytes = align(lora_plan.host.nbytes)
        nbytes = self._lora_nbytes + _places(largest).nbytes
        self.device_block = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.host_blocks = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(NUM_TURNS)]
        self._host_bytes: list[NDArray[np.uint8]] = [block.numpy() for block in self.host_blocks]
        self._copied: list[torch.cuda.Event] | None = None
        if is_cuda:
            self._copied = [torch.cuda.Event() for _ in range(NUM_TURNS)]  # type: ignore[no-untyped-call]
        self._largest = largest
        self._lora_plan = lora_plan
        lora_plan.move_to(self.device_block[: lora_plan.host.nbytes].view(lora_plan.host.dtype))
        self._turn = 0
        self._tensors: dict[StepShape, StepTensors] = {}

    def begin(self, shape: StepShape) -> StepArrays:
        """Waits for the copy of the step before the last, which reads the block that is now written."""
        assert all(size <= most for size, most in zip(shape, self._largest, strict=True)), f"{shape}, {self._largest}"
        if self._copied is not None:
            self._copied[self._turn].synchronize()
        block = self._host_bytes[self._turn][self._lora_nbytes :]
        return StepArrays(
            *(block[p.start : p.end].view(p.dtype).reshape(p.dims) for p in _places(shape).parts),
        )

    def upload(self, shape: StepShape, lora: LoraPlan | None) -> StepTensors:
        start, end = self._lora_nbytes, self._lora_nbytes + _places(shape).nbytes
        if lora is not None:
            assert lora is self._lora_plan
            lora.cut_tiles()
            self.host_blocks[self._turn][: lora.host.nbytes] = lora.host.view(torch.uint8)
            start = 0
        self.device_block[start:end].copy_(self.host_blocks[self._turn][start:end], non_blocking=True)
        if self._copied is not None:
            self._copied[self._turn].record(torch.cuda.current_stream(self.device_block.device))
        self._turn = (self._turn + 1) % NUM_TURNS
        tensors = self._tensors.get(shape)
        if tensors is None:
            if len(self._tensors) >= MAX_KEPT_SHAPES:
                self._tensors.clear()
            tensors = self._tensors[shape] = self._views(shape)
        return tensors

    def _views(self, shape: StepShape) -> StepTensors:
        return StepTensors(
            *(
                self.device_block[self._lora_nbytes + p.start : self._lora_nbytes + p.end]
                .view(_TORCH_DTYPES[p.dtype])
                .view(p.dims)
                for p in _places(shape).parts
            )
        )


def make_step_buffers(device: torch.device, largest: StepShape, lora_plan: LoraPlan, has_graphs: bool) -> StepBuffers:
    """Staged ones where steps are copied to the device, or captured."""
    return StagedBuffers(device, largest, lora_plan) if has_graphs or device.type != "cpu" else HostBuffers()


_TORCH_DTYPES: dict[DType, torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


class _Part(NamedTuple):
    """Bytes [start, end) of a block."""

    start: int
    end: int
    dims: tuple[int, ...]
    dtype: DType


class _Places(NamedTuple):
    """Where the arrays of a shape lie, in the order of `StepArrays`, one behind the other."""

    parts: tuple[_Part, ...]
    nbytes: int


@functools.lru_cache(maxsize=1024)
def _places(shape: StepShape) -> _Places:
    parts: list[_Part] = []
    cursor = 0
    for dims, dtype in _dims(shape):
        nbytes = math.prod(dims) * dtype.itemsize
        parts.append(_Part(cursor, cursor + nbytes, dims, dtype))
        cursor += align(nbytes)
    return _Places(tuple(parts), cursor)


_INT64, _INT32, _FLOAT32 = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32)


def _dims(shape: StepShape) -> tuple[tuple[tuple[int, ...], DType], ...]:
    """Dimensions and dtype of each of `StepArrays`."""
    tokens, sequences = (shape.num_tokens,), shape.num_sequences
    return (
        (tokens, _INT64),
        (tokens, _INT64),
        (tokens, _INT64),
        ((shape.num_logits,), _INT64),
        (tokens, _FLOAT32),
        ((sequences + 1,), _INT32),
        ((sequences,), _INT32),
        ((sequences, shape.table_width), _INT32),
    )
