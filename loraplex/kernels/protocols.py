"""What a kernel backend is: four protocols, one for each part of the engine that calls kernels, and their sum.

    LayerOps         the operators of a layer: layers and models
    AdapterPacking   adapters as packed blocks: memory/weights
    SamplingOps      from logits to tokens: engine/sampler.py
    StepCapture      a step that is recorded once and replayed: engine/decode_graphs.py, models

Pure functions on tensors. `reference.py` says what each computes; T is token rows, dtypes are the model's.

Shapes: x [T, in], y [T, out], q [T, H, D], k and v [T, KH, D]. KV memory is block-major: one tensor [num_blocks,
num_layers, 2, KH, block_size, D]; `kv_layer` = kv[:, layer], [num_blocks, 2, KH, block_size, D]. Its dtype is float32,
float16 or bfloat16, whatever the model's is, or int8 with a scale for each token and head, D + 4 in the place of D
(quantized_weights.py). How a head's numbers lie in a block is the backend's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from loraplex.core import LoraSlice, Shard
from loraplex.cpu import CpuUse
from loraplex.distributed import Collectives, RankGroup
from loraplex.kernels.experts import ExpertLora, Experts
from loraplex.kernels.plan import LoraPlan, SlotTable
from loraplex.kernels.quantized_weights import QuantizedSpecification
from loraplex.kernels.slices import ProjectionsLayout, SliceLayout, SliceWeights
from loraplex.kernels.step_batch import AttentionPlan, LayersForward
from loraplex.kernels.token_ranking import WeightRule
from loraplex.metrics import KernelFallback

LinearWeight = Any
"""A weight as `prepare_linear` gave it: a tensor, or a backend's own packed form."""


