"""Experts of one layer as the kernels take them: weights in any form, adapters on all of their linears."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.gpu.shapes import ExpertShape
from loraplex.core import LoraTarget
from loraplex.kernels.experts import ExpertLinear, Experts
from loraplex.kernels.plan import SlotTable


def experts_of(
    shape: ExpertShape, weights: Sequence[object], targets: Sequence[LoraTarget], table: SlotTable | None
) -> Experts:
    """weights: prepared, those of gate and up and of down in turn; table None: without adapters. Factors are divided
    by their sum."""
    linears = [
        ExpertLinear(weight, None, target.slices, -1 if table is None else table.first_row(target.name))
        for weight, target in zip(weights, targets, strict=True)
    ]
    return Experts(tuple(linears[0::2]), tuple(linears[1::2]), shape.top_k, True)


def weight_shapes(shape: ExpertShape) -> list[tuple[int, int]]:
    """[out, in] of each expert's linears, in the order of `experts_of`."""
    return [(2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)] * shape.num_experts


def draw_expert_weights(shape: ExpertShape, dtype: torch.dtype, generator: torch.Generator) -> list[torch.Tensor]:
    """About as large as keeps rows as large as they are; on the CPU."""
    return [
        (torch.randn(out, num_in, generator=generator) / num_in**0.5).to(dtype) for out, num_in in weight_shapes(shape)
    ]
