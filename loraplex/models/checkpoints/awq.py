"""AWQ checkpoints of version gemm: 4 bits with zero points in groups.

qweight int32 [in, out / 8], qzeros int32 [G, out / 8]: columns 0, 2, 4, 6, 1, 3, 5, 7 of eight, lowest bits first
scales [G, out]
weight[n, k] = scales[k // group_size, n] (q[k, n] - zero[k // group_size, n])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from loraplex.models.checkpoints.stored import (
    FLOATS,
    Affine,
    StoredWeight,
    Tensors,
    ceil_div,
    positive,
    refused,
    tensor_of,
    unpacked,
)

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""ORDER[c]: which of the eight numbers of a word, lowest bits first, is column c."""

CENTRE = 8


@dataclass(frozen=True, slots=True)
class Awq:
    """group_size: -1 for all inputs of a row."""

    group_size: int

    title: ClassVar[str] = "AWQ"
    reads: ClassVar[str] = "4 bits of version gemm"
    keeps: ClassVar[str] = "all"
    suffixes: ClassVar[Sequence[str]] = ("qweight", "qzeros", "scales")
    ignored: ClassVar[Sequence[str]] = ()

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Awq:
        bits, version = settings.get("bits", settings.get("w_bit", 4)), str(settings.get("version", "gemm")).lower()
        if bits != 4:
            raise ValueError(f"bits={bits!r} is not supported; only 4")
        if version != "gemm":
            raise ValueError(f"version {version!r} is not supported; only gemm")
        if settings.get("zero_point", True) is not True:
            raise ValueError("zero_point=false is not supported; only true")
        key = "group_size" if "group_size" in settings else "q_group_size"
        return cls(positive(settings, key, 128))

    def weight(self, module: str, shape: tuple[int, int], tensors: Tensors) -> StoredWeight:
        out, depth = shape
        words = tensor_of(module, "qweight", tensors, (torch.int32,))
        if out % 8 or tuple(words.shape) != (depth, out // 8):
            raise refused(module, "qweight", words, f"({depth}, {out} / 8)")
        size = depth if self.group_size == -1 else self.group_size
        scales = tensor_of(module, "scales", tensors, FLOATS, (ceil_div(depth, size), out))
        zero_words = tensor_of(module, "qzeros", tensors, (torch.int32,), (len(scales), out // 8))

        def rows(first: int, last: int) -> Tensor:
            start = first // 8
            q = _columns(words[:, start : ceil_div(last, 8)])
            return q[first - 8 * start : last - 8 * start]

        zero = _columns(zero_words)
        return Affine(
            shape=shape, q=rows, scale=scales.t(), bits=4, zero=zero if bool(zero.any()) else None, group_size=size
        )


def _columns(words: Tensor) -> Tensor:
    """int32 [n, m] -> int8 [8 m, n] of -8 .. 7"""
    q = unpacked(words, 4)[..., list(ORDER)].flatten(1).t()
    return q.to(torch.int8) - CENTRE
