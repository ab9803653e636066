"""What the leading rank says to the others, and how: bytes in memory that all map, and a pipe that tells of them.

The bytes of one message are there until the ranks meet in the step that it launches; the leader sends the next one
after that. A message that is longer than the memory goes through the pipe. A pipe that ends is the end of the leader.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.config import EngineConfig
from loraplex.core import Shard
from loraplex.distributed import Collectives
from loraplex.errors import EngineError
from loraplex.kernels.plan import LoraPlan, LoraSegment
from loraplex.kernels.protocols import KernelBackend
from loraplex.kernels.step_batch import AttentionPlan, StepBatch
from loraplex.memory.residency.slot_changes import SlotChange
from loraplex.ranks.board import FileBoard, file_board_nbytes

MESSAGE_BYTES = 4 << 20
_HEADER = struct.Struct("<qq")


@dataclass(frozen=True, slots=True)
class Join:
    """First: which rank the process is of what, and how many bytes the board has where the kernels add up (0: they do
    not)."""

    config: EngineConfig
    model_path: str
    shard: Shard
    num_threads: int
    board_nbytes: int

    @property
    def is_fully_sharded(self) -> bool:
        return self.config.lora is not None and self.config.lora.fully_sharded_loras


@dataclass(frozen=True, slots=True)
class UseMemory:
    """Second: the arena, its KV blocks, and the adapters' slots (0: no LoRA)."""

    num_bytes: int
    kv_dtype: torch.dtype
    kv_shape: tuple[int, ...]
    num_slots: int
    max_tokens: int


Array = NDArray[Any]

AwaitedLogits = tuple[torch.Tensor, Sequence[LoraSegment]]
"""Rows, and the segments of these rows."""


@dataclass(frozen=True, slots=True)
class Step:
    """A StepBatch, as it is to the last byte, and the changes of the slot table before it.

    logits: rows of the step whose logits follow at once, and the segments of these rows; None: none do.
    """

    changes: Sequence[SlotChange]
    token_ids: Array
    positions: Array
    attention: tuple[Array, Array, Array, Array]
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_size: int
    segments: tuple[LoraSegment, ...] | None
    is_decode: bool
    rope_factors: Array | None
    logits: tuple[Array, tuple[LoraSegment, ...]] | None

    @classmethod
    def of(cls, batch: StepBatch, changes: Sequence[SlotChange], logits: AwaitedLogits | None) -> Step:
        plan, lora = batch.attention, batch.lora
        return cls(
            changes,
            batch.token_ids.numpy(),
            batch.positions.numpy(),
            (
                plan.q_indptr.numpy(),
                plan.context_lens.numpy(),
                plan.block_tables.numpy(),
                plan.kv_slot_mapping.numpy(),
            ),
            plan.query_lens,
            plan.context_lens_host,
            plan.block_size,
            None if lora is None else lora.segments,
            lora is not None and lora.is_decode,
            None if batch.rope_factors is None else batch.rope_factors.numpy(),
            None if logits is None else (logits[0].numpy(), tuple(logits[1])),
        )

    def batch(self) -> StepBatch:
        indptr, context_lens, tables, kv_slots = map(torch.from_numpy, self.attention)
        plan = AttentionPlan(
            indptr, context_lens, tables, kv_slots, self.query_lens, self.context_lens, self.block_size
        )
        lora, num_tokens = None, len(self.token_ids)
        if self.segments is not None:
            lora = LoraPlan.build(self.segments, num_tokens, max(1, len(self.segments)), is_decode=self.is_decode)
        rope_factors = None if self.rope_factors is None else torch.from_numpy(self.rope_factors)
        token_ids, positions = torch.from_numpy(self.token_ids), torch.from_numpy(self.positions)
        return StepBatch(token_ids, positions, plan, lora, torch.zeros(0, dtype=torch.int64), None, rope_factors)


@dataclass(frozen=True, slots=True)
class Logits:
    """The head's share of these hidden states [n, hidden], as bytes: numpy has no bfloat16. segments: of their rows."""

    data: Array
    dtype: torch.dtype
    segments: tuple[LoraSegment, ...]

    @classmethod
    def of(cls, hidden: torch.Tensor, segments: Sequence[LoraSegment]) -> Logits:
        return cls(hidden.contiguous().view(torch.uint8).numpy(), hidden.dtype, tuple(segments))

    @property
    def hidden(self) -> torch.Tensor:
        return torch.from_numpy(self.data).view(self.dtype)


class Sender:
    """The leader's side. `mailbox`: a file descriptor of MESSAGE_BYTES that the others map."""

    def __init__(self, mailbox: int, pipes: Sequence[IO[bytes]]) -> None:
        self._memory = mmap.mmap(mailbox, MESSAGE_BYTES)
        self._pipes = pipes

    def send(self, message: Any) -> None:
        """To all. OSError: one has gone."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        is_mailed = len(data) <= MESSAGE_BYTES
        if is_mailed:
            self._memory[: len(data)] = data
        for pipe in self._pipes:
            pipe.write(_HEADER.pack(len(data), is_mailed) + (b"" if is_mailed else data))
            pipe.flush()


class Receiver:
    """A follower's side."""

    def __init__(self, mailbox: int, pipe: int) -> None:
        self._memory = mmap.mmap(mailbox, MESSAGE_BYTES)
        self._pipe = os.fdopen(pipe, "rb")

    def receive(self) -> Any:
        """Waits. EOFError when the leader has ended."""
        header = self._pipe.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise EOFError
        size, is_mailed = _HEADER.unpack(header)
        return pickle.loads(self._memory[:size] if is_mailed else self._pipe.read(size))  # from our own parent


def send_to_one(pipe: IO[bytes], message: Any) -> None:
    """Through the pipe alone."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    pipe.write(_HEADER.pack(len(data), False) + data)
    pipe.flush()


def shared_tensor(file: int, num_bytes: int) -> torch.Tensor:
    """All of the file's memory, uint8; pages come with the first write."""
    return torch.from_numpy(np.frombuffer(mmap.mmap(file, num_bytes), np.uint8))


def board_bytes(backend: KernelBackend, num_ranks: int) -> int:
    """Of the file over which the ranks meet."""
    return backend.rank_nbytes(num_ranks) or file_board_nbytes(num_ranks)


def meet(join: Join, backend: KernelBackend, board: int, watched: Sequence[int]) -> Collectives:
    """With the other ranks. `board`: a file of `board_bytes` that all ranks have. Raises EngineError."""
    nbytes, size = backend.rank_nbytes(join.shard.size), join.shard.size
    if nbytes != join.board_nbytes:
        raise EngineError(f"rank {join.shard.rank} of {size} has other kernels than rank 0: {backend.description}")
    if nbytes == 0:
        return FileBoard(join.shard, board, watched)
    return backend.collectives(join.shard, shared_tensor(board, nbytes), watched)
