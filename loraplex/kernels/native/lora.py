"""LoRA: the packed block of csrc/lora_layout.h, and one call per linear for all segments and slices of a step."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from loraplex.core import LoraSlice, ShardKind
from loraplex.kernels.native.board import RankBoard
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.plan import LoraPlan, SlotTable
from loraplex.kernels.reference import check_input_gains, check_rows, copy_scales, unpack_gains, unpack_scales
from loraplex.kernels.slices import ABSENT, DTYPE_CODES, ProjectionsLayout, SliceLayout, SliceWeights, align

PART_WIDTH = 8
"""Columns of A and B are rounded up to this."""

OVERREAD_WIDTH = 16
"""A width that is no multiple of this has room for PART_WIDTH more elements behind it."""

PANEL_COLUMNS = {"avx512": 64, "avx2": 64, "neon_dotprod": 64, "neon": 64, "portable": 48}
"""kLoraPanel of csrc/lora_layout.h: columns of a panel, by instruction set."""

NO_SLICE = (0,) * 13

# ------------------------------------------------------------------------------------------------------------- packing


class _SliceShape(NamedTuple):
    """What decides the layout of a slice; sizes are 0 for what it has not."""

    rank: int
    a_rows: int
    b_rows: int
    scaling: float
    bias_size: int
    gain_size: int
    input_gain_size: int
    scale_size: int
    is_exchanged: bool


def block_dtype(slices: Sequence[SliceWeights | None]) -> torch.dtype:
    """The adapter's own dtype: the widest of its A's and B's here, float32 at most. Biases and gains are float32."""
    dtypes = {t.dtype for s in slices if s is not None for t in (s.lora_a, s.lora_b) if t is not None}
    if len(dtypes) == 1:
        (dtype,) = dtypes
    else:
        dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32
    return torch.float32 if dtype == torch.float64 else dtype


def layout_block(slices: Sequence[SliceWeights | None]) -> tuple[int, tuple[SliceLayout | None, ...]]:
    """(bytes of the block, where each slice lies in it). The A's of all slices are one part, at one offset; scales are
    behind all that csrc/lora_pack.cpp writes.

    An input gain beside A and B where there are other slices is an AssertionError.
    """
    check_input_gains(slices)
    in_features = max((s.lora_a.shape[1] for s in slices if s is not None and s.lora_a is not None), default=0)
    shapes = tuple(None if s is None else _shape_of(s) for s in slices)
    return _layout(block_dtype(slices), in_features, shapes)


def _shape_of(s: SliceWeights) -> _SliceShape:
    a_rows, b_rows = (0 if each is None else each.shape[0] for each in (s.lora_a, s.lora_b))
    bias, gain, input_gain, scale = map(_numel, (s.bias, s.gain, s.input_gain, s.out_scale))
    return _SliceShape(s.rank, a_rows, b_rows, s.scaling, bias, gain, input_gain, scale, s.is_exchanged)


