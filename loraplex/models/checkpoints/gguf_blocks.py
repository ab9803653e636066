"""The block types of GGUF: bytes of a block, and its numbers in float32, as ggml's `dequantize_row_*` computes them.

    type   bytes of a block of 32          weight
    Q8_0   d, q int8 [32]                  d q
    Q4_0   d, 32 nibbles                   d (q - 8)
    Q4_1   d, m, 32 nibbles                d q + m
    Q5_0   d, 32 high bits, 32 nibbles     d (q - 16)
    Q5_1   d, m, 32 high bits, nibbles     d q + m
    type   of a block of 256
    Q4_K   d, m, 8 scales s and minima t of 6 bits, nibbles         d s q - m t           for each 32
    Q5_K   likewise, with high bits
    Q6_K   low nibbles, high pairs of bits, 16 scales s int8, d     d s (q - 32)          for each 16

d and m are float16. A row is whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockType:
    """of: uint8 [n, num_bytes] -> float32 [n, size], or, where bits is not 0, integers of so many bits (4 or 8), which
    times d, the float16 at the block's beginning, are the numbers: int8 [n, size].
    """

    name: str
    size: int
    num_bytes: int
    of: Callable[[Tensor], Tensor]
    bits: int = 0

    def numbers(self, blocks: Tensor) -> Tensor:
        """uint8 [n, num_bytes] -> float32 [n, size]"""
        return half(blocks, 0) * self.of(blocks).float() if self.bits else self.of(blocks)


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, float32 [n, 1]"""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(q: Tensor) -> Tensor:
    """[n, 16] bytes -> [n, 32]: low halves, then high halves"""
    return torch.cat((q & 15, q >> 4), dim=1)


def _high_bits(bits: Tensor) -> Tensor:
    """[n, 4] bytes of 32 bits -> [n, 32] of 0 or 16"""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).flatten(1) << 4


def q8_0(b: Tensor) -> Tensor:
    return b[:, 2:].view(torch.int8)


def q4_0(b: Tensor) -> Tensor:
    return _nibbles(b[:, 2:]).to(torch.int8) - 8


def q4_1(b: Tensor) -> Tensor:
    return half(b, 0) * _nibbles(b[:, 4:]).float() + half(b, 2)


def q5_0(b: Tensor) -> Tensor:
    return (_nibbles(b[:, 6:]) | _high_bits(b[:, 2:6])).to(torch.int8) - 16


def q5_1(b: Tensor) -> Tensor:
    return half(b, 0) * (_nibbles(b[:, 8:]) | _high_bits(b[:, 4:8])).float() + half(b, 2)


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes of 6-bit numbers -> (s, t), float32 [n, 8] each"""
    low, middle, mixed = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, (mixed & 15) | ((low >> 2) & 48)), dim=1)
    minima = torch.cat((middle & 63, (mixed >> 4) | ((middle >> 2) & 48)), dim=1)
    return scales.float(), minima.float()


def _of_32(b: Tensor, q: Tensor) -> Tensor:
    """q [n, 8, 32] with the scales and minima at the block's beginning"""
    scales, minima = _scales_and_minima(b[:, 4:16])
    return ((half(b, 0) * scales)[..., None] * q.float() - (half(b, 2) * minima)[..., None]).flatten(1)


def _low_nibbles(q: Tensor) -> Tensor:
    """[n, 128] bytes -> [n, 8, 32]: of each 32 bytes the low halves, then the high halves"""
    runs = q.view(len(q), 4, 1, 32)
    return torch.cat((runs & 15, runs >> 4), dim=2).view(len(q), 8, 32)


def q4_k(b: Tensor) -> Tensor:
    return _of_32(b, _low_nibbles(b[:, 16:].contiguous()))


def q5_k(b: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=b.device)[None, :, None]
    high = ((b[:, None, 16:48] >> shifts) & 1) << 4
    return _of_32(b, _low_nibbles(b[:, 48:].contiguous()) | high)


def q6_k(b: Tensor) -> Tensor:
    low, high = b[:, :128].contiguous().view(-1, 2, 1, 64), b[:, 128:192].contiguous().view(-1, 2, 1, 32)
    low = torch.cat((low & 15, low >> 4), dim=2).view(-1, 8, 32)
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2).view(-1, 8, 32)
    q = (low | (high << 4)).view(-1, 16, 16).to(torch.int8) - 32
    scales = half(b, 208) * b[:, 192:208].contiguous().view(torch.int8).float()
    return (scales[..., None] * q.float()).flatten(1)


BLOCK_TYPES: Mapping[int, BlockType] = {
    2: BlockType("Q4_0", 32, 18, q4_0, 4),
    3: BlockType("Q4_1", 32, 20, q4_1),
    6: BlockType("Q5_0", 32, 22, q5_0, 8),
    7: BlockType("Q5_1", 32, 24, q5_1),
    8: BlockType("Q8_0", 32, 34, q8_0, 8),
    12: BlockType("Q4_K", 256, 144, q4_k),
    13: BlockType("Q5_K", 256, 176, q5_k),
    14: BlockType("Q6_K", 256, 210, q6_k),
}
"""By ggml's number of the type."""

FLOAT_TYPES: Mapping[int, torch.dtype] = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
