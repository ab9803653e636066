"""Rotary positions with the KV write, and paged attention, over KV blocks in the layout of csrc/attention.h."""

from __future__ import annotations

import ctypes

import torch

from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.quantized_weights import kv_head_dim
from loraplex.kernels.step_batch import AttentionPlan

KV_FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
"""Dtype of the KV cache -> csrc/api.h's Format."""

GROUP = 16
MAX_HEAD_DIM = 256
NO_WINDOW = 1 << 40


class AttentionStep(ctypes.Structure):
    """As in csrc/api.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q_indptr", "context_lens", "block_tables")),
        *((name, ctypes.c_int64) for name in ("sequences", "table_stride", "block_stride")),
        *((name, ctypes.c_int32) for name in ("format", "block_size", "heads", "kv_heads", "head_dim", "threads")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class RotaryCall(ctypes.Structure):
    """As in csrc/api.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "cos", "sin", "kv_slots", "kv")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride", "block_stride", "rope_stride")),
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("format", "block_size", "heads", "kv_heads", "head_dim", "threads")),
        *((name, ctypes.c_int32) for name in ("rotary_dim", "is_interleaved")),
    )


def kv_layout_gap(kv_layer: torch.Tensor) -> str | None:
    """Why these kernels cannot write and read this cache: both are stock torch's then. None: they can."""
    block_size, head_dim = kv_layer.shape[3], kv_head_dim(kv_layer)
    if block_size % GROUP:
        return f"KV blocks of {block_size} tokens, no multiple of {GROUP}"
    if head_dim % GROUP or head_dim > MAX_HEAD_DIM:
        return f"heads of {head_dim}, no multiple of {GROUP} up to {MAX_HEAD_DIM}"
    return None if kv_layer.dtype in KV_FORMATS else f"a KV cache of {kv_layer.dtype}"


def rotary_write_kv(
    library: NativeLibrary,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_layer: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    num_threads: int,
    is_interleaved: bool = False,
) -> torch.Tensor:
    """See KernelBackend.rotary_write_kv; q is rotated in place."""
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.stride() == sin.stride()
    assert kv_slot_mapping.dtype == torch.int64
    assert kv_slot_mapping.is_contiguous()
    call = rotary_call(q, k, v, cos, kv_layer, num_threads, is_interleaved)
    call.cos, call.sin, call.kv_slots, call.tokens = cos.data_ptr(), sin.data_ptr(), kv_slot_mapping.data_ptr(), len(q)
    library.functions.loraplex_rotary_write_kv(ctypes.byref(call))
    return q


def rotary_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    kv_layer: torch.Tensor,
    num_threads: int,
    is_interleaved: bool,
) -> RotaryCall:
    """The call without what changes from step to step: addresses of cos and sin, kv_slots and tokens."""
    _, num_heads, head_dim = q.shape
    block_stride, _, _, _, _ = kv_layer.stride()
    _, _, num_kv_heads, block_size, _ = kv_layer.shape
    assert q.dtype == k.dtype == v.dtype == torch.float32
    assert q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    assert cos.shape[1] <= head_dim
    assert cos.stride(1) == 1
    return RotaryCall(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        kv=kv_layer.data_ptr(),
        q_stride=q.stride(0),
        k_stride=k.stride(0),
        v_stride=v.stride(0),
        block_stride=block_stride,
        rope_stride=cos.stride(0),
        format=KV_FORMATS[kv_layer.dtype],
        block_size=block_size,
        heads=num_heads,
        kv_heads=num_kv_heads,
        head_dim=head_dim,
        threads=num_threads,
        rotary_dim=cos.shape[1],
        is_interleaved=is_interleaved,
    )


def paged_attention(
    library: NativeLibrary,
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    sliding_window: int | None,
    num_threads: int,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See KernelBackend.paged_attention; q [T, H, D] float32, its heads dense; -> [T, H, D] float32."""
    step = attention_step(q, kv_layer, plan, scale, softcap, num_threads)
    assert q.dtype == torch.float32
    assert q.stride()[1:] == step.head_strides
    out = torch.empty_like(q)  # its heads are dense, so this is too
    library.functions.loraplex_paged_attention(
        *(step.address, q.data_ptr(), q.stride(0), kv_layer.data_ptr(), sliding_window or NO_WINDOW),
        *(sinks_address(sinks, q), out.data_ptr()),
    )
    return out


def sinks_address(sinks: torch.Tensor | None, q: torch.Tensor) -> int | None:
    """Of the sinks of q's heads [T, H, D], float32 [H]; None: there are none."""
    if sinks is None:
        return None
    assert sinks.dtype == torch.float32 and sinks.is_contiguous() and sinks.shape == q.shape[1:2]  # noqa: PT018
    return sinks.data_ptr()


def attention_step(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    softcap: float | None,
    num_threads: int,
) -> _Step:
    """Made once per step and kept in the plan."""
    key = ("native attention", q.shape, kv_layer.shape, kv_layer.stride(), kv_layer.dtype, scale, softcap, num_threads)
    step: _Step | None = plan.scratch.get(key)
    if step is None:
        step = plan.scratch[key] = _Step(q, kv_layer, plan, scale, softcap, num_threads)
    return step


class _Step:
    """What all layers of a step share, made once; the plan that it is kept in keeps its tensors alive."""

    def __init__(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
        softcap: float | None,
        num_threads: int,
    ) -> None:
        (num_tokens, num_heads, head_dim), (_, _, num_kv_heads, block_size, _) = q.shape, kv_layer.shape
        tables = plan.block_tables
        assert plan.q_indptr.dtype == plan.context_lens.dtype == tables.dtype == torch.int32
        assert plan.q_indptr.is_contiguous()
        assert plan.context_lens.is_contiguous()
        assert tables.stride(1) == 1
        assert kv_layer[0].is_contiguous(), "a KV layer is dense inside a block"
        assert sum(plan.query_lens) == num_tokens
        assert num_heads % num_kv_heads == 0
        self.head_strides = (head_dim, 1)
        self._arguments = AttentionStep(
            plan.q_indptr.data_ptr(),
            plan.context_lens.data_ptr(),
            tables.data_ptr(),
            len(plan.query_lens),
            tables.stride(0),
            kv_layer.stride(0),
            KV_FORMATS[kv_layer.dtype],
            block_size,
            num_heads,
            num_kv_heads,
            head_dim,
            num_threads,
            scale,
            softcap or 0.0,
        )
        self.address = ctypes.addressof(self._arguments)
