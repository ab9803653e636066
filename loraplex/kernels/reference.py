"""The specification of every operator, in plain torch: written to be read and believed, not to be fast.

Arithmetic is float32 (or the promoted dtype when that is wider) and is rounded once, to the output's dtype.
The packed block of the stock layout: for each slice A [rank, in], then B [out, rank], then its bias [out], row-major
and in one dtype, then its gain [out] and input gain [in] in float32; each part starts on a multiple of 64 bytes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F

from loraplex.core import LoraSlice, Shard
from loraplex.cpu import CpuUse
from loraplex.distributed import Collectives, RankGroup
from loraplex.kernels.checksum import checksums
from loraplex.kernels.experts import ExpertLora, Experts, ProductOps, experts
from loraplex.kernels.plan import LoraPlan, SlotTable
from loraplex.kernels.quantized_weights import SPECIFICATIONS, QuantizedSpecification, read_int8_kv, write_int8_kv
from loraplex.kernels.slices import ABSENT, ProjectionsLayout, SliceLayout, SliceWeights, align
from loraplex.kernels.step_batch import AttentionPlan, LayersForward
from loraplex.kernels.token_ranking import WeightRule, target_mass
from loraplex.metrics import KernelFallback


def packed_dtype(slices: Sequence[SliceWeights | None], compute_dtype: torch.dtype) -> torch.dtype:
    """The one dtype of a stock block, gains apart: the widest of the adapter's tensors and the model's."""
    parts = (t for s in slices if s is not None for t in (s.lora_a, s.lora_b, s.bias))
    dtypes = (t.dtype for t in parts if t is not None)
    return functools.reduce(torch.promote_types, dtypes, compute_dtype)


def check_input_gains(slices: Sequence[SliceWeights | None]) -> None:
    """Assert that no slice has A and B beside an input gain where other slices have the same input: A would read it
    without the gain."""
    assert len(slices) == 1 or all(s is None or s.input_gain is None or s.lora_a is None for s in slices), (
        f"an input gain beside A and B in a target of {len(slices)} slices"
    )


def layout_block(
    slices: Sequence[SliceWeights | None], compute_dtype: torch.dtype, is_forced: bool = False
) -> tuple[int, tuple[SliceLayout | None, ...]]:
    """(bytes of the block, where each slice lies in it) for the stock layout; forced: all but gains in `compute_dtype`.

    An input gain beside A and B where there are other slices is an AssertionError.
    """
    check_input_gains(slices)
    dtype, cursor = compute_dtype if is_forced else packed_dtype(slices, compute_dtype), 0
    layouts: list[SliceLayout | None] = []
    for s in slices:
        if s is None:
            layouts.append(None)
            continue
        a_offset, cursor = _place(s.lora_a, dtype, cursor)
        b_offset, cursor = _place(s.lora_b, dtype, cursor)
        bias_offset, cursor = _place(s.bias, dtype, cursor)
        gain_offsets, cursor = place_gains(s, cursor)
        layout = SliceLayout(a_offset, b_offset, bias_offset, s.rank, float(s.scaling), dtype, *gain_offsets)
        scales_offset, cursor = place_scales(s, cursor)
        layouts.append(layout if scales_offset == ABSENT else replace(layout, scales_offset=scales_offset))
    return cursor, tuple(layouts)


def place_gains(s: SliceWeights, cursor: int) -> tuple[tuple[int, int], int]:
    """((offset of the gain, of the input gain), the cursor behind them)"""
    gain_offset, cursor = _place(s.gain, torch.float32, cursor)
    input_gain_offset, cursor = _place(s.input_gain, torch.float32, cursor)
    return (gain_offset, input_gain_offset), cursor


def place_scales(s: SliceWeights, cursor: int) -> tuple[int, int]:
    """(offset of rank_scale, which out_scale follows; the cursor behind them)"""
    scales_offset, cursor = _place(s.rank_scale, torch.float32, cursor)
    return scales_offset, _place(s.out_scale, torch.float32, cursor)[1]


def _place(tensor: torch.Tensor | None, dtype: torch.dtype, cursor: int) -> tuple[int, int]:
    """(offset of the tensor, the cursor behind it)"""
    if tensor is None:
        return ABSENT, cursor
    return cursor, cursor + align(tensor.numel() * dtype.itemsize)


def check_rows(y: torch.Tensor, x: torch.Tensor, plan: LoraPlan) -> None:
    if not y.shape[0] == x.shape[0] == plan.num_tokens:
        raise ValueError(f"the plan is of {plan.num_tokens} token rows, x has {x.shape[0]} and y {y.shape[0]}")


def _accumulator(*dtypes: torch.dtype) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


class StockPacking:
    """The stock layout of a block, shared by the backends that read rows of torch tensors."""

    @property
    def adapter_format(self) -> str:
        return "rows.1"

    def adapter_dtype(self, compute_dtype: torch.dtype) -> torch.dtype | None:
        return None

    def packed_nbytes(self, slices: Sequence[SliceWeights | None], compute_dtype: torch.dtype) -> int:
        return layout_block(slices, compute_dtype)[0]

    def pack(
        self, slices: Sequence[SliceWeights | None], compute_dtype: torch.dtype, out: torch.Tensor
    ) -> tuple[SliceLayout | None, ...]:
        nbytes, layouts = layout_block(slices, compute_dtype)
        if out.numel() < nbytes:
            raise ValueError(f"a packed block of {nbytes} bytes does not fit in {out.numel()}")
        for s, layout in zip(slices, layouts, strict=True):
            if s is not None and layout is not None:
                copy_part(s.lora_a, out, layout.a_offset, layout.dtype)
                copy_part(s.lora_b, out, layout.b_offset, layout.dtype)
                copy_part(s.bias, out, layout.bias_offset, layout.dtype)
                copy_gains(s, out, layout)
                copy_scales(s, out, layout)
        return layouts

    shares_projections = True

    def projections_layout(
        self, digest: str, rank: int, widths: tuple[int, int], dtype: torch.dtype, compute_dtype: torch.dtype
    ) -> ProjectionsLayout:
        """A^T [in, rank], then B [out, rank], row-major."""
        dtype, (in_features, out_features) = torch.promote_types(dtype, compute_dtype), widths
        b_offset = align(in_features * rank * dtype.itemsize)
        nbytes = b_offset + align(out_features * rank * dtype.itemsize)
        return ProjectionsLayout(digest, rank, in_features, out_features, dtype, b_offset, nbytes)

    def pack_projections(
        self, layout: ProjectionsLayout, lora_a: torch.Tensor, lora_b: torch.Tensor, out: torch.Tensor
    ) -> None:
        copy_part(lora_a.T, out, 0, layout.dtype)
        copy_part(lora_b, out, layout.b_offset, layout.dtype)

    def packed_layouts(
        self, slices: Sequence[SliceWeights | None], compute_dtype: torch.dtype
    ) -> tuple[SliceLayout | None, ...]:
        return layout_block(slices, compute_dtype)[1]

    def unpack(
        self, layouts: Sequence[SliceLayout | None], in_features: int, out_features: Sequence[int], block: torch.Tensor
    ) -> tuple[SliceWeights | None, ...]:
        return tuple(
            None if layout is None else unpack_slice(layout, in_features, width, block)
            for layout, width in zip(layouts, out_features, strict=True)
        )

    def own_dtype(self, dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
        return compute_dtype

    def own_shape(self, num_rows: int, width: int) -> tuple[int, ...]:
        return num_rows, width

    def pack_own(self, weight: torch.Tensor, stored: torch.Tensor) -> None:
        stored.copy_(weight)

    def unpack_own(self, stored: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
        return stored

    def own_weight(self, stored: torch.Tensor, num_rows: int, width: int) -> Any:
        return stored

    def checksums(self, pieces: Sequence[torch.Tensor]) -> tuple[int, ...]:
        return checksums(pieces)


def copy_part(tensor: torch.Tensor | None, out: torch.Tensor, offset: int, dtype: torch.dtype) -> None:
    """One part and the gap behind it: equal adapters have equal bytes, and nothing of a victim stays."""
    if tensor is None:
        return
    end = offset + tensor.numel() * dtype.itemsize
    out[offset:end].view(dtype).view(tensor.shape).copy_(tensor)
    out[end : offset + align(end - offset)].zero_()


def copy_gains(s: SliceWeights, out: torch.Tensor, layout: SliceLayout) -> None:
    """Both, into the block."""
    copy_part(s.gain, out, layout.gain_offset, torch.float32)
    copy_part(s.input_gain, out, layout.input_gain_offset, torch.float32)


def copy_scales(s: SliceWeights, out: torch.Tensor, layout: SliceLayout) -> None:
    """Both, into the block."""
    copy_part(s.rank_scale, out, layout.scales_offset, torch.float32)
    copy_part(s.out_scale, out, layout.out_scale_offset, torch.float32)


def unpack_slice(layout: SliceLayout, in_features: int, out_features: int, block: torch.Tensor) -> SliceWeights:
    def part(offset: int, *shape: int) -> torch.Tensor | None:
        return _part(block, offset, layout.dtype, *shape)

    lora_a = part(layout.a_offset, layout.rank, in_features)
    lora_b = part(layout.b_offset, out_features, layout.rank)
    bias, gains = part(layout.bias_offset, out_features), unpack_gains(layout, in_features, out_features, block)
    return SliceWeights(lora_a, lora_b, bias, layout.scale, *gains, **unpack_scales(layout, out_features, block))


def unpack_gains(
    layout: SliceLayout, in_features: int, out_features: int, block: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(the gain, the input gain) as views."""
    gain = _part(block, layout.gain_offset, torch.float32, out_features)
    return gain, _part(block, layout.input_gain_offset, torch.float32, in_features)


