"""What a check of a kernel is made of: an operator at one shape, and its name before its inputs are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu.exact import Tensors
from loraplex.kernels.ops import KernelBackend


@dataclass(frozen=True)
class Problem:
    """redraw None: not of a decode step. backend: whose kernels are to run; None: the place's."""

    group: str
    name: str
    dtype: torch.dtype
    run: Callable[[], Tensors]
    expected: Callable[[], Tensors]
    redraw: Callable[[], None] | None = None
    backend: KernelBackend | None = None


@dataclass(frozen=True)
class Planned:
    """A problem whose inputs are not drawn yet."""

    name: str
    build: Callable[[], Problem]
