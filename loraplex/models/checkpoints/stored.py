"""A weight of a checkpoint in the bits of its file: its numbers row by row, and its integers where kernels read them.

    weight[n, k] = scale[n // row_block, g(k)] (q[n, k] - zero[n // row_block, g(k)])
    g(k) = k // group_size, or group_of[k]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from loraplex.errors import ModelWeightError
from loraplex.kernels.reference import Int8Weight, QuantizedSpecification

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)

KEPT_FORMAT = "kept.1"
"""Of prepared weights of quantised checkpoints; another name where other ones are kept in their integers."""

Tensors = Mapping[str, Tensor]
"""Of one module, by what stands behind its name: `weight`, `weight_scale`, ..."""


class StoredWeight(Protocol):
    """A weight [out, in] that is not plain floats."""

    @property
    def kept(self) -> str | None:
        """The quantization whose integers are its own; None: there is none."""
        ...

    def rows(self, first: int, last: int) -> Tensor:
        """Rows [first, last) in float32, in memory of their own."""
        ...

    def integers(self) -> QuantizedSpecification:
        """As `kept` says: its numbers exactly. An AssertionError where that is None."""
        ...


class Form(Protocol):
    """How one kind of checkpoint writes its weights. suffixes: of the tensors that a module's weight is made of;
    ignored: of tensors that say how activations or the KV cache would be rounded, which they are not here.
    """

    title: str
    suffixes: Sequence[str]
    ignored: Sequence[str]

    def weight(self, module: str, shape: tuple[int, int], tensors: Tensors) -> StoredWeight:
        """The weight [out, in] of a module of these tensors. ModelWeightError: they are not those of the form."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """The formula above. q(first, last) are rows of integers (or float8 numbers, or a table's entries); scale and zero
    [ceil(out / row_block), G], zero None for 0; group_of int64 [in] or None.
    """

    shape: tuple[int, int]
    q: Callable[[int, int], Tensor]
    scale: Tensor
    zero: Tensor | None = None
    row_block: int = 1
    group_size: int = 0
    group_of: Tensor | None = None
    is_integer: bool = True

    @property
    def kept(self) -> str | None:
        one_scale = self.scale.shape[1] == 1 and self.row_block in (1, self.shape[0])
        return "int8" if self.is_integer and one_scale and self.zero is None else None

    def rows(self, first: int, last: int) -> Tensor:
        wide = self.q(first, last).to(torch.float32)
        if self.zero is not None:
            wide -= self._spread(self.zero, first, last)
        return wide.mul_(self._spread(self.scale, first, last))

    def integers(self) -> QuantizedSpecification:
        assert self.kept == "int8", self.kept
        scale = self.scale[:, 0].float().expand(self.shape[0])
        return Int8Weight(self.q(0, self.shape[0]).to(torch.int8), scale.contiguous())

    def _spread(self, values: Tensor, first: int, last: int) -> Tensor:
        """Those of rows [first, last) in float32: [n, in], or [n, 1] where columns share one."""
        if self.row_block == 1:
            rows = values[first:last]
        else:
            rows = values[torch.arange(first, last, device=values.device) // self.row_block]
        rows = rows.float()
        if rows.shape[1] == 1:
            return rows
        if self.group_of is not None:
            return rows[:, self.group_of]
        return rows.repeat_interleave(self.group_size, dim=1)[:, : self.shape[1]]


def share_of(weight: QuantizedSpecification, cut: Callable[[Tensor], Tensor]) -> QuantizedSpecification:
    """A rank's share of a weight whose rows have one scale; cut: of a tensor [out, in]."""
    assert isinstance(weight, Int8Weight)
    scale = weight.scale[:, None].expand(weight.q.shape)
    return Int8Weight(cut(weight.q), cut(scale)[:, 0])


def stacked(weights: Sequence[QuantizedSpecification], device: torch.device) -> QuantizedSpecification:
    """Weights of one input under one another, on a device."""
    q, scale = ([getattr(weight, field) for weight in weights] for field in ("q", "scale"))
    return type(weights[0])(torch.cat(q).to(device), torch.cat(scale).to(device))


def tensor_of(
    module: str, suffix: str, tensors: Tensors, dtypes: Sequence[torch.dtype], shape: Sequence[int] | None = None
) -> Tensor:
    """One of a module's tensors; ModelWeightError with what it is and what it has to be."""
    tensor = tensors.get(suffix)
    if tensor is None:
        raise ModelWeightError(f"weight {module}.{suffix} is missing beside {module}.{_first(tensors)}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(_dtype_name(dtype) for dtype in dtypes)
        raise ModelWeightError(f"weight {module}.{suffix} is {_dtype_name(tensor.dtype)} and has to be {wanted}")
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise ModelWeightError(
            f"weight {module}.{suffix} has shape {tuple(tensor.shape)} and has to have {tuple(shape)}: the model's "
            "config.json asks for it"
        )
    return tensor


def refused(module: str, suffix: str, tensor: Tensor, wanted: str) -> ModelWeightError:
    return ModelWeightError(f"weight {module}.{suffix} has shape {tuple(tensor.shape)} and has to have {wanted}")


def group_index(module: str, suffix: str, tensors: Tensors, in_features: int, num_groups: int) -> Tensor | None:
    """The group of each column, int64 [in]; None where there is none (absent, or -1)."""
    if suffix not in tensors:
        return None
    index = tensor_of(module, suffix, tensors, (torch.int32, torch.int64), (in_features,)).long()
    lowest, highest = (int(value) for value in torch.aminmax(index))
    if lowest == -1:
        return None
    if lowest < 0 or highest >= num_groups:
        raise ModelWeightError(
            f"weight {module}.{suffix} names groups {lowest} to {highest}, and there are groups 0 to {num_groups - 1}"
        )
    return index


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The numbers of int32 words, lowest bits first: [..., n] -> uint8 [..., n, 32 / bits]"""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8)


def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def positive(settings: Mapping[str, Any], key: str, default: int) -> int:
    """A whole number of the settings, >= 1, or -1; ValueError for others."""
    value = settings.get(key, default)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise ValueError(f"{key} must be a whole number >= 1, or -1, got {value!r}")
    return value


def _first(tensors: Tensors) -> str:
    return next(iter(tensors), "weight")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
