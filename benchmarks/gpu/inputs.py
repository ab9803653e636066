"""Inputs of the kernels on any device: adapters in an arena, batches by popularity, sequences in a paged KV cache."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from loraplex.core import LoraTarget
from loraplex.kernels.ops import KernelBackend
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotImage, SlotTable
from loraplex.kernels.slices import SliceLayout, SliceWeights, align
from loraplex.kernels.step_batch import AttentionPlan

POISON = 0xFF
"""A byte that makes NaN of every float."""

POPULARITIES = ("distinct", "uniform", "skewed", "identical")
BLOCK_SIZE = 16

Layouts = tuple[SliceLayout | None, ...]


# ------------------------------------------------------------------------------------------------------------- adapters


@dataclass(frozen=True)
class Packed:
    """One adapter's block for one target, on the host. weights: what the block holds, exactly (int8 blocks round)."""

    block: torch.Tensor
    layouts: Layouts
    weights: tuple[SliceWeights | None, ...]


def draw_weights(
    target: LoraTarget,
    rank: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    has_bias: bool = False,
    has_gains: bool = False,
) -> tuple[SliceWeights | None, ...]:
    """A random adapter whose update is about as large as its input. Gains: of inputs too, where there is one slice."""

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])).to(dtype)

    def draw_gain(size: int, is_there: bool = has_gains) -> torch.Tensor | None:
        return 1 + torch.randn(size, generator=generator) / 2 if is_there else None

    return tuple(
        SliceWeights(
            draw(rank, target.in_features),
            draw(s.out_features, rank),
            draw(1, s.out_features)[0] if has_bias else None,
            float(2 ** torch.randint(-1, 2, (), generator=generator)),
            draw_gain(s.out_features),
            draw_gain(target.in_features, has_gains and len(target.slices) == 1),
        )
        for s in target.slices
    )


def shape_of_weights(target: LoraTarget, rank: int, dtype: torch.dtype) -> tuple[SliceWeights | None, ...]:
    """The same without numbers, on the meta device."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    return tuple(
        SliceWeights(empty(rank, target.in_features), empty(s.out_features, rank), None, 1.0) for s in target.slices
    )


def pack(
    backend: KernelBackend, target: LoraTarget, weights: tuple[SliceWeights | None, ...], dtype: torch.dtype
) -> Packed:
    """dtype: the model's."""
    block = torch.zeros(backend.packed_nbytes(weights, dtype), dtype=torch.uint8)
    layouts = backend.pack(weights, dtype, block)
    outs = [s.out_features for s in target.slices]
    return Packed(block, layouts, backend.unpack(layouts, target.in_features, outs, block))


def make_table(
    targets: Sequence[LoraTarget], blocks: Sequence[Sequence[Packed]], device: torch.device, capacity: int | None = None
) -> SlotTable:
    """A poisoned arena with adapter `slot`'s block of target i, blocks[slot][i], in it; equal blocks are not shared."""
    size = sum(align(packed.block.numel()) + 64 for of_slot in blocks for packed in of_slot)
    buffer = torch.full((size + 64,), POISON, dtype=torch.uint8, device=device)
    table = SlotTable(targets, capacity or len(blocks), buffer)
    on_device: dict[int, torch.Tensor] = {}
    images: dict[tuple[int, ...], SlotImage] = {}
    cursor = -buffer.data_ptr() % 64
    for slot, of_slot in enumerate(blocks):
        offsets = []
        for packed in of_slot:
            if id(packed) not in on_device:
                on_device[id(packed)] = packed.block.to(device)
            source = on_device[id(packed)]
            buffer[cursor : cursor + source.numel()].copy_(source)
            offsets.append(cursor)
            cursor += align(source.numel()) + 64
        kinds = tuple(id(packed.layouts) for packed in of_slot)
        if kinds not in images:
            names = [(target.name, packed.layouts) for target, packed in zip(targets, of_slot, strict=True)]
            images[kinds] = table.image(names)
        table.set_image(slot, images[kinds], offsets)
    table.flush()
    return table


