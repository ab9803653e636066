"""What a decoder layer has beside linears: norms, rotary embedding, attention over the paged KV cache.

Every layer gets its kernels as `ops` and the batch as an argument; nothing here knows of adapters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from loraplex.core import LoraSlice, LoraTarget, Shard, ShardKind
from loraplex.distributed import ONE_RANK, RankGroup, shard_outputs, shard_rows
from loraplex.errors import ModelWeightError
from loraplex.kernels.plan import LoraPlan
from loraplex.kernels.protocols import LayerOps
from loraplex.kernels.step_batch import AttentionPlan


@dataclass(frozen=True, slots=True)
class LayerSetup:
    """What all layers of a model are built with: kernels, dtype and device of the weights, and this rank's share.

    quantization: None, "fp8", "int8" or "int4": how linears keep their weights once they are loaded.
    """

    ops: LayerOps
    dtype: torch.dtype
    device: torch.device
    shard: Shard = field(default_factory=Shard)
    quantization: str | None = None
    ranks: RankGroup = ONE_RANK

    @property
    def activation_dtype(self) -> torch.dtype:
        """Of hidden states, norms, biases and angles; the backend decides."""
        return self.ops.activation_dtype(self.dtype)


CHECKPOINT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True)
class WeightPart:
    """One tensor of the checkpoint, by name and shape, and the memory of a layer that this rank's share of it fills.

    `cut` takes the share out of the checkpoint's tensor as a view, so that loading copies each number once; but of a
    tensor that is several linears, of which a share has some `rows` each, it is a copy.
    """

    name: str
    shape: tuple[int, ...]
    destination: Tensor
    cut: Callable[[Tensor], Tensor]
    rows: tuple[slice, ...] = ()

    def load(self, tensor: Tensor) -> None:
        """Copy (and convert) this rank's share. ModelWeightError names the tensor and both shapes."""
        if tuple(tensor.shape) != self.shape:
            raise ModelWeightError(
                f"weight {self.name} has shape {tuple(tensor.shape)}, the model's config.json asks for {self.shape}"
            )
        if tensor.dtype not in CHECKPOINT_DTYPES:
            raise ModelWeightError(
                f"weight {self.name} has dtype {tensor.dtype}; quantized checkpoints are not supported"
            )
        self.destination.copy_(self.cut(tensor))


class WeightedLayer(Protocol):
    """A layer that a checkpoint fills: `allocate`, its parts, then `prepare`; or `restore` what `prepared` gave."""

    @property
    def name(self) -> str: ...

    def weight_parts(self) -> Iterator[WeightPart]:
        """Every tensor of the checkpoint that this layer needs. Before `allocate` they may be on the meta device."""
        ...

    def allocate(self) -> None:
        """Memory for the parts, so that a model's layers need not all lie unpacked in memory at once."""
        ...

    def prepare(self) -> None:
        """Once all parts are loaded: weights in the form that kernels read fastest. No part can be loaded then."""
        ...

    def prepared(self) -> dict[str, Tensor]:
        """The prepared weights as tensors, by names of the layer's own."""
        ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the tensors of `prepared` in place of parts and `prepare`; they are used where they are, not copied."""
        ...


def whole(tensor: Tensor) -> Tensor:
    """The cut of what every rank holds."""
    return tensor


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """How positions turn into angles. Names and meaning are those of a Hugging Face config's `rope_parameters`.

    `factor`: the context grows by it (linear, llama3, yarn); `original_max_position_embeddings`: context of the
    pretraining (llama3, yarn, longrope); `attention_factor`: yarn, longrope; `beta_*`, `mscale*`, `truncate`: yarn;
    `*_freq_factor`: llama3; `short_factor` and `long_factor`, a number for each frequency: longrope.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


# Each rule below does its float32 operations in the order of transformers' modeling_rope_utils.py: at position p an
# angle is # p * inv_freq, so one rounding that differs is an angle that is wrong by up to p * 6e-8.


def _base_frequencies(head_dim: int, theta: float) -> Tensor:
    """f[i] = theta ** (-2i / head_dim), float32 [head_dim / 2] (RoFormer, arXiv 2104.09864)."""
    return 1.0 / _wavelengths(head_dim, theta)


