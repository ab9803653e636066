"""The one decoder of all families: embedding, layers of attention and MLP, norm, head. `ModelConfig` has what differs.

    h = embed(token_ids)
    h = h + attention(norm(h));  h = h + mlp(norm(h))         for each layer
    hidden = norm(h);  logits = lm_head(hidden)

A family may have other norms, both blocks side by side behind one norm, and factors (models/families.py).

The batch (`StepBatch`) is an argument all the way down. Modules are named as in the checkpoint. The inputs of o_proj
(the attention's output) and of down_proj (that of the activation) are scratch that nothing else reads: adapters with
input gains multiply them in place (layers/lora.py).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from loraplex.core import LoraTarget, Shard
from loraplex.cpu import CpuUse
from loraplex.distributed import ONE_RANK, RankGroup
from loraplex.errors import ModelConfigError
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.protocols import KernelBackend, LayerOps
from loraplex.kernels.quantized_weights import kv_width
from loraplex.kernels.step_batch import AttentionPlan, LayersForward, StepBatch
from loraplex.layers.common import (
    Attention,
    AttentionSinks,
    LayerNorm,
    LayerSetup,
    ParallelRMSNorm,
    RMSNorm,
    Rope,
    RotaryEmbedding,
    UnitNorm,
    WeightedLayer,
    WeightPart,
)
from loraplex.layers.ends import LogitsProcessorWithLoRA, RMSNormWithLoRA, VocabParallelEmbeddingWithLoRA
from loraplex.layers.linear import (
    FusedColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    kv_heads_of_shard,
)
from loraplex.layers.lora import BaseLayerWithLoRA, with_lora
from loraplex.layers.moe import SparseMLP
from loraplex.metrics import KernelFallback, KernelSpeedup
from loraplex.models.config import ModelConfig
from loraplex.models.shares import check_shares
from loraplex.models.speedup import KernelShapes, measure_speedups

Linear = ParallelLinear | BaseLayerWithLoRA
"""A linear as a block calls it: `forward(x, plan)`."""

Norm = RMSNorm | RMSNormWithLoRA

OWN_LAYERS = "adapters have norms or linears of their own"
SHARED_INPUTS = "adapters have gains on inputs that linears share"
"""Why layers are run without their capture."""

WHOLE = Shard()

Block = TypeVar("Block")


class _Linears:
    """The linears and the norms of a model in order, each wrapped for LoRA when the model serves adapters; the sinks of
    its attention."""

    def __init__(self, enable_lora: bool) -> None:
        self._enable_lora = enable_lora
        self.bare: list[ParallelLinear] = []
        self.norms: list[RMSNorm] = []
        self.sinks: list[AttentionSinks] = []
        self.wrapped: list[BaseLayerWithLoRA] = []
        self.wrapped_norms: list[RMSNormWithLoRA] = []

    def add(self, linear: ParallelLinear) -> Linear:
        self.bare.append(linear)
        if not self._enable_lora:
            return linear
        layer = with_lora(linear, linear.forward_slice)
        self.wrapped.append(layer)
        return layer

    def add_norm(self, norm: RMSNorm) -> Norm:
        self.norms.append(norm)
        if not self._enable_lora:
            return norm
        layer = RMSNormWithLoRA(norm)
        self.wrapped_norms.append(layer)
        return layer


class SelfAttention:
    """x -> o(attention(rope(norm(q)), rope(norm(k)), v)); the norms of q and k only where the family has them."""

    def __init__(self, name: str, layer: int, config: ModelConfig, setup: LayerSetup, linears: _Linears) -> None:
        head_dim, num_heads = config.head_dim, config.num_attention_heads
        qkv = _qkv_linear(name, layer, config, setup)
        o = RowParallelLinear(f"{name}.o_proj", layer, num_heads * head_dim, config.hidden_size, config.o_bias, setup)
        self.qkv_proj, self.o_proj = linears.add(qkv), linears.add(o)
        full_heads = num_heads, config.num_key_value_heads
        kv_heads = kv_heads_of_shard(config.num_key_value_heads, setup.shard)
        self.head_counts = [num_heads // setup.shard.size, kv_heads, kv_heads]
        self.is_norm_of_width = config.qk_norm == "width"
        self.q_norm, self.k_norm = (
            _qk_norm(f"{name}.{each}_norm", full, here, layer, config, setup, linears)
            for each, full, here in zip("qk", full_heads, self.head_counts, strict=False)
        )
        sinks = AttentionSinks(f"{name}.sinks", num_heads, setup) if config.family.has_sinks else None
        linears.sinks += [] if sinks is None else [sinks]
        self.attention = Attention(
            config.attention_scale,
            config.attention_softcap,
            config.sliding_windows[layer],
            _rope_columns(layer, config),
            config.family.is_rope_interleaved,
            sinks,
            setup.ops,
        )
        self.ops, self.ranks = setup.ops, setup.ranks
        self.head_dim = head_dim

    def forward(self, x: Tensor, rope: Rope, kv_layer: Tensor, plan: AttentionPlan, lora: LoraPlan | None) -> Tensor:
        """x [T, hidden] -> [T, hidden]; rope: cos and sin of the tokens' positions."""
        qkv = self.qkv_proj.forward(x, lora)
        q, k, v = qkv.view(len(qkv), -1, self.head_dim).split_with_sizes(self.head_counts, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normed(q, self.q_norm, lora), self._normed(k, self.k_norm, lora)
        out = self.attention.forward(q, k, v, rope, kv_layer, plan)
        return self.ops.sum_ranks(self.o_proj.forward(out, lora), self.ranks)

    def _normed(self, heads: Tensor, norm: Norm, lora: LoraPlan | None) -> Tensor:
        """heads [T, n, D]: each of them, or all at once."""
        if not self.is_norm_of_width:
            return norm.forward(heads, lora)
        return norm.forward(heads.flatten(1), lora).view(heads.shape)


def _qkv_linear(name: str, layer: int, config: ModelConfig, setup: LayerSetup) -> ParallelLinear:
    hidden_size, num_heads, num_kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    if config.family.is_qkv_fused:
        fused = f"{name}.qkv_proj", layer, hidden_size, (num_heads, num_kv_heads, num_kv_heads), config.head_dim
        return FusedColumnParallelLinear(*fused, config.qkv_bias, setup)
    modules = f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"
    return QKVParallelLinear(
        *(f"{name}.qkv_proj", layer, hidden_size, config.head_dim, num_heads, num_kv_heads),
        *(modules, config.qkv_bias, setup),
    )


def _rope_columns(layer: int, config: ModelConfig) -> slice | None:
    """Those of a layer, of the step's cos and sin (`RotaryEmbedding`)."""
    index, width = config.layer_ropes[layer], config.rotary_dim
    if index is None:
        return slice(0)
    return None if len(config.ropes) == 1 else slice(index * width, (index + 1) * width)


def _norm(name: str, size: int, layer: int, config: ModelConfig, setup: LayerSetup) -> RMSNorm:
    eps, family = config.rms_norm_eps, config.family
    if family.norm == "layer":
        return LayerNorm(name, size, eps, setup, layer, family.norm_bias)
    return RMSNorm(name, size, eps, setup, layer, family.norm_offset)


def _qk_norm(
    name: str, num_heads: int, here: int, layer: int, config: ModelConfig, setup: LayerSetup, linears: _Linears
) -> Norm | None:
    """Over each head, or over all of them, of which this rank has some. A norm of 1 stands behind the rotation in
    transformers, which keeps a head's length: before it, it is the same."""
    head_dim, kind, eps = config.head_dim, config.qk_norm, config.rms_norm_eps
    if not kind or (kind == "unit" and config.layer_ropes[layer] is None):
        return None
    if kind == "unit":
        return UnitNorm(name, head_dim, eps, setup, layer)
    if kind == "head" or setup.shard.size == 1:
        size = head_dim if kind == "head" else num_heads * head_dim
        return linears.add_norm(_norm(name, size, layer, config, setup))
    return linears.add_norm(ParallelRMSNorm(name, num_heads * head_dim, here * head_dim, eps, setup, layer))


class MLP:
    """x -> down(act(gate(x)) * up(x)), or where the family has no gate down(act(up(x)))"""

    def __init__(
        self, name: str, layer: int, inner: int, config: ModelConfig, setup: LayerSetup, linears: _Linears
    ) -> None:
        has_bias, family = config.mlp_bias, config.family
        gate, up, down = (f"{name}.{each}" if each else "" for each in family.mlp_modules)
        modules = [(gate, inner), (up, inner)] if family.is_gated else [(up, inner)]
        about = f"{name}.gate_up_proj" if family.is_gated else up, layer, config.hidden_size
        if family.is_gate_up_fused:
            first: ParallelLinear = FusedColumnParallelLinear(*about, (inner, inner), 1, has_bias, setup)
        else:
            first = MergedColumnParallelLinear(*about, modules, has_bias, setup)
        last = RowParallelLinear(down, layer, inner, config.hidden_size, has_bias, setup)
        self.gate_up_proj, self.down_proj = linears.add(first), linears.add(last)
        self.activation, self.is_gated = config.activation, family.is_gated
        self.ops, self.ranks = setup.ops, setup.ranks

    def forward(self, x: Tensor, lora: LoraPlan | None) -> Tensor:
        return self.ops.sum_ranks(self.partial(x, lora), self.ranks)

    def partial(self, x: Tensor, lora: LoraPlan | None) -> Tensor:
        """This rank's summand."""
        return self.down_proj.forward(self._activated(self.gate_up_proj.forward(x, lora)), lora)

    def _activated(self, x: Tensor) -> Tensor:
        if self.activation == "silu":
            return self.ops.silu_mul(x)
        return self.ops.gelu(x, self.activation == "gelu_tanh", self.is_gated)


def _mlp(name: str, layer: int, config: ModelConfig, setup: LayerSetup, linears: _Linears) -> MLP | SparseMLP:
    sizes, keys = config.experts[layer] if config.experts else None, config.family.experts
    block = f"{name}.{keys.names.block if keys else 'mlp'}"
    if sizes is None or keys is None:
        return MLP(block, layer, config.intermediate_size, config, setup, linears)
    shared = f"{block}.shared_expert", layer, sizes.shared_size, config, setup, linears
    return SparseMLP(
        name, layer, config.hidden_size, sizes, keys.names, setup, linears, MLP(*shared) if sizes.shared_size else None
    )


class DecoderLayer:
    """One layer: before each block, behind it, or both, a norm; around each a residual. Parallel blocks have one."""

    def __init__(self, layer: int, config: ModelConfig, setup: LayerSetup, linears: _Linears) -> None:
        name, norms = f"model.layers.{layer}", config.family.norms

        def add_norm(of: str) -> Norm | None:
            if not of:
                return None
            return linears.add_norm(_norm(f"{name}.{of}", config.hidden_size, layer, config, setup))

        self.before_attention = add_norm(norms.before_attention)
        self.self_attn = SelfAttention(f"{name}.self_attn", layer, config, setup, linears)
        self.after_attention = add_norm(norms.after_attention)
        self.before_mlp = add_norm(norms.before_mlp)
        self.mlp = _mlp(name, layer, config, setup, linears)
        self.after_mlp = add_norm(norms.after_mlp)
        self.is_parallel, self.residual_scale = config.family.is_parallel, config.residual_scale
        self.ops = setup.ops

    def forward(
        self, x: Tensor, residual: Tensor | None, rope: Rope, kv_layer: Tensor, batch: StepBatch
    ) -> tuple[Tensor, Tensor]:
        """(last block's output, residual before it) -> those of this layer, each [T, hidden]; None before the first."""
        lora = batch.lora
        x, residual = self._enter(self.before_attention, x, residual, lora)
        y = self.self_attn.forward(x, rope, kv_layer, batch.attention, lora)
        if self.is_parallel:
            residual = self.ops.add_scaled(y, residual, self.residual_scale)
            return self.mlp.forward(x, lora), residual
        if self.after_attention is not None:
            y = self.after_attention.forward(y, lora)
        x, residual = self._enter(self.before_mlp, y, residual, lora)
        y = self.mlp.forward(x, lora)
        return y if self.after_mlp is None else self.after_mlp.forward(y, lora), residual

    def _enter(
        self, norm: Norm | None, x: Tensor, residual: Tensor | None, lora: LoraPlan | None
    ) -> tuple[Tensor, Tensor]:
        """(what a block reads, the residual): the last block's output is added to the residual, and that is normed."""
        if residual is None:
            return x if norm is None else norm.forward(x, lora), x
        if norm is not None:
            return norm.forward_add(x, residual, lora, self.residual_scale)
        total = self.ops.add_scaled(x, residual, self.residual_scale)
        return total, total


class WholeBase(Protocol):
    """What adapters ask of a base whose ranks have a share each (models/loader.py)."""

    def bias(self, module_name: str) -> Tensor | None: ...

    def rows(self, module_name: str, row_ids: Tensor) -> Tensor: ...

    def row_norms(
        self, module_name: str, lora_a: Tensor, lora_b: Tensor, scaling: float, quantization: str | None
    ) -> Tensor: ...


def _forward_layers(
    layers: Sequence[DecoderLayer], norm: Norm, x: Tensor, rope: Rope, kv: Tensor, batch: StepBatch
) -> Tensor:
    residual = None
    for index, (layer, kv_layer) in enumerate(zip(layers, kv.unbind(1), strict=True)):
        if batch.gate is not None:
            batch.gate.wait_for_layer(index)
        x, residual = layer.forward(x, residual, rope, kv_layer, batch)
    assert residual is not None
    if batch.gate is not None:
        batch.gate.wait_for_layer(len(layers))  # the head's, too
    return norm.forward_add(x, residual, batch.lora, layers[-1].residual_scale)[0]


def _bare(block: Block, changed: Mapping[str, ParallelLinear | RMSNorm]) -> Block:
    """A copy of a block, or of a part of it, over the same weights, but for linears and norms that are replaced."""
    copied = copy.copy(block)
    for name, part in vars(block).items():
        if isinstance(part, SelfAttention | MLP):
            setattr(copied, name, _bare(part, changed))
        elif isinstance(part, SparseMLP):
            setattr(copied, name, part.bare(lambda each: _bare(each, changed), lambda each: _bare_part(each, changed)))
        elif isinstance(part, ParallelLinear | RMSNorm | BaseLayerWithLoRA | RMSNormWithLoRA):
            setattr(copied, name, _bare_part(part, changed))
    return copied


def _bare_part(part: Any, changed: Mapping[str, ParallelLinear | RMSNorm]) -> Any:
    own = part.base_layer if isinstance(part, BaseLayerWithLoRA | RMSNormWithLoRA) else part
    return changed.get(own.target.name, own)


class Decoder:
    """A causal language model over a paged KV cache. Weights are shapes until loraplex/models/loader.py fills them.

    `enable_lora=False` builds the bare linears: such a model takes no plan with adapters. ranks: those that `shard` is
    one of. The KV cache of all of them is one tensor, in which each rank has layers of its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: KernelBackend,
        dtype: torch.dtype,
        device: torch.device,
        enable_lora: bool,
        shard: Shard = WHOLE,
        quantization: str | None = None,
        ranks: RankGroup = ONE_RANK,
    ) -> None:
        if shard != ranks.shard:
            raise ModelConfigError(f"a shard of {shard.size} ranks needs the others; {ranks.shard.size} is there")
        check_shares(config, shard.size, ranks.is_fully_sharded)
        # as the family's code does, which has the factor in the weights' dtype
        scale = torch.tensor(config.embedding_scale, dtype=dtype).item() if config.family.scales_embedding else None
        self._embedding_scale = config.embedding_scale if scale is None else scale
        self._ops = ops
        setup = LayerSetup(ops, dtype, device, shard, quantization, ranks)
        self._ranks, self._shard = ranks, shard
        self.config, self.dtype, self.device = config, dtype, device
        self.weights_name = ""
        """Names the weights and their form: equal names, equal numbers. Set when they are loaded."""
        self.weights_form = ""
        """In words, what a quantised checkpoint is and how its weights are kept; "" for one of plain floats."""
        self.whole_weights: WholeBase | None = None
        """Of all ranks, set when they are loaded; None: this is the only one."""
        self.activation_dtype = setup.activation_dtype
        self._linears = _Linears(enable_lora)
        self._table: SlotTable | None = None
        self._own_steps: Counter[str] = Counter()
        self.embed_tokens = VocabParallelEmbedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size, setup, config.tie_word_embeddings
        )
        self.layers = [DecoderLayer(i, config, setup, self._linears) for i in range(config.num_hidden_layers)]
        num_layers = config.num_hidden_layers
        norm = _norm("model.norm", config.hidden_size, num_layers, config, setup)
        self.norm = self._linears.add_norm(norm)
        tied_to = self.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead("lm_head", config.vocab_size, config.hidden_size, setup, tied_to, num_layers)
        self._embedding = VocabParallelEmbeddingWithLoRA(self.embed_tokens)
        self._head = LogitsProcessorWithLoRA(self.lm_head, ranks, config.logit_scale, config.logit_softcap)
        self.rotary_emb = RotaryEmbedding(config.rotary_dim, config.ropes, setup)
        self._run_layers = self._captured()
        self._linear_of = {s.module_name: linear for linear in self._linears.bare for s in linear.target.slices}

    def forward(self, batch: StepBatch, kv: Tensor, merged: LayersForward | None = None) -> Tensor:
        """Hidden states [T, hidden] after the last norm; keys and values of the step's tokens are written to `kv`.

        kv: `kv_shape(...)`, of the dtype that was given; blocks that no table of the batch names may hold anything.
        merged: layers that have in them what the batch's adapter changes there; its embedding comes with the plan.
        """
        with self._ranks.step(batch):
            return self._forward(batch, kv, merged)

    def _forward(self, batch: StepBatch, kv: Tensor, merged: LayersForward | None) -> Tensor:
        num_layers = len(self.layers)
        kv = kv[:, self._shard.rank * num_layers : (self._shard.rank + 1) * num_layers]
        rope = self.rotary_emb.forward(batch.positions, batch.rope_factors)
        if batch.gate is not None:
            batch.gate.wait_for_layer(self.embed_tokens.target.layer)
        x = self._ranks.sum(self._embedding.forward(batch.token_ids, batch.lora))
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        if merged is not None:
            return merged(x, rope, kv, replace(batch, lora=None))
        reason = self._reason_against_capture(batch.lora)
        if reason is not None:
            self._own_steps[reason] += 1
            return self._forward_layers(x, rope, kv, batch)
        return self._run_layers(x, rope, kv, batch)

    def _captured(self, on_seconds: Callable[[str, float], None] | None = None) -> LayersForward:
        """Where sums over ranks are operators of the backend."""
        return self._ops.captured(self._forward_layers, on_seconds) if self._ranks.is_captured else self._forward_layers

    def _reason_against_capture(self, lora: LoraPlan | None) -> str | None:
        """What an adapter of the step has that is in no captured layers; None: nothing."""
        if lora is None or self._table is None:
            return None
        for slots, reason in ((self._table.own_layers, OWN_LAYERS), (self._table.shared_input_slots, SHARED_INPUTS)):
            if slots and any(segment.lora_slot in slots for segment in lora.segments):
                return reason
        return None

    def _forward_layers(self, x: Tensor, rope: Rope, kv: Tensor, batch: StepBatch) -> Tensor:
        return _forward_layers(self.layers, self.norm, x, rope, kv, batch)

    def captured_over(
        self, changed: Mapping[str, ParallelLinear | RMSNorm], on_seconds: Callable[[str, float], None] | None = None
    ) -> LayersForward:
        """The layers without LoRA, some linears and norms replaced, by their targets' names: for `forward`.

        on_seconds: as `measure_operators` has it.
        """
        layers, norm = [_bare(layer, changed) for layer in self.layers], _bare_part(self.norm, changed)
        return self._ops.captured(partial(_forward_layers, layers, norm), on_seconds)

    @property
    def workspace_nbytes(self) -> int:
        """Scratch memory that is kept between steps."""
        return self._ops.workspace_nbytes

    @property
    def kernel_fallbacks(self) -> Mapping[str, int]:
        """Calls of operators that stock torch ran because no kernel covered them, by operator and reason."""
        calls = {each.label: each.calls for each in self._ops.fallbacks()}
        for reason, num_steps in self._own_steps.items():
            calls[KernelFallback("layers", self._ops.name, reason, num_steps).label] = num_steps
        return calls

    def cpu_use(self, use: CpuUse) -> CpuUse:
        """`use` with what the kernels know of their threads."""
        return self._ops.cpu_use(use)

    def release_workspace(self) -> int:
        """Give it back, between steps; the next step makes what it needs. Returns the bytes."""
        return self._ops.release_workspace()

    def reset_workspace(self) -> None:
        """After a step that failed on its way, with the device idle: the next step finds it as it expects it."""
        self._ops.reset_workspace()

    def compute_logits(self, hidden: Tensor, segments: Sequence[LoraSegment] = ()) -> Tensor:
        """hidden [n, hidden] (rows of `forward`) -> logits float32 [n, vocab]; segments: of these rows.

        With tokens that adapters of the segments added there are more columns: -inf beyond the vocabulary of a row.
        """
        with self._ranks.logits(hidden, segments):
            return self._compute_logits(hidden, segments)

    def expect_logits(self, rows: Tensor, segments: Sequence[LoraSegment] = ()) -> None:
        """The next `forward` is followed by `compute_logits` of these rows of it, with `segments`, and by nothing
        else."""
        self._ranks.expect_logits(rows, segments)

    @property
    def num_ranks(self) -> int:
        """That share its layers."""
        return self._shard.size

    def close(self) -> None:
        """End the ranks that this one leads."""
        self._ranks.close()

    def check_ranks(self) -> None:
        """Raises DeviceLostError when a rank has ended."""
        self._ranks.check()

    def _compute_logits(self, hidden: Tensor, segments: Sequence[LoraSegment]) -> Tensor:
        table = self._table
        wanted = [] if table is None else [each for each in segments if each.lora_slot in table.head_slots]
        if not wanted:
            return self._head.forward(hidden)
        plan = LoraPlan.build(wanted, len(hidden), len(wanted), hidden.device)
        return self._head.forward(hidden, plan)

    @property
    def has_own_heads(self) -> bool:
        """Whether an adapter on the device changes the head, or where the vocabulary ends."""
        return self._table is not None and bool(self._table.head_slots)

    def vocab_size_of(self, lora_slot: int) -> int:
        """Where the vocabulary of a slot's adapter ends; BASE_SLOT is the base's."""
        vocab_size = self.config.vocab_size
        return vocab_size if self._table is None else self._table.vocab_sizes.get(lora_slot, vocab_size)

    def kv_shape(self, num_blocks: int, block_size: int, kv_dtype: torch.dtype = torch.float32) -> tuple[int, ...]:
        """[num_blocks, layers of one rank behind another's, keys and values, kv_heads, block_size, kv_width(D)]."""
        config, num_layers = self.config, self._shard.size * self.config.num_hidden_layers
        kv_heads = kv_heads_of_shard(config.num_key_value_heads, self._shard)
        return (num_blocks, num_layers, 2, kv_heads, block_size, kv_width(config.head_dim, kv_dtype))

    def lora_targets(self) -> tuple[LoraTarget, ...]:
        """What an adapter may act on: every linear layer by layer, then the norms and the ends of the vocabulary."""
        linears = (linear.target for linear in self._linears.bare)
        norms = (norm.target for norm in self._linears.norms)
        return (*linears, *norms, self.embed_tokens.target, self.lm_head.target)

    def bind_lora(self, table: SlotTable, backend: LayerOps) -> None:
        """Read adapters from `table` from now on. ModelConfigError when the model was built without LoRA."""
        if not self._linears.wrapped:
            raise ModelConfigError(
                "the model was built without LoRA (enable_lora=False): no adapters can be bound to it"
            )
        table.collectives = self._ranks.collectives
        for linear in self._linears.wrapped:
            linear.set_lora_info(table, backend)
        for layer in (*self._linears.wrapped_norms, self._embedding, self._head):
            layer.set_lora_info(table, backend)
        self._table = table
        self._run_layers = self._captured()

    def measure_operators(self, on_seconds: Callable[[str, float], None] | None) -> None:
        """Tell `on_seconds(operator, seconds)` from now on; None: no longer. A backend with its own forward tells
        nothing."""
        self._run_layers = self._captured(on_seconds)

    def measure_kernels(self, dtype: torch.dtype, device: torch.device, block_size: int) -> tuple[KernelSpeedup, ...]:
        """Each kernel beside its fallback, on this model's shapes. dtype: of the weights."""
        config = self.config
        shapes = KernelShapes(
            *(config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads),
            *(config.head_dim, config.vocab_size, dtype, device),
            block_size=block_size,
        )
        return measure_speedups(self._ops, shapes)

    @property
    def linears(self) -> Sequence[ParallelLinear]:
        """Of all layers, in order, without LoRA. norms: likewise."""
        return self._linears.bare

    @property
    def norms(self) -> Sequence[RMSNorm]:
        return self._linears.norms

    def base_bias(self, module_name: str) -> Tensor | None:
        """The bias of one module of the checkpoint, e.g. `model.layers.0.self_attn.q_proj`; None when it has none.

        With several ranks this, the norms of rows and rows of the ends are those of the whole module.
        """
        if self.whole_weights is not None:
            return self.whole_weights.bias(module_name)
        return self._linear_of[module_name].base_bias(module_name)

    def row_norms(self, module_name: str, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
        """As `ParallelLinear.row_norms`; on a GPU beside the steps, which do not wait for it."""
        layer = self.lm_head if module_name == self.lm_head.name else self._linear_of[module_name]
        if self.whole_weights is not None:
            source = self.lm_head.rows_name if layer is self.lm_head else module_name
            return self.whole_weights.row_norms(source, lora_a, lora_b, scaling, layer.quantization)
        with self._beside_steps():
            return layer.row_norms(module_name, lora_a, lora_b, scaling)

    def base_rows(self, module_name: str, token_ids: Tensor) -> Tensor | None:
        """Rows of the embedding or the head as they were loaded, on the host; None: they cannot be read back."""
        layer = self.lm_head if module_name == self.lm_head.name else self.embed_tokens
        if self.whole_weights is not None:
            return self.whole_weights.rows(layer.rows_name, token_ids) if layer.has_base_rows else None
        with self._beside_steps():
            rows = layer.base_rows(token_ids.to(self.device))
            return None if rows is None else rows.cpu()

    def _beside_steps(self) -> AbstractContextManager[object]:
        return nullcontext() if self.device.type != "cuda" else torch.cuda.stream(self._stream)

    @cached_property
    def _stream(self) -> Any:
        """One for all threads: each stream keeps its own free memory."""
        return cast(Any, torch.cuda).Stream(self.device)

    def weighted_layers(self) -> tuple[WeightedLayer, ...]:
        """Every layer with weights, in the order in which they are to be loaded."""
        head = (self.lm_head,) if self.lm_head.has_own_weight else ()
        return (self.embed_tokens, *self._linears.bare, *self._linears.norms, *self._linears.sinks, *head)

    def weight_parts(self) -> Iterator[WeightPart]:
        """Every tensor that the checkpoint has to have, and where it goes."""
        for layer in self.weighted_layers():
            yield from layer.weight_parts()
