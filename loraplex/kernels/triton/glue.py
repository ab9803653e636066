"""Between the products of a layer, one launch each: norms, rotary positions with the write of KV, SiLU-mul.

Arithmetic is float32 and rounds where loraplex/kernels/reference.py does. Grids depend on shapes alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loraplex.kernels.triton.launch import FLOAT_DTYPES, Launcher, cdiv, next_power_of_2

TILE = 4096
"""Numbers that one program holds, where a row is not longer."""

LONGEST_ROW = 32768
"""Numbers of a row that is normed."""


# ------------------------------------------------------------------------------------------------------------- norms


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    x_token_stride,
    x_head_stride,
    residual_stride,
    eps,
    scale,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """ROWS rows of `size` numbers. With a residual: it becomes scale * x + residual, and that is normed. IS_WIDE: the
    weight is wider than x, and what is normed is not rounded before the product."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    is_inside = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    wide_rows = rows.to(tl.int64)
    starts = wide_rows // HEADS * x_token_stride + wide_rows % HEADS * x_head_stride
    x = tl.load(x_ptr + starts[:, None] + columns[None, :], mask=is_inside, other=0.0)
    dtype = x.dtype
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + (wide_rows * residual_stride)[:, None] + columns[None, :]
        residual = tl.load(residual_ptrs, mask=is_inside, other=0.0)
        if HAS_SCALE:
            x = (x.to(tl.float32) * scale).to(dtype)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(residual_ptrs, x, mask=is_inside)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    normed = wide * inverse[:, None]
    if not IS_WIDE:
        normed = normed.to(dtype).to(tl.float32)
    out_ptrs = out_ptr + (wide_rows * SIZE)[:, None] + columns[None, :]
    tl.store(out_ptrs, (normed * weight[None, :]).to(dtype), mask=is_inside)


