"""What a layer has between its linears and its attention: RMS norm and SiLU (csrc/norm.cpp, csrc/activation.cpp)."""

from __future__ import annotations

import torch

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


def add_rms_norm(
    library: NativeLibrary, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, num_threads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), in the memory of x and of residual; float32 [T, size]."""
    rows, size = x.shape
    assert x.dtype == torch.float32 and residual.dtype == torch.float32 and weight.dtype == torch.float32  # noqa: PT018
    assert x.stride(1) == 1 and residual.stride(1) == 1 and residual.shape == x.shape  # noqa: PT018
    library.functions.loraplex_add_rms_norm(
        x.data_ptr(),
        x.stride(0),
        residual.data_ptr(),
        residual.stride(0),
        rows,
        size,
        weight.data_ptr(),
        eps,
        num_threads,
    )
    return x, residual


def silu_mul(library: NativeLibrary, gate_up: torch.Tensor, num_threads: int) -> torch.Tensor:
    """silu(gate) * up; gate_up [T, 2 I] float32, its rows dense; -> [T, I]."""
    rows, width = gate_up.shape
    assert gate_up.dtype == torch.float32 and gate_up.stride(1) == 1, (gate_up.dtype, gate_up.stride())  # noqa: PT018
    y = torch.empty(rows, width // 2)
    library.functions.loraplex_silu_mul(
        gate_up.data_ptr(), gate_up.stride(0), rows, width // 2, y.data_ptr(), num_threads
    )
    return y
