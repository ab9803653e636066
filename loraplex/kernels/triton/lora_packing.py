"""Packed blocks for the GPU: the stock rows in one dtype for all adapters of an engine, or int8.

    stock   per slice A [rank, in], B [out, rank], bias [out], row-major, all in the block dtype (reference.py)
    int8    per slice A [rank, in] int8, its scale [rank] float32, B [out, rank] int8, bias [out] float32
    both    behind these gain [out] and input gain [in], float32

Each part starts on a multiple of 64 bytes; the scale is the part behind A: at the address of A + rank * in rounded up
to 64. int8: A's row and B's column of a rank are each divided by their largest value / 127 and rounded; the product of
the two divisors is the rank's scale, which stands between shrink and expand. A rank whose scale is 0 is zero
altogether. On normally distributed weights and inputs an adapter's delta is off by 0.8 to 1.6 % in the mean square, by
0.7 to 1.4 % of its largest value at worst (ranks 1 to 256, 64 to 4096 columns;
tests/kernels/triton/test_lora_packing.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from loraplex.kernels import reference
from loraplex.kernels.reference import StockPacking
from loraplex.kernels.slices import ABSENT, SliceLayout, SliceWeights, align

LARGEST = 127


class GpuPacking(StockPacking):
    """Blocks of one dtype: `block_dtype`, or the model's where that is None."""

    block_dtype: torch.dtype | None = None
    shares_projections = False

    @property
    def adapter_format(self) -> str:
        if self.block_dtype is None:
            return "rows.compute.1"
        return f"rows.{str(self.block_dtype).removeprefix('torch.')}.1"

    def adapter_dtype(self, compute_dtype: torch.dtype) -> torch.dtype | None:
        return None if self.block_dtype == torch.int8 else self.block_dtype or compute_dtype

    def packed_nbytes(self, slices: Sequence[SliceWeights | None], compute_dtype: torch.dtype) -> int:
        return self._layout(slices, compute_dtype)[0]

    def packed_layouts(
        self, slices: Sequence[SliceWeights | None], compute_dtype: torch.dtype
    ) -> tuple[SliceLayout | None, ...]:
        return self._layout(slices, compute_dtype)[1]

    def pack(
        self, slices: Sequence[SliceWeights | None], compute_dtype: torch.dtype, out: torch.Tensor
    ) -> tuple[SliceLayout | None, ...]:
        nbytes, layouts = self._layout(slices, compute_dtype)
        if out.numel() < nbytes:
            raise ValueError(f"a packed block of {nbytes} bytes does not fit in {out.numel()}")
        for s, layout in zip(slices, layouts, strict=True):
            if s is None or layout is None:
                continue
            a, b, bias_dtype = s.lora_a, s.lora_b, layout.dtype
            if layout.dtype == torch.int8:
                bias_dtype = torch.float32
                if a is not None and b is not None:
                    a, scale, b = quantize(a, b)
                    reference.copy_part(scale, out, _scale_offset(layout, a.shape[1]), torch.float32)
            reference.copy_part(a, out, layout.a_offset, layout.dtype)
            reference.copy_part(b, out, layout.b_offset, layout.dtype)
            reference.copy_part(s.bias, out, layout.bias_offset, bias_dtype)
            reference.copy_gains(s, out, layout)
        return layouts

    def unpack(
        self, layouts: Sequence[SliceLayout | None], in_features: int, out_features: Sequence[int], block: torch.Tensor
    ) -> tuple[SliceWeights | None, ...]:
        if self.block_dtype != torch.int8:
            return super().unpack(layouts, in_features, out_features, block)
        return tuple(
            None if layout is None else _unpack_int8(layout, in_features, width, block)
            for layout, width in zip(layouts, out_features, strict=True)
        )

    def _layout(
        self, slices: Sequence[SliceWeights | None], compute_dtype: torch.dtype
    ) -> tuple[int, tuple[SliceLayout | None, ...]]:
        dtype = self.block_dtype or compute_dtype
        if dtype != torch.int8:
            return reference.layout_block(slices, dtype, is_forced=True)
        reference.check_input_gains(slices)
        cursor = 0
        layouts: list[SliceLayout | None] = []
        for s in slices:
            if s is None:
                layouts.append(None)
                continue
            a_offset = b_offset = bias_offset = ABSENT
            if s.lora_a is not None and s.lora_b is not None:
                a_offset = cursor
                b_offset = a_offset + align(s.lora_a.numel()) + align(4 * s.rank)
                cursor = b_offset + align(s.lora_b.numel())
            if s.bias is not None:
                bias_offset, cursor = cursor, cursor + align(4 * s.bias.numel())
            gain_offsets, cursor = reference.place_gains(s, cursor)
            of_slice = SliceLayout(a_offset, b_offset, bias_offset, s.rank, float(s.scaling), torch.int8, *gain_offsets)
            layouts.append(of_slice)
        return cursor, tuple(layouts)


def _scale_offset(layout: SliceLayout, in_features: int) -> int:
    return layout.a_offset + align(layout.rank * in_features)


def quantize(lora_a: torch.Tensor, lora_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(A int8 [rank, in], scale float32 [rank], B int8 [out, rank]) with scale * B A as the product of the two.

    In float64: what `dequantize` gives comes back as the same bytes.
    """
    a, b = lora_a.double(), lora_b.double()
    a_unit, b_unit = _largest(a, 1) / LARGEST, _largest(b, 0) / LARGEST
    scale = (a_unit * b_unit).float()
    is_zero = scale == 0
    a_unit, b_unit = a_unit.masked_fill(is_zero, torch.inf), b_unit.masked_fill(is_zero, torch.inf)
    return (a / a_unit[:, None]).round().to(torch.int8), scale, (b / b_unit).round().to(torch.int8)


def dequantize(a: torch.Tensor, scale: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B in float64, which holds them exactly: A has the scale."""
    return a.double() * scale.double()[:, None], b.double()


def _largest(matrix: torch.Tensor, dim: int) -> torch.Tensor:
    return matrix.abs().amax(dim)


def _unpack_int8(layout: SliceLayout, in_features: int, out_features: int, block: torch.Tensor) -> SliceWeights:
    a = b = None
    if layout.rank:
        a_end = layout.a_offset + layout.rank * in_features
        scale_offset = _scale_offset(layout, in_features)
        q_a = block[layout.a_offset : a_end].view(torch.int8).view(layout.rank, in_features)
        q_b = block[layout.b_offset : layout.b_offset + layout.rank * out_features].view(torch.int8)
        scale = block[scale_offset : scale_offset + 4 * layout.rank].view(torch.float32)
        a, b = dequantize(q_a, scale, q_b.view(out_features, layout.rank))
    stock = replace(layout, a_offset=ABSENT, b_offset=ABSENT, dtype=torch.float32)
    return replace(reference.unpack_slice(stock, in_features, out_features, block), lora_a=a, lora_b=b)
