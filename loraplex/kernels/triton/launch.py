"""How a kernel is launched, and what for: every launch of this package goes through a `Launcher`.

    TritonLauncher   runs it: on a GPU, or in Triton's interpreter on a CPU (TRITON_INTERPRET=1, for tests)

Tests have one more, which compiles what would be launched for a GPU that is not there
(tests/kernels/triton/compiling.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from loraplex.errors import ConfigError

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of tensors that kernels here read."""

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


class TritonLauncher:
    """Launches on the current stream of `device`. ConfigError where Triton cannot run: neither GPU nor interpreter."""

    def __init__(self, device: torch.device) -> None:
        self.is_interpreted = bool(triton.knobs.runtime.interpret)
        if device.type != "cuda" and not self.is_interpreted:
            raise ConfigError(
                f"Triton kernels run on a CUDA device, not on {device}; set TRITON_INTERPRET=1 to try them there"
            )
        self.target = GpuTarget.of(device)

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 2, **constants: Any
    ) -> None:
        if self.is_interpreted:  # it computes bfloat16 wrong, silently
            tensors = [a.dtype for a in args if isinstance(a, torch.Tensor)]
            assert torch.bfloat16 not in tensors, "bfloat16 interpreted"
            assert tl.bfloat16 not in constants.values(), "blocks in bfloat16 interpreted"
        if all(grid):
            kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, **constants)
