"""The GPU backend: Triton kernels, and stock torch (cuBLAS) for the products of the base model.

What a kernel does not cover goes to stock torch on the same device: logged once for each reason, and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch

from loraplex.core import LoraSlice
from loraplex.errors import ConfigError, EngineError
from loraplex.kernels.experts import ExpertLora, Experts
from loraplex.kernels.fallbacks import FallbackCounter
from loraplex.kernels.plan import LoraPlan, SlotTable
from loraplex.kernels.quantized_linear import QuantizedWeight, quantizations_of
from loraplex.kernels.quantized_weights import QuantizedSpecification
from loraplex.kernels.step_batch import AttentionPlan
from loraplex.kernels.token_ranking import WeightRule
from loraplex.kernels.torch_ops import TorchBackend
from loraplex.kernels.triton import attention, glue, nucleus
from loraplex.kernels.triton import experts as moe
from loraplex.kernels.triton.attention_choice import AttentionShapes, choose_attention
from loraplex.kernels.triton.flash_attention import flash_attention_gap
from loraplex.kernels.triton.input_gain import scale_input, scale_input_gap
from loraplex.kernels.triton.launch import Launcher, TritonLauncher
from loraplex.kernels.triton.linear import quantized_linear
from loraplex.kernels.triton.lora import TRITON_DTYPES, LoraKernels, rank_capacity
from loraplex.kernels.triton.lora_packing import GpuPacking
from loraplex.kernels.triton.workspace import Workspace
from loraplex.metrics import KernelFallback


class TritonBackend(GpuPacking, TorchBackend):
    """Triton kernels on one device."""

    name = "triton"
    is_capturable = True

    def __init__(
        self,
        device: torch.device,
        launcher: Launcher | None = None,
        *,
        block_dtype: torch.dtype | None = None,
        attention: str = "auto",
    ) -> None:
        """`launcher`: how kernels are run; by default on the device. Raises ConfigError where Triton cannot run.

        block_dtype: of adapters in packed blocks, int8 too; None: the model's. attention: the setting
        attention_backend; until `choose_attention` it is Triton's.
        """
        self.launcher = launcher or TritonLauncher(device)
        major, minor = self.launcher.target.capability
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "in the interpreter"
        self.description = f"triton sm_{major}{minor}, {where}"
        self.quantizations = quantizations_of(self.launcher.target.capability)
        self.block_dtype = block_dtype
        self._attention, self._is_flash = attention, False
        self._is_interpreted = getattr(self.launcher, "is_interpreted", False)  # it computes bfloat16 wrong
        self._fallbacks = FallbackCounter(self.name)
        self._is_capturing = False
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._is_begun = False
        self.lora_workspace = Workspace("LoRA")
        self._lora = LoraKernels(self.launcher, self.lora_workspace)
        self.attention_workspace = Workspace("attention")
        self.expert_tables = moe.ExpertTables()

    def fallbacks(self) -> tuple[KernelFallback, ...]:
        return self._fallbacks.all()

    def _fall_back(self, operator: str, reason: str) -> None:
        if self._is_capturing:
            raise EngineError(f"a CUDA graph cannot hold what stock torch runs: {operator}: {reason}")
        self._fallbacks.add(operator, reason)

    @property
    def workspace_nbytes(self) -> int:
        return self.lora_workspace.nbytes + self.attention_workspace.nbytes

    def release_workspace(self) -> int:
        return self.lora_workspace.release() + self.attention_workspace.release()

    def reset_workspace(self) -> None:
        self.lora_workspace.reset()
        self.attention_workspace.reset()

    # ----------------------------------------------------------------------------------------------------------- graphs

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = self._is_begun = False

    def expect_adapters(self, table: SlotTable, compute_dtype: torch.dtype, max_rank: int) -> None:
        table.expect(max_rank, (self.block_dtype or compute_dtype,))

    def may_replay(self, table: SlotTable) -> bool:
        return len(table.block_dtypes) == 1

    # -------------------------------------------------------------------------------------------------------- attention

    def choose_attention(
        self,
        num_heads: int,
        dtype: torch.dtype,
        kv: torch.Tensor,
        sliding_windows: Sequence[int | None],
        softcap: float | None = None,
        has_sinks: bool = False,
    ) -> None:
        shapes = AttentionShapes(num_heads, dtype, kv, tuple(sliding_windows), softcap, has_sinks)
        self._is_flash = choose_attention(self._attention, self.launcher, shapes)
        if self._is_flash:
            self.description += ", FlashAttention 3 for prompts"

    # --------------------------------------------------------------------------------------------------------- adapters

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        plan: LoraPlan,
        table: SlotTable,
        first_row: int,
        slices: tuple[LoraSlice, ...],
    ) -> None:
        dtypes = {x.dtype, y.dtype, *table.block_dtypes}
        gap = self.lora_gap(dtypes, len(table.block_dtypes))
        if gap is not None:
            self._fall_back("add_lora", gap)
            return super().add_lora(y, x, plan, table, first_row, slices)
        assert y.stride(1) == 1
        dense = x if x.stride(1) == 1 else x.contiguous()
        is_shrunk, self._is_begun = self._is_begun, False
        if is_shrunk and self._side is not None:
            torch.cuda.current_stream(x.device).wait_stream(self._side)
        self._lora.add_lora(y, dense, plan, table, first_row, slices, is_shrunk=is_shrunk)

    def begin_lora(
        self, x: torch.Tensor, plan: LoraPlan, table: SlotTable, first_row: int, slices: tuple[LoraSlice, ...]
    ) -> None:
        """In a captured decode step the shrink is a branch of the graph beside the base's product, which hides it."""
        if self._side is None or not self._is_capturing or not plan.is_decode or x.stride(1) != 1:
            return
        self._side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._side):
            self._lora.shrink_small(x, plan, table, first_row, slices)
        self._is_begun = True

    def scale_input(self, x: torch.Tensor, plan: LoraPlan, table: SlotTable, row: int) -> None:
        gap = scale_input_gap(x)
        if gap is not None:
            self._fall_back("scale_input", gap)
            return super().scale_input(x, plan, table, row)
        scale_input(self.launcher, x, plan, table, row)

    def lora_gap(self, dtypes: Set[torch.dtype], num_block_dtypes: int = 1) -> str | None:
        """Why `add_lora` would leave rows and blocks of these dtypes to stock torch; None: it runs them."""
        is_known = dtypes <= TRITON_DTYPES.keys() - ({torch.bfloat16} if self._is_interpreted else set())
        return (
            None
            if is_known and num_block_dtypes <= 1
            else f"adapters and model in {', '.join(sorted(map(str, dtypes)))}"
        )

    def rank_capacity(self, table: SlotTable) -> int:
        """Ranks that a capture over `table` made now is good for: replay a step only if `table.largest_rank(its slots)`
        is no more."""
        return rank_capacity(table)

    # ---------------------------------------------------------------------------------------- weights of the base model

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """Raises ConfigError for bfloat16 in the interpreter, which computes it wrong without a word."""
        if self._is_interpreted and weight_dtype == torch.bfloat16:
            raise ConfigError(
                "Triton's interpreter cannot compute in bfloat16; set dtype to float32 or float16 to try kernels there"
            )
        return super().activation_dtype(weight_dtype)

    def prepare_linear(self, weight: torch.Tensor, quantization: str | None = None) -> Any:
        """A weight in the model's dtype stays as it is, in the interpreter too, for kernels that read it."""
        return weight if quantization is None else QuantizedWeight.of(weight, quantization)

    def keep_linear(self, weight: QuantizedSpecification) -> QuantizedWeight | None:
        kept = QuantizedWeight.keeping(weight)
        return kept if kept is not None and kept.quantization in self.quantizations else None

    def linear_tensors(self, weight: torch.Tensor | QuantizedWeight) -> dict[str, torch.Tensor]:
        if isinstance(weight, QuantizedWeight):
            return {"q": weight.q, "scale": weight.scale}
        return super().linear_tensors(weight)

    def restore_linear(self, tensors: Mapping[str, torch.Tensor], shape: Sequence[int]) -> Any:
        if "q" in tensors:
            return QuantizedWeight(tensors["q"], tensors["scale"], *shape)
        return super().restore_linear(tensors, shape)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(weight, QuantizedWeight):
            return quantized_linear(self.launcher, x, weight, bias)
        return super().linear(x, weight, bias)

    def _rows(self, weight: torch.Tensor | QuantizedWeight, first: int, last: int) -> torch.Tensor:
        if isinstance(weight, QuantizedWeight):
            return weight.rows(first, last)
        return super()._rows(weight, first, last)

    # ----------------------------------------------------------------------------------------------------------- layers

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        reason = glue.rms_norm_gap(x, weight)
        if reason is None:
            return glue.rms_norm(self.launcher, x, weight, eps)
        self._fall_back("rms_norm", reason)
        return super().rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        reason = glue.add_rms_norm_gap(x, residual, weight)
        if reason is None:
            return glue.add_rms_norm(self.launcher, x, residual, weight, eps, scale)
        self._fall_back("add_rms_norm", reason)
        return super().add_rms_norm(x, residual, weight, eps, scale)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        reason = glue.silu_mul_gap(gate_up)
        if reason is None:
            return glue.silu_mul(self.launcher, gate_up)
        self._fall_back("silu_mul", reason)
        return super().silu_mul(gate_up)

    def experts(self, x: torch.Tensor, logits: torch.Tensor, layer: Experts, lora: ExpertLora | None) -> torch.Tensor:
        tables = self.expert_tables.find(layer.gate_up), self.expert_tables.find(layer.down)
        reason = moe.experts_gap(x, logits, tables, layer)
        if reason is None and lora is not None:
            blocks = lora.table.block_dtypes
            reason = self.lora_gap({x.dtype, *blocks}, len(blocks))
        if reason is None:
            return moe.experts(self.launcher, self.lora_workspace, tables, x, logits, layer, lora)
        self._fall_back("experts", reason)
        return super().experts(x, logits, layer, lora)

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
        reason = glue.rotary_write_kv_gap(q, k, v, cos, sin, kv_layer)
        if reason is None:
            return glue.rotary_write_kv(self.launcher, q, k, v, cos, sin, kv_layer, kv_slot_mapping, is_interleaved)
        self._fall_back("rotary_write_kv", reason)
        return super().rotary_write_kv(q, k, v, cos, sin, kv_layer, kv_slot_mapping, is_interleaved)

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
        reason = attention.paged_attention_gap(q, kv_layer)
        if reason is None:
            return attention.paged_attention(
                *(self.launcher, q, kv_layer, plan, scale, sliding_window, self.attention_workspace),
                is_flash=self._is_flash
                and softcap is None
                and sinks is None
                and self._flash_gap(q, kv_layer, sliding_window) is None,
                softcap=softcap,
                sinks=sinks,
            )
        self._fall_back("paged_attention", reason)
        return super().paged_attention(q, kv_layer, plan, scale, sliding_window, softcap, sinks)

    def _flash_gap(self, q: torch.Tensor, kv_layer: torch.Tensor, sliding_window: int | None) -> str | None:
        return flash_attention_gap(self.launcher.target.capability, q, kv_layer, sliding_window)

    def keep_nucleus(
        self, logits: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor, rule: WeightRule
    ) -> torch.Tensor:
        gap = nucleus.keep_nucleus_gap(logits, weights)
        if gap is not None:
            self._fall_back("keep_nucleus", gap)
            return super().keep_nucleus(logits, weights, wanted, rule)
        return nucleus.keep_nucleus(self.launcher, logits, weights, wanted)
