"""The GPU backend: Triton kernels, and stock torch (cuBLAS) for the products of the base model.

What a kernel does not cover goes to stock torch on the same device: logged once for each reason, and counted.
"""

from __future__ import annotations

import logging
from collections import Counter

import torch

from loraplex.kernels.plan import AttentionPlan
from loraplex.kernels.torch_ops import TorchBackend
from loraplex.kernels.triton import attention, glue
from loraplex.kernels.triton.attention import AttentionWorkspace
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
        self._attention_workspace = AttentionWorkspace()

    @property
    def workspace_nbytes(self) -> int:
        return self._attention_workspace.nbytes

    def release_workspace(self) -> int:
        return self._attention_workspace.release()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        reason = glue.rms_norm_gap(x, weight)
        if reason is None:
            return glue.rms_norm(self.launcher, x, weight, eps)
        self._fall_back("rms_norm", reason)
        return super().rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        reason = glue.add_rms_norm_gap(x, residual, weight)
        if reason is None:
            return glue.add_rms_norm(self.launcher, x, residual, weight, eps)
        self._fall_back("add_rms_norm", reason)
        return super().add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        reason = glue.silu_mul_gap(gate_up)
        if reason is None:
            return glue.silu_mul(self.launcher, gate_up)
        self._fall_back("silu_mul", reason)
        return super().silu_mul(gate_up)

    def rotary_write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_layer: torch.Tensor,
        kv_slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        reason = glue.rotary_write_kv_gap(q, k, v, cos, sin, kv_layer)
        if reason is None:
            return glue.rotary_write_kv(self.launcher, q, k, v, cos, sin, kv_layer, kv_slot_mapping)
        self._fall_back("rotary_write_kv", reason)
        return super().rotary_write_kv(q, k, v, cos, sin, kv_layer, kv_slot_mapping)

    def paged_attention(
        self, q: torch.Tensor, kv_layer: torch.Tensor, plan: AttentionPlan, scale: float, sliding_window: int | None
    ) -> torch.Tensor:
        reason = attention.paged_attention_gap(q, kv_layer)
        if reason is None:
            workspace = self._attention_workspace
            return attention.paged_attention(self.launcher, q, kv_layer, plan, scale, sliding_window, workspace)
        self._fall_back("paged_attention", reason)
        return super().paged_attention(q, kv_layer, plan, scale, sliding_window)

    def _fall_back(self, operator: str, reason: str) -> None:
        key = f"{operator}: {reason}"
        if not self.fallbacks[key]:
            logger.warning("stock torch runs %s", key)
        self.fallbacks[key] += 1
