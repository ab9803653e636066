"""add_lora through projections that several adapters share: against float64, beside other kinds, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core import LoraTarget
from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.ops import KernelBackend
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.slices import ProjectionsLayout, SliceWeights
from tests.kernels.cases import (
    BACKENDS,
    BF16,
    FP16,
    FP32,
    POISON,
    assert_close,
    make_target,
    make_weights,
    same_bits,
)
from tests.kernels.native.machine import assert_same_on_every_isa, assert_same_on_threads

IDS: Any = {"ids": lambda backend: backend.name}


@dataclass(frozen=True)
class Pair:
    """The A and B that adapters share."""

    lora_a: torch.Tensor
    lora_b: torch.Tensor

    @classmethod
    def draw(cls, rank: int, widths: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Pair:
        lora_a = torch.randn(rank, widths[0], generator=generator) / widths[0] ** 0.5
        return cls(lora_a.to(dtype), (torch.randn(widths[1], rank, generator=generator) / rank**0.5).to(dtype))


@dataclass(frozen=True)
class Sharer:
    """One adapter: its scales by slice, None for a slice that it lacks; or a plain LoRA, without a pair."""

    slices: tuple[SliceWeights | None, ...]
    pair: Pair | None = None

    @classmethod
    def draw(cls, target: LoraTarget, pair: Pair, generator: torch.Generator, lacks: Sequence[int] = ()) -> Sharer:
        rank = len(pair.lora_a)
        return cls(
            tuple(
                None
                if index in lacks
                else SliceWeights(
                    None,
                    None,
                    None,
                    1.0,
                    rank_scale=torch.randn(rank, generator=generator),
                    out_scale=torch.randn(s.out_features, generator=generator),
                )
                for index, s in enumerate(target.slices)
            ),
            pair,
        )

    def delta(self, index: int, target: LoraTarget, x: torch.Tensor) -> torch.Tensor:
        """Of one slice, in float64."""
        s, width = self.slices[index], target.slices[index].out_features
        if s is None:
            return torch.zeros(len(x), width, dtype=torch.float64)
        if self.pair is None:
            assert s.lora_a is not None
            assert s.lora_b is not None
            return s.scaling * x.double() @ s.lora_a.double().T @ s.lora_b.double().T
        assert s.rank_scale is not None
        assert s.out_scale is not None
        inner = s.rank_scale.double() * (x.double() @ self.pair.lora_a[:, : target.in_features].double().T)
        return s.out_scale.double() * (inner @ self.pair.lora_b[:width].double().T)


def table_of(
    target: LoraTarget, adapters: Sequence[Sharer], backend: KernelBackend, dtype: torch.dtype = FP32
) -> SlotTable:
    """Each pair once, in a poisoned arena."""
    buffer = torch.full((1 << 21,), POISON, dtype=torch.uint8)
    table, cursor = SlotTable([target], len(adapters), buffer), 64
    pairs: dict[Pair, tuple[int, ProjectionsLayout]] = {}
    for slot, adapter in enumerate(adapters):
        pair, where, shared = adapter.pair, 0, None
        if pair is not None:
            if pair not in pairs:
                widths = pair.lora_a.shape[1], pair.lora_b.shape[0]
                layout = backend.projections_layout("d", len(pair.lora_a), widths, pair.lora_a.dtype, dtype)
                backend.pack_projections(layout, pair.lora_a, pair.lora_b, buffer[cursor : cursor + layout.nbytes])
                pairs[pair] = cursor, layout
                cursor += layout.nbytes + 64
            where, shared = pairs[pair]
        nbytes = backend.packed_nbytes(adapter.slices, dtype)
        layouts = backend.pack(adapter.slices, dtype, buffer[cursor : cursor + nbytes])
        table.set_image(slot, table.image([(target.name, layouts)], projections=shared), [cursor], where)
        cursor += nbytes + 64
    assert cursor < len(buffer)
    return table


def add(
    backend: KernelBackend, table: SlotTable, x: torch.Tensor, y: torch.Tensor, segments: Sequence[LoraSegment]
) -> torch.Tensor:
    got = y.clone()
    plan = LoraPlan.build(segments, len(x), capacity=len(segments) + 1)
    backend.add_lora(got, x, plan, table, 0, table.targets[0].slices)
    return got


def expected(
    adapters: Sequence[Sharer], target: LoraTarget, x: torch.Tensor, y: torch.Tensor, segments: Sequence[LoraSegment]
) -> torch.Tensor:
    out = y.double()
    for segment in segments:
        rows = slice(segment.start, segment.end)
        for index, s in enumerate(target.slices):
            delta = adapters[segment.lora_slot].delta(index, target, x[rows])
            out[rows, s.out_offset : s.out_offset + s.out_features] += segment.weight * delta
    return out


SHAPES = [(64, (64,)), (37, (51,)), (100, (96, 24, 24)), (57, (130, 131))]


@st.composite
def batches(draw: st.DrawFn) -> tuple[LoraTarget, list[Sharer], list[LoraSegment], int]:
    """Adapters of two pairs and plain ones, in any order of slots; gaps are base rows."""
    shape = draw(st.sampled_from(SHAPES))
    rank, dtype = draw(st.sampled_from([1, 4, 5, 16, 17, 64, 70, 200])), draw(st.sampled_from([FP32, BF16, FP16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    target = make_target(*shape)
    widths = shape[0] + draw(st.integers(0, 70)), max(shape[1]) + draw(st.integers(0, 70))
    pairs = [Pair.draw(rank, widths, dtype, generator) for _ in range(2)]
    adapters = []
    for _ in range(draw(st.integers(1, 6))):
        kind, lacks = draw(st.integers(0, 3)), draw(st.sets(st.integers(0, len(shape[1]) - 1), max_size=1))
        if kind == 3:
            adapters.append(Sharer(make_weights(target, [3] * len(shape[1]), dtype, False, generator)))
        else:
            adapters.append(Sharer.draw(target, pairs[kind // 2], generator, lacks if len(shape[1]) > 1 else ()))
    segments, at = [], 0
    for slot in draw(st.lists(st.integers(0, len(adapters) - 1), min_size=1, max_size=20)):
        start = at + draw(st.sampled_from([0, 0, 0, 1]))
        at = start + draw(st.sampled_from([1, 1, 1, 2, 40]))
        segments.append(LoraSegment(start, at, slot, draw(st.sampled_from([1.0, 1.0, -0.5]))))
    return target, adapters, segments, at + 1


@pytest.mark.parametrize("backend", BACKENDS, **IDS)
@settings(max_examples=60, deadline=None)
@given(batch=batches(), seed=st.integers(0, 9))
def test_equals_float64(backend: KernelBackend, batch: Any, seed: int) -> None:
    target, adapters, segments, num_tokens = batch
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, target.in_features, generator=generator)
    y = torch.randn(num_tokens, sum(s.out_features for s in target.slices), generator=generator)
    got = add(backend, table_of(target, adapters, backend), x, y, segments)
    assert_close(got, expected(adapters, target, x, y, segments))
    is_base = torch.ones(num_tokens, dtype=torch.bool)
    for segment in segments:
        is_base[segment.start : segment.end] = False
    assert same_bits(got[is_base], y[is_base])


@pytest.mark.parametrize("backend", [each for each in BACKENDS if isinstance(each, NativeBackend)], **IDS)
@settings(max_examples=60, deadline=None)
@given(batch=batches(), seed=st.integers(0, 9))
def test_a_row_alone_has_the_bits_that_it_has_in_any_batch(backend: KernelBackend, batch: Any, seed: int) -> None:
    target, adapters, segments, num_tokens = batch
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, target.in_features, generator=generator)
    y = torch.randn(num_tokens, sum(s.out_features for s in target.slices), generator=generator)
    table = table_of(target, adapters, backend)
    got = add(backend, table, x, y, segments)
    for segment in segments:
        for row in range(segment.start, min(segment.end, segment.start + 3)):
            alone = [LoraSegment(0, 1, segment.lora_slot, segment.weight)]
            assert same_bits(add(backend, table, x[row : row + 1], y[row : row + 1], alone)[0], got[row])


def sixteen() -> tuple[LoraTarget, list[Sharer], list[LoraSegment]]:
    """16 adapters of one pair, each one row, as in a decode step."""
    generator = torch.Generator().manual_seed(1)
    target = make_target(576, (576, 192, 192))
    pair = Pair.draw(16, (1536, 1536), FP32, generator)
    adapters = [Sharer.draw(target, pair, generator) for _ in range(16)]
    return target, adapters, [LoraSegment(slot, slot + 1, slot) for slot in range(16)]


@pytest.mark.parametrize("native", [each for each in BACKENDS if isinstance(each, NativeBackend)], **IDS)
def test_threads_and_instruction_sets_give_equal_bits(native: NativeBackend) -> None:
    target, adapters, segments = sixteen()
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(16, 576, generator=generator), torch.randn(16, 960, generator=generator)

    def made(backend: Any) -> tuple[torch.Tensor, ...]:
        return (add(backend, table_of(target, adapters, backend), x, y, segments),)

    assert_same_on_every_isa(made)
    assert_same_on_threads(native, made)


@pytest.mark.parametrize("backend", BACKENDS, **IDS)
def test_rows_in_several_segments_are_a_sum(backend: KernelBackend) -> None:
    """A mix of adapters that share, and of one that does not."""
    generator = torch.Generator().manual_seed(3)
    target = make_target(40, (24, 9))
    pair = Pair.draw(6, (64, 80), FP32, generator)
    adapters = [Sharer.draw(target, pair, generator) for _ in range(2)]
    adapters.append(Sharer(make_weights(target, (4, 2), FP32, False, generator)))
    segments = [LoraSegment(1, 7, 0, 0.25), LoraSegment(3, 5, 1, -1.5), LoraSegment(0, 4, 2, 2.0)]
    x, y = torch.randn(9, 40, generator=generator), torch.randn(9, 33, generator=generator)
    got = add(backend, table_of(target, adapters, backend), x, y, segments)
    assert_close(got, expected(adapters, target, x, y, segments))


@pytest.mark.parametrize("backend", BACKENDS, **IDS)
def test_a_block_that_moves_keeps_its_projections(backend: KernelBackend) -> None:
    target, adapters, segments = sixteen()
    table = table_of(target, adapters, backend)
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(16, 576, generator=generator), torch.randn(16, 960, generator=generator)
    before = add(backend, table, x, y, segments)
    placed = table.placed(0, 5)
    assert placed is not None
    offset, layouts = placed
    nbytes = backend.packed_nbytes(adapters[5].slices, FP32)
    target_offset = table.buffer.numel() - nbytes - table.buffer.numel() % 64
    table.buffer[target_offset:][:nbytes] = table.buffer[offset:][:nbytes].clone()
    table.buffer[offset:][:nbytes] = POISON
    table.set_block(target.name, 5, target_offset, layouts)
    assert same_bits(add(backend, table, x, y, segments), before)
    table.clear_slot(5)
    assert same_bits(add(backend, table, x, y, segments)[5], y[5])


@pytest.mark.parametrize("backend", BACKENDS, **IDS)
def test_unpacked_scales_are_those_that_were_packed(backend: KernelBackend) -> None:
    target, adapters, _ = sixteen()
    slices = (adapters[0].slices[0], None, make_weights(target, (None, None, 3), FP32, False, torch.Generator())[2])
    block = torch.full((backend.packed_nbytes(slices, FP32),), POISON, dtype=torch.uint8)
    layouts = backend.pack(slices, FP32, block)
    assert layouts == backend.packed_layouts(slices, FP32)
    unpacked = backend.unpack(layouts, target.in_features, [s.out_features for s in target.slices], block)
    assert unpacked[1] is None
    for found, packed in zip(unpacked, slices, strict=True):
        if found is not None and packed is not None:
            assert len(found.tensors) == len(packed.tensors) == 2
            assert all(map(same_bits, found.tensors, packed.tensors))
    again = torch.full_like(block, POISON)
    assert backend.pack(unpacked, FP32, again) == layouts
    assert torch.equal(again, block)
