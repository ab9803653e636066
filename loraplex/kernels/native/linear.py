"""Linears on panels of 16 output columns (csrc/panels.h): packing once after the load, the product in every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.reference import Int8Weight

PANEL = 16
PACKED_FORMAT = "panels16.1"
"""Of csrc/panels.h; another name makes another file of a cache on disk."""
COLUMN_PLACES = {torch.bfloat16: torch.arange(PANEL).view(PANEL // 2, 2).t().flatten()}
"""Where column c of a panel lies, for dtypes that do not keep the columns in order."""

FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
"""Dtype of the stored weight -> csrc/api.h's Format."""


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """A weight [out, in] in panels. `scale` [out] float32 for int8, else None. Addresses are those of the tensors."""

    panels: torch.Tensor
    scale: torch.Tensor | None
    out_features: int
    in_features: int
    format: int
    address: int
    scale_address: int

    @classmethod
    def over(cls, panels: torch.Tensor, scale: torch.Tensor | None, out_features: int, in_features: int) -> PanelWeight:
        """Panels that were packed before, of the dtype of `panels`."""
        return cls(
            panels,
            scale,
            out_features,
            in_features,
            FORMATS[panels.dtype],
            panels.data_ptr(),
            0 if scale is None else scale.data_ptr(),
        )


def pack_linear(library: NativeLibrary, weight: torch.Tensor, dtype: torch.dtype, num_threads: int) -> PanelWeight:
    """Pack `weight` [out, in] as `dtype`: its own, or int8 (W8A16, one scale per output column)."""
    out_features, in_features = weight.shape
    is_int8 = dtype == torch.int8
    source = weight.to(torch.float32 if is_int8 else dtype).contiguous()
    depth = -(-in_features // 2) * 2 if is_int8 else in_features
    panels = torch.empty(-(-out_features // PANEL), depth, PANEL, dtype=dtype)
    scale = torch.empty(out_features) if is_int8 else None
    packed = PanelWeight.over(panels, scale, out_features, in_features)
    library.functions.loraplex_pack_linear(
        packed.format,
        source.data_ptr(),
        out_features,
        in_features,
        packed.address,
        packed.scale_address,
        num_threads,
    )
    return packed


def pack_integers(weight: Int8Weight) -> PanelWeight:
    """The panels of integers and scales as they are."""
    out_features, in_features = weight.q.shape
    num_panels, num_pairs = -(-out_features // PANEL), -(-in_features // 2)
    panels = torch.empty(num_panels, num_pairs, PANEL, 2, dtype=torch.int8)
    q = F.pad(weight.q, (0, 2 * num_pairs - in_features, 0, num_panels * PANEL - out_features))
    panels.copy_(q.view(num_panels, PANEL, num_pairs, 2).transpose(1, 2))
    scale = weight.scale.to(torch.float32).contiguous()
    return PanelWeight.over(panels.view(num_panels, 2 * num_pairs, PANEL), scale, out_features, in_features)


def panel_shape(out_features: int, in_features: int) -> tuple[int, int, int]:
    """Of the panels of a weight [out, in] of a float format."""
    return -(-out_features // PANEL), in_features, PANEL


def panel_rows(weight: PanelWeight, first: int, last: int) -> PanelWeight | None:
    """Rows [first, last) of a weight [out, in], over the same memory; None where they do not begin with a panel."""
    if first % PANEL:
        return None
    scale = None if weight.scale is None else weight.scale[first:last]
    panels = weight.panels[first // PANEL : -(-last // PANEL)]
    return PanelWeight.over(panels, scale, last - first, weight.in_features)


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
    """The rows token_ids int64 [T] of the weight [out, in] that was packed (a float format): [T, in] in its dtype."""
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
