"""A `flash_attn_interface` that is not FlashAttention 3: its signature, what it refuses, and its formula in plain
torch, in float32.

Signature, checks and window as in hopper/flash_attn_interface.py, flash_api.cpp and mask.h. Where the caches are the
fake GPU's, which hold no numbers, nothing is computed.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from loraplex.kernels.triton.flash_attention import MODULE


class FakeFlashAttention:
    """calls: what each was given. error: raised by every call, as without some feature. factor: on all results."""

    def __init__(self, error: Exception | None = None, factor: float = 1.0) -> None:
        self.calls: list[dict[str, Any]] = []
        self.error, self.factor = error, factor

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeFlashAttention:
        module = ModuleType(MODULE)
        module.flash_attn_with_kvcache = self.flash_attn_with_kvcache  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, MODULE, module)
        return self

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        qv: torch.Tensor | None = None,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        cache_seqlens: torch.Tensor | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k_new: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: torch.Tensor | None = None,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: torch.Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        assert causal
        assert num_splits == 1, "or it splits by the whole batch"
        assert softmax_scale is not None
        assert cache_seqlens is not None
        assert page_table is not None
        assert cu_seqlens_q is not None
        assert max_seqlen_q is not None
        check(q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q)
        self.calls.append({"lens": cache_seqlens, "window": window_size, "max_seqlen_q": max_seqlen_q})
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if isinstance(k_cache, FakeTensor):
            return out
        starts = cu_seqlens_q.tolist()
        for table, context, start, end in zip(page_table, cache_seqlens.tolist(), starts, starts[1:], strict=False):
            assert context == 0 or end - start <= max_seqlen_q
            out[start:end] = self.factor * attend(
                q[start:end], k_cache, v_cache, table, context, softmax_scale, window_size
            )
        return out


def check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
) -> None:
    """The TORCH_CHECKs of flash_api.cpp for a paged cache with cu_seqlens_q, and what its 16-byte loads need."""
    head_dim = q.shape[-1]
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert head_dim % 8 == 0
    assert head_dim <= 256
    for tensor in (q, k_cache, v_cache):
        assert (tensor.dtype, tensor.device, tensor.stride(-1)) == (q.dtype, q.device, 1)
        assert all(stride * tensor.itemsize % 16 == 0 for stride in tensor.stride()[:-1])
        assert tensor.data_ptr() % 16 == 0
    assert k_cache.shape == v_cache.shape
    assert q.shape[1] % k_cache.shape[2] == 0
    batch = page_table.shape[0]
    assert (cache_seqlens.shape, cu_seqlens_q.shape) == ((batch,), (batch + 1,))
    for tensor in (cache_seqlens, page_table, cu_seqlens_q):
        assert (tensor.dtype, tensor.device, tensor.stride(-1)) == (torch.int32, q.device, 1)


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    context: int,
    scale: float,
    window: tuple[int, int],
) -> torch.Tensor:
    """One sequence. Query i sees keys up to i + context - queries, from `window[0]` keys before that on; without a key,
    0."""
    if context == 0:
        return torch.zeros_like(q)
    positions = torch.arange(context)
    pages, offsets = table[positions // k_cache.shape[1]].long(), positions % k_cache.shape[1]
    group = q.shape[1] // k_cache.shape[2]
    keys, values = (cache[pages, offsets].float().repeat_interleave(group, dim=1) for cache in (k_cache, v_cache))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    query_positions = torch.arange(context - len(q), context)[:, None]
    is_hidden = positions > query_positions
    if window != (-1, -1):
        assert window[1] == 0
        is_hidden |= positions < query_positions - window[0]
    weights = scores.masked_fill(is_hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