def _numel(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()


@functools.lru_cache(maxsize=1024)  # the same for the linears of all layers
def _layout(
    dtype: torch.dtype, in_features: int, shapes: tuple[_SliceShape | None, ...]
) -> tuple[int, tuple[SliceLayout | None, ...]]:
    cursor = _part_bytes(in_features, sum(shape.a_rows for shape in shapes if shape), dtype)
    layouts: list[SliceLayout | None] = []
    for shape in shapes:
        if shape is None:
            layouts.append(None)
            continue
        has_own = shape.a_rows > 0
        b_offset, cursor = cursor, cursor + (_part_bytes(shape.rank, shape.b_rows, dtype) if has_own else 0)
        bias_offset, cursor = cursor, cursor + align(4 * shape.bias_size)
        gain_offset, cursor = cursor, cursor + align(4 * shape.gain_size)
        input_gain_offset, cursor = cursor, cursor + align(4 * shape.input_gain_size)
        layouts.append(
            SliceLayout(
                a_offset=0 if has_own else ABSENT,
                b_offset=b_offset if has_own else ABSENT,
                bias_offset=bias_offset if shape.bias_size else ABSENT,
                rank=shape.rank,
                scale=float(shape.scaling),
                dtype=dtype,
                gain_offset=gain_offset if shape.gain_size else ABSENT,
                input_gain_offset=input_gain_offset if shape.input_gain_size else ABSENT,
                is_exchanged=shape.is_exchanged,
            )
        )
    for index, (layout, shape) in enumerate(zip(layouts, shapes, strict=True)):
        if layout is not None and shape is not None and shape.scale_size:
            layouts[index] = replace(layout, scales_offset=cursor)
            cursor += align(4 * layout.rank) + align(4 * shape.scale_size)
    return cursor, tuple(layouts)


def _part_bytes(depth: int, columns: int, dtype: torch.dtype) -> int:
    if depth == 0 or columns == 0:
        return 0
    width = _part_width(columns)
    return align((depth * width + width % OVERREAD_WIDTH) * dtype.itemsize)


def _part_width(columns: int) -> int:
    return -(-columns // PART_WIDTH) * PART_WIDTH


def panel_columns(library: NativeLibrary) -> int:
    return PANEL_COLUMNS[library.isa]


def pack(
    library: NativeLibrary, slices: Sequence[SliceWeights | None], out: torch.Tensor
) -> tuple[SliceLayout | None, ...]:
    """Write the block to the start of `out`, on the calling thread. ValueError when it does not fit."""
    nbytes, layouts = layout_block(slices)
    if out.numel() < nbytes:
        raise ValueError(f"a packed block of {nbytes} bytes does not fit in {out.numel()}")
    if nbytes == 0:
        return layouts
    alive: list[tuple[torch.Tensor | None, ...]] = []
    sources, in_features, dtype = array("q"), 0, torch.float32
    for s, layout in zip(slices, layouts, strict=True):
        if s is None or layout is None or layout.is_shared:
            sources.extend(NO_SLICE)
            continue
        dtype = layout.dtype
        vectors = [None if t is None else t.to(torch.float32).contiguous() for t in (s.bias, s.gain, s.input_gain)]
        addresses = [0 if vector is None else vector.data_ptr() for vector in vectors]
        in_features = max(in_features, _numel(s.input_gain))
        alive.append(tuple(vectors))
        if s.lora_a is None or s.lora_b is None:
            sources.extend((0, 0, *addresses, 0, 0, 0, 0, 0, max(_numel(s.bias), _numel(s.gain)), 0, 0))
            continue
        a, b = _rows(s.lora_a), _rows(s.lora_b)
        in_features = a.size(1)
        codes = DTYPE_CODES[a.dtype], DTYPE_CODES[b.dtype]
        strides = a.stride(0), b.stride(0)
        widest = max(_numel(s.bias), _numel(s.gain), len(b))
        sources.extend((a.data_ptr(), b.data_ptr(), *addresses, *strides, *codes, layout.rank, widest, len(a), len(b)))
        alive.append((a, b))
    library.functions.loraplex_pack_lora(
        DTYPE_CODES[dtype], sources.buffer_info()[0], len(slices), in_features, out.data_ptr()
    )
    for s, layout in zip(slices, layouts, strict=True):
        if s is not None and layout is not None:
            copy_scales(s, out, layout)
    return layouts


def _rows(matrix: torch.Tensor) -> torch.Tensor:
    """The same matrix with dense rows, in a dtype that the kernels read."""
    if matrix.dtype == torch.float64:
        matrix = matrix.to(torch.float32)
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def unpack(
    library: NativeLibrary,
    layouts: Sequence[SliceLayout | None],
    in_features: int,
    out_features: Sequence[int],
    block: torch.Tensor,
) -> tuple[SliceWeights | None, ...]:
    """As KernelBackend.unpack; A and B are copies, biases and gains lie in `block`. Of what ranks exchange there is no
    use for a share."""
    assert not any(layout is not None and layout.is_exchanged for layout in layouts)
    ranks = [0 if layout is None or layout.is_shared else layout.rank for layout in layouts]
    panel = panel_columns(library)
    rows: list[torch.Tensor] = []
    whole = next((layout for layout, rank in zip(layouts, ranks, strict=True) if layout is not None and rank), None)
    if whole is not None:
        together = _unpack_part(block[whole.a_offset :].view(whole.dtype), in_features, sum(ranks), panel)
        rows += torch.split(together, ranks)
    slices: list[SliceWeights | None] = []
    for index, (layout, width) in enumerate(zip(layouts, out_features, strict=True)):
        if layout is None:
            slices.append(None)
            continue
        a = b = bias = None
        if ranks[index]:
            a, b = rows[index], _unpack_part(block[layout.b_offset :].view(layout.dtype), layout.rank, width, panel)
        if layout.bias_offset != ABSENT:
            bias = block[layout.bias_offset : layout.bias_offset + 4 * width].view(torch.float32)
        gains, scales = unpack_gains(layout, in_features, width, block), unpack_scales(layout, width, block)
        slices.append(SliceWeights(a, b, bias, layout.scale, *gains, **scales))
    return tuple(slices)


def _unpack_part(part: torch.Tensor, depth: int, columns: int, panel: int) -> torch.Tensor:
    """[columns, depth] from the panels that `part` begins with."""
    width = _part_width(columns)
    matrix = torch.empty(columns, depth, dtype=part.dtype)
    for first in range(0, columns, panel):
        stride = min(panel, width - first)
        rows = part[first * depth : (first + stride) * depth].view(depth, stride)
        matrix[first : first + panel] = rows[:, : min(stride, columns - first)].T
    return matrix


def projections_layout(
    library: NativeLibrary, digest: str, rank: int, widths: tuple[int, int], dtype: torch.dtype
) -> ProjectionsLayout:
    """csrc/projections.h"""
    (in_features, out_features), panel = widths, panel_columns(library)
    dtype = torch.float32 if dtype == torch.float64 else dtype
    b_offset = align((in_features * _part_width(rank) + OVERREAD_WIDTH) * dtype.itemsize)
    nbytes = b_offset + align(-(-out_features // panel) * panel * rank * dtype.itemsize)
    return ProjectionsLayout(digest, rank, in_features, out_features, dtype, b_offset, nbytes)


def pack_projections(
    library: NativeLibrary, layout: ProjectionsLayout, lora_a: torch.Tensor, lora_b: torch.Tensor, out: torch.Tensor
) -> None:
    """Write both to the start of `out`, on the calling thread: numpy copies."""
    panel, words = panel_columns(library), torch.int32 if layout.dtype.itemsize == 4 else torch.int16
    stored = out[: layout.nbytes].view(words).numpy()
    stored[:] = 0
    a, b = (tensor.to(layout.dtype).contiguous().view(words).numpy() for tensor in (lora_a, lora_b))
    width, (num_rows, rank) = _part_width(layout.rank), b.shape
    stored[: a.shape[1] * width].reshape(-1, width)[:, :rank] = a.T
    panels = stored[layout.b_offset // layout.dtype.itemsize :]
    for first in range(0, num_rows, panel):
        rows = b[first : first + panel]
        panels[first * rank : (first + panel) * rank].reshape(rank, panel)[:, : len(rows)] = rows.T


# ------------------------------------------------------------------------------------------------------------ the call


class TableRows(ctypes.Structure):
    """csrc/api.h's LoraTable: the rows of one target. They never move, so it is made once per table and target."""

    _fields_ = (
        ("entries", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("slot_stride", "num_slices", "in_features")),
        *((name, ctypes.c_void_p) for name in ("out_offset", "out", "board")),
        ("is_cut_by_inputs", ctypes.c_int64),
    )

    @classmethod
    def of(cls, table: SlotTable, first_row: int, in_features: int, slices: tuple[LoraSlice, ...]) -> TableRows:
        entries = table.entries[0, first_row]
        outs = [array("q", (s.out_offset for s in slices)), array("q", (s.out_features for s in slices))]
        sizes = table.num_rows, len(slices), in_features
        board = table.collectives if isinstance(table.collectives, RankBoard) else None
        is_row = table.target_at(table.place_of(first_row)[0]).kind is ShardKind.ROW
        where = (out.buffer_info()[0] for out in outs)
        rows = cls(entries.data_ptr(), *sizes, *where, None if board is None else board.address, is_row)
        rows.kept = outs, board
        rows.address = ctypes.addressof(rows)
        return rows


class _Segments(ctypes.Structure):
    """csrc/api.h's LoraSegments: a plan's buffers, made once per step."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("start", "end", "slot", "weight")),
        ("count", ctypes.c_int64),
    )

    @classmethod
    def of(cls, plan: LoraPlan) -> _Segments:
        buffers = (plan.seg_starts, plan.seg_ends, plan.seg_slots, plan.seg_weights)
        segments = cls(*(buffer.data_ptr() for buffer in buffers), plan.num_segments)
        segments.max_slot = max((segment.lora_slot for segment in plan.segments), default=-1)
        segments.address = ctypes.addressof(segments)
        return segments


def add_lora(
    library: NativeLibrary,
    y: torch.Tensor,
    x: torch.Tensor,
    plan: LoraPlan,
    table: SlotTable,
    first_row: int,
    slices: tuple[LoraSlice, ...],
    num_threads: int,
) -> None:
    """As KernelBackend.add_lora. x [T, in] and y [T, out] float32, their rows dense."""
    check_rows(y, x, plan)
    rows = table_rows(table, first_row, x.shape[1], slices)
    segments = segments_of(plan, table)
    assert x.dtype == y.dtype == torch.float32
    assert x.stride(1) == y.stride(1) == 1
    library.functions.loraplex_add_lora(
        rows.address, segments.address, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), num_threads
    )


def scale_input(
    library: NativeLibrary, x: torch.Tensor, plan: LoraPlan, table: SlotTable, row: int, num_threads: int
) -> None:
    """As KernelBackend.scale_input. x [T, in] float32, its rows dense."""
    check_rows(x, x, plan)
    first_row, index = table.place_of(row)
    rows = table_rows(table, row, x.shape[1], table.target_at(first_row).slices[index:])
    segments = segments_of(plan, table)
    assert x.dtype == torch.float32
    assert x.stride(1) == 1
    library.functions.loraplex_scale_input(rows.address, segments.address, x.data_ptr(), x.stride(0), num_threads)


def add_rows(
    library: NativeLibrary, y: torch.Tensor, x: torch.Tensor, plan: LoraPlan, table: SlotTable, num_threads: int
) -> None:
    """y[s:e] += weight * scale * x[s:e] W^T (csrc/lora_rows.cpp).

    The table has one row, whose a_addr are the W's [rank, in], row-major and dense in float32, float16 or bfloat16. x
    and y are as for `add_lora`.
    """
    check_rows(y, x, plan)
    rows, segments = table_rows(table, 0, x.shape[1], table.targets[0].slices), segments_of(plan, table)
    assert x.dtype == y.dtype == torch.float32
    assert x.stride(1) == y.stride(1) == 1
    library.functions.loraplex_add_rows(
        rows.address, segments.address, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), num_threads
    )


def table_rows(table: SlotTable, first_row: int, in_features: int, slices: tuple[LoraSlice, ...]) -> TableRows:
    """Made once per target, or slice and those behind it, and kept in the table."""
    rows: TableRows | None = table.scratch.get(first_row)
    if rows is None:
        rows = table.scratch[first_row] = TableRows.of(table, first_row, in_features, slices)
    return rows


def segments_of(plan: LoraPlan, table: SlotTable) -> _Segments:
    """Made once per step and kept in the plan."""
    segments: _Segments | None = plan.scratch.get(_Segments)
    if segments is None:
        segments = plan.scratch[_Segments] = _Segments.of(plan)
    assert segments.max_slot < table.capacity
    return segments
