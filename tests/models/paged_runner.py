"""Runs a decoder on hand-made steps over a KV cache whose free memory is NaN, as the engine does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from loraplex.kernels.ops import get_backend
from loraplex.kernels.plan import LoraPlan
from loraplex.kernels.step_batch import AttentionPlan, StepBatch
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder
from loraplex.models.loader import load_model

CPU = torch.device("cpu")
POISON = 0xFF
"""A byte that makes NaN of every float dtype, and of a scale."""


def load_decoder(
    path: Path, *, backend: str = "torch", dtype: torch.dtype = torch.float32, enable_lora: bool = False
) -> Decoder:
    config = ModelConfig.from_dir(path)
    return load_model(path, config, dtype, CPU, "auto", 0, get_backend(backend, CPU), enable_lora)


class PagedRunner:
    """Sequences by name. Blocks are handed out in random order, so that no sequence lies in one piece."""

    def __init__(
        self,
        model: Decoder,
        block_size: int = 8,
        num_blocks: int = 64,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.block_size = block_size
        kv_dtype = kv_dtype or model.dtype
        self.kv = torch.empty(model.kv_shape(num_blocks, block_size, kv_dtype), dtype=kv_dtype)
        self.kv.view(torch.uint8).fill_(POISON)
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    @torch.inference_mode()
    def step(self, parts: Sequence[tuple[str, Sequence[int]]], lora: LoraPlan | None = None) -> list[Tensor]:
        """Feed each named sequence its next tokens; returns the logits [num tokens, vocab] of each part."""
        positions = [list(range(self._lengths.get(name, 0), self._lengths.get(name, 0) + len(t))) for name, t in parts]
        for (name, _), where in zip(parts, positions, strict=True):
            self._grow(name, where[-1] + 1)
        batch = StepBatch(
            token_ids=torch.tensor([t for _, tokens in parts for t in tokens]),
            positions=torch.tensor([p for where in positions for p in where]),
            attention=self._attention_plan([name for name, _ in parts], positions),
            lora=lora,
            logits_indices=torch.empty(0, dtype=torch.int64),
        )
        logits = self.model.compute_logits(self.model.forward(batch, self.kv))
        return list(logits.split([len(t) for _, t in parts]))

    def free(self, name: str) -> None:
        """Give the blocks back as poison."""
        del self._lengths[name]
        for block in self._tables.pop(name):
            self.kv[block].view(torch.uint8).fill_(POISON)
            self._free.insert(0, block)

    def _grow(self, name: str, length: int) -> None:
        table = self._tables.setdefault(name, [])
        while len(table) * self.block_size < length:
            table.append(self._free.pop())
        self._lengths[name] = length

    def _attention_plan(self, names: Sequence[str], positions: Sequence[Sequence[int]]) -> AttentionPlan:
        tables = [self._tables[name] for name in names]
        width = max(map(len, tables))
        query_lens = tuple(map(len, positions))
        context_lens = tuple(self._lengths[name] for name in names)
        slots = [
            table[p // self.block_size] * self.block_size + p % self.block_size
            for table, where in zip(tables, positions, strict=True)
            for p in where
        ]
        return AttentionPlan(
            q_indptr=torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            context_lens=torch.tensor(context_lens, dtype=torch.int32),
            block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
            kv_slot_mapping=torch.tensor(slots),
            query_lens=query_lens,
            context_lens_host=context_lens,
            block_size=self.block_size,
        )
