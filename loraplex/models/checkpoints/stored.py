"""A weight of a checkpoint in the bits of its file: its numbers row by row, and its integers where kernels read them.

weight[n, k] = scale[n // row_block, g(k)] (q[n, k] - zero[n // row_block, g(k)])
g(k) = k // group_size, or group_of[k]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from loraplex.errors import ModelWeightError
from loraplex.kernels.protocols import LayerOps
from loraplex.kernels.quantized_weights import (
    GROUP_SIZES,
    Fp8Weight,
    GroupWeight,
    Int4Weight,
    Int8GroupWeight,
    Int8Weight,
    QuantizedSpecification,
)
from loraplex.layers.common import WeightPart

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
KEPT_FORMAT = "kept.2"
"""Of prepared weights of quantised checkpoints; another name where other ones are kept in their integers."""

Tensors = Mapping[str, Tensor]
"""Of one module, by what stands behind its name: `weight`, `weight_scale`, ..."""


class StoredWeight(Protocol):
    """A weight [out, in] that is not plain floats."""

    @property
    def kept(self) -> KeptForm | None:
        """The form of its integers, if kernels of some backend may read them."""
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

    title, reads, keeps: for the docs: its name, its kinds, and which of them kernels can have in their own integers.
    """

    title: ClassVar[str]
    reads: ClassVar[str]
    keeps: ClassVar[str]
    suffixes: ClassVar[Sequence[str]]
    ignored: ClassVar[Sequence[str]]

    def weight(self, module: str, shape: tuple[int, int], tensors: Tensors) -> StoredWeight:
        """The weight [out, in] of a module of these tensors. ModelWeightError: they are not those of the form."""
        ...


@dataclass(frozen=True, slots=True)
class KeptForm:
    """Integers of a weight that kernels may read. group_size: inputs of one scale, 0 for all of a row. is_widened: they
    have more bits than the numbers in the file, which they stand for exactly."""

    quantization: str
    group_size: int = 0
    has_zeros: bool = False
    is_widened: bool = False

    def __str__(self) -> str:
        groups = f" in groups of {self.group_size}" if self.group_size else ""
        return f"{self.quantization}{groups}{' with zero points' if self.has_zeros else ''}"

    @property
    def as_kept(self) -> str:
        """In words, beside the checkpoint's."""
        return f"{self} (the same numbers)" if self.is_widened else f"its own {self}"

    def widened_nbytes(self, num_rows: int, in_features: int) -> int:
        """Of a weight of wider integers than the file's, with scales in float16; 0: they are the file's."""
        return num_rows * (in_features + 2 * ceil_div(in_features, self.group_size)) if self.is_widened else 0

    def is_wanted(self, asked: str | None, dtype: torch.dtype) -> bool:
        """Whether `--quantization` names it (`int4-a16` is int4, with activations in 16 bits), or names nothing and no
        product of a model of this dtype loses by it: float32 is exact, and fp8 rounds activations to 8 bits.
        """
        if asked is None:
            return dtype != torch.float32 and self.quantization != "fp8"
        return asked.removesuffix(A16) == self.quantization

    def is_read_by(self, ops: LayerOps, activation_bits: int) -> bool:
        """Whether the kernels keep them, asked with a weight of ones."""
        size = self.group_size or 1
        if self.quantization == "fp8":
            return self.quantization in ops.quantizations
        if not self.group_size:
            probe: QuantizedSpecification = Int8Weight(torch.ones(1, size, dtype=torch.int8), torch.ones(1))
        else:
            kind, one = _GROUPS[self.quantization], torch.ones(1, 1)
            zero = one.to(torch.int16) if self.has_zeros else None
            probe = kind.kept(torch.ones(1, size, dtype=kind.Q_DTYPE), one, zero, size)
        return ops.keep_linear(with_activations(probe, activation_bits)) is not None

    def has_share(self, share: Share) -> bool:
        """Whether a rank's share is of whole groups."""
        first, last = share.columns.start, share.columns.stop
        size = self.group_size or 1
        return first % size == 0 and (last % size == 0 or bool(last == share.in_features))


A16 = "-a16"


def activation_bits_of(asked: str | None, ops: LayerOps) -> int:
    """Of 4-bit weights: those of `--quantization int4` where the kernels have it with fewer than 16, else 16."""
    return 8 if asked == "int4" and f"int4{A16}" in ops.quantizations else 16


def with_activations(weight: QuantizedSpecification, bits: int) -> QuantizedSpecification:
    """A weight in groups of 4 bits whose products round activations to so many bits; others as they are."""
    return replace(weight, activation_bits=bits) if isinstance(weight, Int4Weight) else weight


_GROUPS: Mapping[str, type[Int4Weight] | type[Int8GroupWeight]] = {"int4": Int4Weight, "int8": Int8GroupWeight}


