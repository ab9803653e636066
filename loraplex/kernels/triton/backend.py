"""The GPU backend: Triton kernels, and stock torch (cuBLAS) for the products of the base model.

What a kernel does not cover goes to stock torch on the same device: logged once for each reason, and counted.
"""

from __future__ import annotations

import logging
from collections import Counter

import torch

from loraplex.kernels.token_ranking import WeightRule
from loraplex.kernels.torch_ops import TorchBackend
from loraplex.kernels.triton import nucleus
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
        self.fallbacks: Counter[str] = Counter()
        """Calls that stock torch ran, by operator and reason."""

    def _fall_back(self, operator: str, reason: str) -> None:
        key = f"{operator}: {reason}"
        if not self.fallbacks[key]:
            logger.warning("stock torch runs %s", key)
        self.fallbacks[key] += 1

    def keep_nucleus(
        self, logits: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor, rule: WeightRule
    ) -> torch.Tensor:
        gap = nucleus.keep_nucleus_gap(logits, weights)
        if gap is not None:
            self._fall_back("keep_nucleus", gap)
            return super().keep_nucleus(logits, weights, wanted, rule)
        return nucleus.keep_nucleus(self.launcher, logits, weights, wanted)
