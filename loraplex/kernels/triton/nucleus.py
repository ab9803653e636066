"""The shortest prefix of the order of tokens that has a mass, without a sort; other rows cost nothing.

    last = the largest value v with  sum of weights[x >= v] >= wanted        found bit by bit
    kept = the tokens above `last`, and of those with that value the first ones, as many as the mass needs

Weights are whole numbers whose sums stay below 2^53: sums are exact in any order, and so the prefix is that of
token_ranking.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loraplex.kernels.triton.launch import Launcher, next_power_of_2

TILE = 8192
"""Numbers that one program reads at once."""


@triton.jit
def _keys(x):
    """Integers in the order of the values; -0.0 and 0.0 are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _mass_from(x_ptr, weight_ptr, least_key, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum of the weights of keys >= `least_key`."""
    mass = tl.zeros([COLUMNS], tl.float64)
    for start in range(0, SIZE, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        is_inside = columns < SIZE
        x = tl.load(x_ptr + columns, mask=is_inside, other=0.0)
        weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0)
        mass += tl.where(_keys(x) >= least_key, weight, 0.0).to(tl.float64)
    return tl.sum(mass, axis=0)


@triton.jit
def keep_nucleus_kernel(x_ptr, weights_ptr, wanted_ptr, x_stride, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """One row: x and weights of SIZE numbers, wanted float64."""
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(wanted_ptr + row)
    x_ptr += row * x_stride
    weights_ptr += row * SIZE
    if wanted > 0:
        low = tl.full([], -(2**31), tl.int64)
        high = tl.full([], 2**31 - 1, tl.int64)
        for _ in range(32):
            middle = (low + high + 1) >> 1
            is_enough = _mass_from(x_ptr, weights_ptr, middle, SIZE, COLUMNS) >= wanted
            low = tl.where(is_enough, middle, low)
            high = tl.where(is_enough, high, middle - 1)
        above = _mass_from(x_ptr, weights_ptr, low + 1, SIZE, COLUMNS)
        each = tl.zeros([COLUMNS], tl.float32)
        for start in range(0, SIZE, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            is_inside = columns < SIZE
            x = tl.load(x_ptr + columns, mask=is_inside, other=0.0)
            weight = tl.load(weights_ptr + columns, mask=is_inside, other=0.0)
            each = tl.maximum(each, tl.where(_keys(x) == low, weight, 0.0))
        weight_of_last = tl.maximum(tl.max(each, axis=0).to(tl.float64), 1.0)
        num_last = tl.ceil((wanted - above) / weight_of_last)  # rounded: at most one off
        num_last -= (above + (num_last - 1.0) * weight_of_last >= wanted).to(tl.float64)
        num_last += (above + num_last * weight_of_last < wanted).to(tl.float64)
        num_before = tl.zeros([], tl.int32)
        for start in range(0, SIZE, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            is_inside = columns < SIZE
            keys = _keys(tl.load(x_ptr + columns, mask=is_inside, other=0.0))
            is_last = (is_inside & (keys == low)).to(tl.int32)
            places = num_before + tl.cumsum(is_last, axis=0)
            is_behind = (keys < low) | ((is_last > 0) & (places.to(tl.float64) > num_last))
            tl.store(weights_ptr + columns, tl.zeros([COLUMNS], tl.float32), mask=is_inside & is_behind)
            num_before += tl.sum(is_last, axis=0)


def keep_nucleus_gap(logits: torch.Tensor, weights: torch.Tensor) -> str | None:
    """Why the kernel does not cover the case; None: it does."""
    if logits.dtype != torch.float32 or weights.dtype != torch.float32:
        return f"logits are {logits.dtype} and weights {weights.dtype}"
    if logits.stride(-1) != 1 or not weights.is_contiguous():
        return "logits or weights are not dense"
    return None


def keep_nucleus(launcher: Launcher, logits: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """`weights` [m, V] with 0 behind the shortest prefix of the order of `logits` [m, V] whose mass is at least
    `wanted` float64 [m, 1].

    In place. Where `wanted` is 0 the row stays as it is.
    """
    size = logits.shape[1]
    columns = min(TILE, next_power_of_2(size))
    warps = 16 if columns > 4096 else 4
    launcher.launch(
        keep_nucleus_kernel,
        (len(logits),),
        logits,
        weights,
        wanted.contiguous(),
        logits.stride(0),
        num_warps=warps,
        SIZE=size,
        COLUMNS=columns,
    )
    return weights
