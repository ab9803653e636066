"""The GPU backend: Triton kernels, and stock torch (cuBLAS) for the products of the base model.

What a kernel does not cover goes to stock torch on the same device: logged once for each reason, and counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

import torch

from loraplex.kernels.torch_ops import TorchBackend
from loraplex.kernels.triton.launch import Launcher, TritonLauncher

logger = logging.getLogger(__name__)


class TritonBackend(TorchBackend):
    """Triton kernels on one device."""

    name = "triton"

    def __init__(self, device: torch.device, launcher: Launcher | None = None) -> None:
        """`launcher`: how kernels are run; by default on the device. Raises ConfigError where Triton cannot run."""
        self.launcher = launcher or TritonLauncher(device)
        major, minor = self.launcher.target.capability
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "in the interpreter"
        self.description = f"triton sm_{major}{minor}, {where}"
        self._fallbacks: Counter[str] = Counter()

    @property
    def fallbacks(self) -> Mapping[str, int]:
        return self._fallbacks

    def _fall_back(self, operator: str, reason: str) -> None:
        key = f"{operator}: {reason}"
        if not self._fallbacks[key]:
            logger.warning("stock torch runs %s", key)
        self._fallbacks[key] += 1
