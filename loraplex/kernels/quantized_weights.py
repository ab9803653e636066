"""Weights of linears, and keys and values, in fewer bits: which numbers they stand for. How a backend keeps them is
its own.

    Int8Weight       q * scale, a scale per output
    Int4Weight       (q - zero) * scale, a scale and a zero point per output and group of inputs
    Int8GroupWeight  the same in 8 bits
    Fp8Weight        q * scale in float8, a scale per output

`of` rounds a weight; the constructors take integers and scales as a checkpoint has them, and `LayerOps.keep_linear`
keeps those in their bits.

A KV cache in int8 has the integers of Int8Weight, and a scale for each token and head of the keys and of the values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """W8A16: weight [out, in] = q * scale[:, None], q int8, scale float32 [out] := max |row| / 127."""

    q: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8Weight:
        scale = weight.float().abs().amax(-1).clamp_min(1e-30) / 127
        return cls((weight.float() / scale[:, None]).round().to(torch.int8), scale)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] is rounded to int16 row by row, scale := max |row| / 32767; the sum of integers is exact."""
        x_scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-30) / 32767
        x_q = (x.float() / x_scale).round().double()
        return (x_q @ self.q.double().T * x_scale * self.scale).to(x.dtype)

    def rows(self, first: int, last: int) -> torch.Tensor:
        return self.q[first:last] * self.scale[first:last, None]


INT4_GROUP = 128
"""Numbers of a weight's row that have one scale, where nothing else is said."""

GROUP_SIZES = (32, 64, 128)
"""Those that kernels of a CPU read."""


