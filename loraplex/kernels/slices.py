"""What an adapter has for one slice: as tensors, where a backend put them inside a packed block, and what the slot
table keeps of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

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

    rank_scale [rank] and out_scale [out], float32, come together and without lora_a and lora_b: A and B are then those
    of the adapter's projections (ProjectionsLayout), cut to this slice, and y <- y + out_scale ((rank_scale (x A^T))
    B^T).

    is_exchanged: A and B are cut finer than their linear, over the ranks of a model (loraplex/distributed.py). Then A
    has rank / ranks rows, or B out / ranks; `rank` is that of all.

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
    rank_scale: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None
    is_exchanged: bool = False

    @property
    def rank(self) -> int:
        if self.lora_b is not None:
            return self.lora_b.shape[1]
        return 0 if self.rank_scale is None else self.rank_scale.shape[0]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        parts = (self.lora_a, self.lora_b, self.bias, self.gain, self.input_gain, self.weight, self.row_ids)
        return tuple(t for t in (*parts, self.rank_scale, self.out_scale) if t is not None)


@dataclass(frozen=True, slots=True)
class SliceLayout:
    """Where a backend put one slice inside its packed block: byte offsets from the block's start, or ABSENT.

    num_rows, weight_dtype: of the adapter's own weight (own_weights.py); row_ids are int64 [num_rows]. scales_offset:
    of rank_scale [rank] and, on the next multiple of 64 bytes, out_scale [out]; A and B are the projections' then.
    is_exchanged: as in SliceWeights.
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
    scales_offset: int = ABSENT
    is_exchanged: bool = False

    @property
    def offsets(self) -> tuple[int, int, int, int, int]:
        """Of A, B, bias, gain and input gain: the order of the slot table's addresses."""
        return self.a_offset, self.b_offset, self.bias_offset, self.gain_offset, self.input_gain_offset

    @property
    def has_delta(self) -> bool:
        """Whether there is more than an own weight."""
        return self.is_shared or any(offset != ABSENT for offset in self.offsets)

    @property
    def is_shared(self) -> bool:
        """Whether A and B are the projections'."""
        return self.scales_offset != ABSENT

    @property
    def out_scale_offset(self) -> int:
        return ABSENT if self.scales_offset == ABSENT else self.scales_offset + align(4 * self.rank)

    @property
    def has_weight(self) -> bool:
        return self.weight_offset != ABSENT


@dataclass(frozen=True, slots=True)
class ProjectionsLayout:
    """One pair A [rank, in_features], B [out_features, rank] for all slices of an adapter, and of all adapters that
    have an equal one (`digest`). It lies in an extent of its own: A at its start, B at b_offset, in `dtype`.

    A slice reads A's first inputs and B's first outputs, so a backend lays both out such that these come first.
    """

    digest: str
    rank: int
    in_features: int
    out_features: int
    dtype: torch.dtype
    b_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PlacedProjections:
    """Projections at byte `offset` of a buffer."""

    offset: int
    layout: ProjectionsLayout

    @property
    def offsets(self) -> tuple[int, int]:
        """Of A and B."""
        return self.offset, self.offset + self.layout.b_offset


class SliceView(NamedTuple):
    """The parts of one slice as tensors over the arena's memory (stock row-major layout)."""

    lora_a: torch.Tensor | None
    lora_b: torch.Tensor | None
    bias: torch.Tensor | None
    scale: float
    gain: torch.Tensor | None
    input_gain: torch.Tensor | None
    rank_scale: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None


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


# ---------------------------------------------------------------------------------------------------- what is in a slot


Facts = tuple[int, frozenset[torch.dtype], bool, bool]
"""Of blocks, what `SlotTable.expect` is told: largest rank, dtypes, whether there are gains, and input gains."""


def facts_of(layouts: Iterable[SliceLayout | None]) -> Facts:
    present = [layout for layout in layouts if layout is not None and layout.has_delta]
    return (
        max((layout.rank for layout in present), default=0),
        frozenset(layout.dtype for layout in present),
        any(layout.gain_offset != ABSENT for layout in present),
        any(layout.input_gain_offset != ABSENT for layout in present),
    )


Blocks = Sequence[tuple[str, Sequence[SliceLayout | None]]]
"""(target's name, layouts of its slices)"""


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A packed block in the buffer."""

    offset: int
    layouts: tuple[SliceLayout | None, ...]


@dataclass(frozen=True)
class SlotImage:
    """What the rows of an adapter hold but for where it lies: once for all that are packed alike (`SlotTable.image`).
    One entry for each slice that the adapter has: rows [n] of the table, blocks [n] (index of its block), offsets [6,
    n] of its parts inside the block (`SliceLayout.offsets`, then scales_offset), is_shared [n], and rank, scale, dtype,
    is_exchanged [n]. first_rows, layouts: one per block. special_blocks: (first row, layouts) of those with own weights
    or gains of shared inputs, of embeddings and of heads. vocab_size, rope_factor: as in `SlotTable.vocab_sizes` and
    `rope_factors`. projections: where A and B of the slices that share them are.
    """

    rows: NDArray[np.int64]
    blocks: NDArray[np.int64]
    offsets: NDArray[np.int64]
    is_shared: NDArray[np.bool_]
    values: tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]
    first_rows: tuple[int, ...]
    layouts: tuple[tuple[SliceLayout | None, ...], ...]
    facts: Facts
    special_blocks: tuple[tuple[int, tuple[SliceLayout | None, ...]], ...] = ()
    vocab_size: int | None = None
    rope_factor: float | None = None
    projections: ProjectionsLayout | None = None
