"""Linears over weights in 8 and 4 bits (loraplex/kernels/quantized_linear.py), for few rows and for many.

few rows   `skinny_linear_kernel`: a weight is read once, in its own bits, and widened in registers on the way to the
           matrix units
many rows  the weight is dequantised piece by piece and cuBLAS multiplies
fp8        `round_rows_kernel` rounds the activations, `torch._scaled_mm` multiplies
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from loraplex.kernels.quantized_linear import (
    FP8_MULTIPLE,
    ROW_SCALED_CAPABILITY,
    Fp8Rows,
    QuantizedWeight,
    fp8_linear,
    linear_of_many_rows,
)
from loraplex.kernels.quantized_weights import INT4_GROUP
from loraplex.kernels.triton.launch import GpuTarget, Launcher, cdiv, next_power_of_2

FEW_ROWS = 512
"""Up to so many rows a weight is widened on the way. For more, dequantising it first costs less than widening it for
every 128 rows: 5 bytes moved for each int8 number, about as long as its product with 600 rows takes. Reckoned for an
H100, not measured."""

DEPTH = INT4_GROUP
"""Numbers of a weight's row in one turn of a loop."""

LEAST_ROWS = 16
"""Of a tile in tl.dot."""

LEAST_TURNS = 4
"""Of a loop, when the depth of a product is split."""

REDUCED_AT_ONCE = BYTES_AT_ONCE = 1024

NUMBERS_AT_ONCE = 2048
"""Of a row of int8 in one program, 16 for each thread."""


