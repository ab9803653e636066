"""A mixture of experts: what a layer hands to the operator `experts`, and the operator as its formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from loraplex.core import LoraSlice
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """One linear of one expert: a prepared weight, its bias, and the first of its rows in the slot table."""

    weight: Any
    bias: torch.Tensor | None
    slices: tuple[LoraSlice, ...]
    first_row: int


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """What is between the linears of an expert in place of silu(gate) * up (gpt-oss); limit > 0:

    (u + 1) g sigmoid(alpha g),  g = min(gate, limit),  u = up between -limit and limit
    """

    limit: float
    alpha: float

    def of(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 I], the gates first -> [T, I]"""
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=self.limit)
        return (up.clamp(-self.limit, self.limit) + 1) * (gate * torch.sigmoid(self.alpha * gate))


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer. normalizes: the factors of a row's chosen ones are divided by their sum; clamp: of the
    gate, None: it is silu(gate) * up. scales_inputs: a factor is the sigmoid of its logit (`normalizes` is not read),
    and multiplies what the expert reads in place of what it says (Llama 4)."""

    gate_up: tuple[ExpertLinear, ...]
    down: tuple[ExpertLinear, ...]
    top_k: int
    normalizes: bool
    clamp: ClampedGate | None = None
    scales_inputs: bool = False


@dataclass(frozen=True, slots=True)
class ExpertLora:
    """The adapters of a step, for all experts."""

    plan: LoraPlan
    table: SlotTable


def route(
    logits: torch.Tensor, top_k: int, normalizes: bool, scales_inputs: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts int64, factors float32), each [T, top_k], of logits [T, experts].

    factors = softmax(logits) of the chosen ones in float32, the largest first, of equal ones the first expert;
    scales_inputs: sigmoid(logits) of the same.
    """
    factors, chosen = torch.sort(logits.float().softmax(-1), dim=-1, descending=True, stable=True)
    factors, chosen = factors[:, :top_k], chosen[:, :top_k]
    if scales_inputs:
        return chosen, logits.float().gather(1, chosen).sigmoid()
    return chosen, factors / factors.sum(-1, keepdim=True) if normalizes else factors


def plan_of_rows(plan: LoraPlan, rows: torch.Tensor) -> LoraPlan:
    """The segments of `plan`, in their order, over some of its rows (int64, ascending)."""
    ends = torch.tensor([(s.start, s.end) for s in plan.segments], dtype=torch.int64).view(-1, 2)
    places = torch.searchsorted(rows.cpu(), ends).tolist()
    segments = [
        LoraSegment(start, end, s.lora_slot, s.weight)
        for s, (start, end) in zip(plan.segments, places, strict=True)
        if start < end
    ]
    return LoraPlan.build(segments, len(rows), max(1, len(segments)), rows.device)


class ProductOps(Protocol):
    """What a backend's own operators make of the products of an expert (LayerOps has what each computes)."""

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor: ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        plan: LoraPlan,
        table: SlotTable,
        first_row: int,
        slices: tuple[LoraSlice, ...],
    ) -> None: ...


def _activated(ops: ProductOps, gate_up: torch.Tensor, clamp: ClampedGate | None) -> torch.Tensor:
    return ops.silu_mul(gate_up) if clamp is None else clamp.of(gate_up)


def experts(
    ops: ProductOps, x: torch.Tensor, logits: torch.Tensor, layer: Experts, lora: ExpertLora | None
) -> torch.Tensor:
    """`LayerOps.experts` of other operators: expert by expert, in ascending order."""
    chosen, factors = route(logits, layer.top_k, layer.normalizes, layer.scales_inputs)
    y = torch.zeros_like(x)
    for expert, linears in enumerate(zip(layer.gate_up, layer.down, strict=True)):
        rows, places = torch.nonzero(chosen == expert, as_tuple=True)
        if len(rows) == 0:
            continue
        plan, part = None if lora is None else plan_of_rows(lora.plan, rows), x[rows]
        own = factors[rows, places, None]
        part = (part * own).to(x.dtype) if layer.scales_inputs else part
        for linear, activates in zip(linears, (True, False), strict=True):
            product = ops.linear(part, linear.weight, linear.bias)
            if lora is not None and plan is not None and plan.num_segments:
                ops.add_lora(product, part, plan, lora.table, linear.first_row, linear.slices)
            part = _activated(ops, product, layer.clamp) if activates else product
        y.index_add_(0, rows, part if layer.scales_inputs else (part * own).to(y.dtype))
    return y
