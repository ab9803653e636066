"""A mixture of experts in one call (csrc/experts.cpp): the choice, the order of rows, products with their deltas."""

from __future__ import annotations

import ctypes

import torch

from loraplex.errors import ModelConfigError
from loraplex.kernels.experts import ExpertLinear, ExpertLora, Experts
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.native.linear import PanelWeight
from loraplex.kernels.native.lora import segments_of, table_rows
from loraplex.kernels.plan import SlotTable


class _Linear(ctypes.Structure):
    """csrc/api.h's ExpertLinear."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("weight", "scale", "bias", "table")), ("format", ctypes.c_int64))


class ExpertsCall(ctypes.Structure):
    """As in csrc/api.h."""

    _fields_ = (
        ("linears", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("experts", "top_k", "hidden", "inner")),
        *((name, ctypes.c_int32) for name in ("normalizes", "threads")),
        *((name, ctypes.c_float) for name in ("limit", "alpha")),
        *((name, ctypes.c_int32) for name in ("scales_inputs", "unused")),
    )


def _weight_of(linear: ExpertLinear) -> PanelWeight:
    if not isinstance(linear.weight, PanelWeight):
        kind = type(linear.weight).__name__
        raise ModelConfigError(f"the experts' weights are kept as {kind}, which their kernel does not read: use int8")
    return linear.weight


def experts_call(layer: Experts, table: SlotTable | None, num_threads: int) -> ExpertsCall:
    """For all steps over these weights and this table; it keeps alive what it has addresses of."""
    linears = [linear for pair in zip(layer.gate_up, layer.down, strict=True) for linear in pair]
    packed = (_Linear * len(linears))()
    kept: list[object] = [packed]
    for at, linear in zip(packed, linears, strict=True):
        weight = _weight_of(linear)
        at.weight, at.scale, at.format = weight.address, weight.scale_address, weight.format
        at.bias = None if linear.bias is None else linear.bias.data_ptr()
        if table is not None:
            rows = table_rows(table, linear.first_row, weight.in_features, linear.slices)
            at.table = rows.address
            kept.append(rows)
        kept += weight, linear.bias
    down = _weight_of(layer.down[0])
    call = ExpertsCall(
        ctypes.addressof(packed),
        *(len(layer.down), layer.top_k, down.out_features, down.in_features),
        *(layer.normalizes, num_threads),
        *((0.0, 0.0) if layer.clamp is None else (layer.clamp.limit, layer.clamp.alpha)),
        layer.scales_inputs,
    )
    call.kept = kept
    call.address = ctypes.addressof(call)
    return call


def scratch_width(layer: Experts) -> int:
    """Floats for each row of a step."""
    down = _weight_of(layer.down[0])
    return 2 * down.out_features + 3 * down.in_features


def experts(
    library: NativeLibrary,
    x: torch.Tensor,
    logits: torch.Tensor,
    layer: Experts,
    lora: ExpertLora | None,
    num_threads: int,
) -> torch.Tensor:
    """As LayerOps.experts; x [T, hidden] and logits float32, their rows dense."""
    assert x.dtype == logits.dtype == torch.float32 and x.stride(1) == logits.stride(1) == 1  # noqa: PT018
    assert logits.shape == (len(x), len(layer.down)), (logits.shape, x.shape)
    call = experts_call(layer, None if lora is None else lora.table, num_threads)
    scratch, y = torch.empty(len(x), scratch_width(layer)), torch.empty(x.shape)
    segments = None if lora is None else segments_of(lora.plan, lora.table).address
    library.functions.loraplex_experts(
        *(call.address, x.data_ptr(), x.stride(0), logits.data_ptr(), logits.stride(0), len(x)),
        *(segments, scratch.data_ptr(), y.data_ptr()),
    )
    return y


def add_gated(
    library: NativeLibrary, y: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, num_threads: int
) -> torch.Tensor:
    """y + sigmoid(gate) x, in the memory of y; float32, rows dense."""
    assert y.dtype == x.dtype == gate.dtype == torch.float32 and y.stride(1) == x.stride(1) == 1  # noqa: PT018
    library.functions.loraplex_add_gated(
        *(x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0), *x.shape, y.data_ptr(), y.stride(0), num_threads)
    )
    return y
