"""A mixture of experts in Triton: which kernels run, in which shapes, and where they find weights.

    route, count, place, group    experts_routing.py    the rows of each expert, sorted by adapter, in blocks
    shrink, product, combine      experts_products.py   both linears of each expert with their deltas, and the sum

Six launches, nine where the step has adapters: their grids depend on shapes alone, and the host reads nothing. A
weight's address is in a table, which is made when the experts of a layer are first seen: never in a capture, which the
same step precedes. Blocks have 16 rows in most decode steps, and more where experts have more rows on average.

What a row gets depends on its own logits, x and adapters, and on the sizes of the blocks: the products of a decode step
and of a prompt round differently, as those of cuBLAS do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch.utils.weak import WeakIdKeyDictionary

from loraplex.kernels.experts import ClampedGate, ExpertLinear, ExpertLora, Experts
from loraplex.kernels.plan import LoraPlan
from loraplex.kernels.quantized_linear import QuantizedWeight
from loraplex.kernels.quantized_weights import INT4_GROUP
from loraplex.kernels.tiles import SMALL_ROWS
from loraplex.kernels.triton.experts_products import combine_kernel, product_kernel, shrink_kernel
from loraplex.kernels.triton.experts_routing import (
    BLOCK_FIELDS,
    GROUP_FIELDS,
    count_kernel,
    group_kernel,
    place_kernel,
    route_kernel,
)
from loraplex.kernels.triton.launch import FLOAT_DTYPES, GpuTarget, Launcher, cdiv, next_power_of_2
from loraplex.kernels.triton.linear import round_rows
from loraplex.kernels.triton.lora import TRITON_DTYPES, rank_capacity
from loraplex.kernels.triton.workspace import Workspace

WEIGHT_DTYPES: dict[torch.dtype, tl.dtype] = {
    **TRITON_DTYPES,
    torch.uint8: tl.uint8,
    torch.float8_e4m3fn: tl.float8e4nv,
}

PAIRS_AT_ONCE = 1024
"""Pairs of row and expert that a program looks at in one turn."""

COLUMNS_AT_ONCE = 1024
MOST_SPLITS = 4
LEAST_TURNS = 4
"""Of a shrink in blocks of few rows, whose depth is split: there are few programs."""


# -------------------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True)
class _Linears:
    """One linear of all experts of a layer. table: int64 [4, experts], addresses of weights, scales and biases, and the
    first rows in the slot table. out_features: of a slice."""

    table: torch.Tensor
    weight_dtype: torch.dtype
    scale_dtype: torch.dtype
    in_features: int
    out_features: int
    row_stride: int
    has_bias: bool


class ExpertTables:
    """Of all layers that were seen, as long as their weights are there: a captured step reads them."""

    def __init__(self) -> None:
        self._found: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def find(self, linears: tuple[ExpertLinear, ...]) -> _Linears | str:
        """Of one linear of each expert, or why kernels do not read these weights. What there is depends on addresses
        alone: it is right for other weights at the same ones, too."""
        key = tuple((_data(each).data_ptr(), each.first_row) for each in linears)
        of_first = self._found.setdefault(_data(linears[0]), {})
        found: _Linears | str | None = of_first.get(key)
        if found is None:
            found = of_first[key] = _tabled(linears)
        return found


def _data(linear: ExpertLinear) -> torch.Tensor:
    weight = linear.weight
    data: torch.Tensor = weight.q if isinstance(weight, QuantizedWeight) else weight
    return data


def _tabled(linears: tuple[ExpertLinear, ...]) -> _Linears | str:
    forms = {_form(linear) for linear in linears}
    if len(forms) > 1:
        return f"experts of a layer have weights in several forms: {', '.join(sorted(str(form[0]) for form in forms))}"
    weight_dtype, scale_dtype, in_features, out_features, row_stride, has_bias, is_readable = forms.pop()
    if not is_readable:
        return f"experts have weights in {weight_dtype} that are not dense, or begin at odd addresses"
    device = _data(linears[0]).device
    assert not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()), "run the same step once before"
    addresses = [
        [_data(each).data_ptr() for each in linears],
        [each.weight.scale.data_ptr() if isinstance(each.weight, QuantizedWeight) else 0 for each in linears],
        [0 if each.bias is None else each.bias.data_ptr() for each in linears],
        [max(0, each.first_row) for each in linears],
    ]
    table = torch.tensor(addresses, dtype=torch.int64)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return _Linears(table, weight_dtype, scale_dtype, in_features, out_features, row_stride, has_bias)


def _form(linear: ExpertLinear) -> tuple[torch.dtype, torch.dtype, int, int, int, bool, bool]:
    """Of which all experts of a layer have the same: dtypes of weight and scale, in, out of a slice, row stride, bias;
    and whether kernels can read it."""
    data, widths = _data(linear), {s.out_features for s in linear.slices}
    is_readable = data.is_contiguous() and data.data_ptr() % 16 == 0 and len(widths) == 1
    scale_dtype, in_features = torch.float32, data.shape[1]
    if isinstance(linear.weight, QuantizedWeight):
        scale_dtype, in_features = linear.weight.scale.dtype, linear.weight.in_features
        is_readable = is_readable and linear.weight.scale.is_contiguous()
    return (
        *(data.dtype, scale_dtype, in_features, max(widths), data.stride(0)),
        *(linear.bias is not None, is_readable),
    )


# ---------------------------------------------------------------------------------------------------------------- sizes


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of a step: rows of a block of one expert, and how many blocks any choice of experts can need."""

    num_rows: int
    num_experts: int
    top_k: int
    rows: int

    @classmethod
    def of(cls, num_rows: int, layer: Experts, dtype: torch.dtype) -> _Sizes:
        num_experts = len(layer.down)
        mean = num_rows * layer.top_k // max(1, min(num_experts, num_rows * layer.top_k))
        sizes = (16, 32) if dtype == torch.float32 else (16, 64, 128)  # without matrix units more rows spill
        rows = next((size for size in sizes if mean <= size), sizes[-1])
        return cls(num_rows, num_experts, layer.top_k, rows)

    @property
    def num_pairs(self) -> int:
        return self.num_rows * self.top_k

    @property
    def num_blocks(self) -> int:
        """Of the experts that have a row each may have one block that is not full."""
        return (self.num_pairs + min(self.num_experts, self.num_pairs) * (self.rows - 1)) // self.rows

    @property
    def shape(self) -> dict[str, Any]:
        return {"NUM_EXPERTS": self.num_experts, "TOP_K": self.top_k}

    @property
    def padded_experts(self) -> int:
        padded: int = next_power_of_2(self.num_experts)
        return padded


