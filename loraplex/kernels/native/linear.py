"""Linears on panels of 16 output columns (csrc/panels.h): packing once after the load, the product in every step."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.quantized_weights import GROUP_SIZES, GroupWeight, Int4Weight, Int8GroupWeight, Int8Weight

PANEL = 16
WIDENED_AT_ONCE = 1 << 20
"""Numbers of a weight that are float32 at one moment while it is packed."""
PACKED_FORMAT = "panels16.1"
"""Of csrc/panels.h; another name makes another file of a cache on disk."""
COLUMN_PLACES = {torch.bfloat16: torch.arange(PANEL).view(PANEL // 2, 2).t().flatten()}
"""Where column c of a panel lies, for dtypes that do not keep the columns in order."""

FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
"""Dtype of the stored weight -> csrc/api.h's Format."""

GROUP_FORMATS = {torch.int16: 4, torch.int8: 5, torch.uint8: 6}
"""The same where scales are [panels, groups, 16]: 4 bits with activations in 16, 8 bits, 4 bits with activations in 8.
Panels are words of 32 bits; their dtype says no more than this."""

GROUP_DTYPES = {(4, 16): torch.int16, (8, 16): torch.int8, (4, 8): torch.uint8}
"""(bits of the weight, of the activations) -> dtype of the panels."""

WORD_BYTES = 4
"""A step of a panel in groups is a word of each column."""

INT4_GROUP_SIZE = 64
"""Of weights that are quantised here (docs/quantization.md has what others err)."""

INT4_ACTIVATIONS = {"int4": 8, "int4-a16": 16}
"""Quantization -> bits of the activations (docs/quantization.md has what 8 of them err)."""

F16_SCALE_LIMITS = 2.0**-14, 65504.0
"""A weight whose largest scale is outside of them has scales in float32."""


