"""What a model's forward gets: tokens, positions, the KV blocks of its sequences, and the LoRA plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from loraplex.kernels.plan import LoraPlan


@dataclass(frozen=True)
class AttentionPlan:
    """Where the keys and values of a step's sequences are. B sequences, T token rows, sequence by sequence.

    q_indptr int32 [B+1]: rows of sequence i are [q_indptr[i], q_indptr[i+1]); context_lens int32 [B]: tokens in the KV
    cache after this step; block_tables int32 [B, max_blocks] (entries past a context are not read); kv_slot_mapping
    int64 [T]: block * block_size + offset of each new token. query_lens and context_lens_host are the same lengths on
    the host. The i-th query of a sequence is at position context_len - query_len + i and sees keys up to its own
    position.
    """

    q_indptr: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    kv_slot_mapping: torch.Tensor
    query_lens: tuple[int, ...]
    context_lens_host: tuple[int, ...]
    block_size: int
    scratch: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """What a backend derives from this plan once for all layers (indices, masks)."""


class LayerGate(Protocol):
    """Where a step waits for adapters whose weights are still on their way to the device, layer by layer."""

    def wait_for_layer(self, layer: int) -> None:
        """Kernels launched from now on begin when what the step reads of this layer is there; the host goes on."""
        ...

    def wait_for_all(self) -> None:
        """The same for every layer: for a step that is replayed as a whole."""
        ...


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What a model's forward gets: token_ids int64 [T], positions int64 [T], logits_indices int64 [n] (sampled rows).

    lora is None when no row goes through an adapter. gate is None when all adapters of the step are there: always on a
    CPU. rope_factors: float32 [T], what each token divides the rotary frequencies by; None: all as the base does.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionPlan
    lora: LoraPlan | None
    logits_indices: torch.Tensor
    gate: LayerGate | None = None
    rope_factors: torch.Tensor | None = None


LayersForward = Callable[[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor, StepBatch], torch.Tensor]
"""x [T, hidden], (cos, sin), kv, batch -> [T, hidden]: all layers of a model."""