def _wavelengths(head_dim: int, theta: float) -> Tensor:
    """theta ** (2i / head_dim), float32 [head_dim / 2]: the wavelength in tokens over 2 pi."""
    exponents: Tensor = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return torch.pow(theta, exponents)


def _default_rope(head_dim: int, rope: RopeParameters) -> Tensor:
    return _base_frequencies(head_dim, rope.rope_theta)


def _linear_rope(head_dim: int, rope: RopeParameters) -> Tensor:
    """Position interpolation (arXiv 2306.15595): all frequencies divided by `factor`."""
    return _base_frequencies(head_dim, rope.rope_theta) / rope.factor


def _llama3_rope(head_dim: int, rope: RopeParameters) -> Tensor:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended.

    With L = original_max_position_embeddings: s = (L / wavelength - low) / (high - low), f' = (1 - s) f / factor + s f.
    """
    freqs = _base_frequencies(head_dim, rope.rope_theta)
    context, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / freqs
    smooth = (context / wavelengths - low) / (high - low)
    is_long, is_short = wavelengths > context / low, wavelengths < context / high
    blended = (1 - smooth) * freqs / rope.factor + smooth * freqs
    return torch.where(is_short, freqs, torch.where(is_long, freqs / rope.factor, blended))


def _yarn_rope(head_dim: int, rope: RopeParameters) -> Tensor:
    """YaRN (arXiv 2309.00071): a linear ramp over the dimensions from f (fast ones) to f / factor (slow ones)."""
    wavelengths = _wavelengths(head_dim, rope.rope_theta)
    low, high = _yarn_ramp_ends(head_dim, rope)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return (1.0 / (rope.factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept


def _yarn_ramp_ends(head_dim: int, rope: RopeParameters) -> tuple[float, float]:
    """The dimensions that turn `beta_fast` and `beta_slow` times within the original context."""

    def dimension(num_turns: float) -> float:
        ratio = rope.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return (head_dim * math.log(ratio)) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high


def _longrope(head_dim: int, rope: RopeParameters) -> Tensor:
    """LongRoPE (arXiv 2402.13753) up to the pretraining's context: each wavelength times its number of `short_factor`.

    A longer sequence has those of `long_factor`, from its first token on: what is in a KV cache by then would be wrong,
    so the longest sequence of such a model is that context (`ModelConfig.max_model_len`).
    """
    return 1.0 / (torch.tensor(rope.short_factor, dtype=torch.float32) * _wavelengths(head_dim, rope.rope_theta))


ROPE_RULES: dict[str, Callable[[int, RopeParameters], Tensor]] = {
    "default": _default_rope,
    "linear": _linear_rope,
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
    "longrope": _longrope,
}
"""The rope types that exist here, by Hugging Face's name. `dynamic` does not: its frequencies depend on the length of
the sequence, which a shared KV cache cannot undo."""


def _yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_attention_factor(rope: RopeParameters) -> float:
    """What cos and sin are multiplied by: 1 but for yarn, where it is the softmax temperature of the paper's section
    3.4, and longrope."""
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "longrope":
        is_longer = rope.factor > 1
        return (
            math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings)) if is_longer else 1.0
        )
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    return _yarn_mscale(rope.factor)


class RotaryEmbedding:
    """cos and sin of a step's positions, once per step for all layers. rotary_dim: how many of a head's dimensions they
    turn.

    They are computed of the positions, and not looked up: so another context is another frequency, and no table.
    """

    def __init__(self, rotary_dim: int, ropes: Sequence[RopeParameters], setup: LayerSetup) -> None:
        self._inv_freqs = [ROPE_RULES[rope.rope_type](rotary_dim, rope).to(setup.device) for rope in ropes]
        self._unscaled = _base_frequencies(rotary_dim, ropes[0].rope_theta).to(setup.device)
        self._attention_factors = [rope_attention_factor(rope) for rope in ropes]
        self.dtype = setup.activation_dtype

    def forward(self, positions: Tensor, factors: Tensor | None = None) -> Rope:
        """positions int64 [T] -> (cos, sin), each [T, R] for each of the ropes, side by side, in the activations'
        dtype; halves of R are equal (`rotate_half`).

        factors: float32 [T], of one base of rope type default or linear: each token's, as linear scaling has it. The
        bits of a token with the base's own factor are those without factors.
        """
        inv_freqs = self._inv_freqs if factors is None else [self._unscaled / factors[:, None]]
        angles = [positions[:, None].float() * inv_freq for inv_freq in inv_freqs]
        return self._both_halves([each.cos() for each in angles]), self._both_halves([each.sin() for each in angles])

    def _both_halves(self, values: Sequence[Tensor]) -> Tensor:
        scaled = [(each * by).to(self.dtype) for each, by in zip(values, self._attention_factors, strict=True)]
        return torch.cat([half for each in scaled for half in (each, each)], dim=-1)


class RMSNorm:
    """y = weight * (x / sqrt(mean(x^2) + eps)), the norm in float32, over the last dimension (arXiv 1910.07467).

    offset: what files have the weight less (Gemma: 1); then it is kept, and multiplied, in float32.
    """

    def __init__(
        self, name: str, size: int, eps: float, setup: LayerSetup, layer: int = 0, offset: float = 0.0
    ) -> None:
        self.name = name
        slices = (LoraSlice(name, 0, size, size),)
        self.target = LoraTarget(name, layer, size, size, slices, ShardKind.NORM, setup.shard)
        dtype = torch.float32 if offset else setup.activation_dtype
        self.weight = torch.empty(size, dtype=dtype, device=setup.device)
        self.eps = eps
        self.ops = setup.ops
        self._offset = offset

    def forward(self, x: Tensor, plan: LoraPlan | None = None) -> Tensor:
        """The plan is for a norm with LoRA (layers/ends.py), whose call this is."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def forward_add(
        self, x: Tensor, residual: Tensor, plan: LoraPlan | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """(norm(total), total), total := scale x + residual: the step from one block to the next in one call."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, scale)

    def forward_with(self, weight: Tensor, x: Tensor) -> Tensor:
        """Of a weight as files have it, in place of this norm's."""
        return self.ops.rms_norm(x, self._added(weight), self.eps)

    def over(self, weight: Tensor) -> RMSNorm:
        """This norm with another weight, as files have it."""
        assert weight.shape == self.weight.shape, f"{self.name}: of a rank's part"
        other = copy.copy(self)
        other.weight = self._added(weight).to(self.weight.dtype)
        return other

    def _added(self, weight: Tensor) -> Tensor:
        return weight.float() + self._offset if self._offset else weight

    def weight_parts(self) -> Iterator[WeightPart]:
        yield WeightPart(f"{self.name}.weight", tuple(self.weight.shape), self.weight, self._added)

    def allocate(self) -> None:
        """It is there: a norm is small."""

    def prepare(self) -> None:
        pass

    def prepared(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"]


class UnitNorm(RMSNorm):
    """An RMS norm whose weight is 1: it is in no checkpoint, and no adapter has one."""

    def __init__(self, name: str, size: int, eps: float, setup: LayerSetup, layer: int) -> None:
        super().__init__(name, size, eps, setup, layer)
        self.weight.fill_(1)

    def weight_parts(self) -> Iterator[WeightPart]:
        return iter(())


class ParallelRMSNorm(RMSNorm):
    """An RMS norm over a width of which each rank has a part: y_i = weight_i * (x_i / sqrt(m + eps)), where m is the
    sum of all ranks' x_i^2 over the number of their entries.

    Neighbours may have the same part (k heads that are fewer than ranks): each part is there equally often, so the mean
    is the same.
    """

    def __init__(self, name: str, full_size: int, size: int, eps: float, setup: LayerSetup, layer: int) -> None:
        super().__init__(name, size, eps, setup, layer)
        slices = (LoraSlice(name, 0, size, full_size),)
        self.target = replace(self.target, full_in_features=full_size, slices=slices)
        self.ranks = setup.ranks

    def forward(self, x: Tensor, plan: LoraPlan | None = None) -> Tensor:
        return self.forward_with(self.weight, x)

    def forward_add(
        self, x: Tensor, residual: Tensor, plan: LoraPlan | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        total = self.ops.add_scaled(x, residual, scale)
        return self.forward(total), total

    def forward_with(self, weight: Tensor, x: Tensor) -> Tensor:
        """weight: this rank's part of one. Every rank has to call it."""
        return self.ops.rms_norm_ranks(x, weight, self.eps, self.ranks)

    def weight_parts(self) -> Iterator[WeightPart]:
        s = self.target.slices[0]
        yield WeightPart(
            *(f"{self.name}.weight", (s.full_out_features,), self.weight),
            lambda tensor: shard_outputs(tensor, s, self.target.shard),
        )


class LayerNorm(RMSNorm):
    """y = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias, over the last dimension (arXiv 1607.06450)."""

    def __init__(
        self, name: str, size: int, eps: float, setup: LayerSetup, layer: int = 0, has_bias: bool = False
    ) -> None:
        super().__init__(name, size, eps, setup, layer)
        self.bias = torch.empty_like(self.weight) if has_bias else None

    def forward(self, x: Tensor, plan: LoraPlan | None = None) -> Tensor:
        return self.forward_with(self.weight, x)

    def forward_add(
        self, x: Tensor, residual: Tensor, plan: LoraPlan | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        total = self.ops.add_scaled(x, residual, scale)
        return self.forward(total), total

    def forward_with(self, weight: Tensor, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, weight, self.bias, self.eps)

    def weight_parts(self) -> Iterator[WeightPart]:
        yield from super().weight_parts()
        if self.bias is not None:
            yield WeightPart(f"{self.name}.bias", tuple(self.bias.shape), self.bias, whole)

    def prepared(self) -> dict[str, Tensor]:
        return super().prepared() | ({} if self.bias is None else {"bias": self.bias})

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        super().restore(tensors)
        if self.bias is not None:
            self.bias = tensors["bias"]


class AttentionSinks:
    """A score of no key for each query head of one layer, as `LayerOps.paged_attention` has them; this rank's heads."""

    def __init__(self, name: str, num_heads: int, setup: LayerSetup) -> None:
        self.name = name
        self._full, self._shard = num_heads, setup.shard
        self.weight = torch.empty(num_heads // setup.shard.size, dtype=torch.float32, device=setup.device)

    def weight_parts(self) -> Iterator[WeightPart]:
        def cut(tensor: Tensor) -> Tensor:
            return shard_rows(tensor, len(self.weight), self._shard)

        yield WeightPart(self.name, (self._full,), self.weight, cut)

    def allocate(self) -> None:
        """It is there: they are few."""

    def prepare(self) -> None:
        pass

    def prepared(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"]


Rope = tuple[Tensor, Tensor]
"""cos and sin [T, R] of the step's positions, those of several rotary embeddings side by side."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention of one layer over its part of the paged KV cache; grouped queries; a `sliding_window` or all.

    rope_columns: the layer's of the step's cos and sin; None: all of them. sinks: of its heads, None: there are none.
    """

    scale: float
    softcap: float | None
    sliding_window: int | None
    rope_columns: slice | None
    is_rope_interleaved: bool
    sinks: AttentionSinks | None
    ops: LayerOps

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        """q [T, heads, D], k and v [T, kv_heads, D] -> [T, heads * D]. Gives q, k positions; k, v go to the cache.

        kv_layer [num_blocks, 2, kv_heads, block_size, D] is this layer's view of the cache; only blocks of the plan are
        read.
        """
        cos, sin = rope
        if self.rope_columns is not None:
            cos, sin = cos[:, self.rope_columns], sin[:, self.rope_columns]
        slots = plan.kv_slot_mapping
        q = self.ops.rotary_write_kv(q, k, v, cos, sin, kv_layer, slots, self.is_rope_interleaved)
        sinks = None if self.sinks is None else self.sinks.weight
        out = self.ops.paged_attention(q, kv_layer, plan, self.scale, self.sliding_window, self.softcap, sinks)
        return out.flatten(1)
