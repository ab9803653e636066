"""MXFP4 (gpt-oss, compressed-tensors): blocks of 32 numbers of four bits with one power of two (OCP Microscaling
Formats 1.0).

    blocks uint8 [..., in / 32, 16], the earlier number in the low half;  scales uint8 [..., in / 32]
    weight = FP4[q] 2^(scales - 127) = HALVES[q] 2^(scales - 128)

No kernel reads the four bits. Twice the numbers of FP4 are integers up to 12: so int8 in groups of 32, whose scales are
halves of the powers of two, has every weight exactly, in twice the file's bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from loraplex.errors import ModelWeightError
from loraplex.kernels.quantized_weights import Int8GroupWeight, QuantizedSpecification
from loraplex.models.checkpoints.stored import KeptForm, StoredWeight, Tensors, tensor_of

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
HALVES = tuple(int(2 * number) for number in FP4)
BLOCK = 32


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., in]: exact. ValueError: the shapes or dtypes are not those of the form."""
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"blocks and scales have to be uint8, they are {blocks.dtype} and {scales.dtype}")
    if blocks.shape[-1:] != (BLOCK // 2,) or blocks.shape[:-1] != scales.shape:
        raise ValueError(
            f"blocks have shape {tuple(blocks.shape)} and scales {tuple(scales.shape)}; blocks have 16 more"
        )
    table = torch.tensor(FP4, device=blocks.device)
    return torch.ldexp(table[_codes(blocks)], scales.to(torch.int32)[..., None] - 127).flatten(-2)


def _codes(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> int64 [..., 2 n] of 0..15"""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """packed uint8 [out, in / 2], scales uint8 [out, in / 32]"""

    packed: Tensor
    scales: Tensor

    kept: ClassVar[KeptForm] = KeptForm("int8", BLOCK, is_widened=True)

    def rows(self, first: int, last: int) -> Tensor:
        scales = self.scales[first:last]
        return dequantized(self.packed[first:last].reshape(*scales.shape, BLOCK // 2), scales)

    def integers(self) -> QuantizedSpecification:
        q = torch.tensor(HALVES, dtype=torch.int8)[_codes(self.packed)]
        scale = torch.ldexp(torch.ones(self.scales.shape), self.scales.to(torch.int32) - 128)
        return Int8GroupWeight.kept(q, scale, None, BLOCK)


def mxfp4_weight(module: str, shape: tuple[int, int], tensors: Tensors, blocks: str, scales: str) -> Mxfp4Weight:
    """Of these tensors of a module, blocks as [out, in / 2] or [out, in / 32, 16]."""
    out, depth = shape
    if depth % BLOCK:
        raise ModelWeightError(f"weight {module}: {depth} inputs are no whole blocks of {BLOCK}")
    packed = tensor_of(module, blocks, tensors, (torch.uint8,))
    shapes = (out, depth // 2), (out, depth // BLOCK, BLOCK // 2)
    if tuple(packed.shape) not in shapes:
        packed = tensor_of(module, blocks, tensors, (torch.uint8,), shapes[0])
    own_scales = tensor_of(module, scales, tensors, (torch.uint8,), (out, depth // BLOCK))
    return Mxfp4Weight(packed.reshape(shapes[0]), own_scales)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """gpt-oss, whose experts alone are in this form (expert_stacks.py)."""

    title: ClassVar[str] = "MXFP4"
    reads: ClassVar[str] = "experts of gpt-oss"
    keeps: ClassVar[str] = "all, exactly, as int8 in groups of 32"
    suffixes: ClassVar[Sequence[str]] = ("blocks", "scales")
    ignored: ClassVar[Sequence[str]] = ()

    @classmethod
    def of(cls, _settings: Mapping[str, Any]) -> Mxfp4:
        return cls()

    def weight(self, module: str, shape: tuple[int, int], tensors: Tensors) -> StoredWeight:
        return mxfp4_weight(module, shape, tensors, "blocks", "scales")