def empty_table(
    backend: KernelBackend, targets: Sequence[LoraTarget], ranks: Sequence[int], dtype: torch.dtype
) -> SlotTable:
    """Rows as if adapters of these ranks were there, on the CPU: for what looks at the table and not at weights."""
    shapes = [[shape_of_weights(target, rank, dtype) for target in targets] for rank in ranks]
    sizes = [align(backend.packed_nbytes(one, dtype)) for of_slot in shapes for one in of_slot]
    table = SlotTable(targets, len(ranks), torch.empty(sum(sizes) + 64, dtype=torch.uint8))
    offsets = iter(np.cumsum([0, *sizes]).tolist())
    for slot, of_slot in enumerate(shapes):
        for target, one in zip(targets, of_slot, strict=True):
            table.set_block(target.name, slot, next(offsets), backend.packed_layouts(one, dtype))
    table.flush()
    return table


def draw_slots(popularity: str, batch: int, rng: np.random.Generator) -> list[int]:
    """lora_slot of each row, in slot order and numbered from 0, as Punica draws them: sqrt(batch) adapters, Zipf of
    1.5, all, one."""
    drawn = {
        "distinct": np.arange(batch),
        "uniform": rng.integers(0, math.ceil(math.sqrt(batch)), batch),
        "skewed": rng.zipf(1.5, batch),
        "identical": np.zeros(batch, np.int64),
    }[popularity]
    _, slots = np.unique(drawn, return_inverse=True)
    return sorted(slots.tolist())


def segments_of(slots: Sequence[int]) -> list[LoraSegment]:
    """Runs of equal lora_slot; -1 is in none."""
    segments, start = [], 0
    for slot, run in itertools.groupby(slots):
        end = start + len(list(run))
        if slot >= 0:
            segments.append(LoraSegment(start, end, slot))
        start = end
    return segments


def make_plan(slots: Sequence[int], device: torch.device, is_decode: bool = False) -> LoraPlan:
    """Of one row per entry of `slots`. is_decode: each row is a sequence, and the plan has room for as many
    segments."""
    segments = segments_of(slots)
    capacity = len(slots) if is_decode else max(1, len(segments))
    return LoraPlan.build(segments, len(slots), capacity, device, is_decode)


# ------------------------------------------------------------------------------------------------------------ sequences


def make_attention(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    device: torch.device,
    block_size: int = BLOCK_SIZE,
    rng: np.random.Generator | None = None,
) -> tuple[AttentionPlan, int]:
    """(the plan, number of blocks it needs); with `rng` a sequence's blocks lie anywhere. Context 0: a padded row."""
    counts = [-(-max(1, length) // block_size) for length in context_lens]
    order = np.arange(sum(counts)) if rng is None else rng.permutation(sum(counts))
    tables = np.zeros((len(counts), max(counts)), np.int32)
    slots, cursor = [], 0
    for i, (count, query, context) in enumerate(zip(counts, query_lens, context_lens, strict=True)):
        blocks = order[cursor : cursor + count]
        cursor += count
        if context == 0:
            slots.append(np.full(query, -1))
            continue
        tables[i, :count] = blocks
        positions = np.arange(context - query, context)
        slots.append(blocks[positions // block_size] * block_size + positions % block_size)
    plan = AttentionPlan(
        q_indptr=_tensor(np.cumsum([0, *query_lens]), torch.int32, device),
        context_lens=_tensor(np.array(context_lens), torch.int32, device),
        block_tables=_tensor(tables, torch.int32, device),
        kv_slot_mapping=_tensor(np.concatenate(slots), torch.int64, device),
        query_lens=tuple(query_lens),
        context_lens_host=tuple(context_lens),
        block_size=block_size,
    )
    return plan, sum(counts)


def _tensor(values: np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(dtype).to(device)