@dataclass(frozen=True, slots=True)
class GroupWeight:
    """W4A16 or W8A16: weight[n, k] = scale[n, g] * (q[n, k] - zero[n, g]), g = k // group_size.

    q [out, in]; scale [out, groups] float32, float16 or bfloat16; zero [out, groups] of integers, or None: ZERO. groups
    := ceil(in / group_size). activation_bits 8: `linear` rounds x first, to an int8 with a scale for each row and
    group. A checkpoint's weight has 16, which is exact here, and on a CPU off by 2e-5 of a product.
    """

    q: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    group_size: int = INT4_GROUP
    activation_bits: int = 16

    ZERO: ClassVar[int]
    Q_DTYPE: ClassVar[torch.dtype]
    LIMITS: ClassVar[tuple[int, int]]
    """The least and the largest integer."""
    ZERO_LIMITS: ClassVar[tuple[int, int]]

    @classmethod
    def kept(
        cls, q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None, group_size: int = INT4_GROUP
    ) -> Self:
        """The integers and scales of a checkpoint, as they are. ValueError: shapes, dtypes or numbers do not fit."""
        if q.dim() != 2 or q.dtype != cls.Q_DTYPE or q.numel() == 0:
            raise ValueError(f"integers must be {cls.Q_DTYPE} [out, in], got {q.dtype} {list(q.shape)}")
        if group_size < 1:
            raise ValueError(f"a group must have a number at least, got group_size {group_size}")
        shape = [q.shape[0], -(-q.shape[1] // group_size)]
        if list(scale.shape) != shape or not scale.is_floating_point():
            raise ValueError(
                f"scales of {list(q.shape)} in groups of {group_size} must be floats {shape}, got {scale.dtype} "
                f"{list(scale.shape)}"
            )
        _check_within(q, cls.LIMITS, "integers")
        if zero is not None:
            if list(zero.shape) != shape or zero.is_floating_point() or zero.is_complex():
                raise ValueError(f"zero points must be integers {shape}, got {zero.dtype} {list(zero.shape)}")
            _check_within(zero, cls.ZERO_LIMITS, "zero points")
        return cls(q, scale, zero, group_size)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]"""
        if self.activation_bits == 8:
            x = self._rounded(x)
        return (x.double() @ self._numbers(self.q, self.scale, self.zero, torch.float64).T).to(x.dtype)

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Rows [first, last) of the weight, float32."""
        zero = None if self.zero is None else self.zero[first:last]
        return self._numbers(self.q[first:last], self.scale[first:last], zero, torch.float32)

    def cut_rows(self, first: int, last: int) -> Self:
        """Rows [first, last), as views."""
        zero = None if self.zero is None else self.zero[first:last]
        return replace(self, q=self.q[first:last], scale=self.scale[first:last], zero=zero)

    def cut_inputs(self, first: int, last: int) -> Self:
        """Inputs [first, last), as views. ValueError where that cuts a group."""
        is_whole = first % self.group_size == 0 and (last % self.group_size == 0 or last == self.q.shape[1])
        if not is_whole:
            raise ValueError(
                f"inputs {first}..{last} of {self.q.shape[1]} cut a group of {self.group_size}; "
                "take a tensor_parallel_size whose share of the inputs is whole groups"
            )
        groups = slice(first // self.group_size, -(-last // self.group_size))
        zero = None if self.zero is None else self.zero[:, groups]
        return replace(self, q=self.q[:, first:last], scale=self.scale[:, groups], zero=zero)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x.float(), (0, -x.shape[1] % self.group_size))
        groups = padded.view(len(x), padded.shape[1] // self.group_size, self.group_size)
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        rounded: torch.Tensor = (groups / scale).round() * scale
        return rounded.flatten(1)[:, : x.shape[1]].to(x.dtype)

    def _numbers(
        self, q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        def each(of_groups: torch.Tensor) -> torch.Tensor:
            return of_groups.to(dtype).repeat_interleave(self.group_size, dim=1)[:, : q.shape[1]]

        return (q.to(dtype) - (self.ZERO if zero is None else each(zero))) * each(scale)


@dataclass(frozen=True, slots=True)
class Int4Weight(GroupWeight):
    """W4A16: q uint8 of 0..15; no zero points are 8.

    `of`: the number of a group that is furthest from 0 is -8 * scale, whatever its sign: a scale may be negative, and
    all 16 values are used. The scale is in the weight's dtype.
    """

    ZERO = 8
    Q_DTYPE = torch.uint8
    LIMITS = (0, 15)
    ZERO_LIMITS = (0, 16)

    @classmethod
    def of(cls, weight: torch.Tensor, group_size: int = INT4_GROUP) -> Int4Weight:
        out_features, in_features = weight.shape
        groups = F.pad(weight.float(), (0, -in_features % group_size)).view(out_features, -1, group_size)
        furthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        scale = (furthest / -8).to(weight.dtype)
        q = (groups / scale.float().masked_fill(scale == 0, 1.0)).round().add(8).clamp(0, 15).to(torch.uint8)
        return cls(q.view(out_features, -1)[:, :in_features], scale.squeeze(-1), None, group_size)


@dataclass(frozen=True, slots=True)
class Int8GroupWeight(GroupWeight):
    """W8A16 in groups: q int8; no zero points are 0."""

    ZERO = 0
    Q_DTYPE = torch.int8
    LIMITS = ZERO_LIMITS = (-128, 127)


def _check_within(numbers: torch.Tensor, limits: tuple[int, int], name: str) -> None:
    least, largest = int(numbers.min()), int(numbers.max())
    if least < limits[0] or largest > limits[1]:
        raise ValueError(f"{name} must be in {limits[0]}..{limits[1]}, got {least}..{largest}")


FP8_MAX = 448.0
"""The largest number of float8 e4m3."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """W8A8: weight [out, in] = q * scale[:, None], q float8 e4m3, scale float32 [out] := max |row| / 448."""

    q: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor) -> Fp8Weight:
        """Rows of a weight, or of activations: both are rounded alike."""
        scale = rows.float().abs().amax(-1).clamp_min(1e-30) / FP8_MAX
        return cls((rows.float() / scale[:, None]).to(torch.float8_e4m3fn), scale)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] is rounded to float8 row by row."""
        rounded = Fp8Weight.of(x)
        sums = rounded.q.double() @ self.q.double().T
        return (sums * rounded.scale[:, None] * self.scale).to(x.dtype)

    def rows(self, first: int, last: int) -> torch.Tensor:
        return self.q[first:last].float() * self.scale[first:last, None]


QuantizedSpecification = Int8Weight | GroupWeight | Fp8Weight
SPECIFICATIONS: dict[str, type[Int8Weight] | type[Int4Weight] | type[Fp8Weight]] = {
    "fp8": Fp8Weight,
    "int8": Int8Weight,
    "int4": Int4Weight,
}
"""What `--quantization` makes of a weight."""


# ---------------------------------------------------------------------------------------------------- keys and values


def kv_width(head_dim: int, dtype: torch.dtype) -> int:
    """Numbers of `dtype` that a token takes of a KV head's keys or values."""
    return head_dim + torch.float32.itemsize if dtype is torch.int8 else head_dim


def kv_head_dim(kv_layer: torch.Tensor) -> int:
    """D of a layer [num_blocks, 2, KH, block_size, kv_width(D)]."""
    return kv_layer.shape[-1] - kv_width(0, kv_layer.dtype)


def write_int8_kv(k: torch.Tensor, v: torch.Tensor, kv_layer: torch.Tensor, kv_slot_mapping: torch.Tensor) -> None:
    """Store k and v [T, KH, D] of each token where its kv_slot_mapping says: an Int8Weight of [T * 2 * KH, D].

    A scale is of one token and head, so what else is in a block, a step or a chunk changes no bit.
    """
    block_size, rows = kv_layer.shape[3], torch.stack((k, v), dim=1)
    block, offset = kv_slot_mapping // block_size, kv_slot_mapping % block_size
    kept = Int8Weight.of(rows.flatten(0, 2))
    q, scale = _int8_kv_parts(kv_layer.flatten(3), k.shape[-1])
    q[block, :, :, offset], scale[block, :, :, offset] = kept.q.view(rows.shape), kept.scale.view(rows.shape[:-1])


def read_int8_kv(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """int8 [..., block_size * (D + 4)], blocks of heads -> float32 [..., block_size, D]."""
    q, scale = _int8_kv_parts(heads, head_dim)
    return q * scale[..., None]


def _int8_kv_parts(heads: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views: q int8 [..., block_size, D] and scale float32 [..., block_size], one behind the other in memory."""
    block_size = heads.shape[-1] // kv_width(head_dim, heads.dtype)
    q, scale = heads.split_with_sizes([block_size * head_dim, block_size * torch.float32.itemsize], dim=-1)
    return q.view(*q.shape[:-1], block_size, head_dim), scale.view(torch.float32)
