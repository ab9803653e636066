"""FlashAttention 3 for prompts, on a GPU of capability 9.x, installed from `hopper/` of Dao-AILab/flash-attention.

One call for all sequences of a step that have several queries. It takes every row of the step, so that none is copied:
a sequence that others run has a context of 0 here, for which it writes zeros without reading a key, and those write
over the zeros. `num_splits` is 1, as its own choice would look at the whole batch; with what `flash_attention_gap`
leaves out, its tiles do not depend on the batch either.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from loraplex.kernels.step_batch import AttentionPlan

MODULE = "flash_attn_interface"
MOST_DIMS = 256
LEAST_TILE = 64
"""Keys of its smallest tile. Where one divides a KV block it may take another kernel, by the longest prompt."""

MOST_LOCAL_DIMS = 192
"""Of wider heads, tiles with a sliding window differ from those without, and which it takes depends on how wide the
block tables are."""

ALIGNED = 16
"""Bytes: what one of its loads reads."""

NOT_INSTALLED = "it is not installed"


@dataclass(frozen=True, slots=True)
class FlashSequences:
    """The sequences of a step that it runs: context_lens int32 [B], 0 for the others; the most queries of one."""

    context_lens: torch.Tensor
    max_query_len: int


def flash_attention_absence(capability: tuple[int, int]) -> str | None:
    """Why a GPU of this capability has no FlashAttention 3 here, whatever the model; None: it has."""
    if capability[0] != 9:
        return f"it is for GPUs of capability 9.x, not {capability[0]}.{capability[1]}"
    try:
        _entry()
    except ModuleNotFoundError as error:
        return NOT_INSTALLED if error.name == MODULE else f"it cannot be imported: {error}"
    except (
        ImportError,
        AttributeError,
        OSError,
    ) as error:  # built for another torch or CUDA, or another package of that name
        return f"it cannot be imported: {error}"
    return None


def flash_attention_gap(
    capability: tuple[int, int], q: torch.Tensor, kv_layer: torch.Tensor, sliding_window: int | None
) -> str | None:
    """Why it cannot run these prompts, or not with the same bits in every batch; None: it can."""
    absence = flash_attention_absence(capability)
    if absence is not None:
        return absence
    head_dim, block_size = q.shape[2], kv_layer.shape[3]
    if q.dtype not in (torch.float16, torch.bfloat16) or kv_layer.dtype != q.dtype:
        return f"queries are {q.dtype} and the cache is {kv_layer.dtype}"
    if head_dim % 8 or head_dim > MOST_DIMS:
        return f"heads of {head_dim}, no multiple of 8 up to {MOST_DIMS}"
    if block_size >= LEAST_TILE:
        return f"KV blocks of {block_size} tokens, not fewer than {LEAST_TILE}"
    if sliding_window is not None and head_dim > MOST_LOCAL_DIMS:
        return f"a sliding window and heads of {head_dim}, more than {MOST_LOCAL_DIMS}"
    if not all(map(_is_loadable, (q, kv_layer))):
        return f"queries or cache do not lie in steps of {ALIGNED} bytes"
    return None


def _is_loadable(tensor: torch.Tensor) -> bool:
    *outer, last = tensor.stride()
    places = [tensor.data_ptr(), *(stride * tensor.itemsize for stride in outer)]
    return last == 1 and not any(place % ALIGNED for place in places)


def flash_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: AttentionPlan,
    sequences: FlashSequences,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """See KernelBackend.paged_attention, for some sequences of the plan; other rows are zeros. A new dense tensor.

    Its window counts the keys before a query, ours the query's own too.
    """
    out: torch.Tensor = _entry()(
        q,
        kv_layer[:, 0].transpose(1, 2),  # [num_blocks, block_size, KH, D]
        kv_layer[:, 1].transpose(1, 2),
        cache_seqlens=sequences.context_lens,
        page_table=plan.block_tables,
        cu_seqlens_q=plan.q_indptr,
        max_seqlen_q=sequences.max_query_len,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        num_splits=1,
    )
    return out


def _entry() -> Callable[..., torch.Tensor]:
    entry: Callable[..., torch.Tensor] = importlib.import_module(MODULE).flash_attn_with_kvcache
    return entry
