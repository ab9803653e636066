"""The operators in few calls of stock torch, on any device.

`add_lora` is a loop of small matrix products over (segment, slice). Measured on 2 cores, 16 rows with 16 adapters of
rank 16: a batched product is as fast (10 + 47 us against 16 x (1.7 + 2.6)) only if the weights need not be stacked
first (18 us each), and one product for the A's of all slices is slower for one row (6.9 against 5.5 us), so neither is
done.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from loraplex.core import LoraSlice
from loraplex.kernels.plan import LoraPlan, SlotTable
from loraplex.kernels.reference import StockPacking, StockWeights, check_rows, rotated, weighted_gain
from loraplex.kernels.step_batch import AttentionPlan
from loraplex.kernels.token_ranking import StockSampling
from loraplex.kernels.torch_attention import paged_attention, write_kv

USUAL_ROWS = 16
"""Rows of a usual decode step, for which oneDNN chooses a layout; other numbers of rows work with it."""


class TorchBackend(StockPacking, StockWeights, StockSampling):
    """Stock torch, as few calls as its operators allow."""

    name = "torch"

    def __init__(self, reason: str = "") -> None:
        """`reason`: why it is not native kernels."""
        self.description = f"stock torch ({reason})" if reason else "stock torch"

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
        blocks = [_deltas(table, first_row, segment.lora_slot, len(slices)) for segment in plan.segments]
        if not any(blocks):
            return
        split = _row_split(plan)
        inputs = split.of(x)
        outputs = [split.of(y.narrow(1, s.out_offset, s.out_features)) for s in slices]
        for i, (segment, deltas) in enumerate(zip(plan.segments, blocks, strict=True)):
            for delta in deltas:
                _add_delta(outputs[delta.slice_index][i], inputs[i], delta, segment.weight)

    def scale_input(self, x: torch.Tensor, plan: LoraPlan, table: SlotTable, row: int) -> None:
        check_rows(x, x, plan)
        first_row, index = table.place_of(row)
        num_slices = len(table.target_at(first_row).slices)
        for segment in plan.segments:
            for delta in _deltas(table, first_row, segment.lora_slot, num_slices):
                if delta.slice_index == index and delta.input_gain is not None:
                    x[segment.start : segment.end].mul_(weighted_gain(delta.input_gain, segment.weight))

    def prepare_linear(self, weight: torch.Tensor, quantization: str | None = None) -> torch.Tensor:
        """oneDNN's own layout for float32 on a CPU: 16 rows 1.6 times as fast, none slower (docs/performance.md)."""
        is_packable = weight.device.type == "cpu" and weight.dtype == torch.float32 and torch._C._has_mkldnn
        if not is_packable or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            return weight
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), USUAL_ROWS)
        return packed

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not weight.is_mkldnn:
            return F.linear(x, weight, bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, bias, "none", [], "")
        return y

    def embedding(self, token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """oneDNN's layout is turned back as a whole: a head's rows are read while an adapter is loaded, in no step."""
        return F.embedding(token_ids, weight.to_dense() if weight.is_mkldnn else weight)

    def row_norms(
        self, weight: Any, first: int, last: int, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """oneDNN's layout is turned back as a whole."""
        dense = weight.to_dense() if getattr(weight, "is_mkldnn", False) else weight
        return super().row_norms(dense, first, last, lora_a, lora_b, scaling)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        # One pass for the norm, one for the product: 9 us for [16, 576] where F.rms_norm takes 13 (and 80 against 950
        # for 512 rows).
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
        inverse = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
        if weight.dtype != x.dtype:
            wide: torch.Tensor = (x * inverse * weight).to(x.dtype)
            return wide
        normed: torch.Tensor = (x * inverse).to(x.dtype)
        return normed.mul_(weight)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x.add_(residual) if scale == 1.0 else x.mul_(scale).add_(residual)
        return self.rms_norm(total, weight, eps), total

    def add_scaled(self, x: torch.Tensor, residual: torch.Tensor, scale: float) -> torch.Tensor:
        return residual.add_(x if scale == 1.0 else x * scale)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu(self, x: torch.Tensor, is_tanh: bool, has_up: bool) -> torch.Tensor:
        gate, *up = x.chunk(2 if has_up else 1, dim=-1)
        activated = F.gelu(gate, approximate="tanh" if is_tanh else "none")
        return activated.mul_(up[0]) if up else activated

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
        if is_interleaved or cos.shape[1] < q.shape[2]:
            write_kv(rotated(k, cos, sin, is_interleaved), v, kv_layer, kv_slot_mapping)
            return rotated(q, cos, sin, is_interleaved)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        sin_a, sin_b = sin.chunk(2, dim=-1)
        write_kv(_rotate(k, cos, sin_a, sin_b), v, kv_layer, kv_slot_mapping)
        return _rotate(q, cos, sin_a, sin_b)

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
        return paged_attention(q, kv_layer, plan, scale, sliding_window, softcap, sinks)


class _Delta(NamedTuple):
    """One slice of one packed block, as the products want it: A^T [in, rank], B^T [rank, out]."""

    slice_index: int
    a_t: torch.Tensor | None
    b_t: torch.Tensor | None
    bias: torch.Tensor | None
    scale: float
    gain: torch.Tensor | None
    input_gain: torch.Tensor | None
    rank_scale: torch.Tensor | None
    out_scale: torch.Tensor | None


def _deltas(table: SlotTable, first_row: int, lora_slot: int, num_slices: int) -> tuple[_Delta, ...]:
    """What the adapter in `lora_slot` has for a target; made once per block and kept in the table until it changes."""
    cache = table.derived[lora_slot]
    cached: tuple[_Delta, ...] | None = cache.get(first_row)
    if cached is None:
        cached = cache[first_row] = tuple(_make_deltas(table, first_row, lora_slot, num_slices))
    return cached


def _make_deltas(table: SlotTable, first_row: int, lora_slot: int, num_slices: int) -> list[_Delta]:
    deltas = []
    for i in range(num_slices):
        view = table.views(first_row + i, lora_slot)
        if view is not None:
            a_t = None if view.lora_a is None else view.lora_a.t()
            b_t = None if view.lora_b is None else view.lora_b.t()
            deltas.append(_Delta(i, a_t, b_t, view.bias, view.scale, *view[4:]))
    return deltas


def _add_delta(y: torch.Tensor, x: torch.Tensor, delta: _Delta, weight: float) -> None:
    """y = (1 + weight (gain - 1)) y + weight * (gain * scale * (x A^T) B^T + bias), in place on a view."""
    _, a_t, b_t, bias, scale, gain, _, rank_scale, out_scale = delta
    if gain is not None:
        y.mul_(weighted_gain(gain, weight))
    if a_t is not None and b_t is not None:
        if rank_scale is not None and out_scale is not None:
            inner = torch.mm(x.to(a_t.dtype), a_t).mul_(rank_scale)
            y.add_(out_scale * torch.mm(inner, b_t), alpha=weight * scale)
        elif gain is not None:
            y.add_(gain * torch.mm(torch.mm(x.to(a_t.dtype), a_t), b_t), alpha=weight * scale)
        elif a_t.dtype == y.dtype:
            y.addmm_(torch.mm(x, a_t), b_t, alpha=weight * scale)
        else:  # an adapter wider than the model: its own dtype up to the sum
            y.add_(torch.mm(torch.mm(x.to(a_t.dtype), a_t), b_t), alpha=weight * scale)
    if bias is not None:
        y.add_(bias, alpha=weight)


class _RowSplit:
    """Cuts a tensor's rows into those of each segment of a plan, in one call where the segments follow one another."""

    def __init__(self, plan: LoraPlan) -> None:
        self._ranges = [(s.start, s.end) for s in plan.segments]
        cuts = [0, *(cut for r in self._ranges for cut in r), plan.num_tokens]
        sizes = [end - start for start, end in itertools.pairwise(cuts)]
        self._sizes: list[int] | None = sizes if min(sizes) >= 0 else None  # None: a row is in several segments

    def of(self, t: torch.Tensor) -> Sequence[torch.Tensor]:
        """One view of `t` per segment. Sizes alternate between a gap (base rows, often 0) and a segment."""
        if self._sizes is None:
            return [t[start:end] for start, end in self._ranges]
        return t.split_with_sizes(self._sizes)[1::2]


def _row_split(plan: LoraPlan) -> _RowSplit:
    split: _RowSplit | None = plan.scratch.get("row_split")
    if split is None:
        split = plan.scratch["row_split"] = _RowSplit(plan)
    return split


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin_a: torch.Tensor, sin_b: torch.Tensor) -> torch.Tensor:
    """x * cos + rotate_half(x) * sin, with the two halves written in place."""
    out = x * cos
    a, b = x.chunk(2, dim=-1)
    out_a, out_b = out.chunk(2, dim=-1)
    out_a.addcmul_(b, sin_a, value=-1.0)
    out_b.addcmul_(a, sin_b)
    return out
