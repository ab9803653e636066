"""The GPU backend: Triton kernels, and stock torch (cuBLAS) for the products of the base model.

What a kernel does not cover goes to stock torch on the same device: logged once for each reason, and counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from loraplex.errors import EngineError
from loraplex.kernels.torch_ops import TorchBackend
from loraplex.kernels.triton.launch import Launcher, TritonLauncher

logger = logging.getLogger(__name__)


class TritonBackend(TorchBackend):
    """Triton kernels on one device."""

    name = "triton"
    _is_capturing = False

    def __init__(self, device: torch.device, launcher: Launcher | None = None) -> None:
        """`launcher`: how kernels are run; by default on the device. Raises ConfigError where Triton cannot run."""
        self.launcher = launcher or TritonLauncher(device)
        major, minor = self.launcher.target.capability
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "in the interpreter"
        self.description = f"triton sm_{major}{minor}, {where}"
        self.fallbacks: Counter[str] = Counter()
        """Calls that stock torch ran, by operator and reason."""

    def _fall_back(self, operator: str, reason: str) -> None:
        key = f"{operator}: {reason}"
        if self._is_capturing:
            raise EngineError(f"a CUDA graph cannot hold what stock torch runs: {key}")
        if not self.fallbacks[key]:
            logger.warning("stock torch runs %s", key)
        self.fallbacks[key] += 1

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False
