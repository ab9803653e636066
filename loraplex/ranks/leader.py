"""Rank 0's side: it starts the other ranks, tells them each step, and ends with them.

From the moment that a step is told until it is done all ranks depend on each other: whatever fails then, on any rank,
is a DeviceLostError, since none could say where the others stand. It ends the engine, which its front starts again.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

import torch

from loraplex import logs
from loraplex.config import EngineConfig
from loraplex.core import Shard
from loraplex.distributed import RankGroup
from loraplex.errors import DeviceLostError, EngineError, error_from_payload
from loraplex.kernels.plan import LoraSegment
from loraplex.kernels.protocols import KernelBackend
from loraplex.kernels.step_batch import StepBatch
from loraplex.memory.residency.slot_changes import SlotChange
from loraplex.processes.environment import OUTSIDE_SIGNALS
from loraplex.ranks.messages import (
    MESSAGE_BYTES,
    AwaitedLogits,
    Join,
    Logits,
    Sender,
    Step,
    UseMemory,
    board_bytes,
    meet,
    send_to_one,
    shared_tensor,
)

END_S = 5.0
STATUS_S = 0.5


def _no_changes() -> Sequence[SlotChange]:
    return ()


class LeadingRank(RankGroup):
    """take_changes: what was written to the slot table since it was last called."""

    def __init__(self, config: EngineConfig, model_path: str, num_threads: int, backend: KernelBackend) -> None:
        """Returns when all ranks are there; they load the model then. Raises EngineError."""
        size = config.tensor_parallel_size
        self.take_changes: Callable[[], Sequence[SlotChange]] = _no_changes
        self._awaited_logits: AwaitedLogits | None = None
        board_nbytes = backend.rank_nbytes(size)
        self._arena, mailbox, board = (os.memfd_create(f"loraplex-{name}") for name in ("arena", "mailbox", "board"))
        os.ftruncate(mailbox, MESSAGE_BYTES)
        os.ftruncate(board, board_bytes(backend, size))
        self._processes = [self._start(self._arena, mailbox, board) for _ in range(1, size)]
        pipes = [_pipe(process.stdin) for process in self._processes]
        self._sender = Sender(mailbox, pipes)
        os.close(mailbox)
        try:
            joins = [Join(config, model_path, Shard(i, size), num_threads, board_nbytes) for i in range(size)]
            with self._starting():
                for pipe, join in zip(pipes, joins[1:], strict=True):
                    send_to_one(pipe, join)
            self.wait_until_ready()
            watched = [_pipe(process.stdout).fileno() for process in self._processes]
            super().__init__(joins[0].shard, meet(joins[0], backend, board, watched), joins[0].is_fully_sharded)
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise
        finally:
            os.close(board)

    def _start(self, *files: int) -> subprocess.Popen[bytes]:
        is_main = threading.current_thread() is threading.main_thread()  # the kernel would end ranks with another one
        numbers = os.getpid() if is_main else 0, *files
        command = [sys.executable, "-P", "-m", "loraplex.ranks.start", *map(str, numbers), *logs.arguments()]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=files)

    def wait_until_ready(self) -> None:
        """Until every rank has done what it was told. Raises what one could not do."""
        for process in self._processes:
            with self._starting():
                answer = pickle.load(_pipe(process.stdout))
            if answer is not None:
                raise error_from_payload(answer)

    @contextmanager
    def _starting(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise self._told(EngineError("a rank of the model ended before it was ready")) from error

    def _told(self, error: EngineError) -> EngineError:
        """And whether a rank was killed from outside. The end of its pipes comes first, its status a moment later."""
        until_s = time.monotonic() + STATUS_S
        while not (ended := [s for each in self._processes if (s := each.poll()) is not None]):
            if time.monotonic() > until_s:
                break
            time.sleep(0.001)
        error.was_killed = any(-status in OUTSIDE_SIGNALS for status in ended)
        return error

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory that all ranks map: the arena's. Once."""
        os.ftruncate(self._arena, num_bytes)
        return shared_tensor(self._arena, num_bytes)

    def use_memory(self, message: UseMemory) -> None:
        """The other ranks map the arena. Raises what one could not do."""
        with self._starting():
            self._sender.send(message)
        self.wait_until_ready()

    # ------------------------------------------------------------------------------------------------------------ steps

    def expect_logits(self, rows: torch.Tensor, segments: Sequence[LoraSegment]) -> None:
        self._awaited_logits = rows, segments

    @contextmanager
    def step(self, batch: StepBatch) -> Iterator[None]:
        with self._together():
            self._sender.send(Step.of(batch, self.take_changes(), self._awaited_logits))
            yield

    @contextmanager
    def logits(self, hidden: torch.Tensor, segments: Sequence[LoraSegment]) -> Iterator[None]:
        is_awaited, self._awaited_logits = self._awaited_logits is not None, None
        with self._together():
            if not is_awaited:
                self._sender.send(Logits.of(hidden, segments))
            yield

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            lost = self._told(DeviceLostError(f"the ranks of the model lost each other: {error}"))
            self._kill()
            raise lost from error

    def check(self) -> None:
        for rank, process in enumerate(self._processes, 1):
            status = process.poll()
            if status is not None:
                lost = self._told(DeviceLostError(f"rank {rank} of the model ended with status {status}"))
                self._kill()
                raise lost

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()  # those that live wait for one that does not
        self.close()

    def close(self) -> None:
        """Also those that hang."""
        for process in self._processes:
            with suppress(OSError):
                _pipe(process.stdin).close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _pipe(process.stdout).close()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
