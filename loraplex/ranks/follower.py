"""A rank that follows, in a process that the leader started (loraplex/ranks/start.py).

It loads its share of the model and does what it is told: steps, and the head's share of hidden states. It samples
nothing and knows of no request. Its standard input is the leader's pipe, and its end the leader's. What it cannot do
ends it, and so the engine.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import torch

from loraplex.cpu import CpuUse
from loraplex.distributed import RankGroup
from loraplex.errors import EngineError, LoraplexError
from loraplex.kernels.ops import KernelBackend, get_backend
from loraplex.kernels.plan import SlotTable
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder
from loraplex.models.loader import load_model, read_merged
from loraplex.processes.environment import leave_to_parent
from loraplex.ranks.messages import Join, Logits, Receiver, Step, UseMemory, meet, shared_tensor

LEADERS_PIPE = 0
"""The standard input."""

logger = logging.getLogger("loraplex.ranks.follower")


@dataclass(frozen=True, slots=True)
class Follower:
    """One rank's model, memory and slot table; the table is None without LoRA."""

    model: Decoder
    kv: torch.Tensor
    table: SlotTable | None
    ranks: RankGroup

    @torch.inference_mode()
    def follow(self, receive: Callable[[], Any]) -> None:
        """Until the leader has ended."""
        while True:
            try:
                message = receive()
            except EOFError:
                return
            if isinstance(message, Step):
                self._step(message)
            else:
                assert isinstance(message, Logits)
                self.model.compute_logits(message.hidden, message.segments)

    def _step(self, message: Step) -> None:
        for change in message.changes:
            assert self.table is not None
            change.apply(self.table, self.ranks.shard)
        hidden = self.model.forward(message.batch(), self.kv)
        if message.logits is not None:
            rows, segments = message.logits
            self.model.compute_logits(hidden[torch.from_numpy(rows)], segments)


def _backend(join: Join) -> KernelBackend:
    config = join.config
    lora_dtype = "auto" if config.lora is None else config.lora.lora_dtype
    return get_backend(config.lora_backend, torch.device("cpu"), lora_dtype, config.attention_backend)


def _load(join: Join, backend: KernelBackend, ranks: RankGroup) -> Decoder:
    config, device = join.config, torch.device("cpu")
    model_config = ModelConfig.from_dir(join.model_path)
    dtype = getattr(torch, model_config.effective_dtype(config.dtype))
    has_lora = config.lora is not None
    path, source, seed = join.model_path, config.load_format, config.seed
    merged = read_merged(config, model_config, dtype, backend)
    return load_model(
        path,
        model_config,
        dtype,
        device,
        source,
        seed,
        backend,
        has_lora,
        quantization=config.quantization,
        merged=merged,
        ranks=ranks,
    )


def _with_memory(
    join: Join, memory: UseMemory, arena: torch.Tensor, model: Decoder, backend: KernelBackend, ranks: RankGroup
) -> Follower:
    model_config = model.config
    kv = arena.view(memory.kv_dtype).view(memory.kv_shape)
    backend.reserve_workspace(memory.max_tokens)
    heads, windows = model_config.num_attention_heads, model_config.sliding_windows
    rule = model_config.attention_softcap, model_config.family.has_sinks
    backend.choose_attention(heads, model.activation_dtype, kv, windows, *rule)
    table = None
    if memory.num_slots:
        table = SlotTable(model.lora_targets(), memory.num_slots, arena)
        model.bind_lora(table, backend)
        assert join.config.lora is not None
        backend.expect_adapters(table, model.activation_dtype, join.config.lora.max_lora_rank or 0)
    return Follower(model, kv, table, ranks)


def main(arena_file: int, mailbox: int, board: int) -> int:
    leave_to_parent()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    receiver = Receiver(mailbox, LEADERS_PIPE)
    try:
        join: Join = receiver.receive()
        torch.set_num_threads(join.num_threads)
        backend = _backend(join)
        _answer(answers)
        ranks = RankGroup(join.shard, meet(join, backend, board, [LEADERS_PIPE]), join.is_fully_sharded)
        _answer(answers)
        model = _load(join, backend, ranks)
        memory: UseMemory = receiver.receive()
        follower = _with_memory(join, memory, shared_tensor(arena_file, memory.num_bytes), model, backend, ranks)
        _answer(answers)
    except (EOFError, BrokenPipeError):
        return 0
    except Exception as error:
        if not isinstance(error, LoraplexError):
            logger.exception("a rank of the model cannot start")
            error = EngineError(f"a rank of the model cannot start: {type(error).__name__}: {error}")
        _answer(answers, error.to_payload())
        return 1
    if model.cpu_use(CpuUse()).num_threads:
        torch.set_num_threads(1)  # as ModelRunner.threads has it
    try:
        follower.follow(receiver.receive)
    except Exception as error:  # another rank has ended, or this one cannot go on: the leader sees either
        logger.error("rank %d of the model ends: %s: %s", join.shard.rank, type(error).__name__, error)
        return 1
    return 0


def _answer(answers: IO[bytes], error: Any = None) -> None:
    pickle.dump(error, answers)
    answers.flush()
