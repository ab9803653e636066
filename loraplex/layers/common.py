"""What a decoder layer has beside linears: RMS norm, rotary embedding, attention over the paged KV cache.

Every layer gets its kernels as `ops` and the batch as an argument; nothing here knows of adapters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from loraplex.core import LoraSlice, LoraTarget, Shard, ShardKind
from loraplex.distributed import ONE_RANK, RankGroup
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

    `cut` takes the share out of the checkpoint's tensor as a view, so that loading copies each number once.
    """

    name: str
    shape: tuple[int, ...]
    destination: Tensor
    cut: Callable[[Tensor], Tensor]

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
    pretraining (llama3, yarn); `attention_factor`, `beta_*`, `mscale*`, `truncate`: yarn; `*_freq_factor`: llama3.
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


ROPE_RULES: dict[str, Callable[[int, RopeParameters], Tensor]] = {
    "default": _default_rope,
    "linear": _linear_rope,
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
}
"""The rope types that exist here, by Hugging Face's name. `dynamic` and `longrope` do not: their frequencies depend on
the length of the sequence, which a shared KV cache cannot undo."""


def _yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_attention_factor(rope: RopeParameters) -> float:
    """What cos and sin are multiplied by: 1 but for yarn: there the softmax temperature of the paper's section 3.4."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    return _yarn_mscale(rope.factor)


class RotaryEmbedding:
    """cos and sin of a step's positions, once per step for all layers.

    They are computed of the positions, and not looked up: so another context is another frequency, and no table.
    """

    def __init__(self, head_dim: int, rope: RopeParameters, setup: LayerSetup) -> None:
        self.inv_freq = ROPE_RULES[rope.rope_type](head_dim, rope).to(setup.device)
        self._unscaled = _base_frequencies(head_dim, rope.rope_theta).to(setup.device)
        self.attention_factor = rope_attention_factor(rope)
        self.dtype = setup.activation_dtype

    def forward(self, positions: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """positions int64 [T] -> (cos, sin), each [T, head_dim] in the activations' dtype; halves are equal
        (`rotate_half`).

        factors: float32 [T], of a base of rope type default or linear: each token's, as linear scaling has it. The bits
        of a token with the base's own factor are those without factors.
        """
        inv_freq = self.inv_freq if factors is None else self._unscaled / factors[:, None]
        angles = positions[:, None].float() * inv_freq
        return self._both_halves(angles.cos()), self._both_halves(angles.sin())

    def _both_halves(self, values: Tensor) -> Tensor:
        values = (values * self.attention_factor).to(self.dtype)
        return torch.cat((values, values), dim=-1)


class RMSNorm:
    """y = weight * (x / sqrt(mean(x^2) + eps)), the norm in float32, over the last dimension (arXiv 1910.07467)."""

    def __init__(self, name: str, size: int, eps: float, setup: LayerSetup, layer: int = 0) -> None:
        self.name = name
        slices = (LoraSlice(name, 0, size, size),)
        self.target = LoraTarget(name, layer, size, size, slices, ShardKind.NORM, setup.shard)
        self.weight = torch.empty(size, dtype=setup.activation_dtype, device=setup.device)
        self.eps = eps
        self.ops = setup.ops

    def forward(self, x: Tensor, plan: LoraPlan | None = None) -> Tensor:
        """The plan is for a norm with LoRA (layers/ends.py), whose call this is."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def forward_add(self, x: Tensor, residual: Tensor, plan: LoraPlan | None = None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual): the step from one block to the next in one call."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)

    def over(self, weight: Tensor) -> RMSNorm:
        """This norm with another weight."""
        other = copy.copy(self)
        other.weight = weight.to(self.weight.dtype)
        return other

    def weight_parts(self) -> Iterator[WeightPart]:
        yield WeightPart(f"{self.name}.weight", tuple(self.weight.shape), self.weight, whole)

    def allocate(self) -> None:
        """It is there: a norm is small."""

    def prepare(self) -> None:
        pass

    def prepared(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"]


Rope = tuple[Tensor, Tensor]
"""cos and sin [T, head_dim] of the step's positions, the same for all layers."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention of one layer over its part of the paged KV cache; grouped queries; a `sliding_window` or all."""

    head_dim: int
    sliding_window: int | None
    ops: LayerOps

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        """q [T, heads, D], k and v [T, kv_heads, D] -> [T, heads * D]. Gives q, k positions; k, v go to the cache.

        kv_layer [num_blocks, 2, kv_heads, block_size, D] is this layer's view of the cache; only blocks of the plan are
        read.
        """
        q = self.ops.rotary_write_kv(q, k, v, *rope, kv_layer, plan.kv_slot_mapping)
        out = self.ops.paged_attention(q, kv_layer, plan, self.head_dim**-0.5, self.sliding_window)
        return out.flatten(1)
