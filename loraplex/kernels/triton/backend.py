"""The GPU backend: Triton kernels, and stock torch (cuBLAS) for the products of the base model.

What a kernel does not cover goes to stock torch on the same device: logged once for each reason, and counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from loraplex.kernels.quantized_linear import QuantizedWeight, quantizations_of
from loraplex.kernels.torch_ops import TorchBackend
from loraplex.kernels.triton.launch import Launcher, TritonLauncher
from loraplex.kernels.triton.linear import quantized_linear

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
        self.fallbacks: Counter[str] = Counter()
        """Calls that stock torch ran, by operator and reason."""
        self.quantizations = quantizations_of(self.launcher.target.capability)

    def _fall_back(self, operator: str, reason: str) -> None:
        key = f"{operator}: {reason}"
        if not self.fallbacks[key]:
            logger.warning("stock torch runs %s", key)
        self.fallbacks[key] += 1

    # ------------------------------------------------------------------------------------------- weights of the base model

    def prepare_linear(self, weight: torch.Tensor, quantization: str | None = None) -> Any:
        if quantization is None:
            return super().prepare_linear(weight)
        return QuantizedWeight.of(weight, quantization)

    def linear_tensors(self, weight: torch.Tensor | QuantizedWeight) -> dict[str, torch.Tensor]:
        if isinstance(weight, QuantizedWeight):
            return {"q": weight.q, "scale": weight.scale}
        return super().linear_tensors(weight)

    def restore_linear(self, tensors: Mapping[str, torch.Tensor], shape: Sequence[int]) -> Any:
        if "q" in tensors:
            return QuantizedWeight(tensors["q"], tensors["scale"], *shape)
        return super().restore_linear(tensors, shape)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(weight, QuantizedWeight):
            return quantized_linear(self.launcher, x, weight, bias)
        return super().linear(x, weight, bias)
