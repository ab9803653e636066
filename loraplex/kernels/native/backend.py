"""The native CPU backend: activations in float32, weights in any of float32, float16, bfloat16, int8 and int4.

Every result row is a function of that row's own inputs, bit for bit: not of its neighbours in the batch, the chunking
of a prompt or the number of threads (csrc/linear.cpp and its siblings say how).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch

from loraplex.core import LoraSlice, Shard
from loraplex.cpu import CpuUse
from loraplex.distributed import RankGroup
from loraplex.kernels.experts import ExpertLora, Experts
from loraplex.kernels.fallbacks import FallbackCounter
from loraplex.kernels.native import checksum, glue, lora, sampling
from loraplex.kernels.native import experts as moe
from loraplex.kernels.native.attention import kv_layout_gap, paged_attention, rotary_write_kv
from loraplex.kernels.native.board import MAX_RANKS, RankBoard, board_nbytes
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.native.linear import (
    FORMATS,
    INT4_ACTIVATIONS,
    INT4_GROUP_SIZE,
    PACKED_FORMAT,
    PanelWeight,
    embedding,
    keep_linear,
    linear,
    pack_linear,
    pack_panels,
    panel_rows,
    panel_shape,
    round_int4,
    row_norms,
)
from loraplex.kernels.native.program import LEAST_ROWS, OnSeconds, Recorder, StepProgram
from loraplex.kernels.plan import LoraPlan, SlotTable
from loraplex.kernels.quantized_weights import Fp8Weight, QuantizedSpecification
from loraplex.kernels.slices import ProjectionsLayout, SliceLayout, SliceWeights
from loraplex.kernels.step_batch import AttentionPlan, LayersForward
from loraplex.kernels.token_ranking import WeightRule
from loraplex.kernels.torch_ops import TorchBackend
from loraplex.metrics import KernelFallback


class NativeBackend(TorchBackend):
    """C++ kernels on `num_threads` threads."""

    name = "native"
    quantizations = ("int8", *INT4_ACTIVATIONS)
    packed_format = PACKED_FORMAT

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        self.library = library
        self.num_threads = num_threads
        self.description = f"native {library.isa}, {num_threads} thread{'s' if num_threads > 1 else ''}"
        if library.note:
            self.description += f" ({library.note})"
        self._fallbacks = FallbackCounter(self.name)
        self._recorder: Recorder | None = None
        self._programs: WeakSet[StepProgram] = WeakSet()
        self._workspace_rows = LEAST_ROWS

    def fallbacks(self) -> tuple[KernelFallback, ...]:
        return self._fallbacks.all()

    def captured(self, forward: LayersForward, on_seconds: OnSeconds | None = None) -> LayersForward:
        program = StepProgram(self.library, self.num_threads, self.recording, forward, on_seconds, self._workspace_rows)
        self._programs.add(program)
        return program

    def reserve_workspace(self, num_rows: int) -> None:
        self._workspace_rows = num_rows
        for program in self._programs:
            program.reserve(num_rows)

    @property
    def workspace_nbytes(self) -> int:
        return sum(program.workspace_nbytes for program in self._programs)

    def release_workspace(self) -> int:
        return sum(program.release() for program in self._programs)

    def cpu_use(self, use: CpuUse) -> CpuUse:
        team = self.library.team_stats()
        num_active = self.num_threads - max(0, team.threads - team.active)
        return replace(use, left_out_s=team.left_out, num_threads=self.num_threads, num_active=num_active)

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Within the block, the operators of layers are written down and not run."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def packed_nbytes(self, slices: Sequence[SliceWeights | None], compute_dtype: torch.dtype) -> int:
        return lora.layout_block(slices)[0]

    def pack(
        self, slices: Sequence[SliceWeights | None], compute_dtype: torch.dtype, out: torch.Tensor
    ) -> tuple[SliceLayout | None, ...]:
        return lora.pack(self.library, slices, out)

    def projections_layout(
        self, digest: str, rank: int, widths: tuple[int, int], dtype: torch.dtype, compute_dtype: torch.dtype
    ) -> ProjectionsLayout:
        return lora.projections_layout(self.library, digest, rank, widths, dtype)

    def pack_projections(
        self, layout: ProjectionsLayout, lora_a: torch.Tensor, lora_b: torch.Tensor, out: torch.Tensor
    ) -> None:
        lora.pack_projections(self.library, layout, lora_a, lora_b, out)

    @property
    def adapter_format(self) -> str:
        return f"panels{lora.panel_columns(self.library)}.1"

    def packed_layouts(
        self, slices: Sequence[SliceWeights | None], compute_dtype: torch.dtype
    ) -> tuple[SliceLayout | None, ...]:
        return lora.layout_block(slices)[1]

    def unpack(
        self, layouts: Sequence[SliceLayout | None], in_features: int, out_features: Sequence[int], block: torch.Tensor
    ) -> tuple[SliceWeights | None, ...]:
        return lora.unpack(self.library, layouts, in_features, out_features, block)

    def own_dtype(self, dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
        return dtype if dtype in FORMATS and dtype.is_floating_point else torch.float32

    def own_shape(self, num_rows: int, width: int) -> tuple[int, ...]:
        return panel_shape(num_rows, width)

    def pack_own(self, weight: torch.Tensor, stored: torch.Tensor) -> None:
        pack_panels(self.library, weight.to(stored.dtype), stored)

    def unpack_own(self, stored: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
        return embedding(torch.arange(num_rows), PanelWeight.over(stored, None, num_rows, width))

    def own_weight(self, stored: torch.Tensor, num_rows: int, width: int) -> PanelWeight:
        return PanelWeight.over(stored, None, num_rows, width)

    def checksums(self, pieces: Sequence[torch.Tensor]) -> tuple[int, ...]:
        return checksum.checksums(self.library, pieces)

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        plan: LoraPlan,
        table: SlotTable,
        first_row: int,
        slices: tuple[LoraSlice, ...],
    ) -> None:
        if self._recorder is not None:
            return self._recorder.add_lora(y, x, table, first_row, slices)
        lora.add_lora(self.library, y, x, plan, table, first_row, slices, self.num_threads)

    def scale_input(self, x: torch.Tensor, plan: LoraPlan, table: SlotTable, row: int) -> None:
        if self._recorder is not None:
            return self._recorder.scale_input(x, table, row)
        lora.scale_input(self.library, x, plan, table, row, self.num_threads)

    def prepare_linear(self, weight: torch.Tensor, quantization: str | None = None) -> Any:
        if quantization in INT4_ACTIVATIONS:
            num_bits = INT4_ACTIVATIONS[quantization]
            return self.keep_linear(round_int4(self.library, weight, INT4_GROUP_SIZE, num_bits, self.num_threads))
        dtype = torch.int8 if quantization == "int8" else weight.dtype
        return pack_linear(self.library, weight, dtype, self.num_threads)

    def keep_linear(self, weight: QuantizedSpecification) -> PanelWeight | None:
        if isinstance(weight, Fp8Weight):
            return None
        return keep_linear(self.library, weight, self.num_threads)

    def linear_tensors(self, weight: PanelWeight) -> dict[str, torch.Tensor]:
        tensors = {"panels": weight.panels, "scale": weight.scale, "zero": weight.zero}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def restore_linear(self, tensors: Mapping[str, torch.Tensor], shape: Sequence[int]) -> PanelWeight:
        out_features, in_features = shape
        return PanelWeight.over(tensors["panels"], tensors.get("scale"), out_features, in_features, tensors.get("zero"))

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not isinstance(weight, PanelWeight):
            weight = self.prepare_linear(weight)
        if self._recorder is not None:
            return self._recorder.linear(x, weight, bias)
        return linear(self.library, x, weight, bias, self.num_threads)

    def linear_rows(self, weight: Any, first: int, last: int) -> Any:
        if not isinstance(weight, PanelWeight):
            return super().linear_rows(weight, first, last)
        return panel_rows(weight, first, last)

    def embeds_prepared(self, quantization: str | None) -> bool:
        return quantization is None

    def embedding(self, token_ids: torch.Tensor, weight: Any) -> torch.Tensor:
        return embedding(token_ids, weight) if isinstance(weight, PanelWeight) else super().embedding(token_ids, weight)

    def row_norms(
        self, weight: Any, first: int, last: int, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        if isinstance(weight, PanelWeight):
            return row_norms(self.library, weight, first, last, lora_a, lora_b, scaling)
        return super().row_norms(weight, first, last, lora_a, lora_b, scaling)

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
        if self._recorder is not None:
            return self._recorder.rotary_write_kv(q, k, v, cos, kv_layer, is_interleaved)
        gap = kv_layout_gap(kv_layer)
        if gap is not None:
            self._fallbacks.add("rotary_write_kv", gap)
            return super().rotary_write_kv(q, k, v, cos, sin, kv_layer, kv_slot_mapping, is_interleaved)
        return rotary_write_kv(
            self.library, q, k, v, cos, sin, kv_layer, kv_slot_mapping, self.num_threads, is_interleaved
        )

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
        if self._recorder is not None:
            return self._recorder.paged_attention(q, kv_layer, scale, sliding_window, softcap, sinks)
        gap = kv_layout_gap(kv_layer)
        if gap is not None:
            self._fallbacks.add("paged_attention", gap)
            return super().paged_attention(q, kv_layer, plan, scale, sliding_window, softcap, sinks)
        return paged_attention(self.library, q, kv_layer, plan, scale, sliding_window, self.num_threads, softcap, sinks)

    def rank_nbytes(self, num_ranks: int) -> int:
        return board_nbytes(num_ranks) if num_ranks <= MAX_RANKS else 0

    def collectives(self, shard: Shard, memory: torch.Tensor, watched: Sequence[int]) -> RankBoard:
        return RankBoard(self.library, shard, memory, watched)

    def sum_ranks(self, part: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
        if self._recorder is None or ranks.shard.size == 1:
            return ranks.sum(part)
        assert isinstance(ranks.collectives, RankBoard)
        return self._recorder.sum_ranks(part, ranks.collectives)

    def rms_norm_ranks(self, x: torch.Tensor, weight: torch.Tensor, eps: float, ranks: RankGroup) -> torch.Tensor:
        board = ranks.collectives
        if self._recorder is not None:
            assert isinstance(board, RankBoard)
            return self._recorder.rms_norm_ranks(x, weight, eps, board)
        if not isinstance(board, RankBoard):  # of more ranks than it has lines for
            return super().rms_norm_ranks(x, weight, eps, ranks)
        return glue.rms_norm_ranks(self.library, x, weight, eps, board, self.num_threads)

    # -------------------------------------------------------------------------------------------------- glue of a layer

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if self._recorder is not None:
            return self._recorder.rms_norm(x, weight, eps)
        return glue.rms_norm(self.library, x, weight, eps, self.num_threads)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._recorder is not None:
            return self._recorder.add_rms_norm(x, residual, weight, eps, scale)
        return glue.add_rms_norm(self.library, x, residual, weight, eps, scale, self.num_threads)

    def add_scaled(self, x: torch.Tensor, residual: torch.Tensor, scale: float) -> torch.Tensor:
        if self._recorder is not None:
            return self._recorder.add_scaled(x, residual, scale)
        return glue.add_scaled(self.library, x, residual, scale, self.num_threads)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        if self._recorder is not None:
            return self._recorder.layer_norm(x, weight, bias, eps)
        return glue.layer_norm(self.library, x, weight, bias, eps, self.num_threads)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._recorder is not None:
            return self._recorder.silu_mul(gate_up)
        return glue.silu_mul(self.library, gate_up, self.num_threads)

    def gelu(self, x: torch.Tensor, is_tanh: bool, has_up: bool) -> torch.Tensor:
        if self._recorder is not None:
            return self._recorder.gelu(x, is_tanh, has_up)
        return glue.gelu(self.library, x, is_tanh, has_up, self.num_threads)

    def experts(self, x: torch.Tensor, logits: torch.Tensor, layer: Experts, lora: ExpertLora | None) -> torch.Tensor:
        if self._recorder is not None:
            return self._recorder.experts(x, logits, layer, lora)
        return moe.experts(self.library, x, logits, layer, lora, self.num_threads)

    def add_gated(self, y: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if self._recorder is not None:
            return self._recorder.add_gated(y, x, gate)
        return moe.add_gated(self.library, y, x, gate, self.num_threads)

    # --------------------------------------------------------------------------------------------------------- sampling

    def row_argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sampling.row_argmax(self.library, x, self.num_threads)

    def mask_logits(self, logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
        sampling.mask_logits(self.library, logits, rows, bitmask, self.num_threads)

    def ordered_top_k(self, x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return sampling.ordered_top_k(self.library, x, k, self.num_threads)

    def token_weights(self, logits: torch.Tensor, rule: WeightRule) -> tuple[torch.Tensor, torch.Tensor]:
        return sampling.token_weights(self.library, logits, rule, self.num_threads)

    def invert_cdf(self, weights: torch.Tensor, least: torch.Tensor | None, uniform: torch.Tensor) -> torch.Tensor:
        return sampling.invert_cdf(self.library, weights, least, uniform, self.num_threads)

    def keep_nucleus(
        self, logits: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor, rule: WeightRule
    ) -> torch.Tensor:
        return sampling.keep_nucleus(self.library, logits, weights, wanted, self.num_threads)

    def log_sum_exp(self, logits: torch.Tensor) -> torch.Tensor:
        return sampling.log_sum_exp(self.library, logits, self.num_threads)

    def token_ranks(self, logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return sampling.token_ranks(self.library, logits, token_ids, self.num_threads)