def quantized_linear(
    launcher: Launcher, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """x W^T + bias in the dtype of x; x [T, in], its rows dense."""
    assert x.shape[1] == weight.in_features, (x.shape, weight.in_features)
    assert x.stride(1) == 1, x.stride()
    if weight.quantization == "fp8":
        is_row_scaled = launcher.target.capability == ROW_SCALED_CAPABILITY and x.dtype == torch.bfloat16
        return fp8_linear(round_rows(launcher, x), weight, bias, x.dtype, is_row_scaled)
    if len(x) > FEW_ROWS:
        return linear_of_many_rows(x, weight, bias, lambda w, start, out: dequantize(launcher, w, start, out))
    return skinny_linear(launcher, x, weight, bias)


# ------------------------------------------------------------------------------------------------------------ few rows


@dataclass(frozen=True, slots=True)
class _Tiles:
    """One program's part of y, [rows, columns], and into how many parts the depth of the product is split.

    Two warps keep to the matrix instruction that takes both operands from registers, four or more of them on sm_90 get
    one that wants x in shared memory: the first has fewer instructions for each number of the weight up to 32 rows, the
    second from there on.
    """

    rows: int
    columns: int
    num_splits: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, num_rows: int, weight: QuantizedWeight, itemsize: int, target: GpuTarget) -> _Tiles:
        """Programs enough to keep memory busy on every multiprocessor. Depends on shapes and the GPU alone."""
        most = 128 if itemsize == 2 else LEAST_ROWS  # without matrix units more rows spill, and took more than 99 KiB
        rows = min(most, max(LEAST_ROWS, next_power_of_2(num_rows)))
        columns, num_warps, programs_per_sm = (64, 2, 4) if rows <= 32 else (128, 8, 2 if rows == 64 else 1)
        num_programs = cdiv(weight.out_features, columns) * cdiv(num_rows, rows)
        wanted = target.num_sms * programs_per_sm // max(1, num_programs)
        num_turns = cdiv(weight.in_features, DEPTH)
        num_splits = max(1, min(wanted, num_turns // LEAST_TURNS))
        stage_bytes = columns * weight.q.shape[1] // num_turns + rows * DEPTH * itemsize
        num_waiting = (
            target.max_shared_bytes // programs_per_sm // stage_bytes
        )  # in shared memory; one more is in registers
        num_stages = max(2, min(4, 1 + num_waiting))
        return cls(rows, columns, 1 << (num_splits.bit_length() - 1), num_warps, num_stages)


def skinny_linear(
    launcher: Launcher, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """x W^T + bias for int8 and int4. Sums are float32, added in one order."""
    num_rows, out_features = len(x), weight.out_features
    y = x.new_empty(num_rows, out_features)
    tiles = _Tiles.of(num_rows, weight, x.element_size(), launcher.target)
    is_split = tiles.num_splits > 1
    sums = x.new_empty(tiles.num_splits, num_rows, out_features, dtype=torch.float32) if is_split else y
    # Programs that read one part of the weight follow one another, so that all but the first find it in the cache.
    grid = (cdiv(num_rows, tiles.rows), cdiv(out_features, tiles.columns), tiles.num_splits)
    launcher.launch(
        skinny_linear_kernel,
        grid,
        x,
        weight.q,
        weight.scale,
        x if bias is None else bias,
        sums,
        num_rows,
        out_features,
        weight.in_features,
        x.stride(0),
        weight.q.stride(0),
        weight.scale.stride(0),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        IS_INT4=weight.quantization == "int4",
        HAS_BIAS=bias is not None and not is_split,
        IS_WHOLE=weight.in_features % DEPTH == 0,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=DEPTH,
    )
    if is_split:
        launcher.launch(
            add_splits_kernel,
            (cdiv(out_features, REDUCED_AT_ONCE), num_rows),
            sums,
            x if bias is None else bias,
            y,
            num_rows,
            out_features,
            HAS_BIAS=bias is not None,
            NUM_SPLITS=tiles.num_splits,
            COLUMNS=REDUCED_AT_ONCE,
        )
    return y


@triton.jit(do_not_specialize=["num_rows"])
def skinny_linear_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    out_features,
    in_features,
    x_stride,
    q_stride,
    scale_stride,
    IS_INT4: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out[split, t, n] = sum over the split's k of x[t, k] * weight[n, k], COLUMNS n, ROWS t; without splits + bias[n].

    The weight is the left operand, which the matrix units take from registers: y^T = W x^T.
    """
    dtype = x_ptr.dtype.element_ty
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < out_features
    is_row = rows < num_rows
    x_rows = x_ptr + rows.to(tl.int64)[None, :] * x_stride
    q_rows = q_ptr + columns.to(tl.int64)[:, None] * q_stride
    num_turns = tl.cdiv(in_features, DEPTH)
    turns = tl.cdiv(num_turns, tl.num_programs(2))
    first = tl.program_id(2) * turns
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    for turn in range(first, tl.minimum(first + turns, num_turns)):
        if IS_INT4:
            low_k = turn * DEPTH + tl.arange(0, DEPTH // 2)
            high_k = low_k + DEPTH // 2
            low_seen, high_seen = is_row[None, :], is_row[None, :]
            if not IS_WHOLE:
                low_seen = low_seen & (low_k < in_features)[:, None]
                high_seen = high_seen & (high_k < in_features)[:, None]
            x_low = tl.load(x_rows + low_k[:, None], mask=low_seen, other=0.0)
            x_high = tl.load(x_rows + high_k[:, None], mask=high_seen, other=0.0)
            byte_k = turn * (DEPTH // 2) + tl.arange(0, DEPTH // 2)
            q = tl.load(q_rows + byte_k[None, :], mask=is_column[:, None], other=0)
            low, high = _widened_nibble(q & 15, dtype), _widened_nibble(q >> 4, dtype)
            group = tl.dot(low, x_low, input_precision="ieee")
            group = tl.dot(high, x_high, group, input_precision="ieee")
            scale = tl.load(scale_ptr + turn * scale_stride + columns, mask=is_column, other=0.0)
            acc += group * scale.to(tl.float32)[:, None]
        else:
            k = turn * DEPTH + tl.arange(0, DEPTH)
            seen = is_row[None, :]
            if not IS_WHOLE:
                seen = seen & (k < in_features)[:, None]
            x = tl.load(x_rows + k[:, None], mask=seen, other=0.0)
            q = tl.load(q_rows + k[None, :], mask=is_column[:, None], other=0)
            acc = tl.dot(_widened_byte(q, dtype), x, acc, input_precision="ieee")
    if not IS_INT4:
        acc *= tl.load(scale_ptr + columns, mask=is_column, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
    out_rows = (tl.program_id(2) * num_rows + rows).to(tl.int64)
    out = out_ptr + out_rows[:, None] * out_features + columns[None, :]
    tl.store(out, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _widened_nibble(q, dtype: tl.constexpr):
    """q - 8 in `dtype`, q uint8 of 0..15; in 16 bits by way of the number whose last bits q is: a conversion is four
    times as slow."""
    if dtype == tl.bfloat16:
        return (q.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0  # 128 + q
    elif dtype == tl.float16:
        return (q.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0  # 1024 + q
    else:
        return q.to(dtype) - 8.0


@triton.jit
def _widened_byte(q, dtype: tl.constexpr):
    """q in `dtype`, q int8."""
    if dtype == tl.float16:
        return ((q.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    else:
        return q.to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def add_splits_kernel(
    sums_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    out_features,
    HAS_BIAS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y[t, n] = sum over splits, the first one first, of sums[split, t, n], + bias[n]."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < out_features
    row = tl.program_id(1).to(tl.int64)
    acc = tl.zeros((COLUMNS,), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        acc += tl.load(sums_ptr + (split * num_rows + row) * out_features + columns, mask=is_column, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * out_features + columns, acc.to(y_ptr.dtype.element_ty), mask=is_column)


# ----------------------------------------------------------------------------------------------------------- many rows


def dequantize(launcher: Launcher, weight: QuantizedWeight, start: int, out: torch.Tensor) -> None:
    """As `QuantizedWeight.dequantize`, in one pass. Stock torch's for int8 has a fifth of the bandwidth."""
    if weight.quantization == "int8":
        rows, width = out.shape
        q = weight.q[start : start + rows]
        launcher.launch(
            dequantize_int8_kernel,
            (rows, cdiv(width, NUMBERS_AT_ONCE)),
            q,
            weight.scale[start:],
            out,
            width,
            q.stride(0),
            COLUMNS=NUMBERS_AT_ONCE,
        )
        return
    q, scale = weight.q[start : start + len(out)], weight.scale[:, start:]
    num_bytes, num_groups = q.numel(), len(scale)
    launcher.launch(
        dequantize_int4_kernel,
        (cdiv(num_bytes, BYTES_AT_ONCE),),
        q,
        scale,
        out,
        num_bytes,
        num_groups,
        scale.stride(0),
        BYTES=BYTES_AT_ONCE,
    )


@triton.jit
def dequantize_int8_kernel(q_ptr, scale_ptr, out_ptr, width, q_stride, COLUMNS: tl.constexpr):
    """out[n, k] = q[n, k] * scale[n]; grid (rows, blocks of COLUMNS)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = columns < width
    q = tl.load(q_ptr + row * q_stride + columns, mask=is_inside, other=0)
    wide = q.to(tl.float32) * tl.load(scale_ptr + row)
    tl.store(out_ptr + row * width + columns, wide.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def dequantize_int4_kernel(q_ptr, scale_ptr, out_ptr, num_bytes, num_groups, scale_stride, BYTES: tl.constexpr):
    """Byte i, j = i mod 64 of group g = i // 64: out[128 g + j] and out[128 g + 64 + j] = the group's scale * (the
    byte's half - 8)."""
    i = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    is_byte = i < num_bytes
    group = i // 64
    q = tl.load(q_ptr + i, mask=is_byte, other=0)
    scale = tl.load(scale_ptr + group % num_groups * scale_stride + group // num_groups, mask=is_byte, other=0.0)
    scale = scale.to(tl.float32)
    low = ((q & 15).to(tl.int8) - 8).to(tl.float32) * scale
    high = ((q >> 4).to(tl.int8) - 8).to(tl.float32) * scale
    out = out_ptr + i + group * 64
    tl.store(out, low.to(out_ptr.dtype.element_ty), mask=is_byte)
    tl.store(out + 64, high.to(out_ptr.dtype.element_ty), mask=is_byte)


# ---------------------------------------------------------------------------------------------------------------- fp8


def round_rows(launcher: Launcher, x: torch.Tensor) -> Fp8Rows:
    """As `Fp8Rows.of`, in one pass. A quotient that lies between two float8 numbers may fall to the other one."""
    num_rows, in_features = x.shape
    depth = -(-in_features // FP8_MULTIPLE) * FP8_MULTIPLE
    rounded = Fp8Rows(
        torch.empty(num_rows, depth, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty(num_rows, 1, device=x.device),
    )
    block = next_power_of_2(depth)
    launcher.launch(
        round_rows_kernel,
        (num_rows,),
        x,
        rounded.q,
        rounded.scale,
        in_features,
        depth,
        x.stride(0),
        num_warps=max(1, min(16, block // 1024)),
        BLOCK=block,
    )
    return rounded


@triton.jit
def round_rows_kernel(x_ptr, q_ptr, scale_ptr, in_features, depth, x_stride, BLOCK: tl.constexpr):
    """scale[t] = max |x[t]| / 448;  q[t, k] = float8(x[t, k] / scale[t]), to the nearest, ties to the even one."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < in_features, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-30) / 448.0
    quotient = x / scale
    # Rounded here to a number that float8 has: the interpreter's own cast loses the carry of a mantissa into the
    # exponent.
    exponent = tl.maximum((quotient.to(tl.int32, bitcast=True) >> 23) & 255, 121)
    big = ((exponent + 20) << 23).to(tl.float32, bitcast=True) * 1.5
    nearest = (quotient + big) - big
    tl.store(scale_ptr + row, scale)
    tl.store(q_ptr + row * depth + k, nearest.to(q_ptr.dtype.element_ty), mask=k < depth)
