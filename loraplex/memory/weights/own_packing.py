"""Packed blocks with what an adapter has of its own, and those of embeddings and norms, whatever the backend.

    linear, head   the backend's block, behind it of each slice that has one its weight and its row_ids
    embedding      A^T [vocabulary, rank], B [hidden, rank], weight [rows, hidden], row_ids
    norm           weight [size]

Parts start on multiples of 64 bytes. A and B of an embedding are in the dtype that the backend gives an own weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from loraplex.core import LoraTarget, ShardKind
from loraplex.kernels.plan import NOT_OF_KERNELS
from loraplex.kernels.protocols import AdapterPacking
from loraplex.kernels.slices import ABSENT, SliceLayout, SliceWeights, align, own_weight_shape

Slices = Sequence[SliceWeights | None]
Layouts = tuple[SliceLayout | None, ...]


class OwnPacking:
    """`AdapterPacking` of one target's slices, which knows of their own weights."""

    def __init__(self, backend: AdapterPacking, compute_dtype: torch.dtype) -> None:
        self._backend = backend
        self._compute_dtype = compute_dtype

    def nbytes(self, target: LoraTarget, slices: Slices) -> int:
        return self._lay_out(target, slices)[0] if _is_own(target, slices) else self._packed_nbytes(slices)

    def layouts(self, target: LoraTarget, slices: Slices) -> Layouts:
        if _is_own(target, slices):
            return self._lay_out(target, slices)[1]
        return self._backend.packed_layouts(slices, self._compute_dtype)

    def pack(self, target: LoraTarget, slices: Slices, out: torch.Tensor) -> Layouts:
        if not _is_own(target, slices):
            return self._backend.pack(slices, self._compute_dtype, out)
        nbytes, layouts = self._lay_out(target, slices)
        if out.numel() < nbytes:
            raise ValueError(f"a packed block of {nbytes} bytes does not fit in {out.numel()}")
        if target.kind not in NOT_OF_KERNELS:
            self._backend.pack(_without_own(slices), self._compute_dtype, out)
        for index, (s, layout) in enumerate(zip(slices, layouts, strict=True)):
            if s is not None and layout is not None:
                self._pack_own(target, index, s, layout, out)
        return layouts

    def unpack(self, target: LoraTarget, layouts: Sequence[SliceLayout | None], block: torch.Tensor) -> Slices:
        if target.kind in NOT_OF_KERNELS:
            slices: Slices = [self._unpack_ends(target, layout, block) for layout in layouts]
        else:
            of_backend = [None if layout is None or not layout.has_delta else _delta(layout) for layout in layouts]
            widths = [s.out_features for s in target.slices]
            slices = self._backend.unpack(of_backend, target.in_features, widths, block)
        return tuple(
            self._with_weight(target, index, s, layout, block)
            for index, (s, layout) in enumerate(zip(slices, layouts, strict=True))
        )

    def shapes(self, target: LoraTarget, index: int, layout: SliceLayout, shape: SliceWeights) -> SliceWeights:
        """`shape` with the own weight of a layout, on the meta device."""
        if not layout.has_weight:
            return shape
        sizes = own_weight_shape(target, index, layout.num_rows)
        weight = torch.empty(sizes, dtype=layout.weight_dtype, device="meta")
        has_ids = layout.row_ids_offset != ABSENT
        ids = torch.empty(layout.num_rows, dtype=torch.int64, device="meta") if has_ids else None
        return replace(shape, weight=weight, row_ids=ids)

    def _packed_nbytes(self, slices: Slices) -> int:
        return self._backend.packed_nbytes(slices, self._compute_dtype)

    # --------------------------------------------------------------------------------------------------- the layout

    def _lay_out(self, target: LoraTarget, slices: Slices) -> tuple[int, Layouts]:
        if target.kind in NOT_OF_KERNELS:
            cursor, layouts = 0, list(map(self._empty, slices))
        else:
            deltas = _without_own(slices)
            cursor, found = self._packed_nbytes(deltas), self._backend.packed_layouts(deltas, self._compute_dtype)
            layouts = [each or self._empty(s) for each, s in zip(found, slices, strict=True)]
        for index, (s, layout) in enumerate(zip(slices, layouts, strict=True)):
            if s is not None and layout is not None:
                layouts[index], cursor = self._place(target, index, s, layout, cursor)
        return cursor, tuple(layouts)

    def _empty(self, s: SliceWeights | None) -> SliceLayout | None:
        """Of a slice of which nothing is placed yet."""
        if s is None:
            return None
        tensor = s.weight if s.lora_a is None else s.lora_a
        assert tensor is not None, "an embedding or a norm without weights"
        return SliceLayout(ABSENT, ABSENT, ABSENT, s.rank, float(s.scaling), self._dtype(tensor))

    def _place(
        self, target: LoraTarget, index: int, s: SliceWeights, layout: SliceLayout, cursor: int
    ) -> tuple[SliceLayout, int]:
        if target.kind is ShardKind.EMBEDDING and s.lora_a is not None and s.lora_b is not None:
            b_offset = cursor + align(s.lora_a.numel() * layout.dtype.itemsize)
            layout = replace(layout, a_offset=cursor, b_offset=b_offset)
            cursor = b_offset + self._own_bytes(s.lora_b.shape[0], s.lora_b.shape[1], layout.dtype)
        if s.weight is not None:
            dtype, num_rows = self._weight_dtype(target, s.weight), s.weight.shape[0]
            layout = replace(layout, weight_offset=cursor, weight_dtype=dtype, num_rows=num_rows)
            if target.kind in NOT_OF_KERNELS:
                cursor += align(s.weight.numel() * dtype.itemsize)
            else:
                cursor += self._own_bytes(num_rows, s.weight.shape[1], dtype)
            if s.row_ids is not None:
                layout, cursor = replace(layout, row_ids_offset=cursor), cursor + align(s.row_ids.numel() * 8)
        return layout, cursor

    def _own_bytes(self, num_rows: int, width: int, dtype: torch.dtype) -> int:
        return align(math.prod(self._backend.own_shape(num_rows, width)) * dtype.itemsize)

    def _dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._backend.own_dtype(tensor.dtype, self._compute_dtype)

    def _weight_dtype(self, target: LoraTarget, weight: torch.Tensor) -> torch.dtype:
        return self._compute_dtype if target.kind is ShardKind.NORM else self._dtype(weight)

    # ---------------------------------------------------------------------------------------------------- the bytes

    def _pack_own(
        self, target: LoraTarget, index: int, s: SliceWeights, layout: SliceLayout, out: torch.Tensor
    ) -> None:
        if target.kind is ShardKind.EMBEDDING and s.lora_a is not None and s.lora_b is not None:
            _write(s.lora_a.T, out, layout.a_offset, layout.dtype)
            self._write_own(s.lora_b, out, layout.b_offset, layout.dtype)
        if s.weight is not None and layout.weight_dtype is not None:
            write = _write if target.kind in NOT_OF_KERNELS else self._write_own
            write(s.weight, out, layout.weight_offset, layout.weight_dtype)
        if s.row_ids is not None:
            _write(s.row_ids, out, layout.row_ids_offset, torch.int64)

    def _write_own(self, weight: torch.Tensor, out: torch.Tensor, offset: int, dtype: torch.dtype) -> None:
        self._backend.pack_own(weight, _room(out, offset, dtype, self._backend.own_shape(*weight.shape)))

    def _unpack_ends(self, target: LoraTarget, layout: SliceLayout | None, block: torch.Tensor) -> SliceWeights | None:
        if layout is None:
            return None
        a = b = None
        if layout.a_offset != ABSENT:
            hidden_size = target.slices[0].out_features
            a = _read(block, layout.a_offset, layout.dtype, (target.in_features, layout.rank)).T
            shape = self._backend.own_shape(hidden_size, layout.rank)
            stored = _read(block, layout.b_offset, layout.dtype, shape)
            b = self._backend.unpack_own(stored, hidden_size, layout.rank)
        return SliceWeights(a, b, None, layout.scale)

    def _with_weight(
        self,
        target: LoraTarget,
        index: int,
        s: SliceWeights | None,
        layout: SliceLayout | None,
        block: torch.Tensor,
    ) -> SliceWeights | None:
        if layout is None or layout.weight_dtype is None:
            return s
        shape = own_weight_shape(target, index, layout.num_rows)
        if target.kind in NOT_OF_KERNELS:
            weight = _read(block, layout.weight_offset, layout.weight_dtype, shape)
        else:
            num_rows, width = shape
            stored = self._backend.own_shape(num_rows, width)
            panels = _read(block, layout.weight_offset, layout.weight_dtype, stored)
            weight = self._backend.unpack_own(panels, num_rows, width)
        row_ids = None
        if layout.row_ids_offset != ABSENT:
            row_ids = _read(block, layout.row_ids_offset, torch.int64, (layout.num_rows,))
        return replace(s or SliceWeights(None, None, None, layout.scale), weight=weight, row_ids=row_ids)


def _is_own(target: LoraTarget, slices: Slices) -> bool:
    """Whether the backend alone cannot pack them."""
    if target.kind in NOT_OF_KERNELS:
        return any(s is not None for s in slices)
    return any(s is not None and s.weight is not None for s in slices)


def _without_own(slices: Slices) -> Slices:
    """What the backend packs."""
    deltas = [None if s is None else replace(s, weight=None, row_ids=None) for s in slices]
    return [s if s is not None and s.tensors else None for s in deltas]


def _delta(layout: SliceLayout) -> SliceLayout:
    return replace(layout, weight_offset=ABSENT, row_ids_offset=ABSENT, num_rows=0, weight_dtype=None)


def _room(out: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Memory of a part; the gap behind it is zero, so that equal adapters have equal bytes."""
    end = offset + math.prod(shape) * dtype.itemsize
    out[end : offset + align(end - offset)].zero_()
    return _read(out, offset, dtype, shape)


def _write(tensor: torch.Tensor, out: torch.Tensor, offset: int, dtype: torch.dtype) -> None:
    _room(out, offset, dtype, tuple(tensor.shape)).copy_(tensor)


def _read(block: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return block[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
