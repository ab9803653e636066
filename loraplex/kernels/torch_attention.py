"""Paged attention as one gather of KV blocks and one scaled_dot_product_attention, in stock torch.

Decode rows (one query) of similar context go together: their blocks are gathered into [2, B, KH, S, D], the G = H / KH
query heads of a KV head stand where SDPA has query positions, and a mask [B, 1, 1, S] hides what is no key. A sequence
with more queries goes on its own, with exactly its keys. Indices and masks are made once per step and shared by all
layers.

Bytes past a context are any bytes: with NaN, neither a mask nor a zero weight helps (NaN - inf and 0 x NaN are NaN), so
the gathered positions that lie past a context are set to zero. Padding repeats a sequence's own first block, so nothing
else can be bad.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from loraplex.kernels.quantized_weights import read_int8_kv, write_int8_kv
from loraplex.kernels.step_batch import AttentionPlan

MIN_PADDING = 1024
"""Padded key positions that cost less than one more gather and SDPA (0.25 us each on a 3-head model against 100 us)."""


@dataclass(frozen=True, slots=True)
class _Geometry:
    """What index arithmetic needs of a KV layer; equal for all layers of a model."""

    block_stride: int  # from block to block, in rows of a head's numbers in a block
    num_kv_heads: int
    block_size: int


@dataclass(frozen=True, slots=True)
class _Rule:
    """What is made of scores. sinks: float32 [H]."""

    scale: float
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        """Whether scaled_dot_product_attention has all of it."""
        return self.softcap is None and self.sinks is None

    def of_heads(self, num_groups: int, group: int) -> _Rule:
        """With sinks [num_groups, group, 1], as `_in_steps` takes them."""
        return self if self.sinks is None else replace(self, sinks=self.sinks.view(num_groups, group, 1))


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    rows: torch.Tensor | None  # rows of q, None: all of them in order
    num_rows: int
    blocks: torch.Tensor  # int64 [2 * B * KH * S / block_size], what to gather
    bad_rows: torch.Tensor | None  # int64, gathered positions past a context
    mask: torch.Tensor | None  # [B, 1, 1, S], 0 or -inf


@dataclass(frozen=True, slots=True)
class _Prefill:
    start: int
    end: int
    blocks: torch.Tensor
    first_key: int  # in the gathered positions
    num_keys: int
    mask: torch.Tensor | None  # [queries, keys]; None: plain causal


@dataclass(frozen=True, slots=True)
class _Schedule:
    decodes: tuple[_DecodeGroup, ...]
    prefills: tuple[_Prefill, ...]


def kv_rows(kv_layer: torch.Tensor, width: int) -> tuple[torch.Tensor, int]:
    """The memory from this layer's first block on as a matrix [n, width], and the rows from one block to the next.

    kv_layer [num_blocks, 2, KH, block_size, D] is a view of block-major memory: dense inside a block and a layer.
    """
    num_blocks = kv_layer.shape[0]
    per_layer = kv_layer[0].numel() // width
    stride = kv_layer.stride(0) // width
    assert kv_layer[0].is_contiguous(), "a KV layer is dense inside a block"
    assert kv_layer.stride(0) % width == 0, "KV blocks are a whole number of rows apart"
    return kv_layer.as_strided(((num_blocks - 1) * stride + per_layer, width), (width, 1)), stride


def write_kv(k: torch.Tensor, v: torch.Tensor, kv_layer: torch.Tensor, kv_slot_mapping: torch.Tensor) -> None:
    """Store k and v [T, KH, D] of each token where its kv_slot_mapping says, in one call."""
    if kv_layer.dtype is torch.int8:
        return write_int8_kv(k, v, kv_layer, kv_slot_mapping)
    _, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    rows, block_stride = kv_rows(kv_layer, head_dim)
    block = kv_slot_mapping.div(block_size, rounding_mode="floor")
    # row of (block, k or v, head, offset) = block * block_stride + (kv * KH + head) * block_size + offset
    first = torch.add(kv_slot_mapping, block, alpha=block_stride - block_size)
    heads = torch.arange(0, 2 * num_kv_heads * block_size, block_size, device=kv_layer.device)
    index = first.unsqueeze(1) + heads
    rows.index_copy_(0, index.view(-1), torch.cat((k, v), dim=1).view(-1, head_dim).to(kv_layer.dtype))


def paged_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See KernelBackend.paged_attention."""
    _, _, num_kv_heads, block_size, width = kv_layer.shape
    rows, stride = kv_rows(kv_layer, block_size * width)
    geometry = _Geometry(stride, num_kv_heads, block_size)
    key = ("attention", geometry, sliding_window, q.dtype)
    schedule: _Schedule | None = plan.scratch.get(key)
    if schedule is None:
        schedule = plan.scratch[key] = _make_schedule(plan, geometry, sliding_window, q.dtype)
    rule = _Rule(scale, softcap, sinks)
    if len(schedule.decodes) == 1 and schedule.decodes[0].rows is None:
        return _decode(q, rows, schedule.decodes[0], geometry, rule)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in schedule.decodes:
        assert group.rows is not None
        out.index_copy_(0, group.rows, _decode(q.index_select(0, group.rows), rows, group, geometry, rule))
    for prefill in schedule.prefills:
        queries = q[prefill.start : prefill.end]
        out[prefill.start : prefill.end] = _prefill(queries, rows, prefill, geometry, rule)
    return out