def rms_norm_gap(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """Why the kernel does not cover the case; None: it does. So the other `_gap` functions."""
    if x.dtype not in FLOAT_DTYPES or weight.dtype not in (x.dtype, torch.float32):
        return f"x is {x.dtype} and the weight {weight.dtype}"
    if x.dim() not in (2, 3) or x.stride(-1) != 1 or not weight.is_contiguous():
        return f"x has {x.dim()} dimensions, or x or the weight is not dense"
    if x.shape[-1] > LONGEST_ROW:
        return f"rows of {x.shape[-1]}, more than {LONGEST_ROW}"
    return None


def rms_norm(launcher: Launcher, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, n] or [T, H, n] of any strides but the last; a new tensor."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = 1 if x.dim() == 2 else x.shape[1]
    head_stride = 0 if x.dim() == 2 else x.stride(1)
    _norm(launcher, x, x, weight, out, eps, heads, head_stride, has_residual=False)
    return out


def add_rms_norm_gap(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> str | None:
    if x.dim() != 2 or residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(-1) != 1:
        return f"x is {x.dtype} {tuple(x.shape)} and the residual {residual.dtype} {tuple(residual.shape)}"
    return rms_norm_gap(x, weight)


def add_rms_norm(
    launcher: Launcher, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and residual [T, n]. The sum replaces the residual, and the norm replaces x where x is dense."""
    out = x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(launcher, x, residual, weight, out, eps, heads=1, head_stride=0, has_residual=True, scale=scale)
    return out, residual


def _norm(
    launcher: Launcher,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    heads: int,
    head_stride: int,
    has_residual: bool,
    scale: float = 1.0,
) -> None:
    size = x.shape[-1]
    num_rows = x.shape[0] * heads
    columns = next_power_of_2(size)
    rows = _rows(TILE // columns, num_rows, launcher)
    launcher.launch(
        rms_norm_kernel,
        (cdiv(num_rows, rows),),
        x,
        residual,
        weight,
        out,
        num_rows,
        x.stride(0),
        head_stride,
        residual.stride(0),
        eps,
        scale,
        num_warps=_num_warps(rows * columns),
        num_stages=1,
        HEADS=heads,
        SIZE=size,
        COLUMNS=columns,
        ROWS=rows,
        HAS_RESIDUAL=has_residual,
        HAS_SCALE=scale != 1.0,
        IS_WIDE=weight.dtype != x.dtype,
    )


def _rows(most: int, num_rows: int, launcher: Launcher) -> int:
    """Of one program: `most`, or a quarter where that would leave multiprocessors idle. Two kernels to compile, not one
    for each batch."""
    return max(1, most if num_rows >= most * launcher.target.num_sms else most // 4)


def _num_warps(numbers: int) -> int:
    """16 numbers for each thread, from one warp to sixteen."""
    return min(16, max(1, numbers // 512))


# ---------------------------------------------------------------------------------------------------------- SiLU-mul


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, row_stride, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = columns < SIZE
    gate_ptrs = gate_up_ptr + row * row_stride + columns
    gate = tl.load(gate_ptrs, mask=is_inside, other=0.0)
    up = tl.load(gate_ptrs + SIZE, mask=is_inside, other=0.0)
    wide = gate.to(tl.float32)
    decay = tl.exp(-tl.abs(wide))  # at most 1
    silu = (wide * tl.where(wide < 0, decay, 1.0) / (1.0 + decay)).to(gate.dtype)
    out = (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + row * SIZE + columns, out, mask=is_inside)


def silu_mul_gap(gate_up: torch.Tensor) -> str | None:
    if gate_up.dtype not in FLOAT_DTYPES or gate_up.dim() != 2 or gate_up.stride(1) != 1:
        return f"gate_up is {gate_up.dtype} {tuple(gate_up.shape)}, or not dense"
    return None


def silu_mul(launcher: Launcher, gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 n] of any row stride -> [T, n]."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    columns = min(2048, next_power_of_2(size))
    launcher.launch(
        silu_mul_kernel,
        (num_rows, cdiv(size, columns)),
        gate_up,
        out,
        gate_up.stride(0),
        num_warps=_num_warps(columns),
        num_stages=1,
        SIZE=size,
        COLUMNS=columns,
    )
    return out


# ------------------------------------------------------------------------------------------------ rotary and KV write


@triton.jit
def _rotated(ptrs, cos_ptrs, sin_ptrs, is_inside, HALF: tl.constexpr, APART: tl.constexpr):
    """Pairs of dimensions, APART from each other, turned: (a cos - b sin, b cos + a sin), float32."""
    a = tl.load(ptrs, mask=is_inside, other=0.0).to(tl.float32)
    b = tl.load(ptrs + APART, mask=is_inside, other=0.0).to(tl.float32)
    cos_a = tl.load(cos_ptrs, mask=is_inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptrs + HALF, mask=is_inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptrs, mask=is_inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptrs + HALF, mask=is_inside, other=0.0).to(tl.float32)
    return a * cos_a - b * sin_a, b * cos_b + a * sin_b


@triton.jit(do_not_specialize=["num_tokens", "num_query_programs"], do_not_specialize_on_alignment=["slots_ptr"])
def rotary_write_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    kv_ptr,
    slots_ptr,
    num_tokens,
    num_query_programs,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    angle_stride,
    kv_block_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """ROWS pairs of token and head. The first programs turn queries in place, the others cache keys and values.

    HALF pairs of a head's first dimensions are turned: halves of these, or, interleaved, neighbours.
    """
    APART: tl.constexpr = 1 if IS_INTERLEAVED else HALF
    STEP: tl.constexpr = 2 if IS_INTERLEAVED else 1
    program = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    if program < num_query_programs:
        rows = program * ROWS + tl.arange(0, ROWS)
        token, head = (rows // HEADS).to(tl.int64), rows % HEADS
        is_inside = (token < num_tokens)[:, None] & (columns < HALF)[None, :]
        angles = (token * angle_stride)[:, None] + columns[None, :]
        ptrs = q_ptr + (token * q_token_stride + head * q_head_stride)[:, None] + STEP * columns[None, :]
        a, b = _rotated(ptrs, cos_ptr + angles, sin_ptr + angles, is_inside, HALF, APART)
        tl.store(ptrs, a.to(q_ptr.dtype.element_ty), mask=is_inside)
        tl.store(ptrs + APART, b.to(q_ptr.dtype.element_ty), mask=is_inside)
    else:
        rows = (program - num_query_programs) * ROWS + tl.arange(0, ROWS)
        token, head = (rows // KV_HEADS).to(tl.int64), rows % KV_HEADS
        slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
        is_inside = (slot >= 0)[:, None] & (columns < HALF)[None, :]
        angles = (token * angle_stride)[:, None] + columns[None, :]
        k_ptrs = k_ptr + (token * k_token_stride + head * k_head_stride)[:, None] + columns[None, :]
        v_ptrs = v_ptr + (token * v_token_stride + head * v_head_stride)[:, None] + columns[None, :]
        place = slot // BLOCK_SIZE * kv_block_stride + (head * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
        key_ptrs = kv_ptr + place[:, None] + columns[None, :]
        value_ptrs = key_ptrs + KV_HEADS * BLOCK_SIZE * HEAD_DIM
        dtype = (
            k_ptr.dtype.element_ty
        )  # keys are rounded to the dtype of activations first, as if they had come back from a kernel
        cache_dtype = kv_ptr.dtype.element_ty
        if HALF > 0:
            turned = (STEP - 1) * columns[None, :]
            pairs = k_ptrs + turned
            a, b = _rotated(pairs, cos_ptr + angles, sin_ptr + angles, is_inside, HALF, APART)
            tl.store(key_ptrs + turned, a.to(dtype).to(cache_dtype), mask=is_inside)
            tl.store(key_ptrs + turned + APART, b.to(dtype).to(cache_dtype), mask=is_inside)
        for first in tl.static_range(2 * HALF, HEAD_DIM, COLUMNS):
            is_kept = (slot >= 0)[:, None] & (first + columns < HEAD_DIM)[None, :]
            keys = tl.load(k_ptrs + first, mask=is_kept, other=0.0)
            tl.store(key_ptrs + first, keys.to(cache_dtype), mask=is_kept)
        for first in tl.static_range(0, HEAD_DIM, COLUMNS):
            is_held = (slot >= 0)[:, None] & (first + columns < HEAD_DIM)[None, :]
            values = tl.load(v_ptrs + first, mask=is_held, other=0.0)
            tl.store(value_ptrs + first, values.to(cache_dtype), mask=is_held)


def rotary_write_kv_gap(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv_layer: torch.Tensor
) -> str | None:
    tensors = (q, k, v, cos, sin)
    if kv_layer.dtype not in FLOAT_DTYPES or q.dtype not in FLOAT_DTYPES or any(t.dtype != q.dtype for t in tensors):
        return f"queries are {q.dtype}, angles {cos.dtype}, and the cache is {kv_layer.dtype}"
    if q.shape[2] % 2:
        return f"heads of {q.shape[2]}"
    if any(t.stride(-1) != 1 for t in tensors) or cos.stride() != sin.stride() or not kv_layer[0].is_contiguous():
        return "queries, keys, values, angles or cache are not dense"
    return None


def rotary_write_kv(
    launcher: Launcher,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_layer: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    is_interleaved: bool = False,
) -> torch.Tensor:
    """q [T, H, D], k and v [T, KH, D] of any strides but the last. q is turned in place, k stays. Slot -1: no write."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[2:4]
    columns = next_power_of_2(head_dim // 2)
    rows = _rows(TILE // 4 // columns, num_tokens * num_heads, launcher)
    num_query_programs = cdiv(num_tokens * num_heads, rows) if cos.shape[1] else 0
    launcher.launch(
        rotary_write_kv_kernel,
        (num_query_programs + cdiv(num_tokens * num_kv_heads, rows),),
        q,
        k,
        v,
        cos,
        sin,
        kv_layer,
        kv_slot_mapping,
        num_tokens,
        num_query_programs,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cos.stride(0),
        kv_layer.stride(0),
        num_warps=_num_warps(2 * rows * columns),
        num_stages=1,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=cos.shape[1] // 2,
        IS_INTERLEAVED=is_interleaved,
        COLUMNS=columns,
        ROWS=rows,
        BLOCK_SIZE=block_size,
    )
    return q
