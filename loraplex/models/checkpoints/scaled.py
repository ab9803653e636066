"""FP8 checkpoints (`quant_method` fp8, and compressed-tensors' float-quantized): e4m3 or e5m2 numbers times scales.

    weight_scale      one number, or [out], [out, 1]: per tensor, per channel
    weight_scale_inv  [ceil(out / b0), ceil(in / b1)]: blocks of `weight_block_size`, [128, 128] as a rule; despite its
                      name it is multiplied

`input_scale` of static activations is not used: activations stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from loraplex.errors import ModelWeightError
from loraplex.models.checkpoints.stored import (
    FLOATS,
    FP8,
    Affine,
    StoredWeight,
    Tensors,
    ceil_div,
    refused,
    tensor_of,
)

SCALES = (*FLOATS, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True)
class Fp8:
    """block: rows and columns of a block, or None."""

    block: tuple[int, int] | None

    title: ClassVar[str] = "FP8"
    reads: ClassVar[str] = "per tensor, channel, block; static, dynamic"
    keeps: ClassVar[str] = "nothing"
    suffixes: ClassVar[Sequence[str]] = ("weight", "weight_scale", "weight_scale_inv")
    ignored: ClassVar[Sequence[str]] = ("input_scale", "k_scale", "v_scale", "q_scale")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Fp8:
        scheme = settings.get("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static"):
            raise ValueError(f"activation_scheme {scheme!r} is not supported; only dynamic and static")
        return cls(block_of(settings.get("weight_block_size")))

    def weight(self, module: str, shape: tuple[int, int], tensors: Tensors) -> StoredWeight:
        q = tensor_of(module, "weight", tensors, FP8, shape)
        suffix = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
        return scaled(module, q, suffix, tensors, self.block)


def block_of(value: object) -> tuple[int, int] | None:
    """`weight_block_size`; ValueError for what is no pair of sizes."""
    if value is None:
        return None
    if not isinstance(value, Sequence) or len(value) != 2 or any(type(each) is not int or each < 1 for each in value):
        raise ValueError(f"the block size must be two whole numbers >= 1, got {value!r}")
    return value[0], value[1]


def scaled(
    module: str,
    q: Tensor,
    suffix: str,
    tensors: Tensors,
    block: tuple[int, int] | None,
    zero: Tensor | None = None,
) -> Affine:
    """q [out, in] with a scale for the tensor, for each row, or for each block."""
    scale = tensor_of(module, suffix, tensors, SCALES).float()
    (out, depth), bits = q.shape, 0 if q.is_floating_point() else 8

    def rows(first: int, last: int) -> Tensor:
        return q[first:last]

    if scale.numel() == 1:
        of_all = None if zero is None else zero.reshape(1, 1)
        return Affine(shape=(out, depth), q=rows, scale=scale.reshape(1, 1), zero=of_all, row_block=out, bits=bits)
    if tuple(scale.shape) in ((out,), (out, 1)):
        of_rows = None if zero is None else zero.reshape(out, 1)
        return Affine(shape=(out, depth), q=rows, scale=scale.reshape(out, 1), zero=of_rows, bits=bits)
    if block is None:
        raise refused(module, suffix, scale, f"one number, ({out},) or ({out}, 1): no block size is set")
    wanted = ceil_div(out, block[0]), ceil_div(depth, block[1])
    if tuple(scale.shape) != wanted:
        raise refused(module, suffix, scale, f"{wanted}, for blocks of {block[0]} x {block[1]}")
    if zero is not None:
        raise ModelWeightError(f"weight {module}.weight has zero points for blocks, which is not supported")
    return Affine(shape=(out, depth), q=rows, scale=scale, bits=bits, row_block=block[0], group_size=block[1])
