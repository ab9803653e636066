"""The native CPU backend: activations in float32, weights in any of float32, float16, bfloat16 and int8.

Every result row is a function of that row's own inputs, bit for bit: not of its neighbours in the batch, the chunking of a prompt or the
number of threads (csrc/linear.cpp and its siblings say how).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from loraplex.core import LoraSlice
from loraplex.kernels.native import lora
from loraplex.kernels.native.attention import has_native_layout, paged_attention, rotary_write_kv
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.native.linear import PACKED_FORMAT, PanelWeight, linear, pack_linear
from loraplex.kernels.plan import AttentionPlan, LoraPlan, SliceLayout, SliceWeights, SlotTable
from loraplex.kernels.torch_ops import TorchBackend


class NativeBackend(TorchBackend):
    """C++ kernels on `num_threads` threads."""

    name = "native"
    quantizations = ("int8",)
    packed_format = PACKED_FORMAT

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        self.library = library
        self.num_threads = num_threads

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def packed_nbytes(self, slices: Sequence[SliceWeights | None], compute_dtype: torch.dtype) -> int:
        return lora.layout_block(slices)[0]

    def pack(
        self, slices: Sequence[SliceWeights | None], compute_dtype: torch.dtype, out: torch.Tensor
    ) -> tuple[SliceLayout | None, ...]:
        return lora.pack(self.library, slices, out)

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        plan: LoraPlan,
        table: SlotTable,
        first_row: int,
        slices: tuple[LoraSlice, ...],
    ) -> None:
        lora.add_lora(self.library, y, x, plan, table, first_row, slices, self.num_threads)

    def prepare_linear(self, weight: torch.Tensor, quantization: str | None = None) -> Any:
        dtype = torch.int8 if quantization == "int8" else weight.dtype
        return pack_linear(self.library, weight, dtype, self.num_threads)

    def linear_tensors(self, weight: PanelWeight) -> dict[str, torch.Tensor]:
        return {"panels": weight.panels} | ({} if weight.scale is None else {"scale": weight.scale})

    def restore_linear(self, tensors: Mapping[str, torch.Tensor], shape: Sequence[int]) -> PanelWeight:
        return PanelWeight.over(tensors["panels"], tensors.get("scale"), *shape)

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not isinstance(weight, PanelWeight):
            weight = self.prepare_linear(weight)
        return linear(self.library, x, weight, bias, self.num_threads)

    def rotary_write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_layer: torch.Tensor,
        kv_slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        if not has_native_layout(kv_layer):
            return super().rotary_write_kv(q, k, v, cos, sin, kv_layer, kv_slot_mapping)
        return rotary_write_kv(self.library, q, k, v, cos, sin, kv_layer, kv_slot_mapping, self.num_threads)

    def paged_attention(
        self, q: torch.Tensor, kv_layer: torch.Tensor, plan: AttentionPlan, scale: float, sliding_window: int | None
    ) -> torch.Tensor:
        if not has_native_layout(kv_layer):
            return super().paged_attention(q, kv_layer, plan, scale, sliding_window)
        return paged_attention(self.library, q, kv_layer, plan, scale, sliding_window, self.num_threads)
