"""GPTQ checkpoints in 4 and 8 bits, with or without act-order, of AutoGPTQ and GPTQModel.

qweight int32 [in bits / 32, out]     q, lowest bits first, down the columns
qzeros  int32 [G, out bits / 32]      zero - 1 (checkpoint_format gptq), or zero (gptq_v2)
scales  [G, out]     g_idx [in]: the group of each input
weight[n, k] = scales[g_idx[k], n] (q[k, n] - zero[g_idx[k], n])
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
    group_index,
    positive,
    refused,
    signed,
    tensor_of,
    unpacked,
)

FORMATS = {"": 1, "gptq": 1, "gptq_v2": 0}
"""checkpoint_format -> what is added to a stored zero."""

BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class Gptq:
    """group_size: -1 for all inputs of a row; zero_offset: as FORMATS has it."""

    group_size: int
    zero_offset: int

    title: ClassVar[str] = "GPTQ"
    reads: ClassVar[str] = "4 and 8 bits, any group size, act-order, v1 and v2"
    keeps: ClassVar[str] = "all without act-order"
    suffixes: ClassVar[Sequence[str]] = ("qweight", "qzeros", "scales", "g_idx")
    ignored: ClassVar[Sequence[str]] = ()

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Gptq:
        bits, kind = settings.get("bits", 4), settings.get("checkpoint_format") or ""
        if bits not in BITS:
            raise ValueError(f"bits={bits!r} is not supported; only 4 and 8")
        if not isinstance(kind, str) or kind not in FORMATS:
            raise ValueError(f"checkpoint_format {kind!r} is not supported; only gptq and gptq_v2")
        return cls(positive(settings, "group_size", 128), FORMATS[kind])

    def weight(self, module: str, shape: tuple[int, int], tensors: Tensors) -> StoredWeight:
        out, depth = shape
        words = tensor_of(module, "qweight", tensors, (torch.int32,))
        bits = next((b for b in BITS if tuple(words.shape) == (ceil_div(depth * b, 32), out)), 0)
        if not bits:
            wanted = " or ".join(f"({ceil_div(depth * b, 32)}, {out}) for {b} bits" for b in BITS)
            raise refused(module, "qweight", words, wanted)
        size = depth if self.group_size == -1 else self.group_size
        scales = tensor_of(module, "scales", tensors, FLOATS, (ceil_div(depth, size), out))
        per_word, centre = 32 // bits, 1 << bits - 1
        zero_words = tensor_of(module, "qzeros", tensors, (torch.int32,), (len(scales), ceil_div(out, per_word)))
        zero = unpacked(zero_words, bits)[:, :out].t().to(torch.int16) + self.zero_offset
        group_of = group_index(module, "g_idx", tensors, depth, len(scales))
        if group_of is not None and torch.equal(group_of, torch.arange(depth) // size):
            group_of = None

        def rows(first: int, last: int) -> Tensor:
            return signed(unpacked(words[:, first:last].t(), bits)[:, :depth], bits)

        zero = zero - centre
        return Affine(
            shape=shape,
            q=rows,
            scale=scales.t(),
            bits=bits,
            zero=zero if bool(zero.any()) else None,
            group_size=size,
            group_of=group_of,
        )
