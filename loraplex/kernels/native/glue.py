"""What a layer has between its linears and its attention: norms, activations (csrc/norm.cpp, csrc/activation.cpp)."""

from __future__ import annotations

import torch

from loraplex.kernels.native.board import RankBoard
from loraplex.kernels.native.library import NativeLibrary


def rms_norm(
    library: NativeLibrary, x: torch.Tensor, weight: torch.Tensor, eps: float, num_threads: int
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; float32, any leading dimensions; -> dense."""
    assert x.dtype == torch.float32 and weight.dtype == torch.float32, (x.dtype, weight.dtype)  # noqa: PT018
    shape, strides = x.shape, x.stride()
    if len(shape) == 2 and strides[1] == 1:
        rows, inner, outer_stride, inner_stride = shape[0], 1, strides[0], 0
    elif len(shape) == 3 and strides[2] == 1:
        rows, inner, outer_stride, inner_stride = shape[0] * shape[1], shape[1], strides[0], strides[1]
    else:
        return rms_norm(library, x.reshape(-1, shape[-1]).contiguous(), weight, eps, num_threads).view(shape)
    y = torch.empty(shape)
    library.functions.loraplex_rms_norm(
        x.data_ptr(),
        outer_stride,
        inner,
        inner_stride,
        rows,
        shape[-1],
        weight.data_ptr(),
        eps,
        y.data_ptr(),
        num_threads,
    )
    return y


def rms_norm_ranks(
    library: NativeLibrary, x: torch.Tensor, weight: torch.Tensor, eps: float, board: RankBoard, num_threads: int
) -> torch.Tensor:
    """x / sqrt(m + eps) * weight, m the mean of all ranks' x^2 of a row; float32 [T, size] -> dense."""
    assert x.dtype == weight.dtype == torch.float32 and x.stride(1) == 1  # noqa: PT018
    y, sums = torch.empty(x.shape), torch.empty(len(x))
    library.functions.loraplex_rms_norm_ranks(
        *(board.address, x.data_ptr(), x.stride(0), *x.shape, weight.data_ptr(), eps),
        *(sums.data_ptr(), y.data_ptr(), num_threads),
    )
    board.check()
    return y


def add_rms_norm(
    library: NativeLibrary,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: float,
    num_threads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(total), total), total := scale x + residual, in the memory of x and of residual; float32 [T, size]."""
    rows, size = x.shape
    _check_sum(x, residual)
    assert weight.dtype == torch.float32
    library.functions.loraplex_add_rms_norm(
        x.data_ptr(),
        x.stride(0),
        residual.data_ptr(),
        residual.stride(0),
        rows,
        size,
        weight.data_ptr(),
        eps,
        scale,
        num_threads,
    )
    return x, residual


def _check_sum(x: torch.Tensor, residual: torch.Tensor) -> None:
    assert x.dtype == torch.float32 and residual.dtype == torch.float32, (x.dtype, residual.dtype)  # noqa: PT018
    assert x.stride(1) == 1 and residual.stride(1) == 1 and residual.shape == x.shape  # noqa: PT018


def add_scaled(
    library: NativeLibrary, x: torch.Tensor, residual: torch.Tensor, scale: float, num_threads: int
) -> torch.Tensor:
    """scale x + residual, in the memory of residual; float32 [T, size]."""
    _check_sum(x, residual)
    library.functions.loraplex_add_scaled(
        x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), *x.shape, scale, num_threads
    )
    return residual


def layer_norm(
    library: NativeLibrary,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    num_threads: int,
) -> torch.Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension; float32 [T, size]."""
    assert x.dtype == weight.dtype == torch.float32 and x.stride(1) == 1  # noqa: PT018
    y = torch.empty(x.shape)
    library.functions.loraplex_layer_norm(
        x.data_ptr(),
        x.stride(0),
        *x.shape,
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        eps,
        y.data_ptr(),
        num_threads,
    )
    return y


def silu_mul(library: NativeLibrary, gate_up: torch.Tensor, num_threads: int) -> torch.Tensor:
    """silu(gate) * up; gate_up [T, 2 I] float32, its rows dense; -> [T, I]."""
    rows, width = gate_up.shape
    assert gate_up.dtype == torch.float32 and gate_up.stride(1) == 1, (gate_up.dtype, gate_up.stride())  # noqa: PT018
    y = torch.empty(rows, width // 2)
    library.functions.loraplex_silu_mul(
        gate_up.data_ptr(), gate_up.stride(0), rows, width // 2, y.data_ptr(), num_threads
    )
    return y


def gelu(library: NativeLibrary, x: torch.Tensor, is_tanh: bool, has_up: bool, num_threads: int) -> torch.Tensor:
    """gelu(x), or gelu(gate) * up of x = gate, up [T, 2 I] side by side; float32, its rows dense."""
    rows, width = x.shape
    assert x.dtype == torch.float32 and x.stride(1) == 1, (x.dtype, x.stride())  # noqa: PT018
    y = torch.empty(rows, width // 2 if has_up else width)
    library.functions.loraplex_gelu(
        x.data_ptr(), x.stride(0), rows, y.shape[1], is_tanh, has_up, y.data_ptr(), num_threads
    )
    return y
