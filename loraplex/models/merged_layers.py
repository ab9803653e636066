"""The layers of a decoder with one adapter merged into a second copy of the linears that it changes.

    linear   W' and b' in memory of their own; of those that the adapter leaves as they are, the base's is read
    norm     the adapter's weight

The base's weights are only read: without the copy, steps are what they were, bit for bit. W' is computed in float32
and rounded once to the dtype of W, as `--merge-adapter` does it (adapters/merging/base.py). What an adapter changes at
the embedding or the head is outside of the layers, and is not merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.adapters.merging.base import merged_bias, merged_rows
from loraplex.adapters.weights import SCALES, LoRALayerWeights, LoRAModel
from loraplex.core import LoraSlice
from loraplex.errors import AdapterValidationError
from loraplex.kernels.protocols import KernelBackend, LinearWeight
from loraplex.kernels.slices import align
from loraplex.kernels.step_batch import LayersForward
from loraplex.layers.common import RMSNorm
from loraplex.layers.linear import ParallelLinear
from loraplex.memory.space.arena import advise_huge_pages
from loraplex.models.decoder import Decoder

PIECE = 1 << 17
"""Numbers of a weight that are made at a time, in less than a millisecond."""

ROW_MULTIPLE = 64
"""Pieces begin at rows at which every form of a weight can be cut."""

OF_WEIGHTS = frozenset(("lora_a", "rank_scale", "magnitude", "gain", "input_gain", "weight"))
OF_BIASES = frozenset(("bias", "lora_bias"))


@dataclass(frozen=True, slots=True)
class _Change:
    """A linear whose weight (`nbytes` at byte `start` of the copy; 0: the base's) or bias is another one."""

    linear: ParallelLinear
    start: int
    nbytes: int
    has_bias: bool


@dataclass(frozen=True, slots=True)
class MergedLayers:
    """A copy: the linears and norms that are others than the model's, by their targets' names, and their bytes."""

    digest: str
    nbytes: int
    changed: Mapping[str, ParallelLinear | RMSNorm]

    def captured(self, model: Decoder, on_seconds: Callable[[str, float], None] | None = None) -> LayersForward:
        """The layers of `model` with these, for `Decoder.forward`."""
        return model.captured_over(self.changed, on_seconds)


class MergePlan:
    """What `write` will take is known before: `nbytes`. share: of the linears, those whose weight the adapter
    changes."""

    def __init__(self, model: Decoder, ops: KernelBackend, adapter: LoRAModel) -> None:
        self._model = model
        self._ops = ops
        self._adapter = adapter
        self._changes, self._weight_bytes = self._plan()
        norms = ((norm, adapter.get_lora(norm.name)) for norm in model.norms)
        self._norms = [(norm, layer.weight) for norm, layer in norms if layer is not None and layer.weight is not None]
        num_biases = sum(_num_rows(change.linear) for change in self._changes if change.has_bias)
        bias_bytes = num_biases * model.activation_dtype.itemsize
        self.nbytes = self._weight_bytes + bias_bytes + sum(norm.weight.nbytes for norm, _ in self._norms)
        self.share = sum(change.nbytes > 0 for change in self._changes) / len(model.linears)

    def _plan(self) -> tuple[list[_Change], int]:
        """(what changes, bytes of all weights that do)"""
        changes, end = [], 0
        for linear in self._model.linears:
            fields = {field for _, layer in self._layers_of(linear) for field in layer.tensors}
            nbytes = self._stored_bytes(linear) if fields & OF_WEIGHTS else 0
            has_bias = bool(fields & OF_BIASES) or (linear.bias is not None and "gain" in fields)
            if nbytes or has_bias:
                changes.append(_Change(linear, end, nbytes, has_bias))
                end += nbytes
        return changes, end

    def write(self, rest: Callable[[], None]) -> MergedLayers:
        """Make the copy, on the calling thread, with `rest` between its pieces: what that raises ends it.

        AdapterValidationError for numbers that do not fit in the base's dtype.
        """
        changed: dict[str, ParallelLinear | RMSNorm] = {}
        memory = torch.empty(self._weight_bytes, dtype=torch.uint8)
        advise_huge_pages(memory.data_ptr(), self._weight_bytes)
        for change in self._changes:
            linear, weight = change.linear, change.linear.weight
            if change.nbytes:
                weight = self._write_weight(linear, memory[change.start : change.start + change.nbytes], rest)
            bias = self._new_bias(linear) if change.has_bias else linear.bias
            changed[linear.name] = linear.over(weight, bias)
        changed |= {norm.name: norm.over(weight) for norm, weight in self._norms}
        return MergedLayers(self._adapter.adapter_digest, self.nbytes, changed)

    # ---------------------------------------------------------------------------------------------------- one linear

    def _layers_of(self, linear: ParallelLinear) -> list[tuple[LoraSlice, LoRALayerWeights]]:
        found = ((s, self._adapter.get_lora(s.module_name)) for s in linear.target.slices)
        return [(s, layer) for s, layer in found if layer is not None]

    def _stored_bytes(self, linear: ParallelLinear) -> int:
        return align(math.prod(self._shape(linear, _num_rows(linear))) * linear.base_rows(0, 1).dtype.itemsize)

    def _shape(self, linear: ParallelLinear, num_rows: int) -> tuple[int, ...]:
        """Of the memory of so many rows."""
        return self._ops.own_shape(num_rows, linear.target.in_features)

    def _write_weight(self, linear: ParallelLinear, memory: Tensor, rest: Callable[[], None]) -> LinearWeight:
        """`memory`: of `_stored_bytes`. A form of weights keeps rows in their order, ROW_MULTIPLE of them together."""
        width, num_rows = linear.target.in_features, _num_rows(linear)
        dtype, whole = linear.base_rows(0, 1).dtype, self._shape(linear, num_rows)
        stored = memory[: math.prod(whole) * dtype.itemsize].view(dtype)
        num_at_once = max(1, PIECE // width // ROW_MULTIPLE) * ROW_MULTIPLE
        for first in range(0, num_rows, num_at_once):
            last = min(first + num_at_once, num_rows)
            rows = self._merged(linear, first, last).to(dtype)
            if not bool(rows.isfinite().all()):
                reason = f"{linear.name}: merged, it does not fit in {dtype}"
                raise AdapterValidationError.from_reasons(self._adapter.adapter_digest, [reason])
            begin, shape = math.prod(self._shape(linear, first)), self._shape(linear, last - first)
            self._ops.pack_own(rows, stored[begin : begin + math.prod(shape)].view(shape))
            rest()
        return self._ops.own_weight(stored.view(whole), num_rows, width)

    def _merged(self, linear: ParallelLinear, first: int, last: int) -> Tensor:
        """Rows [first, last) of W', float32."""
        rows = linear.base_rows(first, last).float()
        for s, layer in self._layers_of(linear):
            begin, end = max(first, s.out_offset), min(last, s.out_offset + s.out_features)
            if begin < end:
                part = slice(begin - s.out_offset, end - s.out_offset)
                here = slice(begin - first, end - first)
                rows[here] = merged_rows(self._multiplied_out(layer, rows.shape[1]), part, rows[here])
        return rows

    def _multiplied_out(self, layer: LoRALayerWeights, width: int) -> LoRALayerWeights:
        """With an A and a B of its own, where the adapter's modules share them."""
        shared = self._adapter.projections
        if shared is None or layer.rank_scale is None or layer.out_scale is None:
            return layer
        lora_a = shared.lora_a[:, :width].float() * layer.rank_scale[:, None]
        lora_b = shared.lora_b[: len(layer.out_scale)].float() * layer.out_scale[:, None]
        kept = {field: tensor for field, tensor in layer.tensors.items() if field not in SCALES}
        return layer.with_tensors({**kept, "lora_a": lora_a, "lora_b": lora_b})

    def _new_bias(self, linear: ParallelLinear) -> Tensor:
        bias = torch.zeros(_num_rows(linear)) if linear.bias is None else linear.bias.float().clone()
        for s, layer in self._layers_of(linear):
            here = slice(s.out_offset, s.out_offset + s.out_features)
            bias[here] = merged_bias(layer, bias[here])
        return bias.to(self._model.activation_dtype)


def _num_rows(linear: ParallelLinear) -> int:
    return sum(s.out_features for s in linear.target.slices)