def unpack_scales(layout: SliceLayout, out_features: int, block: torch.Tensor) -> dict[str, Any]:
    """rank_scale and out_scale as views."""
    rank_scale = _part(block, layout.scales_offset, torch.float32, layout.rank)
    out_scale = _part(block, layout.out_scale_offset, torch.float32, out_features)
    return {"rank_scale": rank_scale, "out_scale": out_scale}


def _part(block: torch.Tensor, offset: int, dtype: torch.dtype, *shape: int) -> torch.Tensor | None:
    if offset == ABSENT:
        return None
    return block[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


NORMED_AT_ONCE = 1 << 20
"""Numbers of a weight that are float32 at one moment, while the norms of its rows are computed."""


class StockWeights:
    """Weights of linears as the checkpoint has them, shared by the backends of stock torch."""

    quantizations: tuple[str, ...] = ()
    packed_format: str | None = None

    def fallbacks(self) -> tuple[KernelFallback, ...]:
        return ()

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        return weight_dtype

    def linear_rows(self, weight: Any, first: int, last: int) -> Any:
        is_plain = isinstance(weight, torch.Tensor) and weight.layout == torch.strided
        return weight[first:last] if is_plain else None

    def embeds_prepared(self, quantization: str | None) -> bool:
        return False

    def embedding(self, token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, weight)

    def row_norms(
        self, weight: Any, first: int, last: int, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        norms = lora_b.new_empty(last - first)
        step = max(1, NORMED_AT_ONCE // lora_a.shape[1])
        for start in range(first, last, step):
            here = slice(start - first, min(start + step, last) - first)
            rows = self._rows(weight, start, first + here.stop).addmm_(lora_b[here], lora_a, alpha=scaling)
            torch.linalg.vector_norm(rows, dim=1, out=norms[here])
        return norms

    def _rows(self, weight: Any, first: int, last: int) -> torch.Tensor:
        """Of a weight in any form of this backend: float32, in memory of their own."""
        rows: torch.Tensor = weight[first:last].to(torch.float32, copy=True)
        return rows

    def rank_nbytes(self, num_ranks: int) -> int:
        return 0

    def collectives(self, shard: Shard, memory: torch.Tensor, watched: Sequence[int]) -> Collectives:
        raise NotImplementedError("sums over ranks have no kernels here")

    def sum_ranks(self, part: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
        return ranks.sum(part)

    def rms_norm_ranks(self, x: torch.Tensor, weight: torch.Tensor, eps: float, ranks: RankGroup) -> torch.Tensor:
        wide = x.to(_accumulator(x.dtype))
        squares = ranks.sum(wide.pow(2).sum(-1, keepdim=True))
        normed = wide * torch.rsqrt(squares / (ranks.shard.size * x.shape[-1]) + eps)
        return weight * normed.to(x.dtype)

    def experts(self, x: torch.Tensor, logits: torch.Tensor, layer: Experts, lora: ExpertLora | None) -> torch.Tensor:
        return experts(cast(ProductOps, self), x, logits, layer, lora)

    def add_gated(self, y: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return y + torch.sigmoid(gate) * x

    def captured(self, forward: LayersForward, on_seconds: Callable[[str, float], None] | None = None) -> LayersForward:
        return forward

    def reserve_workspace(self, num_rows: int) -> None:
        """Nothing is kept between steps."""

    def cpu_use(self, use: CpuUse) -> CpuUse:
        return use

    @property
    def workspace_nbytes(self) -> int:
        return 0

    def release_workspace(self) -> int:
        return 0

    def reset_workspace(self) -> None:
        """There is nothing that a step expects."""

    def choose_attention(
        self,
        num_heads: int,
        dtype: torch.dtype,
        kv: torch.Tensor,
        sliding_windows: Sequence[int | None],
        softcap: float | None = None,
        has_sinks: bool = False,
    ) -> None:
        """There is one."""

    @property
    def is_capturable(self) -> bool:
        return False

    def capturing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def expect_adapters(self, table: SlotTable, compute_dtype: torch.dtype, max_rank: int) -> None:
        """Nothing is captured."""

    def rank_capacity(self, table: SlotTable) -> int:
        return 0

    def may_replay(self, table: SlotTable) -> bool:
        return False

    def keep_linear(self, weight: QuantizedSpecification) -> Any | None:
        return None

    def linear_tensors(self, weight: Any) -> dict[str, torch.Tensor]:
        return {"weight": weight}

    def restore_linear(self, tensors: Mapping[str, torch.Tensor], shape: Sequence[int]) -> Any:
        return tensors["weight"]


class ReferenceBackend(StockPacking, StockWeights):
    """Every operator as its formula."""

    name = description = "reference"
    quantizations = tuple(SPECIFICATIONS)

    def begin_lora(
        self, x: torch.Tensor, plan: LoraPlan, table: SlotTable, first_row: int, slices: tuple[LoraSlice, ...]
    ) -> None:
        """Nothing: `add_lora` does all of it."""

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        plan: LoraPlan,
        table: SlotTable,
        first_row: int,
        slices: tuple[LoraSlice, ...],
    ) -> None:
        check_rows(y, x, plan)
        for segment, (row, s) in itertools.product(plan.segments, enumerate(slices, first_row)):
            view = table.views(row, segment.lora_slot)
            if view is None:
                continue
            rows = y[segment.start : segment.end, s.out_offset : s.out_offset + s.out_features]
            wide = rows.to(_accumulator(y.dtype, *(t.dtype for t in view[:3] if t is not None)))
            scale: float | torch.Tensor = view.scale
            if view.gain is not None:
                wide = weighted_gain(view.gain, segment.weight) * wide
                scale = view.gain * view.scale
            if view.lora_a is not None and view.lora_b is not None:
                shrunk = x[segment.start : segment.end].to(wide.dtype) @ view.lora_a.to(wide.dtype).T
                if view.rank_scale is not None and view.out_scale is not None:
                    shrunk, scale = shrunk * view.rank_scale, view.out_scale * view.scale
                wide = wide + segment.weight * scale * (shrunk @ view.lora_b.to(wide.dtype).T)
            if view.bias is not None:
                wide = wide + segment.weight * view.bias.to(wide.dtype)
            rows.copy_(wide)

    def scale_input(self, x: torch.Tensor, plan: LoraPlan, table: SlotTable, row: int) -> None:
        check_rows(x, x, plan)
        for segment in plan.segments:
            view = table.views(row, segment.lora_slot)
            if view is not None and view.input_gain is not None:
                rows = x[segment.start : segment.end]
                rows.copy_(weighted_gain(view.input_gain, segment.weight) * rows.to(_accumulator(x.dtype)))

    def prepare_linear(
        self, weight: torch.Tensor, quantization: str | None = None
    ) -> torch.Tensor | QuantizedSpecification:
        return weight if quantization is None else SPECIFICATIONS[quantization].of(weight)

    def keep_linear(self, weight: QuantizedSpecification) -> QuantizedSpecification:
        return weight

    def _rows(self, weight: Any, first: int, last: int) -> torch.Tensor:
        if isinstance(weight, QuantizedSpecification):
            return weight.rows(first, last)
        return super()._rows(weight, first, last)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor | QuantizedSpecification, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(weight, QuantizedSpecification):
            return weight.linear(x) if bias is None else weight.linear(x) + bias
        wide = _accumulator(x.dtype)
        return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(_accumulator(x.dtype))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype) if weight.dtype == x.dtype else (weight * normed).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.add_scaled(x, residual, scale)
        return self.rms_norm(total, weight, eps), total

    def add_scaled(self, x: torch.Tensor, residual: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale + residual

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        wide = x.to(_accumulator(x.dtype))
        centred = wide - wide.mean(-1, keepdim=True)
        normed = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight
        return (normed if bias is None else normed + bias).to(x.dtype)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu(self, x: torch.Tensor, is_tanh: bool, has_up: bool) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1) if has_up else (x, 1)
        return F.gelu(gate, approximate="tanh" if is_tanh else "none") * up

    def rotary_write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_layer: torch.Tensor,
        kv_slot_mapping: torch.Tensor,
        is_interleaved: bool = False,
    ) -> torch.Tensor:
        k = rotated(k, cos, sin, is_interleaved)
        if kv_layer.dtype is torch.int8:
            write_int8_kv(k, v, kv_layer, kv_slot_mapping)
        else:
            block_size = kv_layer.shape[3]
            block, offset = kv_slot_mapping // block_size, kv_slot_mapping % block_size
            kv_layer[block, 0, :, offset], kv_layer[block, 1, :, offset] = k.to(kv_layer.dtype), v.to(kv_layer.dtype)
        return rotated(q, cos, sin, is_interleaved)

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
        sliding_window: int | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        end = 0
        for i, (query_len, context_len) in enumerate(zip(plan.query_lens, plan.context_lens_host, strict=True)):
            start, end = end, end + query_len
            keys, values = _gather_kv(kv_layer, plan.block_tables[i], context_len, q.shape[2])
            out[start:end] = _attend(q[start:end], keys, values, scale, sliding_window, softcap, sinks).to(q.dtype)
        return out

    def row_argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = self.ordered_top_k(x, 1)
        return ids[:, 0], values[:, 0]

    def mask_logits(self, logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
        bits = (bitmask[:, :, None] >> torch.arange(32, device=bitmask.device) & 1).bool().flatten(1)
        for row, is_allowed in zip(rows.tolist(), bits, strict=True):
            bias = torch.full_like(logits[row], -torch.inf)
            bias[: len(is_allowed)][is_allowed[: len(bias)]] = 0.0
            logits[row] += bias

    def ordered_top_k(self, x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = torch.sort(x, dim=-1, descending=True, stable=True)
        return values[:, :k], ids[:, :k]

    def token_weights(self, logits: torch.Tensor, rule: WeightRule) -> tuple[torch.Tensor, torch.Tensor]:
        weights = rule.of(logits)
        return weights, weights.double().sum(-1, keepdim=True)

    def invert_cdf(self, weights: torch.Tensor, least: torch.Tensor | None, uniform: torch.Tensor) -> torch.Tensor:
        kept = weights if least is None else weights * (weights >= least)
        mass = kept.double().cumsum(-1)
        return torch.searchsorted(mass, target_mass(mass[:, -1:], uniform), right=True)[:, 0]

    def keep_nucleus(
        self, logits: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor, rule: WeightRule
    ) -> torch.Tensor:
        _, order = self.ordered_top_k(logits, logits.shape[1])
        in_order = weights.gather(1, order).double()
        is_kept = in_order.cumsum(-1) - in_order < wanted
        return weights.mul_(torch.zeros_like(is_kept).scatter_(1, order, is_kept))

    def log_sum_exp(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.double().contiguous().logsumexp(-1, keepdim=True)  # strides change the order of a sum

    def token_ranks(self, logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        _, order = self.ordered_top_k(logits, logits.shape[1])
        return 1 + (order == token_ids[:, None]).int().argmax(-1)


def weighted_gain(gain: torch.Tensor, weight: float) -> torch.Tensor:
    """1 + weight (gain - 1), which is the gain itself, to the bit, where the weight is 1."""
    return weight * gain + (1 - weight)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """y * cos + rotate_half(y) * sin of the first R dimensions y of x [T, H, D]; cos, sin [T, R], their halves equal.

    rotate_half([a, b]) = [-b, a]; a and b are halves, or, interleaved, the even and the odd dimensions.
    """
    if cos.shape[1] == 0:
        return x
    turned, kept = x.split_with_sizes([cos.shape[1], x.shape[2] - cos.shape[1]], dim=-1)
    if is_interleaved:
        cos, sin = (t.chunk(2, dim=-1)[0].repeat_interleave(2, dim=-1) for t in (cos, sin))
        across = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        across = torch.cat((-b, a), dim=-1)
    return torch.cat((turned * cos[:, None, :] + across * sin[:, None, :], kept), dim=-1)


def _gather_kv(
    kv_layer: torch.Tensor, blocks: torch.Tensor, context_len: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one sequence, each [context_len, KH, D]; what lies behind them is never read."""
    block_size = kv_layer.shape[3]
    held = kv_layer[blocks[: -(-context_len // block_size)].long()]
    if kv_layer.dtype is torch.int8:
        held = read_int8_kv(held.flatten(3), head_dim)
    keys, values = held.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :context_len]
    return keys, values


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of the last len(q) positions: q [Q, H, D]; keys, values [C, KH, D] -> [Q, H, D] in float32."""
    wide = _accumulator(q.dtype)
    group = q.shape[1] // keys.shape[1]
    keys, values = (t.to(wide).repeat_interleave(group, dim=1) for t in (keys, values))
    key_pos = torch.arange(keys.shape[0], device=q.device)
    query_pos = key_pos[keys.shape[0] - q.shape[0] :, None]
    is_hidden = key_pos > query_pos
    if sliding_window is not None:
        is_hidden |= key_pos <= query_pos - sliding_window
    scores = torch.einsum("qhd,chd->hqc", q.to(wide), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(wide)[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = scores.softmax(dim=-1)[:, :, : len(keys)]
    return torch.einsum("hqc,chd->qhd", weights, values)