@dataclass(frozen=True, slots=True)
class Share:
    """The stretches of rows and the columns of a weight [out, in] that one rank has."""

    rows: tuple[slice, ...]
    columns: slice
    in_features: int

    @classmethod
    def of(cls, part: WeightPart) -> Share:
        depth = part.shape[1]
        own = part.cut(torch.empty(part.shape, device="meta"))
        row, column = divmod(int(own.storage_offset()), depth)
        return cls(part.rows or (slice(row, row + len(own)),), slice(column, column + own.shape[1]), depth)

    def cut(self, weight: QuantizedSpecification) -> Iterator[QuantizedSpecification]:
        """This share of a whole weight, as views: each stretch."""
        for rows in self.rows:
            if isinstance(weight, GroupWeight):
                yield weight.cut_rows(rows.start, rows.stop).cut_inputs(self.columns.start, self.columns.stop)
            else:
                yield type(weight)(weight.q[rows, self.columns], weight.scale[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """The formula above. q(first, last): rows of integers, or of float8 numbers. scale and zero:
    [ceil(out / row_block), G], zero None for 0. group_of: int64 [in], or None.

    bits: of integers in -2^(bits - 1) .. 2^(bits - 1) - 1; 0 for others, which may be float8 e4m3.
    """

    shape: tuple[int, int]
    q: Callable[[int, int], Tensor]
    scale: Tensor
    bits: int
    zero: Tensor | None = None
    row_block: int = 1
    group_size: int = 0
    group_of: Tensor | None = None
    is_e4m3: bool = False

    @property
    def kept(self) -> KeptForm | None:
        """Larger groups are several with one scale: their numbers are the same."""
        has_one = self.scale.shape[1] == 1
        if self.group_of is not None or self.row_block not in (1, self.shape[0]):
            return None
        if not self.bits:
            return KeptForm("fp8") if self.is_e4m3 and has_one and self.zero is None else None
        if self.bits == 8 and has_one and self.zero is None:
            return KeptForm("int8")
        size = self.group_size
        if size not in GROUP_SIZES:
            if not has_one and size % GROUP_SIZES[-1]:
                return None
            size = GROUP_SIZES[-1]
        kind = KeptForm("int4" if self.bits == 4 else "int8", size, self.zero is not None)
        least, largest = _GROUPS[kind.quantization].ZERO_LIMITS
        if self.zero is not None:
            lowest, highest = (int(each) + self._centre for each in torch.aminmax(self.zero))
            return kind if least <= lowest and highest <= largest else None
        return kind

    def rows(self, first: int, last: int) -> Tensor:
        wide = self.q(first, last).to(torch.float32)
        if self.zero is not None:
            wide -= self._spread(self.zero, first, last)
        return wide.mul_(self._spread(self.scale, first, last))

    def integers(self) -> QuantizedSpecification:
        form, (out, depth) = self.kept, self.shape
        assert form is not None
        if not form.group_size:
            scale = self.scale[:, 0].float().expand(out).contiguous()
            if self.is_e4m3:
                return Fp8Weight(self.q(0, out), scale)
            return Int8Weight(self.q(0, out).to(torch.int8), scale)
        kind, num_groups = _GROUPS[form.quantization], ceil_div(depth, form.group_size)
        q = (self.q(0, out).to(torch.int8) + self._centre).to(kind.Q_DTYPE)
        zero = None if self.zero is None else self._by_groups(self.zero.to(torch.int16) + self._centre, num_groups)
        return kind.kept(q, self._by_groups(self.scale, num_groups), zero, form.group_size)

    @property
    def _centre(self) -> int:
        """What the integers of `_GROUPS` are more."""
        return 8 if self.bits == 4 else 0

    def _by_groups(self, values: Tensor, num_groups: int) -> Tensor:
        """[rows or 1, G] -> [out, num_groups]"""
        times = ceil_div(num_groups, values.shape[1]) if values.shape[1] == 1 else self.group_size // GROUP_SIZES[-1]
        each = values.repeat_interleave(max(1, times), dim=1)[:, :num_groups]
        return each.expand(self.shape[0], num_groups).contiguous()

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


def stacked(weights: Sequence[QuantizedSpecification], device: torch.device) -> QuantizedSpecification:
    """Weights of one input and one form under one another, on a device."""
    first = weights[0]

    def all_of(field: str) -> Tensor:
        return torch.cat([getattr(weight, field) for weight in weights]).to(device)

    if not isinstance(first, GroupWeight):
        return type(first)(all_of("q"), all_of("scale"))
    zero = None if first.zero is None else all_of("zero")
    return replace(first, q=all_of("q"), scale=all_of("scale"), zero=zero)


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
    """The numbers of int32 words, lowest bits first, of 4 or 8 bits: [..., n] -> uint8 [..., n 32 / bits]"""
    each = words.contiguous().view(torch.uint8)
    return each if bits == 8 else torch.stack((each & 15, each >> 4), dim=-1).flatten(-2)


def signed(q: Tensor, bits: int) -> Tensor:
    """q - 2^(bits - 1) as int8, of uint8."""
    return (q ^ 128).view(torch.int8) if bits == 8 else q.view(torch.int8) - 8


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
