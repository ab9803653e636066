"""What an adapter has for one slice: as tensors, and where a backend put them inside a packed block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from loraplex.core import LoraTarget, ShardKind

ALIGNMENT = 64
"""Bytes to which packed blocks and their parts are aligned: a cache line, and the widest vector."""

ABSENT = -1
"""Offset of a part that a packed block does not have."""

DTYPE_CODES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float64: 3,
    torch.int8: 4,
}
"""How the slot table writes the dtype of a packed block."""


def align(nbytes: int) -> int:
    """`nbytes` rounded up to ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class SliceWeights:
    """What one adapter brings to one slice: `y <- gain (y + scaling (x A^T) B^T) + bias`, after x <- input_gain x.

    lora_a [rank, in] and lora_b [out, rank] come together or not at all; bias [out] is additive and already scaled.
    gain [out] and input_gain [in] are float32; None is 1. input_gain acts on the base's product, too; in targets of
    several slices there are no A and B beside it.

    weight is the adapter's own, in place of the base's: [out, in] of a linear, [hidden] of a norm, rows [n, hidden] of
    an embedding or a head. row_ids int64 [n], ascending: which tokens these rows are of; None: of 0 to n - 1.
    """

    lora_a: torch.Tensor | None
    lora_b: torch.Tensor | None
    bias: torch.Tensor | None
    scaling: float
    gain: torch.Tensor | None = None
    input_gain: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    row_ids: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return 0 if self.lora_a is None else self.lora_a.shape[0]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        parts = (self.lora_a, self.lora_b, self.bias, self.gain, self.input_gain, self.weight, self.row_ids)
        return tuple(t for t in parts if t is not None)


@dataclass(frozen=True, slots=True)
class SliceLayout:
    """Where a backend put one slice inside its packed block: byte offsets from the block's start, or ABSENT.

    num_rows, weight_dtype: of the adapter's own weight (own_weights.py); row_ids are int64 [num_rows].
    """

    a_offset: int
    b_offset: int
    bias_offset: int
    rank: int
    scale: float
    dtype: torch.dtype
    gain_offset: int = ABSENT
    input_gain_offset: int = ABSENT
    weight_offset: int = ABSENT
    row_ids_offset: int = ABSENT
    num_rows: int = 0
    weight_dtype: torch.dtype | None = None

    @property
    def offsets(self) -> tuple[int, int, int, int, int]:
        """Of A, B, bias, gain and input gain: the order of the slot table's addresses."""
        return self.a_offset, self.b_offset, self.bias_offset, self.gain_offset, self.input_gain_offset

    @property
    def has_delta(self) -> bool:
        """Whether there is more than an own weight."""
        return any(offset != ABSENT for offset in self.offsets)

    @property
    def has_weight(self) -> bool:
        return self.weight_offset != ABSENT


class SliceView(NamedTuple):
    """The parts of one slice as tensors over the arena's memory (stock row-major layout)."""

    lora_a: torch.Tensor | None
    lora_b: torch.Tensor | None
    bias: torch.Tensor | None
    scale: float
    gain: torch.Tensor | None
    input_gain: torch.Tensor | None


def own_weight_shape(target: LoraTarget, slice_index: int, num_rows: int) -> tuple[int, ...]:
    """Of the adapter's own weight of one slice."""
    out_features = target.slices[slice_index].out_features
    if target.kind is ShardKind.NORM:
        return (out_features,)
    if target.kind is ShardKind.EMBEDDING:
        return num_rows, out_features
    return num_rows, target.in_features


def has_shared_input(layouts: Sequence[SliceLayout | None]) -> bool:
    """Whether a slice has a gain on an input that others have, too."""
    return len(layouts) > 1 and any(each is not None and each.input_gain_offset != ABSENT for each in layouts)