class LayerOps(Protocol):
    """The operators of a layer, and the weights of linears in the form that `linear` reads fastest."""

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        plan: LoraPlan,
        table: SlotTable,
        first_row: int,
        slices: tuple[LoraSlice, ...],
    ) -> None:
        """In place, for each segment and slice, in their order, y being y[s:e, o:o+n]:

        y = (1 + weight (gain - 1)) y + weight * (gain * scale * (x[s:e] A^T) B^T + bias). No gain is a gain of 1.
        """
        ...

    def begin_lora(
        self, x: torch.Tensor, plan: LoraPlan, table: SlotTable, first_row: int, slices: tuple[LoraSlice, ...]
    ) -> None:
        """What `add_lora` of these arguments, which is the next one to come, can do without y, beside what is called
        meanwhile."""
        ...

    def scale_input(self, x: torch.Tensor, plan: LoraPlan, table: SlotTable, row: int) -> None:
        """In place, for each segment, in their order: x[s:e] = (1 + weight (input_gain - 1)) x[s:e].

        x [T, in]: the input of the slice that has this row of the table, before the base's product; what it was is
        lost.
        """
        ...

    def rank_nbytes(self, num_ranks: int) -> int:
        """Of the memory, shared by the processes of so many ranks and zeros at first, that `collectives` works over;
        0: it has none."""
        ...

    def collectives(self, shard: Shard, memory: torch.Tensor, watched: Sequence[int]) -> Collectives:
        """Sums over ranks, in steps that are captured too. watched: file descriptors of pipes that end with a rank."""
        ...

    def sum_ranks(self, part: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
        """`ranks.sum`, as an operator of a layer; `part` may be overwritten."""
        ...

    def rms_norm_ranks(self, x: torch.Tensor, weight: torch.Tensor, eps: float, ranks: RankGroup) -> torch.Tensor:
        """x / sqrt(m + eps) * weight of rows of which each rank has x [T, n]: m is the mean of x^2 over all ranks'."""
        ...

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """The dtype of x, y, biases, norms and angles in a model whose weights have `weight_dtype`."""
        ...

    @property
    def quantizations(self) -> tuple[str, ...]:
        """What `prepare_linear` can make of a weight beside keeping its dtype."""
        ...

    @property
    def packed_format(self) -> str | None:
        """Names the layout of prepared weights, for a cache of them on disk; None: they cannot be kept."""
        ...

    def prepare_linear(self, weight: torch.Tensor, quantization: str | None = None) -> LinearWeight:
        """The weight [out, in] in the form that this backend's `linear` reads fastest; called once, after the load."""
        ...

    def keep_linear(self, weight: QuantizedSpecification) -> LinearWeight | None:
        """A weight whose integers and scales a checkpoint has, in those bits, for `linear`; None: no kernel reads
        them."""
        ...

    def linear_tensors(self, weight: LinearWeight) -> dict[str, torch.Tensor]:
        """A prepared weight as named tensors."""
        ...

    def restore_linear(self, tensors: Mapping[str, torch.Tensor], shape: Sequence[int]) -> LinearWeight:
        """The prepared weight of `shape` (out, in) over tensors that `linear_tensors` gave; they are not copied."""
        ...

    def linear(self, x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + bias; weight [out, in], prepared or not."""
        ...

    def linear_rows(self, weight: LinearWeight, first: int, last: int) -> LinearWeight | None:
        """Rows [first, last) of a weight [out, in], prepared or not, for `linear`; nothing is copied. None: its form
        cannot be cut there."""
        ...

    def embeds_prepared(self, quantization: str | None) -> bool:
        """Whether `embedding` reads what `prepare_linear` makes for this quantization: a tied head and its embedding
        are one then.
        """
        ...

    def embedding(self, token_ids: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """Rows [T, in] of a weight [out, in], bit for bit those that it was made of; token_ids int64 [T], each below
        `out`.
        """
        ...

    def row_norms(
        self,
        weight: LinearWeight,
        first: int,
        last: int,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """||W_n + scaling (B A)_n||_2 of rows n in [first, last) of a weight [out, in], prepared or not; of a quantised
        one what its numbers stand for. In float32: lora_a [rank, in], lora_b [last - first, rank], the norms.

        Any thread may call it, while steps run; few rows are in memory a second time.
        """
        ...

    def own_shape(self, num_rows: int, width: int) -> tuple[int, ...]:
        """Of the memory in which a packed block keeps an adapter's own weight [num_rows, width]."""
        ...

    def own_weight(self, stored: torch.Tensor, num_rows: int, width: int) -> LinearWeight:
        """What `linear` and `embedding` read, over such memory in a block, which is of `own_shape`; nothing is
        copied."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension (any leading ones).

        A weight that is wider than x is multiplied before the result is rounded to the dtype of x.
        """
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(total), total), total := scale x + residual; the inputs may be overwritten."""
        ...

    def add_scaled(self, x: torch.Tensor, residual: torch.Tensor, scale: float) -> torch.Tensor:
        """scale x + residual, [T, n]; the residual may be overwritten."""
        ...

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension of x [T, n]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, gate_up [T, 2 I] -> [T, I]."""
        ...

    def experts(self, x: torch.Tensor, logits: torch.Tensor, layer: Experts, lora: ExpertLora | None) -> torch.Tensor:
        """y[t] = sum over the chosen experts e, ascending, of factor * down_e(silu(gate) * up); x, y [T, hidden].

        gate, up = the halves of gate_up_e(x[t]), which `layer.clamp` may join otherwise; `experts.route` chooses by the
        logits [T, experts]. Each linear has its bias and the deltas of the row's adapters. A row's result depends on no
        other row where the backend's linears have that.
        """
        ...

    def add_gated(self, y: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """y + sigmoid(gate) x of y, x [T, n] and gate [T, 1]; y may be overwritten."""
        ...

    def gelu(self, x: torch.Tensor, is_tanh: bool, has_up: bool) -> torch.Tensor:
        """gelu(gate) * up of x = gate, up [T, 2 I] -> [T, I], or where there is no up gelu(x) [T, I].

        gelu(x) = x/2 (1 + erf(x / sqrt(2))); is_tanh: x/2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
        """
        ...

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
        """q with rotary positions; q, k and v may be overwritten.

        cos and sin [T, R], R <= D: the first R dimensions of a head are turned, the others stay. Their halves make
        pairs (Hugging Face's rotate_half), or, interleaved, neighbours do; the halves of cos and sin are equal.
        k, rotated too, and v of each token go to block * block_size + offset = kv_slot_mapping[t], in the dtype of the
        cache.
        """
        ...

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
        """softmax(scale q K^T) V over each sequence's KV blocks, causal; [T, H, D] in the dtype of q.

        With a window, a query at position p sees keys in (p - window, p]. Bytes past a context never show, NaN neither.
        softcap: a score s is softcap * tanh(s / softcap). sinks: float32 [H], for each head a score of no key, which is
        in the sum of the softmax alone: e^s / (e^sink + sum of e^s).
        """
        ...


class AdapterPacking(Protocol):
    """An adapter's tensors for one target as one packed block, in the layout that `add_lora` reads."""

    def adapter_dtype(self, compute_dtype: torch.dtype) -> torch.dtype | None:
        """The one dtype that adapters' tensors are cast to when they are packed; None: no such rule."""
        ...

    def packed_nbytes(self, slices: Sequence[SliceWeights | None], compute_dtype: torch.dtype) -> int:
        """Bytes of the packed block of one target, a multiple of 64 (0 when every slice is None)."""
        ...

    def pack(
        self, slices: Sequence[SliceWeights | None], compute_dtype: torch.dtype, out: torch.Tensor
    ) -> tuple[SliceLayout | None, ...]:
        """Write the packed block into `out` (uint8, 64-byte aligned, at least `packed_nbytes`), on any thread."""
        ...

    @property
    def adapter_format(self) -> str:
        """Names the layout of packed blocks, for copies of them on disk: equal names, equal bytes."""
        ...

    def packed_layouts(
        self, slices: Sequence[SliceWeights | None], compute_dtype: torch.dtype
    ) -> tuple[SliceLayout | None, ...]:
        """What `pack` returns, from shapes and dtypes alone: the tensors may be on the meta device."""
        ...

    def unpack(
        self, layouts: Sequence[SliceLayout | None], in_features: int, out_features: Sequence[int], block: torch.Tensor
    ) -> tuple[SliceWeights | None, ...]:
        """The inverse of `pack`, in the block's dtype: packing the result gives the same layouts and bytes.
        `out_features` by slice.

        The tensors may lie in `block` (uint8, on the host); bytes behind the packed block are not read.
        """
        ...

    @property
    def shares_projections(self) -> bool:
        """Whether blocks may have scales over A and B that other adapters read, too, and `add_lora` knows of them."""
        ...

    def projections_layout(
        self, digest: str, rank: int, widths: tuple[int, int], dtype: torch.dtype, compute_dtype: torch.dtype
    ) -> ProjectionsLayout:
        """Where `pack_projections` puts A [rank, in] and B [out, rank] of `dtype`; widths: (in, out)."""
        ...

    def pack_projections(
        self, layout: ProjectionsLayout, lora_a: torch.Tensor, lora_b: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write both into `out` (uint8, 64-byte aligned, `layout.nbytes`), on any thread."""
        ...

    def own_dtype(self, dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
        """In which a packed block keeps an adapter's own weight that is `dtype` in the file."""
        ...

    def pack_own(self, weight: torch.Tensor, stored: torch.Tensor) -> None:
        """Write an adapter's own weight [num_rows, width] into memory of its dtype and `own_shape`, on any thread."""
        ...

    def own_shape(self, num_rows: int, width: int) -> tuple[int, ...]:
        """As LayerOps has it."""
        ...

    def unpack_own(self, stored: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
        """The inverse of `pack_own`."""
        ...

    def checksums(self, pieces: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The checksum (checksum.py) of packed bytes on the host, for each piece; any thread may call it."""
        ...


class SamplingOps(Protocol):
    """From logits to tokens (token_ranking.py)."""

    def mask_logits(self, logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
        """logits [n, V] float32, in place: row rows[i] += 0 where bit b of bitmask[i, w] allows token 32 w + b, and
        -inf where not, so NaN and +Inf of a model stay to be seen. Tokens behind the bitmask's end are not allowed.

        rows: distinct, int64 [m] on the host; bitmask: int32 [m, W] on the device of the logits.
        """
        ...

    def row_argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per row of x [n, V]: the first id of the largest value, int64 [n], and that value [n]; NaN is the largest."""
        ...

    def ordered_top_k(self, x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first k tokens of each row of x [m, V] in the order (value, descending; id, ascending): values and ids
        [m, k].
        """
        ...

    def token_weights(self, logits: torch.Tensor, rule: WeightRule) -> tuple[torch.Tensor, torch.Tensor]:
        """(the weights [m, V] of all tokens, a new tensor; their sums float64 [m, 1])"""
        ...

    def invert_cdf(self, weights: torch.Tensor, least: torch.Tensor | None, uniform: torch.Tensor) -> torch.Tensor:
        """First id whose inclusive prefix sum exceeds floor(u * total), int64 [m]; weights below `least` [m, 1] are 0.

        weights [m, V] are whole numbers and may be overwritten; u float64 [m, 1].
        """
        ...

    def keep_nucleus(
        self, logits: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor, rule: WeightRule
    ) -> torch.Tensor:
        """`weights` with 0 behind the shortest prefix of the order of mass `wanted` float64 [m, 1] or more; in place.

        Rows where `wanted` is 0 are not read.
        """
        ...

    def log_sum_exp(self, logits: torch.Tensor) -> torch.Tensor:
        """log(sum(exp(logits))) of each row, float64 [m, 1]."""
        ...

    def token_ranks(self, logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """1 + the number of tokens before `token_ids` [m] in the order, int64 [m]."""
        ...


class StepCapture(Protocol):
    """A step that is captured once and replayed, and the scratch memory that it keeps between steps."""

    def captured(self, forward: LayersForward, on_seconds: Callable[[str, float], None] | None = None) -> LayersForward:
        """`forward`, or the same run with less overhead: captured at first, replayed later. It may use only these
        operators and views.

        on_seconds(operator, seconds) is told how long each took, where they are not called from Python.
        """
        ...

    def reserve_workspace(self, num_rows: int) -> None:
        """Steps will have up to `num_rows` rows: scratch memory of captured steps is made for so many at once. More
        rows make it grow.
        """
        ...

    @property
    def workspace_nbytes(self) -> int:
        """Scratch memory that captured steps keep between steps (address space; pages come with their first use)."""
        ...

    def release_workspace(self) -> int:
        """Give that memory back, for low-memory mode; the next step makes what it needs. Returns bytes. Between steps.

        Never while CUDA graphs are held: they have its addresses.
        """
        ...

    def reset_workspace(self) -> None:
        """After a step that failed on its way, with the device idle: what the next one expects there is there again."""
        ...

    @property
    def is_capturable(self) -> bool:
        """Whether a decode step may be a CUDA graph: its kernels read tensors at fixed addresses and nothing of a plan
        on the host.
        """
        ...

    def capturing(self) -> AbstractContextManager[None]:
        """Within it a step is captured: a call that has to read the host, or to wait for the device, raises
        EngineError.
        """
        ...

    def expect_adapters(self, table: SlotTable, compute_dtype: torch.dtype, max_rank: int) -> None:
        """Adapters will be in this table, which is empty: captures cover them up to `max_rank`, or what is usual when
        it is 0.
        """
        ...

    def rank_capacity(self, table: SlotTable) -> int:
        """Ranks up to which a capture made now covers adapters in this table."""
        ...

    def may_replay(self, table: SlotTable) -> bool:
        """Whether what is in this table can be in a captured step at all, ranks and gains apart."""
        ...


class KernelBackend(LayerOps, AdapterPacking, SamplingOps, StepCapture, Protocol):
    """All of it, on one device. Parts take one of the four; what builds an engine, and models, take the whole."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """What runs, for people: the instruction set and threads, or why there are no native kernels."""
        ...

    def fallbacks(self) -> tuple[KernelFallback, ...]:
        """Calls since the start that stock torch ran because a kernel of this backend did not cover them."""
        ...

    def cpu_use(self, use: CpuUse) -> CpuUse:
        """`use` with what kernels that run on threads of their own know of them."""
        ...

    def choose_attention(
        self,
        num_heads: int,
        dtype: torch.dtype,
        kv: torch.Tensor,
        sliding_windows: Sequence[int | None],
        softcap: float | None = None,
        has_sinks: bool = False,
    ) -> None:
        """For an engine of these shapes, before its first step: which kernels run `paged_attention`, measured where
        there are several.

        dtype: of q; kv: the KV memory; windows: of the layers; softcap: of scores. `description` says it. Raises
        ConfigError where what the setting attention_backend asks for cannot run.
        """
        ...
