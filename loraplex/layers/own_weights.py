"""What an adapter has of its own beside deltas, as the layers read it from the arena: whole weights, and rows of them.

    linear, head   weight [rows, in] in the form of LayerOps.own_weight; of a head the rows of `row_ids`
    embedding      weight [rows, hidden] row-major, the rows of `row_ids`; A^T [vocabulary, rank] row-major, and
                   B [hidden, rank] in the form of LayerOps.own_weight
    norm           weight [size]

These parts lie in the packed block behind those of the backend (memory/weights/own_packing.py). No kernel reads them
by the slot table: steps that need them run them one call a segment, outside of captured steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from loraplex.core import LoraTarget, ShardKind
from loraplex.distributed import NO_TOKEN
from loraplex.kernels.plan import NOT_OF_KERNELS, LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.protocols import LayerOps, LinearWeight
from loraplex.kernels.slices import ABSENT, SliceLayout, own_weight_shape


@dataclass(frozen=True, slots=True)
class OwnParts:
    """Of one slice; None for what the adapter does not have. lora_a is A^T and scale its factor, of embeddings alone.

    num_shared: of `row_ids`, how many are tokens of the base's vocabulary; they come first, and each token behind it
    has its row. Of several ranks each numbers its own tokens (loraplex/distributed.py); `weight` may have more rows
    than `row_ids`, of no token.
    """

    slice_index: int
    weight: LinearWeight
    num_rows: int
    row_ids: torch.Tensor | None
    num_shared: int
    lora_a: torch.Tensor | None = None
    lora_b: LinearWeight | None = None
    scale: float = 0.0


def own_parts(table: SlotTable, ops: LayerOps, first_row: int, lora_slot: int) -> tuple[OwnParts, ...]:
    """Of the slices of one target that have any; made once per block and kept in the table until it changes."""
    cache = table.derived[lora_slot]
    cached: tuple[OwnParts, ...] | None = cache.get(~first_row)
    if cached is None:
        cached = cache[~first_row] = tuple(_make_parts(table, ops, first_row, lora_slot))
    return cached


def own_segments(
    plan: LoraPlan | None, table: SlotTable, ops: LayerOps, first_row: int, slots: set[int]
) -> Iterator[tuple[LoraSegment, OwnParts]]:
    """The segments of a plan whose adapter is in `slots`, with what it has there."""
    for segment in () if plan is None else plan.segments:
        if segment.lora_slot in slots:
            for parts in own_parts(table, ops, first_row, segment.lora_slot):
                yield segment, parts


def _make_parts(table: SlotTable, ops: LayerOps, first_row: int, lora_slot: int) -> Iterator[OwnParts]:
    placed = table.placed(first_row, lora_slot)
    if placed is None:
        return
    target, (start, layouts) = table.target_at(first_row), placed
    for index, layout in enumerate(layouts):
        if layout is not None and (layout.has_weight or (target.kind is ShardKind.EMBEDDING and layout.rank)):
            yield _parts_of(table, ops, target, lora_slot, index, start, layout)


def _parts_of(
    table: SlotTable, ops: LayerOps, target: LoraTarget, lora_slot: int, index: int, start: int, layout: SliceLayout
) -> OwnParts:
    weight: LinearWeight | None = None
    is_embedding = target.kind is ShardKind.EMBEDDING
    if layout.weight_dtype is not None:
        shape = own_weight_shape(target, index, layout.num_rows)
        is_of_kernels = target.kind not in NOT_OF_KERNELS
        stored_shape = ops.own_shape(*shape) if is_of_kernels else shape
        stored = table.part(start, layout.weight_offset, layout.weight_dtype, *stored_shape)
        assert stored is not None
        weight = ops.own_weight(stored, *shape) if is_of_kernels else stored
    row_ids, num_rows = table.part(start, layout.row_ids_offset, torch.int64, layout.num_rows), layout.num_rows
    vocab_size = target.full_in_features if is_embedding else target.slices[index].full_out_features
    num_shared = min(num_rows, vocab_size)
    if row_ids is not None:  # with one rank they are not read here: a device would be waited for
        shard = target.shard
        if shard.size > 1:
            num_rows = int((row_ids != NO_TOKEN).sum())
            row_ids, weight = row_ids[:num_rows], weight if num_rows else None
        num_added = max(0, table.vocab_sizes.get(lora_slot, 0) - vocab_size)
        num_shared = num_rows - (num_added if shard.rank == shard.size - 1 else 0)
    lora_a = lora_b = None
    if is_embedding and layout.a_offset != ABSENT:
        hidden_size = target.slices[index].out_features
        lora_a = table.part(start, layout.a_offset, layout.dtype, target.in_features, layout.rank)
        stored = table.part(start, layout.b_offset, layout.dtype, *ops.own_shape(hidden_size, layout.rank))
        assert stored is not None
        lora_b = ops.own_weight(stored, hidden_size, layout.rank)
    return OwnParts(index, weight, num_rows, row_ids, num_shared, lora_a, lora_b, layout.scale)
