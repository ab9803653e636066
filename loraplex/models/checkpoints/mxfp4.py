"""MXFP4 (gpt-oss): blocks of 32 numbers of four bits with one power of two (OCP Microscaling Formats 1.0).

blocks uint8 [..., in / 32, 16], the earlier number in the low half;  scales uint8 [..., in / 32]
weight = FP4[q] 2^(scales - 127)
"""

from __future__ import annotations

import torch
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
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
    q = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(table[q.long()], scales.to(torch.int32)[..., None] - 127).flatten(-2)