@dataclass(frozen=True, slots=True)
class ProductBlocks:
    """Of a program of a product: columns of each slice, depth of a turn, and what it takes of a multiprocessor."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, rows: int, linears: _Linears, is_first: bool, x: torch.dtype, target: GpuTarget) -> ProductBlocks:
        """Two programs have shared memory on one multiprocessor. On sm_90 a product reads it while the next is loaded;
        elsewhere the operands of the present one are in registers, and it has a stage less."""
        is_wide = x == torch.float32
        columns = 32 if is_wide else 128 if rows == 128 and not is_first else 64
        depth = 32 if is_wide else 64 if rows > 16 else 128
        if linears.weight_dtype == torch.uint8:
            depth = INT4_GROUP
        weight_bytes = (1 + is_first) * columns * depth * linears.weight_dtype.itemsize
        stage_bytes = weight_bytes + rows * depth * x.itemsize
        num_kept = target.max_shared_bytes // 2 // stage_bytes
        num_stages = max(2, min(4, num_kept + (is_wide or target.capability < (9, 0))))
        return cls(columns, depth, 8 if rows == 128 else 4, num_stages)


@dataclass(frozen=True, slots=True)
class ShrinkBlocks:
    """Of a program of a shrink: splits of the depth, depth of a turn, ranks at once."""

    splits: int
    depth: int
    ranks: int

    @classmethod
    def of(cls, rows: int, in_features: int, capacity: int, dot: torch.dtype) -> ShrinkBlocks:
        """Splits depend on no batch: there is one kernel for each number of rows of a block."""
        is_wide = dot == torch.float32
        depth = 32 if is_wide else 128 if rows == 16 else 64
        splits = max(1, min(MOST_SPLITS, cdiv(in_features, depth) // LEAST_TURNS)) if rows == 16 else 1
        return cls(1 << (splits.bit_length() - 1), depth, min(capacity, 16 if is_wide else 32))


# --------------------------------------------------------------------------------------------------------------- a step


@dataclass(frozen=True, slots=True)
class _Route:
    """What the kernels of experts_routing.py wrote, all on the device."""

    sizes: _Sizes
    factors: torch.Tensor
    places: torch.Tensor
    order: torch.Tensor
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Groups:
    """The adapters of a step on its experts: which places are of which segment, and the dtypes of their blocks."""

    lora: ExpertLora
    groups: torch.Tensor
    num_groups: torch.Tensor
    num_s_rows: int
    block_dtype: torch.dtype

    @property
    def shape(self) -> dict[str, Any]:
        return {
            "CAPACITY": self.lora.plan.capacity,
            "RANK_CAPACITY": rank_capacity(self.lora.table),
            "ADAPTER": TRITON_DTYPES[self.block_dtype],
        }

    def dot_dtype(self, x: torch.dtype) -> torch.dtype:
        """Eight bits are exact in every dtype of x."""
        return x if self.block_dtype == torch.int8 else torch.promote_types(x, self.block_dtype)


def _num_s_rows(plan: LoraPlan, top_k: int) -> int:
    """Pairs of a row and a segment, times top_k. A captured decode step has up to as many tiles as rows."""
    members = sum(segment.end - segment.start for segment in plan.segments)
    return top_k * (max(members, SMALL_ROWS * plan.num_tokens) if plan.is_decode else members)


def _routed(
    launcher: Launcher, logits: torch.Tensor, layer: Experts, sizes: _Sizes, lora: ExpertLora | None
) -> tuple[_Route, _Groups | None]:
    device, num_experts, num_pairs = logits.device, sizes.num_experts, sizes.num_pairs

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    chosen, order, places, members = (integers(count) for count in (*[num_pairs] * 3, sizes.num_rows))
    factors = torch.empty(num_pairs, dtype=torch.float32, device=device)
    counts, blocks = integers(2, num_experts), integers(BLOCK_FIELDS, sizes.num_blocks)
    plan = None if lora is None else lora.plan
    segments = [members] * 3 if plan is None else [plan.seg_starts, plan.seg_ends, plan.seg_slots]
    capacity = 0 if plan is None else plan.capacity
    of_experts = {"NUM_EXPERTS": num_experts, "BLOCK_E": sizes.padded_experts}
    of_segments = {"CAPACITY": capacity, "BLOCK_S": next_power_of_2(max(1, capacity))}
    launcher.launch(
        route_kernel, (sizes.num_rows,), logits, logits.stride(0), chosen, factors, members, *segments,
        num_warps=1, **of_experts, **of_segments, TOP_K=sizes.top_k, NORMALIZES=layer.normalizes,
    )  # fmt: skip
    launcher.launch(
        count_kernel, (num_experts,), chosen, members, counts, num_pairs,
        **sizes.shape, HAS_LORA=plan is not None, PAIRS=PAIRS_AT_ONCE,
    )  # fmt: skip
    launcher.launch(
        place_kernel, (num_experts,), chosen, counts, order, places, blocks, num_pairs, sizes.num_blocks,
        **of_experts, ROWS=sizes.rows, PAIRS=PAIRS_AT_ONCE,
    )  # fmt: skip
    route = _Route(sizes, factors, places, order, blocks)
    if plan is None or lora is None:
        return route, None
    (block_dtype,) = lora.table.block_dtypes
    groups, num_groups = integers(GROUP_FIELDS, num_experts, capacity), integers(num_experts)
    launcher.launch(
        group_kernel, (num_experts,), order, counts, groups, num_groups, *segments, plan.seg_weights,
        sizes.num_rows.bit_length(), **of_experts, **of_segments, TOP_K=sizes.top_k,
    )  # fmt: skip
    return route, _Groups(lora, groups, num_groups, _num_s_rows(plan, sizes.top_k), block_dtype)


@dataclass(frozen=True)
class _Step:
    """One call of the operator, ready for its products."""

    launcher: Launcher
    workspace: Workspace
    route: _Route
    groups: _Groups | None
    clamp: ClampedGate | None

    def product(self, x: torch.Tensor, linears: _Linears, is_first: bool) -> torch.Tensor:
        """[pairs, out of a slice] by place: of rows of x [T, in] by token for the first linear, by place for others."""
        sizes, target = self.route.sizes, self.launcher.target
        num_columns, dtype = linears.out_features, x.dtype
        out = torch.empty(sizes.num_pairs, num_columns, dtype=dtype, device=x.device)
        shrunk = self._shrunk(x, linears, is_first)
        rows, x_scales, dot = x, out, dtype
        if linears.weight_dtype == torch.float8_e4m3fn:
            rounded = round_rows(self.launcher, x)
            rows, x_scales, dot = rounded.q, rounded.scale, torch.float16
        blocks = ProductBlocks.of(sizes.rows, linears, is_first, dtype, target)
        self.launcher.launch(
            product_kernel,
            (sizes.num_blocks, cdiv(num_columns, blocks.columns)),
            *(rows, rows.stride(0), x_scales, out, self.route.order, self.route.blocks, sizes.num_blocks),
            *(linears.table, *shrunk.arguments),
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            **sizes.shape,
            **shrunk.constants,
            IN=linears.in_features,
            OUT=num_columns,
            Q_STRIDE=linears.row_stride,
            IS_FIRST=is_first,
            LIMIT=0.0 if self.clamp is None else self.clamp.limit,
            ALPHA=1.0 if self.clamp is None else self.clamp.alpha,
            WEIGHT=WEIGHT_DTYPES[linears.weight_dtype],
            SCALE=TRITON_DTYPES[linears.scale_dtype],
            HAS_BIAS=linears.has_bias,
            DOT=TRITON_DTYPES[dot],
            ROWS=sizes.rows,
            COLUMNS=blocks.columns,
            DEPTH=blocks.depth,
        )
        return out

    def _shrunk(self, x: torch.Tensor, linears: _Linears, is_first: bool) -> _Shrunk:
        sizes, of_step, table = self.route.sizes, self.groups, linears.table
        if of_step is None:
            nothing = {"ADAPTER": tl.float32, "ADAPTER_BIAS": tl.float32, "ADAPTER_DOT": tl.float32, "HAS_LORA": False}
            none = {"CAPACITY": 1, "RANK_CAPACITY": 16, "SPLITS": 1, "BLOCK_R": 16}
            return _Shrunk((table, table, x, 0, *[table] * 3, 0), {**nothing, **none})
        slots, shape, num_slices = of_step.lora.table, of_step.shape, 1 + is_first
        dot, capacity = of_step.dot_dtype(x.dtype), shape["RANK_CAPACITY"]
        blocks = ShrinkBlocks.of(sizes.rows, linears.in_features, capacity, dot)
        s_stride = of_step.num_s_rows * num_slices * capacity
        s = self.workspace.take("experts", blocks.splits * s_stride, torch.float32, x.device)
        self.launcher.launch(
            shrink_kernel,
            (sizes.num_blocks, num_slices * blocks.splits),
            *(x, x.stride(0), self.route.order, self.route.blocks, sizes.num_blocks),
            *(of_step.groups, of_step.num_groups, s, s_stride, table),
            *(slots.a_addr, slots.rank, slots.scale, slots.num_rows),
            num_warps=4,
            num_stages=3,
            **sizes.shape,
            **shape,
            IN=linears.in_features,
            IS_FIRST=is_first,
            NUM_SLICES=num_slices,
            DOT=TRITON_DTYPES[dot],
            SPLITS=blocks.splits,
            ROWS=sizes.rows,
            BLOCK_K=blocks.depth,
            BLOCK_R=blocks.ranks,
        )
        bias = torch.float32 if of_step.block_dtype == torch.int8 else of_step.block_dtype
        chosen = {"ADAPTER_BIAS": TRITON_DTYPES[bias], "ADAPTER_DOT": TRITON_DTYPES[dot], "HAS_LORA": True}
        at = (of_step.groups, of_step.num_groups, s, s_stride, slots.b_addr, slots.bias_addr, slots.rank)
        return _Shrunk((*at, slots.num_rows), {**shape, **chosen, "SPLITS": blocks.splits, "BLOCK_R": blocks.ranks})


@dataclass(frozen=True, slots=True)
class _Shrunk:
    """What a product is told of adapters."""

    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def experts(
    launcher: Launcher,
    workspace: Workspace,
    tables: tuple[_Linears | str, _Linears | str],
    x: torch.Tensor,
    logits: torch.Tensor,
    layer: Experts,
    lora: ExpertLora | None,
) -> torch.Tensor:
    """As LayerOps.experts. Rows of x and logits are dense; tables: of both linears, as `ExpertTables` has them."""
    sizes = _Sizes.of(len(x), layer, x.dtype)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not len(x):
        return y
    if lora is not None and not lora.table.block_dtypes:
        lora = None  # no adapter was ever there
    route, groups = _routed(launcher, logits, layer, sizes, lora)
    step = _Step(launcher, workspace, route, groups, layer.clamp)
    gate_up, down = tables
    assert not isinstance(gate_up, str) and not isinstance(down, str), tables  # noqa: PT018
    out = step.product(step.product(x, gate_up, is_first=True), down, is_first=False)
    hidden = x.shape[1]
    columns = min(COLUMNS_AT_ONCE, next_power_of_2(hidden))
    launcher.launch(
        combine_kernel, (len(x), cdiv(hidden, columns)), out, route.places, route.factors, y,
        num_stages=1, HIDDEN=hidden, TOP_K=sizes.top_k, COLUMNS=columns,
    )  # fmt: skip
    return y


def experts_gap(
    x: torch.Tensor, logits: torch.Tensor, tables: tuple[_Linears | str, ...], layer: Experts
) -> str | None:
    """Why the kernels do not cover the case; None: they do."""
    if layer.scales_inputs:
        return "factors are of the experts' inputs"
    if x.dtype not in FLOAT_DTYPES or logits.dtype not in FLOAT_DTYPES or x.stride(1) != 1 or logits.stride(1) != 1:
        return f"rows are {x.dtype}, the router's logits {logits.dtype}, or not dense"
    for found in tables:
        if isinstance(found, str):
            return found
        if found.weight_dtype in FLOAT_DTYPES and found.weight_dtype != x.dtype:
            return f"rows are {x.dtype}, and experts' weights {found.weight_dtype}"
    return None