def _gathered(rows: torch.Tensor, blocks: torch.Tensor, head_dim: int) -> torch.Tensor:
    held = rows.index_select(0, blocks)
    return read_int8_kv(held, head_dim) if held.dtype is torch.int8 else held


def _decode(
    q: torch.Tensor,
    rows: torch.Tensor,
    group: _DecodeGroup,
    geometry: _Geometry,
    rule: _Rule,
) -> torch.Tensor:
    """q [B, H, D] -> [B, H, D]"""
    num_heads, head_dim = q.shape[1:]
    kv = _gathered(rows, group.blocks, head_dim)
    if group.bad_rows is not None:
        kv.view(-1, head_dim).index_fill_(0, group.bad_rows, 0.0)
    kv = kv.view(2, group.num_rows, geometry.num_kv_heads, -1, head_dim).to(q.dtype)
    grouped = q.reshape(group.num_rows, geometry.num_kv_heads, num_heads // geometry.num_kv_heads, head_dim)
    if rule.is_plain:
        out = F.scaled_dot_product_attention(grouped, kv[0], kv[1], attn_mask=group.mask, scale=rule.scale)
    else:
        own = rule.of_heads(geometry.num_kv_heads, num_heads // geometry.num_kv_heads)
        out = _in_steps(grouped, kv[0], kv[1], group.mask, own)
    return out.reshape(group.num_rows, num_heads, head_dim)


def _in_steps(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, rule: _Rule
) -> torch.Tensor:
    """softmax(cap(scale q K^T) + mask) V, the softmax in float32; q [B, KH, Q, D], keys and values [B, KH, S, D].

    Sinks have the shape [KH, Q, 1], or one that is expanded to it.
    """
    scores = torch.matmul(q * rule.scale, keys.transpose(-2, -1))
    if rule.softcap is not None:
        scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    if mask is not None:
        scores = scores + mask
    if rule.sinks is not None:
        scores = torch.cat((scores.float(), rule.sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)[..., : keys.shape[-2]]
    return torch.matmul(weights.to(q.dtype), values)


def _prefill(
    q: torch.Tensor,
    rows: torch.Tensor,
    prefill: _Prefill,
    geometry: _Geometry,
    rule: _Rule,
) -> torch.Tensor:
    """q [Q, H, D] of one sequence -> [Q, H, D]"""
    kv = _gathered(rows, prefill.blocks, q.shape[2]).view(2, 1, geometry.num_kv_heads, -1, q.shape[2])
    kv = kv[:, :, :, prefill.first_key : prefill.first_key + prefill.num_keys].to(q.dtype)
    if not rule.is_plain:
        group = q.shape[1] // geometry.num_kv_heads
        keys, values = (t.repeat_interleave(group, dim=1) for t in kv)
        mask = prefill.mask
        if mask is None:
            mask = q.new_full((len(q), prefill.num_keys), -torch.inf).triu_(1)
        queries = q.transpose(0, 1).unsqueeze(0)
        return _in_steps(queries, keys, values, mask, rule.of_heads(q.shape[1], 1))[0].transpose(0, 1)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        kv[0],
        kv[1],
        attn_mask=prefill.mask,
        is_causal=prefill.mask is None,
        scale=rule.scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


# ------------------------------------------------------------------------------------------------------ once per step


def _make_schedule(plan: AttentionPlan, geometry: _Geometry, window: int | None, dtype: torch.dtype) -> _Schedule:
    query_lens = np.array(plan.query_lens, dtype=np.int64)
    contexts = np.array(plan.context_lens_host, dtype=np.int64)
    starts = np.cumsum(query_lens) - query_lens
    first_keys = np.zeros_like(contexts) if window is None else np.maximum(contexts - query_lens - window + 1, 0)
    singles = np.flatnonzero(query_lens == 1)
    groups = _group_by_length(singles, contexts[singles] - first_keys[singles])
    is_whole = len(groups) == 1 and len(singles) == len(query_lens)
    decodes = tuple(
        _decode_group(plan, geometry, group, starts, first_keys, contexts, is_whole, dtype) for group in groups
    )
    prefills = tuple(
        _prefill_item(plan, geometry, int(i), int(starts[i]), int(first_keys[i]), window, dtype)
        for i in np.flatnonzero(query_lens > 1)
    )
    return _Schedule(decodes, prefills)


def _group_by_length(sequences: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Sequences of similar length together, so that padding stays below both what is real and MIN_PADDING or either."""
    groups: list[list[int]] = []
    longest = real = padding = 0
    for position in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[position])
        if groups and padding + longest - length <= max(MIN_PADDING, real + length):
            groups[-1].append(position)
            real, padding = real + length, padding + longest - length
        else:
            groups.append([position])
            longest, real, padding = length, length, 0
    return [sequences[np.sort(np.array(group))] for group in groups]


def _decode_group(
    plan: AttentionPlan,
    geometry: _Geometry,
    group: NDArray[np.int64],
    starts: NDArray[np.int64],
    first_keys: NDArray[np.int64],
    contexts: NDArray[np.int64],
    is_whole: bool,
    dtype: torch.dtype,
) -> _DecodeGroup:
    device, size = plan.block_tables.device, geometry.block_size
    first_keys, contexts = first_keys[group, None], contexts[group, None]
    first_blocks, last_blocks = first_keys // size, (contexts - 1) // size
    blocks = first_blocks + np.arange(int((last_blocks - first_blocks).max()) + 1)
    is_padding = blocks > last_blocks
    columns = np.where(is_padding, first_blocks, blocks)  # padding repeats the first block
    held = (columns[:, :, None] * size + np.arange(size)).reshape(len(group), -1)  # the position that is really there
    is_key = (held >= first_keys) & (held < contexts) & ~is_padding.repeat(size, axis=1)
    tables = plan.block_tables if is_whole else plan.block_tables[_to(group, device)]
    index = _gather_index(tables.long().gather(1, _to(columns, device)), geometry)
    mask = np.where(is_key, 0.0, -np.inf)[:, None, None, :]
    return _DecodeGroup(
        rows=None if is_whole else _to(starts[group], device),
        num_rows=len(group),
        blocks=index,
        bad_rows=_bad_rows(held >= contexts, geometry, device),
        mask=None if is_key.all() else _to(mask, device).to(dtype),
    )


def _bad_rows(is_bad: NDArray[np.bool_], geometry: _Geometry, device: torch.device) -> torch.Tensor | None:
    """Rows of the gathered [2, B, KH, S] where is_bad [B, S], or None."""
    if not is_bad.any():
        return None
    num_rows, length = is_bad.shape
    sequence, position = np.nonzero(is_bad)
    heads = np.arange(2 * geometry.num_kv_heads)
    kv, head = heads[:, None] // geometry.num_kv_heads, heads[:, None] % geometry.num_kv_heads
    return _to((((kv * num_rows + sequence) * geometry.num_kv_heads + head) * length + position).ravel(), device)


def _prefill_item(
    plan: AttentionPlan,
    geometry: _Geometry,
    sequence: int,
    start: int,
    first_key: int,
    window: int | None,
    dtype: torch.dtype,
) -> _Prefill:
    query_len, context = plan.query_lens[sequence], plan.context_lens_host[sequence]
    first_block, end_block = first_key // geometry.block_size, -(-context // geometry.block_size)
    blocks = plan.block_tables[sequence : sequence + 1, first_block:end_block].long()
    mask = None
    if query_len != context or (window is not None and window < context):
        device = plan.block_tables.device
        keys = torch.arange(first_key, context, device=device)
        queries = torch.arange(context - query_len, context, device=device).unsqueeze(1)
        is_hidden = keys > queries
        if window is not None:
            is_hidden |= keys <= queries - window
        mask = torch.zeros(is_hidden.shape, dtype=dtype, device=device).masked_fill_(is_hidden, float("-inf"))
    return _Prefill(
        start=start,
        end=start + query_len,
        blocks=_gather_index(blocks, geometry),
        first_key=first_key - first_block * geometry.block_size,
        num_keys=context - first_key,
        mask=mask,
    )


def _gather_index(blocks: torch.Tensor, geometry: _Geometry) -> torch.Tensor:
    """blocks int64 [B, N] -> rows of `kv_rows` in the order [2, B, KH, N], flat."""
    heads = torch.arange(2 * geometry.num_kv_heads, device=blocks.device).view(2, 1, geometry.num_kv_heads, 1)
    return (blocks[None, :, None, :] * geometry.block_stride + heads).reshape(-1)


def _to(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
