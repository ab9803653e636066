"""How much faster each operator of the running backend is than its fallback, on the shapes of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loraplex.kernels.ops import KernelBackend
from loraplex.metrics import KernelSpeedup


@dataclass(frozen=True, slots=True)
class KernelShapes:
    """A decode step of `num_rows` sequences with `context_len` tokens each, over `num_adapters` adapters of one rank.

    dtype: of the model's weights.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    num_rows: int = 16
    num_adapters: int = 8
    rank: int = 16
    context_len: int = 128
    block_size: int = 16


def measure_speedups(backend: KernelBackend, shapes: KernelShapes, max_s: float = 0.5) -> tuple[KernelSpeedup, ...]:
    """One entry for each operator that has a kernel in `backend`; none where stock torch runs. At most about `max_s` in all."""
    raise NotImplementedError