class GroupScales(ctypes.Structure):
    """As in csrc/api.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scale", "zero")),
        *((name, ctypes.c_int64) for name in ("size", "count")),
        ("format", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """A weight [out, in] in panels. Addresses are those of the tensors, or of `groups`.

    scale: of int8 float32 [out]; of a weight in groups float32 or float16 [panels, groups, 16]; else None. zero: int8
    [panels, groups, 16], or None.
    """

    panels: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    groups: GroupScales | None
    out_features: int
    in_features: int
    format: int
    address: int
    scale_address: int

    @classmethod
    def over(
        cls,
        panels: torch.Tensor,
        scale: torch.Tensor | None,
        out_features: int,
        in_features: int,
        zero: torch.Tensor | None = None,
    ) -> PanelWeight:
        """Panels that were packed before, of the dtype of `panels`."""
        groups, scale_address = None, 0 if scale is None else scale.data_ptr()
        is_grouped = scale is not None and scale.dim() == 3
        if scale is not None and is_grouped:
            zero_address = None if zero is None else zero.data_ptr()
            count = scale.shape[1]
            groups = GroupScales(
                scale_address, zero_address, group_size_of(in_features, count), count, FORMATS[scale.dtype]
            )
            scale_address = ctypes.addressof(groups)
        number = (GROUP_FORMATS if is_grouped else FORMATS)[panels.dtype]
        return cls(panels, scale, zero, groups, out_features, in_features, number, panels.data_ptr(), scale_address)


def group_size_of(in_features: int, num_groups: int) -> int:
    """The size of groups by their number; where there is one group, any size is right."""
    return next(size for size in GROUP_SIZES if -(-in_features // size) == num_groups)


def pack_linear(library: NativeLibrary, weight: torch.Tensor, dtype: torch.dtype, num_threads: int) -> PanelWeight:
    """Pack `weight` [out, in] as `dtype`: its own, or int8 (W8A16, one scale per output column)."""
    out_features, in_features = weight.shape
    is_int8 = dtype == torch.int8
    depth = -(-in_features // 2) * 2 if is_int8 else in_features
    panels = torch.empty(-(-out_features // PANEL), depth, PANEL, dtype=dtype)
    scale = torch.empty(out_features) if is_int8 else None
    packed = PanelWeight.over(panels, scale, out_features, in_features)
    step = out_features
    if is_int8:
        step = max(1, WIDENED_AT_ONCE // (PANEL * in_features)) * PANEL
        wide = torch.empty(min(step, out_features), in_features)
    for first in range(0, out_features, step):
        rows = weight[first : first + step]
        source = wide[: len(rows)].copy_(rows) if is_int8 else rows.to(dtype).contiguous()
        library.functions.loraplex_pack_linear(
            packed.format,
            source.data_ptr(),
            len(source),
            in_features,
            panels[first // PANEL :].data_ptr(),
            0 if scale is None else scale[first:].data_ptr(),
            num_threads,
        )
    return packed


def keep_linear(library: NativeLibrary, weight: Int8Weight | GroupWeight, num_threads: int) -> PanelWeight | None:
    """Pack the integers and scales as they are; None: groups, or activations, of a size that kernels do not read."""
    out_features, in_features = weight.q.shape
    if isinstance(weight, Int8Weight):
        num_pairs = -(-in_features // 2)
        padded = F.pad(weight.q, (0, 2 * num_pairs - in_features, 0, -out_features % PANEL))
        panels = padded.view(-1, PANEL, num_pairs, 2).transpose(1, 2).contiguous()
        return PanelWeight.over(
            panels.view(len(panels), -1, PANEL), weight.scale.float().contiguous(), out_features, in_features
        )
    num_bits = 4 if isinstance(weight, Int4Weight) else 8
    dtype = GROUP_DTYPES.get((num_bits, weight.activation_bits))
    if dtype is None or weight.group_size not in GROUP_SIZES:
        return None
    num_steps = -(-in_features // (8 * WORD_BYTES // num_bits))
    panels = torch.empty(-(-out_features // PANEL), num_steps, PANEL * WORD_BYTES // dtype.itemsize, dtype=dtype)
    zero = None if weight.zero is None else _by_panels(weight.zero.to(torch.int8))
    packed = PanelWeight.over(panels, _by_panels(kept_scale(weight.scale)), out_features, in_features, zero)
    q = weight.q.contiguous()
    library.functions.loraplex_pack_groups(
        packed.format, q.data_ptr(), out_features, in_features, packed.address, num_threads
    )
    return packed


def kept_scale(scale: torch.Tensor) -> torch.Tensor:
    """In float16 where that changes none, else in float32."""
    half = scale.to(torch.float16)
    return half if torch.equal(half.float(), scale.float()) else scale.float()


def _by_panels(of_groups: torch.Tensor) -> torch.Tensor:
    """[out, groups] -> [panels, groups, 16], zeros behind the last column."""
    padded = F.pad(of_groups, (0, 0, 0, -len(of_groups) % PANEL))
    return padded.view(-1, PANEL, of_groups.shape[1]).transpose(1, 2).contiguous()


def round_int4(
    library: NativeLibrary, weight: torch.Tensor, group_size: int, activation_bits: int, num_threads: int
) -> Int4Weight:
    """`weight` [out, in] in 4 bits, each group with the scale of least squared error among seven (csrc/pack.cpp)."""
    out_features, in_features = weight.shape
    source = weight.to(torch.float32).contiguous()
    q = torch.empty(out_features, in_features, dtype=torch.uint8)
    scale = torch.empty(out_features, -(-in_features // group_size))
    least, largest = F16_SCALE_LIMITS
    is_f16 = least <= float(source.abs().max()) / 8 <= largest / 2
    library.functions.loraplex_round_int4(
        source.data_ptr(),
        out_features,
        in_features,
        group_size,
        FORMATS[torch.float16 if is_f16 else torch.float32],
        q.data_ptr(),
        scale.data_ptr(),
        num_threads,
    )
    return Int4Weight(q, scale, None, group_size, activation_bits)


def group_rows(weight: PanelWeight, row_ids: torch.Tensor) -> torch.Tensor:
    """The rows row_ids int64 [T] of a weight in groups: float32 [T, in], the numbers that its integers stand for."""
    assert weight.groups is not None
    assert weight.scale is not None
    panel, column = row_ids // PANEL, row_ids % PANEL
    words = weight.panels.view(torch.int32).view(*weight.panels.shape[:2], PANEL)[panel, :, column]
    num_bits = 8 if weight.panels.dtype == torch.int8 else 4
    places = torch.arange(32 // num_bits, dtype=torch.int32)
    shifts = places // 2 * num_bits + places % 2 * 16
    q = (words[:, :, None] >> shifts & (1 << num_bits) - 1).flatten(1)[:, : weight.in_features]
    kind = Int4Weight if num_bits == 4 else Int8GroupWeight
    scale = weight.scale[panel, :, column]
    zero = None if weight.zero is None else weight.zero[panel, :, column]
    return kind(q.to(kind.Q_DTYPE), scale, zero, weight.groups.size).rows(0, len(row_ids))


def panel_shape(out_features: int, in_features: int) -> tuple[int, int, int]:
    """Of the panels of a weight [out, in] of a float format."""
    return -(-out_features // PANEL), in_features, PANEL


def panel_rows(weight: PanelWeight, first: int, last: int) -> PanelWeight | None:
    """Rows [first, last) of a weight [out, in], over the same memory; None where they do not begin with a panel."""
    if first % PANEL:
        return None
    panels = slice(first // PANEL, -(-last // PANEL))
    scale = None if weight.scale is None else weight.scale[slice(first, last) if weight.groups is None else panels]
    zero = None if weight.zero is None else weight.zero[panels]
    return PanelWeight.over(weight.panels[panels], scale, last - first, weight.in_features, zero)


def pack_panels(library: NativeLibrary, weight: torch.Tensor, panels: torch.Tensor) -> None:
    """Pack `weight` [out, in] into panels of its dtype, on the calling thread."""
    assert weight.dtype == panels.dtype, (weight.dtype, panels.dtype)
    assert panels.shape == panel_shape(*weight.shape), (panels.shape, weight.shape)
    assert panels.is_contiguous()
    source = weight.contiguous()
    library.functions.loraplex_pack_linear(
        FORMATS[panels.dtype], source.data_ptr(), *source.shape, panels.data_ptr(), 0, 1
    )


def linear(
    library: NativeLibrary, x: torch.Tensor, weight: PanelWeight, bias: torch.Tensor | None, num_threads: int
) -> torch.Tensor:
    """x W^T + bias; x [T, in] float32, its rows dense; -> [T, out] float32."""
    assert x.dtype == torch.float32, x.dtype
    assert x.shape[1] == weight.in_features, (x.shape, weight.in_features)
    assert x.stride(1) == 1 or x.shape[1] == 1
    y = torch.empty(x.shape[0], weight.out_features)
    library.functions.loraplex_linear(
        weight.format,
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        weight.in_features,
        weight.address,
        weight.scale_address,
        weight.out_features,
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        num_threads,
    )
    return y


def embedding(token_ids: torch.Tensor, weight: PanelWeight) -> torch.Tensor:
    """The rows token_ids int64 [T] of the weight [out, in] that was packed: [T, in] in its dtype.

    Of a weight in groups they are float32. Not of int8, whose rows are not those that were packed.
    """
    if weight.groups is not None:
        return group_rows(weight, token_ids)
    assert weight.scale is None
    column = token_ids % PANEL
    if weight.panels.dtype in COLUMN_PLACES:
        column = COLUMN_PLACES[weight.panels.dtype][column]
    return weight.panels[token_ids // PANEL, :, column]


def row_norms(
    library: NativeLibrary,
    weight: PanelWeight,
    first: int,
    last: int,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """As LayerOps.row_norms, on the calling thread alone: the threads of steps are left to them."""
    assert 0 <= first <= last <= weight.out_features, (first, last, weight.out_features)
    a, b = lora_a.contiguous(), lora_b.contiguous()
    assert a.dtype == b.dtype == torch.float32, (a.dtype, b.dtype)
    assert (a.shape[1], b.shape) == (weight.in_features, (last - first, len(a))), (a.shape, b.shape)
    norms = torch.empty(last - first)
    library.functions.loraplex_row_norms(
        weight.format,
        weight.address,
        weight.scale_address,
        weight.out_features,
        weight.in_features,
        first,
        last,
        a.data_ptr(),
        b.data_ptr(),
        len(a),
        scaling,
        norms.data_ptr(),
    )
    return norms
