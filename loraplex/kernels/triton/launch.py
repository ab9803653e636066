"""How a kernel is launched, and what for: every launch of this package goes through a `Launcher`.

    TritonLauncher   runs it: on a GPU, or in Triton's interpreter on a CPU (TRITON_INTERPRET=1, for tests)

A step that is not a graph's has some 800 launches, and the host is what it waits for. Triton's own way to a kernel that
is compiled takes more than all else of a launch, so a launcher goes there once for each kernel and each way in which
Triton would specialise it, and afterwards calls what that gave.

Tests have one more, which compiles what would be launched for a GPU that is not there
(tests/kernels/triton/compiling.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from loraplex.errors import ConfigError

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of tensors that kernels here read."""

ALIGNMENT = 16
"""Triton compiles a kernel again for addresses and integers that are multiples of it."""

LEAST_INT32, LARGEST_INT32 = -(1 << 31), (1 << 31) - 1

LEAST_SHARED_BYTES = 101_376
"""Of one block on the GPUs with least of it (sm_86, sm_89, sm_120)."""


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """What block sizes depend on: compute capability, multiprocessors, and a block's most bytes of shared memory."""

    capability: tuple[int, int]
    num_sms: int
    max_shared_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> GpuTarget:
        """Of a CUDA device; for the interpreter on a CPU an H100's."""
        if device.type != "cuda":
            return H100
        properties = torch.cuda.get_device_properties(device)
        return cls(
            (properties.major, properties.minor),
            properties.multi_processor_count,
            getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED_BYTES),
        )


A100 = GpuTarget((8, 0), 108, 166_912)
L4 = GpuTarget((8, 9), 58, LEAST_SHARED_BYTES)
H100 = GpuTarget((9, 0), 132, 232_448)


class Launcher(Protocol):
    """`launch(kernel, grid, *args, num_warps=, num_stages=, **constants)`: arguments in order, constants by name."""

    @property
    def target(self) -> GpuTarget: ...

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 2, **constants: Any
    ) -> None:
        """An empty grid launches nothing."""
        ...


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A kernel that Triton has compiled. constants: of its signature, in their order, behind the arguments."""

    run: Callable[..., None]
    function: int
    metadata: Any
    constants: tuple[Any, ...]


class TritonLauncher:
    """Launches on the current stream of `device`. ConfigError where Triton cannot run: neither GPU nor interpreter."""

    def __init__(self, device: torch.device) -> None:
        self.is_interpreted = bool(triton.knobs.runtime.interpret)
        if device.type != "cuda" and not self.is_interpreted:
            raise ConfigError(
                f"Triton kernels run on a CUDA device, not on {device}; set TRITON_INTERPRET=1 to try them there"
            )
        self.target = GpuTarget.of(device)
        self._compiled: dict[Hashable, _Compiled] = {}

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 2, **constants: Any
    ) -> None:
        if not all(grid):
            return
        if self.is_interpreted:  # it computes bfloat16 wrong, silently
            tensors = [a.dtype for a in args if isinstance(a, torch.Tensor)]
            assert torch.bfloat16 not in tensors, "bfloat16 interpreted"
            assert tl.bfloat16 not in constants.values(), "blocks in bfloat16 interpreted"
            kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, **constants)
            return
        values, kinds = _specialised(args)
        key = (id(kernel), num_warps, num_stages, kinds, tuple(constants.items()))
        known = self._compiled.get(key)
        if known is None:
            compiled = kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, **constants)
            self._compiled[key] = _compiled(compiled, kernel.arg_names[len(args) :], constants)
            return
        width, height, depth = (*grid, 1, 1)[:3]
        driver = triton.runtime.driver.active
        stream = driver.get_current_stream(driver.get_current_device())
        known.run(
            width, height, depth, stream, known.function, known.metadata, None, None, None, *values, *known.constants
        )


def _specialised(args: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...]]:
    """(arguments as a compiled kernel takes them, tensors by their addresses; all that Triton compiles it for)"""
    values: list[Any] = []
    kinds: list[Any] = []
    for each in args:
        if type(each) is int:
            values.append(each)
            is_narrow = LEAST_INT32 <= each <= LARGEST_INT32
            kinds.append(-1 if each == 1 else (each % ALIGNMENT == 0) + 2 * is_narrow)
        elif isinstance(each, torch.Tensor):
            address = each.data_ptr()
            values.append(address)
            kinds += each.dtype, address % ALIGNMENT == 0
        else:
            values.append(each)
            kinds.append(type(each))
    return values, tuple(kinds)


def _compiled(found: Any, names: list[str], constants: dict[str, Any]) -> _Compiled:
    assert names == [name for name in names if name in constants], "constants come last in a kernel's signature"
    return _Compiled(found.run, found.function, found.packed_metadata, tuple(constants[name] for name in names))


def cdiv(number: int, divisor: int) -> int:
    """Rounded up. Triton's own is a function of kernels too, which takes microseconds on the host."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
