"""compressed-tensors checkpoints (llm-compressor): int-, float-, naive- and pack-quantized.

    int-, naive-quantized   weight int8 [out, in], weight_scale and weight_zero_point per tensor, channel or group
    float-quantized         weight float8 e4m3, weight_scale per tensor, channel or block
    pack-quantized          weight_packed int32 [out, ceil(in bits / 32)] of q + 2^(bits - 1), lowest bits first;
                            weight_scale [out, G]; weight_zero_point packed likewise along the rows; weight_g_idx [in]
    mxfp4-pack-quantized    weight_packed uint8 [out, in / 2], weight_scale uint8 [out, in / 32] (mxfp4.py)

A module that `ignore` names has a plain weight. Bits are those that the shapes tell, so one file may mix them.
Activations are not rounded as `input_activations` says: that is exact for W8A16, and nearer than asked for W8A8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from loraplex.errors import ModelWeightError
from loraplex.models.checkpoints.mxfp4 import BLOCK, Mxfp4Weight, mxfp4_weight
from loraplex.models.checkpoints.scaled import block_of, scaled
from loraplex.models.checkpoints.stored import (
    FLOATS,
    FP8,
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

FORMATS = (
    "dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mxfp4-pack-quantized",
    "mixed-precision",
)  # fmt: skip
STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """group_sizes, blocks: those of the config groups."""

    group_sizes: tuple[int, ...]
    block: tuple[int, int] | None

    title: ClassVar[str] = "compressed-tensors"
    reads: ClassVar[str] = "W8A8, W8A16, W4A16, FP8, MXFP4"
    keeps: ClassVar[str] = "integers, no act-order; MXFP4 as int8"
    suffixes: ClassVar[Sequence[str]] = (
        "weight", "weight_scale", "weight_zero_point", "weight_packed", "weight_shape", "weight_g_idx",
    )  # fmt: skip
    ignored: ClassVar[Sequence[str]] = (
        "input_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale",
    )  # fmt: skip

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> CompressedTensors:
        _check_format("format", settings.get("format", "dense"))
        for key in ("transform_config", "sparsity_config"):
            value = settings.get(key) or {}
            is_dense = isinstance(value, Mapping) and value.get("format", "dense") == "dense"
            if value and not (key == "sparsity_config" and is_dense):
                raise ValueError(f"{key} is not supported: its weights are not those of the model; remove it")
        sizes, blocks = set(), set()
        groups = settings.get("config_groups") or {}
        if not isinstance(groups, Mapping):
            raise ValueError(f"config_groups must be an object, got {groups!r}")
        for name, group in groups.items():
            weights = _weights_of(name, group)
            if weights.get("strategy") == "block" or weights.get("block_structure") is not None:
                blocks.add(block_of(weights.get("block_structure")))
            elif weights.get("group_size") is not None:
                sizes.add(positive(weights, "group_size", -1))
        if len(blocks) > 1:
            raise ValueError("config_groups has blocks of several sizes, which is not supported")
        return cls(tuple(sorted(sizes - {-1})), next(iter(blocks), None))

    def weight(self, module: str, shape: tuple[int, int], tensors: Tensors) -> StoredWeight:
        packed = tensors.get("weight_packed")
        if packed is not None and packed.dtype == torch.uint8:
            return self._mxfp4(module, shape, tensors)
        if packed is not None:
            return self._packed(module, shape, tensors)
        q = tensor_of(module, "weight", tensors, (torch.int8, *FP8), shape)
        scale = tensor_of(module, "weight_scale", tensors, FLOATS)
        zero = self._zeros(module, tensors, tuple(scale.shape))
        if scale.dim() == 2 and scale.shape[0] == shape[0] and scale.shape[1] > 1 and self.block is None:
            bits = 0 if q.is_floating_point() else 8
            return self._grouped(module, shape, lambda first, last: q[first:last], scale, zero, tensors, bits)
        return scaled(module, q, "weight_scale", tensors, self.block, zero)

    @staticmethod
    def _mxfp4(module: str, shape: tuple[int, int], tensors: Tensors) -> Mxfp4Weight:
        if "weight_zero_point" in tensors:
            raise ModelWeightError(f"weight {module} has zero points beside blocks of MXFP4, which have none")
        return mxfp4_weight(module, shape, tensors, "weight_packed", "weight_scale")

    def _packed(self, module: str, shape: tuple[int, int], tensors: Tensors) -> StoredWeight:
        out, depth = shape
        words = tensor_of(module, "weight_packed", tensors, (torch.int32,))
        if "weight_shape" in tensors:
            told = tensor_of(module, "weight_shape", tensors, (torch.int64, torch.int32), (2,))
            if tuple(told.tolist()) != shape:
                raise ModelWeightError(
                    f"weight {module}.weight_shape is {told.tolist()}, the model's config.json asks for {shape}"
                )
        bits = next((b for b in (4, 8) if tuple(words.shape) == (out, ceil_div(depth, 32 // b))), 0)
        if not bits:
            wanted = f"({out}, {ceil_div(depth, 8)}) for 4 bits or ({out}, {ceil_div(depth, 4)}) for 8"
            raise refused(module, "weight_packed", words, wanted)

        def rows(first: int, last: int) -> Tensor:
            return signed(unpacked(words[first:last], bits)[:, :depth], bits)

        scale = tensor_of(module, "weight_scale", tensors, FLOATS)
        if scale.numel() == 1:
            scale = scale.reshape(1, 1).expand(out, 1)
        if scale.dim() != 2 or len(scale) != out:
            raise refused(module, "weight_scale", scale, f"({out}, groups)")
        zero = self._packed_zeros(module, tensors, bits, tuple(scale.shape))
        return self._grouped(module, shape, rows, scale, zero, tensors, bits)

    def _grouped(
        self,
        module: str,
        shape: tuple[int, int],
        q: Any,
        scale: Tensor,
        zero: Tensor | None,
        tensors: Tensors,
        bits: int,
    ) -> Affine:
        num_groups, depth = scale.shape[1], shape[1]
        if num_groups == 1:
            return Affine(shape=shape, q=q, scale=scale, zero=zero, bits=bits)
        group_of = group_index(module, "weight_g_idx", tensors, depth, num_groups)
        fitting = [size for size in self.group_sizes if ceil_div(depth, size) == num_groups]
        if len(fitting) != 1 and group_of is None:
            raise refused(module, "weight_scale", scale, f"groups of {self.group_sizes} for {depth} inputs")
        size = fitting[0] if fitting else 0
        if group_of is not None and fitting and torch.equal(group_of, torch.arange(depth) // size):
            group_of = None
        return Affine(
            shape=shape,
            q=q,
            scale=scale,
            zero=zero,
            group_size=size,
            group_of=group_of,
            bits=bits,
        )

    @staticmethod
    def _zeros(module: str, tensors: Tensors, shape: Sequence[int]) -> Tensor | None:
        if "weight_zero_point" not in tensors:
            return None
        dtypes = (torch.int8, *FP8, *FLOATS)
        zero = tensor_of(module, "weight_zero_point", tensors, dtypes, shape).float()
        return zero if bool(zero.any()) else None

    @staticmethod
    def _packed_zeros(module: str, tensors: Tensors, bits: int, shape: tuple[int, ...]) -> Tensor | None:
        if "weight_zero_point" not in tensors:
            return None
        if tensors["weight_zero_point"].dtype == torch.int8:  # files of before 0.9 had them unpacked
            return CompressedTensors._zeros(module, tensors, shape)
        per_word = 32 // bits
        wanted = ceil_div(shape[0], per_word), shape[1]
        words = tensor_of(module, "weight_zero_point", tensors, (torch.int32,), wanted)
        zero = signed(unpacked(words.t(), bits).t()[: shape[0]], bits)
        return zero if bool(zero.any()) else None


def _check_format(key: str, value: object) -> None:
    if value not in (None, *FORMATS):
        raise ValueError(f"{key} {value!r} is not supported; supported are {', '.join(FORMATS)}")


def _weights_of(name: str, group: object) -> Mapping[str, Any]:
    if not isinstance(group, Mapping):
        raise ValueError(f"config_groups.{name} must be an object, got {group!r}")
    _check_format(f"config_groups.{name}.format", group.get("format"))
    weights = group.get("weights")
    if weights is None:  # activations alone
        return {}
    if not isinstance(weights, Mapping):
        raise ValueError(f"config_groups.{name}.weights must be an object, got {weights!r}")
    bits, kind, strategy = weights.get("num_bits", 8), weights.get("type", "int"), weights.get("strategy")
    is_mxfp4 = (kind, bits, strategy, weights.get("group_size")) == ("float", 4, "group", BLOCK)
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)) and not is_mxfp4:
        known = f"int4, int8, float8, and float4 in groups of {BLOCK}, are"
        raise ValueError(f"config_groups.{name}: {bits} bits of {kind} are not supported; {known}")
    if strategy not in (None, *STRATEGIES):
        raise ValueError(
            f"config_groups.{name}: strategy {strategy!r} is not supported; supported are {', '.join(STRATEGIES)}"
        )
    return weights
