"""Linear layers that know of LoRA from birth: `y = base(x)`, then one kernel call adds every adapter of the step.

Where adapters have input gains (IA3), the input's rows are multiplied by them first, in place: a layer of one slice
needs an x that nothing reads afterwards. In a layer of several slices (q, k and v; gate and up) each slice has a gain
of its own: its product is made once more, for the rows of such adapters alone, of a copy of the input.

| class                              | A is cut      | B is cut                                   |
|------------------------------------|---------------|--------------------------------------------|
| ReplicatedLinearWithLoRA           | no            | no                                         |
| ColumnParallelLinearWithLoRA       | no            | output rows                                |
| MergedColumnParallelLinearWithLoRA | no            | output rows of each part (gate, up)        |
| QKVParallelLinearWithLoRA          | no            | q, k, v by heads; k, v replicated if few   |
| RowParallelLinearWithLoRA          | input columns | no                                         |

The cuts themselves are in loraplex/distributed.py and follow from the base layer's LoraTarget. The embedding, the head
and the norms are in layers/ends.py. An adapter's own weight takes the place of the base's for its rows, before A and B.
A model of one's own: give each linear a `target` and a `forward(x)`, wrap it in `with_lora`, and call it
with the step's plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

import torch

from loraplex.core import LoraTarget, ShardKind
from loraplex.kernels.plan import LoraPlan, SlotTable
from loraplex.kernels.protocols import LayerOps
from loraplex.layers.own_weights import own_segments


class LinearBase(Protocol):
    """What a layer needs to carry adapters: its LoraTarget, and x [T, in] -> y [T, out]."""

    @property
    def target(self) -> LoraTarget: ...

    def forward(self, x: torch.Tensor) -> torch.Tensor: ...


class BaseLayerWithLoRA:
    """A linear and the adapters that act on it. Before `set_lora_info` it is the base layer.

    forward_slice(x, slice index): the columns of one slice alone, where the base layer can make them.
    """

    kind: ClassVar[ShardKind]

    def __init__(
        self, base_layer: LinearBase, forward_slice: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    ) -> None:
        target = base_layer.target
        if target.kind is not self.kind:
            raise ValueError(f"{type(self).__name__} takes {self.kind} layers, {target.name} is {target.kind}")
        self.base_layer = base_layer
        self._forward_slice = forward_slice
        self.lora_backend: LayerOps | None = None
        self._table: SlotTable | None = None
        self._first_row = -1

    @property
    def target(self) -> LoraTarget:
        return self.base_layer.target

    @property
    def table(self) -> SlotTable | None:
        """Where its adapters are, from `first_row` on; None before `set_lora_info`."""
        return self._table

    @property
    def first_row(self) -> int:
        return self._first_row

    @property
    def set_lora(self) -> bool:
        """Whether `set_lora_info` was called."""
        return self._table is not None

    def set_lora_info(self, table: SlotTable, backend: LayerOps) -> None:
        """Read adapters from `table` with the kernels of `backend` from now on. KeyError: it lacks this target."""
        self._first_row = table.first_row(self.target.name)
        self._table, self.lora_backend = table, backend

    def forward(self, x: torch.Tensor, plan: LoraPlan | None = None) -> torch.Tensor:
        """x [T, in] -> [T, out]; rows in no segment of the plan are the base layer's, bit for bit.

        Rows of x in segments of adapters with an input gain are overwritten where there is one slice.
        """
        if plan is not None and plan.num_segments:
            self._scale_input(x, plan)
            self._begin_lora(x, plan)
        y = self.base_layer.forward(x)
        if plan is None:
            return y
        self._replace_scaled(y, x, plan)
        self._replace_own(y, x, plan)
        return self.apply_lora(y, x, plan)

    def _replace_scaled(self, y: torch.Tensor, x: torch.Tensor, plan: LoraPlan) -> None:
        """Slices of which an adapter scales the input that they share with others, for the rows of such adapters."""
        table, backend, slices = self._table, self.lora_backend, self.target.slices
        if table is None or backend is None or len(slices) == 1 or not table.shared_input_slots:
            return
        slots, rows = _shared_inputs(plan, table, x.device)
        for row, s in enumerate(slices, self._first_row):
            if any(table.addresses(row, slot)[-1] for slot in slots):  # of input gains
                scaled = x.clone()
                backend.scale_input(scaled, plan, table, row)
                product = self._slice_product(scaled[rows], row - self._first_row)
                y[rows, s.out_offset : s.out_offset + s.out_features] = product

    def _slice_product(self, x: torch.Tensor, index: int) -> torch.Tensor:
        if self._forward_slice is not None:
            return self._forward_slice(x, index)
        s = self.target.slices[index]
        return self.base_layer.forward(x)[:, s.out_offset : s.out_offset + s.out_features]

    def _replace_own(self, y: torch.Tensor, x: torch.Tensor, plan: LoraPlan) -> None:
        """Rows and slices of adapters with a weight of their own: its product, without a bias."""
        table, backend = self._table, self.lora_backend
        if table is None or backend is None or not table.own_layers:
            return
        for segment, parts in own_segments(plan, table, backend, self._first_row, table.own_layers):
            s, here = self.target.slices[parts.slice_index], slice(segment.start, segment.end)
            y[here, s.out_offset : s.out_offset + s.out_features] = backend.linear(x[here], parts.weight)

    def _scale_input(self, x: torch.Tensor, plan: LoraPlan) -> None:
        """Nothing where no adapter of the table ever had an input gain."""
        table, backend = self._table, self.lora_backend
        if table is None or backend is None or not table.has_input_gains or len(self.target.slices) > 1:
            return
        backend.scale_input(x, plan, table, self._first_row)

    def _begin_lora(self, x: torch.Tensor, plan: LoraPlan) -> None:
        if self._table is not None and self.lora_backend is not None:
            self.lora_backend.begin_lora(x, plan, self._table, self._first_row, self.target.slices)

    def apply_lora(self, base_output: torch.Tensor, x: torch.Tensor, plan: LoraPlan) -> torch.Tensor:
        """`LayerOps.add_lora`, in place; returns base_output. x: as the base layer got it, with its input gains."""
        if plan.num_segments:
            if self._table is None or self.lora_backend is None:
                raise RuntimeError(
                    f"{self.target.name} has a plan with adapters but no slot table: call set_lora_info first"
                )
            target = self.target
            self.lora_backend.add_lora(base_output, x, plan, self._table, self._first_row, target.slices)
        return base_output


def _shared_inputs(plan: LoraPlan, table: SlotTable, device: torch.device) -> tuple[set[int], torch.Tensor]:
    """(slots of the plan that have gains on shared inputs, the rows int64 of all their segments); made once per plan"""
    kept: tuple[set[int], torch.Tensor] | None = plan.scratch.get(_shared_inputs)
    if kept is None:
        found = [each for each in plan.segments if each.lora_slot in table.shared_input_slots]
        rows = sorted({row for each in found for row in range(each.start, each.end)})
        kept = {each.lora_slot for each in found}, torch.tensor(rows, dtype=torch.int64, device=device)
        plan.scratch[_shared_inputs] = kept
    return kept


class ReplicatedLinearWithLoRA(BaseLayerWithLoRA):
    kind = ShardKind.REPLICATED


class ColumnParallelLinearWithLoRA(BaseLayerWithLoRA):
    kind = ShardKind.COLUMN


class MergedColumnParallelLinearWithLoRA(ColumnParallelLinearWithLoRA):
    """Several column-parallel linears in one GEMM (gate and up), each with its own A and B."""


class QKVParallelLinearWithLoRA(BaseLayerWithLoRA):
    kind = ShardKind.QKV


class RowParallelLinearWithLoRA(BaseLayerWithLoRA):
    """The deltas of the shards add up, so `apply_lora` comes before the sum over ranks."""

    kind = ShardKind.ROW


_CLASSES: dict[ShardKind, type[BaseLayerWithLoRA]] = {
    ShardKind.REPLICATED: ReplicatedLinearWithLoRA,
    ShardKind.COLUMN: ColumnParallelLinearWithLoRA,
    ShardKind.QKV: QKVParallelLinearWithLoRA,
    ShardKind.ROW: RowParallelLinearWithLoRA,
}


def with_lora(
    base_layer: LinearBase, forward_slice: Callable[[torch.Tensor, int], torch.Tensor] | None = None
) -> BaseLayerWithLoRA:
    """The LoRA layer that fits the base layer: by its target's kind, and merged when it has several slices."""
    target = base_layer.target
    is_merged = target.kind is ShardKind.COLUMN and len(target.slices) > 1
    layer = MergedColumnParallelLinearWithLoRA if is_merged else _CLASSES[target.kind]
    return layer(base_layer, forward_slice)
