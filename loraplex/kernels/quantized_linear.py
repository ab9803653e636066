"""Base weights in 8 and 4 bits for a GPU: how they lie in memory, and the products that stock torch computes.

    int8   q int8 [out, in']             scale float32 [out]                        in' = in rounded up to 128
    int4   q uint8 [out, in' / 2]        scale [in' / 128, out], the weight's dtype
    fp8    q float8 e4m3 [out', in']     scale float32 [out']                       out', in' rounded up to 16 (cuBLAS)

Which numbers these are, quantized_weights.py says; what is added is 0. A byte j of the 64 of an int4 group holds number
j of the group in its low half and number j + 64 in its high half, so that a kernel unpacks two runs of columns and
interleaves nothing; the scales of one group of all rows lie side by side, as a kernel wants them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from loraplex.kernels.quantized_weights import (
    INT4_GROUP,
    SPECIFICATIONS,
    Fp8Weight,
    GroupWeight,
    QuantizedSpecification,
)

FP8_CAPABILITY = (8, 9)
"""The first compute capability whose matrix units take float8."""

ROW_SCALED_CAPABILITY = (9, 0)
"""The one on which `torch._scaled_mm` takes a scale for each row and column in every build since 2.5: elsewhere it
depends on the build."""

FP8_MULTIPLE = 16
QUANTIZED_AT_ONCE = 1 << 24
"""Numbers of a weight that are float32 at one moment while it is quantised."""

DEQUANTIZED_AT_ONCE = 1 << 26
"""Numbers of a weight that are 16-bit again at one moment, for a product of many rows: 128 MiB."""

QUANTIZATIONS = {torch.float8_e4m3fn: "fp8", torch.int8: "int8", torch.uint8: "int4"}
"""Dtype of `QuantizedWeight.q` -> the quantization."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [out, in], quantised as the dtype of `q` says, on its device."""

    q: torch.Tensor
    scale: torch.Tensor
    out_features: int
    in_features: int

    @property
    def quantization(self) -> str:
        return QUANTIZATIONS[self.q.dtype]

    @classmethod
    def of(cls, weight: torch.Tensor, quantization: str) -> QuantizedWeight:
        """Quantise `weight` where it lies, few rows at a time."""
        packed = _empty(weight.shape, quantization, weight.dtype, weight.device)
        step = max(1, QUANTIZED_AT_ONCE // weight.shape[1])
        for start in range(0, weight.shape[0], step):
            packed._put(start, SPECIFICATIONS[quantization].of(weight[start : start + step]))
        return packed

    @classmethod
    def keeping(cls, weight: QuantizedSpecification) -> QuantizedWeight | None:
        """The integers and scales as they are; None: the layout has none of their groups, or no zero points."""
        quantization = next((name for name, kind in SPECIFICATIONS.items() if type(weight) is kind), None)
        if quantization is None:
            return None
        if isinstance(weight, GroupWeight) and (weight.zero is not None or weight.group_size != INT4_GROUP):
            return None
        packed = _empty(weight.q.shape, quantization, weight.scale.dtype, weight.q.device)
        packed._put(0, weight)
        return packed

    def _put(self, start: int, specified: QuantizedSpecification) -> None:
        rows = slice(start, start + len(specified.q))
        _PACK[self.quantization](specified.q, self.q[rows])
        self.scale[..., rows] = specified.scale.t()

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Rows [first, last) of the weight, float32 [last - first, in]."""
        if self.quantization == "fp8":
            return self.q[first:last, : self.in_features].float() * self.scale[first:last, None]
        out = torch.empty(last - first, _round_up(self.in_features, INT4_GROUP), device=self.q.device)
        self.dequantize(first, out)
        return out[:, : self.in_features]

    def dequantize(self, start: int, out: torch.Tensor) -> None:
        """out [n, in'] := rows start .. start + n of the weight, in the dtype of `out`. Not for fp8."""
        rows = slice(start, start + len(out))
        if self.q.dtype == torch.int8:
            torch.mul(self.q[rows], self.scale[rows, None], out=out)
            return
        groups = self.q[rows].view(len(out), -1, INT4_GROUP // 2)
        halves = out.view(len(out), -1, 2, INT4_GROUP // 2)
        scale = self.scale[:, rows].t()[:, :, None].float()
        torch.mul((groups & 15).to(torch.int8) - 8, scale, out=halves[:, :, 0])
        torch.mul((groups >> 4).to(torch.int8) - 8, scale, out=halves[:, :, 1])


def quantizations_of(capability: tuple[int, int]) -> tuple[str, ...]:
    """What a GPU of this compute capability can run."""
    return ("fp8", "int8", "int4") if capability >= FP8_CAPABILITY else ("int8", "int4")


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _empty(of_shape: torch.Size, quantization: str, int4_scale: torch.dtype, device: torch.device) -> QuantizedWeight:
    """The memory of a quantised weight, all 0 but for what lies in its shape."""
    out_features, in_features = of_shape
    if quantization == "fp8":
        shape = _round_up(out_features, FP8_MULTIPLE), _round_up(in_features, FP8_MULTIPLE)
        q = torch.zeros(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        scale = torch.ones(shape[0], device=device)
    elif quantization == "int8":
        q = torch.zeros(out_features, _round_up(in_features, INT4_GROUP), dtype=torch.int8, device=device)
        scale = torch.empty(out_features, device=device)
    else:
        num_groups = _round_up(in_features, INT4_GROUP) // INT4_GROUP
        q = torch.empty(out_features, num_groups * INT4_GROUP // 2, dtype=torch.uint8, device=device)
        scale = torch.empty(num_groups, out_features, dtype=int4_scale, device=device)
    return QuantizedWeight(q, scale, out_features, in_features)


def _pack_bytes(q: torch.Tensor, out: torch.Tensor) -> None:
    out.view(torch.uint8)[:, : q.shape[1]] = q.view(torch.uint8)


def _pack_int4(q: torch.Tensor, out: torch.Tensor) -> None:
    """Numbers behind the row are 8, which stands for 0."""
    groups = F.pad(q, (0, 2 * out.shape[1] - q.shape[1]), value=8).view(len(q), -1, 2, INT4_GROUP // 2)
    torch.bitwise_or(groups[:, :, 0], groups[:, :, 1] << 4, out=out.view(len(q), -1, INT4_GROUP // 2))


_PACK: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "fp8": _pack_bytes,
    "int8": _pack_bytes,
    "int4": _pack_int4,
}


# ------------------------------------------------------------------------------------------------------------- products


Dequantize = Callable[[QuantizedWeight, int, torch.Tensor], None]
"""As `QuantizedWeight.dequantize`."""


def linear_of_many_rows(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, dequantize: Dequantize
) -> torch.Tensor:
    """x W^T + bias with the weight dequantised piece by piece: for so many rows that this costs little."""
    depth = weight.in_features
    y = x.new_empty(len(x), weight.out_features)
    padded_depth = _round_up(depth, INT4_GROUP)
    piece = min(weight.out_features, max(256, DEQUANTIZED_AT_ONCE // padded_depth // 256 * 256))
    wide = x.new_empty(piece, padded_depth)
    for start in range(0, weight.out_features, piece):
        columns = slice(start, min(start + piece, weight.out_features))
        rows = wide[: columns.stop - start]
        dequantize(weight, start, rows)
        if bias is None:
            torch.mm(x, rows[:, :depth].t(), out=y[:, columns])
        else:
            torch.addmm(bias[columns], x, rows[:, :depth].t(), out=y[:, columns])
    return y


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Activations rounded row by row: q float8 e4m3 [T, in'], scale float32 [T, 1]."""

    q: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> Fp8Rows:
        rounded = Fp8Weight.of(F.pad(x, (0, -x.shape[1] % FP8_MULTIPLE)))
        return cls(rounded.q, rounded.scale[:, None])


def fp8_linear(
    rows: Fp8Rows, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype, is_row_scaled: bool
) -> torch.Tensor:
    """The product of float8 numbers, scaled by row and column, in `dtype`.

    is_row_scaled: `torch._scaled_mm` scales, which needs bfloat16; else it sums in float32 and the scales are
    multiplied in here.
    """
    transposed = weight.q.t()
    is_padded = weight.q.shape[0] != weight.out_features
    if is_row_scaled and not is_padded:
        assert dtype == torch.bfloat16, dtype
        y: torch.Tensor = torch._scaled_mm(
            rows.q, transposed, rows.scale, weight.scale[None], bias=bias, out_dtype=dtype, use_fast_accum=False
        )
        return y
    one = rows.scale.new_ones(())
    sums = torch._scaled_mm(rows.q, transposed, one, one, out_dtype=torch.float32)[:, : weight.out_features]
    y = sums.mul(rows.scale).mul_(weight.scale[: weight.out_features])
    return (y if bias is None else y.add_(bias)).to(dtype)
