"""bitsandbytes checkpoints, which QLoRA adapters are trained on: NF4 and FP4 in blocks, and LLM.int8().

4 bits   weight uint8 [out in / 2, 1], the earlier number in the high half; weight.quant_map float32 [16];
         weight.absmax, one for each block of the flat weight; quantised twice it is uint8, and
         absmax = nested_quant_map[absmax] nested_absmax[block // nested_blocksize] + nested_offset
         weight = quant_map[q] absmax, rounded to the dtype that the state names, as the library does
int8     weight int8 [out, in], SCB float32 [out]:  weight = q SCB / 127
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from loraplex.errors import ModelWeightError
from loraplex.kernels.quantized_weights import QuantizedSpecification
from loraplex.models.checkpoints.stored import Affine, StoredWeight, Tensors, ceil_div, refused, tensor_of

STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
MAX_STATE_BYTES = 4096
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Bitsandbytes:
    title: ClassVar[str] = "bitsandbytes"
    reads: ClassVar[str] = "NF4 and FP4, quantised twice too; LLM.int8()"
    keeps: ClassVar[str] = "LLM.int8()"
    suffixes: ClassVar[Sequence[str]] = (
        "weight", "SCB", "weight_format", "weight.absmax", "weight.quant_map", "weight.nested_absmax",
        "weight.nested_quant_map", *STATES,
    )  # fmt: skip
    ignored: ClassVar[Sequence[str]] = ()

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Bitsandbytes:
        storage = settings.get("bnb_4bit_quant_storage", "uint8")
        if storage not in (None, "uint8"):
            raise ValueError(f"bnb_4bit_quant_storage {storage!r} is not supported; only uint8")
        return cls()

    def weight(self, module: str, shape: tuple[int, int], tensors: Tensors) -> StoredWeight:
        if "SCB" in tensors:
            q = tensor_of(module, "weight", tensors, (torch.int8,), shape)
            scale = tensor_of(module, "SCB", tensors, (torch.float32,), (shape[0],))[:, None] / 127
            return Affine(shape=shape, q=lambda first, last: q[first:last], scale=scale, bits=8)
        return _four_bits(module, shape, tensors)


@dataclass(frozen=True, slots=True)
class FourBits:
    """Numbers of a table, in blocks of the flat weight. absmax float32 [blocks]; dtype: what they are rounded to."""

    shape: tuple[int, int]
    packed: Tensor
    table: Tensor
    absmax: Tensor
    block_size: int
    dtype: torch.dtype

    kept: ClassVar[None] = None

    def rows(self, first: int, last: int) -> Tensor:
        depth = self.shape[1]
        start, end = first * depth, last * depth
        bytes_of = self.packed[start // 2 : ceil_div(end, 2)]
        q = torch.stack((bytes_of >> 4, bytes_of & 15), dim=1).flatten()[start % 2 :][: end - start]
        blocks = torch.arange(start, end) // self.block_size
        values = self.table[q.long()].mul_(self.absmax[blocks]).to(self.dtype)
        return values.float().view(last - first, depth)

    def integers(self) -> QuantizedSpecification:
        raise AssertionError("a table's numbers are no integers")


def _four_bits(module: str, shape: tuple[int, int], tensors: Tensors) -> FourBits:
    size = shape[0] * shape[1]
    state = _state(module, tensors)
    block_size = _size(module, state, "blocksize")
    if tuple(state.get("shape") or ()) != shape:
        raise ModelWeightError(
            f"weight {module}.weight has shape {state.get('shape')} in its state, the model's config.json asks for "
            f"{shape}"
        )
    dtype = DTYPES.get(str(state.get("dtype")))
    if dtype is None:
        raise ModelWeightError(f"weight {module}.weight: its state has dtype {state.get('dtype')!r}, not a float type")
    packed = tensor_of(module, "weight", tensors, (torch.uint8,))
    if packed.numel() != ceil_div(size, 2):
        raise refused(module, "weight", packed, f"({ceil_div(size, 2)}, 1)")
    table = tensor_of(module, "weight.quant_map", tensors, (torch.float32,), (16,))
    absmax = _absmax(module, tensors, state, ceil_div(size, block_size))
    return FourBits(shape, packed.reshape(-1), table, absmax, block_size, dtype)


def _absmax(module: str, tensors: Tensors, state: Mapping[str, Any], num_blocks: int) -> Tensor:
    if "weight.nested_absmax" not in tensors:
        return tensor_of(module, "weight.absmax", tensors, (torch.float32,), (num_blocks,))
    q = tensor_of(module, "weight.absmax", tensors, (torch.uint8,), (num_blocks,))
    nested_size = _size(module, state, "nested_blocksize")
    outer = tensor_of(module, "weight.nested_absmax", tensors, (torch.float32,), (ceil_div(num_blocks, nested_size),))
    table = tensor_of(module, "weight.nested_quant_map", tensors, (torch.float32,), (256,))
    offset = state.get("nested_offset")
    if not isinstance(offset, float | int):
        raise ModelWeightError(f"weight {module}.weight: its state has nested_offset {offset!r}, not a number")
    return table[q.long()] * outer[torch.arange(num_blocks) // nested_size] + offset


def _state(module: str, tensors: Tensors) -> Mapping[str, Any]:
    suffix = next((each for each in STATES if each in tensors), STATES[0])
    raw = tensor_of(module, suffix, tensors, (torch.uint8,))
    if raw.numel() > MAX_STATE_BYTES:
        raise ModelWeightError(f"weight {module}.{suffix} has {raw.numel()} bytes; at most {MAX_STATE_BYTES} are read")
    try:
        state = json.loads(bytes(raw.flatten().tolist()))
    except ValueError as e:
        raise ModelWeightError(f"weight {module}.{suffix} is not JSON ({e})") from e
    if not isinstance(state, dict):
        raise ModelWeightError(f"weight {module}.{suffix} holds {type(state).__name__}, not a JSON object")
    return state


def _size(module: str, state: Mapping[str, Any], key: str) -> int:
    value = state.get(key)
    if type(value) is not int or value < 1:
        raise ModelWeightError(f"weight {module}.weight: its state has {key} {value!r}, not a whole number >= 1")
    return value
